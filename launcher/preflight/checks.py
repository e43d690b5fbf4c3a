"""Pure: what a survey means. One table of all checks; each is one small function.

A check looks at one host in the light of all and yields Findings, none if all is well. Those that block are
what a run would not survive; the others are worth knowing, or harm those who start by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.errors import HostError
from launcher.model import CheckResult, Host, Status
from launcher.preflight import environment_checks as env
from launcher.preflight import machine_checks as own
from launcher.preflight import network_checks as net
from launcher.preflight.survey import Need, Survey
from launcher.preflight.view import Finding, View, views_of

Area = Literal["ssh", "python", "names", "network", "ports", "environment", "machine", "storage", "data"]
Judge = Callable[[View], Iterable[Finding]]


def with_ifname(view: View) -> bool:
    return bool(view.host.ifname)


def with_peers(view: View) -> bool:
    return len(view.survey.facts) > 1


def with_torch(view: View) -> bool:
    """The built-in trainer needs it, and a Python command may."""
    return view.need.command != "other" and bool(env.version_of(view.facts, "torch"))


def is_master(view: View) -> bool:
    return view.facts.port is not None


def always(_: View) -> bool:
    return True


def with_data(view: View) -> bool:
    return bool(view.need.data)


def with_data_address(view: View) -> bool:
    return bool(view.host.data_address)


def of_trainer(view: View) -> bool:
    return view.need.command == "trainer"


def when_reached(_: View) -> Iterator[Finding]:
    """Nothing is left to look at; of a host that was not reached, `of_error` says why."""
    return iter(())


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    area: Area
    about: str  # what is as it should be, for people
    judge: Judge
    applies: Callable[[View], bool] = always


CHECKS: tuple[Check, ...] = (
    Check("ssh_connect", "ssh", "the host answers, and its sshd lets us talk to it", when_reached),
    Check("ssh_hostkey", "ssh", "its host key is known and has not changed", when_reached),
    Check("ssh_auth", "ssh", "it takes one of our keys", when_reached),
    Check("ssh_noise", "ssh", "its login shell prints nothing of its own", own.ssh_noise),
    Check("python_old", "python", "its python3 is 3.8 or newer", when_reached),
    Check("twice", "names", "it is no other host under another name", net.twice, with_peers),
    Check("loopback_name", "names", "its own name does not mean loopback", net.loopback_name, with_peers),
    Check("multihomed", "names", "its own name does not mean another network", net.multihomed, with_peers),
    Check("alias_missing", "names", "it knows the other hosts by name", net.alias_missing, with_peers),
    Check("alias_elsewhere", "names", "and these names mean those hosts", net.alias_elsewhere, with_peers),
    Check("ifname", "network", "the interface that is named is there", net.ifname, with_ifname),
    Check("data_address", "network", "the data address is its own", net.data_address, with_data_address),
    Check("public", "network", "strangers on the Internet cannot reach a run's ports", net.public),
    Check("route", "network", "it has a route to every other host", net.route, with_peers),
    Check("firewall", "network", "it gets a connection to every other host", net.firewall, with_peers),
    Check("mtu", "network", "large messages arrive; all have the same MTU", net.mtu, with_peers),
    Check("port_used", "ports", "nobody has the master port", net.port_used, is_master),
    Check("port_ephemeral", "ports", "nobody will be given the master port", net.port_ephemeral, is_master),
    Check("env_missing", "environment", "the ranks' environment exists", env.env_missing),
    Check("env_broken", "environment", "its Python works", env.env_broken),
    Check("conda_shell", "environment", "conda is found without a terminal", env.conda_shell),
    Check("torch", "environment", "torch is there", env.torch, of_trainer),
    Check("torchvision", "environment", "torchvision belongs to torch", env.torchvision, with_torch),
    Check(
        "versions",
        "environment",
        "torch and Python are the same everywhere",
        env.versions,
        with_torch,
    ),
    Check("stale_env", "environment", "no variables are left from torchrun", env.stale_env),
    Check("clock", "machine", "its clock agrees with ours", own.clock),
    Check("memory", "machine", "there is memory for its ranks", own.memory),
    Check("shm", "machine", "/dev/shm is not tiny", own.shm),
    Check("nofile", "machine", "a process may open enough files", own.nofile),
    Check("threads", "machine", "the user may start enough threads", own.threads),
    Check("logout_kill", "machine", "runs survive the end of the SSH session", own.logout_kill),
    Check("cpu", "machine", "its processor has what torch expects", own.cpu),
    Check("machine", "machine", "all hosts have the same kind of processor", own.machine),
    Check("busy", "machine", "no other run of ours is going on", own.busy),
    Check("slots_taken", "machine", "nobody else has the slots that the run wants", own.slots_taken),
    Check("folders", "storage", "ringctl's folder is ours and can be written to", own.folders),
    Check("disk", "storage", "there is room on the disk", own.disk),
    Check("inodes", "storage", "there is room for more files", own.inodes),
    Check("dataset", "data", "the dataset is there, whole, and the same", env.dataset, with_data),
)

NAMES = tuple(check.name for check in CHECKS)


def judge(
    hosts: Sequence[Host], need: Need, survey: Survey, names: Iterable[str] = NAMES
) -> list[CheckResult]:
    """Every check on every host, whatever the others found."""
    chosen = [check for check in CHECKS if check.name in set(names)]
    results: list[CheckResult] = []
    views = views_of(hosts, need, survey)
    for host in hosts:
        if host.name in views:
            for check in chosen:
                results += verdicts(check, views[host.name])
        else:
            results += of_error(host, survey.errors[host.name], chosen)
    return results


def verdicts(check: Check, view: View) -> list[CheckResult]:
    if not check.applies(view):
        return [CheckResult(check.name, view.host.name, "skip")]
    found = [
        CheckResult(check.name, view.host.name, f.status, f.found, f.wanted, f.fix, f.peer, f.blocking)
        for f in check.judge(view)
    ]
    return found or [CheckResult(check.name, view.host.name, "ok")]


def of_error(host: Host, error: Exception, chosen: Sequence[Check]) -> list[CheckResult]:
    """Of a host that could not be asked: the check that says why, and what could not be looked at."""
    kind = error.kind if isinstance(error, HostError) else "ssh_connect"
    words = error.words if isinstance(error, HostError) else str(error)
    fix = str(getattr(error, "fix", ""))
    order = ["ssh_connect", "ssh_hostkey", "ssh_auth", "python_old"]
    passed = order[: order.index(kind)] if kind in order else order
    about = next((check.about for check in CHECKS if check.name == kind), "")
    results = [CheckResult(kind, host.name, "fail", words, about, fix, blocking=True)]
    for check in chosen:
        if check.name != kind:
            status: Status = "ok" if check.name in passed else "skip"
            results.append(CheckResult(check.name, host.name, status))
    return results
