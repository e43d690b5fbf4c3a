// The merged log: any number of lines, of which only those in sight are elements.

import { h, put, say, paced, refresh } from "./dom.js";
import { get, runPath } from "./api.js";
import { copy, announce } from "./dialogs.js";
import { icon } from "./icons.js";
import { clock, harmless, plural, ranges, whole } from "./format.js";
import { LINE, LogRows, passes, ranksOf } from "./logmodel.js";
import { note } from "./router.js";
import { arrange } from "./rows.js";

const ROW = 22; // pixels, as the style sheet has it
const BEYOND = 12; // rows drawn above and below what is seen
const PAGE = 1000; // lines asked for at a time
const MOST_PENDING = 30000;
const ENOUGH = 20000; // lines, folded to however few rows: of a log that says the same for hours nobody who follows needs all
const PACE_MS = 60;
const RUSH_MS = 200; // where nothing of what was drawn is in sight any more: nobody can read it sooner
const TYPING_MS = 250;
const AGAIN_MS = 5000; // after lines could not be had
const COLOURS = 8;
const WHO = 11; // characters, as the style sheet has it
const LONGEST = 4000; // characters of a line in the list; all of it when it is chosen

export class LogView {
  constructor(run, ranks, query) {
    this.run = run;
    this.filters = { rank: query.rank ?? "", host: query.host ?? "", stream: query.stream ?? "", search: query.search ?? "" };
    this.rows = new LogRows();
    this.pending = [];
    this.follows = !query.line;
    this.chosen = Number(query.line) || 0;
    this.loading = false;
    this.passed = 0; // lines that came too fast to be shown
    this.drawn = 0; // how many rows had ever come when it was last drawn
    this.stretched = 0; // and how many it had then
    this.again = 0; // before this, lines that could not be had are not asked for again
    this.failed = false; // the first of them could not
    this.skips = 0; // how often lines were passed over
    this.trimmed = false; // more is pending than is kept
    this.held = false; // somebody has pressed a button on a line
    this.typing = 0;
    this.shown = new Map(); // of each row in sight: its element, and what that depends on
    this.height = 0; // of the box
    this.build(ranks);
    this.pace = PACE_MS;
    this.paint = paced(() => this.render(), () => this.pace);
    this.watcher = new ResizeObserver(() => { this.height = this.box.clientHeight; this.render(); }); // before anybody sees it as it was
    this.watcher.observe(this.box);
    this.load(this.chosen);
  }

  build(ranks) {
    const pick = (name, label) => {
      this.picks[name] = h("select", { "aria-label": label, onchange: (event) => this.filter(name, event.target.value) });
      return h("label", { class: "pick" }, h("span", { class: "unseen" }, label), this.picks[name]);
    };
    this.picks = {};
    this.followBox = h("input", { type: "checkbox", role: "switch", checked: this.follows, "data-follow": "", onchange: (event) => this.follow(event.target.checked) });
    this.foldBox = h("input", { type: "checkbox", checked: true, onchange: (event) => { this.rows.folds = event.target.checked; this.load(0); } });
    this.searchBox = h("input", { type: "search", maxlength: 200, placeholder: "Search the log", "aria-label": "Search the log", "data-search": "", value: this.filters.search,
      oninput: (event) => { clearTimeout(this.typing); this.typing = setTimeout(() => this.filter("search", event.target.value), TYPING_MS); } });
    this.count = h("span", { class: "soft count", role: "status" });
    this.tools = h("div", { class: "logtools" }, h("div", { class: "searchbox" }, icon("search"), this.searchBox),
      pick("rank", "Rank"), pick("host", "Host"), pick("stream", "Stream"),
      h("label", { class: "tickbox" }, this.foldBox, "Fold repeats"), h("label", { class: "tickbox" }, this.followBox, "Follow"), this.count);
    this.offer("stream", "out + err", [["out", "stdout"], ["err", "stderr"]]);
    this.update({ ranks });
    this.note = h("p", { class: "soft passed", role: "status", hidden: true });
    this.list = h("div", { class: "loglines" });
    this.spacer = h("div", { class: "logspace" }, this.list);
    this.box = h("div", { class: "logbox", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "Log lines", onscroll: () => this.scrolled(), onpointerdown: (event) => this.hold(event), onkeydown: (event) => this.key(event) }, this.spacer);
    this.jump = h("button", { type: "button", class: "jump", hidden: true, onclick: () => this.follow(true) }, icon("down"), "To the end");
    this.detail = h("div", { class: "logdetail", hidden: true });
    this.element = h("section", { class: "log card", "aria-label": "Log" }, this.tools, this.note, h("div", { class: "logframe" }, this.box, this.jump), this.detail);
  }

