"""What each process of a benchmark does: start the others, be one of them, or only write the report."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trainer.bench import options, report
from trainer.bench.options import LOCAL_WORLD, NO_FILES, Asked
from trainer.errors import InputError, TrainerError

MAIN = str(Path(__file__).resolve().parent.parent / "__main__.py")
POLL_S = 0.2
GRACE_S = 30.0  # for rank 0 to write what was measured
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def start(words: Sequence[str]) -> None:
    """Do as the words say; they are right, or InputError says what is not."""
    if words[:1] == ["report"]:
        write_report(words[1:])
        return
    asked = options.parse(words, os.environ)
    if asked.config.check:
        return
    if asked.out != NO_FILES and asked.config.rank == 0:
        report.folder_for(asked.out)
    if "RANK" not in os.environ and not asked.config.init_method:
        start_ranks(asked.world or LOCAL_WORLD, words)
        return
    if asked.world not in (None, asked.config.world_size):
        raise InputError(f"--world {asked.world}, but {asked.config.world_size} ranks were started")
    be_a_rank(asked, words)


def be_a_rank(asked: Asked, words: Sequence[str]) -> None:
    """Take part; rank 0 reports."""
    from trainer.bench.reporter import Reporter  # only now: importing torch takes seconds

    reporter = Reporter(asked, f"python -m trainer.bench {shlex.join(words)}")
    has_files = asked.out != NO_FILES and asked.config.rank == 0
    if has_files:
        end_tidily()
    try:
        if asked.kind == "table":
            from trainer.bench.training import train_all

            train_all(asked, reporter)
        else:
            from trainer.bench.exchanging import time_exchanges

            time_exchanges(asked, reporter)
    finally:
        if has_files:
            ignore_signals()
        reporter.finish()


def end_tidily() -> None:
    """On the first signal to end, go through what is left to do, and let no other one interrupt that."""

    def end(*_: object) -> None:
        ignore_signals()
        raise KeyboardInterrupt

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup and the like want it
            signal.signal(number, end)


def ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def start_ranks(world: int, words: Sequence[str]) -> None:
    """Be the parent of all ranks, on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = max(1, len(os.sched_getaffinity(0)) // world)
    shared = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"} | os.environ
    shared |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    argv = [sys.executable, MAIN, "--bench", *words]
    ranks: list[subprocess.Popen[bytes]] = []
    end_tidily()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        try:
            for rank in range(world):
                own = {"RANK": str(rank), "RINGCTL_METRICS": os.path.join(folder, f"{rank}.jsonl")}
                ranks.append(subprocess.Popen(argv, env=shared | own))
            wait_for(ranks)
        finally:
            end_all(ranks)


def end_all(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End them, and return when they have."""
    for process in ranks:
        process.terminate()
    for process in ranks:
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return when all have ended well; TrainerError names the first that was seen not to."""
    going_on = dict(enumerate(ranks))
    while going_on:
        for rank, process in list(going_on.items()):
            try:
                code = process.wait(POLL_S / len(going_on))
            except subprocess.TimeoutExpired:
                continue
            del going_on[rank]
            if code:
                raise TrainerError(f"rank {rank} ended with exit code {code}; its own output says why")


def write_report(words: Sequence[str]) -> None:
    """`report DIR`: the files, from the results as JSON on stdin; what was written, on stdout."""
    if len(words) != 1:
        raise InputError("write `report DIR`")
    for line in report.write(Path(words[0]), report.from_json(json.load(sys.stdin))):
        print(line)
