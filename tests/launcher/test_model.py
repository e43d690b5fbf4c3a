"""Every record round-trips through JSON, so that what a host or a file says is what was meant."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher import history, model
from launcher.model import Event, Host, HostPlan, Inventory, Plan, RankSpec, RunState, from_json, to_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(),
    int: st.integers(),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    type(None): st.none(),
    Any: JSON,
}
RECORDS = [c for c in vars(model).values() if isinstance(c, type) and dataclasses.is_dataclass(c)]


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Anything that a field of this type may hold."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in SCALARS:
        return SCALARS[kind]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{f.name: values(hints[f.name]) for f in dataclasses.fields(kind)})
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is types.UnionType:
        return st.one_of(*map(values, args))
    if origin in (tuple, frozenset):
        return st.lists(values(args[0]), max_size=3).map(origin)
    assert issubclass(origin, Mapping), f"no strategy for {kind}"
    return st.dictionaries(values(args[0]), values(args[1]), max_size=3)


@pytest.mark.parametrize("record", [*RECORDS, history.Record], ids=lambda record: record.__name__)
def test_every_record_comes_back_from_json_as_it_was(record: type) -> None:
    @settings(max_examples=30, deadline=None)
    @given(values(record))
    def comes_back(one: Any) -> None:
        assert from_json(record, json.loads(json.dumps(to_json(one)))) == one

    comes_back()


def test_there_are_records_to_try() -> None:
    assert {Host, Inventory, Plan, HostPlan, RankSpec, RunState} <= set(RECORDS)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_records_cannot_be_changed(record: type) -> None:
    assert record.__dataclass_params__.frozen  # type: ignore[attr-defined]  # every dataclass has it


def test_what_a_newer_ringctl_added_is_left_out() -> None:
    assert from_json(Host, {"name": "a", "new": 1}) == Host("a")


@pytest.mark.parametrize(
    ("record", "data"),
    [
        (Host, None),
        (Host, []),
        (Host, {}),
        (Host, {"name": "a", "variables": ["A=b"]}),
        (Host, {"name": "a", "env": "conda"}),
        (Inventory, {"hosts": "abc", "master": "a"}),
        (Inventory, {"hosts": {"name": "a"}, "master": "a"}),
        (Inventory, {"hosts": [{"name": "a"}, 5], "master": "a"}),
    ],
)
def test_what_has_not_the_shape_of_a_record_is_refused(record: type, data: Any) -> None:
    with pytest.raises((TypeError, KeyError)):
        from_json(record, data)


def test_an_event_is_one_flat_object() -> None:
    event = Event("line", 1.5, "r", 1, "h", 0, {"stream": "out", "text": "x"})
    assert event.to_json() == {
        "kind": "line",
        "time": 1.5,
        "run": "r",
        "attempt": 1,
        "host": "h",
        "rank": 0,
        "stream": "out",
        "text": "x",
    }


def test_a_plan_knows_where_each_rank_is() -> None:
    def on(host: str, *ranks: int) -> HostPlan:
        return HostPlan(
            host, "/", None, True, tuple(RankSpec(r, i, ("true",), {}) for i, r in enumerate(ranks))
        )

    plan = Plan("r", "", 1, 3, "127.0.0.1", 1, (), (on("a", 0, 1), on("b", 2)))
    assert plan.rank_hosts == {0: "a", 1: "a", 2: "b"}
