"""The commands around the service: serve, and what hands runs to it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from launcher.cli_shared import host_options, json_option, server_url
from launcher.errors import InputError

if TYPE_CHECKING:
    from launcher.client import Client

PORT = 8411

# --- serve ---------------------------------------------------------------------------------------


@click.group(invoke_without_command=True)
@host_options
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, help=f"{PORT} by default; 0: any.")
@click.option("--bind", default="127.0.0.1", metavar="ADDRESS", help="Where to listen; loopback by default.")
@click.option("--tls-cert", metavar="FILE", help="Certificate, for another address than loopback.")
@click.option("--tls-key", metavar="FILE", help="And its key.")
@click.option("--behind-proxy", metavar="URL", help="What users open: a proxy there brings TLS.")
@click.option("--name", "names", multiple=True, metavar="NAME", help="A name that users reach this by.")
@click.option("--install", is_flag=True, help="Have systemd start it for you; or print the unit.")
def serve(
    port: int,
    bind: str,
    tls_cert: str | None,
    tls_key: str | None,
    behind_proxy: str | None,
    names: tuple[str, ...],
    install: bool,
    **where: str | None,
) -> int:
    """A queue for shared servers, an API and a page, until Ctrl-C.

    \b
    ringctl serve                          on this machine's hosts.yaml; prints a link to the page
    ringctl submit --world 4 -- --epochs 3
    ringctl queue

    Runs are processes of their own and go on without it; started again it finds them.
    """
    if click.get_current_context().invoked_subcommand is not None:
        return 0
    from launcher import servestart

    options = servestart.Options(
        servestart.absolute(where), port, bind, tls_cert or "", tls_key or "", behind_proxy or "", names
    )
    if install:
        from launcher.serveinstall import install as install_unit

        return install_unit(options)
    return servestart.start(options)


@serve.command()
@click.option("--read-only", is_flag=True, help="For looking only.")
@click.option("--user", metavar="NAME", help="For NAME, who hands in runs, and stops and restarts their own.")
def link(read_only: bool, user: str | None) -> int:
    """Print a new link that opens the page once."""
    click.echo(page_link(read_only=read_only, user=user))
    return 0


def page_link(place: str = "", *, read_only: bool = False, user: str | None = None) -> str:
    """Opens the page of this user's own service, there; for another user, as a token of theirs would."""
    from launcher import client
    from launcher.serve import auth

    own = client.own()
    if own is None:
        raise InputError(client.NONE)
    role: auth.Role = "read" if read_only else "admin" if user is None else "submit"
    key = auth.make_key(role, auth.user_name() if user is None else auth.checked_name(user))
    return f"{own.url}/login?key={key}{place}"


def open_run(run: str | None, tab: str = "") -> int:
    """The page of the user's own service, at the latest run or RUN, signed in by a new link."""
    from launcher.cli_remote import open_page
    from launcher.client import client_for

    found = client_for(None).find(run)["run"]
    return open_page(page_link(f"#/runs/{found}{tab}"))


@serve.group()
def token() -> None:
    """Tokens for programs and for other users."""


@token.command("add")
@click.argument("name")
@click.option("--read-only", is_flag=True, help="For looking only.")
@click.option("--admin", is_flag=True, help="Also to stop and restart the runs of others.")
def add_token(name: str, read_only: bool, admin: bool) -> int:
    """Make a token, shown this once: NAME hands in runs, and stops and restarts those of NAME."""
    from launcher.serve import auth

    if read_only and admin:
        raise InputError("--read-only and --admin exclude each other; leave one")
    secret = auth.add_token(name, "read" if read_only else "admin" if admin else "submit")
    click.echo(secret)
    click.echo("it is not kept here and not shown again; for ringctl: RINGCTL_TOKEN", err=True)
    return 0


@token.command("list")
@json_option
def list_tokens(as_json: bool) -> int:
    """Who has one, what for, and when it was last used."""
    from launcher import render, text
    from launcher.serve import auth

    found = auth.tokens()
    if as_json:
        click.echo(text.json_line(found))
    elif not found:
        click.echo("no tokens; make one: ringctl serve token add NAME")
    else:
        now = time.time()
        rows = [
            (each["name"], each["role"], text.ago(each["created"], now), text.ago(each["used"], now))
            for each in found
        ]
        render.show_table([("NAME", "MAY", "MADE", "USED"), *rows])
    return 0


@token.command("remove")
@click.argument("name")
def remove_token(name: str) -> int:
    """Nobody gets in with it any more; browsers that are signed in as NAME are signed out."""
    from launcher.serve import auth

    auth.remove_token(name)
    return 0


