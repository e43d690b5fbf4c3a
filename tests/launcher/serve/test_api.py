"""The API against its own description, and what Prometheus gets."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from launcher import queued
from launcher.serve import prom, routes, schema
from launcher.serve.shapes import SUBMISSION
from tests.launcher.ringctl import detach, ringctl, wait_for
from tests.launcher.serve.service import Service, serving

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


def test_the_document_describes_every_route(at_the_door: Service) -> None:
    told = at_the_door.client().get("/openapi.json")
    assert told == json.loads(json.dumps(routes.document()))
    described = {(method.upper(), path) for path, each in told["paths"].items() for method in each}
    assert described == {
        (route.method, route.path.replace("{file:path}", "{file}")) for route in routes.ROUTES
    }


def test_the_hosts_are_checked_on_demand(at_the_door: Service) -> None:
    there = at_the_door.client()
    assert there.get("/api/preflight") is None
    there.post("/api/preflight")
    found = wait_for(lambda: there.get("/api/preflight"), "what it found", 60.0)
    assert found["ok"] is True
    assert {check["host"] for check in found["checks"]} == {"here"}


def test_what_is_handed_in_twice_with_a_key_is_one_run(at_the_door: Service) -> None:
    there = at_the_door.client()
    other = ringctl("serve", "token", "add", "ann").stdout.strip()
    body = {"world": 1, "at": 9e9, "key": "k1", "secrets": {"A": "b"}}
    first, again = there.post("/api/submit", body), there.post("/api/submit", body)
    assert again["run"] == first["run"]
    assert [path.name for path in queued.folder("x").parent.iterdir()].count(first["run"]) == 1
    others = [
        there.post("/api/submit", {**body, "key": "k2"}),
        there.post("/api/submit", {"world": 1, "at": 9e9, "variables": {"key": "k1"}}),
        at_the_door.raw("POST", "/api/submit", json.dumps(body).encode(), token=other).json,
    ]
    assert len({row["run"] for row in (first, *others)}) == 4, "another key, none, another user's"
    handed_in = there.get(f"/api/runs/{first['run']}/submission")
    assert "key" not in handed_in, "who hands it in again wants another run"
    for row in (first, *others):
        there.post(f"/api/runs/{row['run']}/cancel")
    ringctl("serve", "token", "remove", "ann")


# --- schemathesis --------------------------------------------------------------------------------

# Streams do not end, and a preflight of each example would take all day.
DOCUMENT = (
    schemathesis.openapi.from_dict(routes.document())
    .exclude(path_regex="stream$")
    .exclude(path="/api/preflight", method="POST")
)


OPERATIONS = [found.ok() for found in DOCUMENT.get_all_operations() if isinstance(found, Ok)]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_whatever_is_asked_the_answer_is_as_described(operation: Any, at_the_door: Service) -> None:
    @settings(
        max_examples=6,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def asked(case: schemathesis.Case[Any]) -> None:
        if isinstance(case.body, dict) and case.path == "/api/submit" and is_moment(case.body.get("at")):
            case.body["at"] = 9e9  # it is not to start
        headers = {"Authorization": f"Bearer {at_the_door.token}"}
        response = case.call(base_url=at_the_door.url, headers=headers, allow_redirects=False)
        if response.status_code not in (413, 429):  # as good an answer as any
            case.validate_response(response, checks=CHECKS)

    asked()


def is_moment(value: object) -> bool:
    return value is None or (type(value) in (int, float) and 0 <= value <= 1e11)  # type: ignore[operator]  # a number


# --- Runs that have come to something ------------------------------------------------------------

TWICE = """
import json, os, time
if os.environ["RINGCTL_ATTEMPT"] == "1":
    raise SystemExit("the first time it fails")
with open(os.environ["RINGCTL_METRICS"], "a") as file:
    print(json.dumps({"step": 1, "steps": 2, "loss": 0.5, "samples_per_s": 10, "step_ms": 2.5}), file=file)
while not os.path.exists(os.environ["GO"]):
    time.sleep(0.02)
