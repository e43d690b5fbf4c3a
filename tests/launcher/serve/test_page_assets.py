"""The page's files as they are: what a browser would only find out when somebody comes to that place."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from launcher import reporthtml
from launcher.serve.routes import ROUTES

PAGE = reporthtml.PAGE
FILES = sorted(path for path in PAGE.rglob("*") if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
SVG = "http://www.w3.org/2000/svg"  # a name, which nobody asks for
WIRE_BYTES = 200_000


def name_of(path: Path) -> str:
    return str(path.relative_to(PAGE))


def source(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def all_scripts() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in SCRIPTS)


# --- What the policy forbids ---------------------------------------------------------------------


def test_the_document_has_no_script_style_or_handler_of_its_own() -> None:
    text = source("index.html")
    assert re.findall(r"<script(?![^>]*\bsrc=)", text) == []
    assert re.findall(r"<style|\sstyle=|\son[a-z]+=|javascript:", text) == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_names_a_place_elsewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace(SVG, "")
    assert re.findall(r"(?:https?:|wss?:)?//[a-z0-9-]+\.[a-z]{2,}", text) == []
    assert re.findall(r"@import|url\(", text) == []


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_no_script_reads_text_as_markup_or_as_a_program(path: Path) -> None:
    forbidden = r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|srcdoc|DOMParser|createContextualFragment)\b"
    programs = (
        r"\bdocument\.write|\beval\(|\bnew Function\b|setAttribute\(\"style|set(?:Timeout|Interval)\(\""
    )
    text = path.read_text(encoding="utf-8")
    assert re.findall(f"{forbidden}|{programs}", text) == []


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.name != "dom.js"], ids=name_of)
def test_texts_are_put_into_the_page_in_one_place_alone(path: Path) -> None:
    assigned = r"\b(?:textContent|innerText|nodeValue|title|ariaLabel|placeholder) = "
    called = (
        r"\bcreateTextNode\(|\bnew Text\(|setAttribute\(\"(?:title|placeholder|aria-label|aria-valuetext)\""
    )
    assert re.findall(f"\\.{assigned}|{called}", path.read_text(encoding="utf-8")) == []


def test_all_files_and_the_first_screens_data_are_light() -> None:
    numbers = dict.fromkeys(("loss", "accuracy", "left_s", "submitted", "started", "ended"), 1234.56789)
    words = dict.fromkeys(("run", "name", "user", "state", "waiting"), "a word of some length")
    lists = {"hosts": ["server1", "server2", "server3"], "command": ["--epochs", "3"], "spark": [1.2345] * 40}
    row = {**numbers, **words, **lists, "error": "e" * 120}
    files = sum(len(gzip.compress(path.read_bytes(), 9)) for path in FILES)
    assert files + len(json.dumps([row] * 50)) <= WIRE_BYTES


# --- Names that must exist -----------------------------------------------------------------------


def test_whatever_is_imported_is_exported() -> None:
    for path in SCRIPTS:
        text = path.read_text(encoding="utf-8")
        imports = re.findall(r"^import \{([^}]*)\} from \"([^\"]+)\";$", text, re.M)
        assert len(imports) == len(re.findall(r"^import\b", text, re.M)), f"{name_of(path)}: an odd import"
        for names, where in imports:
            other = (path.parent / where).resolve()
            assert other.is_file(), f"{name_of(path)}: {where}"
            exported = set(
                re.findall(r"^export (?:async )?(?:function|const|class) (\w+)", other.read_text(), re.M)
            )
            wanted = {name.strip() for name in names.split(",")}
            assert wanted <= exported, f"{name_of(path)}: {where} has no {wanted - exported}"
            unused = {name for name in wanted if len(re.findall(rf"\b{name}\b", text)) < 2}
            assert not unused, f"{name_of(path)}: {unused} is imported and not used"


def test_every_file_that_the_document_asks_for_is_there() -> None:
    asked = re.findall(r'(?:src|href)="(/page/[^"]+)"', source("index.html"))
    assert asked
    assert [path for path in asked if not (PAGE / path.removeprefix("/page/")).is_file()] == []


def test_every_element_that_a_script_looks_for_is_made_somewhere() -> None:
    text = all_scripts()
    made = set(re.findall(r'\bid="([\w-]+)"', source("index.html") + Path(reporthtml.__file__).read_text()))
    looked_for = set(re.findall(r'getElementById\("([\w-]+)"\)', text))
    assert looked_for
    assert looked_for <= made


def test_every_place_that_is_linked_to_has_a_view() -> None:
    table = re.search(r"ROUTES = \{(.*?)\}", source("router.js"), re.S)
    views = re.search(r"const VIEWS = \{(.*?)\}", source("app.js"), re.S)
    assert table
    assert views
    routes = dict(re.findall(r'"?(\w*)"?: "(\w+)"', table[1]))
    assert {*routes.values(), "run"} == set(re.findall(r"(\w+): \w+View", views[1]))
    linked = re.findall(r'"#/(\w*)', all_scripts() + source("index.html")) + re.findall(
        r'\blink\("(\w+)', all_scripts()
    )
    assert set(linked) <= set(routes), "a link to nowhere"


def test_every_picture_that_is_used_is_drawn() -> None:
    shapes = re.search(r"const SHAPES = \{(.*?)\n\};", source("icons.js"), re.S)
    assert shapes
    drawn = set(re.findall(r"^  (\w+):", shapes[1], re.M))
    used = set(re.findall(r'\bicon\("(\w+)"\)', all_scripts()))
    states = set(re.findall(r"^  (\w+): \{ word", source("format.js"), re.M))
    assert used | states <= drawn


def test_every_address_that_is_asked_is_one_of_the_service() -> None:
    served = {route.path for route in ROUTES}
    asked = set(re.findall(r'"(/api/[a-z]+)"', all_scripts()))
    asked |= {
        f"/api/runs/{{run}}{rest}" for rest in re.findall(r'runPath\([^()"]*, "(/[a-z]+)', all_scripts())
    }
    asked |= {f"/api/runs/{{run}}/{name}" for name in re.findall(r'\bact\(run, "(\w+)"', all_scripts())}
    assert len(asked) > 10
    assert asked <= served


# --- The report's script -------------------------------------------------------------------------


def test_the_modules_of_a_report_share_no_name() -> None:
    found: dict[str, str] = {}
    for name in reporthtml.MODULES:
        text = source(f"{name}.js")
        for made in re.findall(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", text, re.M):
            assert made not in found, f"{made} is in {found.get(made)}.js and in {name}.js"
            found[made] = name
    assert len(found) > 50


def test_the_script_of_a_report_imports_nothing_and_cannot_end_early() -> None:
    assert re.findall(r"^\s*(?:import|export)\b", reporthtml.script(), re.M) == []
    assert re.findall(r"</script|<!--", reporthtml.script(), re.I) == []
    assert "</style" not in reporthtml.style()


# --- Colours -------------------------------------------------------------------------------------


COLOUR = re.compile(r"--([\w-]+): (?:light-dark\((#[0-9a-f]{6}), )?(#[0-9a-f]{6})\)?;")
FOUND = COLOUR.findall(source("theme.css"))
LIGHT = {name: light or both for name, light, both in FOUND}
DARK = {name: dark for name, _, dark in FOUND}


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_every_colour_is_said_once() -> None:
    assert len(FOUND) == len(LIGHT) > 20


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_curves_stand_out_from_what_is_behind_them(colours: dict[str, str]) -> None:
    words = ("text", "soft", "accent-text", "good", "bad", "warn", "go")
    pairs = [(word, behind) for word in words for behind in ("card", "ground", "sunk")]
    pairs += [("bad", "bad-wash"), ("warn", "warn-wash"), ("text", "accent-wash"), ("on-accent", "button")]
    faint = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs}
    assert {pair: ratio for pair, ratio in faint.items() if ratio < 4.5} == {}
    lines = {f"s{at}": contrast(colours[f"s{at}"], colours["card"]) for at in range(8)}
    assert {name: ratio for name, ratio in lines.items() if ratio < 3} == {}


RULE = r"^{} \{{[^}}]*?\b{}: ([^;]+);"  # of a selector, and of a property
MIXED = re.compile(r"color-mix\(in srgb, var\(--[\w-]+(?:, var\(--[\w-]+\))?\) (\d+)%, .*\)")


def mixed(selector: str, name: str, one: str, other: str) -> str:
    """The colour that the style sheet makes there of these two."""
    said = re.search(RULE.format(re.escape(selector), name), source("style.css"), re.M)
    assert said, selector
    found = MIXED.fullmatch(said[1])
    share = int(found[1]) / 100 if found else 1.0
    parts = [(int(one[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in parts)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_every_word_of_the_log_stands_out_also_below_the_pointer_and_when_it_is_chosen(
    colours: dict[str, str],
) -> None:
    plain = [colours[name] for name in ("card", "sunk", "accent-wash")]
    behind = [*plain, *(mixed(".logline:hover", "background", colours["line"], under) for under in plain[:2])]
    words = {name: colours[name] for name in ("text", "soft", "accent-text", "bad")}
    for at in range(8):
        words[f"rank {at}"] = mixed(".logline .who", "color", colours[f"s{at}"], colours["text"])
    words["err"] = mixed(".logline.err .said", "color", colours["bad"], colours["text"])
    least = {name: min(contrast(colour, under) for under in behind) for name, colour in words.items()}
    assert {name: ratio for name, ratio in least.items() if ratio < 4.5} == {}
