// Curves: axes with round numbers, a crosshair that tells values, a sentence and a table for who cannot see them.

import { h, svg, put, say, set, framed } from "./dom.js";
import { figure, isNumber, whole } from "./format.js";

const COLOURS = 8; // custom properties --s0 ... of the style sheet
const MARGIN = { top: 22, right: 14, bottom: 30, left: 52 };
const FEW_POINTS = 12; // are drawn as dots, for a line through one cannot be seen
const CHART_HEIGHT = 232;
const TABLE_ROWS = 24;
const MOST_TOLD = 8; // values beside the crosshair

/** Round numbers between low and high, about `count` of them. */
export function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0) || !isNumber(raw)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((one) => one * power >= raw * 0.7);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(Number((at * step).toPrecision(12)));
  return found;
}

/** 1, 2, 5, 10 ... between low and high, fewer if there are many. */
export function logTicks(low, high) {
  const found = [], first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const inner = last - first > 3 ? [1] : [1, 2, 5];
  for (let power = first; power <= last; power += 1) {
    for (const one of inner) {
      const value = one * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(Number(value.toPrecision(6)));
    }
  }
  return found.length ? found : [low, high];
}

/** Of a whole: no less than nothing and no more than all. */
const share = (value) => Math.min(1, Math.max(0, value));

function shortNumber(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(3))}G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(0);
  return String(Number(value.toPrecision(4)));
}

/**
 * A chart of lines. `options`: title, unit, write(value), percent (an axis that ends at 1), x (what the axis is).
 * `draw(lines, marks)`: lines are {label, colour, x[], y[], low[], high[], faint, dash}; marks {x, label}.
 */
export class LineChart {
  constructor(options) {
    this.options = { write: figure, x: "step", ...options };
    this.lines = [];
    this.marks = [];
    this.log = false;
    this.at = null; // where the crosshair is, in steps
    this.width = 0;
    this.picture = svg("svg", { class: "curves", "aria-hidden": "true", focusable: "false" });
    this.told = h("div", { class: "told", role: "status", hidden: true });
    this.plot = h("div", {
      class: "plot", tabindex: "0", role: "img", "aria-label": options.title,
      onpointermove: (event) => this.point(event.offsetX), onpointerdown: (event) => this.point(event.offsetX),
      onpointerleave: () => this.leave(), onblur: () => this.leave(), onkeydown: (event) => this.key(event),
    }, this.picture, this.told);
    this.summary = h("p", { class: "summary" });
    this.legend = h("ul", { class: "legend" });
    this.extra = h("span", { class: "extra" });
    this.details = h("details", { class: "numbers", ontoggle: () => this.fillTable() }, h("summary", null, "Numbers"), h("div"));
    this.element = h("figure", { class: "chart card" },
      h("figcaption", null, h("h3", null, options.title), this.extra), this.summary, this.plot, this.legend, this.details);
    this.paint = framed(() => this.render());
    new ResizeObserver(() => { this.width = this.plot.clientWidth; this.paint(); }).observe(this.plot);
  }

  draw(lines, marks = []) {
    this.lines = lines.filter((line) => line.x.length);
    this.marks = marks;
    this.paint();
  }

  // --- what is where ---

  measure() {
    let left = Infinity, right = -Infinity, low = Infinity, high = -Infinity;
    for (const { x, y, low: lows = [], high: highs = [], faint } of this.lines) {
      for (let at = 0; at < x.length; at += 1) {
        if (x[at] < left) left = x[at];
        if (x[at] > right) right = x[at];
        if (this.log && y[at] <= 0) continue;
        if (y[at] < low) low = y[at];
        if (y[at] > high) high = y[at];
        if (!faint && isNumber(lows[at]) && !(this.log && lows[at] <= 0)) low = Math.min(low, lows[at]);
        if (!faint && isNumber(highs[at])) high = Math.max(high, highs[at]);
      }
    }
    if (low === Infinity) { low = this.log ? 0.1 : 0; high = 1; }
    if (this.options.percent) { low = share(low); high = share(high); }
    if (this.options.zero && !this.log) low = Math.min(low, 0);
    if (low === high && this.options.percent) { low = Math.max(0, low - 0.05); high = Math.min(1, high + 0.05); }
    if (low === high) { low = this.log ? low / 2 : low - Math.abs(low || 1) / 2; high = this.log ? high * 2 : high + Math.abs(high || 1) / 2; }
    if (!this.log) {
      const room = (high - low) * 0.06;
      low = low >= 0 && low - room < 0 ? 0 : low - room;
      high = this.options.percent ? share(high + room) : high + room;
    }
    if (left === right) { left -= 1; right += 1; }
    return { left, right, low, high };
  }

