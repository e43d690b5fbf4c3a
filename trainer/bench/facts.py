"""What a reader of the figures must know of the machines they were taken on."""

from __future__ import annotations

import json
import os
import platform
import time
from typing import Any

import torch

from trainer import group
from trainer.bench.options import Asked


def of_all_ranks(asked: Asked) -> dict[str, Any]:
    """The same on all ranks, which must all call it."""
    ranks = [json.loads(text) for text in group.gather_texts(json.dumps(of_this_rank(asked)))]
    hosts: dict[str, dict[str, Any]] = {}
    for rank in ranks:
        host = hosts.setdefault(rank["host"], {**rank, "ranks": 0})
        host["ranks"] += 1
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "world": len(ranks),
        "hosts": list(hosts.values()),
        "rate": asked.rate,
    }


def of_this_rank(asked: Asked) -> dict[str, Any]:
    return {
        "host": os.environ.get("RINGCTL_HOST", "localhost"),
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": asked.config.threads,
        "torch": torch.__version__,
    }


def processor() -> str:
    """Its model, as Linux names it."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
