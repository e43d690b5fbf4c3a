// What waits, in the order it will be looked at, and why.

import { h, put, refresh, say } from "../dom.js";
import { keyed } from "../rows.js";
import { get } from "../api.js";
import { listen } from "../live.js";
import { icon, stateBadge } from "../icons.js";
import { ago, capital, isNumber, plural } from "../format.js";
import { cancel } from "../actions.js";
import { emptyState, errorState, skeleton } from "../dialogs.js";
import { title, whyWaits } from "../runparts.js";
import { runLink } from "../router.js";
import { mayChange } from "../me.js";

const AGAIN_MS = 10000;

export function queueView(place) {
  const list = h("div", { class: "queue" }), items = h("ol", { class: "card" }), arrange = keyed(items, (run) => run.run, item);
  let closed = false;
  put(place, h("header", { class: "head" }, h("h1", null, "Queue"), h("a", { class: "button submits", href: "#/submit" }, icon("plus"), "Submit a run")), list);
  put(list, skeleton(3));

  async function load() {
    try {
      const { queue } = await get("/api/queue");
      if (!closed && !list.contains(document.querySelector("dialog[open]"))) draw(queue);
    } catch (error) {
      if (!closed) put(list, errorState(error, load));
    }
  }

  function draw(queue) {
    arrange(queue);
    if (!queue.length) put(list, emptyState("Nothing waits", "Runs that do not fit yet are listed here, each with its reason.", "ringctl submit --world 2"));
    else if (!items.isConnected) put(list, items);
  }

  function item({ run: id }) {
    const place = h("span", { class: "place", "aria-hidden": "true" }), name = h("a", { class: "name", href: runLink(id) });
    const about = h("span", { class: "soft small" }), reason = h("span", { class: "reason" }), side = h("div", { class: "side" });
    const update = (run, at) => {
      const may = run.state === "queued" && mayChange(run);
      say(place, at + 1);
      say(name, title(run));
      say(about, [run.user, plural(run.world, "rank"), isNumber(run.submitted) ? `submitted ${ago(run.submitted)}` : "", run.priority ? `priority ${run.priority}` : "",
        run.after ? `after ${run.after}` : ""].filter(Boolean).join(" · "));
      say(reason, run.waiting ? capital(whyWaits(run)) : run.state === "queued" ? "Next" : "");
      refresh(side, [title(run), run.state, may], () => [stateBadge(run.state),
        may ? h("button", { type: "button", class: "quiet danger", "aria-label": `Cancel ${title(run)}`, onclick: () => cancel(run, load) }, "Cancel") : h("span")]);
    };
    return { element: h("li", { "data-item": "" }, place, h("div", { class: "grow" }, name, about, reason), side), update };
  }

  load();
  listen("/api/stream", {}, { runs: load });
  const timer = setInterval(() => { if (!document.hidden) load(); }, AGAIN_MS);
  return { close: () => { closed = true; clearInterval(timer); }, title: "Queue" };
}
