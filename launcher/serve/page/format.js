// How numbers, times and sizes are written, and what the states are called. Pure.

export const NOTHING = "–";
const SMALL_SPACE = "\u202f";
const SIZES = ["B", "kB", "MB", "GB", "TB", "PB"];
export const BADLY_BEHAVED = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;
const TERMINAL = /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[@-Z\\-_])/g;

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Three or four figures that count, with groups of thousands. */
export function figure(value, digits = 4) {
  if (!isNumber(value)) return NOTHING;
  const size = Math.abs(value);
  if (size >= 10 ** digits || (Number.isInteger(value) && size >= 1000)) return whole(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace("e-", "e−").replace("-", "−");
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

export function whole(value) {
  if (!isNumber(value)) return NOTHING;
  return String(Math.round(value)).replace("-", "−").replace(/\B(?=(\d{3})+(?!\d))/g, SMALL_SPACE);
}

export function percent(value) {
  return isNumber(value) ? `${(100 * value).toFixed(1)}${SMALL_SPACE}%` : NOTHING;
}

export function sized(bytes) {
  if (!isNumber(bytes)) return NOTHING;
  let value = bytes, unit = 0;
  while (Math.abs(value) >= 1000 && unit < SIZES.length - 1) { value /= 1000; unit += 1; }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toPrecision(2)}${SMALL_SPACE}${SIZES[unit]}`;
}

export function milliseconds(value) {
  if (!isNumber(value)) return NOTHING;
  if (value >= 1000) return `${(value / 1000).toFixed(value < 10000 ? 2 : 1)}${SMALL_SPACE}s`;
  return `${value >= 100 ? Math.round(value) : Number(value.toPrecision(2))}${SMALL_SPACE}ms`;
}

export function bandwidth(mbit) {
  if (!isNumber(mbit)) return NOTHING;
  return mbit >= 1000 ? `${Number((mbit / 1000).toPrecision(3))}${SMALL_SPACE}Gbit/s` : `${Math.round(mbit)}${SMALL_SPACE}Mbit/s`;
}

/** Two units at most: 3 d 4 h, 2 h 05 min, 4 min 10 s, 12 s. */
export function duration(seconds) {
  if (!isNumber(seconds)) return NOTHING;
  const s = Math.max(0, Math.round(seconds)), space = SMALL_SPACE;
  if (s < 60) return `${s}${space}s`;
  if (s < 3600) return `${Math.floor(s / 60)}${space}min${s < 600 && s % 60 ? ` ${s % 60}${space}s` : ""}`;
  if (s < 86400) return `${Math.floor(s / 3600)}${space}h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")}${space}min`;
  return `${Math.floor(s / 86400)}${space}d ${Math.floor((s % 86400) / 3600)}${space}h`;
}

export function ago(time, now = Date.now() / 1000) {
  if (!isNumber(time)) return NOTHING;
  const s = now - time;
  if (s < -60) return `in ${duration(-s)}`;
  return s < 5 ? "just now" : `${duration(s >= 3600 ? 60 * Math.round(s / 60) : s)} ago`;
}

/** Hours and minutes today, with the day otherwise. */
export function clock(time, seconds = false) {
  if (!isNumber(time)) return NOTHING;
  const at = new Date(time * 1000), today = new Date();
  const hours = at.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: seconds ? "2-digit" : undefined });
  if (at.toDateString() === today.toDateString()) return hours;
  const year = at.getFullYear() === today.getFullYear() ? undefined : "numeric";
  return `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short", year })}, ${hours}`;
}

export function plural(count, one, many = `${one}s`) {
  return `${whole(count)} ${count === 1 ? one : many}`;
}

/** [0,1,2,5] -> "0–2, 5" */
export function ranges(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b), parts = [];
  for (let at = 0; at < sorted.length;) {
    let end = at;
    while (sorted[end + 1] === sorted[end] + 1) end += 1;
    parts.push(end > at + 1 ? `${sorted[at]}–${sorted[end]}` : sorted.slice(at, end + 1).join(", "));
    at = end + 1;
  }
  return parts.join(", ");
}

/** What somebody else wrote, without what a terminal would obey; whatever else cannot be seen, or turns text around, as a sign. */
export function harmless(text) {
  return String(text).replace(TERMINAL, "").replace(BADLY_BEHAVED, (one) => {
    const code = one.charCodeAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : code === 127 ? "\u2421" : "\ufffd";
  });
}

export const STATES = {
  queued: { word: "Queued", tone: "wait" },
  starting: { word: "Starting", tone: "go" },
  running: { word: "Running", tone: "go" },
  succeeded: { word: "Succeeded", tone: "good" },
  failed: { word: "Failed", tone: "bad" },
  stopped: { word: "Stopped", tone: "off" },
  lost: { word: "Lost", tone: "bad" },
  cancelled: { word: "Cancelled", tone: "off" },
  waiting: { word: "Waiting", tone: "wait" },
  unknown: { word: "Unknown", tone: "wait" },
};

export function stateOf(name) {
  return STATES[name] ?? { word: String(name ?? "unknown"), tone: "wait" };
}

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
export const isActive = (state) => state === "running" || state === "starting";

/** How much of it is done, between 0 and 1; null if nobody knows. */
export function done(run) {
  if (run.state === "succeeded") return 1;
  return isNumber(run.step) && isNumber(run.steps) && run.steps > 0 ? Math.min(1, run.step / run.steps) : null;
}
