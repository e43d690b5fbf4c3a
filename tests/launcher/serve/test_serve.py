"""`ringctl serve` itself: where it listens, that there is one of it, how it is installed; and `--server`."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import socket
import sqlite3
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from launcher import client, codestore, history, queued
from launcher.ask import Where
from launcher.cli_submit import parse_at
from launcher.errors import HostError, InputError
from launcher.serve import limits
from launcher.serve.origin import names_of
from launcher.serve.server import listen
from launcher.serveinstall import argument, argv, plain_path, quoted
from launcher.servestart import Options, own_url, page_url
from tests.launcher.ringctl import RINGCTL, is_alive, ringctl, wait_for
from tests.launcher.serve.service import Service, serving, slow
from tests.launcher.test_terminals import terminal

PROXY = "https://runs.lab.org"


def test_it_listens_to_others_only_with_tls_or_behind_a_proxy() -> None:
    for address in ("0.0.0.0", "::", "192.0.2.1"):
        done = ringctl("serve", "--bind", address, "--port", "0", code=2)
        assert "--tls-cert" in done.stderr
        assert "--behind-proxy" in done.stderr
    assert "go together" in ringctl("serve", "--tls-cert", "x", code=2).stderr
    assert "--behind-proxy" in ringctl("serve", "--behind-proxy", "runs.lab.org", code=2).stderr


def test_there_is_one_service_a_user() -> None:
    with serving() as service:
        done = ringctl("serve", "--port", "0", code=2)
        assert f"runs already at {service.url}" in done.stderr
    assert client.own() is None, "one that has ended is not looked for"
    assert "there is no service" in ringctl("queue", code=2).stderr


def test_a_preflight_that_is_under_way_ends_with_the_service_and_has_found_nothing(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with serving(before=slow("preflight", go)) as service:
        service.client().post("/api/preflight")
        began = wait_for(lambda: list(tmp_path.glob("go?*")), "the preflight")[0]
    wait_for(lambda: not is_alive(int(began.name.removeprefix("go"))), "its end")
    assert history.noted(history.PREFLIGHT) is None


def test_a_terminal_is_told_a_link_and_a_file_that_others_may_read_is_not() -> None:
    with serving():  # its output is a pipe, as a journal's: see Service.start
        assert keys() == 0, "and none was made"
    with terminal([*RINGCTL, "serve", "--port", "0"]) as one:
        shown = one.wait("login?key=")
        shown += "" if shown.endswith("\n") else one.wait("\n")
        link = re.search(r"open http://(\S+)(/login\?key=\S+)", shown)
        assert link is not None, shown
        end = http.client.HTTPConnection(link[1], timeout=30)
        end.request("GET", link[2])
        assert end.getresponse().status == 303
        end.close()
        one.type("\x03")
        one.wait()


def keys() -> int:
    """How many links there are that nobody has opened."""
    with contextlib.closing(sqlite3.connect(history.file())) as db:
        return int(db.execute("SELECT count(*) FROM notes WHERE key LIKE 'login:%'").fetchone()[0])


def listening_at(port: int) -> socket.socket | None:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        return None


def test_nothing_is_sent_to_whoever_has_the_port_of_a_service_that_was_killed() -> None:
    with serving() as service:
        service.kill()
        assert client.own_file().exists()
        # A child that was about to begin may have the port for a moment.
        with wait_for(lambda: listening_at(service.port), "the port") as other:
            other.settimeout(0.0)
            assert "there is no service" in ringctl("queue", code=2).stderr
            assert "no token" in ringctl("--server", service.url, "ps", code=2).stderr
            with pytest.raises(BlockingIOError):
                other.accept()
        assert service.start().client().get("/healthz")["ok"] is True


def test_what_a_killed_service_left_is_removed_when_it_starts_again() -> None:
    with serving() as service:
        known = service.submit("true", at=9e9, secrets={"KEY": "a"})
        service.kill()
        queued.write_secrets("20260101-000000-abcd", {"KEY": "of a run that is forgotten"})
        (codestore.store() / ".coming-x" / "half").mkdir(parents=True)
        service.start()
        assert [path.parent.name for path in queued.folder("x").parent.glob("*/secrets.env")] == [known]
        assert list(codestore.store().iterdir()) == []


def test_answers_do_not_wait_for_the_client_to_have_got_their_head() -> None:
    async def is_sent_at_once() -> bool:
        made: asyncio.Future[asyncio.BaseTransport] = asyncio.get_running_loop().create_future()

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.set_result(transport)

        listener = listen("127.0.0.1", 0)
        server = await asyncio.get_running_loop().create_server(Accepted, sock=listener)
        _, writer = await asyncio.open_connection(*listener.getsockname())
        transport = await asyncio.wait_for(made, 10)
        end = transport.get_extra_info("socket")
        found = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for each in (writer, transport, server):
            each.close()
        await server.wait_closed()
        return bool(found)

    assert asyncio.run(is_sent_at_once())


def test_its_user_gets_in_again_after_the_database_was_damaged() -> None:
    late = "import time; from launcher.serve import auth; own = auth.own_token; "
    late += "auth.own_token = lambda: (time.sleep(1), own())[1]"
    with serving(before=late) as service:  # also at the moment in which it has said that it is there
        with open(history.file(), "r+b") as file:
            file.write(os.urandom(4096))
        for beside in ("-wal", "-shm"):
            history.file().with_name(f"history.db{beside}").unlink(missing_ok=True)
        wait_for(lambda: list(history.home().glob("history.db?*damaged*")), "somebody to see it")
        wait_for(lambda: service.raw("GET", "/api/runs").status == 200, "its user to get in")
        assert "the database was damaged and begun anew" in (service.folder / "serve.err").read_text()
        run = service.submit(sys.executable, "-c", "pass", prefork=False)
        service.wait_for_state(run, "succeeded")


def test_it_ends_without_a_fuss_while_requests_wait_for_hosts(tmp_path: Path) -> None:
    before = slow("checkpoints", tmp_path / "go")
    with serving(before=before) as service, ThreadPoolExecutor(1) as beside:
        run = service.submit("true", at=9e9)
        waits = beside.submit(service.raw, "GET", f"/api/runs/{run}/checkpoints")
        wait_for(lambda: list(tmp_path.glob("go?*")), "the request to wait")
        assert service.stop() == 0
        answer = waits.result()
        assert (answer.status, answer.json["error"]) == (503, "the service ends")
        assert "Traceback" not in (service.folder / "serve.err").read_text()


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = ringctl("serve", "--port", str(taken.getsockname()[1]), code=2)
        assert "cannot listen at 127.0.0.1" in done.stderr


def test_it_works_on_ipv6() -> None:
    with serving("--bind", "::1") as service:
        assert service.url == f"http://[::1]:{service.port}"
        assert service.client().get("/healthz")["ok"] is True
        assert json.loads(ringctl("--server", service.url, "ps", "--json").stdout) == []


def test_it_works_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    monkeypatch.setenv("RINGCTL_CA", str(cert))
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    about = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*make, *about, "-keyout", key, "-out", cert], check=True, capture_output=True)
    options = ("--bind", "0.0.0.0", "--name", "localhost", "--tls-cert", str(cert), "--tls-key", str(key))
    with serving(*options) as service:
        assert service.url == f"https://localhost:{service.port}"
        trust = ssl.create_default_context(cafile=str(cert))
        with urllib.request.urlopen(f"{service.url}/healthz", context=trust) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(f"{service.url}/healthz", context=ssl.create_default_context())
        assert ringctl("--server", service.url, "ps", "--json").stdout == "[]\n"
        refuse_idle_handshakes(service, trust)


def refuse_idle_handshakes(service: Service, trust: ssl.SSLContext) -> None:
    """Connections that never say who they are do not pile up, nor keep others out."""
    with contextlib.ExitStack() as stack:
        ends = []
        for _ in range(limits.MOST_HANDSHAKES + 20):
            end = stack.enter_context(socket.create_connection(("127.0.0.1", service.port), timeout=30))
            ends.append(end)
        with urllib.request.urlopen(f"{service.url}/healthz", context=trust) as answer:
            assert answer.status == 200
        assert [end.recv(1) for end in ends[:20]] == [b""] * 20, "the oldest are cut off"
        ends[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            ends[-1].recv(1)


def test_a_token_never_travels_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCTL_TOKEN", "x")
    assert "in the clear" in ringctl("--server", "http://lab.example:8411", "ps", code=2).stderr
    assert "write a URL" in ringctl("--server", "lab.example", "ps", code=2).stderr


def test_a_token_file_that_others_may_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    monkeypatch.setenv("RINGCTL_TOKEN_FILE", str(path))
    assert "no token" in ringctl("--server", "http://127.0.0.1:1", "ps", code=2).stderr
    path.write_text("x")
    path.chmod(0o644)
    assert "chmod 600" in ringctl("--server", "http://127.0.0.1:1", "ps", code=2).stderr
    path.chmod(0o600)
    assert "does not answer" in ringctl("--server", "http://127.0.0.1:1", "ps", code=4).stderr


def test_what_answers_but_is_no_service_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(10)
        there = client.Client(f"http://127.0.0.1:{other.getsockname()[1]}", "x")
        there_thread = subprocess.Popen(
            [*RINGCTL, "--server", there.url, "ps"],
            env={**os.environ, "RINGCTL_TOKEN": "x"},
            stderr=subprocess.PIPE,
            text=True,
        )
        end, _ = other.accept()
        end.recv(10000)
        end.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        end.close()
        assert "no ringctl service" in there_thread.communicate(timeout=30)[1]
        assert there_thread.returncode == HostError.exit_code


def test_the_page_of_a_run_opens_or_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with serving() as service:
        run = service.submit("x", at=9e9)
        shown = ringctl("--server", service.url, "logs", run, "--web").stdout.strip()
        assert shown == f"{service.url}/#/runs/{run}?tab=log"
        shown = ringctl("--server", service.url, "status", run, "--web").stdout.strip()
        assert shown == f"{service.url}/#/runs/{run}"
        for command, place in (("logs", f"#/runs/{run}?tab=log"), ("status", f"#/runs/{run}")):
            shown = ringctl(command, run, "--web").stdout.strip()
            link, _, fragment = shown.partition("#")
            assert f"#{fragment}" == place
            answer = service.raw("GET", link.removeprefix(service.url), token=None)
            assert (answer.status, answer.headers["location"]) == (303, "/")  # a browser keeps the place


def test_a_unit_is_printed_where_there_is_no_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    done = ringctl("serve", "--install", "--port", "8500")
    assert 'ExecStart="' in done.stdout
    assert '"serve" "--port" "8500"' in done.stdout
    assert "KillMode=process" in done.stdout, "launches are not ended with it"
    assert "ringctl-serve.service" in done.stderr


def test_systemd_reads_words_as_they_were_meant() -> None:
    assert quoted('a "b" \\ $HOME 100%') == '"a \\"b\\" \\\\ $HOME 100%%"'
    assert argument("$HOME") == '"$$HOME"'
    with pytest.raises(InputError, match="cannot work in a folder"):
        plain_path("/a\nExecStartPre=/bin/false")


def test_systemd_takes_the_unit_of_a_strange_folder(tmp_path: Path) -> None:
    folder = tmp_path / 'a "b" $HOME 100% \\x; é'
    folder.mkdir()
    (folder / "hosts.yaml").write_text("hosts:\n  - {name: here, local: true, slots: 2}\n")
    env = {**os.environ, "RINGCTL_HOME": str(folder / "home"), "XDG_RUNTIME_DIR": str(tmp_path)}
    unit = ringctl("serve", "--install", "--port", "8500", cwd=folder, env={**env, "PATH": "/nonexistent"})
    assert '$$HOME 100%% \\\\x; é/hosts.yaml"' in unit.stdout, "the inventory that was found"
    path = tmp_path / "ringctl-serve.service"
    path.write_text(unit.stdout)
    verify = ["systemd-analyze", "verify", "--user", "--man=no", str(path)]
    done = subprocess.run(verify, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_lies_in_the_folder_is_not_taken_for_the_service(tmp_path: Path) -> None:
    (tmp_path / "launcher").mkdir()
    for name in ("json.py", "launcher/__init__.py", "launcher/__main__.py", "sitecustomize.py"):
        (tmp_path / name).write_text("raise SystemExit('taken')")
    words = argv(Options(Where(host_list="here"), 0, "127.0.0.1"))
    at = words.index("serve")
    done = subprocess.run(
        [sys.executable, *words[:at], "serve", "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: ringctl serve")


def test_a_time_to_start_at_is_understood() -> None:
    now = 1_800_000_000.0
    assert parse_at("90s", now) == now + 90
    assert parse_at("2h", now) == now + 7200
    for text in ("00:00", "12:34", "23:59"):
        assert now < parse_at(text, now) <= now + 86400
    for wrong in ("25:00", "soon", "", "1x"):
        with pytest.raises(InputError, match="not a time"):
            parse_at(wrong, now)


def test_behind_a_proxy_links_are_its_own_and_cookies_for_https_alone() -> None:
    with serving("--behind-proxy", "https://runs.lab.org/") as service:
        link = service.link
        assert link.startswith("https://runs.lab.org/login?key=")
        by_proxy = {"Host": "runs.lab.org"}
        answer = service.raw("GET", link.removeprefix("https://runs.lab.org"), headers=by_proxy, token=None)
        assert answer.status == 303
        cookie = answer.headers["set-cookie"]
        assert "; Secure" in cookie
        signed_in = {**by_proxy, "Cookie": cookie.partition(";")[0]}
        for origin, status in (("https://runs.lab.org", 404), ("http://runs.lab.org", 403), ("null", 403)):
            asked = {**signed_in, "Origin": origin}
            assert service.raw("POST", "/api/runs/none/stop", b"{}", asked, token=None).status == status
        assert service.raw("GET", "/api/stream?after=x", headers=signed_in, token=None).status == 400
        assert ringctl("queue").stdout == "nothing waits\n", "from here it is asked directly"


@pytest.mark.parametrize(
    ("options", "url", "page"),
    [
        (["--bind", "127.0.0.2"], "http://127.0.0.2:PORT", "http://127.0.0.2:PORT"),
        (["--bind", "::1"], "http://[::1]:PORT", "http://[::1]:PORT"),
        (["--bind", "localhost"], "http://127.0.0.1:PORT", "http://localhost:PORT"),
        (["--name", "lab.local", "--name", "lab"], "http://127.0.0.1:PORT", "http://lab.local:PORT"),
        (["--behind-proxy", PROXY, "--name", "lab.local"], "http://127.0.0.1:PORT", PROXY),
    ],
    ids=lambda given: given[1] if isinstance(given, list) else "",
)
def test_whatever_it_is_called_its_link_and_its_own_user_s_commands_work(
    options: list[str], url: str, page: str
) -> None:
    with serving(*options) as service:
        url, page = (each.replace("PORT", str(service.port)) for each in (url, page))
        own = client.own()
        assert own is not None
        assert (service.url, own.url, own.page) == (url, url, page)
        assert ringctl("queue").stdout == "nothing waits\n"
        run = json.loads(ringctl("submit", "--json", "--world", "1", "--", "true").stdout)["run"]
        assert json.loads(ringctl("--server", url, "status", run, "--json").stdout)["run"] == run
        link = urlsplit(service.link)
        assert f"{link.scheme}://{link.netloc}" == page
        host = urlsplit(url).hostname
        foreign = [f"{name}:{service.port}" for name in ("0.0.0.0", "127.0.0.3", "evil.example")]
        for called, status in ((link.netloc, 303), *((name, 421) for name in foreign)):
            end = http.client.HTTPConnection(str(host), service.port, timeout=30)
            end.request("GET", f"{link.path}?{link.query}", headers={"Host": called})
            assert end.getresponse().status == status, called
            end.close()


def test_in_the_clear_a_token_goes_nowhere_but_over_loopback() -> None:
    for url in ("http://127.0.0.1:1", "http://127.9.9.9:1", "http://[::1]:1", "http://localhost:1"):
        client.Client(url, "token")
    client.Client("https://runs.lab.org", "token")
    for url in ("http://127.0.0.1.evil.example:1", "http://0.0.0.0:1", "http://[::]:1", "http://10.0.0.1:1"):
        with pytest.raises(InputError, match="in the clear"):
            client.Client(url, "token")


def test_a_service_that_is_not_on_loopback_is_asked_by_its_proxy_or_by_its_certificate_s_name() -> None:
    proxied = Options(Where(), 8411, "192.0.2.1", proxy=f"{PROXY}/", names=("lab.org",))
    assert own_url(proxied, "192.0.2.1", 8411) == PROXY
    everywhere = replace(proxied, bind="0.0.0.0")
    assert own_url(everywhere, "0.0.0.0", 8411) == "http://127.0.0.1:8411"
    by_name = replace(everywhere, tls_cert="cert", tls_key="key")
    assert own_url(by_name, "0.0.0.0", 8411) == "https://lab.org:8411"
    assert page_url(by_name, 8411) == PROXY
    assert not names_of("http", "0.0.0.0", 8411, (), PROXY).knows_host("0.0.0.0:8411")


def test_a_proxy_is_a_name_of_ours_too() -> None:
    names = names_of("http", "127.0.0.1", 8411, (), "https://Runs.Lab.org")
    assert names.knows_host("runs.lab.org")
    assert names.knows_host("runs.lab.org:443")
    assert names.knows_host("127.0.0.1:8411")
    assert names.knows_origin("https://runs.lab.org")
    assert not names.knows_origin("http://runs.lab.org")
    assert not names.knows_origin("https://runs.lab.org.evil.example")
