"""The command line of the benchmarks -> Asked, or an InputError that says what is wrong.

What is not an option of theirs is one of the trainer's, and is judged as the trainer does.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer import config as trainer
from trainer.compress import AUTO
from trainer.config import Config
from trainer.errors import InputError

KINDS = ("table", "collectives")
OUT = "bench-results"
NO_FILES = "-"
LOCAL_WORLD = 4  # ranks on this machine, where nobody has started any
BYTES = {"b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3}
BITS_PER_S = {"bit": 1, "kbit": 1000, "mbit": 1000**2, "gbit": 1000**3}
SMALLEST, LARGEST = 4, 1000**3  # bytes


@dataclass(frozen=True)
class Way:
    """A way for gradients to meet, and to shrink."""

    sync: str
    compress: str = "none"

    def __str__(self) -> str:
        return self.sync if self.compress == "none" else f"{self.sync} {self.compress}"


SERIAL, RING = Way("serial"), Way("ring")
GLOO = Way("gloo")  # its plain all_reduce: what the others are compared with


@dataclass(frozen=True)
class Asked:
    """Everything a benchmark is told."""

    kind: str  # one of KINDS
    config: Config  # of every training, but for `ways` and seeds
    ways: tuple[Way, ...]  # `ring` first, then what was asked for
    seeds: int
    sizes: tuple[int, ...]  # bytes of fp32 gradients
    rounds: int
    rate: float | None  # of the links in bits a second, as far as the user knows it
    world: int | None  # None: not said
    out: str  # the folder for the results; NO_FILES for none


def parse(words: Sequence[str], environ: Mapping[str, str]) -> Asked:
    """What these words ask for; raises InputError on the first thing wrong."""
    kind = _kind(words)
    given, of_trainer = _parser(kind).parse_known_args([trainer.dashed(word) for word in words[1:]])
    ways = _ways(given.sync, given.compress)
    # Ring is always among them: what is wrong with the other options is told here.
    config, *_ = [
        trainer.parse([*of_trainer, "--sync", way.sync, "--compress", way.compress], environ) for way in ways
    ]
    if config.checkpoint_every or config.resume != "never":
        raise InputError("a benchmark begins every training anew: leave out --checkpoint-every and --resume")
    if kind == "collectives":
        _refuse_untimeable(ways)
    return Asked(kind=kind, config=config, ways=ways, **_own(given))


def _own(given: argparse.Namespace) -> dict[str, Any]:
    """What the benchmarks' own parsers found, which each leave out what the other one has."""
    found = {"seeds": 1, "sizes": (), "rounds": 0} | vars(given)
    return {name: value for name, value in found.items() if name not in ("sync", "compress")}


def _kind(words: Sequence[str]) -> str:
    if words and words[0] in KINDS:
        return words[0]
    if words and words[0] in ("-h", "--help"):
        raise InputError("write `table --help` or `collectives --help`")
    said = f"{words[0]!r} is no benchmark" if words else "say which benchmark"
    near = trainer.nearest(words[0] if words else "", KINDS, f": it is {' or '.join(KINDS)}")
    raise InputError(said + near)


def _parser(kind: str) -> argparse.ArgumentParser:
    about = {
        "table": "Train alone, with 2, 4, ... ranks, and in every way asked for; compare time and accuracy.",
        "collectives": "Time the exchange of gradients of several sizes, beside gloo's all_reduce.",
    }
    parser = trainer.Parser(
        prog=f"python -m trainer.bench {kind}",
        description=about[kind],
        epilog="Every option of `python -m trainer` is accepted as well: --model, --data, --epochs, ...",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--world", type=trainer.whole(1, 256), metavar="N", help=f"ranks to start here ({LOCAL_WORLD})")
    add("--sync", type=_words, default=(), metavar="LIST", help="also these strategies, as in ddp,naive-ring")
    add(
        "--compress", type=_words, default=(), metavar="LIST",
        help="also these formats on the ring, or on another strategy, as in int8,int4,ddp:fp16",
    )  # fmt: skip
    if kind == "table":
        add("--seeds", type=trainer.whole(1, 100), default=3, metavar="K", help="trainings of each (3)")
    else:
        sizes = "4kb,64kb,1mb,4mb,16mb,64mb"
        add("--sizes", type=_sizes, default=_sizes(sizes), metavar="LIST", help=f"gradients ({sizes})")
        add("--rounds", type=trainer.whole(1, 10_000), default=11, metavar="K", help="of each (11)")
    add("--rate", type=_rate, metavar="RATE", help="what the links carry, if you know: 200mbit, 1gbit")
    add("--out", default=OUT, metavar="DIR", help=f"where the results go ({OUT}); {NO_FILES}: nowhere")
    return parser


def _ways(syncs: Sequence[str], formats: Sequence[str]) -> tuple[Way, ...]:
    """Each once, in their order. Serial is a yardstick that is always there, and needs no mention."""
    asked = [Way(name) for name in syncs]
    for word in formats:
        sync, _, format = word.rpartition(":")
        asked.append(Way(sync or RING.sync, format))
    normal = [Way(way.sync.replace("_", "-"), way.compress.replace("_", "-")) for way in asked]
    return tuple(dict.fromkeys([RING, *(way for way in normal if way != SERIAL)]))


def _refuse_untimeable(ways: Sequence[Way]) -> None:
    """Raise InputError for what happens only while a model trains."""
    for way in ways:
        if way.sync == "ddp":
            raise InputError("ddp exchanges gradients only inside a backward pass: compare it in the table")
        if way.compress == AUTO:
            raise InputError("auto chooses in the first steps of a training: compare it in the table")


# --- One reader per kind of value ------------------------------------------------------------------


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(dict.fromkeys(int(_quantity(word, BYTES, "12mb or 64kb")) for word in _words(text)))
    for size in sizes:
        if not SMALLEST <= size <= LARGEST:
            raise argparse.ArgumentTypeError(f"must be from {SMALLEST}b to 1gb, not {text!r}")
    if not sizes:
        raise argparse.ArgumentTypeError("names no size")
    return sizes


def _rate(text: str) -> float:
    return _quantity(text, BITS_PER_S, "200mbit or 1gbit")


def _quantity(text: str, units: Mapping[str, int], example: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)", text.strip().lower())
    if not found or found[2] not in units or not float(found[1]):
        raise argparse.ArgumentTypeError(f"must be like {example}, not {text!r}")
    return float(found[1]) * units[found[2]]
