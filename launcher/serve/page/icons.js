// Small pictures, each drawn on 16 by 16. A state always has one beside its word: colour alone says nothing.

import { svg, h } from "./dom.js";
import { stateOf } from "./format.js";

const SHAPES = {
  succeeded: "M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13Z M5 8.2l2.1 2.1L11 6.2",
  failed: "M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13Z M5.7 5.7l4.6 4.6M10.3 5.7l-4.6 4.6",
  lost: "M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13Z M6.2 6.3c.2-2 3.6-2 3.6.1 0 1.4-1.8 1.3-1.8 2.7M8 11.3v.2",
  unknown: "M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13Z M6.2 6.3c.2-2 3.6-2 3.6.1 0 1.4-1.8 1.3-1.8 2.7M8 11.3v.2",
  stopped: "M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13Z M5.8 5.8h4.4v4.4H5.8Z",
  cancelled: "M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13Z M3.6 12.4l8.8-8.8",
  queued: "M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13Z M8 4.6V8l2.3 1.6",
  waiting: "M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13Z M8 4.6V8l2.3 1.6",
  running: "M14.5 8A6.5 6.5 0 1 1 8 1.5 M6.6 5.5l4 2.5-4 2.5Z",
  starting: "M14.5 8A6.5 6.5 0 1 1 8 1.5",
  ok: "M3.5 8.4l3 3 6-6.4",
  warn: "M8 2.2l6.3 11.3H1.7Z M8 6.6v3M8 11.4v.2",
  fail: "M4 4l8 8M12 4l-8 8",
  skip: "M4 8h8",
  sun: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6ZM8 1v1.6M8 13.4V15M1 8h1.6M13.4 8H15M3 3l1.2 1.2M11.8 11.8L13 13M3 13l1.2-1.2M11.8 4.2L13 3",
  moon: "M13.5 9.6A5.8 5.8 0 0 1 6.4 2.5a5.8 5.8 0 1 0 7.1 7.1Z",
  auto: "M8 1.7a6.3 6.3 0 1 0 0 12.6Z M8 1.7a6.3 6.3 0 0 1 0 12.6",
  plus: "M8 3.2v9.6M3.2 8h9.6",
  search: "M7 2.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9ZM10.4 10.4l3.4 3.4",
  close: "M4 4l8 8M12 4l-8 8",
  link: "M6.8 9.2l2.4-2.4M7.4 4.6l1-1a2.8 2.8 0 0 1 4 4l-1 1M8.6 11.4l-1 1a2.8 2.8 0 0 1-4-4l1-1",
  copy: "M5.5 5.5v-3h8v8h-3M2.5 5.5h8v8h-8Z",
  stop: "M4 4h8v8H4Z",
  again: "M13 8a5 5 0 1 1-1.6-3.7M13 2v3h-3",
  report: "M4 1.8h5.5L12.5 5v9.2H4ZM9.2 1.8V5.2h3.3M6 8.2h4.6M6 11h4.6",
  down: "M8 3v9M4.5 8.5L8 12l3.5-3.5",
  leave: "M9.5 2.5h-6v11h6M6.5 8h8M11.5 5l3 3-3 3",
  help: "M5.6 6c.2-3 4.9-2.8 4.8.1 0 1.9-2.4 1.8-2.4 3.8M8 12.6v.2",
};

export function icon(name) {
  return svg("svg", { class: "icon", "data-icon": name, viewBox: "0 0 16 16", "aria-hidden": "true", focusable: "false" },
    svg("path", { d: SHAPES[name] ?? SHAPES.unknown }));
}

/** A state as a picture and a word. */
export function stateBadge(name) {
  const state = stateOf(name);
  return h("span", { class: `state ${state.tone}`, "data-state": name }, icon(name), state.word);
}
