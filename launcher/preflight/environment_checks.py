"""Checks of the ranks' environment and of the data they read."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator

from launcher.model import Facts
from launcher.preflight import fixes
from launcher.preflight.view import Finding, View, blocker


def env_missing(view: View) -> Iterator[Finding]:
    env = view.facts.env
    if env and env.kind == "missing":
        fix = fixes.environment(view.host, view.facts, usual_versions(view), view.need.environment)
        yield blocker(env.problem, "the environment that the inventory names", fix)


def env_broken(view: View) -> Iterator[Finding]:
    env = view.facts.env
    if env and env.kind == "broken":
        fix = fixes.environment(view.host, view.facts, usual_versions(view), view.need.environment)
        yield blocker(env.problem, "a Python that works", fix)


def conda_shell(view: View) -> Iterator[Finding]:
    env = view.facts.env
    if env and env.only_interactive and view.host.env:
        prefix = env.path.rpartition("/bin/")[0]
        yield Finding(
            "warn",
            "its conda is only known to interactive shells (.bashrc), which ringctl had to ask",
            "an environment that is found without a terminal",
            fixes.write(view.host, "env", f"{{conda: {prefix}}}"),
        )


def torch(view: View) -> Iterator[Finding]:
    env = view.facts.env
    if env and not env.problem:
        fix = fixes.packages(view.host, view.facts, usual_versions(view), view.need.environment)
        if env.packages.get("torch") is None:
            yield blocker(f"{env.executable} has no torch", "torch", fix)
        elif env.imports.get("torch") or env.imports.get("torch.distributed"):
            problem = env.imports["torch"] or env.imports["torch.distributed"]
            yield blocker(f"torch cannot be imported: {problem}", "torch", fix)


def torchvision(view: View) -> Iterator[Finding]:
    env, built_in = view.facts.env, view.need.command == "trainer"
    if env is None or env.problem or env.packages.get("torch") is None:
        return
    own, made_for = version(env.packages["torch"]), version(env.torchvision_for)
    there = env.packages.get("torchvision")
    together = {"torch": own, "torchvision": ""}  # pip finds which belongs
    fix = fixes.packages(view.host, view.facts, together, view.need.environment)
    if there is None and built_in:
        yield blocker(f"{env.executable} has no torchvision", "torchvision", fix)
    elif there and made_for and own != made_for:
        found = f"torchvision {there} is made for torch {made_for}, and there is {own}"
        wanted = "torch and torchvision that belong together"
        yield Finding("fail", found, wanted, fix, blocking=built_in)
    elif env.imports.get("torchvision") and not built_in:  # ours has its way around this one
        yield Finding("fail", f"import torchvision fails: {env.imports['torchvision']}", "it works", fix)


def versions(view: View) -> Iterator[Finding]:
    """The first that differs: another torch comes with another torchvision."""
    said = ["torchvision"] if any(torchvision(view)) else []
    for what in ("torch", "torchvision", "python"):
        mine, (usual, count) = version_of(view.facts, what), usual_version(view, what)
        if mine and mine != usual and what not in said:
            yield Finding(
                "fail" if what == "torch" else "warn",
                f"{what} {mine}, where {count} other{'s have' if count > 1 else ' has'} {usual}",
                f"{what} {usual}",
                other_version(view, what, usual),
                blocking=what == "torch" and view.need.command == "trainer",
            )
            return


def other_version(view: View, what: str, usual: str) -> str:
    """Into the environment itself, also one of conda's: `ringctl env create` has nothing to do where its file
    is the same as ever."""
    if what == "python":
        return f"name an environment with Python {usual} as `env` of {view.host.name} in the inventory"
    assert view.facts.env is not None  # it told its version
    return fixes.pip(shlex.quote(view.facts.env.path), usual_versions(view))


def stale_env(view: View) -> Iterator[Finding]:
    """ringctl takes these away from its ranks; they harm only those who start by hand."""
    if view.facts.stale:
        names = ", ".join(view.facts.stale)
        yield Finding(
            "warn",
            f"{names} set by its login shell; ringctl takes them away",
            "no variables of torchrun",
            fixes.without_variables(view.facts.stale),
        )


def dataset(view: View) -> Iterator[Finding]:
    wrong = [words.lstrip("! ") for name, words in view.facts.data.items() if not name or words[:1] == "!"]
    if wrong:
        yield blocker("; ".join(wrong), "MNIST's four files, whole", fixes.dataset(view.host, view.need.data))
        return
    shapes = Counter(tuple(sorted(facts.data.items())) for facts in view.survey.facts.values() if facts.data)
    usual = max(shapes, key=lambda shape: shapes[shape])
    if tuple(sorted(view.facts.data.items())) != usual:
        found = f"{view.need.data} holds other data than on the other hosts"
        yield blocker(found, "the same data everywhere", fixes.dataset(view.host, view.need.data))


def usual_versions(view: View) -> dict[str, str]:
    """Of torch and torchvision, as most hosts have them; "" where none has any."""
    return {what: usual_version(view, what)[0] for what in ("torch", "torchvision")}


def usual_version(view: View, what: str) -> tuple[str, int]:
    """(the version that most hosts have, and how many)."""
    found = Counter(version_of(facts, what) for facts in view.survey.facts.values())
    found.pop("", None)
    return max(found.items(), key=lambda item: (item[1], item[0]), default=("", 0))


def version(text: str | None) -> str:
    """Without what says how it was built: 2.13.0+cpu is 2.13.0."""
    return (text or "").partition("+")[0]


def version_of(facts: Facts, what: str) -> str:
    env = facts.env
    if env is None or env.problem:
        return ""
    if what == "python":
        return ".".join(env.python.split(".")[:2])
    return version(env.packages.get(what))