  /** What can be chosen; anew only if that has changed. What is chosen stays, also if the run has no such rank or host any more. */
  offer(name, all, known) {
    const now = this.filters[name], gone = now && !known.some(([value]) => String(value) === now);
    const options = gone ? [...known, [now, name === "rank" ? `rank ${now}` : now]] : known;
    refresh(this.picks[name], options, () => [["", all], ...options].map(([value, text]) => h("option", { value, selected: String(value) === this.filters[name] }, text)));
  }

  /** Which ranks there are, and where, is known only once the run has started. */
  update({ ranks = [] }) {
    const hosts = [...new Set(ranks.map((rank) => rank.host))];
    this.offer("rank", "all ranks", ranks.map((rank) => [rank.rank, `rank ${rank.rank}`]));
    this.offer("host", "all hosts", hosts.map((host) => [host, host]));
  }

  // --- lines come in ---

  async load(line) {
    const mine = (this.asked = {}), { skips } = this;
    this.loading = true;
    this.failed = false;
    this.rows.clear();
    this.pending = []; // gathered under other filters, perhaps
    this.trimmed = false;
    this.paint();
    try {
      const path = runPath(this.run, "/log");
      const [before, after] = line
        ? await Promise.all([get(path, { ...this.filters, before: line, limit: PAGE / 2 }), get(path, { ...this.filters, after: line - 1, limit: PAGE / 2 })])
        : [await get(path, { ...this.filters, limit: PAGE }), null];
      if (this.asked !== mine) return;
      this.rows.append(before.lines);
      this.rows.older = before.more;
      this.rows.first = before.first || this.rows.first; // a search may have looked far without finding much
      this.rows.last = Math.max(this.rows.last, before.last || 0);
      if (after) {
        this.rows.append(after.lines);
        this.rows.last = Math.max(this.rows.last, after.last || 0);
        this.rows.newer = after.more || this.skips !== skips;
      }
      this.ready();
      if (line) this.reveal(line);
      else if (!this.follows) this.toEnd();
    } catch (error) {
      if (this.asked === mine) {
        this.failed = true;
        announce(error.message, { bad: true, fix: error.fix });
        if (!error.status || error.status === 429 || error.status >= 500) setTimeout(() => { if (this.asked === mine && this.box.isConnected) this.load(line); }, AGAIN_MS);
      }
    } finally {
      if (this.asked === mine) this.loading = false;
      this.paint();
    }
  }

  ready() {
    this.loading = false;
    if (this.trimmed) this.rows.newer = true; // which is then asked for
    if (!this.rows.newer) this.rows.append(this.pending);
    this.pending = [];
    this.trimmed = false;
  }

  /** Lines as the stream sends them. */
  take(lines) {
    const wanted = lines.filter((line) => passes(line, this.filters));
    if (!this.follows && this.rows.isFull) this.rows.newer = true; // what somebody reads is not taken away
    if (this.loading || this.failed || this.rows.newer) {
      this.pending.push(...wanted);
      if (this.pending.length > MOST_PENDING) {
        this.pending = [];
        this.trimmed = true;
      }
    } else if (wanted.length) {
      this.rows.append(wanted);
      this.paint();
    }
  }

  /** So many lines were not shown as they came: goes on with the newest. They are above, as all others are. */
  passOver(count) {
    this.passed += count;
    this.skips += 1;
    this.pending = [];
    if (this.follows) this.load(0);
    else this.rows.newer = true;
    this.paint();
  }

  async more(older) {
    if (this.loading || performance.now() < this.again) return;
    const mine = this.asked, { skips } = this;
    this.loading = true;
    try {
      const where = older ? { before: this.rows.first } : { after: this.rows.last };
      const answer = await get(runPath(this.run, "/log"), { ...this.filters, ...where, limit: PAGE });
      if (this.asked !== mine) return;
      if (older) {
        const added = this.rows.prepend(answer.lines);
        this.stretch();
        this.box.scrollTop += ROW * added;
        this.before = this.box.scrollTop; // by ourselves: nobody has asked to follow
        this.rows.older = answer.more && answer.first < this.rows.first + (answer.lines.length ? 1 : 0);
        this.rows.first = answer.first || this.rows.first;
      } else {
        this.rows.append(answer.lines);
        this.rows.last = Math.max(this.rows.last, answer.last || 0);
        this.rows.newer = answer.more || this.skips !== skips;
      }
    } catch (error) {
      this.again = performance.now() + AGAIN_MS;
      setTimeout(() => this.paint(), AGAIN_MS);
      announce(error.message, { bad: true, fix: error.fix });
    } finally {
      if (this.asked === mine) {
        this.loading = false;
        if (!this.rows.newer) this.ready(); // with what was said meanwhile
      }
      this.paint();
    }
  }

