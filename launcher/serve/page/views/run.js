// One run: how far it is, its curves, who is slow, the ring, and everything else that is known of it.

import { entitle, h, put, say, refresh, paced } from "../dom.js";
import { get, runPath } from "../api.js";
import { listen } from "../live.js";
import { icon, stateBadge } from "../icons.js";
import { capital, duration, figure, isActive, isNumber, milliseconds, percent, stateOf } from "../format.js";
import { Measured, average } from "../series.js";
import { progress, ranksAndHosts, times, title, whyWaits } from "../runparts.js";
import { announce, emptyState, errorState, skeleton } from "../dialogs.js";
import { LogView, logLine } from "../log.js";
import { note } from "../router.js";
import { Curves } from "../curves.js";
import { TimeBars } from "../bars.js";
import { Ring } from "../ring.js";
import { actionsOf } from "../actions.js";
import { ranksTab, preflightTab, planTab, checkpointsTab, attemptsTab } from "../tabs.js";

const TABS = [["overview", "Overview"], ["log", "Log"], ["ranks", "Ranks"], ["preflight", "Preflight"], ["plan", "Plan"], ["checkpoints", "Checkpoints"], ["attempts", "Attempts"]];
const OF_LOG = ["line", "rank", "host", "stream", "search"]; // what its address says of the log
const PACE_MS = 200; // between drawings, with few ranks
const CLOCK_MS = 1000;
const LATEST = 8; // lines below the bars
const FEW = 5000; // events that are caught up with rather than passed over

