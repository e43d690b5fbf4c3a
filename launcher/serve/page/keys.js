// The keyboard: keys that work everywhere, and moving through whatever list is shown.

import { go } from "./router.js";
import { showKeys } from "./dialogs.js";
import { maySubmit } from "./me.js";

const PLACES = { r: "#/runs", q: "#/queue", h: "#/hosts", c: "#/compare" };
const WAIT_MS = 1200;

let begun = 0; // when g was pressed

export function startKeys({ theme }) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.key === "Escape") return leave();
    if (document.querySelector("dialog[open]") || isField(event.target)) return;
    const took = (event.timeStamp - begun < WAIT_MS && PLACES[event.key] && (go(PLACES[event.key]), true)) || pressed(event, theme);
    begun = event.key === "g" ? event.timeStamp : 0;
    if (took) event.preventDefault();
  });
}

function pressed(event, theme) {
  const { key } = event;
  if (key === "?") return showKeys(), true;
  if (key === "/") return focus("[data-search]");
  if (key === "n" && maySubmit()) return go("#/submit"), true;
  if (key === "t") return theme(), true;
  if (key === "f") return press("[data-follow]");
  if (key === "x") return press("[data-choose]", document.activeElement?.closest("[data-item]"));
  if (/^[1-9]$/.test(key)) return press(`[role=tab]:nth-of-type(${key})`);
  if (key === "j" || (key === "ArrowDown" && inList(event.target))) return move(1);
  if (key === "k" || (key === "ArrowUp" && inList(event.target))) return move(-1);
  return false;
}

const isField = (element) => element instanceof HTMLElement && (element.matches("input:not([type=checkbox]), textarea, select") || element.isContentEditable);
const inList = (element) => element instanceof HTMLElement && element.closest("[data-item]") !== null;

function leave() {
  if (document.querySelector("dialog[open]")) return;
  const active = document.activeElement;
  if (active?.matches("[data-search]") && active.value) {
    active.value = "";
    active.dispatchEvent(new Event("input", { bubbles: true }));
  } else active?.blur();
}

function focus(which) {
  const found = document.querySelector(which);
  found?.focus();
  found?.select?.();
  return Boolean(found);
}

function press(which, inside = document) {
  const found = inside?.querySelector(which);
  found?.click();
  return Boolean(found);
}

/** Focus to the next thing in the list that is shown. */
function move(by) {
  const items = [...document.querySelectorAll("[data-item]")];
  if (!items.length) return false;
  const now = items.indexOf(document.activeElement?.closest("[data-item]"));
  const next = items[now < 0 ? (by > 0 ? 0 : items.length - 1) : Math.max(0, Math.min(items.length - 1, now + by))];
  (next.matches("[tabindex], a, button") ? next : next.querySelector("a, button")).focus();
  next.scrollIntoView({ block: "nearest" });
  return true;
}
