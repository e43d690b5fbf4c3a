"""Who gets in, and what is refused at the door."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from launcher.serve import auth, limits
from launcher.serve.routes import ROUTES
from tests.launcher.ringctl import ringctl, wait_for
from tests.launcher.serve.service import Answer, Service, serving, slow

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "FOO")
PLACES = sorted({route.path for route in ROUTES})
DIGEST = "0" * 64


def address(path: str) -> str:
    """A path of the table with something in its places."""
    return (
        path.replace("{run}", "20260101-000000-abcd")
        .replace("{digest}", DIGEST)
        .replace("{file:path}", "index.html")
    )


def needed(route_path: str) -> str:
    queries = {"/login": "?key=x", "/api/compare": "?runs=a"}
    return address(route_path) + queries.get(route_path, "")


def is_complaint(answer: Answer) -> bool:
    return set(answer.json) == {"error", "fix"} and bool(answer.json["error"])


# --- Tokens --------------------------------------------------------------------------------------

GUARDED = [route for route in ROUTES if route.role is not None]


@pytest.mark.parametrize(
    "wrong", [None, "ringctl_wrong", "", "x" * 4000], ids=["none", "another", "empty", "long"]
)
def test_nothing_is_said_without_the_right_token(at_the_door: Service, wrong: str | None) -> None:
    headers = {} if wrong is None else {"Authorization": f"Bearer {wrong}"}
    for route in GUARDED[:: 1 if wrong is None else 6]:
        answer = at_the_door.raw(route.method, needed(route.path), headers=headers, token=None)
        assert (answer.status, is_complaint(answer)) == (401, True), route.path
        assert answer.headers["www-authenticate"] == "Bearer"


def test_whoever_guesses_tokens_has_to_wait(at_the_door: Service) -> None:
    def guess() -> int:
        return at_the_door.raw("GET", "/api/runs", token="ringctl_guess").status

    wait_for(lambda: guess() == 429, "the guesser to be refused")
    assert at_the_door.raw("GET", "/api/runs").status == 200, "who has a known token does not wait"


def test_a_token_may_do_what_its_role_allows(at_the_door: Service) -> None:
    reader = ringctl("serve", "token", "add", "looker", "--read-only").stdout.strip()
    writer = ringctl("serve", "token", "add", "worker").stdout.strip()
    assert at_the_door.raw("GET", "/api/runs", token=reader).status == 200
    refused = at_the_door.raw("POST", "/api/submit", b'{"command": ["--epochs", "1"]}', token=reader)
    assert (refused.status, is_complaint(refused)) == (403, True)
    assert at_the_door.raw("POST", "/api/submit", b'{"world": 99}', token=writer).status == 400
    shown = json.loads(ringctl("serve", "token", "list", "--json").stdout)
    assert [(each["name"], each["role"]) for each in shown] == [("looker", "read"), ("worker", "submit")]
    assert reader not in json.dumps(shown)
    ringctl("serve", "token", "remove", "looker")
    wait_for(lambda: at_the_door.raw("GET", "/api/runs", token=reader).status in (401, 429), "its end")
    ringctl("serve", "token", "remove", "worker")


def test_what_is_wrong_is_said_without_the_places_of_the_service(at_the_door: Service) -> None:
    for body, words in (
        ({"include": "nope"}, "'nope' is not a host of the service, which has here"),
        ({"world": 99}, "more than the 2 slots of the service"),
        ({"exclude": "here"}, "leave no host"),
    ):
        answer = at_the_door.raw("POST", "/api/submit", json.dumps(body).encode())
        assert answer.status == 400
        assert words in answer.json["error"]
        assert str(at_the_door.folder) not in answer.body.decode()
    run = at_the_door.submit("python", "nope.py")
    assert (
        at_the_door.wait_for_state(run, "failed")["error"] == "nope.py: no such script in what was handed in"
    )


def test_what_looks_like_a_secret_is_told_to_nobody(at_the_door: Service) -> None:
    given = {"WANDB_API_KEY": "not-to-be-seen", "SEED": "1"}
    run = at_the_door.submit("true", at=9e9, variables=given)
    said = at_the_door.client().get(f"/api/runs/{run}/submission")
    assert (said["variables"], said["secrets"]) == ({"SEED": "1"}, {"WANDB_API_KEY": ""})
    assert b"not-to-be-seen" not in at_the_door.raw("GET", f"/api/runs/{run}").body
    at_the_door.client().post(f"/api/runs/{run}/cancel")


def test_requests_that_wait_for_hosts_do_not_keep_others_waiting(at_the_door: Service) -> None:
    run = at_the_door.submit("true", at=9e9)

    def ask() -> Answer:
        return at_the_door.raw("GET", f"/api/runs/{run}/checkpoints")

    with ThreadPoolExecutor(44) as many:
        asked = [many.submit(ask) for _ in range(44)]  # more than there are threads
        wait_for(lambda: any(each.done() for each in asked), "the first answer")
        assert at_the_door.raw("GET", "/api/runs").status == 200
        assert not all(each.done() for each in asked)
    at_the_door.client().post(f"/api/runs/{run}/cancel")


def test_whoever_only_looks_keeps_nobody_from_ending_a_run(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with serving(before=slow("checkpoints", go)) as service, ThreadPoolExecutor(20) as many:
        try:
            run = service.submit(sys.executable, "-c", "import time; time.sleep(300)", prefork=False)
            others = [service.submit("true", at=9e9) for _ in range(5)]
            readers = [auth.add_token(f"reader{i}", "read") for i in range(5)]

            def look(which: str, token: str) -> Answer:
                return service.raw("GET", f"/api/runs/{which}/checkpoints", token=token)

            asked = [many.submit(look, *pair) for pair in zip(others, readers, strict=True) for _ in range(4)]
            refused = wait_for(
                lambda: len(done := [each.result() for each in asked if each.done()]) == 10 and done,
                "all but two of each to be refused",
            )
            assert {answer.status for answer in refused} == {429}
            assert "2 of your requests wait for hosts" in refused[0].json["error"]
            service.wait_for_state(run, "running")
            assert service.raw("POST", f"/api/runs/{run}/stop", b"{}").status == 200
            service.wait_for_state(run, "stopped")
            wait_for(lambda: len(list(tmp_path.glob("go?*"))) == 4, "all hands that look to be busy")
            assert sum(each.done() for each in asked) == 10, "they still wait"
        finally:
            go.touch()
        assert all(each.result().status != 500 for each in asked)
        assert len(list(tmp_path.glob("go?*"))) < 10, "those who look at the same run share one child"


def test_tokens_are_kept_as_hashes(at_the_door: Service) -> None:
    token = ringctl("serve", "token", "add", "hashed").stdout.strip()
    kept = b"".join(path.read_bytes() for path in (at_the_door.folder / "ringctl").glob("history.db*"))
    assert b"hashed" in kept
    assert token.encode() not in kept
    assert at_the_door.token.encode() not in kept
    ringctl("serve", "token", "remove", "hashed")
    assert (at_the_door.folder / "ringctl" / "serve.json").stat().st_mode & 0o777 == 0o600


# --- The link ------------------------------------------------------------------------------------


def sign_in(service: Service, *options: str) -> str:
    """The cookie that a new link becomes."""
    link = ringctl("serve", "link", *options).stdout.strip()
    answer = service.raw("GET", link.removeprefix(service.url), token=None)
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    return cookie.partition(";")[0]


def test_a_link_opens_the_page_once(at_the_door: Service) -> None:
    link = ringctl("serve", "link").stdout.strip().removeprefix(at_the_door.url)
    answer = at_the_door.raw("GET", link, token=None)
    cookie = answer.headers["set-cookie"].partition(";")[0]
    assert at_the_door.raw("GET", link, token=None).status == 401
    assert at_the_door.raw("GET", "/", token=None).status == 401
    assert at_the_door.raw("GET", "/", headers={"Cookie": cookie}, token=None).status == 200
    assert at_the_door.raw("GET", "/api/runs", headers={"Cookie": cookie}, token=None).status == 200


# However slow the machine is, buckets do not fill again while they are emptied.
NO_REFILL = (
    "import launcher.serve.service as s; B = s.Buckets; s.Buckets = lambda burst, rate: B(burst, 0.01)"
)


def test_a_link_opens_the_page_whatever_others_at_the_address_ask_for() -> None:
    with serving(before=NO_REFILL) as service:
        end = http.client.HTTPConnection("127.0.0.1", service.port)

        def ask(path: str, cookie: str) -> int:
            end.request("GET", path, headers={"Cookie": cookie} if cookie else {})
            answer = end.getresponse()
            answer.read()
            return answer.status

        old = f"ringctl_{service.port}=old"
        for path, cookie in (("/healthz", ""), ("/", old)):
            assert 429 in (ask(path, cookie) for _ in range(500)), f"{path} without end"
        assert ask("/nothing/here", "") == 429
        assert ask(service.link.removeprefix(service.url), old) == 303
        assert ask(f"/login?key={auth.make_key('read', 'me')}", "") == 303
        assert 429 in (ask("/login?key=guessed", "") for _ in range(500))
        end.close()


@pytest.mark.parametrize(
    "other", ['prefs={"theme":"dark"}', "x=a b c", "last=Zo\xeb", "=1", 'a"b=1', "bare", ""]
)
def test_cookies_of_other_programs_do_not_matter(other: str, at_the_door: Service) -> None:
    cookie = sign_in(at_the_door)
    for both in (f"{other}; {cookie}", f"{cookie}; {other}"):
        assert at_the_door.raw("GET", "/api/me", headers={"Cookie": both}, token=None).status == 200
    headers = {"Cookie": f"{other}; {cookie}", "Origin": at_the_door.url}
    assert at_the_door.raw("POST", "/logout", b"{}", headers, token=None).json == {"signed_out": True}
    assert at_the_door.raw("GET", "/api/me", headers={"Cookie": cookie}, token=None).status == 401


def test_a_cookie_changes_something_only_for_our_own_page(at_the_door: Service) -> None:
    cookie = sign_in(at_the_door)

    def submit(**headers: str) -> int:
        sent = {"Cookie": cookie, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return at_the_door.raw("POST", "/api/submit", b'{"world": 99}', headers=sent, token=None).status

    ours = at_the_door.url
    assert submit(Origin=ours) == 400, "it is let in, and there are no 99 slots"
    assert submit() == 403
    for foreign in ("null", "http://evil.example", f"http://evil.example:{at_the_door.port}", "file://"):
        assert submit(Origin=foreign) == 403, foreign
    assert submit(Origin=ours, Sec_Fetch_Site="cross-site") == 403
    assert submit(Origin=ours, Content_Type="text/plain") == 415


def test_a_link_for_looking_only_looks(at_the_door: Service) -> None:
    cookie = sign_in(at_the_door, "--read-only")
    headers = {"Cookie": cookie, "Origin": at_the_door.url}
    assert at_the_door.raw("GET", "/api/runs", headers=headers, token=None).status == 200
    assert at_the_door.raw("POST", "/api/submit", b"{}", headers=headers, token=None).status == 403


def test_whoever_signs_out_is_out_at_once_and_nobody_else_is(at_the_door: Service) -> None:
    mine, other = sign_in(at_the_door), sign_in(at_the_door)

    def ask(method: str, path: str, cookie: str, **more: str) -> Answer:
        headers = {"Cookie": cookie, "Origin": at_the_door.url, **more}
        return at_the_door.raw(method, path, None if method == "GET" else b"{}", headers, token=None)

    assert ask("GET", "/api/me", mine).json["role"] == "admin"
    assert ask("POST", "/logout", mine, Origin="http://evil.example").status == 403
    assert ask("GET", "/api/me", mine).status == 200, "a foreign page signs nobody out"
    answer = ask("POST", "/logout", mine)
    assert (answer.status, answer.json) == (200, {"signed_out": True})
    assert "Max-Age=0" in answer.headers["set-cookie"]
    assert ask("GET", "/api/me", mine).status == 401
    assert ask("GET", "/", mine).status == 401
    assert ask("GET", "/api/me", other).status == 200
    assert at_the_door.raw("POST", "/logout", b"{}").status == 409, "a token is no browser"
    assert at_the_door.raw("GET", "/api/me").json["role"] == "admin"


def test_what_can_be_done_with_a_run_is_told_to_those_who_may(at_the_door: Service) -> None:
    run = at_the_door.submit("true", at=9e9)

    def told(*options: str) -> tuple[str, list[str], list[str]]:
        cookie = {"Cookie": sign_in(at_the_door, *options)}
        role = at_the_door.raw("GET", "/api/me", headers=cookie, token=None).json["role"]
        asked = at_the_door.raw("GET", f"/api/runs/{run}", headers=cookie, token=None).json
        return role, asked["actions"], streamed(at_the_door, run, cookie["Cookie"])["actions"]

    assert told() == ("admin", ["cancel"], ["cancel"])
    assert told("--user", "bob") == ("submit", [], [])
    assert told("--read-only") == ("read", [], [])
    at_the_door.client().post(f"/api/runs/{run}/cancel")


def streamed(service: Service, run: str, cookie: str) -> Any:
    """The first that a stream tells of a run."""
    request = urllib.request.Request(f"{service.url}/api/runs/{run}/stream", headers={"Cookie": cookie})
    with urllib.request.urlopen(request, timeout=30) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                return json.loads(line.removeprefix(b"data: "))
    raise AssertionError("it ended")


def test_a_link_for_another_user_opens_the_page_as_them(at_the_door: Service) -> None:
    link = ringctl("serve", "link", "--user", "bob").stdout.strip()
    answer = at_the_door.raw("GET", link.removeprefix(at_the_door.url), token=None)
    cookie = {"Cookie": answer.headers["set-cookie"].partition(";")[0], "Origin": at_the_door.url}
    mine = at_the_door.submit("true", at=9e9)
    body = json.dumps({"command": ["true"], "at": 9e9}).encode()
    theirs = at_the_door.raw("POST", "/api/submit", body, cookie, token=None).json
    assert theirs["user"] == "bob"
    for run, status in ((mine, 403), (theirs["run"], 200)):
        assert at_the_door.raw("POST", f"/api/runs/{run}/cancel", b"{}", cookie, token=None).status == status
    at_the_door.client().post(f"/api/runs/{mine}/cancel")


def test_with_a_token_its_users_browsers_are_signed_out(at_the_door: Service) -> None:
    ringctl("serve", "token", "add", "carol")
    links = [ringctl("serve", "link", "--user", name).stdout.strip() for name in ("carol", "carol", "dave")]
    first, unused, other = (link.removeprefix(at_the_door.url) for link in links)
    cookies = []
    for link in (first, other):
        answer = at_the_door.raw("GET", link, token=None)
        cookies.append({"Cookie": answer.headers["set-cookie"].partition(";")[0]})
    ringctl("serve", "token", "remove", "carol")
    assert at_the_door.raw("GET", "/api/runs", headers=cookies[0], token=None).status == 401
    assert at_the_door.raw("GET", unused, token=None).status != 303
    assert at_the_door.raw("GET", "/api/runs", headers=cookies[1], token=None).status == 200
    ringctl("serve", "token", "remove", "dave")  # who has no token, but a browser
    assert "no token 'dave'" in ringctl("serve", "token", "remove", "dave", code=2).stderr


def test_one_user_cannot_take_all_streams(at_the_door: Service) -> None:
    token = ringctl("serve", "token", "add", "greedy", "--read-only").stdout.strip()
    head = f"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1:{at_the_door.port}\r\nAuthorization: Bearer "
    greedy = [socket.create_connection(("127.0.0.1", at_the_door.port), 10) for _ in range(100)]
    try:
        for each in greedy:
            each.sendall(f"{head}{token}\r\n\r\n".encode())
        codes = [each.recv(12)[-3:] for each in greedy]
        assert 0 < codes.count(b"200") <= limits.MOST_STREAMS_EACH
        with socket.create_connection(("127.0.0.1", at_the_door.port), 10) as other:
            other.sendall(f"{head}{at_the_door.token}\r\n\r\n".encode())
            assert other.recv(12)[-3:] == b"200"
    finally:
        for each in greedy:
            each.close()
        ringctl("serve", "token", "remove", "greedy")


def test_whoever_is_not_signed_in_tries_again_by_itself_only_if_that_may_help(at_the_door: Service) -> None:
    sites = {"cross-site": True, "same-origin": False, "none": False}
    for site, tries in sites.items():
        answer = at_the_door.raw("GET", "/", headers={"Sec-Fetch-Site": site}, token=None)
        assert answer.status == 401
        assert (b"/page/again.js" in answer.body) == tries, site
        assert b'value="1"' in answer.body
    again = at_the_door.raw("GET", "/?again=1", token=None)
    assert b'value="0"' in again.body, "another address than its own"
    assert at_the_door.raw("GET", "/page/again.js", token=None).status == 401, "else it would try for ever"


def test_a_session_is_for_this_browser_alone(at_the_door: Service) -> None:
    name, _, secret = sign_in(at_the_door).partition("=")
    for wrong in (f"{name}={secret[:-1]}", f"{name}=", f"other={secret}"):
        assert at_the_door.raw("GET", "/api/runs", headers={"Cookie": wrong}, token=None).status in (401, 429)


def test_a_session_survives_the_service() -> None:
    with serving() as service:
        cookie = sign_in(service)
        service.kill()
        service.start()
        assert service.raw("GET", "/api/runs", headers={"Cookie": cookie}, token=None).status == 200


# --- Names and pages -----------------------------------------------------------------------------


def test_only_a_request_that_calls_us_by_our_name_is_answered(at_the_door: Service) -> None:
    port = at_the_door.port
    for ours in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}"):
        assert at_the_door.raw("GET", "/healthz", headers={"Host": ours}).status == 200, ours
    for strange in (
        "evil.example",
        f"evil.example:{port}",
        f"127.0.0.1.nip.io:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port + 1}",
        f"localhost.evil.example:{port}",
        f"[::1%25eth0]:{port}",
        f"[::ffff:127.0.0.1]:{port}",
        f"user@127.0.0.1:{port}",
        "",
    ):
        for place in ("/healthz", "/", "/api/runs", "/login?key=x", "/nothing/here"):
            assert at_the_door.raw("GET", place, headers={"Host": strange}).status == 421, strange


def test_no_other_site_is_allowed_to_read(at_the_door: Service) -> None:
    for method in ("GET", "OPTIONS"):
        answer = at_the_door.raw(method, "/api/runs", headers={"Origin": "http://evil.example"})
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_every_answer_tells_the_browser_to_be_careful(at_the_door: Service) -> None:
    for place in ("/", "/api/runs", "/healthz", "/nowhere", "/api/runs/none", "/login?key=x"):
        headers = at_the_door.raw("GET", place).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert "server" not in headers


# --- Methods and paths ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_that_is_not_declared_is_refused(at_the_door: Service, method: str) -> None:
    for path in PLACES:
        declared = {route.method for route in ROUTES if route.path == path}
        if method in declared:
            continue
        answer = at_the_door.raw(method, address(path))
        assert (answer.status, set(answer.headers["allow"].split(", "))) == (405, declared), path
        assert method == "HEAD" or is_complaint(answer)


@pytest.mark.parametrize(
    "up",
    [
        "..",
        "../..",
        "%2e%2e",
        "%2e%2e%2f%2e%2e",
        "..%2f..%2f..%2fetc%2fpasswd",
        "....//",
        "..%5c..",
        "%00",
        "%252e%252e%252f",
        "/etc/passwd",
        ".%2e/serve.json",
    ],
)
def test_no_path_leads_out(at_the_door: Service, up: str) -> None:
    for path in (path for path in PLACES if "{" in path):
        there = re.sub(r"\{[^}]*\}", up, path)
        answer = at_the_door.raw("GET", there)
        assert answer.status in (400, 404, 405), there
        assert b"root:" not in answer.body
        assert b'"token"' not in answer.body


# --- Sizes and times -----------------------------------------------------------------------------


def test_a_body_of_100_mb_is_refused_before_it_has_come(at_the_door: Service) -> None:
    for method, path in (("POST", "/api/submit"), ("PUT", f"/api/code/{DIGEST}")):
        with socket.create_connection(("127.0.0.1", at_the_door.port), timeout=30) as end:
            end.sendall(head(at_the_door, method, path, f"Content-Length: {100 << 20}"))
            assert end.recv(100).startswith(b"HTTP/1.1 413 "), path


def test_a_body_that_does_not_say_how_long_it_is_is_cut_off(at_the_door: Service) -> None:
    with socket.create_connection(("127.0.0.1", at_the_door.port), timeout=30) as end:
        end.sendall(head(at_the_door, "POST", "/api/submit", "Transfer-Encoding: chunked"))
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        answer = b""
        for _ in range(100 << 4):
            try:
                end.sendall(piece)
            except (BrokenPipeError, ConnectionResetError):
                break
            end.setblocking(False)
            try:
                answer += end.recv(100)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                break
            finally:
                end.setblocking(True)
            break
        else:
            pytest.fail("100 MB were taken")
        assert not answer or answer.startswith(b"HTTP/1.1 413 ")


def test_a_body_with_two_lengths_is_refused_and_nothing_after_it_is_read(at_the_door: Service) -> None:
    both = ("Transfer-Encoding: chunked", "Content-Length: 7", "Content-Type: application/json")
    for path in ("/api/submit", "/nowhere"):
        with socket.create_connection(("127.0.0.1", at_the_door.port), timeout=30) as end:
            hidden = head(at_the_door, "GET", "/api/me")
            end.sendall(head(at_the_door, "POST", path, *both) + b"2\r\n{}\r\n0\r\n\r\n" + hidden)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := end.recv(65536):
                    answer += piece
        assert answer.startswith(b"HTTP/1.1 400 "), answer
        assert answer.count(b"HTTP/1.1") == 1, answer


def test_a_whole_address_is_as_good_as_a_path_if_it_names_this_service(at_the_door: Service) -> None:
    here = f"127.0.0.1:{at_the_door.port}"
    assert at_the_door.raw("GET", f"http://{here}/api/me").json["role"] == "admin"
    assert at_the_door.raw("GET", f"http://{here}/api/runs?limit=1").status == 200
    assert at_the_door.raw("GET", f"http://{here}").status in (200, 401)
    for strange in ("http://evil.example/api/me", f"http://evil.example@{here}/api/me", "http:///api/me"):
        assert at_the_door.raw("GET", strange).status == 421, strange
    assert at_the_door.raw("GET", f"http://{here}/api/me", headers={"Host": "evil.example"}).status == 200


def head(service: Service, method: str, path: str, *more: str) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: 127.0.0.1:{service.port}",
        f"Authorization: Bearer {service.token}",
        "Content-Type: application/json",
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def test_a_head_that_is_too_long_is_refused(at_the_door: Service) -> None:
    with socket.create_connection(("127.0.0.1", at_the_door.port), timeout=30) as end:
        try:
            end.sendall(b"GET /healthz HTTP/1.1\r\nX-Long: " + b"x" * (4 << 20))
            answer = end.recv(100)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        assert not answer or answer.startswith(b"HTTP/1.1 400 ")


def test_clients_that_never_finish_do_not_keep_others_out(at_the_door: Service) -> None:
    ends = []
    try:
        for _ in range(limits.MOST_CONNECTIONS + 40):
            end = socket.create_connection(("127.0.0.1", at_the_door.port), timeout=30)
            end.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127")
            ends.append(end)
        assert at_the_door.raw("GET", "/healthz").status == 200
        began = time.monotonic()
        ends[-1].settimeout(limits.HEAD_S + 10)
        assert ends[-1].recv(1) == b"", "it is cut off in the end"
        assert time.monotonic() - began < limits.HEAD_S + 5
    except ConnectionResetError:
        pass  # cut off, too
    finally:
        for end in ends:
            end.close()


def test_a_body_that_trickles_is_given_up() -> None:
    with serving(before="from launcher.serve import limits; limits.BODY_S = 0.5") as service:
        assert trickled(service).startswith(b"HTTP/1.1 408 ")


def trickled(service: Service) -> bytes:
    """What is said to a body of which a byte comes now and then."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as end:
        end.sendall(head(service, "POST", "/api/submit", "Content-Length: 1000") + b"{")
        assert service.raw("GET", "/healthz").status == 200, "others are served meanwhile"
        end.settimeout(0.05)
        for _ in range(200):
            with contextlib.suppress(TimeoutError):
                return end.recv(1000)
            end.sendall(b" ")
    return b""


