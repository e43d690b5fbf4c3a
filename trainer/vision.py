"""torchvision beside any torch: the one place that imports it.

Two things make it awkward. A torchvision built for CUDA beside a CPU torch cannot load its compiled
operators, and then fails on import with "operator torchvision::nms does not exist"; `whole` works around
that. And all of it takes longer to import than torch itself (2.4 s, most of it torch._dynamo, for its
models); `mnist_class` takes only the dataset's own module, in about 20 ms.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch


def mnist_class() -> Any:
    """The class `torchvision.datasets.MNIST`."""
    if "torchvision" not in sys.modules:
        try:
            return _import_without_parents("torchvision.datasets.mnist").MNIST
        except ImportError:
            pass  # not installed, which `whole` says, or laid out differently, which it does not mind
    return whole().datasets.MNIST


def whole() -> ModuleType:
    """All of torchvision. Where it loads by itself this is a plain import."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    _forget("torchvision")  # the failed import leaves some of its modules behind
    _declare_operators()
    return importlib.import_module("torchvision")


@functools.cache  # torch drops the declarations when the library object goes
def _declare_operators() -> torch.library.Library:
    """Declare, without implementing, the operators that torchvision's own Python code refers to on import."""
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]  # torch's
    return library


def _import_without_parents(name: str) -> ModuleType:
    """Import one module without running the `__init__` of the packages above it.

    They stand in empty meanwhile and are forgotten after, so that a later import of the package is a whole
    one.
    """
    package = name.partition(".")[0]
    parents = name.split(".")[:-1]
    try:
        for depth in range(1, len(parents) + 1):
            parent = ".".join(parents[:depth])
            spec = importlib.util.find_spec(parent)
            if spec is None:
                raise ModuleNotFoundError(f"No module named {parent!r}", name=parent)
            sys.modules[parent] = importlib.util.module_from_spec(spec)
        return importlib.import_module(name)
    finally:
        _forget(package)


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
