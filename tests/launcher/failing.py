"""Real failures for tests: programs that fail as a user's would, runs that are watched to their end, and the
rows of the catalogue that a test brings about."""

from __future__ import annotations

import io
import os
import runpy
import sys
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from launcher import ask, fold, foreign, run, watch
from launcher.diagnose import Cause
from launcher.model import Event, Plan, RunState
from launcher.transport import Pool

Step = Callable[[list[Event], RunState], None]
Test = TypeVar("Test", bound=Callable[..., None])


def produces(*ids: str) -> Callable[[Test], Test]:
    """Marks a test that makes these failures of the catalogue happen, and checks what is said of each."""

    def mark(test: Test) -> Test:
        test.rows = ids  # type: ignore[attr-defined]  # a mark of ours
        return test

    return mark


# --- Runs ----------------------------------------------------------------------------------------


class Watched:
    """A screen that remembers, and lets a test interfere when something has happened."""

    def __init__(self, during: Step) -> None:
        self.during = during
        self.notes: list[str] = []
        self.events: list[Event] = []

    def plan(self, plan: Plan) -> None:
        pass

    def show(self, events: list[Event], state: RunState) -> None:
        self.events += events
        self.during(events, state)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def log_of(self, rank: int) -> str:
        """What one rank said, as it would be in a file of its own."""
        said = [event for event in self.events if event.kind == "line" and event.rank == rank]
        return "".join(f"{event.data['text']}\n" for event in said)


def watched(
    command: list[str], *, world: int = 1, local: bool = True, during: Step = lambda *_: None, **options: Any
) -> tuple[watch.Outcome, Watched]:
    """Launch unchecked, as someone who knows better does, and watch it to its end."""
    screen, pool, interrupts = Watched(during), Pool(no_input=True), watch.Interrupts()
    settings = {"name": "", "master_port": None, "prefork": True, "variables": {}, **options}
    try:
        asked = ask.run(ask.inventory(ask.Where(), local, world), tuple(command), world=world, **settings)
        asked = replace(asked, options=replace(asked.options, preflight=False))
        plan, agents = run.launch(asked, pool, screen, interrupts)
        return watch.watch(fold.initial(plan), agents, screen, interrupts), screen
    finally:
        interrupts.release()
        pool.close()


def failure(command: list[str], **options: Any) -> Cause:
    return failure_and_screen(command, **options)[0]


def failure_and_screen(command: list[str], **options: Any) -> tuple[Cause, Watched]:
    outcome, screen = watched(command, **options)
    assert outcome.state.state == "failed"
    assert outcome.cause is not None
    return outcome.cause, screen


def explained(log: str) -> Cause:
    """What `ringctl explain` makes of a log."""
    cause = foreign.read(foreign.lines_of(io.BytesIO(log.encode()))).cause
    assert cause is not None, log
    return cause


# --- Programs ------------------------------------------------------------------------------------


def program(body: str, name: str = "train.py") -> list[str]:
    Path(name).write_text(textwrap.dedent(body))
    return ["python", name]


TOGETHER = """
import datetime, json, os, sys, time
import torch, torch.distributed as dist

rank, metrics = int(os.environ["RANK"]), open(os.environ["RINGCTL_METRICS"], "a", buffering=1)

def join(**place):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={timeout}), **place)

def step(number, size=1000):
    dist.all_reduce(torch.ones(size))
    metrics.write(json.dumps(dict(step=number)) + "\\n")
"""

# Waits for the others as long as it takes, so that a short timeout only counts for the connections.
MEET = """
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, rank == 0)
join(store=store, rank=rank, world_size=2)
"""


def together(body: str, timeout: float | str = 60) -> list[str]:
    return program(TOGETHER.replace("{timeout}", str(timeout)) + textwrap.dedent(body))


def failure_together(body: str, *, world: int = 2, timeout: float | str = 60, **options: Any) -> Cause:
    return failure(together(body, timeout), world=world, **options)


def by_hand(command: list[str], world: int = 1) -> Cause:
    """What `ringctl explain` makes of the log of ranks that nobody launched: processes forked from this one,
    for which it has imported torch, with their lines labelled as `ringctl logs` does it."""
    from tests.trainer.ranks import each, free_port  # imports torch, which other tests do without

    path, port = Path(command[-1]).resolve(), free_port()
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}

    def start(rank: int) -> None:
        speak_to(path.with_suffix(f".{rank}"))
        numbers = {"RANK": str(rank), "WORLD_SIZE": str(world), "RINGCTL_METRICS": os.devnull}
        os.environ.update({**here, **numbers})
        try:
            runpy.run_path(str(path), run_name="__main__")
        except Exception as error:
            trace = error.__traceback__
            while trace and trace.tb_next and trace.tb_frame.f_code.co_filename != str(path):
                trace = trace.tb_next  # what is before is ours
            traceback.print_exception(error.with_traceback(trace))

    each(world, start)
    logs = {rank: path.with_suffix(f".{rank}").read_text() for rank in range(world)}
    return explained(
        "".join(f"[{rank} here] {line}\n" for rank, log in logs.items() for line in log.splitlines())
    )


def speak_to(path: Path) -> None:
    """Have all that this process says, and what it calls, go to a file."""
    file = path.open("w", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
