"""Looks into the ranks' environment on a host. Standard library only, Python 3.8 and up.

It activates the environment as the supervisor does (hostactivate.py), so that what is looked at is what a run
will start in. One JSON request on stdin (`env`, `packages`, whether to look `deep`; or, with
`search`, all that are in the usual places); the answer is on stdout after a line that reads SENTINEL.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys

from launcher.hostactivate import (
    activate,
    clean_environ,
    conda_bases,
    conda_prefix,
    find_program,
    has_python,
    made_venv,
    named_prefix,
    recorded_prefixes,
)
from launcher.hostanswer import SENTINEL, Refused, leaving_when_told
from launcher.hostproc import leaving_nothing, send
from launcher.hostruns import home_folder

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from typing import Any

LOOK_S, DEEP_S = 20.0, 120.0
VENVS = (("~/venvs", "venv"), ("~/.virtualenvs", "venv"))
MOST_FOUND = 16  # environments that a search looks into, side by side

# Runs in the environment's own Python, which need not be one that this file runs in. Versions come from the
# packages' own records, read here: `importlib.metadata` takes longer than Python itself. Without `site`,
# which does too, it looks where `site` would; only if something is not there is it asked properly.
LOOK = r"""
import os, sys
try:
    import _signal
    _signal.alarm(150)  # should whoever asks be gone by then
except ImportError:
    pass
deep, wanted = sys.argv[2] == "deep", sys.argv[3:]
def plain(name):
    return name.replace("_", "-").replace(".", "-").lower()
def made_for(path):
    with open(path) as f:
        for line in f:
            words = line.replace("(", " ").replace(")", " ").replace("==", " == ").split()
            if words[:3] == ["Requires-Dist:", "torch", "=="]:
                return words[3].rstrip(";")
    return ""
def folders():
    places = [os.getcwd() if place == "" else place for place in sys.path]
    if "site" in sys.modules:
        return places
    version = "python%d.%d" % tuple(sys.version_info[:2])
    own = os.path.dirname(os.path.dirname(os.path.abspath(sys.executable)))
    if os.path.exists(os.path.join(own, "pyvenv.cfg")):
        return places + [os.path.join(own, "lib", version, "site-packages")]
    places += [os.path.join(os.path.expanduser("~/.local/lib"), version, "site-packages")]
    places += [os.path.join(sys.prefix, "local/lib", version, "dist-packages")]
    places += [os.path.join(sys.prefix, "lib", version, "site-packages")]
    return places + ["/usr/lib/python3/dist-packages"]
found, pair = {}, ""
for folder in folders():
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
            if plain(parts[0]) == plain(name) and name not in found:
                found[name] = parts[1]
                if name == "torchvision":
                    try:
                        pair = made_for(os.path.join(folder, entry, "METADATA"))
                    except (IOError, OSError, ValueError):
                        pass
lines = ["python=%d.%d.%d" % tuple(sys.version_info[:3]), "executable=" + sys.executable]
lines += ["machine=" + os.uname()[4], "torchvision_for=" + pair]
lines += ["packages.%s=%s" % item for item in found.items()]
if deep:
    for name in ("torch", "torchvision", "torch.distributed"):
        try:
            __import__(name)
            why = ""
        except BaseException as error:
            why = "%s: %s" % (type(error).__name__, str(error).split("\n")[0])
        if name == "torch.distributed" and not why and not sys.modules[name].is_gloo_available():
            why = "this torch was built without gloo"
        lines.append("imports.%s=%s" % (name, why))
sys.stdout.write(sys.argv[1] + "\n".join(lines) + "\n")
"""


def read_look(text: str, packages: list[str]) -> dict[str, Any]:
    """What LOOK printed."""
    answer: dict[str, Any] = {"packages": dict.fromkeys(packages), "imports": {}}
    for line in text.splitlines():
        key, _, value = line.partition("=")
        part, dot, name = key.partition(".")
        if dot and part in ("packages", "imports"):
            answer[part][name] = value
        else:
            answer[key] = value
    return answer


class Looking:
    """The environment's Python, at work since this was made."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.deep, self.packages = bool(request.get("deep")), list(request["packages"])
        self.refused, self.interactive = "", False
        self.process: Any = None
        try:
            # What an activation starts for ranks is not for a look.
            with leaving_nothing() if self.deep else contextlib.nullcontext():
                self.python, self.environ = python_of(request.get("env"), self.deep)
            self.interactive = needs_a_terminal(request.get("env"))
            self.process = self.start(quick=not self.deep)
        except Refused as error:
            self.refused = str(error)
        except OSError as error:
            self.refused = f"{error.filename}: {error.strerror}"

    def start(self, quick: bool) -> Any:
        import subprocess

        pipe = subprocess.PIPE
        argv = [self.python] + (["-S"] if quick else [])
        argv += ["-c", LOOK, SENTINEL.decode(), "deep" if self.deep else ""] + self.packages
        return subprocess.Popen(
            argv, env=self.environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
        )

    def result(self) -> dict[str, Any]:
        """What it found; else a `problem`, and whether the environment is "missing" or "broken"."""
        if self.refused:
            return {"problem": self.refused, "kind": "missing"}
        answer = self.answer()
        if not self.deep and None in answer.get("packages", {}).values():
            self.process = self.start(quick=False)
            answer = self.answer()
        return dict(answer, path=self.python, only_interactive=self.interactive)

    def close(self) -> None:
        """Nobody waits for it any more; what its imports have left in the background may have its output."""
        if self.process is not None and self.process.returncode is None:
            send(self.process.pid, signal.SIGKILL, group=True)
            self.process.wait()

    def answer(self) -> dict[str, Any]:
        import subprocess

        seconds = DEEP_S if self.deep else LOOK_S
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.close()
            return {"problem": f"{self.python} did not answer within {seconds:g} s", "kind": "broken"}
        _, told, text = out.partition(SENTINEL)
        if not told:
            said = err.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
            return {"problem": f"{self.python} does not work; it said: {said[0]}", "kind": "broken"}
        return read_look(text.decode(errors="replace"), self.packages)


