"""The ranks' environment on a host: made. Standard library only, Python 3.8 and up.

It finds environments as the supervisor does (hostactivate.py), so that what is created here is what a run
will start in. One JSON request on stdin; the answer is on stdout after a line that reads SENTINEL.

    ready    whether the environment is what the file asks for already
    create   make it so: {"kind": "step" | "output" | "tick"} lines while it goes, then "done" or "error"

    ~/.ringctl/envs/NAME/    record.json (how far we came, for which file), log, lock, venv-*/, tmp/
    ~/.ringctl/venvs/NAME    where there is no conda: a link to the newest finished venv-*, replaced whole
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from launcher.hostactivate import (
    CONDA_TOOLS,
    conda_bases,
    env_record,
    find_prefix,
    find_program,
    has_python,
    login_environs,
    made_venv,
    named_prefix,
)
from launcher.hostanswer import SENTINEL, Refused, leaving_when_told, note
from launcher.hostdisk import read_json, replace_file, write_all
from launcher.hostprefork import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl
from launcher.hostproc import exit_code, has_ended, kill_below, send
from launcher.hostruns import command_runs, home_folder

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

LAST_LINES = 12  # of a tool's output, when it fails
LONGEST = 160  # of such a line
OUTPUT_EVERY_S = 1.0
GRACE_S = 3.0
KEEPER_S = 15.0  # who ends what a tool has started takes 10 s at most
LONGEST_TEMPORARY = 70  # bytes: a socket below it, such as multiprocessing's, has 107 for all of its path
QUIET = {
    "CONDA_ALWAYS_YES": "true",  # as variables: `conda env update` and older ones do not know --yes
    "MAMBA_ALWAYS_YES": "true",
    "PIP_NO_INPUT": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_PROGRESS_BAR": "off",
    "PYTHONUNBUFFERED": "1",
}
MISLEADING = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_DEFAULT_ENV")


# --- What is there already -----------------------------------------------------------------------


def folder_of(name: str) -> str:
    """Everything that belongs to one environment of ours."""
    return str(os.path.dirname(env_record(name)))


def own_python() -> str:
    """What a virtual environment is bound to; it outlives a new patch release."""
    return "{}.{} {}".format(*sys.version_info[:2], os.path.realpath(sys.executable))


def finished(request: dict[str, Any]) -> dict[str, Any] | None:
    """The record of an environment that was made from this very file, and is still there."""
    record: dict[str, Any] = read_json(env_record(request["name"])) or {}
    same = record.get("state") == "ready" and record.get("digest") == request["digest"]
    if not same or not has_python(record["prefix"]):
        return None
    if record["tool"] == "venv" and (
        record["python"] != own_python() or made_venv(request["name"]) != os.path.realpath(record["prefix"])
    ):
        return None
    return record


def write_record(request: dict[str, Any], state: str, tool: str, prefix: str) -> dict[str, Any]:
    record = {
        "state": state,
        "digest": request["digest"],
        "tool": tool,
        "prefix": prefix,
        "python": own_python(),
    }
    replace_file(env_record(request["name"]), json.dumps(record).encode())
    return record


def command_ready(request: dict[str, Any]) -> dict[str, Any]:
    return {"ready": finished(request)}


# --- create --------------------------------------------------------------------------------------


def command_create(request: dict[str, Any]) -> None:
    """One at a time: homes may be shared, and then all hosts are told at once."""
    deadline = time.monotonic() + float(request["timeout"])
    folder = folder_of(request["name"])
    for path in (home_folder(), os.path.dirname(folder), folder):
        os.makedirs(path, mode=0o700, exist_ok=True)
    with open(os.path.join(folder, "lock"), "w") as lock:
        wait_for(lock.fileno(), deadline)
        record = finished(request)
        if record is not None:
            note("done", how="up to date", record=record, notes=[])
            return
        note("step", text="looking for conda, mamba or micromamba")
        tool = find_tool()
        make = Maker(request, deadline)
        if tool is None:
            make.venv()
        else:
            make.conda(tool)


def wait_for(lock: int, deadline: float) -> None:
    told = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Refused("another creation of it goes on for too long") from None
        if not told:
            note("step", text="waiting for another creation of it to end")
            told = True
        note("tick")
        time.sleep(0.2)


class Tool:
    """A conda, mamba or micromamba, and the environment it is to be run in."""

    def __init__(self, path: str, environ: dict[str, str]) -> None:
        self.path = path
        self.name = os.path.basename(path)
        self.environ = environ

    def argv(self, name: str, prefix: str | None, file: str) -> list[str]:
        """Create `name`, or bring `prefix` up to date."""
        if self.name.startswith("micromamba"):  # its own words, the same in all its versions
            how = ["create", "-n", name] if prefix is None else ["install", "-p", prefix]
            return [self.path] + how + ["-y", "-f", file]
        how = ["create", "-n", name] if prefix is None else ["update", "-p", prefix]
        return [self.path, "env"] + how + ["-f", file]


def find_tool() -> Tool | None:
    """The user's conda, mamba or micromamba; login shells are asked last."""
    path = tool_in(dict(os.environ))
    if path is not None:
        return Tool(path, dict(os.environ))
    for environ in login_environs():
        path = tool_in(environ)
        if path is not None:
            return Tool(path, environ)
    return None


