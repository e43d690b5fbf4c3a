"""What the API says and takes, as schemas (docs/service.md shows them as examples)."""

from __future__ import annotations

from typing import Any

from launcher.serve.schema import arr, maybe, obj, ref

RUN_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
DIGEST = r"^[0-9a-f]{64}$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
STATES = ["queued", "starting", "running", "succeeded", "failed", "stopped", "lost", "cancelled"]

TEXT: dict[str, Any] = {"type": "string"}
WHOLE: dict[str, Any] = {"type": "integer"}
NUMBER: dict[str, Any] = {"type": "number"}
FLAG: dict[str, Any] = {"type": "boolean"}
ANY: dict[str, Any] = {}
NAMES = {
    "type": "string",
    "maxLength": 4000,
    "pattern": r"^[A-Za-z0-9._,-]*$",
    "description": "names, separated by commas",
}
OWN_NAME = {  # or none
    "type": "string",
    "maxLength": 64,
    "pattern": r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$",
    "description": "letters, digits, '.', '_' and '-', the first a letter or digit",
}
VARIABLE_NAME = {
    "type": "string",
    "pattern": VARIABLE,
    "description": "a name of letters, digits and '_', the first no digit",
}

ROW: dict[str, dict[str, Any]] = {
    "run": TEXT,
    "name": TEXT,
    "user": TEXT,
    "state": {"type": "string", "enum": STATES},
    "world": maybe(WHOLE),
    "hosts": arr(TEXT),
    "attempt": WHOLE,
    "submitted": maybe(NUMBER),
    "started": maybe(NUMBER),
    "ended": maybe(NUMBER),
    **{
        key: maybe(NUMBER)
        for key in ("step", "steps", "epoch", "epochs", "loss", "accuracy", "samples_per_s")
    },
    "left_s": maybe(NUMBER),
    "parameters_sha256": maybe(TEXT),
    "spark": arr(NUMBER),
    "command": arr(TEXT),
    "error": TEXT,
    "fix": TEXT,
    "waiting": TEXT,
    "priority": WHOLE,
    "after": TEXT,
    "at": maybe(NUMBER),
    "place": WHOLE,  # later ones were handed in later, whatever the clock said
}
RANK = {
    "rank": WHOLE,
    "host": TEXT,
    "state": TEXT,
    "pid": maybe(WHOLE),
    "exit_code": maybe(WHOLE),
    "signal": maybe(TEXT),
    "reason": TEXT,
    "heartbeat_age_s": maybe(NUMBER),
    **dict.fromkeys(("step", "loss", "samples_per_s", "step_ms", "comm_ms", "bytes_sent"), maybe(NUMBER)),
}
FRAME = obj({"file": TEXT, "line": WHOLE, "function": TEXT, "text": TEXT})
CAUSE = maybe(
    obj(
        {
            "text": TEXT,
            "fix": TEXT,
            "rank": maybe(WHOLE),
            "host": TEXT,
            "lines": arr(TEXT),  # its last words
            "trace": arr(FRAME),
            "known": FLAG,  # false: nothing here says why
        },
        required=("text", "fix", "rank", "host"),  # what an older ringctl has written has no others
    )
)
ATTEMPT = {
    "attempt": WHOLE,
    "state": TEXT,
    "started": maybe(NUMBER),
    "ended": maybe(NUMBER),
    "world": maybe(WHOLE),
    "cause": CAUSE,
    "recorded": {"type": "string", "enum": ["whole", "gap", "part", "no"]},
    "gap": FLAG,  # a host has more of its log, and could not be heard or read
}
CHECKED = maybe(obj({"time": NUMBER, "ok": FLAG, "checks": arr(ANY), "pairs": arr(ANY)}))
DETAIL = {
    **ROW,
    "ranks": arr(obj(RANK)),
    "attempts": arr(obj(ATTEMPT)),
    "cause": CAUSE,
    "former": arr(TEXT),  # hosts that only earlier attempts were on
    "unended": arr(TEXT),  # those of them that may still have ranks of it
    "unwritten": {"type": "object"},  # how many lines of each host's log are lost; -1: may be
    "plan": {"type": ["object", "null"]},
    "options": {"type": "object"},
    "environment": {"type": "object"},
    "watched": TEXT,
    "links": arr(obj({"from": TEXT, "to": TEXT, "latency_ms": maybe(NUMBER), "mbit_s": maybe(NUMBER)})),
    "preflight": CHECKED,
    "actions": arr({"type": "string", "enum": ["stop", "restart", "cancel"]}),
}
HOST = {
    "name": TEXT,
    "address": TEXT,
    "slots": WHOLE,
    "taken": WHOLE,
    "free": WHOLE,
    "runs": arr(obj({"run": TEXT, "user": TEXT, "slots": WHOLE, "shared": FLAG})),
    "load": arr(NUMBER),
    **{key: maybe(WHOLE) for key in ("cores", "memory_free", "memory_total", "disk_free", "disk_total")},
    "seen": maybe(NUMBER),
    "problem": TEXT,
    "error": TEXT,
}
COLUMNS = ("step", "time", "loss", "accuracy", "samples_per_s", "step_ms", "comm_ms", "bytes_sent")
SERIES = {"rank": maybe(WHOLE), "attempt": WHOLE, **{key: arr(ANY) for key in COLUMNS}}
DIFFERENCE = obj({"key": TEXT, "values": arr(ANY), "differs": FLAG})

