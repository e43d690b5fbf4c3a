"""The runs of this host: where their folders are, and how each is."""

from __future__ import annotations

import os
import time

from launcher.hostanswer import Refused
from launcher.hostdisk import read_json
from launcher.hostproc import alive, boot_id

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from typing import Any

FINAL = ("succeeded", "failed", "stopped")


def home_folder() -> str:
    return os.environ.get("RINGCTL_HOME") or os.path.expanduser("~/.ringctl")


def run_folder(run: str) -> str:
    return os.path.join(home_folder(), "runs", run)


def runs_here() -> list[str]:
    try:
        return sorted(os.listdir(os.path.join(home_folder(), "runs")))
    except FileNotFoundError:
        return []


class Unreadable(Refused):
    """What is there as the state of a run is none. Perhaps a newer ringctl wrote it, or a rank."""

    def __init__(self, run: str) -> None:
        super().__init__(f"what is written down there about run {run} cannot be read")


def read_state(run: str) -> dict[str, Any] | None:
    """The run's state here; "lost" when its supervisor is gone without having finished it."""
    state = read_as_it_is(run)
    if state is None:
        return None
    if state["state"] not in FINAL and not alive(state["hostd"]) and not alive(state["warden"]):
        newer = read_as_it_is(run) or state
        state = newer if newer["state"] in FINAL else dict(newer, state="lost")
    return state


def read_as_it_is(run: str) -> dict[str, Any] | None:
    state = state_in(run_folder(run))
    if state is not None and not is_state(state):
        raise Unreadable(run)
    return state


def state_in(folder: str) -> dict[str, Any] | None:
    """What its supervisor, or whoever did so in its place, has written down last. Of a file that was not on
    the disk yet when the machine lost its power some file systems keep the name alone: then what the plan
    tells, of processes that are gone."""
    path = os.path.join(folder, "state.json")
    state = read_json(path)
    if state is not None or not os.path.exists(path):
        return state
    plan = read_json(os.path.join(folder, "plan.json")) or {}
    try:
        return as_planned(plan) if plan["boot"] != boot_id() else None
    except (KeyError, TypeError, ValueError):
        return None  # an older ringctl's, or what a rank has put in its place


def as_planned(plan: dict[str, Any]) -> dict[str, Any]:
    """The state of a run of which nothing else is known than that it was begun here."""
    nobody, then = {"pid": 0, "start": None, "boot": plan["boot"]}, float(plan["begun"])
    rank: dict[str, Any] = {
        "pid": None, "start": None, "state": "running", "exit_code": None, "signal": None, "reason": "",
        "stopping": None, "seen": then, "metric": {},
    }  # fmt: skip
    return {
        **{key: plan[key] for key in ("run", "name", "attempt", "world", "host")},
        "state": "running", "started": then, "ended": None, "updated": then,
        "hostd": nobody, "warden": nobody, "left": [], "unwritten": 0, "segment": 1,
        "ranks": [dict(rank, rank=spec["rank"]) for spec in plan["ranks"]],
    }  # fmt: skip


def is_state(value: dict[str, Any]) -> bool:
    """Whether all that is asked of a state here can be."""
    try:
        who = [value["hostd"], value["warden"], *value.get("left", ())]
        int(value["attempt"])
        return (
            isinstance(value["state"], str)
            and all(isinstance(each["pid"], int) and {"start", "boot"} <= each.keys() for each in who)
            and all(isinstance(each["rank"], int) and "state" in each for each in value["ranks"])
        )
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
        return False


def state_to_tell(run: str) -> dict[str, Any] | None:
    """The run's state here. One that cannot be read, perhaps a newer ringctl's, does not hide the others."""
    try:
        return read_state(run)
    except (OSError, Unreadable):
        return {"run": run}


def command_runs(request: dict[str, Any]) -> dict[str, Any]:
    """The state of every run on this host, and this host's clock."""
    wanted = request.get("run")
    states = [state_to_tell(name) for name in runs_here() if wanted in (None, name)]
    return {"runs": [state for state in states if state], "time": time.time()}


def command_secrets(request: dict[str, Any]) -> dict[str, Any]:
    """What the newest attempt here was given as secrets, for whoever shows the run's log to hide them."""
    folder = run_folder(str(request["run"]))
    if not os.path.isdir(folder):
        return {"secrets": {}}  # it has no log here either
    plan = read_json(os.path.join(folder, "plan.json"))
    if plan is None or "secrets" not in plan:
        raise Refused("what was secret is not written down there; an older ringctl may have started the run")
    names = plan["secrets"]
    return {"secrets": {name: rank["env"][name] for rank in plan["ranks"] for name in names}}


def command_slots(_: dict[str, Any]) -> dict[str, Any]:
    """Who has what of this host, and what it is doing."""
    from launcher import hostslots, hosttop

    runs, problem = hostslots.taken()
    return dict(hosttop.now(home_folder()), runs=runs, problem=problem, time=time.time())
