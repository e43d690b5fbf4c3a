"""The commands around the service: serve, queue, cancel. What hands runs to it is in cli_submit.py."""

from __future__ import annotations

import time

import click

from launcher.cli_shared import host_options, json_option, server_url
from launcher.errors import InputError

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
    ringctl serve                          on this machine's hosts.yaml; to a terminal it prints a link
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
    return f"{own.page or own.url}/login?key={key}{place}"


def open_run(run: str | None, tab: str = "") -> int:
    """The page of the user's own service, at the latest run or RUN, signed in by a new link."""
    from launcher.client import client_for
    from launcher.webpage import open_page

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
    from launcher.logs import visible

    service = client_for(server_url())
    row = service.post(service.run(service.find(run)["run"], "/cancel"))
    click.echo(text.json_line(row) if as_json else visible(f"run {row['run']}: {row['state']}"))
    return 0


# --- the launch of a queued run ------------------------------------------------------------------


@click.command("start-queued", hidden=True)
@click.argument("run")
def start_queued(run: str) -> int:
    """Launch a run that was handed in, on the slots that were given to it."""
    from launcher import cli, queued

    asked, checks = queued.asked(run), queued.is_checked(run)
    return cli.launch_and_watch(asked, preflight=checks, detach=True, as_json=True)
