// Runs beside each other: their curves in one chart, and in which options and results they differ.

import { h, put } from "../dom.js";
import { get, runPath } from "../api.js";
import { listen } from "../live.js";
import { icon, stateBadge } from "../icons.js";
import { announce, emptyState, errorState, skeleton } from "../dialogs.js";
import { LineChart, CHARTS, swatch } from "../charts.js";
import { Measured, smooth } from "../series.js";
import { quoted } from "../typed.js";
import { plainValue } from "../tabs.js";
import { note, runLink } from "../router.js";
import { times, title } from "../runparts.js";

export const MOST = 8; // as many as there are colours
const ENOUGH = 20; // points that are worth smoothing

export function compareView(place, { query }) {
  const named = [...new Set((query.runs ?? "").split(",").filter(Boolean))], unknown = new Set();
  let chosen = named.slice(0, MOST), more = named.length - chosen.length, closed = false, only = true, smoothed = false, asked = null, curves = [];
  const picker = h("div", { class: "picker card pad" }), out = h("div", { class: "comparison" });
  put(place, h("header", { class: "head" }, h("h1", null, "Compare")), picker, out);

  async function load() {
    const mine = (asked = {});
    put(out, chosen.length ? skeleton(3, "tile") : null);
    try {
      const [{ runs: all }, ...told] = await Promise.all([get("/api/runs", { limit: 200 }), ...chosen.map(metrics)]);
      if (closed || asked !== mine) return;
      for (const [run, of] of told) if (!of) unknown.add(run);
      chosen = chosen.filter((run) => !unknown.has(run));
      note({ runs: chosen.join(",") });
      const answer = chosen.length ? await get("/api/compare", { runs: chosen.join(",") }) : { runs: [] }, curveOf = new Map(told);
      if (closed || asked !== mine) return;
      curves = answer.runs.map((run) => ({ run, measured: new Measured(curveOf.get(run.run)) }));
      pick(all, answer.runs);
      put(out, chosen.length ? [charts(), differences(answer)]
        : emptyState("Choose runs to lay over each other", "Tick them in the list of runs, or add them above."));
    } catch (error) {
      if (closed || asked !== mine) return;
      put(out, errorState(error, load));
    }
  }

  /** [run, its metrics]; without any for a run that is forgotten by now. */
  async function metrics(run) {
    try {
      return [run, await get(runPath(run, "/metrics"), { points: 300 })];
    } catch (error) {
      if (error.status !== 404) throw error;
      return [run, null];
    }
  }

  /** What was asked for and is not shown. */
  function missing() {
    const names = [...unknown].join(", ");
    return [
      more ? h("p", { class: "soft missing" }, `${named.length} runs were chosen: the first ${MOST} of them are compared, the other ${more} left out.`) : null,
      names ? h("p", { class: "soft missing" }, `Not known any more, and left out: ${names}`) : null,
    ];
  }

  function pick(all, runs) {
    const rest = all.filter((run) => !chosen.includes(run.run));
    put(picker, missing(),
      runs.length ? h("ul", { class: "picked" }, runs.map((run, at) => h("li", { "data-item": "" }, swatch(at), h("a", { href: runLink(run.run) }, title(run)), stateBadge(run.state), h("span", { class: "soft small" }, run.name ? run.run : times(run)),
        h("button", { type: "button", class: "bare", "aria-label": `Leave out ${title(run)}`, onclick: () => choose(chosen.filter((one) => one !== run.run)) }, icon("close"))))) : null,
      h("label", { class: "pick" }, h("span", { class: "unseen" }, "Add a run"), h("select", { id: "add-run", disabled: chosen.length >= MOST || !rest.length, onchange: (event) => choose([...chosen, event.target.value]) }, h("option", { value: "" }, chosen.length >= MOST ? `At most ${MOST} runs` : rest.length ? "Add a run…" : "No other runs"), rest.map((run) => h("option", { value: run.run }, run.name ? `${run.name} (${run.run})` : run.run)))));
  }

  function choose(runs) {
    chosen = runs;
    more = 0;
    unknown.clear();
    load();
  }

  function charts() {
    const made = CHARTS.map((options) => ({ options, chart: new LineChart(options) }));
    const draw = (log) => made.forEach(({ options, chart }) => {
      chart.log = log && Boolean(options.logarithmic);
      chart.draw(curves.flatMap(({ run, measured }, at) => measured.means(options.key, options.sum).map((curve, of, every) => ({
        ...curve, low: [], high: [], y: smoothed && curve.y.length >= ENOUGH ? smooth(curve.y) : curve.y, told: curve.y, colour: at, faint: of < every.length - 1, label: title(run),
      }))));
    });
    const logBox = h("input", { type: "checkbox", onchange: () => draw(logBox.checked) });
    draw(false);
    return h("section", { class: "curveset", "aria-label": "Curves" }, h("h2", { class: "unseen" }, "Curves"), h("div", { class: "charttools" },
      h("label", { class: "tickbox" }, h("input", { type: "checkbox", onchange: (event) => { smoothed = event.target.checked; draw(logBox.checked); } }), "Smooth"),
      h("label", { class: "tickbox" }, logBox, "Log scale of the loss")), h("div", { class: "charts" }, made.map((one) => one.chart.element)));
  }

  /** Both tables, and one switch for what both show. */
  function differences(answer) {
    const fills = [], runs = answer.runs;
    const one = (name, rows = []) => {
      const body = h("tbody"), differing = rows.some((row) => row.differs), same = h("p", { class: "soft" }, runs.length > 1 ? "They do not differ." : "Add another run to see where they differ.");
      fills.push(() => {
        same.hidden = differing || !only;
        put(body, rows.filter((row) => row.differs || !only).map((row) => h("tr", { class: row.differs ? "differs" : null }, h("th", { scope: "row" }, h("code", null, row.key)), row.values.map((value) => h("td", null, row.key === "command" && Array.isArray(value) ? quoted(value.map(String)) : plainValue(value))))));
      });
      return rows.length ? h("section", { class: "card pad" }, h("h2", null, name), same,
        h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, h("table", { class: "plain compare", vars: { "--runs": runs.length } }, h("caption", { class: "unseen" }, name),
          h("thead", null, h("tr", null, h("th", { scope: "col" }, "Name"), runs.map((run, at) => h("th", { scope: "col" }, h("span", { class: "named" }, swatch(at), h("span", null, title(run))))))), body))) : null;
    };
    const made = [one("Options", answer.options), one("Results", answer.results)], fill = () => fills.forEach((each) => each());
    fill();
    return [h("label", { class: "tickbox only" }, h("input", { type: "checkbox", checked: only, onchange: (event) => { only = event.target.checked; fill(); } }), "Only what differs"), made];
  }

  load().catch((error) => announce(error.message, { bad: true }));
  listen("/api/stream", {}, {});
  return { close: () => { closed = true; }, title: "Compare" };
}
