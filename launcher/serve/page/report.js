// Draws the curves of a report from the data that is in the same file.

import { h, put } from "./dom.js";
import { stateBadge } from "./icons.js";
import { Measured } from "./series.js";
import { TimeBars } from "./bars.js";
import { Ring } from "./ring.js";
import { preflightParts } from "./matrix.js";
import { Curves } from "./curves.js";

const told = JSON.parse(document.getElementById("data").textContent);
const numbers = new Measured(told.metrics);

if (numbers.lists.size) {
  const drawn = new Curves();
  drawn.draw(numbers);
  put(document.getElementById("curves"), h("h2", { class: "unseen" }, "Curves"), drawn.element);
}
const sides = [];
if (numbers.recent().length) {
  const times = new TimeBars();
  times.draw(numbers.recent(), (rank) => told.run.ranks?.find((one) => one.rank === rank)?.host ?? "");
  sides.push(times.element);
}
if (told.run.ranks?.length > 1) {
  const round = new Ring();
  round.draw({ ...told.run, state: "succeeded" }); // a file stands still
  sides.push(round.element);
}
put(document.getElementById("pair"), sides.length ? h("h2", { class: "unseen" }, "Ranks and links") : null, sides);
if (told.run.preflight) {
  const place = document.getElementById("preflight");
  put(place.lastElementChild, h("div", null, preflightParts(told.run.preflight)));
  place.hidden = false;
}
for (const one of document.querySelectorAll("[data-badge]")) put(one, stateBadge(one.dataset.badge));
