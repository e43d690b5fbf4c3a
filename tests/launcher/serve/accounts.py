"""Other Unix accounts of this machine, for as long as a command of theirs runs: they have an /etc/passwd and
a home in a mount namespace of their own, so nothing of them is left, whatever happens. Needs root."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import MARK
from tests.launcher.ringctl import RINGCTL
from tests.launcher.warm import PROJECT

FIRST_ID = 45001
HOMES = "/mnt"


@dataclass(frozen=True)
class Account:
    """Somebody else on this machine, who has a project folder."""

    name: str
    number: int
    folder: Path  # the home, as root finds it
    passwd: Path

    def write(self, name: str, text: str) -> None:
        """A file in the home that nobody else may read."""
        path = self.folder / name
        for missing in [each for each in reversed(path.parents) if not each.exists()]:
            missing.mkdir(mode=0o700)
            os.chown(missing, self.number, self.number)
        path.write_text(text)
        path.chmod(0o600)
        os.chown(path, self.number, self.number)

    def run(self, argv: Sequence[str]) -> str:
        """What a command of theirs prints, with nothing in its environment but what a login gives."""
        home = f"{HOMES}/{self.name}"
        own = [f"HOME={home}", f"USER={self.name}", f"PATH={os.environ['PATH']}"]
        login = ["env", "-i", f"--chdir={home}/project", *own, f"{MARK}={os.environ.get(MARK, '')}"]
        who = [f"--reuid={self.name}", f"--regid={self.number}", "--clear-groups", "--no-new-privs"]
        script = "\n".join(["set -e", *self.mounts(), 'exec "$@"'])
        become = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
        done = subprocess.run([*become, "setpriv", *who, *login, *argv], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def mounts(self) -> Iterator[str]:
        needed = hidden_from_others()
        yield f"mount -t tmpfs none {HOMES}"
        for number, (path, _) in enumerate(needed):
            yield f"mkdir {HOMES}/.{number}"
            yield f"mount --bind {shlex.quote(str(path))} {HOMES}/.{number}"
        for closed in dict.fromkeys(closed for _, closed in needed):
            yield f"mount -t tmpfs -o mode=755 none {shlex.quote(str(closed))}"
        for number, (path, _) in enumerate(needed):
            yield f"mkdir -p {shlex.quote(str(path))}"
            yield f"mount --bind {HOMES}/.{number} {shlex.quote(str(path))}"
        yield f"mkdir {HOMES}/{self.name}"
        yield f"mount --bind {shlex.quote(str(self.folder))} {HOMES}/{self.name}"
        yield f"mount --bind {shlex.quote(str(self.passwd))} /etc/passwd"

    def ringctl(self, *args: str) -> str:
        return self.run([*RINGCTL, *args])


def hidden_from_others() -> list[tuple[Path, Path]]:
    """What ringctl is made of and lies in a folder that others may not enter, such as /root; and that one."""
    found = []
    for path in dict.fromkeys(Path(each) for each in (sys.base_prefix, sys.prefix, PROJECT)):
        closed = [each for each in reversed(path.parents) if not each.stat().st_mode & 0o001]
        found += [(path, closed[0])] if closed else []
    return found


def accounts(place: Path, *names: str) -> list[Account]:
    passwd, found = place / "passwd", []
    lines = Path("/etc/passwd").read_text().splitlines()
    for number, name in enumerate(names, FIRST_ID):
        lines.append(f"{name}:x:{number}:{number}::{HOMES}/{name}:/bin/sh")
        home = place / f"home-of-{name}"
        home.mkdir(mode=0o700)
        os.chown(home, number, number)
        found.append(Account(name, number, home, passwd))
    passwd.write_text("\n".join(lines) + "\n")
    return found
