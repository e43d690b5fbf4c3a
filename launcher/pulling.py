"""Pulls a run: asks its hosts what they have of it, and brings that into a folder here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher import fetch, pull, showlogs, text
from launcher.agent import Agent
from launcher.errors import HostError, RingctlError
from launcher.fanout import fan_out
from launcher.logs import ranges, visible
from launcher.pull import Checkpoint, Copy, Listing
from launcher.pullfolder import MODEL, PullFolder
from launcher.runs import Found

ROUNDS = 3  # a run that goes on may remove what was chosen; then there is something newer
Model = tuple[Checkpoint, Copy]


@dataclass
class Heard:
    """What the hosts of a run have of it, and which of them are missing."""

    found: Found
    agents: Mapping[str, Agent]
    listings: Mapping[str, Listing] = field(default_factory=dict)
    away: dict[str, str] = field(default_factory=dict)  # hosts of which something is missing, and why
    no_room: set[str] = field(default_factory=set)  # those of them that have more than there is room for here
    failed: bool = False  # something else has gone wrong, and was told

    @property
    def code(self) -> int:
        if self.away.keys() - self.no_room or self.found.elsewhere:
            return HostError.exit_code
        return int(self.failed or bool(self.no_room))

    @property
    def near(self) -> list[str]:
        return [host for host in self.agents if host not in self.away]

    def ask(self) -> None:
        """Each host that is not known to be away."""
        answers = fetch.listings({host: self.agents[host] for host in self.near}, self.found.run)
        self.listings = {host: a for host, a in answers.items() if not isinstance(a, RingctlError)}
        for host, answer in answers.items():
            if isinstance(answer, RingctlError):
                self.miss(host, answer)

    def miss(self, host: str, error: RingctlError) -> None:
        """Something of this host will be missing."""
        words = error.message
        if isinstance(error, fetch.NoRoom):  # which names a folder of this machine
            words = f"{host}: {words}"
            self.no_room.add(host)
        self.away[host] = words
        complain(f"{words}; its part is missing")
        if error.fix:
            note(f"  {error.fix}")

    def checkpoints(self) -> list[Checkpoint]:
        return pull.checkpoints(self.listings, all_heard=not self.away and not self.found.elsewhere)

    def told(self) -> dict[str, Any]:
        """What `ringctl checkpoints --json` prints."""
        about = {"run": self.found.run, "name": self.found.name}
        each = [pull.checkpoint_json(of) for of in self.checkpoints()]
        elsewhere = pull.chosen_folders(self.listings)
        return {**about, "checkpoints": each, "elsewhere": elsewhere, "errors": self.away}


def hear(found: Found, agents: Mapping[str, Agent]) -> Heard:
    heard = Heard(found, agents)
    heard.ask()
    if found.elsewhere:
        where = "is on a host that is not named here; its part is missing"
        complain(f"rank {ranges(found.elsewhere)} of it {where}")
    return heard


def complain(words: str) -> None:
    note(f"error: {words}")


def note(words: str) -> None:
    print("\n".join(visible(line) for line in words.splitlines()), file=sys.stderr)


def tell_elsewhere(chosen: Mapping[str, str]) -> None:
    """Checkpoints that are not where ringctl looks."""
    for host, folder in chosen.items():
        note(f"{host}: the run saves to {folder} (--checkpoint-dir), which is not its own folder")
    if chosen:
        note("  what is there is neither listed nor pulled; copy it by hand")


# --- Bringing ------------------------------------------------------------------------------------


def bring(heard: Heard, to: PullFolder, step: int | None) -> None:
    """All there is, each into its place once all has come; NotHere if there is room for nothing of it."""
    model = bring_model(heard, to, step)
    bring_metrics(heard, to)
    whole_logs = bring_logs(heard, to)
    if heard.no_room and model is None and not to.has_come():
        raise fetch.NotHere(f"{to.folder}: there is no room for run {heard.found.run}")
    is_others = to.has_another(heard.found.run)
    to.begin_placing(heard.found.run)
    if model is not None:
        of, copy = model
        part = to.model_part(copy.sha256)
        to.place_model(part if part.exists() else None, pull.model_json(heard.found.run, of, copy))
        epoch = "" if of.epoch is None else f", epoch {of.epoch}"
        print(f"model.pt: step {of.step}{epoch}, {text.size(copy.bytes)} from {copy.host}, checksum right")
    for name, number in to.place_rest(whole_logs, is_others).items():
        print(f"{name}: {text.count(number, 'file')}")
    to.close(keep_model=model is None and heard.code != 0)


def bring_model(heard: Heard, to: PullFolder, step: int | None) -> Model | None:
    """The newest model that a host has whole, in `to`; None if there is none, and why is told."""
    for rounds_left in reversed(range(ROUNDS)):
        known = heard.checkpoints()
        possible = pull.candidates(known, step)
        if known and not possible and not heard.found.is_over and rounds_left:
            heard.ask()  # where it goes on, each host may have removed what another was still asked about
            continue
        if not possible and step is None:  # a host may have lost what it had finished
            possible = pull.best_first(known)
        gone = False
        for of in possible:
            try:
                copy = first_whole(heard, to, of)
            except fetch.Gone as error:
                note(f"step {of.step}: {error.message}")
                gone = True
                break
            if copy is not None:
                if of.complete is False:
                    note(f"the checkpoint of step {of.step} is not complete; its model is")
                return of, copy
        if not gone:
            break
        heard.ask()
    if possible:
        heard.failed = True
        if not heard.no_room:  # else a host may have one, and was told of
            complain(f"no host has a whole model of step {', '.join(str(of.step) for of in possible)}")
    else:
        tell_no_model(heard, known, step)
    return None


def first_whole(heard: Heard, to: PullFolder, of: Checkpoint) -> Copy | None:
    """The copy of the first host that has it whole, brought here; Gone if the run has removed it."""
    for place, copy in enumerate(of.models):
        if copy.host in heard.away:
            continue  # also who was found wanting before: each of its checkpoints would take as long
        try:
            take(heard, to, of, copy)
        except fetch.NoRoom as error:
            heard.miss(copy.host, error)
        except (fetch.NotHere, fetch.Gone):
            raise
        except HostError as error:
            heard.miss(copy.host, error)
        except RingctlError as error:
            note(f"step {of.step}: {error.message}")
        else:
            return copy
        for after in of.models[place + 1 : place + 2]:
            note(f"step {of.step}: {after.host} has it too, and is asked")
    return None


def take(heard: Heard, to: PullFolder, of: Checkpoint, copy: Copy) -> None:
    """One host's copy, unless it is in its place already."""
    if copy.problem:
        raise fetch.Damaged(f"{copy.host}: {copy.problem}")
    part = to.model_part(copy.sha256)
    if fetch.is_copy(to.folder / MODEL, copy):
        part.unlink(missing_ok=True)
    else:
        fetch.take_model(heard.agents[copy.host], heard.found.run, of.folder, copy, part)


