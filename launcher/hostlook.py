"""Looks into the ranks' environment on a host: one file, standard library only, Python 3.8 and up.

It is pushed beside hostd.py, and activates the environment with hostd's own functions, so that what is looked
at is what a run will start in. One JSON request on stdin (`env`, `packages`, whether to look `deep`); the
answer is on stdout after a line that reads SENTINEL.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from typing import Any

hostd: Any = importlib.import_module("hostd")  # beside this file on a host; there is no package there

LOOK_S, DEEP_S = 30.0, 120.0

# Runs in the environment's own Python, which need not be one that this file runs in. Versions come from the
# packages' own records, read here: `importlib.metadata` takes longer than Python itself.
LOOK = r"""
import json, os, re, sys
def key(name):
    return re.sub("[-_.]+", "-", name).lower()
def requirement(text):
    found = re.search(r"^Requires-Dist: torch *\(?==([0-9.]+)", text, re.M)
    return found.group(1) if found else ""
deep, wanted = sys.argv[2] == "deep", sys.argv[3:]
packages, made_for, imports = dict.fromkeys(wanted), "", {}
for folder in [os.getcwd() if place == "" else place for place in sys.path]:
    try:
        names = os.listdir(folder)
    except OSError:
        continue
    for entry in names:
        stem, kind = os.path.splitext(entry)
        parts = stem.split("-")
        if kind not in (".dist-info", ".egg-info") or len(parts) < 2:
            continue
        for name in wanted:
            if key(parts[0]) == key(name) and packages[name] is None:
                packages[name] = parts[1]
                if name == "torchvision":
                    try:
                        with open(os.path.join(folder, entry, "METADATA")) as f:
                            made_for = requirement(f.read())
                    except (IOError, OSError, ValueError):
                        pass
if deep:
    for name in ("torch", "torchvision", "torch.distributed"):
        try:
            __import__(name)
            imports[name] = ""
        except BaseException as error:
            imports[name] = "%s: %s" % (type(error).__name__, str(error).split("\n")[0])
    if not imports["torch.distributed"] and not sys.modules["torch.distributed"].is_gloo_available():
        imports["torch.distributed"] = "this torch was built without gloo"
sys.stdout.write(sys.argv[1] + json.dumps({
    "python": "%d.%d.%d" % tuple(sys.version_info[:3]), "executable": sys.executable,
    "machine": os.uname()[4], "packages": packages, "torchvision_for": made_for, "imports": imports}))
"""


class Looking:
    """The environment's Python, at work since this was made."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.deep = bool(request.get("deep"))
        self.refused, self.interactive = "", False
        try:
            self.python, environ = python_of(request.get("env"))
            self.interactive = needs_a_terminal(request.get("env"))
            self.process = start(self.python, environ, self.deep, request["packages"])
        except hostd.Refused as error:
            self.refused = str(error)
        except OSError as error:
            self.refused = f"{error.filename}: {error.strerror}"

    def result(self) -> dict[str, Any]:
        """What it found; else a `problem`, and whether the environment is "missing" or "broken"."""
        import subprocess

        if self.refused:
            return {"problem": self.refused, "kind": "missing"}
        seconds = DEEP_S if self.deep else LOOK_S
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            hostd.send(self.process.pid, signal.SIGKILL, group=True)
            self.process.communicate()
            return {"problem": f"{self.python} did not answer within {seconds:g} s", "kind": "broken"}
        _, told, text = out.partition(hostd.SENTINEL)
        if not told:
            said = err.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
            return {"problem": f"{self.python} does not work; it said: {said[0]}", "kind": "broken"}
        return dict(json.loads(text), path=self.python, only_interactive=self.interactive)


def python_of(env: dict[str, str] | None) -> tuple[str, dict[str, str]]:
    """(the Python that ranks will be run by, the environment they will have)."""
    environ = hostd.activate(env, hostd.clean_environ(dict(os.environ)))
    names = [env["value"]] if env and env["kind"] == "python" else []
    path = environ.get("PATH", os.defpath)
    for name in names + ["python", "python3"]:
        found = hostd.find_program(name, path, os.getcwd())
        if found:
            return str(found), environ
    raise hostd.Refused("there is no Python on PATH; name an `env` for this host in the inventory")


def needs_a_terminal(env: dict[str, str] | None) -> bool:
    """Whether a conda environment is only found by what .bashrc sets for people at a terminal."""
    if env is None or env["kind"] != "conda" or "/" in env["value"]:
        return False
    return not (hostd.named_prefix(env["value"], dict(os.environ)) or hostd.made_venv(env["value"]))


def start(python: str, environ: dict[str, str], deep: bool, packages: list[str]) -> Any:
    import subprocess

    pipe = subprocess.PIPE
    argv = [python, "-c", LOOK, hostd.SENTINEL.decode(), "deep" if deep else "quick"] + packages
    return subprocess.Popen(
        argv, env=environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True,
        preexec_fn=lambda: hostd.prctl(hostd.PR_SET_PDEATHSIG, signal.SIGKILL),
    )  # fmt: skip


def main() -> int:
    request = json.loads(sys.stdin.buffer.readline() or b"{}")
    answer = Looking(request).result()
    if answer.get("problem"):
        answer = {"kind": "error", "error": answer["problem"]}
    sys.stdout.buffer.write(hostd.SENTINEL + json.dumps(answer).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