# --- submit --------------------------------------------------------------------------------------


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--world", type=click.IntRange(1), metavar="N", help="How many ranks; every slot by default.")
@click.option("--include", default="", metavar="NAMES", help="Only these hosts of the service's inventory.")
@click.option("--exclude", default="", metavar="NAMES", help="Not these hosts of it.")
@click.option("--name", default="", help="A name to find the run by.")
@click.option("--env", "-e", "variables", multiple=True, metavar="NAME=VALUE", help="Set for every rank.")
@click.option("--env-file", metavar="FILE", help="More of those, secret: NAME=VALUE lines, mode 0600.")
@click.option("--prefork/--no-prefork", default=True, help="Import torch once a host and fork the ranks.")
@click.option(
    "--max-restarts", type=click.IntRange(0), default=0, metavar="K", help="Start again after a failure."
)
@click.option(
    "--restart-delay", type=click.FloatRange(0, 3600), default=2.0, metavar="S", help="Seconds before that."
)
@click.option("--min-world", type=click.IntRange(1), metavar="M", help="Go on with so many ranks.")
@click.option(
    "--priority", type=click.IntRange(-1000, 1000), default=0, help="Higher goes first; 0 by default."
)
@click.option("--after", metavar="RUN", help="Not before that run is over.")
@click.option("--at", metavar="WHEN", help="Not before 18:00, 2026-01-31T18:00, or in 90s, 10m, 2h, 1d.")
@click.option("--shared", is_flag=True, help="Its slots may be given to other shared runs, too.")
@click.option("--wait", "-w", is_flag=True, help="Return when it is over, with its exit code.")
@click.option("--follow", "-f", is_flag=True, help="The same, and show its log.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def submit(
    variables: tuple[str, ...],
    env_file: str | None,
    after: str | None,
    at: str | None,
    wait: bool,
    follow: bool,
    as_json: bool,
    command: tuple[str, ...],
    **plain: Any,
) -> int:
    """Hand in a run to the service, which starts it when its slots are free.

    What follows -- is as for launch. The code of a command, the folder that you are in, goes along.
    """
    from launcher import ask, cli_remote, text
    from launcher.client import client_for

    service = client_for(server_url())
    secrets = ask.with_secrets(env_file, ask.variables(variables))
    body = {
        **plain,
        "command": list(command),
        "variables": ask.variables(variables),
        "secrets": {name: value.value for name, value in secrets.items()},
        "after": service.find(after)["run"] if after else "",
        "at": parse_at(at, time.time()) if at is not None else None,
        "code": upload(service, command, env_file or ""),
    }
    row = service.post("/api/submit", body)
    if follow:
        return cli_remote.follow(service, row["run"], as_json=as_json)
    if not as_json:
        click.echo(f"handed in {row['run']}" + (f": {row['waiting']}" if row["waiting"] else ""))
    if wait:
        row = cli_remote.wait_for_end(service, row["run"])
    if as_json:
        click.echo(text.json_line(row))
    elif wait:
        cli_remote.tell_end(row)
    else:
        click.echo(f"  ringctl queue\n  ringctl --server {service.url} logs {row['run']} --follow")
    return cli_remote.exit_code(row["state"]) if wait else 0


def upload(service: Client, command: tuple[str, ...], env_file: str) -> str:
    """The digest of the code that a command needs, once the service has it; "" for the built-in trainer."""
    import tempfile

    from launcher import codestore, push
    from launcher.ask import TRAINER
    from launcher.plan import is_trainer

    if is_trainer(command):
        return ""
    snapshot = push.of_command(command, TRAINER, env_file)
    if not service.get(f"/api/code/{snapshot.digest}")["have"]:
        with tempfile.TemporaryFile() as file:
            codestore.packed(snapshot, file)
            service.put(f"/api/code/{snapshot.digest}", file)
    return snapshot.digest


def parse_at(text: str, now: float) -> float:
    """A moment to come: 18:00 (today or tomorrow), 2026-01-31T18:00, or 90s, 10m, 2h, 1d from now."""
    import re
    from datetime import datetime, timedelta

    from launcher.logs import UNITS

    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return now + float(match[1]) * UNITS[match[2]]
    today = datetime.fromtimestamp(now)
    try:
        if match := re.fullmatch(r"(\d{1,2}):(\d{2})", text):
            then = today.replace(hour=int(match[1]), minute=int(match[2]), second=0, microsecond=0)
            return (then if then > today else then + timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise InputError(
            f"--at {text}: not a time",
            fix="write when (18:00, 2026-01-31T18:00) or in how long (90s, 10m, 2h, 1d)",
        ) from None


# --- queue, cancel -------------------------------------------------------------------------------


@click.command()
@json_option
def queue(as_json: bool) -> int:
    """What waits at the service, in order, and why."""
    from launcher import render, text
    from launcher.client import client_for
    from launcher.logs import visible

    rows = client_for(server_url()).get("/api/queue")["queue"]
    if as_json:
        click.echo(text.json_line(rows))
    elif not rows:
        click.echo("nothing waits")
    else:
        table = [
            (
                row["run"],
                visible(row["name"]) or "-",
                visible(row["user"]) or "-",
                str(row["world"] or "-"),
                str(row["priority"]),
                visible(row["waiting"]) or row["state"],
            )
            for row in rows
        ]
        render.show_table([("RUN", "NAME", "USER", "WORLD", "PRIORITY", "WHY"), *table])
    return 0


@click.command()
@click.argument("run")
@json_option
def cancel(run: str, as_json: bool) -> int:
    """Take RUN from the service's queue."""
    from launcher import text
    from launcher.client import client_for

    service = client_for(server_url())
    row = service.post(service.run(service.find(run)["run"], "/cancel"))
    click.echo(text.json_line(row) if as_json else f"run {row['run']}: {row['state']}")
    return 0


# --- the launch of a queued run ------------------------------------------------------------------


@click.command("start-queued", hidden=True)
@click.argument("run")
def start_queued(run: str) -> int:
    """Launch a run that was handed in, on the slots that were given to it."""
    from launcher import cli, queued

    return cli.launch_and_watch(queued.asked(run), preflight=True, detach=True, as_json=True)
