"""Reports: one file that shows everything, does what no text in it says, and asks nobody."""

from __future__ import annotations

import html.parser
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher import cli_init, cli_report, reporthtml, reporttext
from tests.launcher.ringctl import launch, ringctl
from tests.launcher.serve.browser import browsing, needs_chromium, skipped_headings

MARKUP = "</script><script>window.hit=1</script><img src=x onerror=hit()> ]]> <!-- &amp;"
HOSTILE = f"{MARKUP} \u2028\u202e \x1b[31m\x00 \udc80 ``` | a\\\\| \nnext"
TRAINS = """
import json, os
rank = int(os.environ["RANK"])
with open(os.environ["RINGCTL_METRICS"], "a") as file:
    for step in range(1, 41):
        told = {"step": step, "steps": 40, "loss": 2 / step, "step_ms": 10.0, "comm_ms": 2.0}
        score = {"accuracy": 0.5 + step / 100} if step % 20 == 0 else {}
        print(json.dumps({**told, **score}), file=file)
print(f"rank {rank} says <b>hello</b>")
"""


def example(**more: Any) -> dict[str, Any]:
    """A failed run of two ranks, as `collect` tells it; texts are as hostile as can be."""
    rank = {"host": "server1", "state": "failed", "step": 3, "loss": 0.5, "exit_code": 1, "reason": HOSTILE}
    check = {
        "name": "clock",
        "host": HOSTILE,
        "peer": HOSTILE,
        "status": "fail",
        "found": HOSTILE,
        "fix": HOSTILE,
    }
    part = {"host": HOSTILE, "rank": 0}
    saved = {"step": 3, "complete": None, "world": 2, "parts": [part], "bytes": 1500, "written": 1.0e9}
    run = {
        "run": "20261117-024918-8a96", "name": HOSTILE, "user": HOSTILE, "state": "failed", "world": 2,
        "hosts": ["server1", HOSTILE], "attempt": 2, "started": 1.0e9, "ended": 1.0e9 + 75, "step": 3,
        "steps": 9,
        "loss": math.nan, "accuracy": 0.25, "samples_per_s": 1234.5, "parameters_sha256": "ab" * 32,
        "ranks": [{"rank": 0, **rank}, {"rank": 1, **rank, "host": HOSTILE}],
        "options": {"command": [HOSTILE]},
        "environment": {HOSTILE: {"threads": HOSTILE}}, "cause": {"text": HOSTILE, "fix": HOSTILE},
        "attempts": [{"attempt": 1, "state": "failed", "started": 1.0e9, "cause": {"text": HOSTILE}}],
        "links": [{"from": "server1", "to": HOSTILE, "latency_ms": 0.25, "mbit_s": 940.0}],
        "preflight": {"time": 1.0e9, "ok": False, "checks": [check, {**check, "status": "ok"}], "pairs": []},
        "plan": {
            "master_address": "10.0.0.1", "master_port": 29500, "code": "cd" * 32,
            "hosts": [{"host": HOSTILE, "ranks": [{"rank": 0, "argv": ["python", HOSTILE]}, {"rank": 1}]}],
        },
    }  # fmt: skip
    values = {"step": [1, 2, 3], "time": [1.0, 2.0, 3.0], "loss": [2.0, math.inf, 0.5], "step_ms": [9.0] * 3}
    series = [{"rank": rank, "attempt": 2, **values, "comm_ms": [1.0] * 3} for rank in (0, 1)]
    lines = [[1, 1.0e9, 2, "server1", 0, "err", HOSTILE], [2, 1.0e9, 2, HOSTILE, None, "out", "plain"]]
    log = {"lines": lines, "more": True}
    return {
        "report": 1,
        "ringctl": "1",
        "made": 1.1e9,
        "run": {**run, **more},
        "metrics": {"series": series},
        "checkpoints": {"checkpoints": [saved], "errors": {HOSTILE: "does not answer"}},
        "log": log,
    }


