"""Planning is pure: who gets which rank, what each rank's environment is, and how to start it by hand."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import InputError, PreflightError
from launcher.model import EnvSpec, Facts, Host, HostPlan, Inventory, Plan, RankSpec, from_json, to_json
from launcher.plan import LaunchOptions, is_trainer, make_plan, place, shell_command, shell_commands
from tests.launcher.ringctl import wait_for

OPTIONS = LaunchOptions(
    run="r1", name="", command=("python", "t.py"), trainer="/ring/train.py", workdir="/work"
)


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    slots = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    hosts = tuple(Host(f"h{i}", local=True, slots=count) for i, count in enumerate(slots))
    return Inventory(hosts, master=draw(st.sampled_from(hosts)).name)


def facts_for(inventory: Inventory, **more: Any) -> dict[str, Facts]:
    usual = {
        "home": "/home/.ringctl",
        "cores": 8,
        "free_port": 23456,
        "data_address": "10.0.0.1",
        "ifname": "eth0",
        "python": "/usr/bin/python3",
    }
    return {host.name: Facts(host=host.name, **{**usual, **more}) for host in inventory.hosts}


def plan_for(*hosts: Host, options: LaunchOptions = OPTIONS, **facts: Any) -> Plan:
    inventory = Inventory(hosts, master=hosts[0].name)
    return make_plan(inventory, facts_for(inventory, **facts), options)


# --- Who gets which rank -------------------------------------------------------------------------


@given(inventories(), st.data())
def test_every_rank_is_placed_once_and_the_master_holds_rank_0(
    inventory: Inventory, data: st.DataObject
) -> None:
    slots = sum(host.slots for host in inventory.hosts)
    world = data.draw(st.none() | st.integers(1, slots))
    placed = place(inventory, world)
    assert [rank for _, ranks in placed for rank in ranks] == list(range(world or slots))
    assert all(0 < len(ranks) <= host.slots for host, ranks in placed)
    assert placed[0][0].name == inventory.master
    others = [host.name for host, _ in placed[1:]]
    assert others == [h.name for h in inventory.hosts if h.name in others], "in the inventory's order"


@given(inventories(), st.integers(1, 1000))
def test_more_ranks_than_slots_are_refused_with_the_number_there_are(inventory: Inventory, more: int) -> None:
    slots = sum(host.slots for host in inventory.hosts)
    with pytest.raises(InputError, match=rf"\b{slots} slots"):
        place(inventory, slots + more)


@pytest.mark.parametrize("world", [0, -1, -1000])
def test_a_run_has_at_least_one_rank(world: int) -> None:
    with pytest.raises(InputError, match="at least one rank"):
        place(Inventory((Host("a", slots=4),), "a"), world)


def test_the_hosts_fill_up_in_order_behind_the_master() -> None:
    inventory = Inventory((Host("a", slots=2), Host("b", slots=3), Host("c", slots=2)), master="b")
    assert [(h.name, *r) for h, r in place(inventory, 6)] == [("b", 0, 1, 2), ("a", 3, 4), ("c", 5)]


# --- The plan ------------------------------------------------------------------------------------


@given(inventories())
def test_the_same_input_gives_the_same_plan_to_the_byte(inventory: Inventory) -> None:
    facts = facts_for(inventory)
    first, second = (
        make_plan(inventory, dict(sorted(facts.items(), reverse=r)), OPTIONS) for r in (False, True)
    )
    assert json.dumps(to_json(first)) == json.dumps(to_json(second))
    assert from_json(Plan, json.loads(json.dumps(to_json(first)))) == first


@given(inventories())
def test_each_rank_is_told_its_place_and_all_the_same_meeting_point(inventory: Inventory) -> None:
    plan = make_plan(inventory, facts_for(inventory), OPTIONS)
    seen = []
    for host in plan.hosts:
        for local_rank, rank in enumerate(host.ranks):
            env = rank.env
            assert (env["RANK"], env["LOCAL_RANK"]) == (str(rank.rank), str(local_rank))
            assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == (str(plan.world), str(len(host.ranks)))
            assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "23456")
            assert env["RINGCTL_HOST"] == host.host
            seen.append(env["RINGCTL_METRICS"])
    assert len(set(seen)) == plan.world, "each rank has a metrics file of its own"


@pytest.mark.parametrize(
    ("attempt", "full_world", "told"),
    [(1, None, None), (1, 4, None), (2, None, None), (2, 2, None), (2, 4, "4"), (2, 1, "1")],
)
def test_only_an_attempt_with_another_number_of_ranks_is_told_how_many_the_first_one_had(
    attempt: int, full_world: int | None, told: str | None
) -> None:
    options = replace(OPTIONS, world=2, attempt=attempt, full_world=full_world)
    (host,) = plan_for(Host("a", local=True, slots=2), options=options).hosts
    assert {rank.env.get("RINGCTL_FIRST_WORLD") for rank in host.ranks} == {told}


def test_the_cores_of_a_host_are_divided_among_its_ranks() -> None:
    (host,) = plan_for(Host("a", local=True, slots=3), cores=8).hosts
    assert {rank.env["OMP_NUM_THREADS"] for rank in host.ranks} == {"2"}
    (host,) = plan_for(Host("a", local=True, slots=3), cores=1).hosts
    assert {rank.env["OMP_NUM_THREADS"] for rank in host.ranks} == {"1"}


def test_the_inventory_overrides_what_was_found_on_the_host() -> None:
    plan = plan_for(Host("a", local=True, ifname="eth9", data_address="10.9.9.9", workdir="/else"))
    (host,) = plan.hosts
    assert plan.master_address == "10.9.9.9"
    assert host.workdir == "/else"
    assert host.ranks[0].env["GLOO_SOCKET_IFNAME"] == host.ranks[0].env["TP_SOCKET_IFNAME"] == "eth9"


def test_variables_of_the_command_line_win_over_the_hosts_and_neither_over_ringctls_own() -> None:
    host = Host("a", local=True, variables={"A": "host", "B": "host", "OMP_NUM_THREADS": "7", "RANK": "9"})
    options = replace(OPTIONS, variables={"A": "line", "WORLD_SIZE": "99"})
    env = plan_for(host, options=options).hosts[0].ranks[0].env
    assert (env["A"], env["B"], env["OMP_NUM_THREADS"]) == ("line", "host", "7")
    assert (env["RANK"], env["WORLD_SIZE"]) == ("0", "1")


@pytest.mark.parametrize(
    ("line", "file", "port"),
    [(None, None, 23456), (None, 7777, 7777), (6666, None, 6666), (6666, 7777, 6666)],
)
def test_the_master_port_is_the_given_one_or_one_that_is_free(
    line: int | None, file: int | None, port: int
) -> None:
    inventory = Inventory((Host("a", local=True),), "a", master_port=file)
    plan = make_plan(inventory, facts_for(inventory), replace(OPTIONS, master_port=line))
    assert plan.master_port == port


def test_a_master_without_a_free_port_stops_the_launch() -> None:
    with pytest.raises(PreflightError, match="no free port"):
        plan_for(Host("a", local=True), free_port=0)


@pytest.mark.parametrize(
    ("command", "env", "argv"),
    [
        ((), None, ("python", "/ring/train.py")),
        (("--lr", "0.1"), None, ("python", "/ring/train.py", "--lr", "0.1")),
        (("--lr", "0.1"), EnvSpec("python", "/opt/py"), ("/opt/py", "/ring/train.py", "--lr", "0.1")),
        (("python3", "t.py"), EnvSpec("python", "/opt/py"), ("/opt/py", "t.py")),
        (("python3", "t.py"), EnvSpec("venv", "~/v"), ("python3", "t.py")),
        (("sh", "-c", "python"), EnvSpec("python", "/opt/py"), ("sh", "-c", "python")),
    ],
)
def test_options_go_to_the_built_in_trainer_and_python_means_the_environments_own(
    command: tuple[str, ...], env: EnvSpec | None, argv: tuple[str, ...]
) -> None:
    plan = plan_for(Host("a", local=True, env=env), options=replace(OPTIONS, command=command))
    assert plan.hosts[0].ranks[0].argv == argv
    assert is_trainer(command) == (not command or command[0].startswith("-"))


# --- By hand -------------------------------------------------------------------------------------


AWKWARD = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@given(st.lists(AWKWARD, max_size=4), st.dictionaries(st.sampled_from("ABC"), AWKWARD), AWKWARD)
def test_a_line_to_paste_says_to_a_shell_exactly_what_the_plan_says(
    args: list[str], env: dict[str, str], folder: str
) -> None:
    rank = RankSpec(3, 0, ("python", *args), {**env, "RINGCTL_RUN": "r"})
    line = shell_command(HostPlan("h", f"/{folder}", None, True, (rank,)), rank)
    words = shlex.split(line)
    assert words[:2] == ["cd", f"/{folder}"]
    assert words[words.index("env") :] == [
        *("env", *(f"{name}={value}" for name, value in env.items()), "python", *args),
        *(">rank3.log", "2>&1", "</dev/null", "&"),
    ]


def test_a_line_to_paste_activates_the_hosts_environment() -> None:
    def line(env: EnvSpec) -> str:
        plan = plan_for(Host("a", local=True, env=env, workdir="~/my work"))
        return shell_commands(plan)["a"][0]

    assert line(EnvSpec("conda", "fl38")).startswith("cd ~/'my work' && conda activate fl38 && nohup env ")
    assert ". ~/'my venv'/bin/activate && nohup env " in line(EnvSpec("venv", "~/my venv"))


def test_pasted_lines_start_the_ranks(tmp_path: Path) -> None:
    script = 'echo "$RANK of $WORLD_SIZE: $0 $1: $ODD"'
    command = ("sh", "-c", script, "it's", "a  b; exit")
    options = replace(OPTIONS, command=command, workdir=str(tmp_path), variables={"ODD": "\"'$HOME\n`x`"})
    plan = plan_for(Host("a", local=True, slots=2), options=options)
    lines = shell_commands(plan)["a"]
    done = subprocess.run(["sh", "-c", "\n".join([*lines, "wait"])], cwd="/", check=True, env=os.environ)
    assert done.returncode == 0
    for rank in (0, 1):
        log = tmp_path / f"rank{rank}.log"
        text = wait_for(log.read_text, "its output")
        assert text == f"{rank} of 2: it's a  b; exit: \"'$HOME\n`x`\n"
