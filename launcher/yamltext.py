"""Pure: the text of an inventory, changed in place; whatever is not changed stays as it is, to the byte."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

UNSAFE = re.compile(r'["\\]|[^ -~]')  # between quotes: what has a meaning there, or may not be seen


@dataclass(frozen=True)
class Edit:
    """A piece of the text, and what to write instead."""

    start: int
    end: int
    text: str


def edited(text: str, edits: Iterable[Edit]) -> str:
    """With all of them made."""
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def top_edit(text: str, key: str, value: str) -> Edit | None:
    """How the value of a key at the top is replaced; None if it has no such key."""
    found = value_of(tree_of(text), key)
    return replaced(found, value) if found is not None else None


def host_edit(text: str, host: str, key: str, value: str) -> Edit | None:
    """How a host comes to have this value, in whatever style it is written; None if it is not there."""
    hosts = value_of(tree_of(text), "hosts")
    for item in hosts.value if hosts is not None else ():
        name = item if item.id == "scalar" else value_of(item, "name")
        if name is None or name.value != host:
            continue
        if item.id == "scalar":
            return Edit(*span(item), f"{{name: {scalar(host)}, {key}: {scalar(value)}}}")
        own = value_of(item, key)
        return replaced(own, value) if own is not None else added(item, key, value)
    return None


def replaced(node: Any, value: str) -> Edit:
    return Edit(*span(node), scalar(value))


def added(mapping: Any, key: str, value: str) -> Edit:
    """As its first key: there it needs no knowledge of what the last one looks like."""
    start = mapping.start_mark
    if mapping.flow_style:
        return Edit(start.index + 1, start.index + 1, f"{key}: {scalar(value)}, ")
    return Edit(start.index, start.index, f"{key}: {scalar(value)}\n{' ' * start.column}")


def tree_of(text: str) -> Any:
    """PyYAML's nodes, which know where each begins and ends."""
    import yaml  # here, so that nobody else pays for it

    return yaml.compose(text, Loader=yaml.SafeLoader)


def value_of(node: Any, key: str) -> Any:
    """What stands at a key of a mapping; None if it has no such key, or is none."""
    pairs = node.value if node.id == "mapping" else []
    return next((value for name, value in pairs if name.value == key), None)


def span(node: Any) -> tuple[int, int]:
    return node.start_mark.index, node.end_mark.index


def scalar(text: str) -> str:
    """A text as YAML, in quotes where it would be read as something else."""
    import yaml

    plain = re.fullmatch(r"[A-Za-z0-9_~/.][A-Za-z0-9_~/.@%+-]*", text)
    try:
        same = plain is not None and yaml.safe_load(text) == text
    except (yaml.YAMLError, ValueError):
        same = False
    return text if same else '"' + UNSAFE.sub(escaped, text) + '"'


def escaped(found: re.Match[str]) -> str:
    """A character as YAML writes it between quotes."""
    code = ord(found[0])
    return f"\\{found[0]}" if found[0] in '"\\' else f"\\x{code:02x}" if code < 256 else f"\\U{code:08x}"
