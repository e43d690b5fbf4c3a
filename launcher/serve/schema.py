"""Pure: a small part of JSON Schema, enough for what the API takes. One description serves the check of a
request and the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
# For people, who read what is wrong with what they handed in on the page and in terminals.
KIND_WORDS: Mapping[str, str] = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "nothing",
}


def obj(properties: Mapping[str, Schema], required: tuple[str, ...] | None = None) -> dict[str, Any]:
    """An object with these keys and no others; all of them are required unless it is said which."""
    needed = list(properties if required is None else required)
    return {
        "type": "object",
        "properties": dict(properties),
        "required": needed,
        "additionalProperties": False,
    }


def arr(items: Schema, most: int | None = None) -> dict[str, Any]:
    return {"type": "array", "items": items, **({} if most is None else {"maxItems": most})}


def maybe(schema: Schema) -> dict[str, Any]:
    """The same, or null."""
    kinds = schema["type"]
    return {**schema, "type": [*([kinds] if isinstance(kinds, str) else kinds), "null"]}


def ref(name: str) -> dict[str, Any]:
    """A shape of the document, by its name; only answers use it, which nobody checks here."""
    return {"$ref": f"#/components/schemas/{name}"}


def problem(schema: Schema, value: Any, where: str = "") -> str:
    """What is wrong with `value`, in words; "" if nothing is."""
    kinds = schema.get("type", ())
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if kinds and not any(is_a(kind, value) for kind in kinds):
        return f"{where or 'the body'}: expected {' or '.join(KIND_WORDS[kind] for kind in kinds)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where}: expected one of {', '.join(map(str, schema['enum']))}"
    if isinstance(value, str):
        return _text(schema, value, where)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _number(schema, value, where)
    if isinstance(value, list):
        return _list(schema, value, where)
    return _object(schema, value, where) if isinstance(value, dict) else ""


def is_a(kind: str, value: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()  # as JSON Schema has it: 1.0 is one
    return isinstance(value, KINDS[kind])


def _text(schema: Schema, value: str, where: str) -> str:
    if any(0xD800 <= ord(c) <= 0xDFFF or c == "\0" for c in value):
        return f"{where}: NUL and lone surrogates are no text"
    if len(value) > schema.get("maxLength", len(value)):
        return f"{where}: longer than {schema['maxLength']} characters"
    if len(value) < schema.get("minLength", 0):
        return f"{where}: shorter than {schema['minLength']} characters"
    # In a schema "$" is the end; in Python it may be the line's end before it.
    if "pattern" in schema and not re.search(re.sub(r"\$$", r"\\Z", schema["pattern"]), value):
        return f"{where}: expected {schema.get('description') or schema['pattern']}"
    return ""


def _number(schema: Schema, value: float, where: str) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        return f"{where}: not a number"
    if value < schema.get("minimum", value):
        return f"{where}: less than {schema['minimum']}"
    return f"{where}: more than {schema['maximum']}" if value > schema.get("maximum", value) else ""


def _list(schema: Schema, value: list[Any], where: str) -> str:
    if len(value) > schema.get("maxItems", len(value)):
        return f"{where}: more than {schema['maxItems']} of them"
    items = schema.get("items", {})
    return next((why for i, each in enumerate(value) if (why := problem(items, each, f"{where}[{i}]"))), "")


def _object(schema: Schema, value: dict[str, Any], where: str) -> str:
    known, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
    if len(value) > schema.get("maxProperties", len(value)):
        return f"{where}: more than {schema['maxProperties']} of them"
    for key in schema.get("required", ()):
        if key not in value:
            return f"{where or 'the body'}: {key} is missing"
    names = schema.get("propertyNames", {})
    for key, each in value.items():
        place = f"{where}.{key[:40]}" if where else key[:40]
        if key not in known and rest is False:
            return f"{place}: there is no such key"
        why = problem(names, key, place) or problem(known.get(key, rest or {}), each, place)
        if why:
            return why
    return ""