  scales() {
    const { left, right, low, high } = this.measure();
    const inner = Math.max(40, this.width - MARGIN.left - MARGIN.right), tall = CHART_HEIGHT - MARGIN.top - MARGIN.bottom;
    const f = this.log ? Math.log10 : this.options.percent ? share : (value) => value;
    return {
      left, right, low, high, inner, tall,
      x: (value) => MARGIN.left + ((value - left) / (right - left)) * inner,
      y: (value) => MARGIN.top + tall - ((f(Math.max(value, this.log ? low : -Infinity)) - f(low)) / (f(high) - f(low))) * tall,
      back: (pixel) => left + ((pixel - MARGIN.left) / inner) * (right - left),
    };
  }

  render() {
    if (!this.width) return;
    const scale = (this.scale = this.scales());
    const empty = this.lines.length === 0;
    this.picture.setAttribute("viewBox", `0 0 ${this.width} ${CHART_HEIGHT}`);
    this.picture.setAttribute("height", CHART_HEIGHT);
    this.cross = svg("g", { class: "cross" });
    put(this.picture,
      empty ? null : this.axes(scale),
      this.marks.filter((mark) => mark.x >= scale.left && mark.x <= scale.right).map((mark) => svg("g", { class: "mark" },
        svg("line", { x1: scale.x(mark.x), x2: scale.x(mark.x), y1: MARGIN.top - 6, y2: MARGIN.top + scale.tall }),
        svg("text", { x: Math.min(this.width - 34, Math.max(MARGIN.left + 26, scale.x(mark.x))), y: MARGIN.top - 11, "text-anchor": "middle" }, mark.label))),
      this.lines.map((line) => this.band(line, scale)),
      this.lines.map((line) => svg("path", { class: `line c${line.colour % COLOURS}${line.faint ? " faint" : ""}${line.dash ? " dash" : ""}`, d: this.path(line, scale) })),
      this.lines.filter((line) => line.x.length <= FEW_POINTS && !line.faint).map((line) => line.x.map((x, at) => svg("circle", { class: `dot c${line.colour % COLOURS}`, cx: scale.x(x), cy: scale.y(line.y[at]), r: 3 }))),
      empty ? svg("text", { class: "nothing", x: this.width / 2, y: CHART_HEIGHT / 2, "text-anchor": "middle" }, this.options.empty ?? "Nothing measured yet") : null,
      this.cross);
    this.showLegend();
    this.details.hidden = empty;
    say(this.summary, this.sentence());
    set(this.plot, "aria-label", `${this.options.title}. ${this.sentence()}`);
    if (this.details.open) this.fillTable();
    if (this.at !== null) this.tell();
  }

