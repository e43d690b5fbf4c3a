"""Take the pictures of docs/service.md, in docs/pictures/service/, of a real service with real runs (root):

python scripts/screenshots.py [--out FOLDER] [--hosts FILE]

Without --hosts it starts the test hosts and removes them afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from PIL import Image

from tests.cluster import Cluster
from tests.launcher.ringctl import wait_for
from tests.launcher.serve.browser import Browser, browsing
from tests.launcher.serve.service import Service, serving

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "service"
WINDOWS = {"light": (1280, 860), "dark": (1280, 860), "phone": (390, 844)}
COLOURS, COMMON = 200, 120  # of a picture: enough for flat areas and their edges, and a third of the size
TALLEST = 1500
PATIENCE_S = 600
ONE = ("--threads", "1")  # all hosts are one machine
SHORT, LONG = ("--epochs", "3", *ONE), ("--epochs", "60", "--checkpoint-every", "250", *ONE)
FAILS = """
import json, os, sys, time
rank = int(os.environ["RANK"])
for step in range(1, 90):
    told = {"step": step, "steps": 400, "loss": 2.3 * 0.985**step, "samples_per_s": 410.0}
    with open(os.environ["RINGCTL_METRICS"], "a") as file:
        print(json.dumps({**told, "step_ms": 39.0, "comm_ms": 12.0}), file=file)
    if step % 10 == 0:
        print(f"step {step:3d}  loss {told['loss']:.4f}  shard data/shard-{rank}.bin", flush=True)
    if step % 20 == 5 and rank != 2:
        print("waiting for rank 2", file=sys.stderr, flush=True)
    time.sleep(0.03)
    if step == 80 and rank == 2:
        raise FileNotFoundError("data/shard-2.bin")
"""

FAILS_ONCE = FAILS.replace("step == 80", "int(os.environ['RINGCTL_ATTEMPT']) == 1 and step == 80")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--hosts", type=Path, help="an inventory of four slots or more")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pictures-") as home, hosts(options.hosts) as inventory:
        os.environ["RINGCTL_HOME"] = f"{home}/ringctl"
        with serving("--hosts", str(inventory)) as service, browsing() as browser:
            browser.open(service.link)
            taken = take_all(service, browser)
    for name, picture in taken.items():
        path = options.out / f"{name}.png"
        reduced(picture).save(path, optimize=True)
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


@contextlib.contextmanager
def hosts(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given.resolve()
        return
    # A rate that a short sample of preflight measures rightly also where one machine is all hosts.
    with Cluster(4, rate="100mbit") as cluster:
        os.environ["HOME"] = str(cluster.home)
        yield cluster.folder / "hosts.yaml"


def take_all(service: Service, browser: Browser) -> dict[str, Image.Image]:
    taken, runs = {}, make_runs(service)
    places = {
        "runs": "runs",
        "run": f"runs/{runs['long-run']}",
        **{
            tab: f"runs/{runs['long-run']}?tab={tab}" for tab in ("ranks", "preflight", "plan", "checkpoints")
        },
        "attempts": f"runs/{runs['again']}?tab=attempts",
        "log": f"runs/{runs['missing-shard']}?tab=log",
        "failed": f"runs/{runs['missing-shard']}",
        "hosts": "hosts",
        "queue": "queue",
        "compare": f"compare?runs={runs['baseline']},{runs['smaller-steps']}",
        "submit": f"submit?from={runs['baseline']}",
    }
    for window, (width, height) in WINDOWS.items():
        for name, place in places.items():
            browser.size(width, height, dark=window == "dark")
            show(browser, f"{service.url}/#/{place}")
            taken[f"{name}-{window}"] = seen(browser, window)
        browser.open(f"{service.url}/api/runs/{runs['baseline']}/report")
        browser.wait(lambda: browser.all("svg.curves path.line"), "the report")
        taken[f"report-{window}"] = seen(browser, window)
    return taken


def make_runs(service: Service) -> dict[str, str]:
    """Runs in every state that a picture is to show; their ids by name."""
    runs = {}
    wait_for(lambda: service.client().get("/api/preflight"), "the first preflight", 60)
    for name, rate in (("baseline", "0.01"), ("smaller-steps", "0.002")):
        runs[name] = service.submit(*SHORT, "--lr", rate, name=name, world=4)
        service.wait_for_state(runs[name], "succeeded", seconds=PATIENCE_S)
    runs["missing-shard"] = service.submit("python", "-c", FAILS, name="missing-shard", world=4)
    service.wait_for_state(runs["missing-shard"], "failed", seconds=60)
    runs["again"] = service.submit("python", "-c", FAILS_ONCE, name="again", world=4, max_restarts=1)
    service.wait_for_state(runs["again"], "succeeded", seconds=60)
    runs["long-run"] = service.submit(*LONG, name="long-run", world=3)
    wait_for(lambda: (service.row(runs["long-run"])["step"] or 0) > 1000, "some steps", PATIENCE_S)
    for name, more in (("all-hosts", {"priority": 5}), ("afterwards", {"after": runs["long-run"]})):
        runs[name] = service.submit("--epochs", "3", name=name, world=4, **more)
    wait_for(lambda: all(row["waiting"] for row in service.client().get("/api/queue")["queue"]), "reasons")
    return runs


def show(browser: Browser, address: str) -> None:
    """Again if a change of the machine's network has kept some of it out."""
    for _ in range(3):
        with contextlib.suppress(AssertionError):
            return show_once(browser, address)
    return show_once(browser, address)


def show_once(browser: Browser, address: str) -> None:
    browser.open("about:blank")
    browser.open(address)
    browser.wait(lambda: browser.all("main h1") and not browser.all("main .skeleton"), "the screen")
    curves = "return [...document.querySelectorAll('svg.curves')].every((one) => one.childElementCount > 1)"
    browser.wait(lambda: browser.script(curves), "curves")


def seen(browser: Browser, window: str) -> Image.Image:
    """All of the page, or most of it."""
    width, height = WINDOWS[window]
    tall = browser.script("return document.documentElement.scrollHeight")
    browser.size(width, max(height, min(tall, TALLEST)), dark=window == "dark")
    browser.script("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return Image.open(io.BytesIO(browser.driver.get_screenshot_as_png())).convert("RGB")


def reduced(picture: Image.Image) -> Image.Image:
    """Few colours: those that most of it has, as they are, and the most unlike these, so that a small sign
    keeps its own."""
    pixels = np.asarray(picture).astype(np.int32) @ (1 << 16, 1 << 8, 1)
    colours, where, count = np.unique(pixels, return_inverse=True, return_counts=True)
    known = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1)
    chosen = list(np.argsort(-count)[:COMMON])
    far = np.min([((known - known[one]) ** 2).sum(axis=1) for one in chosen], axis=0)
    while len(chosen) < COLOURS and far.max() > 0:
        chosen.append(int(far.argmax()))
        far = np.minimum(far, ((known - known[chosen[-1]]) ** 2).sum(axis=1))
    nearest = np.argmin(((known[:, None] - known[chosen][None]) ** 2).sum(axis=2), axis=1)
    small = Image.fromarray(nearest[where].reshape(picture.height, picture.width).astype(np.uint8), "P")
    small.putpalette(known[chosen].astype(np.uint8).tobytes())
    return small


if __name__ == "__main__":
    main()
