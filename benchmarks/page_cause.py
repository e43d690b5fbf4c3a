"""A rank is killed on a host: how soon the page says which, and why."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from benchmarks.measurement import Measurement, Series, Target
from benchmarks.workbench import BIN, CannotRun, Workbench
from tests.cluster import Cluster
from tests.launcher.serve.browser import CHROMIUM, DRIVER, Browser, browsing

RINGCTL = str(BIN / "ringctl")
HOSTS, KILLS, VICTIM = 4, 6, 2
WAIT_S = 120.0
TRAINING = ["--", "--steps", "100000", "--batch-size", "4", "--threads", "1"]
# When it can be seen, by the page itself: asking it again and again would keep it from its work.
WATCH = """
window.seen = null;
const look = () => {
  const cause = document.querySelector("#cause");
  if (window.seen || !cause?.checkVisibility() || !cause.innerText.includes(arguments[0])) return;
  requestAnimationFrame(() => requestAnimationFrame(() => { window.seen ??= Date.now() / 1000; }));
};
new MutationObserver(look).observe(document.body, { subtree: true, childList: true, characterData: true });
"""
STEP = "return document.querySelector('svg.curves path.line')?.getAttribute('d')?.includes('L') ?? false"


def page_cause(bench: Workbench) -> Iterator[Measurement]:
    """A rank is killed on one of 4 hosts: until Chromium shows the cause, and a terminal that follows."""
    if not (CHROMIUM and DRIVER):
        raise CannotRun("there is no chromium, or no chromedriver")
    with Cluster(HOSTS, folder=bench.folder / "cluster") as cluster:
        env = {**bench.env, "HOME": str(cluster.home)}
        with service(bench, cluster, env) as link, browsing() as browser:
            browser.open(link)
            kills = [kill_a_rank(bench, cluster, env, browser, link) for _ in range(KILLS)]
    page, terminal = zip(*kills, strict=True)
    ours = Series("the page", "s", page)
    theirs = Series("ringctl logs --follow", "s", terminal)
    what = f"from a rank's death to its cause being seen, the worst of {KILLS}"
    yield Measurement(what, ours, theirs, Target("ours", "at most", 5.0), "worst")


@contextmanager
def service(bench: Workbench, cluster: Cluster, env: Mapping[str, str]) -> Iterator[str]:
    """A link that opens its page."""
    argv = [RINGCTL, "--no-input", "serve", "--port", "0", "--hosts", str(cluster.hosts_file)]
    with bench.start(argv, extra=env) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it answers
        link = subprocess.run([RINGCTL, "serve", "link"], env=env, check=True, capture_output=True, text=True)
        yield link.stdout.strip()
        process.terminate()


def kill_a_rank(
    bench: Workbench, cluster: Cluster, env: Mapping[str, str], browser: Browser, link: str
) -> tuple[float, float]:
    """(until the page shows it, until the terminal does), in s."""
    run = str(told(env, "submit", "--world", str(HOSTS), *TRAINING)["run"])
    browser.open(f"{link.partition('/login')[0]}/#/runs/{run}")
    browser.wait(lambda: browser.script(STEP), "the first curve", WAIT_S)
    where = f"ank {VICTIM} on {cluster.names[VICTIM]}"
    browser.script(WATCH, where)
    pid = next(rank["pid"] for rank in told(env, "status", run)["ranks"] if rank["rank"] == VICTIM)
    with follower(env, run, where) as seen:
        time.sleep(2.0)  # in the middle of things, with whoever follows at the end of the log
        died = time.time()
        cluster.run(cluster.names[VICTIM], "kill", "-KILL", str(pid))
        page = browser.wait(lambda: browser.script("return window.seen"), "the cause", WAIT_S) - died
    bench.say(f"the page {page:.2f} s, the terminal {seen[0] - died:.2f} s")
    return page, seen[0] - died


@contextmanager
def follower(env: Mapping[str, str], run: str, words: str) -> Iterator[list[float]]:
    """Somebody at a terminal; when the words were there, once the block has ended."""
    seen: list[float] = []
    argv = [RINGCTL, "logs", run, "--follow"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env) as process:
        assert process.stdout is not None
        reading = threading.Thread(target=read, args=(process.stdout, words.encode(), seen))
        reading.start()
        try:
            yield seen
            process.wait(WAIT_S)
        finally:
            process.kill()
            reading.join()
    if not seen:
        raise CannotRun(f"ringctl logs --follow did not name {words!r}")


def read(out: IO[bytes], words: bytes, seen: list[float]) -> None:
    rest = b""
    while data := os.read(out.fileno(), 1 << 16):
        rest = (rest + data)[-(1 << 16) :]
        if words in rest and not seen:
            seen.append(time.time())


def told(env: Mapping[str, str], command: str, *args: str) -> Any:
    argv = [RINGCTL, command, "--json", *args]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotRun(f"ringctl {command}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout)
