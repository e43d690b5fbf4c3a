// The address after # says what is shown: #/runs/RUN?tab=log. Going back and forth, reloading and sending it work.

export const ROUTES = {
  "": "runs",
  runs: "runs",
  queue: "queue",
  hosts: "hosts",
  compare: "compare",
  submit: "submit",
};

/** {name, run, query} of an address. */
export function parse(hash) {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split("?");
  const [first = "", second = ""] = path.split("/").map(decoded);
  const query = Object.fromEntries(new URLSearchParams(search));
  if (first === "runs" && second) return { name: "run", run: second, query };
  return { name: ROUTES[first] ?? "missing", run: "", query };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function link(path, query) {
  const given = Object.entries(query ?? {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return `#/${path}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
}

export const runLink = (run, query) => link(`runs/${encodeURIComponent(run)}`, query);

export function go(where) {
  location.hash = where;
}

/** Changes the query of this very address without drawing the view anew. */
export function note(query) {
  const [path] = location.hash.split("?"), now = { ...parse(location.hash).query, ...query };
  const given = Object.entries(now).filter(([, value]) => value !== undefined && value !== null && value !== "");
  history.replaceState(null, "", `${path || "#/"}${given.length ? `?${new URLSearchParams(given)}` : ""}`);
}
