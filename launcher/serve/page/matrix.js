// What preflight found: the way from each host to each other as a matrix, and the checks by host.

import { h } from "./dom.js";
import { icon } from "./icons.js";
import { bandwidth, clock, ago, isNumber, milliseconds } from "./format.js";

const STATUS_WORDS = { ok: "passed", warn: "warning", fail: "failed", skip: "skipped" };
const ORDER = { fail: 0, warn: 1, ok: 2, skip: 3 };

export function preflightParts(found) {
  if (!found) return [];
  const bad = (found.checks ?? []).filter((check) => check.status === "fail" || check.status === "warn");
  return [verdict(found, bad), bad.length ? problems(bad) : null, pairMatrix(found.pairs ?? []), checkMatrix(found.checks ?? [])];
}

function verdict(found, bad) {
  const failed = bad.filter((check) => check.status === "fail").length, warned = bad.length - failed;
  const words = found.ok
    ? warned ? `Ready, with ${warned === 1 ? "a warning" : `${warned} warnings`}` : "Everything is ready"
    : `${failed === 1 ? "One check" : `${failed} checks`} failed`;
  return h("p", { class: `verdict ${found.ok ? (warned ? "warn" : "good") : "bad"}` },
    icon(found.ok ? (warned ? "warn" : "succeeded") : "failed"), h("strong", null, words),
    h("span", { class: "soft" }, whenFound(found)));
}

export const whenFound = (found) => (isNumber(found.time) ? `${clock(found.time)}, ${ago(found.time)}` : "");

function problems(bad) {
  return h("ul", { class: "problems" }, bad.toSorted((a, b) => ORDER[a.status] - ORDER[b.status]).map((check) => h("li", { class: check.status },
    icon(check.status),
    h("div", null, h("strong", null, `${check.host}${check.peer ? ` → ${check.peer}` : ""}: ${check.name}`),
      h("p", null, check.found, check.wanted ? h("span", { class: "soft" }, ` (wanted: ${check.wanted})`) : null),
      check.fix ? h("code", { class: "fix" }, check.fix) : null))));
}

function pairMatrix(pairs) {
  if (!pairs.length) return null;
  const names = [...new Set(pairs.flatMap((pair) => [pair.from, pair.to]))];
  const known = new Map(pairs.map((pair) => [`${pair.from}>${pair.to}`, pair]));
  const rates = pairs.map((pair) => pair.mbit_s).filter(isNumber).sort((a, b) => a - b), usual = rates[rates.length >> 1] ?? 0;
  return h("section", null, h("h3", null, "Links"), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Links between hosts" },
    h("table", { class: "matrix" }, h("caption", { class: "unseen" }, "Bandwidth and latency from each host to each other"),
      h("thead", null, h("tr", null, h("th", { scope: "col", class: "corner" }, "from ↓ to →"), names.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, names.map((from) => h("tr", null, h("th", { scope: "row" }, from), names.map((to) => pairCell(known.get(`${from}>${to}`), from === to, usual))))))));
}

/** Beside what is usual here: one that is lucky once does not make all others slow. */
function pairCell(pair, self, usual) {
  if (self || !pair) return h("td", { class: "self" }, self ? "·" : "–");
  if (pair.problem) return h("td", { class: "slow" }, h("b", null, "does not reach it"), h("span", null, pair.problem));
  if (!isNumber(pair.mbit_s)) return h("td", { class: "fast" }, h("b", null, "reached"), h("span", null, "not measured"));
  const share = pair.mbit_s / usual;
  return h("td", { class: share > 0.6 ? "fast" : share > 0.25 ? "fair" : "slow" },
    h("b", null, bandwidth(pair.mbit_s)), h("span", null, milliseconds(pair.latency_ms)));
}

function checkMatrix(checks) {
  if (!checks.length) return null;
  const hosts = [...new Set(checks.map((check) => check.host))], names = [...new Set(checks.map((check) => check.name))];
  const counts = ["ok", "warn", "fail", "skip"].map((status) => [checks.filter((check) => check.status === status).length, STATUS_WORDS[status]]);
  return h("details", { class: "allchecks" }, h("summary", null, "All checks", h("span", null, counts.filter(([count]) => count).map(([count, word]) => `${count} ${word}`).join(", "))), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Checks by host" },
    h("table", { class: "matrix checks" }, h("caption", { class: "unseen" }, "Each check on each host"),
      h("thead", null, h("tr", null, h("th", { scope: "col", class: "corner" }, "check"), hosts.map((host) => h("th", { scope: "col" }, host || "all")))),
      h("tbody", null, names.map((name) => h("tr", null, h("th", { scope: "row" }, name.replaceAll("_", " ")),
        hosts.map((host) => checkCell(checks.filter((check) => check.name === name && check.host === host)))))))));
}

function checkCell(checks) {
  if (!checks.length) return h("td", { class: "self" }, "·");
  const worst = checks.toSorted((a, b) => ORDER[a.status] - ORDER[b.status])[0];
  return h("td", { class: `check ${worst.status}`, title: worst.found || null }, icon(worst.status), h("span", { class: "unseen" }, `${STATUS_WORDS[worst.status]}${worst.found ? `: ${worst.found}` : ""}`));
}
