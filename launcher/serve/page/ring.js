// The ring as a ring: each rank a knot, each link with its latency and bandwidth, the slowest of them named.

import { h, svg, put, say, set, table } from "./dom.js";
import { bandwidth, milliseconds, isNumber, stateOf, whole, isActive } from "./format.js";

const SIDE = 380;
const MIDDLE = SIDE / 2;
const FEW = 6; // with more ranks only the slowest link is labelled
const SLOW = 0.7; // of the usual bandwidth
const TURNS = 4; // after so many it looks as before

/** Rank -> its link to the next one: {from, to, source, target, latency_ms, mbit_s, inside}. */
export function ringLinks(ranks, links) {
  const known = new Map(links.map((link) => [`${link.from}>${link.to}`, link]));
  const sorted = [...ranks].sort((a, b) => a.rank - b.rank);
  return sorted.length < 2 ? [] : sorted.map((rank, at) => {
    const next = sorted[(at + 1) % sorted.length];
    const found = known.get(`${rank.rank}>${next.rank}`) ?? known.get(`${rank.host}>${next.host}`) ?? {};
    return { from: rank.rank, to: next.rank, source: rank.host, target: next.host, inside: rank.host === next.host, latency_ms: found.latency_ms, mbit_s: found.mbit_s };
  });
}

function slowLink(links) {
  const measured = links.filter((link) => isNumber(link.mbit_s));
  if (measured.length < 2) return null;
  const rates = measured.map((link) => link.mbit_s).sort((a, b) => a - b), usual = rates[rates.length >> 1];
  const worst = measured.find((link) => link.mbit_s === rates[0]);
  return worst.mbit_s < SLOW * usual ? worst : null;
}

export class Ring {
  constructor() {
    this.summary = h("p", { class: "summary" });
    this.picture = svg("svg", { class: "ring", viewBox: `-42 16 ${SIDE + 84} ${SIDE - 32}`, role: "img" });
    this.details = h("details", { class: "numbers" }, h("summary", null, "Numbers"), h("div"));
    this.step = undefined;
    this.turned = 0; // it turns as steps are made, and by nothing else: a page that is left open costs nothing for it
    this.element = h("figure", { class: "card chart ringcard" }, h("figcaption", null, h("h3", null, "The ring")), this.summary, this.picture, this.details);
  }

  draw(run) {
    const ranks = [...(run.ranks ?? [])].sort((a, b) => a.rank - b.rank), links = ringLinks(ranks, run.links ?? []);
    const slow = slowLink(links), words = this.sentence(run, ranks, slow);
    say(this.summary, words);
    set(this.picture, "aria-label", `Ring of ${ranks.length} ranks. ${words}`);
    this.picture.classList.toggle("alive", isActive(run.state));
    if (run.step !== this.step) this.turned = (this.turned + 1) % TURNS;
    this.step = run.step;
    set(this.picture, "vars", { "--turned": this.turned });
    const radius = ranks.length <= FEW ? 118 : 138, size = ranks.length <= FEW ? 25 : Math.max(6, Math.min(19, (Math.PI * radius) / ranks.length - 2));
    const place = (at, r) => {
      const angle = (2 * Math.PI * at) / Math.max(1, ranks.length) - Math.PI / 2;
      return [MIDDLE + r * Math.cos(angle), MIDDLE + r * Math.sin(angle)];
    };
    put(this.picture,
      links.map((link, at) => this.link(link, at, ranks.length, radius, size, link === slow)),
      ranks.map((rank, at) => this.knot(rank, place(at, radius), size, ranks.length)),
      this.hosts(ranks, place, radius + size + 12),
      links.map((link, at) => this.label(link, at, ranks.length, place, radius, link === slow)),
      this.centre(run, ranks));
    put(this.details.lastChild, ranks.length ? table("Links of the ring", [
      { title: "Link", of: (link) => `rank ${link.from} → ${link.to}` },
      { title: "Hosts", of: (link) => (link.inside ? link.source : `${link.source} → ${link.target}`) },
      { title: "Latency", class: "number", of: (link) => (link.inside && !isNumber(link.latency_ms) ? "same host" : milliseconds(link.latency_ms)) },
      { title: "Bandwidth", class: "number", of: (link) => bandwidth(link.mbit_s) },
    ], links) : null);
  }

  sentence(run, ranks, slow) {
    if (!ranks.length) return "Its ranks are placed when it starts.";
    if (slow) return `The link from ${slow.source} to ${slow.target} is the slowest: ${bandwidth(slow.mbit_s)}, ${milliseconds(slow.latency_ms)}.`;
    const hosts = new Set(ranks.map((rank) => rank.host)).size;
    return hosts === 1 ? `All ranks are on ${ranks[0].host}.` : `${ranks.length} ranks on ${hosts} hosts.`;
  }