  axes(scale) {
    const write = this.options.percent ? (value) => `${Number((100 * value).toFixed(1))}%` : shortNumber;
    const ys = this.log ? logTicks(scale.low, scale.high) : ticks(scale.low, scale.high, 5);
    const xs = ticks(scale.left, scale.right, Math.max(2, Math.floor(scale.inner / 90)));
    return svg("g", { class: "axes" },
      ys.map((value) => [
        svg("line", { x1: MARGIN.left, x2: MARGIN.left + scale.inner, y1: scale.y(value), y2: scale.y(value) }),
        svg("text", { x: MARGIN.left - 8, y: scale.y(value) + 4, "text-anchor": "end" }, write(value))]),
      xs.filter((value) => Number.isInteger(value) && scale.x(value) < this.width - 70).map((value) => svg("text", { x: scale.x(value), y: CHART_HEIGHT - 10, "text-anchor": "middle" }, shortNumber(value))),
      svg("text", { x: this.width - MARGIN.right, y: CHART_HEIGHT - 10, "text-anchor": "end" }, this.options.x),
      svg("line", { class: "base", x1: MARGIN.left, x2: MARGIN.left + scale.inner, y1: MARGIN.top + scale.tall, y2: MARGIN.top + scale.tall }));
  }

  path(line, scale) {
    let made = "", pen = "M";
    for (let at = 0; at < line.x.length; at += 1) {
      if (!isNumber(line.y[at]) || (this.log && line.y[at] <= 0)) { pen = "M"; continue; }
      made += `${pen}${scale.x(line.x[at]).toFixed(1)} ${scale.y(line.y[at]).toFixed(1)}`;
      pen = "L";
    }
    return made;
  }

  band(line, scale) {
    if (!line.low?.length || line.faint) return null;
    const there = line.x.map((x, at) => `${scale.x(x).toFixed(1)} ${scale.y(line.high[at]).toFixed(1)}`);
    const back = line.x.map((x, at) => `${scale.x(x).toFixed(1)} ${scale.y(line.low[at]).toFixed(1)}`).reverse();
    return svg("path", { class: `band c${line.colour % COLOURS}`, d: `M${[...there, ...back].join("L")}Z` });
  }

  // --- words ---

  showLegend() {
    const named = this.lines.filter((line) => line.label && !line.faint);
    this.legend.hidden = named.length < 2;
    if (named.length < 2) { this.legendKey = ""; return; }
    const key = named.map((line) => `${line.label}/${line.colour}/${line.dash}`).join("|");
    if (key === this.legendKey) return;
    this.legendKey = key;
    put(this.legend, named.slice(0, 16).map((line) => h("li", null, swatch(line.colour, line.dash), line.label)),
      named.length > 16 ? h("li", null, `and ${named.length - 16} more`) : null);
  }

  sentence() {
    const line = this.lines.findLast((one) => !one.faint);
    if (!line) return "";
    const write = this.options.write, told = line.told ?? line.y, first = told[0], last = told[told.length - 1];
    const unit = this.options.unit ? ` ${this.options.unit}` : "", at = `at ${this.options.x} ${whole(line.x[line.x.length - 1])}`;
    const who = this.lines.filter((one) => !one.faint).length > 1 && line.label ? `${line.label}: ` : "";
    if (line.y.length === 1 || first === last) return `${who}${write(last)}${unit} ${at}`;
    return `${who}${write(last)}${unit} ${at}${who ? "" : `, from ${write(first)}`}`;
  }

  fillTable() {
    if (!this.details.open) return;
    const named = this.lines.filter((line) => !line.faint), longest = named.reduce((a, b) => (b.x.length > (a?.x.length ?? 0) ? b : a), null);
    if (!longest) return;
    const every = Math.max(1, Math.ceil(longest.x.length / TABLE_ROWS));
    const steps = longest.x.filter((_, at) => at % every === 0 || at === longest.x.length - 1);
    put(this.details.lastChild, h("div", { class: "scroll" }, h("table", { class: "plain" },
      h("caption", { class: "unseen" }, `${this.options.title}, as numbers`),
      h("thead", null, h("tr", null, h("th", { scope: "col" }, this.options.x), named.map((line) => h("th", { scope: "col", class: "number" }, line.label || this.options.title)))),
      h("tbody", null, steps.map((step) => h("tr", null, h("th", { scope: "row" }, whole(step)),
        named.map((line) => h("td", { class: "number" }, this.options.write(line.y[nearest(line.x, step)])))))))));
  }

  // --- the crosshair ---

