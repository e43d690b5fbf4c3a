"""64 ranks on this machine, each with 200 lines a second, and five who follow them: each by the service's
`page` in a browser, by its `stream`, or by its own `ringctl logs --follow` (`logs`); one of these words for
all of them, or one for each, with commas. Prints JSON: `delay` from print to screen or reader in s (median,
99 of 100 are quicker, longest), the `latest` lines as [s after the first, delay in s], the machine's own
`stalls` (the ten longest times that a process which only sleeps slept too long, likewise), `cost` of what
serves them in s of processor time, its `memory` over time as [s, MB], and how many lines the worst of them
has `lost`."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher import client

RANKS, RATE, READERS, SAMPLE_S, NAP_S = 64, 200, 5, 5.0, 0.05
Pair = tuple[float, float]
ROOT = str(Path(__file__).resolve().parents[2])
RINGCTL = [sys.executable, "-m", "launcher", "--no-input"]
# A few lines at a time, no two of them the same, so that nothing folds; and cheap, for all ranks share this
# machine with what is measured.
PRINT = """
import os, sys, time
begin, seconds, rate, rank, some = time.time(), {seconds}, {rate}, os.environ["RANK"], 4
for number in range(0, seconds * rate, some):
    lines = [f"{{time.time():.6f}} rank {{rank}} step {{number + i}} of a training" for i in range(some)]
    sys.stdout.write("\\n".join(lines) + "\\n")
    sys.stdout.flush()
    time.sleep(max(0.0, begin + (number + some) / rate - time.time()))
"""
# In the page, before its own scripts: when the first line of what came is printed, and when the last is seen,
# which is when the frame begins after the one in which it was put there. What was printed before the page
# listened is not counted: nobody could have shown it sooner. All texts are read once only, and no frame is
# asked for in which nothing changes: what looks is not to take the processors from what is looked at.
NOTE = """
const noted = window.noted = {lost: 0, delays: [], over: false}, came = [], last = {};
const add = EventSource.prototype.addEventListener, parse = JSON.parse;
let read = "", made = null, asked = false, listens = Infinity;
JSON.parse = (text, ...others) => (text === read ? made : parse(text, ...others));
const now = () => (performance.timeOrigin + performance.now()) / 1000;
function take(text) {
  made = parse(text);
  read = text;
  for (const line of made) {
    const [, , rank, , step] = line[6].split(" ");
    noted.lost += step - (last[rank] ?? step - 1) - 1;
    last[rank] = Number(step);
  }
  came.push([parseFloat(made[0][6]), made[made.length - 1][6]]);
}
EventSource.prototype.addEventListener = function (name, handler) {
  if (name === "lines") {
    add.call(this, "open", () => { listens = Math.min(listens, now()); });
    add.call(this, name, (event) => take(event.data));
  }
  if (name === "end") add.call(this, name, () => { noted.over = true; });
  add.call(this, name, handler);
};
function look() {
  asked = false;
  const rows = document.querySelectorAll(".loglines .said"), text = rows[rows.length - 1]?.textContent;
  const at = came.findIndex((some) => some[1] === text);
  const seen = came.splice(0, at + 1).filter(([printed]) => printed > listens);
  for (const [printed] of seen) noted.delays.push([printed, now() - printed]);
}
function soon() {
  if (!asked) requestAnimationFrame(() => requestAnimationFrame(look));
  asked = true;
}
document.addEventListener("DOMContentLoaded", () =>
  new MutationObserver(soon).observe(document.body, {childList: true, subtree: true}));
