"""The command that writes a hosts.yaml."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli_shared import pool
from launcher.errors import HostError, InputError, RingctlError

if TYPE_CHECKING:
    from launcher.agent import Agent
    from launcher.init import FoundEnv, Met
    from launcher.model import Inventory
    from launcher.transport.sshconfig import Line

PACKAGES = ("torch", "torchvision")
SEARCH_S = 120.0


@click.command()
@click.option("-H", "host_list", metavar="LIST", help="These hosts: server1:2,lab@server2.")
@click.option("--hostfile", metavar="FILE", help="The hosts of an MPI-style hostfile.")
@click.option(
    "--etc-hosts",
    metavar="[NAMES]",
    is_flag=False,
    flag_value="",
    help="Aliases of this machine's /etc/hosts: these, separated by commas, or all.",
)
@click.option(
    "--ssh-config",
    metavar="[PATTERN]",
    is_flag=False,
    flag_value="",
    help="Hosts of ~/.ssh/config: those that match, or all.",
)
@click.option(
    "-o", "--output", default="hosts.yaml", metavar="FILE", help="./hosts.yaml by default; - prints it."
)
@click.option("--force", is_flag=True, help="Overwrite the file if it is there.")
@click.option("--no-probe", is_flag=True, help="Write what is known here; connect to nobody.")
def init(
    host_list: str | None,
    hostfile: str | None,
    etc_hosts: str | None,
    ssh_config: str | None,
    output: str,
    force: bool,
    no_probe: bool,
) -> int:
    """Write a hosts.yaml, with what is found on the hosts: ready to launch.

    Exit code 4 if a host could not be reached; the file is written all the same, and says why.
    """
    from launcher import init as writing
    from launcher import inventory, text

    found = hosts_from(host_list, hostfile, etc_hosts, ssh_config)
    if output != "-" and not force and os.path.lexists(output):
        raise InputError(f"{output} is there already", fix="write --force to overwrite it, or --output FILE")
    met = [writing.Met(host) for host in found.hosts] if no_probe else meet(found)
    content = writing.inventory_text(met)
    inventory.parse(content, output)  # what we write must load
    if output == "-":
        click.echo(content, nl=False)
    else:
        write(Path(output), content, force)
        click.echo(f"{output}: {text.count(len(met), 'host')}; next: ringctl preflight{naming(output)}")
    silent = [each for each in met if each.problem]
    for each in silent:
        click.echo(f"error: {each.host.name}: {each.problem}", err=True)
    if any(each.unknown_key for each in met):
        where = naming(output) if output != "-" else f" -H {','.join(each.host.name for each in met)}"
        click.echo(f"look at the new host keys with: ringctl trust{where}; then repeat this", err=True)
    return HostError.exit_code if silent else 0


def naming(output: str) -> str:
    """What the next command needs to be told so that it finds the file."""
    by_itself = output == "hosts.yaml" and not os.environ.get("RINGCTL_HOSTS")
    return "" if by_itself else f" --hosts {shlex.quote(output)}"


def hosts_from(
    host_list: str | None, hostfile: str | None, etc_hosts: str | None, ssh_config: str | None
) -> Inventory:
    """The hosts that the one option given names."""
    from launcher import hostlist, inventory
    from launcher import init as writing
    from launcher.transport import sshconfig

    given = [each for each in (host_list, hostfile, etc_hosts, ssh_config) if each is not None]
    if len(given) != 1:
        raise InputError("name the hosts in one way: -H LIST, --hostfile FILE, --etc-hosts or --ssh-config")
    if host_list is not None:
        return hostlist.parse_host_list(host_list)
    if hostfile is not None:
        return hostlist.parse_hostfile(inventory.read(Path(hostfile)), hostfile)
    if etc_hosts is not None:
        names = writing.of_etc_hosts(inventory.read(Path("/etc/hosts")), etc_hosts)
    else:
        own, *_ = sshconfig.load().files
        names = writing.of_ssh_config(host_words(own), ssh_config or "")
    return hostlist.parse_host_list(",".join(names))


def host_words(lines: Iterable[Line]) -> Iterator[str]:
    """What stands behind Host in an SSH configuration, also in the files that it includes."""
    for line in lines:
        if line.keyword == "host":
            yield from line.words
        for file in line.files:
            yield from host_words(file)


# --- Asking the hosts ----------------------------------------------------------------------------


def meet(found: Inventory) -> Sequence[Met]:
    """All of them at once; each with its facts, or with why it has none."""
    from launcher.agent import agents_for
    from launcher.fanout import fan_out
    from launcher.init import Met
    from launcher.preflight.survey import Need, take

    agents = agents_for(found.hosts, pool())
    survey = take(agents, found, Need(command="other"))
    envs = fan_out(survey.facts, lambda name: environments_on(agents[name]))
    met = []
    for host in found.hosts:
        error, its = survey.errors.get(host.name), envs.get(host.name, ())
        if error is not None:
            words = words_of(error)
            met.append(Met(host, problem=words, unknown_key="unknown host key" in words))
        elif isinstance(its, RingctlError):
            met.append(Met(host, survey.facts[host.name], no_search=its.message))
        else:
            met.append(Met(host, survey.facts[host.name], its))
    return met


def words_of(error: RingctlError) -> str:
    what = error.words if isinstance(error, HostError) else error.message
    return "; ".join(part for part in (what, *error.fix.splitlines()) if part)


def environments_on(agent: Agent) -> tuple[FoundEnv, ...]:
    """What a search of the usual places finds there."""
    from launcher.init import FoundEnv
    from launcher.model import from_json

    answer = agent.ask("hostlook.py", [], {"search": True, "packages": list(PACKAGES)}, timeout=SEARCH_S)
    try:
        return tuple(from_json(FoundEnv, about) for about in answer["found"])
    except (TypeError, KeyError, AttributeError):
        raise HostError(agent.host.name, "its search answered something else than environments") from None


# --- Writing -------------------------------------------------------------------------------------


def write(path: Path, text: str, force: bool) -> None:
    """At once, or not at all; without `force` also not over a file that has come meanwhile."""
    from launcher.wholefile import write_where_named

    try:
        if force:
            write_where_named(path, text.encode())
            return
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".ringctl-")
        try:
            with os.fdopen(fd, "wb") as f:
                f.write(text.encode())
            os.chmod(temporary, 0o644)
            os.link(temporary, path)
        finally:
            os.unlink(temporary)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