export function runView(place, { run: id, query }) {
  const measured = new Measured();
  const parts = { head: h("header", { class: "runhead" }), banner: h("div", { class: "banners" }), stats: h("dl", { class: "stats" }), panel: h("div", { class: "panel", role: "tabpanel", id: "panel", tabindex: "-1" }), status: h("p", { class: "unseen", role: "status" }) };
  let run = null, tab = TABS.some(([name]) => name === query.tab) ? query.tab : "overview", shown = null, closed = false, follows = false, latest = [], seen = 0;

  const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "About this run" }, TABS.map(([name, word]) => h("button", {
    type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "panel", "aria-selected": String(name === tab), tabindex: name === tab ? "0" : "-1", onclick: () => open(name), onkeydown: arrows }, word)));
  put(place, skeleton(1, "title"), skeleton(3, "tile"));

  // --- what is shown ---

  function open(name, more = {}) {
    tab = name;
    shown?.close?.();
    for (const one of tabs.children) {
      one.setAttribute("aria-selected", String(one.id === `tab-${name}`));
      one.tabIndex = one.id === `tab-${name}` ? 0 : -1;
    }
    parts.panel.setAttribute("aria-labelledby", `tab-${name}`);
    note({ tab: name === "overview" ? "" : name, ...Object.fromEntries(OF_LOG.map((one) => [one, more[one] ?? ""])) });
    shown = panels[name](more);
    put(parts.panel, h("h2", { class: "unseen" }, TABS.find(([one]) => one === name)[1]), shown.element);
    tabs.querySelector(`#tab-${name}`).scrollIntoView?.({ block: "nearest", inline: "nearest" });
  }

  function arrows(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const at = TABS.findIndex(([name]) => name === tab), next = TABS[(at + by + TABS.length) % TABS.length][0];
    open(next);
    tabs.querySelector(`#tab-${next}`).focus();
  }

  const panels = {
    overview: () => overview(),
    log: (more) => new LogView(id, run.ranks ?? [], more),
    ranks: () => ranksTab(run, (rank) => open("log", { rank: String(rank) })),
    preflight: () => preflightTab(run),
    plan: () => planTab(run),
    checkpoints: () => checkpointsTab(run),
    attempts: () => attemptsTab(run),
  };

  function overview() {
    const curves = new Curves(), bars = new TimeBars(), ring = new Ring();
    const hostOf = (rank) => run.ranks?.find((one) => one.rank === rank)?.host ?? "";
    const measuredAgain = () => { curves.draw(measured); bars.draw(measured.recent(), hostOf); };
    const update = () => ring.draw(run), lines = h("ol");
    const take = () => put(lines, latest.map(logLine));
    const tail = h("section", { class: "card latest", "aria-label": "Latest lines" }, h("header", null, h("h3", null, "Latest lines"), h("button", { type: "button", class: "textlink small", onclick: () => open("log") }, "Open the log")), lines);
    measuredAgain();
    update();
    take();
    return { element: h("div", { class: "overview" }, curves.element, h("div", { class: "pair" }, h("div", null, bars.element, tail), ring.element)), update, measured: measuredAgain, said: paced(take, () => PACE_MS) };
  }

  const drawMeasured = paced(() => { shown?.measured?.(); statistics(); }, () => PACE_MS);

  const about = h("div"), buttons = h("div", { class: "actions" }), far = h("div", { class: "far" });
  put(parts.head, h("a", { class: "back", href: "#/runs" }, "← Runs"), about, buttons, far);

  function drawRun() {
    refresh(about, [run.run, run.name, run.state, run.user, run.world, run.hosts, run.attempt, run.watched], heading);
    say(about.querySelector("time"), times(run));
    refresh(buttons, [run.run, run.name, run.state, run.user, run.world, run.actions], () => actionsOf(run, changed));
    refresh(far, [run.state, run.step, run.steps, run.left_s], () => (run.state === "queued" || run.state === "cancelled" ? null : progress(run)));
    refresh(parts.banner, [run.cause, run.error, run.fix, run.state, run.waiting && whyWaits(run)], banners);
    statistics();
    shown?.update?.(run);
  }

  function heading() {
    const attempt = run.attempt > 1 ? ` · attempt ${run.attempt}` : "", watched = run.watched ? ` · ${run.watched}` : "";
    return [
      h("div", { class: "titleline" }, h("h1", null, title(run)), stateBadge(run.state)),
      h("p", { class: "soft" }, run.name ? `${run.run} · ` : "", run.user ? `${run.user} · ` : "", ranksAndHosts(run), " · ", h("time", null, times(run)), attempt, watched),
    ];
  }

  function banners() {
    const found = [];
    if (run.state === "queued") found.push(h("div", { class: "banner" }, icon("queued"), h("div", null, h("strong", null, run.waiting ? capital(whyWaits(run)) : "It is next."), h("p", null, "It starts by itself when its turn comes. ", h("a", { href: "#/queue" }, "See the queue")))));
    const text = run.cause?.text ?? run.error, fix = run.cause?.fix || run.fix;
    if (text && run.state !== "succeeded") {
      const where = isNumber(run.cause?.rank) ? h("p", null, h("button", { type: "button", class: "textlink", onclick: () => open("log", { rank: String(run.cause.rank) }) }, `Log of rank ${run.cause.rank}`)) : null;
      found.push(h("div", { class: `banner ${isActive(run.state) ? "warn" : "bad"}`, id: "cause" }, icon(isActive(run.state) ? "warn" : "failed"),
        h("div", null, h("strong", null, capital(text)), isActive(run.state) ? h("p", null, "An earlier attempt ended so; it goes on.") : null,
          fix ? h("p", { class: "fixline" }, fix) : null, where)));
    }
    return found;
  }

  function statistics() {
    const ranks = run.ranks ?? [], recent = measured.recent(), all = (key) => ranks.map((rank) => rank[key]).filter(isNumber);
    const step = average(recent.length ? recent.map((one) => one.step_ms) : all("step_ms"));
    const comm = average(recent.length ? recent.map((one) => one.comm_ms) : all("comm_ms"));
    const loss = (isActive(run.state) ? average(all("loss")) : null) ?? run.loss; // meanwhile of all ranks, as the curve has it
    const made = [
      ["Loss", isNumber(loss) ? figure(loss, 4) : null],
      ["Accuracy", isNumber(run.accuracy) ? percent(run.accuracy) : null],
      ["Throughput", isNumber(run.samples_per_s) ? `${figure(run.samples_per_s, 4)}` : null, "samples/s"],
      ["Step", isNumber(step) ? milliseconds(step) : null, isNumber(comm) && step > 0 ? `${Math.round((100 * comm) / step)}% comm.` : ""],
      ["Epoch", isNumber(run.epoch) && isNumber(run.epochs) ? `${run.epoch} of ${run.epochs}` : null],
      isActive(run.state) ? ["Left", isNumber(run.left_s) ? duration(run.left_s) : null] : ["Took", isNumber(run.ended) && isNumber(run.started) ? duration(run.ended - run.started) : null],
    ].filter(([, value]) => value !== null);
    parts.stats.hidden = made.length === 0;
    refresh(parts.stats, made, () => made.map(([name, value, unit]) => h("div", null, h("dt", null, name), h("dd", null, value, unit ? h("small", null, unit) : null))));
  }

  // --- what comes in ---

  async function start() {
    try {
      const [detail, log, metrics] = [await get(runPath(id)), await get(runPath(id, "/log"), { limit: LATEST }), await get(runPath(id, "/metrics"), { points: 400 })];
      if (closed) return;
      run = detail;
      measured.load(metrics);
      latest = log.lines;
      entitle(title(run));
      put(place, parts.head, parts.banner, parts.stats, tabs, parts.panel, parts.status);
      open(tab, query);
      drawRun();
      attach(log.last ?? 0); // the metrics were asked for after it
    } catch (error) {
      if (closed) return;
      put(place, error.status === 404 ? emptyState("There is no such run", id, "", h("a", { class: "button", href: "#/runs" }, "All runs")) : errorState(error, start));
      listen("/api/stream", {}, {});
    }
  }

  /** Also while somebody may be about to start it again, unless its stream has ended for all that. */
  const goesOn = (ended) => isActive(run.state) || run.state === "queued" || (Boolean(run.watched) && !ended);

  /** While it goes on, everything of it; afterwards only whether it begins again. */
  function attach(after, on = goesOn()) {
    follows = on;
    seen = after;
    if (!follows) return listen("/api/stream", {}, { runs: (rows) => rows.some((row) => row.run === id && row.state !== run.state) && changed() });
    return listen(runPath(id, "/stream"), { after }, {
      lines: (lines) => {
        seen = lines[lines.length - 1][0];
        latest = [...latest, ...lines.filter((line) => line[0] > (latest[latest.length - 1]?.[0] ?? 0)).slice(-LATEST)].slice(-LATEST);
        shown?.take?.(lines);
        shown?.said?.();
      },
      metrics: (metrics) => measured.add(metrics) && drawMeasured(),
      run: (detail) => take(detail),
      end: () => changed(true),
      skip: ({ slow }) => goOn(slow),
    });
  }

  /** With the newest, after nobody has looked, or when more came than this browser can take: the log has all. */
  async function goOn(slow) {
    try {
      const [log, metrics] = [await get(runPath(id, "/log"), { limit: LATEST }), await get(runPath(id, "/metrics"), { points: 400 })];
      if (closed) return;
      const missed = (log.last ?? 0) - seen;
      if (missed <= FEW) return attach(seen);
      measured.load(metrics);
      latest = log.lines;
      shown?.passOver?.(slow ? missed : 0);
      shown?.said?.();
      drawMeasured();
      attach(log.last);
    } catch {
      if (!closed) attach(seen);
    }
  }

  function take(detail) {
    if (closed) return;
    if (run.state !== detail.state) {
      say(parts.status, `${title(detail)} is ${stateOf(detail.state).word.toLowerCase()}${detail.error ? `: ${detail.error}` : ""}`);
    }
    const begun = run.attempt !== detail.attempt || run.state !== detail.state;
    run = { ...run, ...detail };
    drawRun();
    if (begun && !("plan" in detail)) whole();
  }

  /** What the stream leaves out because it is the same for all of an attempt: plan, preflight, links. */
  async function whole() {
    try {
      const detail = await get(runPath(id));
      if (closed) return;
      run = detail;
      drawRun();
    } catch (error) {
      if (!closed) announce(error.message, { bad: true, fix: error.fix });
    }
  }

  /** Asks anew, after something was done or the stream has ended. */
  async function changed(ended = false) {
    try {
      take(await get(runPath(id)));
      const on = goesOn(ended);
      if (follows !== on) {
        const metrics = await get(runPath(id, "/metrics"), { points: 400 });
        if (closed) return;
        measured.load(metrics);
        drawMeasured();
        attach(seen, on);
      }
    } catch (error) {
      if (!closed) announce(error.message, { bad: true, fix: error.fix });
    }
  }

  start();
  const ticking = setInterval(() => { if (run && !closed) drawRun(); }, CLOCK_MS);
  return { close: () => { closed = true; shown?.close?.(); drawMeasured.cancel(); clearInterval(ticking); }, title: id };
}
