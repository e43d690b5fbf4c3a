"""Checks of the ranks' environment and of the data they read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from launcher.model import Facts
from launcher.preflight import fixes
from launcher.preflight.view import Finding, View, blocker


def env_missing(view: View) -> Iterator[Finding]:
    env = view.facts.env
    if env and env.kind == "missing":
        yield blocker(env.problem, "the environment that the inventory names", fixes.environment(view.host))


def env_broken(view: View) -> Iterator[Finding]:
    env = view.facts.env
    if env and env.kind == "broken":
        yield blocker(env.problem, "a Python that works", fixes.environment(view.host))


def conda_shell(view: View) -> Iterator[Finding]:
    env = view.facts.env
    if env and env.only_interactive and view.host.env:
        prefix = env.path.rpartition("/bin/")[0]
        yield Finding(
            "warn",
            "its conda is only known to interactive shells (.bashrc), which ringctl had to ask",
            "an environment that is found without a terminal",
            f"write `env: {{conda: {prefix}}}` for {view.host.name} in the inventory",
        )


def torch(view: View) -> Iterator[Finding]:
    env = view.facts.env
    if env and not env.problem:
        if env.packages.get("torch") is None:
            yield blocker(f"{env.executable} has no torch", "torch", fixes.environment(view.host))
        elif env.imports.get("torch") or env.imports.get("torch.distributed"):
            problem = env.imports["torch"] or env.imports["torch.distributed"]
            yield blocker(f"torch cannot be imported: {problem}", "torch", fixes.environment(view.host))


def torchvision(view: View) -> Iterator[Finding]:
    env, built_in = view.facts.env, view.need.command == "trainer"
    if env is None or env.problem or env.packages.get("torch") is None:
        return
    own, made_for = version(env.packages["torch"]), version(env.torchvision_for)
    there = env.packages.get("torchvision")
    fix = f"{env.executable} -m pip install torchvision  # the release that belongs to torch {own}"
    if there is None and built_in:
        yield blocker(f"{env.executable} has no torchvision", "torchvision", fixes.environment(view.host))
    elif there and made_for and own != made_for:
        found = f"torchvision {there} is made for torch {made_for}, and there is {own}"
        wanted = "torch and torchvision that belong together"
        yield Finding("fail", found, wanted, fix, blocking=built_in)
    elif env.imports.get("torchvision") and not built_in:  # ours has its way around this one
        yield Finding("fail", f"import torchvision fails: {env.imports['torchvision']}", "it works", fix)


def versions(view: View) -> Iterator[Finding]:
    """The first that differs: another torch comes with another torchvision."""
    for what in ("torch", "torchvision", "python"):
        mine = version_of(view.facts, what)
        all_of_them = Counter(version_of(facts, what) for facts in view.survey.facts.values())
        all_of_them.pop("", None)
        usual = max(all_of_them, key=lambda v: (all_of_them[v], v), default="")
        if mine and mine != usual:
            count = all_of_them[usual]
            yield Finding(
                "fail" if what == "torch" else "warn",
                f"{what} {mine}, where {count} other{'s have' if count > 1 else ' has'} {usual}",
                f"{what} {usual}",
                fixes.environment(view.host),
                blocking=what == "torch" and view.need.command == "trainer",
            )
            return


def stale_env(view: View) -> Iterator[Finding]:
    """ringctl takes these away from its ranks; they harm only those who start by hand."""
    if view.facts.stale:
        names = ", ".join(view.facts.stale)
        yield Finding(
            "warn",
            f"{names} set by its login shell; ringctl takes them away",
            "no variables of torchrun",
            "remove them from .bashrc or .profile there",
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
