// Talks to the service. Every failure is a Failure: what happened, and what to do.

const AGAIN_MS = [200, 1000]; // after a failure to reach it

export class Failure extends Error {
  constructor(message, fix = "", status = 0) {
    super(message);
    this.fix = fix;
    this.status = status;
  }
}

let tellRefused = () => {};

/** Whoever is told that nobody is signed in here any more, whatever was asked for. */
export function onRefused(tell) {
  tellRefused = tell;
}

export const get = (path, query, signal) => ask("GET", path, query, undefined, signal);
export const post = (path, body = {}) => ask("POST", path, null, body);

async function ask(method, path, query, body, signal) {
  const options = { method, signal, credentials: "same-origin", cache: "no-store" };
  if (body !== undefined) Object.assign(options, { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  const answer = await reached(address(path, query), options, method === "GET" || Boolean(body?.key)), told = await answer.json().catch(() => null);
  if (answer.ok) return told;
  if (answer.status === 401) {
    const refused = new Failure("You are not signed in here", "Type `ringctl serve link` and open what it prints.", 401);
    tellRefused(refused);
    throw refused;
  }
  throw new Failure(told?.error ?? `The service answered ${answer.status}`, told?.fix ?? "", answer.status);
}

/** Asks again for what may be asked twice (a key says that it is the same): a laptop that changes its network drops
 * all its connections, and a service that has too much to do says when to come back. */
async function reached(where, options, twice) {
  for (let again = twice ? AGAIN_MS : []; ; again = again.slice(1)) {
    let wait = again[0];
    try {
      const answer = await fetch(where, options);
      if (answer.status !== 429 || !again.length) return answer;
      wait = 1000 * (Number(answer.headers.get("Retry-After")) || 1);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      if (!again.length) throw new Failure("The service does not answer", "Is `ringctl serve` still running, and are you connected?");
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

/** A path and its query, without what is empty. */
export function address(path, query) {
  const given = Object.entries(query ?? {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

export const runPath = (run, rest = "") => `/api/runs/${encodeURIComponent(run)}${rest}`;
