// The form to hand in a run; filled with what another one was started with, if that is asked for.

import { h, put } from "../dom.js";
import { get, post, runPath } from "../api.js";
import { listen } from "../live.js";
import { announce, emptyState, errorState, skeleton } from "../dialogs.js";
import { capital } from "../format.js";
import { assigned, assignments, quoted, words } from "../typed.js";
import { go, runLink } from "../router.js";
import { maySubmit } from "../me.js";

const RUN_NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/;

export function submitView(place, { query }) {
  let closed = false;
  if (!maySubmit()) {
    put(place, h("header", { class: "head" }, h("h1", null, "Submit a run")), emptyState("You may look, and not submit", "Whoever runs the service can give you a link that may:", "ringctl serve link --user NAME"));
    return { close: () => {}, title: "Submit" };
  }
  const heading = h("header", { class: "head" }, h("h1", null, query.from ? "Submit again" : "Submit a run"));
  put(place, heading, skeleton(4));
  listen("/api/stream", {}, {});

  async function load() {
    try {
      const [before, hosts, runs] = await Promise.all([
        query.from ? get(runPath(query.from, "/submission")) : {},
        get("/api/hosts").then((answer) => answer.hosts, () => []), get("/api/runs", { limit: 50 }).then((answer) => answer.runs, () => []),
      ]);
      if (!closed) put(place, heading, form(before, hosts, runs, query.from));
    } catch (error) {
      if (!closed) put(place, heading, error.status === 409 ? emptyState("It is not submitted from here", `${capital(error.message)}. Go there, and type:`, error.fix) : errorState(error, load));
    }
  }

  load();
  return { close: () => { closed = true; }, title: "Submit" };
}

function form(before, hosts, runs, from) {
  const field = (label, input, hint) => h("label", { class: "field" }, h("span", null, label), input, hint ? h("small", null, hint) : null);
  const value = (name, otherwise = "") => before[name] ?? otherwise;
  const known = hosts.reduce((sum, host) => sum + (host.slots ?? 0), 0), error = h("div", { class: "formerror", role: "alert", hidden: true });
  let handed = { same: "", key: "" }; // the same once more, because no answer came, is the same run
  const secretNames = Object.keys(before.secrets ?? {});
  const send = h("button", { type: "submit", class: "primary", id: "send" }, "Submit");
  const made = h("form", { class: "card pad submit", novalidate: true, onsubmit: async (event) => {
    event.preventDefault();
    error.hidden = true;
    try {
      const wanted = submission(made, before, secretNames), same = JSON.stringify(wanted);
      if (handed.same !== same) handed = { same, key: newKey() };
      send.disabled = true;
      const run = await post("/api/submit", { ...wanted, key: handed.key });
      announce(`${run.name || run.run} is handed in`);
      go(runLink(run.run));
    } catch (problem) {
      put(error, h("strong", null, problem.message), problem.fix ? h("p", null, problem.fix) : null);
      error.hidden = false;
      error.scrollIntoView({ block: "nearest" });
    } finally {
      send.disabled = false;
    }
  } },
  from ? h("p", { class: "soft" }, "With the options of ", h("a", { href: runLink(from) }, from), ". Change what is to be different.") : null,
  field("Command or options", h("textarea", { name: "command", rows: "3", spellcheck: "false", autocapitalize: "off", placeholder: "--epochs 3 --sync ring" , value: quoted(value("command", [])) }), "What begins with a dash is for the ring trainer; anything else is a command: python my_train.py --lr 0.1"),
  h("div", { class: "columns" },
    field("Ranks", h("input", { type: "number", name: "world", min: "1", max: "65536", value: value("world", "") ?? "", placeholder: known ? `${known}, every slot` : "every slot" })),
    field("Name", h("input", { type: "text", name: "name", maxlength: "64", value: value("name"), placeholder: "optional" }))),
  h("div", { class: "columns" },
    field("Only these hosts", h("input", { type: "text", name: "include", value: listed(value("include")), placeholder: hosts.slice(0, 3).map((host) => host.name).join(",") || "all", list: "host-names" })),
    field("Not these hosts", h("input", { type: "text", name: "exclude", value: listed(value("exclude")), placeholder: "none", list: "host-names" })),
    h("datalist", { id: "host-names" }, hosts.map((host) => h("option", { value: host.name })))),
  h("details", { open: Boolean(before.max_restarts || before.priority || before.after) }, h("summary", null, "When and how often"),
    h("div", { class: "columns" },
      field("Priority", h("input", { type: "number", name: "priority", min: "-1000", max: "1000", value: value("priority", 0) }), "higher goes first"),
      field("Not before", h("input", { type: "datetime-local", name: "at" })),
      field("After run", h("input", { type: "text", name: "after", value: from ? "" : value("after"), list: "run-names", placeholder: "none" }))),
    h("datalist", { id: "run-names" }, runs.map((run) => h("option", { value: run.run }, run.name))),
    h("div", { class: "columns" },
      field("Restarts after a failure", h("input", { type: "number", name: "max_restarts", min: "0", max: "1000", value: value("max_restarts", 0) })),
      field("Seconds before a restart", h("input", { type: "number", name: "restart_delay", min: "0", max: "3600", step: "any", value: value("restart_delay", 2) })),
      field("At least so many ranks", h("input", { type: "number", name: "min_world", min: "1", max: "65536", value: value("min_world", "") ?? "", placeholder: "all of them" }), "goes on with these if hosts stay away"))),
  h("details", { open: Boolean(Object.keys(before.variables ?? {}).length || secretNames.length) }, h("summary", null, "Environment"),
    field("Variables", h("textarea", { name: "variables", rows: "3", spellcheck: "false", placeholder: "NAME=VALUE", value: Object.entries(before.variables ?? {}).map(([key, of]) => assigned(key, of)).join("\n") }), "one a line, for every rank; \"in quotes\" with \\n for a new line, or to keep spaces at an end"),
    field("Secrets", h("textarea", { name: "secrets", rows: "2", spellcheck: "false", autocomplete: "off", placeholder: "NAME=VALUE", value: secretNames.map((name) => `${name}=`).join("\n") }), "sent to the hosts, shown nowhere"),
    h("label", { class: "tickbox" }, h("input", { type: "checkbox", name: "prefork", checked: value("prefork", true) }), "Import torch once a host and fork the ranks"),
    h("label", { class: "tickbox" }, h("input", { type: "checkbox", name: "shared", checked: value("shared", false) }), "Its slots may be taken by other shared runs as well")),
  h("details", { open: Boolean(before.master_port || before.i_know || before.skip_preflight) }, h("summary", null, "Network and checks"),
    field("Port of rank 0", h("input", { type: "number", name: "master_port", min: "1", max: "65535", value: value("master_port", "") ?? "", placeholder: "a free one" })),
    h("label", { class: "tickbox" }, h("input", { type: "checkbox", name: "i_know", checked: value("i_know", false) }), "Gradients may go through a public address: a firewall keeps others out"),
    h("label", { class: "tickbox" }, h("input", { type: "checkbox", name: "skip_preflight", checked: value("skip_preflight", false) }), "Start without looking at the hosts first")),
  error, h("div", { class: "buttons" }, h("a", { class: "button plain", href: from ? runLink(from) : "#/queue" }, "Leave it"), send));
  return made;
}

