"""torchvision beside this torch, and stand-ins for it that fail on purpose."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.ranks import each
from trainer import vision


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch makes one in the temporary folder


def with_stand_in(folder: Path, content: str, work: Callable[[], Any]) -> Any:
    """What `work` returns in a process whose torchvision is a package with this `__init__`."""
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(content)
    (package / "part.py").write_text("")

    def isolated(_: int) -> Any:
        sys.path.insert(0, str(folder))
        return work()

    (result,) = each(1, isolated)
    return result


def declared() -> bool:
    return hasattr(torch.ops.torchvision, "nms")


def test_the_mnist_class_comes_without_the_rest_of_torchvision() -> None:
    def work(_: int) -> tuple[str, bool, list[str]]:
        before = set(sys.modules)
        name = vision.mnist_class().__module__
        left = [module for module in sys.modules if module.startswith("torchvision")]
        return name, "torch._dynamo" in set(sys.modules) - before, left

    assert each(1, work) == [("torchvision.datasets.mnist", False, [])]


def test_the_whole_of_torchvision_loads_after_its_parts_and_beside_this_torch() -> None:
    program = (
        "from trainer import vision; part = vision.mnist_class(); whole = vision.whole()\n"
        "import torchvision\n"
        "assert whole is torchvision\n"
        "assert vision.mnist_class() is torchvision.datasets.MNIST\n"
        "assert part.resources == torchvision.datasets.MNIST.resources\n"
        "print(torchvision.transforms.ToTensor.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ToTensor\n", done.stderr


def test_where_torchvision_loads_by_itself_nothing_is_declared(tmp_path: Path) -> None:
    def work() -> tuple[str, bool]:
        return vision.whole().answer, declared()

    assert with_stand_in(tmp_path, "answer = 'mine'", work) == ("mine", False)


def test_where_its_operators_are_missing_they_are_declared_and_it_loads(tmp_path: Path) -> None:
    content = (
        "import sys, torch\n"
        "assert 'torchvision.part' not in sys.modules, 'half of the failed import is still there'\n"
        "from torchvision import part\n"
        "for name in ('nms', 'qnms'):\n"
        "    if not hasattr(torch.ops.torchvision, name):\n"
        "        raise RuntimeError(f'operator torchvision::{name} does not exist')\n"
        "answer = 'loaded'\n"
    )

    def work() -> tuple[str, bool]:
        return vision.whole().answer, declared()

    assert with_stand_in(tmp_path, content, work) == ("loaded", True)


def test_any_other_failure_is_passed_on(tmp_path: Path) -> None:
    def work() -> str:
        with pytest.raises(RuntimeError) as caught:
            vision.whole()
        return str(caught.value)

    assert with_stand_in(tmp_path, "raise RuntimeError('something else')", work) == "something else"


def test_a_torchvision_without_that_module_is_imported_whole(tmp_path: Path) -> None:
    content = "class datasets:\n    MNIST = 'the class'\n"
    assert with_stand_in(tmp_path, content, vision.mnist_class) == "the class"
