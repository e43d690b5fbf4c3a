"""This machine, without SSH."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence

from launcher.errors import HostError
from launcher.model import Host
from launcher.transport import Channel, Completed

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Imported rather than run as a script, so that Python keeps its compiled form.
RUN_MODULE = "import sys; sys.path.insert(0, sys.argv.pop(1)); sys.exit(__import__(sys.argv.pop(1)).main())"


class LocalTransport:
    """Commands as child processes in sessions of their own, so that Ctrl-C reaches only ringctl."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def program(self, source: str) -> list[str]:
        folder, name = os.path.split(os.path.join(PACKAGE, source))
        return [sys.executable, "-I", "-S", "-c", RUN_MODULE, folder, name.removesuffix(".py")]

    def run(self, argv: Sequence[str], stdin: bytes, timeout: float) -> Completed:
        process = self._start(argv)
        try:
            out, err = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise HostError(self.host.name, f"no answer within {timeout:.0f} s") from None
        return Completed(process.returncode, out, err)

    def stream(self, argv: Sequence[str], stdin: bytes) -> Channel:
        process = self._start(argv)
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        return LocalChannel(process)

    def close(self) -> None:
        pass

    def _start(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)


class LocalChannel:
    """The output of a child process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.process = process
        self.fd = process.stdout.fileno()

    def read(self, timeout: float) -> bytes | None:
        if not select.select([self.fd], [], [], timeout)[0]:
            return None
        return os.read(self.fd, 1 << 20)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
