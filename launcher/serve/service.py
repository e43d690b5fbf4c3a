"""What all handlers share."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher import history, listing, queued, schedule, watching
from launcher.ask import Where
from launcher.errors import RingctlError
from launcher.model import Inventory
from launcher.serve.auth import Credentials
from launcher.serve.call import Refused
from launcher.serve.children import ringctl
from launcher.serve.keeper import OVER, Keeper
from launcher.serve.limits import Buckets
from launcher.serve.origin import Names

if TYPE_CHECKING:
    from launcher.serve.call import Call
    from launcher.serve.stream import Live

FIRST_ROWS = 50
MOST_GOING_ON, MOST_QUEUED = 1000, 200  # rows that are told besides, however many runs are newer
MOST_WAITING = 10_000
CHECK_S = 86400.0


@dataclass(frozen=True)
class Settings:
    """How the service was started."""

    where: Where
    inventory: Inventory
    names: Names
    cookie: str
    secure: bool  # whether the cookie is for https alone


class Service:
    """The parts of it, and what is made of several of them."""

    live: Live  # made in the event loop

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.names = settings.names
        self.credentials = Credentials(settings.cookie)
        self.requests = Buckets(burst=400, rate=100)
        self.failures = Buckets(burst=60, rate=2)
        self.logins = Buckets(burst=100, rate=10)
        self.keeper = Keeper(
            settings.inventory, lambda batch: self.live.batch(batch), lambda run: self.live.changed(run)
        )
        self.ending = False  # it was told to
        self.checking = threading.Lock()  # held while a preflight runs

    def still_may(self, call: Call) -> bool:
        """Whether whoever asked would still be let in."""
        shown = self.shown(call)
        return shown is not None and self.credentials.look_up(shown) is not None

    def shown(self, call: Call) -> tuple[str, str] | None:
        """What a request carries: (kind, secret)."""
        return self.credentials.shown(call.headers)

    def where_args(self) -> list[str]:
        """Our hosts, as the command line names them."""
        where = self.settings.where
        options = {
            "--hosts": where.hosts_file,
            "-H": where.host_list,
            "--hostfile": where.hostfile,
            "--include": where.include,
            "--exclude": where.exclude,
        }
        given = [word for name, value in options.items() if value is not None for word in (name, value)]
        return given or ["--local", "--world", str(self.settings.inventory.hosts[0].slots)]

    def unnamed(self, words: str) -> str:
        """A complaint without the places of this machine, which help nobody elsewhere."""
        places = {
            self.settings.inventory.source: "the service's inventory",
            str(history.home()): "the service's folder",
        }
        for place, name in places.items():
            if len(place) > 1:
                words = words.replace(place, name)
        return words

    # --- runs ---

    def detail(self, run: str) -> dict[str, Any] | None:
        recording = self.keeper.recorders.get(run)
        found = listing.detail(run, live=recording[0].state if recording else None)
        if found is None:
            return None
        can = actions(found, about_to_start=watching.is_about_to_start(run))
        return {**found, "watched": watching.sentence(run), "actions": can}

    def detail_and_over(self, run: str) -> tuple[dict[str, Any] | None, bool]:
        busy = self.keeper.is_busy(run)  # asked first: what is recorded then is in the detail
        found = self.detail(run)
        return found, found is None or (found["state"] in OVER and not busy and not self.keeper.is_busy(run))

    def first_rows(self) -> list[dict[str, Any]]:
        """Those of the newest runs, and of older ones that are not over."""
        wanted = {"starting,running": MOST_GOING_ON, "queued": MOST_QUEUED, None: FIRST_ROWS}
        found = (listing.rows(limit=limit, state=state) for state, limit in wanted.items())
        return list({row["run"]: row for rows in found for row in rows}.values())

    def queue(self) -> list[dict[str, Any]]:
        """Those that wait or start, in the order of the queue."""
        waiting = sorted(
            queued.rows("queued", "starting"),
            key=lambda row: (row.state != "starting", -row.submission.priority, row.place),
        )
        # A launch may still be at it when its run is seen to go on.
        rows = {row["run"]: row for row in listing.rows(limit=MOST_WAITING, state="queued,starting")}
        return [rows[row.run] for row in waiting if row.run in rows]

    # --- hosts ---

    def host_rows(self) -> list[dict[str, Any]]:
        own = self.keeper.own()
        mine = {each.run for each in own}
        taken = [*own, *self.keeper.others(mine)]
        found = []
        for host in self.settings.inventory.hosts:
            seen = self.keeper.hosts[host.name]
            runs = [
                {"run": each.run, "user": each.user, "slots": each.slots[host.name], "shared": each.shared}
                for each in taken
                if each.slots.get(host.name)
            ]
            used = schedule.used(taken, host.name)
            now = seen.now
            found.append(
                {
                    "name": host.name,
                    "address": host.address,
                    "slots": host.slots,
                    "taken": used,
                    "free": max(0, host.slots - used) if seen.answers else 0,
                    "runs": runs,
                    "load": list(now.load) if now else [],
                    "cores": now.cores if now else None,
                    "memory_free": known(now.memory_free) if now else None,
                    "memory_total": known(now.memory_total) if now else None,
                    "disk_free": known(now.disk_free) if now else None,
                    "disk_total": known(now.disk_total) if now else None,
                    "seen": seen.seen,
                    "problem": now.problem if now else "",
                    "error": seen.error,
                }
            )
        return found

    def start_check(self) -> bool:
        """Check all hosts, beside whatever else is asked; False if that is under way already."""
        if not self.checking.acquire(blocking=False):
            return False

        def work() -> None:
            try:
                found = self.check_hosts()
                if not self.ending:  # else it was ended, which is nothing that it found
                    history.note(history.PREFLIGHT, found)
            finally:
                self.checking.release()

        threading.Thread(target=work, name="preflight", daemon=True).start()
        return True

    def check_hosts(self) -> dict[str, Any]:
        """What `ringctl preflight` finds; also that it could not be run."""
        try:
            found = ringctl("preflight", "--json", *self.where_args(), seconds=300.0).json()
        except (Refused, RingctlError) as error:
            words = {"name": "preflight", "host": "", "peer": "", "status": "fail", "blocking": True}
            check = {**words, "found": str(error), "wanted": "", "fix": ""}
            return {"ok": False, "checks": [check], "pairs": []}
        return {key: found[key] for key in ("ok", "checks", "pairs")}

    def check_first(self) -> None:
        """How fast links are is known before anybody looks at a ring: measure where that is unknown, or of
        another day, or of other hosts."""
        names, last = {host.name for host in self.settings.inventory.hosts}, self.preflight()
        fresh = last is not None and time.time() - last["time"] < CHECK_S
        if len(names) > 1 and not (fresh and last and names <= {each["host"] for each in last["checks"]}):
            self.start_check()

    def preflight(self) -> dict[str, Any] | None:
        noted = history.noted(history.PREFLIGHT)
        return history.told_at(noted) if noted else None


def known(number: int) -> int | None:
    return None if number < 0 else number


def actions(row: dict[str, Any], *, about_to_start: bool) -> list[str]:
    """What can be done with a run as it is; also while somebody is `about_to_start` it again."""
    if row["state"] == "queued":
        return ["cancel"]
    if row["state"] in ("starting", "running") or about_to_start:
        return ["stop", "restart"] if row.get("plan") else ["cancel"]
    return ["restart"] if row["state"] != "cancelled" and row.get("plan") else []


def fresh_id(name_taken: Any) -> str:
    """An id for a run that is handed in; ids sort by time."""
    while name_taken(run := history.new_run_id()):
        time.sleep(0.01)
    return run
