"""Every benchmark, in the order in which they are run. A new one is one file and one entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.accuracy import accuracy
from benchmarks.checkpoint_cost import checkpoint_cost
from benchmarks.failures import host_loss, rank_death
from benchmarks.first_collective import first_collective
from benchmarks.follow_hosts import follow_hosts
from benchmarks.history import history
from benchmarks.log_throughput import log_throughput
from benchmarks.measurement import Measurement
from benchmarks.over_ssh import controller, over_ssh
from benchmarks.page_cause import page_cause
from benchmarks.preflight import all_pairs, preflight
from benchmarks.push_tree import push_tree
from benchmarks.schedule import schedule
from benchmarks.service import service, service_long
from benchmarks.startup import startup
from benchmarks.sync_links import sync_links
from benchmarks.sync_memory import sync_memory
from benchmarks.workbench import Workbench

Benchmark = Callable[[Workbench], Iterator[Measurement]]

BENCHMARKS: dict[str, Benchmark] = {
    "startup": startup,
    "first_collective": first_collective,
    "log_throughput": log_throughput,
    "over_ssh": over_ssh,
    "controller": controller,
    "preflight": preflight,
    "all_pairs": all_pairs,
    "push_tree": push_tree,
    "follow_hosts": follow_hosts,
    "schedule": schedule,
    "sync_links": sync_links,
    "sync_memory": sync_memory,
    "checkpoint_cost": checkpoint_cost,
    "rank_death": rank_death,
    "host_loss": host_loss,
    "history": history,
    "service": service,
    "page_cause": page_cause,
}

LONG: dict[str, Benchmark] = {"accuracy": accuracy, "service_long": service_long}
"""Those that take longer than anyone waits for: `make bench-full`."""
