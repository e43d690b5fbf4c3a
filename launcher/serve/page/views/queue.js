// What waits, in the order it will be looked at, and why.

import { h, put } from "../dom.js";
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
  const list = h("div", { class: "queue" });
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
    const focused = list.contains(document.activeElement) ? document.activeElement.closest("[data-run]")?.dataset.run : null;
    put(list, queue.length ? h("ol", { class: "card" }, queue.map((run, at) => h("li", { "data-item": "", "data-run": run.run },
      h("span", { class: "place", "aria-hidden": "true" }, at + 1),
      h("div", { class: "grow" }, h("a", { class: "name", href: runLink(run.run) }, title(run)),
        h("span", { class: "soft small" }, [run.user, plural(run.world, "rank"), isNumber(run.submitted) ? `submitted ${ago(run.submitted)}` : "", run.priority ? `priority ${run.priority}` : "",
          run.after ? `after ${run.after}` : ""].filter(Boolean).join(" · ")),
        h("span", { class: "reason" }, run.waiting ? capital(whyWaits(run)) : run.state === "queued" ? "Next" : "")),
      stateBadge(run.state),
      run.state === "queued" && mayChange(run) ? h("button", { type: "button", class: "quiet danger", "aria-label": `Cancel ${title(run)}`, onclick: () => cancel(run, load) }, "Cancel") : h("span"))))
      : emptyState("Nothing waits", "Runs that do not fit yet are listed here, each with its reason.", "ringctl submit --world 2"));
    if (focused) [...list.querySelectorAll("[data-run]")].find((item) => item.dataset.run === focused)?.querySelector("a").focus();
  }

  load();
  listen("/api/stream", {}, { runs: load });
  const timer = setInterval(() => { if (!document.hidden) load(); }, AGAIN_MS);
  return { close: () => { closed = true; clearInterval(timer); }, title: "Queue" };
}
