"""Preflight as one step: ask the hosts of a run, judge what they say, and what that means for the run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from launcher.agent import Agent
from launcher.errors import HostError, InputError, PreflightError
from launcher.logs import visible
from launcher.model import CheckResult, Host, Inventory
from launcher.plan import LaunchOptions, is_trainer, place
from launcher.preflight import fixes
from launcher.preflight.checks import NAMES, judge
from launcher.preflight.survey import Need, Survey, take

if TYPE_CHECKING:
    from launcher.ask import Asked


OTHERS_THERE = "slots_taken"


@dataclass(frozen=True)
class Examined:
    """What preflight found."""

    hosts: tuple[Host, ...]
    survey: Survey
    results: tuple[CheckResult, ...]

    @property
    def failures(self) -> list[CheckResult]:
        return [result for result in self.results if result.status == "fail"]

    @property
    def blockers(self) -> list[CheckResult]:
        return [result for result in self.failures if result.blocking]

    @property
    def warnings(self) -> list[CheckResult]:
        return [result for result in self.results if result.status == "warn"]

    @property
    def worth_saying(self) -> list[CheckResult]:
        """What a launch tells although it starts: failures that do not block, and that others are there."""
        return [*self.failures, *(result for result in self.warnings if result.name == OTHERS_THERE)]

    @property
    def exit_code(self) -> int:
        if self.survey.errors:
            return HostError.exit_code
        return PreflightError.exit_code if self.blockers else 0

    def must_pass(self) -> None:
        """Raise PreflightError with everything that would stop the run."""
        if self.blockers:
            lines = [result_line(result) for result in self.blockers]
            raise PreflightError("\n".join([*lines, "nothing was started"]))


@dataclass(frozen=True)
class Seen:
    """One look of `ringctl preflight`."""

    asked: Asked
    agents: dict[str, Agent]
    examined: Examined


def result_line(result: CheckResult) -> str:
    """One finding as a complaint that says where, what, and what to do."""
    fix = "".join(f"\n  {visible(line)}" for line in result.fix.splitlines())
    return f"{result.host}: {visible(result.found)} ({result.name}){fix}"


def examine(
    inventory: Inventory,
    options: LaunchOptions,
    agents: Mapping[str, Agent],
    code: dict[str, Any] | None = None,
    names: Iterable[str] = NAMES,
    *,
    deep: bool = False,
    figures: bool = True,
    stay: bool = False,
    ending: str = "",
) -> Examined:
    """Ask all hosts that the run would use, and judge; with `figures`, also how fast the ways are. With
    `stay`, the conversations stay open, to start it in. What the run `ending` has is free by then."""
    placed = place(inventory, options.world)
    need = Need(
        command=kind_of(options.command),
        ranks={host.name: len(ranks) for host, ranks in placed},
        environment=environment_here() if any(fixes.by_name(host) for host, _ in placed) else "",
        port=options.master_port or inventory.master_port or 0,
        data=data_folder(options.command),
        deep=deep,
        i_know=options.i_know,
        shared=options.shared,
        figures=figures,
        run=options.run,
        ending=ending,
    )
    survey = take(agents, inventory, need, code, stay=stay)
    hosts = tuple(host for host, _ in placed)
    return Examined(hosts, survey, tuple(judge(hosts, need, survey, names)))


def kind_of(command: Sequence[str]) -> Literal["trainer", "python", "other"]:
    if is_trainer(tuple(command)):
        return "trainer"
    return "python" if os.path.basename(command[0]).startswith("python") else "other"


def environment_here() -> str:
    """The name in the environment.yaml of this folder; "" if there is none that can be read."""
    from launcher import environment  # for the few who have one

    try:
        return environment.read_spec(environment.find_file(None)).name
    except InputError:
        return ""


def data_folder(command: Sequence[str]) -> str:
    """The folder that the built-in trainer's --data names; "" for data that it brings or fetches, and for a
    folder in the ranks' own, which is not there yet."""
    value = ""
    for place_, word in enumerate(command):
        if not is_trainer(tuple(command)):
            break
        if word == "--data" and place_ + 1 < len(command):
            value = command[place_ + 1]
        elif word.startswith("--data="):
            value = word.partition("=")[2]
    return value if value.startswith(("/", "~")) else ""
