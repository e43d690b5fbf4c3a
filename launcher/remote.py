"""One command on many hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.agent import SENTINEL, Agent
from launcher.errors import HostError, RingctlError
from launcher.fanout import fan_out
from launcher.logs import ranges
from launcher.transport import Completed

Show = Callable[[str, Completed], None]


def execute(
    agents: Mapping[str, Agent], command: Sequence[str], timeout: float, show: Show | None
) -> dict[str, Completed | RingctlError]:
    """Run it everywhere; `show` gets each host's output as soon as it is whole."""
    mark = SENTINEL.decode().strip()
    # Whatever a login shell prints comes before the mark. The shell stays, so that a command that is killed
    # still has an exit code.
    script = 'printf "%s\\n" "$1"; printf "%s\\n" "$1" >&2; shift; "$@"; exit $?'
    argv = ["/bin/sh", "-c", script, "sh", mark, *command]

    def work(name: str) -> Completed:
        done = agents[name].transport.run(argv, b"", timeout)
        if SENTINEL not in done.out:
            raise HostError(name, f"it ran no command; it said: {done.last_words}")
        out, err = (data.partition(SENTINEL)[2] for data in (done.out, done.err))
        clean = Completed(done.exit_code, out, err)
        if show is not None:
            show(name, clean)
        return clean

    return fan_out(agents, work)


def summary(codes: Mapping[str, int], failed: Mapping[str, RingctlError]) -> list[str]:
    """Hosts by exit code, then those that could not be asked."""
    lines = []
    for code in sorted(set(codes.values())):
        hosts = [host for host, its in codes.items() if its == code]
        lines.append(f"exit code {code}: {len(hosts)} of {len(codes) + len(failed)} ({grouped(hosts)})")
    return lines + [f"error: {error}" for error in failed.values()]


def grouped(names: Sequence[str]) -> str:
    """server1, server2, server3, other -> server1-3, other."""
    numbers: dict[str, list[int]] = {}
    others = []
    for name in names:
        stem = name.rstrip("0123456789")
        digits = name[len(stem) :]
        if digits and not digits.startswith("0"):
            numbers.setdefault(stem, []).append(int(digits))
        else:
            others.append(name)
    return ", ".join([stem + ranges(its) for stem, its in numbers.items()] + others)


def result_json(host: str, done: Completed | RingctlError) -> dict[str, Any]:
    if isinstance(done, RingctlError):
        return {"host": host, "error": done.message}
    out, err = (data.decode("utf-8", "surrogateescape") for data in (done.out, done.err))
    return {"host": host, "exit_code": done.exit_code, "out": out, "err": err}
