// The tables of a run: ranks, preflight, plan and environment, checkpoints, attempts. Each gives {element, update}.

import { h, put, refresh, say, table } from "./dom.js";
import { keyedTable } from "./rows.js";
import { get, runPath } from "./api.js";
import { stateBadge } from "./icons.js";
import { capital, clock, duration, figure, isNumber, milliseconds, NOTHING, ranges, sized, whole } from "./format.js";
import { quoted } from "./typed.js";
import { emptyState, errorState, skeleton } from "./dialogs.js";
import { preflightParts, whenFound } from "./matrix.js";

function tab(run, part, make) {
  const element = h("section", { class: "card pad" }), update = (now) => refresh(element, part(now), () => make(now));
  update(run);
  return { element, update };
}

export function ranksTab(run, openLog) {
  const ranks = keyedTable("Ranks", [
    { title: "Rank", from: (rank) => rank.rank, of: (rank) => h("button", { type: "button", class: "textlink", onclick: () => openLog(rank.rank), "aria-label": `Log of rank ${rank.rank}` }, `rank ${rank.rank}`) },
    { title: "Host", of: (rank) => rank.host },
    { title: "State", from: (rank) => rank.state, of: (rank) => stateBadge(rank.state) },
    { title: "Step", class: "number", of: (rank) => whole(rank.step) },
    { title: "Loss", class: "number", of: (rank) => figure(rank.loss) },
    { title: "Samples/s", class: "number", of: (rank) => figure(rank.samples_per_s) },
    { title: "Step time", class: "number", of: (rank) => milliseconds(rank.step_ms) },
    { title: "Comm.", class: "number", of: (rank) => milliseconds(rank.comm_ms) },
    { title: "Sent", class: "number", of: (rank) => sized(rank.bytes_sent) },
    { title: "Last sign", class: "number", of: (rank) => (isNumber(rank.heartbeat_age_s) ? duration(rank.heartbeat_age_s) : NOTHING) },
    { title: "Pid", class: "number", of: (rank) => rank.pid ?? NOTHING },
    { title: "Ended", class: "words", of: howEnded },
  ], (rank) => rank.rank);
  const { element, update } = tab(run, (now) => Boolean(now.ranks?.length), (now) => (now.ranks?.length ? ranks.element : emptyState("No ranks yet", "They are placed when the run starts.")));
  ranks.update(run.ranks ?? []);
  return { element, update: (now) => { ranks.update(now.ranks ?? []); update(now); } };
}

function howEnded(rank) {
  const parts = [rank.signal ?? (isNumber(rank.exit_code) ? `exit code ${rank.exit_code}` : ""), rank.reason].filter(Boolean);
  return parts.join(", ") || NOTHING;
}

export function preflightTab(run) {
  const { element, update } = tab(run, (now) => now.preflight, (now) => (now.preflight ? preflightParts(now.preflight)
    : emptyState("No preflight recorded", "What was checked before this run started is not known here.", "", h("a", { class: "button", href: "#/hosts" }, "The last one of all hosts"))));
  return { element, update: (now) => { update(now); if (now.preflight) say(element.querySelector(".verdict .soft"), whenFound(now.preflight)); } };
}

export function planTab(run) {
  return tab(run, (now) => [now.plan, now.options, now.environment], (now) => {
    const command = now.options?.command ?? now.plan?.command;
    return [
      Array.isArray(command) && command.length ? h("section", null, h("h3", null, "Command"), h("pre", { class: "code", tabindex: "0" }, quoted(command.map(String)))) : null,
      pairs("Options", now.options), environment(now.environment),
      now.plan ? h("section", null, h("h3", null, "Plan"), h("details", null, h("summary", null, "All of it, as JSON"), h("pre", { class: "code", tabindex: "0" }, JSON.stringify(now.plan, null, 2))), Object.keys(now.environment ?? {}).length ? null : placed(now.plan))
        : emptyState("No plan yet", "It is made when the run starts."),
    ];
  });
}

function placed(plan) {
  return plan.hosts?.length ? table("Where the ranks are", [
    { title: "Host", of: (host) => host.host },
    { title: "Ranks", of: (host) => (host.ranks ?? []).map((rank) => rank.rank).join(", ") },
    { title: "Folder", of: (host) => h("code", null, host.workdir || NOTHING) },
    { title: "Environment", of: (host) => (host.env ? `${host.env.kind} ${host.env.value}` : "as it is") },
  ], plan.hosts) : null;
}

