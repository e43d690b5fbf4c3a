// The hosts: how many slots are free, what runs, how busy they are, and what the last preflight found.

import { h, put, refresh, say, set } from "../dom.js";
import { keyed } from "../rows.js";
import { get, post } from "../api.js";
import { listen } from "../live.js";
import { icon } from "../icons.js";
import { ago, capital, figure, isNumber, NOTHING, plural, sized } from "../format.js";
import { announce, emptyState, errorState, skeleton } from "../dialogs.js";
import { preflightParts, whenFound } from "../matrix.js";
import { runLink } from "../router.js";

const AGAIN_MS = 5000;
const FULL = 0.9;
const MOST_BOXES = 16;

export function hostsView(place) {
  const cards = h("div", { class: "hosts" }), found = h("div"), total = h("p", { class: "soft" });
  const button = h("button", { type: "button", id: "preflight", class: "submits", onclick: check }, "Run preflight");
  const names = new Map(); // of runs, as far as the stream has told
  const arrange = keyed(cards, (host) => host.name, () => card(names));
  let closed = false, checked = null, waits = 0, shown = null;
  put(place, h("header", { class: "head" }, h("div", null, h("h1", null, "Hosts"), total)), cards,
    h("section", { class: "card pad preflight" }, h("header", { class: "head" }, h("h2", null, "Preflight"), button), found));
  put(cards, skeleton(2, "tile"));

  async function load() {
    try {
      show((await get("/api/hosts")).hosts);
    } catch (error) {
      if (!closed && !cards.querySelector(".host")) put(cards, errorState(error, load));
    }
  }

  function show(hosts) {
    if (closed) return;
    const sum = (key) => hosts.reduce((all, host) => all + (host[key] ?? 0), 0);
    put(total, hosts.length ? `${sum("free")} of ${plural(sum("slots"), "slot")} free on ${plural(hosts.length, "host")}` : "");
    shown = hosts;
    arrange(hosts);
    if (!hosts.length) put(cards, emptyState("No hosts", "The service has an inventory of its own:", "ringctl serve --hosts hosts.yaml"));
  }

  async function loadChecked() {
    try {
      const now = await get("/api/preflight");
      if (closed) return;
      if (now?.time !== checked?.time) {
        waits = 0;
        button.disabled = false;
        say(button, "Run preflight");
      }
      checked = now;
      refresh(found, now, () => (now ? preflightParts(now) : emptyState("Not checked yet", "Preflight looks at every host and every link, and starts nothing.")));
      if (now) say(found.querySelector(".verdict .soft"), whenFound(now));
    } catch (error) {
      if (!closed) put(found, errorState(error, loadChecked));
    }
  }

  async function check() {
    button.disabled = true;
    say(button, "Checking…");
    waits = 1;
    try {
      await post("/api/preflight");
      announce("Preflight has begun");
    } catch (error) {
      button.disabled = false;
      say(button, "Run preflight");
      announce(error.message, { bad: true, fix: error.fix });
    }
  }

  load();
  loadChecked();
  const named = (runs) => {
    for (const run of runs) names.set(run.run, run.name || run.run);
    if (shown) show(shown);
  };
  listen("/api/stream", {}, { runs: named, hosts: (data) => { if (Array.isArray(data)) show(data); else load(); } });
  const timer = setInterval(() => { if (!document.hidden) { load(); loadChecked(); } }, AGAIN_MS);
  return { close: () => { closed = true; clearInterval(timer); }, title: "Hosts" };
}

function card(names) {
  const head = h("header"), problem = h("p", { class: "reason bad" }), slots = h("div", { class: "slots", role: "img" }), uses = h("ul", { class: "uses" });
  const idle = h("p", { class: "soft small" }, "Nothing runs here."), meters = h("dl", { class: "meters" }), seen = h("p", { class: "soft small seen" });
  const element = h("article", { "data-item": "", tabindex: "-1" }, head, problem, slots, uses, idle, meters, seen), arrange = keyed(uses, (run) => run.run, (run) => use(run, names));
  const update = (host) => {
    element.className = `card host${host.error ? " away" : ""}`;
    refresh(head, [host.name, host.address, host.error, host.free, host.slots], () => heading(host));
    problem.hidden = !host.error;
    refresh(problem, [host.error], () => (host.error ? [icon("failed"), capital(host.error)] : null));
    set(slots, "aria-label", `${host.taken} of ${host.slots} slots taken`);
    refresh(slots, [host.taken, host.slots], () => boxes(host.taken, host.slots).map((taken) => h("i", { class: taken ? "taken" : "" })));
    arrange(host.runs ?? []);
    uses.hidden = !host.runs?.length;
    idle.hidden = !uses.hidden;
    refresh(meters, [host.load, host.cores, host.memory_free, host.memory_total, host.disk_free, host.disk_total], () => metersOf(host));
    say(seen, isNumber(host.seen) ? `heard ${ago(host.seen)}` : "not heard yet");
  };
  return { element, update };
}

function heading(host) {
  return [h("h2", null, host.name), h("span", { class: "soft small" }, host.address || "this machine"),
    h("span", { class: `free ${host.free > 0 ? "good" : "off"}` }, host.error ? "away" : `${host.free} of ${host.slots} free`)];
}

/** A run on a host's card. */
function use({ run: id }, names) {
  const name = h("a", { href: runLink(id), title: id }), whose = h("span", { class: "soft small" });
  return { element: h("li", null, name, whose), update: (run) => {
    say(name, names.get(id) ?? id);
    say(whose, `${run.user || "?"}, ${plural(run.slots, "slot")}`);
  } };
}

function metersOf(host) {
  const load = host.load?.[0];
  return [meter("Load", load, host.cores, isNumber(load) ? `${figure(load, 2)} on ${plural(host.cores ?? 0, "core")}` : NOTHING),
    used("Memory", host.memory_free, host.memory_total), used("Disk", host.disk_free, host.disk_total)];
}

/** Which of the boxes are filled. Where there are more slots than boxes, all of them only if no slot is free, none only if all are. */
export function boxes(taken, slots) {
  const count = Math.min(slots, MOST_BOXES), share = Math.round((taken * count) / slots);
  const filled = taken >= slots ? count : taken > 0 ? Math.min(count - 1, Math.max(1, share)) : 0;
  return Array.from({ length: count }, (_, at) => at < filled);
}

function used(name, free, total) {
  const known = isNumber(free) && isNumber(total) && total > 0 && free >= 0;
  return meter(name, known ? total - free : null, total, known ? `${sized(free)} of ${sized(total)} free` : NOTHING);
}

function meter(name, value, most, text) {
  const share = isNumber(value) && most > 0 ? Math.min(1, value / most) : 0;
  return h("div", null, h("dt", null, name), h("dd", null, h("span", { class: `meter${share > FULL ? " full" : ""}`, "aria-hidden": "true" }, h("i", { vars: { "--share": share } })), h("span", { class: "small" }, text)));
}
