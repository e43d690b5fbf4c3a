// Makes elements. Every text goes in here, as a text node: nothing that a server or a log says is ever read as markup,
// nor does it turn the text around it.

import { harmless } from "./format.js";

const SVG_SPACE = "http://www.w3.org/2000/svg";
const AS_PROPERTY = new Set(["value", "checked", "disabled", "selected", "hidden", "open", "indeterminate"]);
const READ = new Set(["title", "aria-label", "aria-valuetext", "placeholder"]); // attributes whose value is shown or read out

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG_SPACE, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) set(element, name, value);
  element.append(...flat(children));
  return element;
}

function flat(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : harmless(child)));
}

export function set(element, name, value) {
  if (value === null || value === undefined) return;
  if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
  else if (name === "vars") for (const [key, of] of Object.entries(value)) element.style.setProperty(key, of);
  else if (AS_PROPERTY.has(name) && name in element) element[name] = value;
  else if (value === true) element.setAttribute(name, "");
  else if (value !== false) element.setAttribute(name, READ.has(name) ? harmless(value) : value);
}

/** Puts these in place of whatever the element holds. */
export function put(element, ...children) {
  element.replaceChildren(...flat(children));
  element.madeFrom = null;
  return element;
}

/** Changes a text only where it differs, so that a screen reader does not hear it again. */
export function say(element, text) {
  const shown = harmless(text);
  if (element.textContent !== shown) element.textContent = shown;
}

/** Names the page, in the browser's tab. */
export function entitle(text) {
  document.title = `${harmless(text)} · ringctl`;
}

/** A table: columns are {title, of(row), class}; what `of` gives is a text or elements. */
export function table(caption, columns, rows, attributes) {
  const filled = (row) => tableCells(columns).map((cell, at) => put(cell, columns[at].of(row)));
  return tableAround(h("tbody", null, rows.map((row) => h("tr", null, filled(row)))), caption, columns, attributes);
}

export function tableAround(body, caption, columns, attributes) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { class: "plain", ...attributes },
      h("caption", { class: "unseen" }, caption),
      h("thead", null, h("tr", null, columns.map((one) => h("th", { scope: "col", class: one.class }, one.title)))), body));
}

/** Those of one row, empty. */
export function tableCells(columns) {
  return columns.map((one, at) => h(at === 0 ? "th" : "td", { scope: at === 0 ? "row" : null, class: one.class }));
}

/** Calls `draw` at most once a frame, however often it is asked for. */
export function framed(draw) {
  let asked = 0;
  const later = () => {
    if (!asked) asked = requestAnimationFrame(() => { asked = 0; draw(); });
  };
  later.cancel = () => { cancelAnimationFrame(asked); asked = 0; };
  return later;
}

/** Calls `draw` soon, but no more often than every `ms()`: what changes faster cannot be read. */
export function paced(draw, ms) {
  let timer = 0, before = -Infinity;
  const later = () => {
    if (timer) return;
    timer = setTimeout(() => { timer = 0; before = performance.now(); draw(); }, Math.max(0, before + ms() - performance.now()));
  };
  later.cancel = () => { clearTimeout(timer); timer = 0; };
  return later;
}

/** Fills the element anew only when what it is made from has changed: a focus or a selection in it stays. */
export function refresh(element, from, make) {
  const key = JSON.stringify(from);
  if (element.madeFrom === key) return;
  put(element, make());
  element.madeFrom = key;
}
