// The lines that the log shows: in order, without gaps, repeats folded, no more than memory should hold. Pure.

import { harmless } from "./format.js";

const MOST_ROWS = 60000;
const SPARE = 6000; // dropped in one go, so that not every line moves all the others

export const LINE = { id: 0, time: 1, attempt: 2, host: 3, rank: 4, stream: 5, text: 6 };

/** Whether a line is one that the filters ask for. */
export function passes(line, filters) {
  if (filters.rank !== undefined && filters.rank !== "" && line[LINE.rank] !== Number(filters.rank)) return false;
  if (filters.host && line[LINE.host] !== filters.host) return false;
  if (filters.stream && line[LINE.stream] !== filters.stream) return false;
  return !filters.search || holds(line[LINE.text], filters.search.toLowerCase());
}

/** As it was written or as it is shown, which is what the service looks for: colours may cut a word in two. */
function holds(text, wanted) {
  return text.toLowerCase().includes(wanted) || (text.includes("\u001b") && harmless(text).toLowerCase().includes(wanted));
}

/** A row is {line, count, ranks, last}: `count` lines that follow each other and say the same; `ranks` is null for a line alone. */
export class LogRows {
  constructor() {
    this.clear();
    this.folds = true;
  }

  clear() {
    this.rows = [];
    this.first = 0; // ids of the lines at both ends
    this.last = 0;
    this.older = false; // there are more before
    this.newer = false; // and after: then what is said now does not follow on
    this.dropped = 0; // rows taken from the front since the last look
    this.added = 0; // rows that came at the end, ever
    this.said = 0; // lines in all rows
  }

  /** Lines after the last one; those that are here already are left out. */
  append(lines) {
    let added = 0;
    for (const line of lines) {
      if (line[LINE.id] <= this.last) continue;
      this.last = line[LINE.id];
      this.said += 1;
      if (!this.first) this.first = line[LINE.id];
      const before = this.rows[this.rows.length - 1];
      if (this.folds && before && same(before.line, line)) {
        before.count += 1;
        before.ranks = ranksOf(before).add(line[LINE.rank]);
        before.last = line;
      } else {
        this.rows.push({ line, count: 1, ranks: null, last: line });
        added += 1;
      }
    }
    this.added += added;
    if (this.rows.length > MOST_ROWS + SPARE) this.drop(this.rows.length - MOST_ROWS);
  }

  /** Lines before the first one; how many rows they make. */
  prepend(lines) {
    const earlier = new LogRows();
    earlier.folds = this.folds;
    earlier.append(lines.filter((line) => line[LINE.id] < this.first));
    const before = earlier.rows[earlier.rows.length - 1], [after] = this.rows, folds = this.folds && before && after && same(before.line, after.line);
    if (folds) Object.assign(before, { count: before.count + after.count, ranks: new Set([...ranksOf(before), ...ranksOf(after)]), last: after.last });
    const had = this.rows.length;
    this.rows = [...earlier.rows, ...(folds ? this.rows.slice(1) : this.rows)];
    if (earlier.first) this.first = earlier.first;
    this.last = Math.max(this.last, earlier.last);
    this.said += earlier.said;
    return this.rows.length - had;
  }

  get isFull() {
    return this.rows.length >= MOST_ROWS;
  }

  drop(count) {
    this.rows.splice(0, count);
    this.first = this.rows[0].line[LINE.id];
    this.dropped += count;
    this.older = true;
  }

  /** Which row holds the line with this id, or the one nearest to it. */
  indexOf(id) {
    let low = 0, high = this.rows.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.rows[middle].line[LINE.id] <= id) low = middle; else high = middle - 1;
    }
    return low;
  }
}

/** Of a row: who said it. */
export function ranksOf(row) {
  return row.ranks ?? new Set([row.line[LINE.rank]]);
}

function same(a, b) {
  return a[LINE.text] === b[LINE.text] && a[LINE.stream] === b[LINE.stream] && a[LINE.attempt] === b[LINE.attempt];
}
