"""Figures for Prometheus, in its text format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from launcher import listing
from launcher.serve.shapes import STATES

if TYPE_CHECKING:
    from launcher.serve.service import Service

Sample = tuple[Mapping[str, str], Any]


def escaped(value: str) -> str:
    """For between the quotes of a label."""
    text = value.encode("utf-8", "replace").decode()
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def number(value: Any) -> str | None:
    """None for what is no number, which a rank may well have written."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    if math.isnan(value):
        return "NaN"
    return ("+Inf" if value > 0 else "-Inf") if math.isinf(value) else repr(value)


def family(name: str, kind: str, words: str, samples: Iterable[Sample]) -> list[str]:
    """One metric with all its samples; nothing where there is none."""
    lines = []
    for labels, value in samples:
        text = number(value)
        if text is not None:
            inside = ",".join(f'{key}="{escaped(each)}"' for key, each in labels.items())
            lines.append(f"{name}{{{inside}}} {text}" if inside else f"{name} {text}")
    return [f"# HELP {name} {words}", f"# TYPE {name} {kind}", *lines] if lines else []


RANK_METRICS = (
    (
        "ringctl_rank_heartbeat_age_seconds",
        "gauge",
        "Seconds since a rank was last heard of",
        "heartbeat_age_s",
    ),
    ("ringctl_rank_step", "gauge", "The step that a rank is at", "step"),
    ("ringctl_rank_loss", "gauge", "The loss that a rank last told of", "loss"),
    ("ringctl_rank_samples_per_second", "gauge", "How fast a rank trains", "samples_per_s"),
    ("ringctl_rank_sent_bytes_total", "counter", "Bytes that a rank has sent", "bytes_sent"),
)


def exposition(service: Service) -> str:
    """All figures as they are now."""
    states = listing.count_states()
    lines = family(
        "ringctl_runs",
        "gauge",
        "Runs by state",
        [({"state": state}, states.get(state, 0)) for state in STATES],
    )
    going = listing.rows(limit=200, state="starting,running")
    details = [found for row in going if (found := service.detail(row["run"]))]
    for name, kind, words, key in RANK_METRICS:
        samples = [(rank_labels(run, rank), rank[key]) for run in details for rank in run["ranks"]]
        lines += family(name, kind, words, samples)
    hosts = service.host_rows()
    for name, words, key in (
        ("ringctl_host_slots", "Slots of a host", "slots"),
        ("ringctl_host_free_slots", "Slots of a host that no run has", "free"),
        ("ringctl_host_memory_free_bytes", "Memory that is free on a host", "memory_free"),
        ("ringctl_host_disk_free_bytes", "Disk that is free on a host", "disk_free"),
    ):
        lines += family(name, "gauge", words, [({"host": host["name"]}, host[key]) for host in hosts])
    answers = [({"host": host["name"]}, 0 if host["error"] or not host["seen"] else 1) for host in hosts]
    lines += family("ringctl_host_up", "gauge", "Whether a host answers", answers)
    lines += family("ringctl_queue_length", "gauge", "Runs that wait", [({}, states.get("queued", 0))])
    return "\n".join(lines) + "\n"


def rank_labels(run: Mapping[str, Any], rank: Mapping[str, Any]) -> dict[str, str]:
    return {"run": run["run"], "name": run["name"], "rank": str(rank["rank"]), "host": rank["host"]}
