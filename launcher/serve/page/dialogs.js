// Questions before something is done, short messages after it, and the list of keys.

import { h, put } from "./dom.js";
import { icon } from "./icons.js";

const SHOWN_MS = 6000;

/** Asks; resolves to the fields' values, or null if the answer is no. `fields` are elements with a name. */
export function confirm({ title, text, action, danger = false, fields = [] }) {
  return new Promise((resolve) => {
    const form = h("form", { method: "dialog" },
      h("h2", { id: "asked" }, title), h("p", null, text), fields,
      h("div", { class: "buttons" },
        h("button", { type: "button", class: "plain", onclick: () => box.close() }, "Leave it"),
        h("button", { type: "submit", value: "yes", class: danger ? "danger" : "primary" }, action)));
    const box = h("dialog", { "aria-labelledby": "asked", class: "ask", onclose: () => {
      resolve(box.returnValue === "yes" ? Object.fromEntries(new FormData(form)) : null);
      box.remove();
    } }, form);
    document.body.append(box);
    box.showModal();
  });
}

/** A sentence at the lower edge, read out by screen readers; failures stay until they are closed. */
export function announce(text, { bad = false, fix = "" } = {}) {
  const place = document.getElementById("announcements");
  const one = h("div", { class: `toast${bad ? " bad" : ""}` }, icon(bad ? "failed" : "succeeded"),
    h("div", null, text, fix ? h("small", null, fix) : null),
    h("button", { class: "bare", type: "button", "aria-label": "Close", onclick: () => one.remove() }, icon("close")));
  place.append(one);
  while (place.children.length > 3) place.firstChild.remove();
  if (!bad) setTimeout(() => one.remove(), SHOWN_MS);
}

const KEYS_TOLD = [
  ["j  k  ↓  ↑", "next and previous in a list"],
  ["Enter", "open it"],
  ["x", "choose it for a comparison"],
  ["/", "search"],
  ["g r   g q   g h   g c", "runs, queue, hosts, compare"],
  ["n", "submit a run"],
  ["1 … 7", "tabs of a run"],
  ["f", "follow the log's end"],
  ["Enter", "in the log: opens the first line in sight, arrows the next ones"],
  ["t", "light, dark, as the system"],
  ["Esc", "close, or leave the field"],
  ["?", "this list"],
];

export function showKeys() {
  if (document.querySelector("dialog.keys")) return;
  const box = h("dialog", { class: "keys", "aria-labelledby": "keys-title", onclose: () => box.remove() },
    h("form", { method: "dialog" }, h("h2", { id: "keys-title" }, "Keys"),
      h("dl", null, KEYS_TOLD.map(([key, does]) => [h("dt", null, key.split(/\s{2,}/).map((one) => (one.length > 12 ? one : h("kbd", null, one)))), h("dd", null, does)])),
      h("div", { class: "buttons" }, h("button", { class: "plain" }, "Close"))));
  document.body.append(box);
  box.showModal();
}

// --- what stands in for something that is not there ---

export function emptyState(title, text, command, ...more) {
  return h("div", { class: "empty" }, h("h2", null, title), text ? h("p", null, text) : null, command ? h("code", null, command) : null, more);
}

export function errorState(error, again) {
  return h("div", { class: "empty error", role: "alert" }, icon("failed"), h("h2", null, error.message), error.fix ? h("p", null, error.fix) : null,
    again ? h("button", { type: "button", onclick: again }, "Try again") : null);
}

export function skeleton(rows = 4, kind = "row") {
  return h("div", { class: "skeleton", "aria-busy": "true" }, h("span", { class: "unseen" }, "Loading"), Array.from({ length: rows }, () => h("i", { class: kind })));
}

/** Puts a text on the clipboard, and says so. */
export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    announce(`${what} copied`);
  } catch {
    announce(`The browser does not let this page copy. ${text}`, { bad: true });
  }
}

export function show(place, error, again) {
  put(place, errorState(error, again));
}
