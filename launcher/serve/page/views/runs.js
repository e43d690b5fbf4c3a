// The first screen: what runs, what waits, and every other run, each newest first.

import { h, put, refresh, say } from "../dom.js";
import { keyed } from "../rows.js";
import { get } from "../api.js";
import { listen } from "../live.js";
import { icon, stateBadge } from "../icons.js";
import { capital, figure, isActive, isNumber, percent, plural } from "../format.js";
import { sparkline } from "../charts.js";
import { progress, ranksAndHosts, times, title, whyWaits } from "../runparts.js";
import { announce, emptyState, errorState, skeleton } from "../dialogs.js";
import { link, note, runLink } from "../router.js";
import { MOST } from "./compare.js";

const PAGE = 50;
const MOST_ROWS = 1000; // that the service tells at once
const FIRST = ["running,starting", "queued"]; // shown before all others, however many of those are newer
const MOST_FIRST = 200;
const TYPING_MS = 250;
const TICK_MS = 10000;
export const FILTERS = [
  ["", "All"], ["running,starting", "Active"], ["queued", "Queued"], ["succeeded", "Succeeded"], ["failed,lost", "Failed"], ["stopped,cancelled", "Stopped"],
];

/** What runs, what waits for its turn, and the rest. */
const LAST = 2, group = (run) => (isActive(run.state) ? 0 : run.state === "queued" ? 1 : LAST);