def tool_in(environ: dict[str, str]) -> str | None:
    """What `environ` names, what is on its PATH, what is in the usual places."""
    candidates = [environ.get("CONDA_EXE") or "", environ.get("MAMBA_EXE") or ""]
    path = environ.get("PATH", os.defpath)
    candidates += [find_program(name, path, "/") or "" for name in CONDA_TOOLS]
    for base in conda_bases(environ):
        candidates += [os.path.join(base, where) for where in ("bin/conda", "condabin/conda", "bin/mamba")]
        candidates.append(os.path.join(base, "bin/micromamba"))
    candidates += [os.path.expanduser(f"~/{where}/micromamba") for where in (".local/bin", "bin")]
    return next((c for c in candidates if os.path.isfile(c) and os.access(c, os.X_OK)), None)


class Maker:
    """Makes one environment. Only the last step makes it count: what broke off is not taken for finished."""

    def __init__(self, request: dict[str, Any], deadline: float) -> None:
        self.request, self.deadline, self.name = request, deadline, str(request["name"])
        self.folder = folder_of(self.name)
        self.log = os.path.join(self.folder, "log")
        self.notes: list[str] = []
        open(self.log, "wb").close()

    def conda(self, tool: Tool) -> None:
        """With the user's own tool, where that puts environments. Those cannot be moved, so the record says
        "creating" until it is whole, and no run starts in it before."""
        existing = named_prefix(self.name, dict(os.environ))
        existing = existing or named_prefix(self.name, tool.environ)
        begun = (read_json(env_record(self.name)) or {}).get("state") == "creating"
        how = "created" if existing is None or begun else "updated"
        write_record(self.request, "creating" if how == "created" else "updating", tool.name, existing or "")
        file = os.path.join(self.folder, "environment.yaml")
        replace_file(file, self.request["text"].encode())
        what = f"making {self.name}" if existing is None else f"bringing {existing} up to date"
        note("step", text=f"{what} with {tool.path}")
        try:
            self.run(tool.name, tool.argv(self.name, existing, file), tool.environ)
        finally:
            prefix = existing or named_prefix(self.name, tool.environ) or find_prefix(self.name)
            if prefix is None:
                os.unlink(env_record(self.name))  # nothing came of it that could be taken for whole
        if prefix is None:
            raise Refused(f"{tool.path} said that all is well, but there is no environment {self.name!r}")
        self.done(how, tool.name, prefix)

    def venv(self) -> None:
        """From the file's pip part: beside its place, and then one link is replaced."""
        self.check_venv_possible()
        link = os.path.join(home_folder(), "venvs", self.name)
        if os.path.exists(link) and not os.path.islink(link):
            raise Refused(f"{link} was not made by ringctl; move it away")
        how = "updated" if made_venv(self.name) else "created"
        prefix = tempfile.mkdtemp(prefix="venv-", dir=self.folder)
        try:
            self.fill_venv(prefix)
            os.makedirs(os.path.dirname(link), mode=0o700, exist_ok=True)
            os.symlink(os.path.relpath(prefix, os.path.dirname(link)), prefix + ".link")
            os.replace(prefix + ".link", link)
        except BaseException:
            remove_all(prefix)
            raise
        self.done(how, "venv", prefix)

    def check_venv_possible(self) -> None:
        """Say what to do before the tool says what it lacks."""
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        if self.request["pip"] == []:
            raise Refused(
                "there is no conda, mamba or micromamba here, and the file has no pip part to make a "
                "virtual environment from"
            )
        try:
            importlib.import_module("venv")
            importlib.import_module("ensurepip").version()
        except (ImportError, AttributeError):
            raise Refused(
                f"{sys.executable} cannot make virtual environments (no ensurepip), and there is no conda, "
                f"mamba or micromamba here; install the package python{python}-venv, or micromamba, or name "
                "another Python as `python` of this host in the inventory"
            ) from None
        wanted = self.request["python"]
        if wanted and wanted != python:
            self.notes.append(
                f"the file asks for Python {wanted}, and this virtual environment has {python}; "
                f"name a Python {wanted} as `python` of this host in the inventory"
            )
        if self.request["conda_only"]:
            names = ", ".join(self.request["conda_only"])
            self.notes.append(f"without conda these were left out: {names}")

    def fill_venv(self, prefix: str) -> None:
        environ = dict(os.environ)
        note("step", text=f"there is none: making a virtual environment with {sys.executable}")
        self.run("venv", [sys.executable, "-m", "venv", prefix], environ)
        file = os.path.join(self.folder, "requirements.txt")
        replace_file(file, "".join(line + "\n" for line in self.request["pip"]).encode())
        python = os.path.join(prefix, "bin", "python")
        note("step", text="installing the file's pip part")
        self.run("pip", [python, "-m", "pip", "install", "-r", file], environ)

    def run(self, what: str, argv: list[str], environ: dict[str, str]) -> None:
        """Run a tool to its end, with its output as progress; Refused with its last lines if it fails."""
        kept = {k: v for k, v in environ.items() if k not in MISLEADING}
        with open(self.log, "ab") as log, self.own_temporary() as own:
            code, lines = watch(argv, dict(kept, **QUIET, **own), log.fileno(), self.deadline)
        if code is None:
            raise Refused(f"{what} was not done after {self.request['timeout']:g} s, and was ended")
        if code:
            said = "".join(f"\n    {line[:LONGEST]}" for line in lines[-LAST_LINES:]) or " nothing"
            raise Refused(f"{what} failed with exit code {code} (all of it: {self.log}); it said:{said}")

    @contextlib.contextmanager
    def own_temporary(self) -> Iterator[dict[str, str]]:
        """Where a tool puts what it needs for a while: one that is ended, such as pip, does not remove it.
        Beside the environment, for which there must be as much room; we hold the lock, so what is there
        already is of one that was killed with whoever had begun it."""
        place = os.path.join(self.folder, "tmp")
        remove_all(place)
        if len(os.fsencode(place)) > LONGEST_TEMPORARY:
            yield {}
            return
        os.makedirs(place, mode=0o700, exist_ok=True)
        try:
            yield {"TMPDIR": place}
        finally:
            remove_all(place)

    def done(self, how: str, tool: str, prefix: str) -> None:
        record = write_record(self.request, "ready", tool, prefix)
        self.collect(prefix)
        note("done", how=how, record=record, notes=self.notes)

    def collect(self, newest: str) -> None:
        """Remove virtual environments that are in use no more; all stay while a run may be in one."""
        if not any(run["state"] in ("starting", "running") for run in command_runs({})["runs"]):
            for name in os.listdir(self.folder):
                path = os.path.join(self.folder, name)
                if name.startswith("venv-") and path != newest:
                    remove_all(path)


