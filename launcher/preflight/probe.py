"""Runs on a host and says what it finds there: standard library only, Python 3.8 and up.

A conversation of JSON lines over stdin and stdout; each answer comes after a line that reads SENTINEL.

    request 1   who the peers are, and what a run will need here
    answer 1    the facts; from now on it listens on the data interface
    request 2   where the peers listen
    answer 2    {"time"}, at once, to compare clocks
    answer 3    {"pairs"}: what came of dialling each of them
    leave       closes what it listened on, and returns: what the controller starts next is in this process
    end         stdin is closed, by a controller that has heard enough or is gone

With `"only": "plan"` the first answer is the last, and only has what planning needs.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

from launcher.preflight import hostfacts, mesh

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from typing import Any

SENTINEL = b"--ringctl-hostd--\n"
PATIENCE_S = 60.0  # a controller that says nothing for so long is gone


def say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(SENTINEL + json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def read_line(fd: int) -> bytes:
    """One line and not a byte more: what follows is for whoever comes after us."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            return b""
        line += byte
    return line


class Listening:
    """The sockets that peers dial: one as gloo's are, and on the master also where ranks will meet."""

    def __init__(self, request: dict[str, Any], about: dict[str, Any]) -> None:
        self.loop = mesh.Loop()
        self.name, self.token = str(request["host"]), str(request["token"])
        self.patience = float(request.get("patience") or PATIENCE_S)
        self.servers: list[socket.socket] = []
        address = request.get("data_address") or about["data_address"]
        ports = [0]
        if request.get("master"):
            ports.append(int(request.get("port") or about["free_port"]))
        for port in ports:
            try:
                self.servers.append(mesh.listener(address, port))
            except OSError:
                continue  # an address that is not ours, a port that is taken: checks of their own say so
        for server in self.servers:
            self.loop.watch(server.fileno())
        about["listening"] = [server.getsockname()[1] for server in self.servers]

    def serve(self) -> None:
        """Until the controller hangs up: dial when told to, be dialled at any time."""
        stdin = sys.stdin.fileno()
        self.loop.watch(stdin)
        by_fd = {server.fileno(): server for server in self.servers}
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline:
            for fd in self.loop.turn(deadline):
                if fd in by_fd:
                    mesh.welcome(by_fd[fd], self.loop, self.name, self.token)
                elif fd == stdin:
                    request = json.loads(read_line(stdin) or b'{"leave": true}')
                    if request.get("leave"):
                        return
                    self.dial(request)
                    deadline = time.monotonic() + self.patience

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.loop.close()

    def dial(self, request: dict[str, Any]) -> None:
        say({"time": hostfacts.now()})
        self.loop.unwatch(sys.stdin.fileno())
        pairs = mesh.dial_all(request["peers"], self.loop, self.servers, self.name, self.token)
        self.loop.watch(sys.stdin.fileno())
        say({"pairs": pairs})


def main() -> int:
    request = json.loads(sys.stdin.buffer.readline() or b"{}")
    if request.get("only") == "plan":
        say(hostfacts.plan_facts(request, hostfacts.interfaces()))
        return 0
    about = hostfacts.all_facts(request)
    listening = Listening(request, about)
    say(about)
    listening.serve()
    listening.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
