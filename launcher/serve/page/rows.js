// Lists whose rows stay the same elements while what they show changes: a focus stays, and no click is lost.

import { h, refresh, tableAround, tableCells } from "./dom.js";

/** Gives a function that takes a list and keeps one child of `parent` for each thing of it, in that order.
 * `make(thing)` gives {element, update(thing, at)}, once for as long as a thing with this key is listed. */
export function keyed(parent, keyOf, make) {
  let rows = new Map();
  return (things) => {
    const focused = parent.contains(document.activeElement) ? document.activeElement : null;
    const around = [...parent.children].find((one) => one.contains(focused));
    rows = new Map(things.map((thing, at) => {
      const row = rows.get(keyOf(thing)) ?? make(thing);
      row.update(thing, at);
      return [keyOf(thing), row];
    }));
    arrange(parent, [...rows.values()].map((row) => row.element));
    if (focused && focused !== document.activeElement) (focused.isConnected ? focused : firstOf(around))?.focus({ preventScroll: true });
  };
}

/** Where the focus goes when what had it in this row is not there any more. */
const firstOf = (row) => (row.matches("[tabindex]") ? row : row.querySelector("a, button"));

/** Has these children in this order. Moves as few as it can: what is moved while it is pressed is not clicked. */
export function arrange(parent, wanted) {
  const kept = new Set(wanted);
  for (const one of [...parent.children]) if (!kept.has(one)) one.remove();
  let next = parent.firstChild;
  for (const one of wanted) {
    if (next?.nextSibling === one) next = one; // what is before it comes later
    if (next === one) next = one.nextSibling;
    else parent.insertBefore(one, next);
  }
}

/** A table as {element, update(rows)}. Columns are those of `table`; where `of` gives elements, `from(row)` is what they are made from. */
export function keyedTable(caption, columns, keyOf) {
  const body = h("tbody");
  const update = keyed(body, keyOf, () => {
    const cells = tableCells(columns);
    return { element: h("tr", null, cells), update: (row) => columns.forEach(({ of, from = of }, at) => refresh(cells[at], [from(row)], () => of(row))) };
  });
  return { element: tableAround(body, caption, columns), update };
}
