// The numbers behind the curves: one list per rank and attempt, kept short, and what is made of them. Pure.

import { isNumber } from "./format.js";

export const KEYS = ["loss", "accuracy", "samples_per_s", "step_ms", "comm_ms", "bytes_sent"];
const MOST_POINTS = 1200; // of a list; then every second one goes
const BINS = 240;

/** Everything measured of one run so far. */
export class Measured {
  constructor(answer) {
    this.last = 0;
    this.lists = new Map();
    if (answer) this.load(answer);
  }

  load(answer) {
    this.last = answer.last ?? 0;
    this.lists.clear();
    for (const one of answer.series ?? []) {
      const list = { rank: one.rank, attempt: one.attempt, step: one.step ?? [], time: one.time ?? [] };
      for (const key of KEYS) list[key] = one[key] ?? [];
      this.lists.set(`${one.attempt}/${one.rank}`, list);
    }
  }

  /** Metrics as the stream sends them; true if any of them was new. */
  add(metrics) {
    let fresh = false;
    for (const [id, time, attempt, rank, values] of metrics) {
      if (id <= this.last) continue;
      this.last = id;
      fresh = true;
      const name = `${attempt}/${rank}`;
      if (!this.lists.has(name)) {
        this.lists.set(name, Object.fromEntries([["rank", rank], ["attempt", attempt], ["step", []], ["time", []], ...KEYS.map((key) => [key, []])]));
      }
      const list = this.lists.get(name);
      list.time.push(time);
      list.step.push(values.step ?? null);
      for (const key of KEYS) list[key].push(values[key] ?? null);
      if (list.step.length > MOST_POINTS) thin(list);
    }
    return fresh;
  }

  get ranks() {
    return [...new Set([...this.lists.values()].map((list) => list.rank))].sort((a, b) => a - b);
  }

  get attempts() {
    return [...new Set([...this.lists.values()].map((list) => list.attempt))].sort((a, b) => a - b);
  }

  /** One curve per rank and attempt: {rank, attempt, x, y}. */
  curves(key) {
    const found = [];
    for (const list of this.lists.values()) {
      const x = [], y = [];
      list.step.forEach((step, at) => {
        if (isNumber(step) && isNumber(list[key][at])) { x.push(step); y.push(list[key][at]); }
      });
      if (x.length) found.push({ rank: list.rank, attempt: list.attempt, x, y });
    }
    return found.sort((a, b) => a.attempt - b.attempt || a.rank - b.rank);
  }

  /** One curve per attempt, over all ranks: {attempt, x, y, low, high}. `sum` adds them up, as for a throughput. */
  means(key, sum = false) {
    return this.attempts.map((attempt) => ({ attempt, ...mean(this.curves(key).filter((curve) => curve.attempt === attempt), sum) }))
      .filter((curve) => curve.x.length);
  }

  /** Per rank, the average of its newest points of the newest attempt: {rank, step_ms, comm_ms}. */
  recent(count = 20) {
    const newest = Math.max(0, ...this.attempts), found = [];
    for (const list of this.lists.values()) {
      if (list.attempt !== newest) continue;
      const step = average(list.step_ms.slice(-count)), comm = average(list.comm_ms.slice(-count));
      if (step !== null) found.push({ rank: list.rank, step_ms: step, comm_ms: Math.min(comm ?? 0, step) });
    }
    return found.sort((a, b) => a.rank - b.rank);
  }
}

function thin(list) {
  for (const [key, values] of Object.entries(list)) {
    if (Array.isArray(values)) list[key] = values.filter((_, at) => at % 2 === 0 || at === values.length - 1);
  }
}

export function average(values) {
  const known = values.filter(isNumber);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

export function median(values) {
  const sorted = values.filter(isNumber).sort((a, b) => a - b), middle = sorted.length >> 1;
  if (!sorted.length) return null;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** Ranks report at steps of their own: what falls into the same few steps is taken together. Of a rank that has not come
 * so far, what it said last counts: the newest point would else be that of the quickest rank alone. */
function mean(curves, sum) {
  if (curves.length === 0) return { x: [], y: [], low: [], high: [] };
  if (curves.length === 1) return { x: curves[0].x, y: curves[0].y, low: [], high: [] };
  let first = Infinity, last = -Infinity;
  for (const curve of curves) { first = Math.min(first, curve.x[0]); last = Math.max(last, curve.x[curve.x.length - 1]); }
  const longest = Math.max(...curves.map((curve) => curve.x.length));
  const width = Math.max(1, (last - first) / Math.max(1, Math.min(BINS, longest))), bins = new Map();
  curves.forEach((curve, of) => curve.x.forEach((x, at) => {
    const bin = Math.floor((x - first) / width);
    if (!bins.has(bin)) bins.set(bin, new Map());
    const mine = bins.get(bin).get(of) ?? { x: 0, y: 0, count: 0 };
    mine.x += x; mine.y += curve.y[at]; mine.count += 1;
    bins.get(bin).set(of, mine);
  }));
  const made = { x: [], y: [], low: [], high: [] }, told = new Map();
  for (const bin of [...bins.keys()].sort((a, b) => a - b)) {
    for (const [of, one] of bins.get(bin)) told.set(of, one.y / one.count);
    const ys = [...told.values()], factor = sum ? curves.length : 1;
    made.x.push(average([...bins.get(bin).values()].map((one) => one.x / one.count)));
    made.y.push(factor * average(ys));
    made.low.push(factor * Math.min(...ys));
    made.high.push(factor * Math.max(...ys));
  }
  return made;
}

/** Follows the values with less of their trembling. */
export function smooth(values, weight = 0.85) {
  let before = 0, sum = 0;
  return values.map((value) => {
    before = weight * before + (1 - weight) * value;
    sum = weight * sum + (1 - weight);
    return before / sum;
  });
}
