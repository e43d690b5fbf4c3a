"""`python -m benchmarks [NAME ...] [--full] [--json FILE] [--list]`.

A missed target is a result and exits 0; a benchmark that could not be carried out exits 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.catalogue import BENCHMARKS, LONG, Benchmark
from benchmarks.measurement import Measurement
from benchmarks.report import LEGEND, as_json, table
from benchmarks.workbench import CannotRun, workbench


def main() -> int:
    options = parser().parse_args()
    known = {**BENCHMARKS, **LONG}
    if options.list:
        for name, benchmark in known.items():
            print(f"{name:<18} {summary(benchmark)}")
        return 0
    unknown = [name for name in options.names if name not in known]
    if unknown:
        print(f"there is no benchmark {unknown[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a workbench is cleared then too
    names = options.names or [*BENCHMARKS, *(LONG if options.full else ())]
    return run({name: known[name] for name in names}, options.json)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones; by default all but the long")
    parser.add_argument("--full", action="store_true", help="the long ones too")
    parser.add_argument("--list", action="store_true", help="show what there is and run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON there, not to stdout")
    return parser


def summary(benchmark: Benchmark) -> str:
    return (benchmark.__doc__ or "").partition("\n")[0]


def run(benchmarks: Mapping[str, Benchmark], json_file: Path | None) -> int:
    """Run them one after another, print each table as soon as it is there, then the JSON of all."""
    machine = about_machine()
    results: dict[str, list[Measurement]] = {}
    failures: dict[str, str] = {}
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for name, benchmark in benchmarks.items():
        results[name] = []
        print(f"\n{name}: {summary(benchmark)}", flush=True)
        try:
            with workbench(name) as bench:
                for measurement in benchmark(bench):
                    results[name].append(measurement)  # one by one: those before a failure count
        except CannotRun as error:
            failures[name] = str(error)
            print(f"could not run: {error}", flush=True)
        if results[name]:
            print("\n".join(table(results[name])), flush=True)
    print(f"\n{LEGEND}")
    text = json.dumps(as_json(machine, results, failures), indent=2)
    if json_file is None:
        print(f"\n{text}")
    else:
        json_file.write_text(text + "\n")
    return 1 if failures else 0


def about_machine() -> dict[str, Any]:
    """What the figures depend on most."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


if __name__ == "__main__":
    sys.exit(main())