"""
TELL = "return [noted.lost, noted.over, noted.delays.splice(0)]"


def main(how: str, seconds: int) -> None:
    kinds = how.split(",") if "," in how else [how] * READERS
    service = None if "logs" in kinds else Service()
    try:
        print(json.dumps(measured(kinds, service, seconds)))
    finally:
        if service:
            service.process.terminate()
            service.process.wait()


def measured(kinds: list[str], service: Service | None, seconds: int) -> dict[str, Any]:
    told: multiprocessing.Queue[str] = multiprocessing.Queue()
    heard: multiprocessing.Queue[Any] = multiprocessing.Queue()
    lines = RANKS * RATE * seconds
    readers = [
        multiprocessing.Process(target=note, args=(kind, lines, service, told, heard)) for kind in kinds
    ]
    for reader in readers:
        reader.start()
    for _ in readers:
        heard.get(timeout=60)  # it is there
    run = handed_in(seconds, ["submit"] if service else ["launch", "--local", "--detach", "--skip-preflight"])
    for _ in readers:
        told.put(run)
    watched = [service.process.pid] if service else [pid for each in readers for pid in children_of(each)]
    over_time, cost, stalls = watch(watched, seconds)
    answers = [heard.get(timeout=120) for _ in readers]
    for reader in readers:
        reader.join()
    late = [pair for _, some in answers for pair in some]
    delays, first = sorted(delay for _, delay in late), min(printed for printed, _ in late)
    figures = (statistics.median(delays), delays[int(len(delays) * 0.99)], delays[-1])
    lost = max(lost for lost, _ in answers)
    odd = {"latest": longest(late, first), "stalls": longest(stalls, first)}
    return {"delay": figures, **odd, "cost": cost, "memory": over_time, "lost": lost}


class Service:
    """One of our own, with a slot for each rank."""

    def __init__(self) -> None:
        hosts = Path(tempfile.mkdtemp()) / "hosts.yaml"
        hosts.write_text(f"hosts: [{{name: here, local: true, slots: {RANKS}}}]\n")
        command = [*RINGCTL, "serve", "--port", "0", "--hosts", str(hosts)]
        # A session of its own: where processors are shared among sessions (autogroup), it would else have
        # only a part of the browsers' share, while each rank has one for itself.
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]


def handed_in(seconds: int, how: list[str]) -> str:
    command = [sys.executable, "-S", "-E", "-c", PRINT.format(seconds=seconds, rate=RATE)]
    done = subprocess.run(
        [*RINGCTL, *how, "--json", "--world", str(RANKS), "--no-prefork", "--", *command],
        check=True,
        capture_output=True,
        cwd=tempfile.mkdtemp(),
    )
    return str(json.loads(done.stdout)["run"])


def watch(pids: list[int], seconds: int) -> tuple[list[Pair], float, list[Pair]]:
    """Their memory over time, the processor time that they take, and when this process slept too long."""
    began, before = time.time(), sum(map(processor_time, pids))
    samples: list[Pair] = []
    stalls: list[Pair] = []
    while (now := time.time()) < began + seconds:
        if now - began >= SAMPLE_S * len(samples):
            samples.append((round(now - began, 1), memory(pids)))
        time.sleep(NAP_S)
        stalls.append((now, time.time() - now - NAP_S))
    samples.append((round(now - began, 1), memory(pids)))
    return samples, sum(map(processor_time, pids)) - before, stalls


def longest(some: list[Pair], first: float) -> list[Pair]:
    some = sorted(some, key=lambda pair: pair[1], reverse=True)[:10]
    return [(round(at - first, 1), round(seconds, 2)) for at, seconds in some]


# --- those who look ------------------------------------------------------------------------------

Run = Callable[[], str]  # says that the reader is there, and waits for the run that it is to follow
# How many lines came, or did not; and of each piece, when its oldest line was printed, and how late it came.
Heard = tuple[int, list[Pair]]


def note(kind: str, lines: int, service: Service | None, told: Any, heard: Any) -> None:
    def run() -> str:
        heard.put("ready")
        return str(told.get())

    os.setsid()  # each of them looks from a machine of its own
    if kind == "page":
        assert service is not None
        heard.put(by_page(service.url, run))
    else:
        count, delays = by_stream(run) if kind == "stream" else by_logs(run)
        heard.put((lines - count, delays))


def by_stream(run: Run) -> Heard:
    there, count, delays = client.client_for(None), 0, []
    for name, _, data in there.stream(there.run(run(), "/stream")):
        if name == "lines":
            count += len(data)
            printed = float(data[0][6].split()[0])
            delays.append((printed, time.time() - printed))
    return count, delays


def by_logs(run: Run) -> Heard:
    command = [*RINGCTL, "logs", run(), "--follow", "--no-prefix"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    rest, count, delays = b"", 0, []
    while data := os.read(process.stdout.fileno(), 1 << 20):
        whole, newline, rest = (rest + data).rpartition(b"\n")
        if newline:
            lines = whole.split(b"\n")
            count += len(lines)
            printed = float(lines[0].split()[0])
            delays.append((printed, time.time() - printed))
    process.wait()
    return count, delays


def by_page(url: str, run: Run) -> Heard:
    """A page joins a log at its end: what it lacks is what is missing between the lines that it got."""
    sys.path.insert(0, ROOT)
    from tests.launcher.serve.browser import browsing

    link = subprocess.run([*RINGCTL, "serve", "link"], check=True, capture_output=True, text=True).stdout
    delays: list[Pair] = []
    with browsing() as browser:
        browser.open(link.split()[-1])
        browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": NOTE})
        address = f"{url}/#/runs/{run()}?tab=log"
        browser.open("about:blank")  # another document, so that the script comes before the page's own
        browser.open(address)
        over = False
        while not over:
            time.sleep(1.0)
            lost, over, some = browser.script(TELL)
            delays += some
    return lost, delays


def children_of(process: multiprocessing.Process) -> list[int]:
    """Waited for."""
    file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (found := file.read_text().split()):
        time.sleep(0.01)
    return [int(each) for each in found]


def processor_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pids: list[int]) -> float:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return round(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), 1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