class Elements(html.parser.HTMLParser):
    """Which elements a document has, and what is in its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.scripts: list[str] = []
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        self._in = tag

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts.append(data)

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002 - whichever it is, it is no script any more
        self._in = ""


# --- Texts that would like to be more --------------------------------------------------------------


def test_no_text_in_a_report_becomes_an_element_or_ends_the_data_early() -> None:
    found = Elements(reporthtml.render_html(example()))
    assert found.tags.count("script") == 2, "the data and the program"
    assert "img" not in found.tags
    assert "b" not in found.tags
    assert found.handlers == []
    assert json.loads(found.scripts[0])["run"]["ranks"][1]["host"].startswith("</script>")


def test_what_json_cannot_say_is_null_in_the_data() -> None:
    data = json.loads(Elements(reporthtml.render_html(example())).scripts[0])
    assert data["metrics"]["series"][0]["loss"] == [2.0, None, 0.5]


def test_a_report_allows_its_own_script_and_style_and_nothing_else() -> None:
    policy = reporthtml.content_security_policy()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert re.search(
        r'http-equiv="Content-Security-Policy" content="([^"]+)"', reporthtml.render_html(example())
    )


def test_a_report_can_be_written_whatever_bytes_a_log_held() -> None:
    reporthtml.render_html(example()).encode()
    reporttext.render_markdown(example()).encode()


def test_no_line_of_a_log_ends_the_fence_of_a_markdown_report() -> None:
    text = reporttext.render_markdown(example())
    fences = [line for line in text.splitlines() if re.match(r"`{3,}", line)]
    assert [re.sub("[^`]", "", fence) for fence in fences] == ["````", "````"], (
        "longer than what is in between"
    )


def test_no_text_breaks_a_table_of_a_markdown_report_or_is_markup_in_it() -> None:
    text = reporttext.render_markdown(example()).split("## End of the log")[0]
    assert "<script" not in text.replace("\\<", "")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    for block in text.split("\n\n"):
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines() if line.startswith("|")}
        assert len(columns) <= 1, block
    assert len(rows) > 10


# --- What is in it -------------------------------------------------------------------------------


def test_a_curve_of_blocks_goes_the_way_of_its_values() -> None:
    assert reporttext.spark([3.0, 2.1, 1.0]) == "█▅▁"
    assert reporttext.spark([1.0, 1.0]) == "▁▁"
    assert reporttext.spark([]) == ""
    assert len(reporttext.spark([float(i) for i in range(1000)])) == reporttext.SPARK_WIDTH


def test_values_at_the_ends_of_what_a_number_can_be_have_a_curve() -> None:
    assert reporttext.spark([5e-324, 0.0]) == "█▁"
    assert reporttext.spark([1e-310, 2e-310]) == "▁█"
    assert reporttext.spark([9e299, -9e299]) == "█▁"
    assert reporttext.block(1e308, -1e308, 1e308) == "▁", "how far it is cannot be said"


SHOWN = (
    *("25.00%", "20261117-024918-8a96", "1 min 15 s", "3 of 9", "attempt 2"),
    *("| 0.25 ms | 940 Mbit/s |", "| 0-1 | python ", "meet at 10.0.0.1:29500, code cdcdcdcdcdcd."),
    *("Not ready on 2001-09-09 01:46:40 UTC: 1 failed, 1 passed.", "| clock failed |", "Not heard of: "),
    *("| 3 | – | unknown | 2 |", "| 1.5 kB | 2001-09-09 01:46:40 UTC |"),
)


@pytest.mark.parametrize("part", SHOWN)
def test_a_markdown_report_says_what_came_out(part: str) -> None:
    assert part in reporttext.render_markdown(example(accuracy=0.25))


def test_what_the_hosts_of_a_run_share_is_told_once_and_as_it_is() -> None:
    options = {"environment": ["python /opt/my env/bin/python"] * 2, "hosts": ["a", "b"], "--lr": "0.1"}
    assert reporttext.options({"options": options}) == [
        ("environment", "python /opt/my env/bin/python"),
        ("hosts", "a, b"),
        ("--lr", "0.1"),
    ]


def test_only_what_is_longer_than_a_word_may_be_broken_anywhere() -> None:
    text = reporthtml.render_html(example(options={"state": "exit code 1, failed", "sum": "ab" * 32}))
    assert "<td>exit code 1, failed</td>" in text
    assert f'<td class="long">{"ab" * 32}</td>' in text


def test_a_run_of_which_nothing_is_known_has_a_report() -> None:
    run = {"run": "20261117-024918-8a96", "state": "queued", "world": 2}
    data = {**example(), "run": run, "metrics": {"series": []}, "log": {"lines": [], "more": False}}
    assert "queued" in reporttext.render_markdown(data)
    assert "20261117-024918-8a96" in reporthtml.render_html(data)


def test_the_report_of_a_run_that_nobody_recorded_has_its_curves_and_its_log(tmp_path: Path) -> None:
    launch([sys.executable, "-c", TRAINS], options=["--name", "mine", "--no-prefork"])
    data = json.loads(ringctl("report", "mine", "--json").stdout)
    assert data["report"] == 1
    assert data["run"]["state"] == "succeeded"
    assert {one["rank"] for one in data["metrics"]["series"]} == {0, 1}
    assert data["metrics"]["series"][0]["loss"][-1] == pytest.approx(0.05)
    assert sorted(line[6] for line in data["log"]["lines"]) == [
        f"rank {rank} says <b>hello</b>" for rank in (0, 1)
    ]
    assert "| accuracy | 0.7 | ▁█ | 0.9 |" in ringctl("report", "mine", "--markdown").stdout
    ringctl("report", "mine", "--out", "mine.html", cwd=tmp_path)
    assert "&lt;b&gt;hello" in (tmp_path / "mine.html").read_text()


def test_what_is_no_file_is_written_to_and_a_link_stays_one(tmp_path: Path) -> None:
    pipe, file, link = (tmp_path / name for name in ("pipe", "file", "link"))
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    cli_report.write(pipe, "whole")
    assert os.read(reader, 100) == b"whole"
    os.close(reader)
    file.write_text("before")
    file.chmod(0o600)
    link.symlink_to(file)
    cli_report.write(link, "new")
    (tmp_path / "dangling").symlink_to(tmp_path / "made")
    cli_init.write(tmp_path / "dangling", "first", force=True)
    cli_init.write(link, "newer", force=True)
    assert (pipe.is_fifo(), link.is_symlink(), file.read_text()) == (True, True, "newer")
    with open(file, "a") as opened:
        cli_report.write(Path(f"/dev/fd/{opened.fileno()}"), " and more")
    assert file.read_text() == "newer and more", "whoever has it open is not left with a file that is gone"
    assert (file.stat().st_mode & 0o777, (tmp_path / "made").read_text()) == (0o600, "first")


def test_a_report_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    launch([sys.executable, "-c", "print(1)"], world=1, options=["--no-prefork"])
    done = ringctl("report", "--out", str(tmp_path / "not" / "there.html"), code=2)
    assert "there.html: cannot be written: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


@needs_chromium
def test_a_report_opens_in_a_browser_without_any_request_or_complaint(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(reporthtml.render_html(example()))
    with browsing() as browser:
        browser.open(f"file://{tmp_path}/report.html")
        browser.wait(lambda: browser.all("svg.curves path.line"), "a curve")
        assert browser.requests() == []
        assert browser.complaints() == []
        assert browser.script("return window.hit") is None
        assert browser.all("svg.ring .knot")
        assert skipped_headings(browser) == []
        browser.size(390, 844, dark=True)
        assert browser.script("return document.documentElement.scrollWidth <= innerWidth"), (
            "wider than a phone"
        )
