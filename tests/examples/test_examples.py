"""Every example, run as its own page says."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
from pathlib import Path

import pytest

from tests.launcher.ringctl import ringctl
from tests.trainer.ranks import each, free_port

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
RANKS = {
    "send_recv.py": 3,
    "average_gradients.py": 2,
    "broadcast_parameters.py": 3,
    "split_model.py": 2,
    "own_ddp.py": 2,
}


def launched(name: str) -> list[str]:
    """What its ranks print when ringctl launches it as the page says, without labels."""
    done = ringctl("launch", "--local", "--world", str(RANKS[name]), "--", "python", str(EXAMPLES / name))
    return [line.partition("] ")[2] for line in done.stdout.splitlines() if re.match(r"\[\d+ ", line)]


def said_by(name: str, *, world: int | None = None) -> list[str]:
    """What its ranks print, or give up with. They are forked from here, where torch is imported already."""
    ranks, port = world or RANKS[name], free_port()

    def as_rank(rank: int) -> list[str]:
        place = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in place.items()}, GLOO_SOCKET_IFNAME="lo")
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            try:
                runpy.run_path(str(EXAMPLES / name), run_name="__main__")
            except SystemExit as end:
                print(end)
        return said.getvalue().splitlines()

    return [line for said in each(ranks, as_rank) for line in said]


def test_every_example_is_run_here_and_on_its_page() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert files == set(RANKS)
    page = (EXAMPLES / "README.md").read_text()
    assert files == set(re.findall(r"^\| `(\w+\.py)`", page, re.M))


def test_a_tensor_goes_around_and_collects_every_rank() -> None:
    said = launched("send_recv.py")
    assert "the ranks' numbers add up to 3" in said
    assert "rank 2 got 1 and passed on 3" in said


def test_ranks_with_different_data_find_the_same_line() -> None:
    said = sorted(said_by("average_gradients.py"))
    assert said == ["rank 0 found y = 3.000 x + 1.000", "rank 1 found y = 3.000 x + 1.000"]


def test_all_ranks_end_with_what_rank_0_began_with() -> None:
    said = said_by("broadcast_parameters.py")
    began = {line.split()[1]: line.split()[-1] for line in said if "begins" in line}
    ended = {line.split()[1]: line.split()[-1] for line in said if "ends" in line}
    assert len(set(began.values())) == 3
    assert set(ended.values()) == {began["0"]}


def test_a_model_split_over_two_ranks_learns() -> None:
    (words,) = said_by("split_model.py")
    first, last = map(float, re.findall(r"\d+\.\d+", words))
    assert last < first / 4


def test_a_split_model_wants_two_ranks() -> None:
    said = said_by("split_model.py", world=3)
    assert said == ["this model has two parts, for two ranks; there are 3"] * 3


def test_a_users_own_ddp_script_keeps_its_ranks_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # torch leaves it behind
    said = launched("own_ddp.py")
    assert len({line.rpartition(" ")[2] for line in said}) == 1
    assert len(said) == 2


@pytest.mark.parametrize("name", sorted(RANKS))
def test_no_example_is_longer_than_two_screens(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= 70