def test_a_client_may_ask_much_at_once_and_then_some_a_second() -> None:
    now = [0.0]
    bucket = limits.Bucket(burst=3, rate=2, clock=lambda: now[0])
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]
    now[0] = 1.0
    assert [bucket.take() for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"command": "x"}',
        b'{"unknown": 1}',
        b'{"world": 0}',
        b'{"world": NaN}',
        b'{"world": 1e400}',
        b'{"command": ["\\u0000"]}',
        b'{"variables": {"A=B": "x"}}',
        b'{"secrets": {"A": "x\\ny"}}',
        b'{"include": "../x"}',
        b'{"after": "none"}',
        b'{"name": "-x"}',
        b'{"world": 1, "command": ["--no-such-option"]}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
    ids=lambda body: repr(body)[:40],
)
def test_a_submission_that_makes_no_sense_is_refused_with_a_reason(at_the_door: Service, body: bytes) -> None:
    answer = at_the_door.raw("POST", "/api/submit", body)
    assert (answer.status, is_complaint(answer)) == (400, True)
    assert at_the_door.client().get("/api/queue")["queue"] == []


def test_an_unknown_or_doubled_parameter_is_refused(at_the_door: Service) -> None:
    for query in ("?nonsense=1", "?limit=1&limit=2", "?limit=0", "?limit=x", "?state=odd", "?limit=1e3"):
        assert at_the_door.raw("GET", f"/api/runs{query}").status == 400, query