  link(link, at, count, radius, size, slow) {
    const gap = (size + 5) / radius, step = (2 * Math.PI) / count, from = at * step - Math.PI / 2 + gap, to = (at + 1) * step - Math.PI / 2 - gap;
    if (to <= from) return null;
    const [x1, y1] = [MIDDLE + radius * Math.cos(from), MIDDLE + radius * Math.sin(from)];
    const [x2, y2] = [MIDDLE + radius * Math.cos(to), MIDDLE + radius * Math.sin(to)];
    const tip = count <= 24 ? arrow(x2, y2, to + Math.PI / 2) : null;
    return svg("g", { class: `link${slow ? " slow" : ""}${link.inside ? " inside" : ""}` },
      svg("path", { class: "arc", d: `M${x1} ${y1}A${radius} ${radius} 0 ${to - from > Math.PI ? 1 : 0} 1 ${x2} ${y2}` }), tip,
      svg("title", null, `rank ${link.from} to ${link.to}: ${milliseconds(link.latency_ms)}, ${bandwidth(link.mbit_s)}`));
  }

  label(link, at, count, place, radius, slow) {
    if (!isNumber(link.mbit_s) || (count > FEW && !slow)) return null;
    const [x, y] = place(at + 0.5, count <= FEW ? (count <= 3 ? radius - 42 : radius - 36) : radius - 56);
    return svg("g", { class: `linklabel${slow ? " slow" : ""}` },
      svg("text", { x, y: y - 1, "text-anchor": "middle" }, bandwidth(link.mbit_s)),
      svg("text", { class: "soft", x, y: y + 12, "text-anchor": "middle" }, milliseconds(link.latency_ms)));
  }

  knot(rank, [x, y], size, count) {
    const state = stateOf(rank.state);
    return svg("g", { class: `knot ${state.tone}` },
      svg("circle", { cx: x, cy: y, r: size }),
      size > 8 ? svg("text", { x, y: y + (count <= FEW && isNumber(rank.step) ? -1 : 4), "text-anchor": "middle" }, rank.rank) : null,
      count <= FEW && isNumber(rank.step) ? svg("text", { class: "step", x, y: y + 12, "text-anchor": "middle" }, whole(rank.step)) : null,
      state.tone === "bad" ? svg("path", { class: "cross", d: `M${x + size * 0.5} ${y - size * 0.95}l7 7m0 -7l-7 7` }) : null,
      svg("title", null, `rank ${rank.rank} on ${rank.host}: ${state.word}${isNumber(rank.step) ? `, step ${whole(rank.step)}` : ""}`));
  }

  /** Names outside the ring, once for the ranks of a host that are side by side. */
  hosts(ranks, place, radius) {
    const groups = [];
    ranks.forEach((rank, at) => {
      const last = groups[groups.length - 1];
      if (last && last.host === rank.host) last.end = at; else groups.push({ host: rank.host, start: at, end: at });
    });
    if (groups.length > 16 || groups.length < 2) return null;
    return groups.map((group) => {
      const [x, y] = place((group.start + group.end) / 2, radius), side = x - MIDDLE;
      const short = group.host.length > 12 ? `${group.host.slice(0, 11)}…` : group.host;
      const anchor = Math.abs(side) < 30 ? "middle" : side > 0 ? "start" : "end";
      return svg("text", { class: "host", x: x - Math.sign(side) * (anchor === "middle" ? 0 : 5), y: y + (y > MIDDLE ? 8 : y < MIDDLE ? 0 : 4), "text-anchor": anchor }, short);
    });
  }

  centre(run, ranks) {
    const steps = ranks.map((rank) => rank.step).filter(isNumber);
    if (!steps.length) return null;
    return svg("g", { class: "centre" },
      svg("text", { class: "big", x: MIDDLE, y: MIDDLE + 4, "text-anchor": "middle" }, whole(Math.min(...steps))),
      svg("text", { x: MIDDLE, y: MIDDLE + 22, "text-anchor": "middle" }, isNumber(run.steps) ? `of ${whole(run.steps)} steps` : "steps"));
  }
}

function arrow(x, y, angle) {
  return svg("path", { class: "tip", d: "M0 0L-8 -4.5V4.5Z", transform: `translate(${x} ${y}) rotate(${(angle * 180) / Math.PI})` });
}
