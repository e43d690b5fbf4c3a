"""`make N`: a history of N runs, in ringctl's database and as a file a run. `rows`, `files`: how many seconds
it takes to find the newest fifty in either. `chunks`, `inserts`: the processor time of recording ten seconds
of 64 ranks with 200 lines a second each, as ringctl does it and with a row an event; and the megabytes."""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher import fold, history, listing, tape
from launcher.follow import Place
from launcher.model import Event, Host, HostPlan, Inventory, Plan, RankSpec, RankState, RunState, to_json
from launcher.plan import LaunchOptions

SHOWN, RANKS, LINES, SECONDS, BATCH_S = 50, 64, 200, 10, 0.15
HOSTS = tuple(Host(f"server{number}") for number in range(4))
ENV = {f"VARIABLE_{number}": "a value of usual length" for number in range(25)}


def record(run: str, ranks: int) -> history.Record:
    specs = [RankSpec(rank, 0, ("python", "train.py", "--lr", "0.1"), ENV) for rank in range(ranks)]
    parts = tuple(HostPlan(h.name, "~/w", None, True, tuple(specs[n::4])) for n, h in enumerate(HOSTS))
    plan = Plan(run, "mine", 1, ranks, "10.0.0.1", 23456, ("--lr", "0.1"), parts)
    told = {"step": 900, "steps": 900, "loss": 0.0123, "accuracy": 0.98, "samples_per_s": 1234.5}
    ended = {rank: RankState(rank, "server0", "succeeded", 1, 0, metric=told) for rank in range(ranks)}
    end = RunState(run, "mine", 1, ranks, "succeeded", ended, 1.0, 2.0)
    options = LaunchOptions(run, "mine", plan.command, "/trainer")
    return history.Record(plan, HOSTS, 1.0, Inventory(HOSTS, "server0"), options, end)


def make(count: int) -> None:
    spark = {"spark": [round(1 / (n + 1), 4) for n in range(40)]}
    folder = Path("files")
    folder.mkdir()
    whole = json.dumps(to_json(record("RUN", 4)))

    def work(db: sqlite3.Connection) -> None:
        history.put(db, record("RUN", 4))
        db.execute("UPDATE runs SET summary = json_patch(summary, ?)", (json.dumps(spark),))
        columns = [row["name"] for row in db.execute("PRAGMA table_info(runs)")][1:]
        rest = ", ".join(columns)
        same = f"INSERT INTO runs SELECT ?, {rest} FROM runs WHERE run = 'RUN'"  # noqa: S608 - our own columns
        for number in range(count):
            run = f"20260101-{number:06}-abcd"
            db.execute(same, (run,))
            db.execute("INSERT INTO records VALUES (?, ?)", (run, whole.replace("RUN", run)))
            (folder / f"{run}.json").write_text(whole.replace("RUN", run))

    history.change(work)
    history.forget("RUN")


def rows() -> tuple[float]:
    began = time.perf_counter()
    assert len(json.dumps(listing.rows(SHOWN))) > 1000
    return (time.perf_counter() - began,)


def files() -> tuple[float]:
    began = time.perf_counter()
    found = [json.loads(path.read_text()) for path in Path("files").glob("*.json")]
    found.sort(key=lambda each: each["plan"]["run"], reverse=True)
    assert len(json.dumps([each["end"] for each in found[:SHOWN]])) > 1000
    return (time.perf_counter() - began,)


def batches(run: str) -> Iterator[list[Event]]:
    size = int(RANKS * LINES * BATCH_S)
    for first in range(0, RANKS * LINES * SECONDS, size):
        yield [
            Event("line", n / 1000, run, 1, HOSTS[n % 4].name, n % RANKS, {"stream": "out", "text": words(n)})
            for n in range(first, first + size)
        ]


def words(number: int) -> str:
    loss, other = 1 / (number + 1), number * 7919 % 997
    return f"epoch {number // 900} step {number % 900} loss {loss:.6f} and {other} more"


def chunks() -> tuple[float, float]:
    history.write(record("CHUNKS", RANKS))
    state, spent = fold.initial(record("CHUNKS", RANKS).plan), 0.0
    places = {host.name: Place((1, 1, 0), 0, 1) for host in HOSTS}
    with tape.Tape("CHUNKS") as book:
        for batch in batches("CHUNKS"):
            began = time.process_time()
            book.append(batch, 1, places, state)
            spent += time.process_time() - began
    words = "SELECT sum(length(data)) FROM chunks WHERE run = 'CHUNKS'"
    size = history.ask(lambda db: db.execute(words).fetchone()[0], 0)
    history.forget("CHUNKS")
    return spent, size / 1e6


def inserts() -> tuple[float, float]:
    Path("plain.db").unlink(missing_ok=True)
    db, spent = sqlite3.connect("plain.db", isolation_level=None), 0.0
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    db.execute("CREATE TABLE events (run, id, time, host, rank, stream, text, PRIMARY KEY (run, id))")
    number = 0
    for batch in batches("PLAIN"):
        began = time.process_time()
        db.execute("BEGIN")
        for event in batch:
            number += 1
            said = (event.host, event.rank, event.data["stream"], event.data["text"])
            db.execute(
                "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", ("PLAIN", number, event.time, *said)
            )
        db.execute("COMMIT")
        spent += time.process_time() - began
    db.close()
    return spent, Path("plain.db").stat().st_size / 1e6


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(int(sys.argv[2]))
    else:
        ways: dict[str, Callable[[], tuple[float, ...]]] = {
            "rows": rows,
            "files": files,
            "chunks": chunks,
            "inserts": inserts,
        }
        print(*ways[sys.argv[1]]())
