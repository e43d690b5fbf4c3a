"""The trainer's options: command line and environment -> Config, or an InputError that says what is wrong.

Nothing here imports torch, so a mistake is told at once.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urlsplit

from trainer import staging
from trainer.compress import AUTO, FORMATS
from trainer.errors import InputError
from trainer.models import MODELS
from trainer.sync import STRATEGIES


@dataclass(frozen=True)
class Config:
    """Everything a run of the trainer is told."""

    sync: str = "ring"  # a name in STRATEGIES
    compress: str = "none"  # a name in FORMATS, or AUTO
    topk_ratio: float = 0.01  # of the values that `topk` sends
    powersgd_rank: int = 4  # columns of the two matrices of `powersgd`
    error_feedback: bool = True  # add what a message lost to the next one, in formats where it matters
    on_nonfinite: str = "raise"  # what to do with a gradient that has an infinity or a NaN: or "skip"
    bucket_mb: float = 4.0  # least size of what travels together
    check_sync: int = 0  # compare all ranks' parameters every so many steps; 0: never
    checkpoint_every: int = 0  # save every so many steps, and after the last one; 0: never
    checkpoint_dir: str = "checkpoints"  # where to save, on each host
    checkpoint_copies: int = 1  # of the model, each on another host
    resume: str = "never"  # go on from a checkpoint: "auto", "never", or a folder that has some
    device: str = "auto"  # "auto", "cpu" or "cuda"
    backend: str = "auto"  # "auto", "gloo", "nccl" or "mpi"
    model: str = "bn-cnn"  # a name in MODELS
    data: str = "mini"  # "mini", "download", or a folder
    epochs: int | None = None  # None: as many as `steps` takes, or DEFAULT_EPOCHS
    steps: int | None = None  # stop after this many steps; None: after the last epoch
    batch_size: int = 16  # of each rank
    lr: float = 0.01  # at the start
    momentum: float = 0.9
    seed: int = 0
    threads: int = 1
    timeout: float = 60.0  # seconds that a collective may take
    rank: int = 0
    world_size: int = 1
    init_method: str = ""  # where the ranks meet; "" with one rank
    gloo_socket_ifname: str = ""  # "" leaves it to the environment
    run: str = ""  # ringctl's name for all of this; "" by hand
    attempt: int = 1  # to do it, from 1; ringctl counts
    host: str = ""  # ringctl's name for where this rank is; "" by hand
    first_world: int | None = None  # how many ranks the first attempt had; None: as many as this one
    check: str = ""  # only look: at "options", or at "all", which includes the data


DEFAULT_EPOCHS = 3
DEFAULTS = Config()
FROM_OUTSIDE = (
    "threads",
    "checkpoint-dir",
    "resume",
    "init-method",
    "rank",
    "world-size",
    "gloo-socket-ifname",
)  # unless given as options

PLACE_HELP = (
    "give --init-method tcp://IP:PORT --rank R --world-size N, or set MASTER_ADDR MASTER_PORT RANK WORLD_SIZE"
)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """The Config that a command line and environment ask for; raises InputError on the first thing wrong."""
    parser = _parser()
    given, unknown = parser.parse_known_args([dashed(word) for word in argv])
    if unknown:
        raise InputError(_unknown_option(unknown[0], parser))
    if given.data not in ("mini", "download") and given.check != "options":
        staging.find(given.data)
    _refuse_impossible(given)
    # With --check nothing is about to start, and the environment is not the one of a rank.
    rank, world_size, init_method = _place(given, {} if given.check else environ)
    if given.sync == "serial" and world_size > 1:
        raise InputError(
            f"--sync serial is for one process alone, and there are {world_size} ranks; use ring"
        )
    options = vars(given) | {"rank": rank, "world_size": world_size, "init_method": init_method}
    options["threads"] = given.threads or _default_threads(environ)
    options["gloo_socket_ifname"] = given.gloo_socket_ifname or ""
    options["checkpoint_dir"] = (
        given.checkpoint_dir or environ.get("RINGCTL_CHECKPOINTS") or DEFAULTS.checkpoint_dir
    )
    options["resume"] = given.resume or ("auto" if given.checkpoint_every else DEFAULTS.resume)
    options["run"] = environ.get("RINGCTL_RUN", "")
    options["host"] = environ.get("RINGCTL_HOST", "")
    options["attempt"] = _variable(environ, "RINGCTL_ATTEMPT", whole(1)) or DEFAULTS.attempt
    options["first_world"] = _first_world(environ, world_size)
    return Config(**options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m trainer",
        description="Train on all ranks at once. Every option is accepted with dashes or underscores.",
        allow_abbrev=False,
    )

    def add(group: Any, name: str, kind: Callable[[str], Any], text: str, metavar: str | None = None) -> None:
        default = None if name in FROM_OUTSIDE else getattr(DEFAULTS, name.replace("-", "_"))
        text += "" if default is None else f" (default: {default})"
        group.add_argument(
            f"--{name}", type=kind, default=default, metavar=metavar or name.upper(), help=text
        )

    what = parser.add_argument_group("what to train")
    add(what, "model", _one_of(MODELS), f"one of {', '.join(MODELS)}")
    add(what, "data", str, "mini (shipped), download (whole MNIST), or a folder that has MNIST's files")
    how = parser.add_argument_group("how")
    add(how, "sync", _one_of(STRATEGIES), f"how gradients meet: one of {', '.join(STRATEGIES)}")
    formats = (*FORMATS, AUTO)
    add(how, "compress", _one_of(formats), f"how gradients shrink: one of {', '.join(formats)}")
    add(how, "topk-ratio", _number(above=0, most=1), "share of the values that topk sends", "X")
    add(how, "powersgd-rank", whole(1, 1024), "columns of the two matrices of powersgd", "N")
    how.add_argument(
        "--no-error-feedback",
        dest="error_feedback",
        action="store_false",
        help="do not add what a message lost to the next one",
    )
    add(how, "on-nonfinite", _one_of(("raise", "skip")), "end, or leave out, a step with inf or NaN", "DO")
    add(how, "bucket-mb", _number(above=0, most=1e6), "least size of what travels together", "MB")
    add(how, "epochs", whole(1), f"passes over the data; {DEFAULT_EPOCHS} unless --steps is given", "N")
    add(how, "steps", whole(1), "stop after this many steps in all, even inside an epoch", "N")
    add(how, "batch-size", whole(1, 10**9), "images in a step, on each rank", "N")
    add(how, "lr", _number(above=0, most=1e30), "learning rate of the first step; it falls to 0", "X")
    add(how, "momentum", _number(least=0, below=1), "of the gradient descent", "X")
    add(how, "seed", whole(0, 2**32 - 1), "same seed, same ranks, same machines: same result", "N")
    add(how, "threads", whole(1, 1024), "default: $OMP_NUM_THREADS, or as many as usable cores", "N")
    add(how, "timeout", _number(least=0.1, most=86400), "seconds to wait for the other ranks", "S")
    add(how, "check-sync", whole(0), "compare all ranks' parameters every N steps; 0: never", "N")
    add(how, "checkpoint-every", whole(0), "save every N steps and after the last one; 0: never", "N")
    add(
        how,
        "checkpoint-dir",
        _named,
        "where, on each host; default: $RINGCTL_CHECKPOINTS, or checkpoints in the current folder",
        "DIR",
    )
    add(how, "checkpoint-copies", whole(0), "copies of the saved model, each on another host", "K")
    add(
        how,
        "resume",
        _named,
        "auto: go on from the newest checkpoint there, if there is one; never: start afresh and replace it; "
        "DIR: go on from one in another folder; default: auto with --checkpoint-every, else never",
        "auto|never|DIR",
    )
    add(how, "device", _one_of(("auto", "cpu", "cuda")), "where to compute; auto: a GPU if there is one")
    add(how, "backend", _one_of(("auto", "gloo", "nccl", "mpi")), "what the ranks talk over")
    for option, only, text in (
        ("--check", "all", "only look: exit 0 if all is right, 2 if not"),
        ("--check-options", "options", "the same, without a look at the data"),
    ):
        how.add_argument(option, dest="check", action="store_const", const=only, default="", help=text)
    hand = parser.add_argument_group("by hand; otherwise from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT")
    add(hand, "init-method", _tcp, "where rank 0 listens", "tcp://IP:PORT")
    add(hand, "rank", whole(0), "which rank this is, from 0", "R")
    add(hand, "world-size", whole(1), "how many ranks there are", "N")
    add(hand, "gloo-socket-ifname", _interfaces, "network interface to the other ranks", "IF")
    return parser


def _refuse_impossible(given: argparse.Namespace) -> None:
    """Raise InputError for options that are right by themselves and cannot work together."""
    strategy = STRATEGIES[given.sync]
    if given.compress not in strategy.formats:
        able = [name for name, other in STRATEGIES.items() if given.compress in other.formats]
        raise InputError(
            f"--sync {given.sync} cannot carry --compress {given.compress}: {strategy.why}; "
            f"use --sync {' or '.join(able)}"
        )
    if given.device == "cuda" and "cuda" not in strategy.devices:
        able = [name for name, other in STRATEGIES.items() if "cuda" in other.devices]
        raise InputError(
            f"--sync {given.sync} passes messages between CPUs and cannot take --device cuda; "
            f"use --sync {', '.join(able)}"
        )
    if given.backend == "nccl" and ("cuda" not in strategy.devices or given.device == "cpu"):
        raise InputError("--backend nccl is between GPUs; use gloo, or --sync ddp and --device cuda")


class Parser(argparse.ArgumentParser):
    """Raises what argparse would print, as a sentence that starts with the option."""

    def error(self, message: str) -> NoReturn:
        message = message.replace("expected one argument", "needs a value")
        raise InputError(re.sub(r"^argument (\S+): ", r"\1 ", message))


def dashed(word: str) -> str:
    """--init_method=x as --init-method=x."""
    if not word.startswith("--"):
        return word
    option, equals, value = word.partition("=")
    return option.replace("_", "-") + equals + value


def _unknown_option(word: str, parser: argparse.ArgumentParser) -> str:
    if not word.startswith("-"):
        return f"{word!r} is not an option, and the trainer takes nothing else; see --help"
    option = word.partition("=")[0]
    known = [string for action in parser._actions for string in action.option_strings]
    return f"there is no option {option}" + nearest(option, known, "; see --help")


def nearest(word: str, known: Collection[str], otherwise: str) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else otherwise


# --- One reader per kind of value: text -> value, or ArgumentTypeError with the rest of the sentence ---


def _one_of(names: Collection[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        name = text.replace("_", "-")
        if name in names:
            return name
        raise argparse.ArgumentTypeError(
            f"cannot be {text!r}" + nearest(name, names, f"; it is one of {', '.join(names)}")
        )

    return read


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    wanted = f"a whole number from {least} " + ("on" if most is None else f"to {most}")

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {text!r}")
        return value

    return read


def _number(
    *, above: float = -math.inf, least: float = -math.inf, below: float = math.inf, most: float = math.inf
) -> Callable[[str], float]:
    limits = {"above": above, "at least": least, "below": below, "at most": most}
    wanted = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit))

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and above < value < below and least <= value <= most):
            raise argparse.ArgumentTypeError(f"must be a number {wanted}, not {text!r}")
        return value

    return read


def _named(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("needs a value")
    return text


def _tcp(text: str) -> str:
    try:
        url = urlsplit(text)
        good = url.scheme == "tcp" and bool(url.hostname) and bool(url.port) and url.path in ("", "/")
    except ValueError:  # a port that is no number, or too large
        good = False
    if not good:
        raise argparse.ArgumentTypeError(f"must be like tcp://192.168.0.1:23456, not {text!r}")
    return text


def _interfaces(text: str) -> str:
    """Gloo takes one interface or several with commas."""
    here = [name for _, name in socket.if_nameindex()]
    for name in text.split(","):
        if name not in here:
            raise argparse.ArgumentTypeError(f"names {name!r}, but this machine has {', '.join(here)}")
    return text


# --- What the environment says --------------------------------------------------------------------


def _place(given: argparse.Namespace, environ: Mapping[str, str]) -> tuple[int, int, str]:
    """Rank, world size and init method: options first, then torchrun's variables, then one process alone."""
    rank = given.rank if given.rank is not None else _variable(environ, "RANK", whole(0))
    world_size = (
        given.world_size if given.world_size is not None else _variable(environ, "WORLD_SIZE", whole(1))
    )
    if rank is None and world_size is None and given.init_method is None:
        return 0, 1, ""
    if rank is None or world_size is None:
        raise InputError(f"the {'rank' if rank is None else 'world size'} is missing: {PLACE_HELP}")
    if rank >= world_size:
        raise InputError(f"rank {rank} is outside the {world_size} ranks 0 to {world_size - 1}")
    if world_size == 1:
        return 0, 1, ""
    if given.init_method is not None:
        return rank, world_size, given.init_method
    if not environ.get("MASTER_ADDR") or _variable(environ, "MASTER_PORT", whole(1, 65535)) is None:
        raise InputError(f"rank {rank} does not know where the {world_size} ranks meet: {PLACE_HELP}")
    return rank, world_size, "env://"  # also right under torchrun, whose agent may hold the store


def _first_world(environ: Mapping[str, str], world_size: int) -> int | None:
    """What ringctl says of the ranks that it has started: nothing about those of a torchrun or a script among
    them."""
    first_world = _variable(environ, "RINGCTL_FIRST_WORLD", whole(1))
    is_ringctls = environ.get("WORLD_SIZE") == str(world_size) and "TORCHELASTIC_RUN_ID" not in environ
    return first_world if is_ringctls else None


def _variable(environ: Mapping[str, str], name: str, read: Callable[[str], int]) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return read(text)
    except argparse.ArgumentTypeError as error:
        raise InputError(f"the environment variable {name} {error}") from None


def _default_threads(environ: Mapping[str, str]) -> int:
    try:
        return whole(1, 1024)(environ.get("OMP_NUM_THREADS", ""))
    except argparse.ArgumentTypeError:  # not set, or one of the forms that only OpenMP reads
        return len(os.sched_getaffinity(0))