function pairs(name, values) {
  const rows = Object.entries(values ?? {}).filter(([, value]) => value !== null && value !== "" && !(Array.isArray(value) && !value.length));
  if (!rows.length) return null;
  return h("section", null, h("h3", null, name), table(name, [
    { title: "Name", of: ([key]) => h("code", null, key) },
    { title: "Value", of: ([key, value]) => h("span", { class: "mono" }, key === "command" && Array.isArray(value) ? quoted(value.map(String)) : plainValue(value)) },
  ], rows, { class: "plain pairs" }));
}

/** One row a host where it is told by host; else one a name. */
function environment(told) {
  const rows = Object.entries(told ?? {});
  if (!rows.length || !rows.every(([, value]) => value && typeof value === "object" && !Array.isArray(value))) return pairs("Environment", told);
  const names = [...new Set(rows.flatMap(([, value]) => Object.keys(value)))];
  return h("section", null, h("h3", null, "Environment"), table("Environment", [{ title: "Host", of: ([host]) => host },
    ...names.map((name) => ({ title: capital(name), class: "whole", of: ([, value]) => h("span", { class: "mono" }, plainValue(value[name])) }))], rows));
}

export function plainValue(value) {
  if (value === null || value === undefined || value === "") return NOTHING;
  if (Array.isArray(value) && value.every((one) => typeof one !== "object")) return [...new Set(value.map(String))].join(", ");
  return typeof value === "object" ? JSON.stringify(value) : typeof value === "boolean" ? (value ? "yes" : "no") : isNumber(value) ? figure(value, 6) : String(value);
}

export function checkpointsTab(run) {
  const element = h("section", { class: "card pad" }, skeleton(3));
  const load = async () => {
    try {
      put(element, listed(await get(runPath(run.run, "/checkpoints"))));
    } catch (error) {
      put(element, errorState(error, load));
    }
  };
  load();
  return { element };
}

/** As `ringctl checkpoints` tells them, with what is wrong or missing below. */
function listed({ checkpoints, elsewhere, errors }) {
  const usable = (parts) => (parts ?? []).filter((part) => part.ok);
  const columns = [
    { title: "Step", of: (one) => whole(one.step) },
    { title: "Epoch", of: (one) => whole(one.epoch) },
    { title: "Complete", of: (one) => (one.complete === null ? "unknown" : one.complete ? "yes" : "no") },
    { title: "Ranks", of: (one) => `${ranges(usable(one.parts).map((part) => part.rank)) || "none"} of ${one.world ?? "?"}` },
    { title: "Saved", of: (one) => clock(one.written, true) },
    { title: "Size", of: (one) => sized(one.bytes) },
    { title: "Host", of: (one) => hostsOf(one.parts) },
    { title: "Model on", of: (one) => hostsOf(usable(one.models)) },
  ];
  const notes = [
    ...checkpoints.flatMap((one) => (one.problems ?? []).map((words) => `Step ${whole(one.step)}: ${words}`)),
    ...Object.entries(elsewhere ?? {}).map(([host, folder]) => `${host} was told to put them into ${folder}, which is not looked at`),
    ...Object.values(errors ?? {}).map((words) => `${words}; its part is missing`),
  ];
  return [
    checkpoints.length ? table("Checkpoints", columns.filter((column) => checkpoints.some((one) => column.of(one) !== NOTHING)), checkpoints)
      : emptyState("No checkpoints", "The ring trainer saves them with:", "--checkpoint-every 100"),
    notes.length ? h("ul", { class: "soft small" }, notes.map((words) => h("li", null, capital(words)))) : null,
  ];
}

const hostsOf = (parts) => [...new Set((parts ?? []).map((part) => part.host))].join(", ") || NOTHING;

export function attemptsTab(run) {
  return tab(run, (now) => now.attempts, (now) => (now.attempts?.length ? h("ol", { class: "attempts" }, now.attempts.toReversed().map((one) => h("li", null,
    h("div", null, h("strong", null, `Attempt ${one.attempt}`), stateBadge(one.state), h("span", { class: "soft" },
      `${clock(one.started, true)}${isNumber(one.ended) && isNumber(one.started) ? `, ${duration(one.ended - one.started)}` : ""}${isNumber(one.world) ? `, ${one.world} ranks` : ""}`)),
    one.cause ? h("p", null, capital(causeText(one.cause))) : null,
    one.gap ? h("p", { class: "soft" }, "Part of its log is missing: a host that has it could not be heard or read.") : null))) : emptyState("Not started yet", "Each start of the run is listed here.")));
}

const causeText = (cause) => (typeof cause === "string" ? cause : cause.text ?? "");
