// Pieces of a run that several screens show: its progress, its times, its place in a sentence.

import { h } from "./dom.js";
import { done, duration, isActive, isNumber, percent, whole, ago, clock, plural } from "./format.js";

export function progress(run) {
  const share = done(run), name = run.name || run.run;
  if (share === null) {
    return h("div", { class: "progress" }, isActive(run.state) ? h("div", { class: "track unsure", role: "progressbar", "aria-label": `Progress of ${name}` }, h("i")) : null);
  }
  const step = isNumber(run.steps) ? `${whole(run.state === "succeeded" ? run.steps : run.step)} of ${whole(run.steps)}` : "";
  const left = isActive(run.state) && isNumber(run.left_s) ? `${duration(run.left_s >= 90 ? 60 * Math.round(run.left_s / 60) : run.left_s)} left` : "";
  return h("div", { class: "progress" },
    h("div", { class: `track ${run.state}`, role: "progressbar", "aria-label": `Progress of ${name}`, "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": Math.round(100 * share), "aria-valuetext": `${Math.round(100 * share)} percent${left ? `, ${left}` : ""}` },
      h("i", { vars: { "--share": share } })),
    h("span", { class: "small" }, isActive(run.state) ? h("b", null, percent(share).replace(/\.\d/, "")) : null, step ? h("span", { class: "soft" }, ` ${step}`) : null, left ? h("span", { class: "left" }, left) : null));
}

/** How long it took, or has taken, or how long it has been waiting. */
export function times(run, now = Date.now() / 1000) {
  if (run.state === "queued") return isNumber(run.submitted) ? `submitted ${ago(run.submitted, now)}` : "";
  if (!isNumber(run.started)) return isNumber(run.submitted) ? clock(run.submitted) : "";
  if (isNumber(run.ended)) return `${ago(run.ended, now)}, took ${duration(run.ended - run.started)}`;
  return `for ${duration(now - run.started)}`;
}

/** Why a queued run waits. A moment is told by this browser's clock: the service may be in another time zone. */
export function whyWaits(run, now = Date.now() / 1000) {
  const untilThen = isNumber(run.at) && run.at > now && run.waiting.startsWith("waiting until");
  return untilThen ? `waiting until ${clock(run.at)}` : run.waiting;
}

export function ranksAndHosts(run) {
  const hosts = run.hosts ?? [], ranks = plural(run.world, "rank");
  return hosts.length ? `${ranks} on ${hosts.length > 3 ? `${hosts.slice(0, 2).join(", ")} and ${hosts.length - 2} more` : hosts.join(", ")}` : ranks;
}

export const title = (run) => run.name || run.run;
