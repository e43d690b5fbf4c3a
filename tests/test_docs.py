"""The pages say what is so: links lead somewhere, commands are accepted, options and tables are all there."""

from __future__ import annotations

import doctest
import itertools
import re
import runpy
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest

from launcher.cli import cli
from trainer import compress, metrics
from trainer.bench.options import parse as benchmark
from trainer.config import Config, _parser, parse

PROJECT = Path(__file__).resolve().parent.parent
FOLDERS = ("", "docs", "docs/decisions", "docs/results", "examples", "trainer", "benchmarks")
PAGES = sorted(page for folder in FOLDERS for page in (PROJECT / folder).glob("*.md"))
NAMES = [str(page.relative_to(PROJECT)) for page in PAGES]
TRAINER = (PROJECT / "docs" / "trainer.md").read_text()
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)
CODE_LINE = re.compile(r"^(?: {4}|\t)(.*)$", re.M)
FENCED = re.compile(r"^```.*?\n(.*?)^```$", re.M | re.S)
SPAN = re.compile(r"`([^`\n]+)`")


def script(name: str) -> dict[str, Any]:
    """What a program in scripts/ defines."""
    return runpy.run_path(str(PROJECT / "scripts" / name))


# --- Promises ------------------------------------------------------------------------------------


def test_every_promise_has_tests_and_all_of_them_are_there() -> None:
    table = (PROJECT / "docs" / "promises.md").read_text().split("\n\n")[2]
    rows = [line.split("|")[1:-1] for line in table.splitlines()[2:]]
    assert len(rows) > 15
    for _, test, file in rows:
        source = (PROJECT / "tests" / file.strip()).read_text()
        assert f"def {test.strip().strip('`')}(" in source, f"{file} has no {test}"


# --- Links ---------------------------------------------------------------------------------------


def anchors(page: str) -> set[str]:
    """What GitHub makes of the headings."""
    plain = [re.sub(r"[`*]|\]\(.*?\)|\[", "", heading) for heading in HEADING.findall(page)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text()
    for link in LINK.findall(without_code(text)):
        if re.match(r"\w+:", link):
            continue  # on the web, where a test does not go
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"there is no {link}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{path or page.name} has no heading for #{anchor}"


def without_code(text: str) -> str:
    return SPAN.sub("", CODE_LINE.sub("", FENCED.sub("", text)))


# --- Commands ------------------------------------------------------------------------------------


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of every `ringctl ...` and `python -m trainer ...` in code, from there on."""
    fenced = [line for block in FENCED.findall(text) for line in block.splitlines()]
    for code in CODE_LINE.findall(text) + fenced + SPAN.findall(text):
        for line in re.split(r"&&|; | \| ", code):
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # not a command, but something with a single quotation mark
                continue
            if words[:1] == ["ringctl"]:
                yield words
            for place, word in enumerate(words):
                if word == "-m" and words[place + 1].startswith("trainer"):
                    yield words[place + 1 :]


def try_ringctl(words: list[str]) -> None:
    """Raise click's own error if ringctl would not take these words; do nothing else."""
    command: click.Command = cli
    name = "ringctl"
    while isinstance(command, click.Group) and words:
        context = click.Context(command)
        _, words, _ = command.make_parser(context).parse_args(words)
        if not words and command.invoke_without_command:
            return  # with options of its own
        name, *words = words
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"there is no command {name}")
        command = found
    if isinstance(command, click.Group):
        return  # named by itself
    passed_on = command.make_context(name, words).params
    for_trainer = passed_on.get("command") or [""]
    if for_trainer[0].startswith("-"):
        try_trainer("trainer", for_trainer)
    if "words" in passed_on:
        try_trainer("trainer.bench", [name, *passed_on["words"]])


def try_trainer(module: str, words: Sequence[str]) -> None:
    """Raise InputError if this way of starting the trainer would not take these words."""
    given = [word for word in words if word not in ("-h", "--help")]
    # An interface must be one of this machine, and every machine has this one.
    given = ["lo" if before.endswith("ifname") else word for before, word in itertools.pairwise(["", *given])]
    read = {"trainer": parse, "trainer.train": parse, "trainer.bench": benchmark}[module]
    read([*given, "--check-options"], {})


