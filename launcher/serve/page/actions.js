// What can be done with a run, each after a question: stop, restart, cancel, submit again.

import { h } from "./dom.js";
import { post, runPath } from "./api.js";
import { announce, confirm } from "./dialogs.js";
import { icon } from "./icons.js";
import { isActive, plural } from "./format.js";
import { title } from "./runparts.js";
import { link } from "./router.js";
import { mayChange, maySubmit } from "./me.js";

/** Buttons for what the service says may be done; `after` is called when one of them was done. */
export function actionsOf(run, after) {
  const may = new Set(mayChange(run) ? run.actions ?? [] : []);
  return [
    may.has("stop") ? h("button", { type: "button", id: "stop", class: "danger quiet", onclick: () => stop(run, after) }, icon("stop"), "Stop") : null,
    may.has("restart") ? h("button", { type: "button", id: "restart", onclick: () => restart(run, after) }, icon("again"), "Restart") : null,
    may.has("cancel") ? h("button", { type: "button", id: "cancel", class: "danger quiet", onclick: () => cancel(run, after) }, icon("close"), "Cancel") : null,
    maySubmit() ? h("a", { class: "button", href: link("submit", { from: run.run }) }, icon("plus"), "Submit again") : null,
    run.state === "queued" ? null : h("a", { class: "button", id: "report", href: runPath(run.run, "/report?format=html"), target: "_blank", rel: "noopener" }, icon("report"), "Report"),
  ];
}

async function act(run, name, body, told, after) {
  try {
    await post(runPath(run.run, `/${name}`), body);
    announce(told);
    await after?.();
  } catch (error) {
    announce(error.message, { bad: true, fix: error.fix });
  }
}

async function stop(run, after) {
  const ends = isActive(run.state) ? `Its ${plural(run.world, "rank")} end on all hosts.` : "It does not start again by itself.";
  const sure = await confirm({ title: `Stop ${title(run)}?`, text: `${ends} A restart goes on from its last checkpoint.`, action: "Stop it", danger: true });
  if (sure) await act(run, "stop", {}, `${title(run)} is being stopped`, after);
}

export async function cancel(run, after) {
  const sure = await confirm({ title: `Cancel ${title(run)}?`, text: "It leaves the queue and will not start.", action: "Cancel it", danger: true });
  if (sure) await act(run, "cancel", {}, `${title(run)} is cancelled`, after);
}

async function restart(run, after) {
  const world = h("label", { class: "field" }, h("span", null, "Ranks"), h("input", { type: "number", name: "world", min: "1", max: "65536", value: run.world }));
  const sure = await confirm({ title: `Restart ${title(run)}?`, text: "It starts as the next attempt with the same code and options, from its last checkpoint if it has one. If it still runs it is stopped first.", action: "Restart it", fields: [world] });
  if (!sure) return;
  const wanted = Number(sure.world);
  await act(run, "restart", wanted && wanted !== run.world ? { world: wanted } : {}, `${title(run)} is being started again`, after);
}
