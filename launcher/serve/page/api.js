// Talks to the service. Every failure is a Failure: what happened, and what to do.

export class Failure extends Error {
  constructor(message, fix = "", status = 0) {
    super(message);
    this.fix = fix;
    this.status = status;
  }
}

export const get = (path, query, signal) => ask("GET", path, query, undefined, signal);
export const post = (path, body = {}) => ask("POST", path, null, body);

async function ask(method, path, query, body, signal) {
  let answer, told = null;
  try {
    answer = await fetch(address(path, query), {
      method, signal, credentials: "same-origin", cache: "no-store",
      headers: body === undefined ? {} : { "Content-Type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    told = await answer.json().catch(() => null);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The service does not answer", "Is `ringctl serve` still running? This page tries again by itself.");
  }
  if (answer.ok) return told;
  if (answer.status === 401) throw new Failure("You are not signed in here", "Type `ringctl serve link` and open what it prints.", 401);
  throw new Failure(told?.error ?? `The service answered ${answer.status}`, told?.fix ?? "", answer.status);
}

/** A path and its query, without what is empty. */
export function address(path, query) {
  const given = Object.entries(query ?? {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

export const runPath = (run, rest = "") => `/api/runs/${encodeURIComponent(run)}${rest}`;
