"""ringctl without its start-up: one process imports all of it, and each call is a fork of that one.

A call is a process like any other, with its own folder, environment and pipes; only what is the same every
time, starting Python and importing, is done once. For tests of the start itself, of terminals and of signals
there is RINGCTL in ringctl.py.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import json
import multiprocessing
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import launcher
from launcher import kit
from launcher.cli import main
from tests.conftest import MARK

PROJECT = Path(__file__).resolve().parent.parent.parent


def run(
    argv: Sequence[str], folder: Path | None = None, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`ringctl argv` to its end: it has exited, and nobody has its output open any more."""
    out, err = os.pipe(), os.pipe()
    place = os.open(folder or ".", os.O_RDONLY)  # by descriptor, for it may be a folder that is gone
    server, control, stream = _server(os.readlink("/proc/thread-self/ns/net"))
    socket.send_fds(control, [b"."], [place, 0, out[1], err[1]])
    for descriptor in (place, out[1], err[1]):
        os.close(descriptor)
    print(json.dumps([argv, dict(environ or os.environ)]), file=stream, flush=True)
    pid = int(stream.readline())
    try:
        said, complained = _read(out[0], err[0])
        code = int(stream.readline())
    except BaseException:  # the test has waited long enough
        server.kill()
        _server.cache_clear()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(["ringctl", *argv], code, said, complained)


@functools.cache
def _server(network: str) -> tuple[subprocess.Popen[bytes], socket.socket, IO[str]]:  # noqa: ARG001 - a key
    """The process that has imported ringctl, which lives as long as this one, and the way to it. A test may
    have a network of its own, which is not that of the tests after it."""
    environ = {name: value for name, value in os.environ.items() if name != MARK}  # it is no test's own
    ours, theirs = socket.socketpair()
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            cwd=PROJECT,
            env=environ,
            start_new_session=True,  # Ctrl-C is for the tests
        )
    return server, ours, ours.makefile("rw")


def _read(*ends: int) -> list[str]:
    """All that comes out of some pipes."""
    read = {end: bytearray() for end in ends}
    with selectors.DefaultSelector() as waiting:
        for end in ends:
            waiting.register(end, selectors.EVENT_READ)
        while waiting.get_map():
            for key, _ in waiting.select():
                data = os.read(key.fd, 65536)
                read[key.fd] += data
                if not data:
                    waiting.unregister(key.fd)
                    os.close(key.fd)
    return [io.TextIOWrapper(io.BytesIO(data), "utf-8", "surrogateescape").read() for data in read.values()]


# --- In the other process ------------------------------------------------------------------------


def _serve() -> None:
    """Fork for one call after the other, until nobody can ask any more."""
    for name in _parts():
        importlib.import_module(name)
    gc.freeze()  # a look through what was imported would copy all of it
    fork = multiprocessing.get_context("fork").Process
    control = socket.socket(fileno=os.dup(0))
    stream = control.makefile("rw")
    while descriptors := socket.recv_fds(control, 1, 4)[1]:
        argv, environ = json.loads(stream.readline())
        process = fork(target=_call, args=(argv, environ, *descriptors))
        process.start()
        for descriptor in descriptors:
            os.close(descriptor)
        print(process.pid, file=stream, flush=True)
        process.join()
        print(process.exitcode, file=stream, flush=True)


def _parts() -> list[str]:
    """All of the launcher but what runs on hosts."""
    names = [module.name for module in pkgutil.walk_packages(launcher.__path__, "launcher.")]
    return [name for name in names if f"{name.replace('.', '/')}.py" not in kit.NAMES]


def _call(argv: Sequence[str], environ: Mapping[str, str], place: int, *streams: int) -> None:
    os.fchdir(place)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for descriptor in (place, *streams):
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[1:] = argv
    main()


if __name__ == "__main__":
    _serve()