const newKey = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (one) => one.toString(16).padStart(2, "0")).join("");

const listed = (value) => (Array.isArray(value) ? value.join(",") : value ?? "");

/** What the form says, as the service wants it; an Error names the field that is wrong. */
function submission(made, before, secretNames) {
  for (const one of made.elements) if (one.willValidate && !one.validity.valid) throw new Error(`${one.labels[0]?.firstChild.textContent ?? one.name}: ${one.validationMessage}`);
  const data = new FormData(made), text = (name) => String(data.get(name) ?? "").trim(), number = (name) => (text(name) === "" ? null : Number(text(name)));
  const secrets = assignments(text("secrets"), "Secrets", false), missing = secretNames.filter((name) => name in secrets && secrets[name] === "");
  if (missing.length) throw new Error(`Secrets: no value for ${missing.join(", ")}. The service does not tell what it was; give it again or remove the line.`);
  if (text("name") && !RUN_NAME.test(text("name"))) throw new Error("Name: letters, digits, dots, dashes and underscores, without spaces");
  const at = text("at");
  return {
    command: words(String(data.get("command"))), world: number("world"), name: text("name"), include: text("include"), exclude: text("exclude"),
    variables: assignments(text("variables"), "Variables", true), secrets,
    max_restarts: number("max_restarts") ?? 0, restart_delay: number("restart_delay") ?? 2, min_world: number("min_world"),
    prefork: data.has("prefork"), shared: data.has("shared"), master_port: number("master_port"), i_know: data.has("i_know"), skip_preflight: data.has("skip_preflight"), priority: number("priority") ?? 0,
    after: text("after"), at: at ? new Date(at).getTime() / 1000 : null, code: before.code ?? "",
  };
}
