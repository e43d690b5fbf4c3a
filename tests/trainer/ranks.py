"""Real ranks for tests: processes forked from this one, so that torch is imported once for all of them.

Tests must not run a backward pass in this process: torch refuses one in a process forked after that.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from trainer import group
from trainer.__main__ import main
from trainer.checkpoint_files import TEMPORARY
from trainer.config import Config

DEADLINE_S = 90.0


def each(count: int, work: Callable[[int], Any], *, dying: Collection[int] = ()) -> list[Any]:
    """What `work(number)` returns in each of `count` processes at once; None for those meant to die of it."""
    context = multiprocessing.get_context("fork")
    gc.freeze()  # a look through all of torch would copy its pages in each process
    started = []
    for number in range(count):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work_and_answer, args=(work, number, sender))
        process.start()
        sender.close()
        started.append((process, receiver))
    deadline = time.monotonic() + DEADLINE_S
    try:
        answers = [_answer(receiver, deadline) for _, receiver in started]
    finally:
        for process, receiver in started:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
            receiver.close()
    failed = [text for number, (text, _) in enumerate(answers) if text and number not in dying]
    assert not failed, "\n".join(failed)
    return [result for _, result in answers]


def together(world: int, folder: Path, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returns on each of `world` ranks of one process group."""
    store = folder / f"store-{time.monotonic_ns()}"

    def as_member(rank: int) -> Any:
        config = Config(
            rank=rank, world_size=world, init_method=f"file://{store}", gloo_socket_ifname="lo", timeout=30
        )
        with group.joined(config):
            return work(rank)

    return each(world, as_member)


@dataclass(frozen=True)
class Outcome:
    """How one rank of the trainer ended."""

    exit_code: int
    out: str
    err: str
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def last(self) -> dict[str, Any]:
        return self.records[-1]


def trained(
    world: int,
    folder: Path,
    *options: str,
    env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
) -> list[Outcome]:
    """How the trainer ended on each of `world` ranks that were started by hand with these options.

    `env` is what they find in their environment, or says that of each rank.
    """
    address = f"tcp://127.0.0.1:{free_port()}"
    run = folder / f"run-{time.monotonic_ns()}"
    run.mkdir(parents=True)

    def as_rank(rank: int) -> int:
        # Both what Python prints and what gloo prints itself.
        sys.stdout, sys.stderr = ((run / f"{rank}.{name}").open("w", buffering=1) for name in ("out", "err"))
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stderr.fileno(), 2)
        own = env(rank) if callable(env) else env or {}
        os.environ.update({"RINGCTL_METRICS": str(run / f"{rank}.jsonl"), **own})
        place = ["--init-method", address, "--rank", str(rank), "--world-size", str(world)]
        return main([*place, "--gloo_socket_ifname", "lo", "--threads", "1", *options])

    codes = each(world, as_rank)
    return [_outcome(run, rank, code) for rank, code in enumerate(codes)]


def at_names(before: Callable[[Path], None], after: Callable[[Path], None] = lambda _: None) -> None:
    """In this process, do that just before a file is put in its place, and that behind it."""

    def watched(real: Callable[..., None]) -> Callable[..., None]:
        def name(source: Any, target: Any, **more: Any) -> None:
            if not Path(target).name.endswith(TEMPORARY):
                before(Path(target))
            real(source, target, **more)
            after(Path(target))

        return name

    os.link, os.replace = watched(os.link), watched(os.replace)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _outcome(run: Path, rank: int, code: int) -> Outcome:
    out, err = ((run / f"{rank}.{name}").read_text() for name in ("out", "err"))
    return Outcome(code, out, err, records(run / f"{rank}.jsonl"))


def _work_and_answer(work: Callable[[int], Any], number: int, sender: Connection) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    try:
        answer: tuple[str, Any] = ("", work(number))
    except BaseException:  # whatever it is, the test has to hear of it
        answer = (f"process {number}: {traceback.format_exc()}", None)
    sender.send_bytes(pickle.dumps(answer))
    sender.close()


def _answer(receiver: Connection, deadline: float) -> tuple[str, Any]:
    try:
        if receiver.poll(max(0.0, deadline - time.monotonic())):
            answer: tuple[str, Any] = pickle.loads(receiver.recv_bytes())
            return answer
    except EOFError:
        return "a process ended without an answer", None
    return "a process did not answer in time", None
