// The curves of one run, and how they are to be drawn: the mean or each rank, smoothed, on a logarithmic scale.

import { h } from "./dom.js";
import { LineChart, CHARTS } from "./charts.js";
import { smooth } from "./series.js";

const SOLID = 8; // after so many colours they come again, dashed
const ENOUGH = 20; // points; fewer do not tremble, and would only lag behind

export class Curves {
  constructor() {
    this.mode = "mean";
    this.smoothed = false;
    this.log = false;
    this.charts = CHARTS.map((options) => ({ options, chart: new LineChart(options) }));
    const segment = (value, word) => h("button", { type: "button", "aria-pressed": String(value === this.mode), onclick: (event) => this.choose(value, event.currentTarget) }, word);
    this.tools = h("div", { class: "charttools" },
      h("div", { class: "chips", role: "group", "aria-label": "Curves" }, segment("mean", "All ranks"), segment("ranks", "Each rank")),
      h("label", { class: "tickbox" }, h("input", { type: "checkbox", onchange: (event) => { this.smoothed = event.target.checked; this.draw(); } }), "Smooth"),
      h("label", { class: "tickbox" }, h("input", { type: "checkbox", onchange: (event) => { this.log = event.target.checked; this.draw(); } }), "Log scale of the loss"));
    this.element = h("section", { class: "curveset", "aria-label": "Curves" }, this.tools, h("div", { class: "charts" }, this.charts.map((one) => one.chart.element)));
  }

  choose(mode, button) {
    this.mode = mode;
    for (const one of button.parentNode.children) one.setAttribute("aria-pressed", String(one === button));
    this.draw();
  }

  draw(measured = this.measured) {
    this.measured = measured;
    const attempts = measured.attempts, newest = attempts[attempts.length - 1];
    for (const { options, chart } of this.charts) {
      const lines = this.mode === "mean" ? this.means(measured, options, newest) : this.each(measured, options, newest);
      chart.log = this.log && Boolean(options.logarithmic);
      chart.draw(this.smoothed ? lines.flatMap(softened) : lines, attemptMarks(measured, options.key));
    }
  }

  means(measured, options, newest) {
    return measured.means(options.key, options.sum).map((curve) => ({
      ...curve, colour: curve.attempt === newest ? 0 : 7, dash: curve.attempt !== newest,
      label: measured.attempts.length > 1 ? `attempt ${curve.attempt}` : "",
    }));
  }

  each(measured, options, newest) {
    return measured.curves(options.key).map((curve) => ({
      ...curve, colour: curve.rank, dash: Math.floor(curve.rank / SOLID) % 2 === 1, faint: curve.attempt !== newest, label: `rank ${curve.rank}`,
    }));
  }
}

/** Where each attempt but the first began. */
export function attemptMarks(measured, key) {
  const curves = measured.curves(key);
  return measured.attempts.slice(1).map((attempt) => {
    const starts = curves.filter((curve) => curve.attempt === attempt).map((curve) => curve.x[0]);
    return { x: starts.length ? Math.min(...starts) : NaN, label: `attempt ${attempt}` };
  }).filter((mark) => Number.isFinite(mark.x));
}

function softened(line) {
  if (line.faint || line.x.length < ENOUGH) return [line];
  return [{ ...line, faint: true }, { ...line, y: smooth(line.y), told: line.y, low: [], high: [] }];
}
