"""Who may import whom: walked through the source, so that an import inside a function counts as well."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import kit

PROJECT = Path(__file__).resolve().parents[2]
HOST_SIDE = tuple(kit.NAMES)
ON_HOSTS = {name.removesuffix(".py").replace("/", ".") for name in HOST_SIDE}  # modules, by their names there
IN_THE_RANKS_OWN_PYTHON = (
    "launcher/hostprefork.py"  # becomes the ranks there, and imports torch for them by name
)


def modules_in(source: str, package: str, by_name: bool = True) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in `source`, a module of `package`, by statement or also by name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif by_name and isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def is_or_is_in(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def importers(folder: Path, package: str, *names: str) -> dict[str, list[str]]:
    """{file: where it imports one of `names`} for the files of a package."""
    found: dict[str, list[str]] = {}
    for path in sorted((folder / package).rglob("*.py")):
        parent = ".".join(path.relative_to(folder).parent.parts)
        for line, module in modules_in(path.read_text(), parent):
            if is_or_is_in(module, names):
                found.setdefault(str(path.relative_to(folder)), []).append(f"line {line}: {module}")
    return found


# --- The rules -----------------------------------------------------------------------------------


def test_the_launcher_never_imports_torch_or_the_trainer() -> None:
    found = importers(PROJECT, "launcher", "torch", "torchvision", "numpy", "trainer")
    assert set(found) <= {IN_THE_RANKS_OWN_PYTHON}, found


def test_the_trainer_never_imports_the_launcher() -> None:
    assert importers(PROJECT, "trainer", "launcher") == {}


def test_only_render_imports_rich() -> None:
    assert set(importers(PROJECT, "launcher", "rich")) == {"launcher/render.py"}


def test_only_the_service_imports_starlette_and_uvicorn() -> None:
    found = importers(PROJECT, "launcher", "starlette", "uvicorn", "anyio", "h11")
    assert found, "the walk found them"
    assert all(path.startswith("launcher/serve/") for path in found), found


def test_only_the_ssh_transport_imports_fabric_and_paramiko() -> None:
    found = importers(PROJECT, "launcher", "fabric", "paramiko", "invoke")
    parts = ("ssh", "connect", "sshconfig", "hostkeys", "identity", "sentences", "bounds")
    assert set(found) <= {f"launcher/transport/{part}.py" for part in parts}, found


@pytest.mark.parametrize("path", HOST_SIDE)
def test_what_runs_on_hosts_needs_nothing_but_python_and_what_is_there_with_it(path: str) -> None:
    source = (PROJECT / path).read_text()
    ast.parse(source, feature_version=(3, 8))
    assert not_on_hosts(source) == set()
    assert set(modules_in(source, "")) or path.endswith("/__init__.py"), "the walk found its imports"


def test_what_becomes_the_ranks_brings_nothing_of_ours_among_their_modules() -> None:
    found = {module for _, module in modules_in((PROJECT / IN_THE_RANKS_OWN_PYTHON).read_text(), "")}
    assert {module for module in found if is_or_is_in(module, ("launcher",))} == set()


def not_on_hosts(source: str) -> set[str]:
    """What it imports, by statement, that is neither Python's nor among what runs on hosts."""
    found = {module for _, module in modules_in(source, "", by_name=False)}
    return {module for module in found if not is_on_hosts(module)}


def is_on_hosts(module: str) -> bool:
    """A module that is there, a package that has one, or a name in such a module."""
    above = module.rpartition(".")[0]
    ours = module in ON_HOSTS or f"{module}.__init__" in ON_HOSTS or above in ON_HOSTS
    return ours or module.partition(".")[0] in sys.stdlib_module_names


@pytest.mark.parametrize(
    ("source", "lacks"),
    [
        ("import os.path\nfrom launcher.hostslots import taken", set()),
        ("from launcher.preflight import mesh", set()),
        ("from launcher import errors", {"launcher.errors"}),
        ("from launcher.preflight import report", {"launcher.preflight.report"}),
        ("def lazily():\n    import yaml", {"yaml"}),
    ],
)
def test_what_is_not_on_hosts_is_told_from_what_is(source: str, lacks: set[str]) -> None:
    assert not_on_hosts(source) == lacks


def test_the_supervisor_and_the_probe_are_among_what_runs_on_hosts() -> None:
    assert {"launcher/hostd.py", "launcher/preflight/probe.py"} <= set(HOST_SIDE)


def test_the_trainer_and_the_launcher_are_there_to_be_walked() -> None:
    assert importers(PROJECT, "launcher", "click")
    assert importers(PROJECT, "trainer", "torch")


# --- The walk itself -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import os, torch.nn as nn",
        "from torch import nn",
        "from torch.distributed import all_reduce",
        "def lazily():\n    import torch",
        "if TYPE_CHECKING:\n    from torch import Tensor",
        "try:\n    import torch\nexcept ImportError:\n    pass",
        "import importlib\nimportlib.import_module('torch.distributed')",
        "__import__('torch')",
    ],
)
def test_the_walk_finds_a_forbidden_import_however_it_is_written(source: str, tmp_path: Path) -> None:
    (tmp_path / "launcher" / "deep").mkdir(parents=True)
    (tmp_path / "launcher" / "deep" / "bad.py").write_text(source)
    (tmp_path / "launcher" / "good.py").write_text(
        "import torchless, os.path\nfrom . import deep  # import torch"
    )
    assert list(importers(tmp_path, "launcher", "torch")) == ["launcher/deep/bad.py"]


def test_the_walk_resolves_relative_imports(tmp_path: Path) -> None:
    (tmp_path / "launcher" / "deep").mkdir(parents=True)
    (tmp_path / "launcher" / "deep" / "bad.py").write_text("from .. import render\nfrom ..fold import ENDED")
    assert importers(tmp_path, "launcher", "launcher.render", "launcher.fold") == {
        "launcher/deep/bad.py": [
            "line 1: launcher.render",
            "line 2: launcher.fold",
            "line 2: launcher.fold.ENDED",
        ]
    }


# --- What is loaded ------------------------------------------------------------------------------


def loaded_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=PROJECT,
    )
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


HEAVY = {
    "rich",
    "yaml",
    "fabric",
    "paramiko",
    "invoke",
    "cryptography",
    "torch",
    "numpy",
    "trainer",
    "asyncio",
    "starlette",
    "uvicorn",
}


def test_the_command_line_loads_nothing_heavy() -> None:
    seen = loaded_by("import launcher.cli")
    assert "click" in seen
    assert not seen & HEAVY


def test_listing_runs_loads_nothing_heavy() -> None:
    seen = loaded_by("from launcher.cli import cli; cli.main(['ps'], standalone_mode=False)")
    assert not seen & HEAVY