raise SystemExit("and the second time, too")
"""
OF_RUNS = {"/api/compare": {"runs": "{run},{run}"}}
ENDLESS = ("/api/stream", "/api/runs/{run}/stream", "/login")


def test_what_is_told_of_runs_that_start_fail_and_start_again_is_as_described(tmp_path: Path) -> None:
    plain = detach(["false"], world=1, options=("--no-prefork",))
    with serving() as service:
        failing = {"prefork": False, "variables": {"GO": str(tmp_path / "go")}, "max_restarts": 1}
        run = service.submit(sys.executable, "-c", TWICE, restart_delay=0.0, **failing)
        later = service.submit("true", at=9e9)
        wait_for(lambda: [rank["step"] for rank in service.row(run)["ranks"]] == [1], "the second attempt")
        refuse_undescribed(service, [run, later, plain])
        (tmp_path / "go").touch()
        service.wait_for_state(run, "failed")
        wait_for(lambda: all(each["cause"] for each in service.row(run)["attempts"]), "the causes")
        service.client().post(f"/api/runs/{later}/cancel")
        refuse_undescribed(service, [run, later, plain])


def refuse_undescribed(service: Service, runs: list[str]) -> None:
    """Whatever can be asked about each of them is answered as the document says."""
    told = routes.document()
    for path, methods in told["paths"].items():
        if "get" not in methods or path in ENDLESS or "{digest}" in path or "{file}" in path:
            continue
        query = urlencode(OF_RUNS.get(path, {}), safe="{},")
        for place in {f"{path}?{query}".replace("{run}", run) for run in runs}:
            answer = service.raw("GET", place)
            kind = answer.headers["content-type"].partition(";")[0]
            described = methods["get"]["responses"][str(answer.status)]["content"]
            shape = described.get(kind, described.get("*/*", {})).get("schema")
            if kind == "application/json" and shape:
                whole = {**shape, "components": told["components"]}
                wrong = jsonschema_rs.validator_for(whole).iter_errors(answer.json)
                assert [f"{place} {each.instance_path}: {each.message}" for each in wrong] == []


# --- The small part of JSON Schema ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({}, ""),
        ({"command": ["--epochs", "1"], "world": 2, "at": None}, ""),
        ({"world": 2.0}, ""),
        ({"world": True}, "world: expected a whole number or nothing"),
        ({"world": 1.5}, "world: expected a whole number or nothing"),
        ({"command": ["a", 1]}, "command[1]: expected text"),
        ({"variables": {"1A": "x"}}, "variables.1A: expected a name of letters, digits"),
        ({"variables": {"A": 1}}, "variables.A: expected text"),
        ({"priority": 1001}, "priority: more than 1000"),
        ({"nme": "x"}, "nme: there is no such key"),
        ({"after": "x\n"}, "after: expected letters, digits"),
        ([], "the body: expected an object"),
    ],
)
def test_what_is_wrong_with_a_submission_is_said(value: Any, why: str) -> None:
    assert schema.problem(SUBMISSION, value).startswith(why)
    assert bool(schema.problem(SUBMISSION, value)) == bool(why)


# --- Prometheus ----------------------------------------------------------------------------------

LINE = re.compile(
    r"(# (HELP|TYPE) [a-z_]+ .+)|"
    r'([a-z_]+(\{([a-z_]+="([^"\\\n]|\\\\|\\n|\\")*",?)*\})? (NaN|[+-]Inf|-?[0-9.e+-]+))'
)


def test_labels_and_numbers_are_written_as_prometheus_reads_them() -> None:
    samples = [({"name": 'a"b\\c\nd'}, 1), ({}, float("nan")), ({}, "text"), ({}, True), ({}, 10**400)]
    lines = prom.family("x_total", "counter", "Words", samples)
    assert lines[2:] == ['x_total{name="a\\"b\\\\c\\nd"} 1.0', "x_total NaN"]
    assert all(LINE.fullmatch(line) for line in lines)
    assert prom.family("x", "gauge", "Words", []) == []


def test_prometheus_gets_runs_ranks_and_hosts(tmp_path: Path) -> None:
    script = (
        "import json, os, time\n"
        "open(os.environ['RINGCTL_METRICS'], 'a').write(json.dumps("
        "{'step': 7, 'samples_per_s': 5.5, 'bytes_sent': 100, 'loss': 'odd'}) + '\\n')\n"
        "while not os.path.exists(os.environ['GO']): time.sleep(0.02)\n"
    )
    with serving() as service:
        go = tmp_path / "go"
        run = service.submit(sys.executable, "-c", script, world=2, prefork=False, variables={"GO": str(go)})

        def scraped() -> str:
            return service.raw("GET", "/metrics").body.decode()

        label = f'run="{run}",name="",rank="1",host="here"'
        wait_for(lambda: f"ringctl_rank_step{{{label}}} 7.0" in scraped(), "the rank's step")
        text = scraped()
        assert all(LINE.fullmatch(line) for line in text.splitlines())
        assert 'ringctl_runs{state="running"} 1.0' in text
        assert f"ringctl_rank_sent_bytes_total{{{label}}} 100.0" in text
        assert f"ringctl_rank_samples_per_second{{{label}}} 5.5" in text
        assert f"ringctl_rank_heartbeat_age_seconds{{{label}}}" in text
        assert 'ringctl_host_free_slots{host="here"} 0.0' in text
        go.touch()
        service.wait_for_state(run, "succeeded")