  filter(name, value) {
    this.filters[name] = value;
    note({ [name]: value });
    this.load(0);
  }

  // --- what is in sight ---

  follow(on) {
    this.follows = on;
    this.followBox.checked = on;
    if (on && this.rows.newer) this.load(0); else this.paint();
  }

  /** While a button is down nothing moves under it: a click is on one line, and a text can be selected. On the scroll bar, which is
   * the box's own, nobody would hear that it is up again. */
  hold(event) {
    if (event.target === this.box) return;
    const up = new AbortController();
    this.held = true;
    for (const name of ["pointerup", "pointercancel", "contextmenu", "blur"]) {
      addEventListener(name, () => { up.abort(); this.held = false; this.paint(); }, { signal: up.signal });
    }
  }

  scrolled() {
    const { scrollTop, clientHeight } = this.box, atEnd = scrollTop >= this.stretched * ROW - clientHeight - ROW;
    if (scrollTop === this.before) return; // by ourselves
    if (this.follows && !atEnd && scrollTop < this.before) this.follow(false);
    else if (!this.follows && atEnd && !this.rows.newer && scrollTop > this.before) this.follow(true);
    this.before = scrollTop;
    this.paint();
  }

  /** How far down it goes. The box itself may say more: rows that are just being moved up count there. */
  get lowest() {
    return Math.max(0, this.rows.rows.length * ROW - this.height);
  }

  stretch() {
    this.stretched = this.rows.rows.length;
    this.spacer.style.height = `${this.stretched * ROW}px`;
  }

  /** What it measures it asks for before it changes anything, or after all: a browser lays out anew for each answer. */
  render() {
    if (!this.box.isConnected || this.held) return;
    const { rows } = this.rows, { lowest } = this;
    const scrolledTo = this.follows ? lowest : this.box.scrollTop - ROW * this.rows.dropped, scrollTop = Math.max(0, Math.min(scrolledTo, lowest));
    const start = Math.max(0, Math.floor(scrollTop / ROW) - BEYOND), end = Math.min(rows.length, Math.ceil((scrollTop + this.height) / ROW) + BEYOND);
    this.stretch();
    this.list.style.transform = `translateY(${start * ROW}px)`;
    this.show(rows.slice(start, end));
    this.jump.hidden = this.follows || rows.length === 0;
    say(this.count, rows.length ? `${plural(rows.length, "line")}${this.rows.older || this.rows.newer ? " loaded" : ""}` : "");
    this.note.hidden = !this.passed;
    say(this.note, this.passed ? `Too fast for this browser: about ${plural(this.passed, "line")} passed by unseen. They are in the log: scroll up, or search.` : "");
    if (this.follows || this.rows.dropped) this.box.scrollTop = scrolledTo;
    if (this.follows) this.before = this.box.scrollTop;
    this.rows.dropped = 0;
    this.pace = (this.rows.added - this.drawn) * ROW > this.height ? RUSH_MS : PACE_MS;
    this.drawn = this.rows.added;
    if (scrollTop < ROW * 40 && this.rows.older && !(this.follows && this.rows.said > ENOUGH)) this.more(true);
    else if (this.rows.newer && end > rows.length - 40) this.more(false);
  }

  /** What stays in sight stays the same element, so that a text which somebody selects is not lost. */
  show(rows) {
    const before = this.shown;
    this.shown = new Map(rows.map((row) => [row, this.drawnRow(row, before.get(row))]));
    arrange(this.list, rows.length ? [...this.shown.values()].map((one) => one.element) : [h("p", { class: "nothing" }, this.nothing())]);
  }

  drawnRow(row, before) {
    const key = `${row.count} ${this.isChosen(row)} ${this.filters.search}`;
    return before?.key === key ? before : { key, element: this.row(row) };
  }

  isChosen(row) {
    return this.chosen >= row.line[LINE.id] && this.chosen <= row.last[LINE.id];
  }

  nothing() {
    if (this.failed) return "The log could not be had.";
    if (this.loading) return "Loading…";
    if (this.rows.older) return "Searching…";
    return Object.values(this.filters).some(Boolean) ? "No line matches." : "Nothing has been said yet.";
  }