SUBMISSION = obj(
    {
        "command": arr({"type": "string", "maxLength": 8000}, 1000),
        "world": maybe({"type": "integer", "minimum": 1, "maximum": 65536}),
        "name": OWN_NAME,
        "include": NAMES,
        "exclude": NAMES,
        "variables": {
            "type": "object",
            "additionalProperties": {"type": "string", "maxLength": 32000},
            "propertyNames": VARIABLE_NAME,
            "maxProperties": 1000,
        },
        "secrets": {
            "type": "object",
            # Without a line's end: it becomes a line of a file.
            "additionalProperties": {
                "type": "string",
                "maxLength": 32000,
                "pattern": r"^[^\r\n]*$",
                "description": "one line",
            },
            "propertyNames": VARIABLE_NAME,
            "maxProperties": 100,
        },
        "max_restarts": {"type": "integer", "minimum": 0, "maximum": 1000},
        "restart_delay": {"type": "number", "minimum": 0, "maximum": 3600},
        "min_world": maybe({"type": "integer", "minimum": 1, "maximum": 65536}),
        "prefork": FLAG,
        "priority": {"type": "integer", "minimum": -1000, "maximum": 1000},
        "after": OWN_NAME,
        "at": maybe({"type": "number", "minimum": 0, "maximum": 1e11}),
        "code": {
            "type": "string",
            "maxLength": 64,
            "pattern": r"^([0-9a-f]{64})?$",
            "description": "the digest of a snapshot",
        },
        "shared": FLAG,
        "master_port": maybe({"type": "integer", "minimum": 1, "maximum": 65535}),
        "i_know": FLAG,
        "skip_preflight": FLAG,
        "key": OWN_NAME,
    },
    required=(),
)
RESTART = obj(
    {"world": maybe({"type": "integer", "minimum": 1, "maximum": 65536}), "grow": FLAG, "i_know": FLAG}, ()
)
# So long it keeps one of few hands busy.
STOP = obj({"grace": {"type": "number", "minimum": 0, "maximum": 120}}, ())
PRUNE = obj(
    {
        "older_than": maybe({"type": "number", "minimum": 0, "maximum": 1e11}),  # seconds
        "keep": maybe({"type": "integer", "minimum": 0, "maximum": 10**9}),
        "logs_only": FLAG,
        "dry_run": FLAG,
        "runs": maybe(arr({"type": "string", "pattern": RUN_ID}, 100_000)),  # none but these
    },
    (),
)
NOTHING = obj({}, ())

SHAPES: dict[str, dict[str, Any]] = {
    "Error": obj({"error": TEXT, "fix": TEXT}),
    "RunRow": obj(ROW),
    "RunDetail": obj(DETAIL),
    "Host": obj(HOST),
    "Preflight": CHECKED,
    "Submission": SUBMISSION,
    "Runs": obj({"runs": arr(ref("RunRow")), "next": maybe(TEXT)}),
    "Queue": obj({"queue": arr(ref("RunRow"))}),
    "Hosts": obj({"hosts": arr(ref("Host"))}),
    "Metrics": obj({"last": WHOLE, "series": arr(obj(SERIES))}),
    "Log": obj({"lines": arr(arr(ANY)), "first": maybe(WHOLE), "last": maybe(WHOLE), "more": FLAG}),
    "Events": obj({"events": arr({"type": "object"}), "last": WHOLE, "more": FLAG}),
    "Pruned": obj({"chosen": arr(TEXT), "forgotten": arr(TEXT)}),
    "Checkpoints": {"type": "object"},
    "Compared": obj({"runs": arr(ref("RunRow")), "options": arr(DIFFERENCE), "results": arr(DIFFERENCE)}),
    "Have": obj({"digest": TEXT, "have": FLAG}),
    "Health": obj({"ok": FLAG, "version": TEXT}),
    "Me": obj({"user": TEXT, "role": {"type": "string", "enum": ["read", "submit", "admin"]}}),
    "SignedOut": obj({"signed_out": FLAG}),
}
