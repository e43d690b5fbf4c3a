"""64 ranks on this machine, each with 200 lines a second, and five who follow them: by the service, or each
by `ringctl logs --follow`. Prints: the delay from print to reader (99 of 100 are quicker) in s, processor
time of what serves them in s, growth of its memory over the second half in MB, lines that one did not get."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher import client

RANKS, RATE, READERS = 64, 200, 5
RINGCTL = [sys.executable, "-m", "launcher", "--no-input"]
PRINT = """
import os, sys, time
begin, seconds, rate = time.time(), {seconds}, {rate}
for piece in range(seconds * 10):
    line = f"{{time.time():.6f}} step {{piece}} of a training that somebody looks at\\n"
    sys.stdout.write(line * (rate // 10))
    sys.stdout.flush()
    time.sleep(max(0.0, begin + (piece + 1) / 10 - time.time()))
"""


def main(how: str, seconds: int) -> None:
    command = [sys.executable, "-c", PRINT.format(seconds=seconds, rate=RATE)]
    heard: multiprocessing.Queue[tuple[int, list[float]]] = multiprocessing.Queue()
    by_service = how == "service"
    service = start_service() if by_service else None
    launch = ["submit"] if by_service else ["launch", "--local", "--detach", "--skip-preflight"]
    done = subprocess.run(
        [*RINGCTL, *launch, "--json", "--world", str(RANKS), "--no-prefork", "--", *command],
        check=True,
        capture_output=True,
        cwd=tempfile.mkdtemp(),
    )
    run = str(json.loads(done.stdout)["run"])
    read = by_stream if by_service else by_logs
    readers = [multiprocessing.Process(target=note, args=(read, run, heard)) for _ in range(READERS)]
    for reader in readers:
        reader.start()
    time.sleep(seconds / 2)
    watched = (
        [service.pid] if service else [pid for each in readers if each.pid for pid in children(each.pid)]
    )
    half = memory(watched)
    time.sleep(seconds / 2)
    cost, growth = sum(map(processor_time, watched)), memory(watched) - half
    answers = [heard.get(timeout=120) for _ in readers]
    for reader in readers:
        reader.join()
    if service:
        service.terminate()
        service.wait()
    delays = sorted(delay for _, some in answers for delay in some)
    lost = max(RANKS * RATE * seconds - count for count, _ in answers)
    print(delays[int(len(delays) * 0.99)], cost, growth, lost)


def start_service() -> subprocess.Popen[bytes]:
    hosts = Path(tempfile.mkdtemp()) / "hosts.yaml"
    hosts.write_text(f"hosts: [{{name: here, local: true, slots: {RANKS}}}]\n")
    process = subprocess.Popen(
        [*RINGCTL, "serve", "--port", "0", "--hosts", str(hosts)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def note(read: Any, run: str, heard: Any) -> None:
    """The delay of the first line of each piece, which is the oldest."""
    count, delays = 0, []
    for number, first in read(run):
        count += number
        delays.append(time.time() - first)
    heard.put((count, delays))


def by_stream(run: str) -> Iterator[tuple[int, float]]:
    there = client.client_for(None)
    for name, _, data in there.stream(there.run(run, "/stream")):
        if name == "lines":
            yield len(data), float(data[0][6].split()[0])


def by_logs(run: str) -> Iterator[tuple[int, float]]:
    process = subprocess.Popen([*RINGCTL, "logs", run, "--follow", "--no-prefix"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    rest = b""
    while data := os.read(process.stdout.fileno(), 1 << 20):
        whole, newline, rest = (rest + data).rpartition(b"\n")
        if newline:
            lines = whole.split(b"\n")
            yield len(lines), float(lines[0].split()[0])
    process.wait()


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def processor_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pids: list[int]) -> float:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