def python_of(env: dict[str, str] | None, deep: bool = False) -> tuple[str, dict[str, str]]:
    """(the Python that ranks will be run by, the environment they will have). The scripts that a conda
    environment runs when it is activated matter to an import, not to a look; they may take their time."""
    environ = clean_environ(dict(os.environ))
    if env and env["kind"] == "conda" and not deep:
        prefix = conda_prefix(env["value"])
        return os.path.join(prefix, "bin", "python"), dict(environ, CONDA_PREFIX=prefix)
    environ = activate(env, environ)
    names = [env["value"]] if env and env["kind"] == "python" else []
    path = environ.get("PATH", os.defpath)
    for name in names + ["python", "python3"]:
        found = find_program(name, path, os.getcwd())
        if found:
            return str(found), environ
    raise Refused("there is no Python on PATH; name an `env` for this host in the inventory")


def needs_a_terminal(env: dict[str, str] | None) -> bool:
    """Whether a conda environment is only found by what .bashrc sets for people at a terminal."""
    if env is None or env["kind"] != "conda" or "/" in env["value"]:
        return False
    return not (named_prefix(env["value"], dict(os.environ)) or made_venv(env["value"]))


# --- Searching -----------------------------------------------------------------------------------


def search(packages: list[str]) -> dict[str, Any]:
    """{"found": what Looking says of each environment in the usual places that works, with its `env`}."""
    with leaving_when_told(), contextlib.ExitStack() as stack:
        todo = []
        for env in usual_environments():
            looking = Looking({"env": env, "packages": packages})
            todo.append((env, stack.enter_context(contextlib.closing(looking))))
        found = [dict(looking.result(), env=env) for env, looking in todo]
    return {"found": [about for about in found if not about.get("problem")]}


def usual_environments() -> list[dict[str, str]]:
    """What an inventory would call them: conda's, ours, virtual ones, and the Python on PATH."""
    found = {os.path.realpath(prefix): env_at(prefix) for prefix in conda_prefixes()}
    for pattern, kind in ((os.path.join(home_folder(), "venvs"), "conda"), *VENVS):
        for prefix in below(os.path.expanduser(pattern)):
            value = os.path.basename(prefix) if kind == "conda" else with_tilde(prefix)
            if has_python(prefix):
                found.setdefault(os.path.realpath(prefix), {"kind": kind, "value": value})
    python = find_program("python3", os.environ.get("PATH", os.defpath), "/")
    on_path = [{"kind": "python", "value": str(python)}] if python else []
    return list(found.values())[: MOST_FOUND - 1] + on_path


def conda_prefixes() -> list[str]:
    bases = conda_bases(dict(os.environ))
    prefixes = [prefix for base in bases for prefix in below(os.path.join(base, "envs")) + [base]]
    return [
        prefix
        for prefix in prefixes + recorded_prefixes()
        if has_python(prefix) and os.path.isdir(os.path.join(prefix, "conda-meta"))
    ]


def env_at(prefix: str) -> dict[str, str]:
    """By its name, where that means this one."""
    above, name = os.path.split(prefix)
    named = named_prefix(name, dict(os.environ)) if os.path.basename(above) == "envs" else None
    return {"kind": "conda", "value": name if named == prefix else with_tilde(prefix)}


def below(folder: str) -> list[str]:
    try:
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def with_tilde(path: str) -> str:
    home = os.path.expanduser("~")
    return "~" + path[len(home) :] if path.startswith(home + os.sep) else path


def main() -> int:
    request = json.loads(sys.stdin.buffer.readline() or b"{}")
    if request.get("search"):
        answer = search(request["packages"])
    else:
        with leaving_when_told(), contextlib.closing(Looking(request)) as looking:
            answer = looking.result()
    if answer.get("problem"):
        answer = {"kind": "error", "error": answer["problem"]}
    sys.stdout.buffer.write(SENTINEL + json.dumps(answer).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
