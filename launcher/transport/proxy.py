"""What ~/.ssh/config calls a ProxyCommand: a process whose input and output lead to a server."""

from __future__ import annotations

import os
import socket
import subprocess
from typing import IO, Any

from launcher.logs import visible

END_S = 1.0


class Proxy:
    """To fabric it is a gateway: it is told to `open`, and then its `transport` is asked for a channel."""

    def __init__(self, command: str) -> None:
        self.command = command
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def open(self) -> None:
        """Start it, as ssh does: by a shell that makes way for it. Ctrl-C is for us alone: we may have things
        to say to the server before we go."""
        from tempfile import TemporaryFile  # which few need

        self.close()
        self._socket, theirs = socket.socketpair()
        self._errors = TemporaryFile()  # noqa: SIM115 - for as long as the process lives
        script = f"trap '' INT; exec {self.command.removeprefix('exec ')}"
        with theirs:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", script], stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=self._errors
            )

    @property
    def transport(self) -> Proxy:
        return self

    def open_channel(self, **where: Any) -> socket.socket | None:  # noqa: ARG002 - the command knows where
        return self._socket

    def last_words(self) -> str:
        """Why it ended: the last line that it said on stderr, else its exit code; "" if it ended well, or has
        not."""
        if self._process is None or self._errors is None:
            return ""
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return ""
        size = os.fstat(self._errors.fileno()).st_size
        text = os.pread(self._errors.fileno(), 4096, max(0, size - 4096)).decode(errors="replace")
        said = visible("".join(text.strip().splitlines()[-1:]))
        return said or (f"exit code {code}" if code else "")

    def close(self) -> None:
        """End it."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._errors is not None:
            self._errors.close()
        self._socket = self._process = self._errors = None