def shown(words: list[str]) -> bool:
    """Whether it is a line to type, not a way to write down several: `ringctl COMMAND`, `logs [RUN]`."""
    return not any(re.search(r"\[|\]|\.\.\.|…|^COMMAND$|^CMD$", word) for word in words)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_is_one_that_exists(page: Path) -> None:
    for words in command_lines(page.read_text()):
        if not shown(words):
            continue
        try:
            if words[0] == "ringctl":
                try_ringctl(words[1:])
            else:
                try_trainer(words[0], words[1:])
        except click.exceptions.Exit:
            pass  # --help and --version
        except Exception as error:
            pytest.fail(f"{' '.join(words)}: {error}")


def test_commands_that_are_wrong_are_seen() -> None:
    text = (
        "    ringctl launch --wrold 4   # no\n\n```sh\nringctl lunch\n```\n`python -m trainer --snyc ring`\n"
    )
    lunch, trainer, launch = sorted(command_lines(text), key=len)
    for words in (lunch, launch):
        with pytest.raises(click.UsageError):
            try_ringctl(words[1:])
    assert trainer == ["trainer", "--snyc", "ring"]
    with pytest.raises(Exception, match="--sync"):
        parse(trainer[1:], {})
    for wrong in (["launch", "--local", "--"], ["bench", "table"]):
        with pytest.raises(Exception, match="int8"):
            try_ringctl([*wrong, "--compress", "int9"])


# --- docs/trainer.md -----------------------------------------------------------------------------


def section(heading: str) -> str:
    return TRAINER.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_every_option_of_the_trainer_is_explained_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(--[\w-]+)` \| (.*?) ?\|", section("Options"), re.M))
    actions = [action for action in _parser()._actions if action.dest != "help"]
    assert set(rows) == {option for action in actions for option in action.option_strings}
    for action in actions:
        if action.nargs != 0 and action.default is not None:
            default = f"{action.default:g}" if isinstance(action.default, float) else str(action.default)
            assert rows[action.option_strings[0]] == default, action.option_strings[0]


def test_every_field_of_the_metrics_is_explained() -> None:
    told = re.findall(r"^    (\w+(?:, \w+)*) {2,}", metrics.__doc__ or "", re.M)
    wanted = {name for names in told for name in names.split(", ")} | {
        "accuracy",
        "final",
        "parameters_sha256",
    }
    rows = re.findall(r"^\| (`.*?) \|", section("Metrics"), re.M)
    assert {name for row in rows for name in SPAN.findall(row)} == wanted


def test_the_tables_are_those_of_the_code() -> None:
    assert script("tables.py")["filled"](TRAINER) == TRAINER, "run scripts/tables.py"


def test_every_example_is_listed_with_its_command() -> None:
    listed = re.findall(r"-- python examples/(\w+\.py)`", TRAINER)
    assert sorted(listed) == sorted(path.name for path in (PROJECT / "examples").glob("*.py"))


# --- docs/ring.md --------------------------------------------------------------------------------


def test_the_pictures_are_those_of_the_script_and_all_are_shown() -> None:
    drawn = {name: draw().svg() for name, draw in script("pictures.py")["PICTURES"].items()}
    page = (PROJECT / "docs" / "ring.md").read_text()
    assert sorted(re.findall(r"\(pictures/([\w-]+)\.svg\)", page)) == sorted(drawn)
    for name, svg in drawn.items():
        path = PROJECT / "docs" / "pictures" / f"{name}.svg"
        assert path.read_text() == svg, "run scripts/pictures.py"
        ElementTree.fromstring(svg)


def test_messages_are_as_long_as_in_the_picture() -> None:
    for name, size, _ in script("pictures.py")["MESSAGES"]:
        assert compress.create(name, Config()).size(256) == size


def test_what_is_computed_on_the_page_comes_out() -> None:
    failures, tried = doctest.testfile(str(PROJECT / "docs" / "ring.md"), module_relative=False)
    assert tried > 0
    assert failures == 0
