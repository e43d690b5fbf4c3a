"""`python -m tests.soak --seconds 900 [--faults N] [--seed S] [--only NAME] [--out FILE]`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from tests.launcher import hosts
from tests.soak.faults import FAULTS
from tests.soak.soak import Tally, scene_in, soak, summary, table

MOST = 10**6


def main() -> int:
    options = parser().parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ringctl-soak-"))
    tally = Tally(options.seed)
    try:
        cluster = hosts.Hosts(4, folder=folder / "cluster")
        with cluster:
            become_controller(cluster, folder)
            hosts.equip(cluster)
            scene = scene_in(folder / "project", cluster, options.seed)
            try:
                soak(scene, tally, say, seconds=options.seconds, most=options.faults, only=options.only)
            finally:
                scene.close()
    except KeyboardInterrupt:
        say("interrupted")
    finally:
        os.chdir("/")
        shutil.rmtree(folder, ignore_errors=True)
    for line in summary(tally):
        say(line)
    if options.out:
        text = "\n".join(
            ["# Soak", "", f"    {command(options)}", "", *(f"- {line}" for line in summary(tally)), ""]
        )
        options.out.write_text(text + "\n" + "\n".join(table(tally)) + "\n")
    return 0 if tally.good else 1


def command(options: argparse.Namespace) -> str:
    """As it was asked for."""
    most = f" FAULTS={options.faults}" if options.faults < MOST else ""
    return f"make soak SECONDS={options.seconds:.0f}{most} SEED={options.seed}"


def say(line: str) -> None:
    print(line, flush=True)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--faults", type=int, default=MOST, help="no more than so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=sorted(FAULTS), default=[])
    parser.add_argument("--out", type=Path, help="write the summary there, as Markdown")
    return parser


def become_controller(cluster: hosts.Hosts, folder: Path) -> None:
    home = hosts.own_home(cluster, folder)
    os.environ.update(HOME=str(home), RINGCTL_HOME=str(folder / "ringctl"))
    os.environ["RINGCTL_HOSTS"] = str(folder / "hosts.yaml")
    os.environ.pop("SSH_AUTH_SOCK", None)
    hosts.inventory(cluster)


if __name__ == "__main__":
    sys.exit(main())