  point(pixel) {
    if (!this.scale || !this.lines.length) return;
    this.at = Math.min(this.scale.right, Math.max(this.scale.left, this.scale.back(pixel)));
    this.tell();
  }

  leave() {
    this.at = null;
    this.told.hidden = true;
    if (this.cross) put(this.cross);
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    const line = this.lines.findLast((one) => !one.faint);
    if (by === undefined || !line) {
      if (event.key === "Escape") this.leave();
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    const now = this.at === null ? line.x.length - 1 : nearest(line.x, this.at);
    this.at = line.x[Math.min(line.x.length - 1, Math.max(0, now + by))];
    this.tell();
  }

  tell() {
    const scale = this.scale, rows = [];
    for (const line of this.lines) {
      if (line.faint) continue;
      const at = nearest(line.x, this.at);
      const reach = (scale.right - scale.left) * 0.04 + (line.x[1] - line.x[0] || 0);
      if (Math.abs(line.x[at] - this.at) <= reach) rows.push({ line, x: line.x[at], y: line.y[at] });
    }
    if (!rows.length) { this.told.hidden = true; put(this.cross); return; }
    const x = scale.x(rows[rows.length - 1].x);
    put(this.cross, svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: MARGIN.top + scale.tall }),
      rows.filter((row) => isNumber(row.y)).map((row) => svg("circle", { class: `c${row.line.colour % COLOURS}`, cx: scale.x(row.x), cy: scale.y(row.y), r: 3.5 })));
    const shown = rows.length > MOST_TOLD ? rows.toSorted((a, b) => b.y - a.y).slice(0, MOST_TOLD) : rows;
    put(this.told, h("strong", null, `${this.options.x} ${whole(rows[rows.length - 1].x)}`),
      shown.map((row) => h("span", null, swatch(row.line.colour, row.line.dash), row.line.label ? `${row.line.label} ` : "", h("b", null, this.options.write(row.y)), this.options.unit ? ` ${this.options.unit}` : "")),
      rows.length > MOST_TOLD ? h("em", null, `highest ${MOST_TOLD} of ${rows.length}`) : null);
    this.told.hidden = false;
    const wide = this.told.offsetWidth;
    this.told.style.transform = `translate(${Math.round(x + 12 + wide > this.width ? Math.max(0, x - wide - 12) : x + 12)}px, ${MARGIN.top}px)`;
  }
}

export function swatch(colour, dash = false) {
  return svg("svg", { class: "swatch", viewBox: "0 0 14 8", "aria-hidden": "true" },
    svg("path", { class: `line c${colour % COLOURS}${dash ? " dash" : ""}`, d: "M0 4H14" }));
}

/** Where in a sorted list the value lies closest. */
export function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle; else high = middle;
  }
  return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? low : high;
}

/** A curve as large as a word. */
export function sparkline(values, label) {
  const known = (values ?? []).filter(isNumber);
  if (known.length < 2) return h("span", { class: "spark none" });
  const low = Math.min(...known), high = Math.max(...known), wide = 96, tall = 26;
  const at = known.map((value, index) => [
    2 + (index / (known.length - 1)) * (wide - 6), 3 + (1 - (value - low) / (high - low || 1)) * (tall - 6)]);
  const last = at[at.length - 1];
  return svg("svg", { class: "spark", viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": `${label} from ${figure(known[0])} to ${figure(known[known.length - 1])}` },
    svg("path", { d: `M${at.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}` }),
    svg("circle", { cx: last[0], cy: last[1], r: 2 }));
}

/** The three curves of runs, as the page and the report show them. */
export const CHARTS = [
  { key: "loss", title: "Loss", logarithmic: true },
  { key: "accuracy", title: "Accuracy", percent: true, write: (value) => `${(100 * value).toFixed(2)}%`, empty: "No accuracy reported" },
  { key: "samples_per_s", title: "Throughput", unit: "samples/s", write: (value) => figure(value, 4), zero: true, sum: true },
];