  row(row) {
    const { line, count } = row, ranks = ranksOf(row), id = line[LINE.id], rank = line[LINE.rank];
    const all = `ranks ${ranges(ranks)}`, many = all.length > WHO ? `${ranks.size} ranks` : all;
    const who = ranks.size > 1 ? many : rank === null ? line[LINE.host] : `rank ${rank}`;
    return h("div", { class: `logline ${line[LINE.stream]}${this.isChosen(row) ? " chosen" : ""}`, onclick: () => { if (!String(getSelection())) this.choose(row); } },
      h("time", null, clockOf(line[LINE.time])),
      h("span", { class: `who c${ranks.size > 1 || rank === null ? "x" : rank % COLOURS}`, title: ranks.size > 1 ? all : line[LINE.host] }, who),
      h("span", { class: "mark", title: line[LINE.stream] === "err" ? "stderr" : null }, line[LINE.stream] === "err" ? "!" : ""),
      h("span", { class: "said" }, this.marked(harmless(line[LINE.text].slice(0, LONGEST)))),
      count > 1 ? h("span", { class: "times" }, `(x ${whole(count)})`) : null);
  }

  /** The text, with what is searched for made visible. */
  marked(text) {
    const wanted = this.filters.search.toLowerCase(), at = wanted ? text.toLowerCase().indexOf(wanted) : -1;
    return at < 0 ? text : [text.slice(0, at), h("mark", null, text.slice(at, at + wanted.length)), text.slice(at + wanted.length)];
  }

  // --- one line ---

  choose(row) {
    const line = row.line;
    this.chosen = line[LINE.id];
    note({ line: this.chosen });
    if (this.follows) this.follow(false);
    const where = new URL(location.href);
    put(this.detail,
      h("div", null, h("strong", null, `${line[LINE.host]}${line[LINE.rank] === null ? "" : `, rank ${line[LINE.rank]}`}`),
        h("span", { class: "soft" }, `${clock(line[LINE.time], true)}, attempt ${line[LINE.attempt]}, std${line[LINE.stream]}${row.count > 1 ? `, said ${whole(row.count)} times until ${clock(row.last[LINE.time], true)}` : ""}`),
        h("span", { class: "buttons" },
          h("button", { type: "button", class: "plain small", onclick: () => copy(line[LINE.text], "Line") }, icon("copy"), "Copy"),
          h("button", { type: "button", class: "plain small", onclick: () => copy(where.href, "Link to this line") }, icon("link"), "Copy link"),
          h("button", { type: "button", class: "bare", "aria-label": "Close", onclick: () => this.unchoose() }, icon("close")))),
      h("pre", { tabindex: "0" }, line[LINE.text]));
    this.detail.hidden = false;
    this.paint();
  }

  unchoose() {
    this.chosen = 0;
    this.detail.hidden = true;
    note({ line: "" });
    this.paint();
  }

  toEnd() {
    this.stretch();
    this.box.scrollTop = this.lowest;
    this.before = this.box.scrollTop;
  }

  reveal(id) {
    const at = this.rows.indexOf(id);
    this.stretch();
    this.box.scrollTop = Math.max(0, at * ROW - this.box.clientHeight / 3);
    this.before = this.box.scrollTop;
    if (this.rows.rows[at]) this.choose(this.rows.rows[at]);
  }

  /** Enter opens the first line in sight, the arrows the next ones. */
  key(event) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key], last = this.rows.rows.length - 1;
    const opens = event.key === "Enter" && !this.chosen;
    if (last < 0 || !(opens || (by && this.chosen))) return;
    event.preventDefault();
    const wanted = opens ? Math.ceil(this.box.scrollTop / ROW) : this.rows.indexOf(this.chosen) + by;
    const at = Math.max(0, Math.min(last, wanted)), top = at * ROW;
    this.choose(this.rows.rows[at]);
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top > this.box.scrollTop + this.box.clientHeight - 2 * ROW) this.box.scrollTop = top - this.box.clientHeight + 2 * ROW;
  }

  close() {
    clearTimeout(this.typing);
    this.asked = null;
    this.paint.cancel();
    this.watcher.disconnect();
  }
}

/** A line by itself, as the overview shows the newest. */
export function logLine(line) {
  const rank = line[LINE.rank];
  return h("li", { class: `logline ${line[LINE.stream]}` }, h("span", { class: `who c${rank === null ? "x" : rank % COLOURS}` }, rank === null ? line[LINE.host] : `rank ${rank}`), h("span", { class: "said" }, line[LINE.text].slice(0, 400)));
}

function clockOf(time) {
  const at = new Date(time * 1000), two = (value) => String(value).padStart(2, "0");
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}.${String(at.getMilliseconds()).padStart(3, "0")}`;
}