export function runsView(place, { query }) {
  const view = { state: query.state ?? "", search: query.search ?? "", runs: new Map(), next: null, last: 0, listed: 0, chosen: new Set(), asked: null, news: null };
  const list = h("div", { class: "runlist" }), foot = h("div", { class: "foot" }), status = h("p", { class: "unseen", role: "status" });
  const compare = h("a", { class: "button primary comparebar", hidden: true });
  const body = h("tbody", { role: "rowgroup" }), table = frame(body), arrange = keyed(body, (run) => run.run, row);
  let typing = 0, opened = false;

  const chips = h("div", { class: "chips", role: "group", "aria-label": "State" }, FILTERS.map(([value, word]) => h("button", {
    type: "button", "aria-pressed": String(value === view.state), onclick: (event) => {
      view.state = value;
      for (const chip of chips.children) chip.setAttribute("aria-pressed", String(chip === event.currentTarget));
      note({ state: value });
      load();
    } }, word)));
  const search = h("input", { type: "search", value: view.search, placeholder: "Search name, id, user, host", "aria-label": "Search runs", "data-search": "", oninput: () => {
    clearTimeout(typing);
    typing = setTimeout(() => { view.search = search.value.trim(); note({ search: view.search }); load(); }, TYPING_MS);
  } });

  put(place, h("header", { class: "head" }, h("h1", null, "Runs"), h("div", { class: "searchbox" }, icon("search"), search)), chips, list, foot, compare, status);

  async function load(count = PAGE) {
    const mine = (view.asked = {}), news = (view.news = []);
    view.failed = false;
    view.next = null;
    for (const run of view.runs.values()) if (!belongs(run)) view.runs.delete(run.run);
    if (view.runs.size) draw(); else empty(skeleton(5));
    try {
      const ask = (limit, state) => get("/api/runs", { limit, state, search: view.search });
      const [newest, ...first] = await Promise.all([ask(count, view.state), ...(view.state ? [] : FIRST.map((state) => ask(MOST_FIRST, state)))]);
      if (view.asked !== mine) return;
      view.runs = new Map(first.flatMap((answer) => answer.runs).map((run) => [run.run, run]));
      view.listed = 0;
      view.news = null;
      add(newest);
      for (const tell of news) tell(); // it came while this was on its way, and may be newer
    } catch (error) {
      if (view.asked !== mine) return;
      view.failed = true;
      view.news = null;
      view.runs.clear();
      empty(errorState(error, () => load()));
    }
  }

  async function more() {
    const mine = view.asked;
    try {
      const answer = await get("/api/runs", { limit: PAGE, state: view.state, search: view.search, before: view.next });
      if (view.asked !== mine) return; // something else is asked for by now
      add(answer);
    } catch (error) {
      if (view.asked === mine) announce(error.message, { bad: true, fix: error.fix });
    }
  }

  function add(answer) {
    for (const run of answer.runs) view.runs.set(run.run, run);
    view.listed += answer.runs.length;
    view.next = answer.next;
    view.last = answer.runs.at(-1)?.place ?? 0;
    draw();
  }

  /** Shows this where the runs were. */
  function empty(instead) {
    put(list, instead);
    put(foot);
  }

  /** Rows that changed, as the stream tells. */
  function changed(runs) {
    if (view.failed) return load();
    view.news?.push(() => changed(runs));
    for (const run of runs) {
      const before = view.runs.get(run.run);
      if (before && before.state !== run.state) say(status, `${title(run)} is ${run.state}`);
      if (belongs(run)) view.runs.set(run.run, run); else view.runs.delete(run.run);
    }
    return draw();
  }

  /** Runs that are forgotten by now. */
  function gone(names) {
    if (view.failed) return;
    view.news?.push(() => gone(names));
    for (const name of names) {
      view.runs.delete(name);
      choose(name, false);
    }
    draw();
  }

  function belongs(run) {
    if (view.state && !view.state.split(",").includes(run.state)) return false;
    const text = [run.run, run.name, run.user, run.state, run.error, ...(run.hosts ?? []), ...(run.command ?? [])].join("\n").toLowerCase();
    if (!view.search.toLowerCase().split(/\s+/).every((word) => text.includes(word))) return false;
    return view.runs.has(run.run) || !view.next || group(run) < LAST || run.place > view.last;
  }

  function draw() {
    const runs = [...view.runs.values()].sort((a, b) => group(a) - group(b) || b.place - a.place), filtered = Boolean(view.state || view.search);
    arrange(runs);
    refresh(list, runs.length ? "runs" : filtered, () => (runs.length ? table : nothing(filtered)));
    refresh(foot, Boolean(view.next), () => (view.next ? h("button", { type: "button", onclick: more }, "Show older runs") : null));
  }

  function nothing(filtered) {
    return filtered
      ? emptyState("No run matches", "Try another state or fewer letters.", "", h("button", { type: "button", onclick: clear }, "Show all"))
      : emptyState("No runs yet", "Hand in the first one here, or in a terminal:", "ringctl submit --world 2", h("a", { class: "button primary submits", href: "#/submit" }, "Submit a run"));
  }

  function clear() {
    view.state = view.search = search.value = "";
    for (const chip of chips.children) chip.setAttribute("aria-pressed", String(chip === chips.firstChild));
    note({ state: "", search: "" });
    load();
  }

  function row({ run: id }) {
    const cell = (kind, ...inside) => h("td", { role: "cell", class: kind }, inside);
    const name = h("a", { class: "name", href: runLink(id) }), about = h("div");
    const where = cell("where"), far = cell("far"), loss = cell("loss"), who = cell("who"), tick = cell("tick");
    const element = h("tr", { role: "row", "data-item": "" }, where, cell("what", name, about), far, loss, who, tick);
    const update = (run) => {
      element.className = run.state;
      refresh(where, run.state, () => stateBadge(run.state));
      say(name, title(run));
      refresh(about, [run.name, run.state, run.attempt, run.error, run.waiting && whyWaits(run)], () => aboutRun(run));
      say(about.querySelector("time"), times(run));
      refresh(far, [title(run), run.state, run.step, run.steps, run.left_s], () => (run.state === "queued" || run.state === "cancelled" ? null : progress(run)));
      refresh(loss, [run.spark, run.loss, run.accuracy], () => lossOf(run));
      refresh(who, [run.user, run.world, run.hosts], () => [h("span", null, run.user || "–"), h("span", { class: "soft small" }, ranksAndHosts(run))]);
      refresh(tick, title(run), () => h("input", { type: "checkbox", checked: view.chosen.has(id), "data-choose": "", "aria-label": `Compare ${title(run)}`, onchange: (event) => choose(id, event.target.checked) }));
    };
    return { element, update };
  }

  function choose(run, on) {
    if (on) view.chosen.add(run); else view.chosen.delete(run);
    compare.hidden = view.chosen.size === 0;
    compare.setAttribute("href", link("compare", { runs: [...view.chosen].join(",") }));
    const { size } = view.chosen, many = size > MOST ? `${MOST} of ${plural(size, "run")}` : plural(size, "run");
    say(compare, size < 2 ? "Choose another to compare" : `Compare ${many}`);
  }

  load();
  // Whoever was away has missed how runs ended that are not on the first screen any more.
  const again = () => { if (opened) load(Math.min(MOST_ROWS, Math.max(PAGE, view.listed))); opened = true; };
  listen("/api/stream", {}, { runs: changed, gone, open: again });
  const tick = setInterval(() => { if (view.runs.size) draw(); }, TICK_MS);
  return { close: () => { clearInterval(tick); clearTimeout(typing); view.asked = null; }, title: "Runs" };
}

function frame(body) {
  const heads = ["State", "Run", "Progress", "Loss", "Who and where", "Compare"];
  return h("table", { class: "runs", role: "table", "aria-label": "Runs" },
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads.map((one) => h("th", { scope: "col", role: "columnheader", class: one === "Compare" ? "tick" : null }, one === "Compare" ? h("span", { class: "unseen" }, one) : one)))), body);
}

function aboutRun(run) {
  return [
    h("span", { class: "soft small id" }, run.name ? `${run.run} · ` : "", h("time", null, times(run)), run.attempt > 1 ? ` · attempt\u00a0${run.attempt}` : ""),
    run.error && run.state !== "succeeded" ? h("span", { class: `reason${isActive(run.state) ? "" : " bad"}` }, isActive(run.state) ? `Goes on after: ${run.error}` : capital(run.error)) : null,
    run.waiting && run.state === "queued" ? h("span", { class: "reason" }, capital(whyWaits(run))) : null,
  ];
}

function lossOf(run) {
  return [
    sparkline(run.spark, "Loss"), isNumber(run.loss) ? h("span", { class: "value" }, figure(run.loss, 3)) : null,
    isNumber(run.accuracy) ? h("span", { class: "soft small" }, percent(run.accuracy)) : null,
  ];
}
