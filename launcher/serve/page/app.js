// The page: shows the view that the address names, says whether it is connected, and keeps the colours.

import { entitle, h, put, say, set } from "./dom.js";
import { onRefused } from "./api.js";
import { onState, silence } from "./live.js";
import { parse } from "./router.js";
import { icon } from "./icons.js";
import { startKeys } from "./keys.js";
import { announce, emptyState, errorState, showKeys } from "./dialogs.js";
import { introduce, signOut } from "./me.js";
import { runsView } from "./views/runs.js";
import { runView } from "./views/run.js";
import { hostsView } from "./views/hosts.js";
import { compareView } from "./views/compare.js";
import { queueView } from "./views/queue.js";
import { submitView } from "./views/submit.js";

const VIEWS = { runs: runsView, run: runView, hosts: hostsView, compare: compareView, queue: queueView, submit: submitView };
const THEMES = ["auto", "light", "dark"];
const WORDS = { live: "Live", reconnecting: "Reconnecting…", resting: "Paused", off: "" };

const main = document.getElementById("main");
let shown = null;

function route(event) {
  const where = parse(location.hash);
  shown?.close();
  silence();
  main.dataset.view = where.name;
  const make = VIEWS[where.name];
  shown = make ? make(main, where) : { close: () => {}, title: "Nothing here" };
  if (!make) put(main, emptyState("There is nothing here", "The address is not one of this page.", "", h("a", { class: "button", href: "#/runs" }, "All runs")));
  entitle(shown.title);
  for (const one of document.querySelectorAll("nav a")) {
    const current = one.dataset.view === where.name || (one.dataset.view === "runs" && where.name === "run");
    if (current) one.setAttribute("aria-current", "page"); else one.removeAttribute("aria-current");
  }
  if (event) {
    main.focus({ preventScroll: true });
    window.scrollTo(0, 0);
  }
}

// --- light and dark ---

const themeButton = document.getElementById("theme");

function wear(theme) {
  document.documentElement.dataset.theme = theme;
  put(themeButton, icon({ auto: "auto", light: "sun", dark: "moon" }[theme]));
  for (const name of ["aria-label", "title"]) set(themeButton, name, `Colours: ${theme === "auto" ? "as the system" : theme}`);
}

function nextTheme() {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  localStorage.setItem("theme", next);
  wear(next);
}

// --- connection ---

onState((state) => {
  const place = document.getElementById("connection");
  place.dataset.state = state;
  say(place, WORDS[state]);
});

const wished = localStorage.getItem("theme");
wear(THEMES.includes(wished) ? wished : "auto");
themeButton.addEventListener("click", nextTheme);
put(document.getElementById("help"), icon("help"));
document.getElementById("help").addEventListener("click", showKeys);
document.getElementById("submit-link").prepend(icon("plus"));
document.getElementById("skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
startKeys({ theme: nextTheme });
const leave = document.getElementById("sign-out");
put(leave, icon("leave"));
leave.addEventListener("click", signOut);

/** What was shown would only grow old. A form that is half filled stays, to be sent once somebody has signed in. */
onRefused((error) => {
  if (!shown) return;
  const { name } = parse(location.hash);
  shown.close();
  shown = null;
  silence();
  if (name === "submit") announce(error.message, { bad: true, fix: error.fix });
  else put(main, errorState(error, begin));
});

if (location.search) history.replaceState(null, "", `/${location.hash}`); // by which it was tried again to sign in

/** Nothing is shown before it is known what may be done with it. */
async function begin() {
  try {
    const me = await introduce();
    set(leave, "title", `Sign out ${me.user}`);
    window.addEventListener("hashchange", route);
    route();
  } catch (error) {
    put(main, errorState(error, begin));
  }
}

begin();