def remove_all(path: str) -> None:
    """Also what is in folders that a tool has closed to writers."""
    for folder, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)
    shutil.rmtree(path, ignore_errors=True)


# --- Running a tool ------------------------------------------------------------------------------


def watch(
    argv: list[str], environ: dict[str, str], log: int, deadline: float
) -> tuple[int | None, list[str]]:
    """(exit code or None when out of time, last lines). It never outlives us, nor what it started."""
    us = os.getpid()
    process = subprocess.Popen(
        argv, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, preexec_fn=lambda: keep(us),
    )  # fmt: skip
    lines: list[str] = []
    told = 0.0
    try:
        for data in pieces(process, deadline):
            write_all(log, data)
            lines += [line for line in re.split("[\r\n]+", data.decode(errors="replace")) if line.strip()]
            del lines[:-100]
            if not data.strip():
                note("tick")
            elif time.monotonic() - told >= OUTPUT_EVERY_S:
                note("output", text=lines[-1][:LONGEST])
                told = time.monotonic()
        ended = has_ended(process.pid)
    finally:
        end(process)
    return (process.returncode if ended else None), lines


def keep(us: int) -> None:
    """In the new process: stay, and let a child become the tool. All that it starts falls to this process,
    which kills it when the tool has ended, when we are gone, and when it is told to (HUP)."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    tool = os.fork()
    if not tool:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    signal.signal(signal.SIGTERM, lambda *_: None)  # the whole group is told, and the tool sees to it
    signal.signal(signal.SIGHUP, lambda *_: leave(1))
    prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    os.closerange(0, 1024)  # also what keeps Popen waiting: from now on we may be told
    ended, status = 0, 0
    while ended != tool and os.getppid() == us:  # it may have gone before the line above took effect
        ended, status = os.waitpid(-1, 0)
    code = exit_code(status)
    leave(code if code >= 0 else 128 - code)


def leave(code: int) -> None:
    kill_below(10.0)
    os._exit(code)


def pieces(process: subprocess.Popen[bytes], deadline: float) -> Iterator[bytes]:
    """Its output in whole lines, b"" when there is none for a while, until it has ended or time is up."""
    assert process.stdout is not None
    fd, rest = process.stdout.fileno(), b""
    while time.monotonic() < deadline:
        ended = has_ended(process.pid)  # before looking: what it wrote last is in the pipe by now
        data = os.read(fd, 1 << 16) if select.select([fd], [], [], 0.0 if ended else 1.0)[0] else b""
        rest += data
        cut = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1  # a progress bar goes back with \r
        yield rest[:cut]
        rest = rest[cut:]
        if ended and not data:
            yield rest
            return
        if not data:  # silence, or it closed its output and goes on
            time.sleep(0.1)


def end(process: subprocess.Popen[bytes]) -> None:
    """It and what it started: TERM, grace, KILL."""
    assert process.stdout is not None
    if not has_ended(process.pid):
        send(process.pid, signal.SIGTERM, group=True)
        wait_for_end(process.pid, GRACE_S)
    send(process.pid, signal.SIGHUP)
    wait_for_end(process.pid, KEEPER_S)
    send(process.pid, signal.SIGKILL, group=True)  # should whoever was to do it have been killed, or stopped
    process.wait()
    process.stdout.close()


def wait_for_end(child: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not has_ended(child) and time.monotonic() < deadline:
        time.sleep(0.01)


# --- main ----------------------------------------------------------------------------------------


def main() -> int:
    commands = {"ready": command_ready, "create": command_create}
    request = json.loads(sys.stdin.buffer.readline() or b"{}")
    write_all(1, SENTINEL)
    try:
        with leaving_when_told():
            answer = commands[sys.argv[1]](request)
    except BrokenPipeError:
        return 0  # whoever asked is gone; what was under way has been ended
    except Refused as error:
        note("error", error=str(error))
        return 1
    except OSError as error:
        note("error", error=f"{error.filename or 'environment'}: {error.strerror}")
        return 1
    if answer is not None:
        write_all(1, json.dumps(answer).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