def tell_no_model(heard: Heard, known: list[Checkpoint], step: int | None) -> None:
    if step is not None:
        complain(f"--step {step}: no host that answered has a model of it")
        heard.failed = True
    elif any(of.finished is not False for of in known):
        complain("no host that answered has a model")
        heard.failed = True
    elif known:
        note(
            f"no checkpoint is complete (step {', '.join(str(of.step) for of in known)}): no model is pulled"
        )
    else:
        note(f"run {heard.found.run} has no checkpoints: no model is pulled")
    tell_elsewhere(pull.chosen_folders(heard.listings))


def bring_metrics(heard: Heard, to: PullFolder) -> None:
    wanted = pull.metrics_of({h: heard.listings[h] for h in heard.near}, heard.found.rank_hosts_in)
    lines = not heard.found.is_over

    def work(host: str) -> int:
        return fetch.take_metrics(heard.agents[host], heard.found.run, wanted[host], to.metrics, lines)

    for host, result in fan_out(wanted, work).items():
        if isinstance(result, fetch.NotHere) and not isinstance(result, fetch.NoRoom):
            raise result
        if isinstance(result, RingctlError):
            heard.miss(host, result)


def bring_logs(heard: Heard, to: PullFolder) -> bool:
    """The newest attempt's; whether they are of all its hosts."""
    names = [host.name for host in heard.found.hosts]
    agents = {}
    for name in [name for name in names if name in heard.near]:
        events = heard.listings[name].events
        try:
            fetch.need_room(to.logs, 2 * events)  # all events, and the lines among them once more
            agents[name] = fetch.Bounded(heard.agents[name], events)
        except fetch.NoRoom as error:
            heard.miss(name, error)
    if not agents:
        return False
    try:
        _, last = showlogs.save(heard.found, agents, to.logs)
    except fetch.NotHere:
        raise
    except RingctlError as error:  # all of them have refused
        complain(f"there are no logs: {error.message}")
        heard.failed = True
        return False
    missing = last.unheard.keys() - last.ended_early
    for host, words in showlogs.lacks(last).items():
        complain(words)
        heard.away[host] = last.unheard[host]
    if missing:
        to.drop_logs(missing)
    return len(agents) == len(names) and not missing
