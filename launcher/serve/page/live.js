// One stream of events per tab. Goes on after a drop where it stopped, and rests while nobody looks: browsers
// allow only six connections to one address, over all tabs.

import { address, get } from "./api.js";

const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 10000;
const REST_AFTER_MS = 20000;
const BEHIND_S = 2;

let current = null;
let tellState = () => {};

/** Whoever shows the state: gets "live", "reconnecting", "resting" or "off". */
export function onState(show) {
  tellState = show;
}

/** How much later than at its best something comes to be looked at, in seconds: the clocks need not agree. */
export class Lag {
  least = Infinity;

  of(sent, now) {
    this.least = Math.min(this.least, now - sent);
    return now - sent - this.least;
  }
}

/** Listens to `path` in place of what was listened to before. `events`: name -> function(data, id); of these
 * `skip` is called in place of going on where this browser is too slow for what comes, or did not look. */
export function listen(path, query, events) {
  current?.close();
  current = new Stream(path, query, events);
  current.open();
  return current;
}

export function silence() {
  current?.close();
  current = null;
  tellState("off");
}

class Stream {
  constructor(path, query, events) {
    this.path = path;
    this.query = { ...query };
    const { skip, ...others } = events;
    this.events = others;
    this.skip = skip;
    this.lag = new Lag();
    this.retry = FIRST_RETRY_MS;
    this.over = false;
  }

  open() {
    if (this.over) return;
    clearTimeout(this.timer);
    this.source = new EventSource(address(this.path, this.query));
    this.source.onopen = () => { this.retry = FIRST_RETRY_MS; tellState("live"); };
    this.source.onerror = () => this.dropped();
    this.source.addEventListener("now", (event) => this.heard(Number(event.data)));
    for (const [name, take] of Object.entries(this.events)) {
      this.source.addEventListener(name, (event) => {
        if (event.lastEventId) this.query.after = event.lastEventId;
        take(event.data ? JSON.parse(event.data) : null, event.lastEventId);
      });
    }
  }

  heard(sent) {
    if (this.over || !this.skip || this.lag.of(sent, Date.now() / 1000) < BEHIND_S) return;
    this.close();
    this.skip({ slow: true });
  }

  again() {
    if (!this.skip) return this.open();
    this.close();
    return this.skip({ slow: false });
  }

  /** The browser tries again by itself, with Last-Event-ID, unless it was refused: then we do. */
  dropped() {
    if (this.over) return;
    tellState("reconnecting");
    if (this.source.readyState !== EventSource.CLOSED) return;
    get("/api/me").catch(() => {}); // a stream does not say why it was refused: this tells if nobody is signed in any more
    this.timer = setTimeout(() => this.open(), this.retry * (0.75 + Math.random() / 2));
    this.retry = Math.min(LAST_RETRY_MS, 2 * this.retry);
  }

  rest() {
    clearTimeout(this.timer);
    this.source?.close();
    if (!this.over) tellState("resting");
  }

  close() {
    this.over = true;
    this.rest();
  }
}

let resting = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(resting);
  if (document.hidden) {
    resting = setTimeout(() => { resting = -1; current?.rest(); }, REST_AFTER_MS);
  } else if (resting === -1) {
    resting = 0;
    current?.again();
  }
});
