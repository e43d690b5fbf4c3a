// Where each rank's time goes: computing, or waiting for and talking to the others. Says who is slow.

import { h, svg, put, say } from "./dom.js";
import { milliseconds } from "./format.js";
import { median } from "./series.js";

const CLEARLY = 1.25; // so much longer than the rank in the middle is worth a word
const ROW = 24;

/** Which rank holds up the others, in a sentence; "" if none does. */
export function slowest(rows, hostOf) {
  if (rows.length < 2) return "";
  const compute = rows.map((row) => row.step_ms - row.comm_ms), middle = median(compute);
  const worst = compute.indexOf(Math.max(...compute));
  if (!(middle > 0) || compute[worst] < CLEARLY * middle) {
    const least = Math.min(...compute), even = !(middle > 0) || compute[worst] < CLEARLY * least;
    return even ? "All ranks compute for about as long: none holds up the others."
      : `No rank by itself holds up the others: they compute for ${milliseconds(least)} to ${milliseconds(compute[worst])} a step.`;
  }
  const times = (compute[worst] / middle).toFixed(1), host = hostOf(rows[worst].rank);
  return `Rank ${rows[worst].rank}${host ? ` on ${host}` : ""} computes ${times} times as long as the others, which wait for it.`;
}

export class TimeBars {
  constructor() {
    this.summary = h("p", { class: "summary" }, "Nothing measured yet");
    this.plot = h("div", { class: "bars" });
    this.legend = h("ul", { class: "legend" },
      h("li", null, h("i", { class: "block compute" }), "compute"), h("li", null, h("i", { class: "block comm" }), "communication"));
    this.element = h("figure", { class: "card chart timebars" }, h("figcaption", null, h("h3", null, "Time per step")), this.summary, this.plot, this.legend);
  }

  draw(rows, hostOf = () => "") {
    this.legend.hidden = rows.length === 0;
    if (!rows.length) return;
    const longest = Math.max(...rows.map((row) => row.step_ms)), told = slowest(rows, hostOf);
    say(this.summary, told || `${milliseconds(rows[0].step_ms)} a step, ${milliseconds(rows[0].comm_ms)} of it communication`);
    const worst = rows.reduce((a, b) => (b.step_ms - b.comm_ms > a.step_ms - a.comm_ms ? b : a)).rank;
    const slow = told.startsWith("Rank");
    put(this.plot, h("table", { class: `timings${rows.length > 16 ? " dense" : ""}` },
      h("caption", { class: "unseen" }, "Milliseconds per step of each rank"),
      h("thead", { class: "unseen" }, h("tr", null, ["Rank", "Split", "Compute", "Communication"].map((one) => h("th", { scope: "col" }, one)))),
      h("tbody", null, rows.map((row) => {
        const compute = row.step_ms - row.comm_ms, share = (value) => (100 * value) / longest;
        return h("tr", { class: slow && row.rank === worst ? "slow" : null },
          h("th", { scope: "row" }, `rank ${row.rank}`),
          h("td", { class: "picture" }, svg("svg", { viewBox: `0 0 100 ${ROW}`, preserveAspectRatio: "none", "aria-hidden": "true" },
            svg("rect", { class: "compute", x: 0, y: 4, width: share(compute), height: ROW - 8 }),
            svg("rect", { class: "comm", x: share(compute) + 0.4, y: 4, width: Math.max(0, share(row.comm_ms) - 0.4), height: ROW - 8 }))),
          h("td", { class: "number" }, milliseconds(compute)), h("td", { class: "number soft" }, `+ ${milliseconds(row.comm_ms)}`));
      }))));
  }
}
