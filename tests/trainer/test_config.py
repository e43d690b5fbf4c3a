"""The options: what is accepted, and what is refused before torch is even imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trainer
from tests.trainer import idx
from trainer.compress import FORMATS
from trainer.config import Config, parse
from trainer.errors import InputError
from trainer.models import MODELS
from trainer.sync import STRATEGIES

MAIN = Path(trainer.__file__).parent / "__main__.py"
RANK = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23456"}

BAD_OPTIONS = [
    (["--sync", "rnig"], "--sync cannot be 'rnig'; did you mean ring?"),
    (["--sync", "all_redcue"], "--sync cannot be 'all_redcue'; did you mean all-reduce?"),
    (["--compress", "zip9"], "--compress cannot be 'zip9'; it is one of none"),
    (["--compress", "int_9"], "--compress cannot be 'int_9'; did you mean int8?"),
    (
        ["--sync", "naive-ring", "--compress", "int8"],
        "--sync naive-ring cannot carry --compress int8: it would round the growing sum again at every rank; "
        "use --sync ring",
    ),
    (["--sync", "serial", "--compress", "fp16"], "--sync serial cannot carry --compress fp16: one process"),
    (["--sync", "ddp", "--compress", "topk"], "--sync ddp cannot carry --compress topk: of torch's own"),
    (["--sync", "ddp", "--compress", "auto"], "--sync ddp cannot carry --compress auto"),
    (["--sync", "ring", "--device", "cuda"], "--sync ring passes messages between CPUs and cannot take"),
    (["--sync", "ring", "--backend", "nccl"], "--backend nccl is between GPUs; use gloo"),
    (
        ["--sync", "serial", "--rank", "0", "--world-size", "2", "--init-method", "tcp://h:80"],
        "--sync serial is for one process alone, and there are 2 ranks; use ring",
    ),
    (["--topk-ratio", "0"], "--topk-ratio must be a number above 0 and at most 1, not '0'"),
    (["--topk-ratio", "1.5"], "--topk-ratio must be a number above 0 and at most 1, not '1.5'"),
    (["--powersgd-rank", "0"], "--powersgd-rank must be a whole number from 1 to 1024, not '0'"),
    (["--bucket-mb", "0"], "--bucket-mb must be a number above 0 and at most 1e+06, not '0'"),
    (["--on-nonfinite", "hide"], "--on-nonfinite cannot be 'hide'; it is one of raise, skip"),
    (["--check-sync", "-1"], "--check-sync must be a whole number from 0 on, not '-1'"),
    (["--device", "gpu"], "--device cannot be 'gpu'; "),
    (["--backend", "glow"], "--backend cannot be 'glow'; did you mean gloo?"),
    (["--model", "bncnn"], "--model cannot be 'bncnn'; did you mean bn-cnn?"),
    (["--data", "/no/such/folder"], "--data '/no/such/folder' is not a folder"),
    (["--data", ""], "--data '' is not a folder"),
    (["--data", "."], "--data '.' lacks MNIST's files"),
    (["--epochs", "0"], "--epochs must be a whole number from 1 on, not '0'"),
    (["--epochs", "1.5"], "--epochs must be a whole number from 1 on, not '1.5'"),
    (["--epochs"], "--epochs needs a value"),
    (["--steps", "-3"], "--steps must be a whole number from 1 on, not '-3'"),
    (["--batch-size", "many"], "--batch-size must be a whole number from 1 to 1000000000, not 'many'"),
    (["--batch-size", str(10**30)], "--batch-size must be a whole number from 1 to 1000000000, not '1000"),
    (["--lr", "0"], "--lr must be a number above 0 and at most 1e+30, not '0'"),
    (["--lr", "nan"], "--lr must be a number above 0 and at most 1e+30, not 'nan'"),
    (["--lr", "1e308"], "--lr must be a number above 0 and at most 1e+30, not '1e308'"),
    (["--momentum", "1"], "--momentum must be a number at least 0 and below 1, not '1'"),
    (["--seed", "-1"], "--seed must be a whole number from 0 to 4294967295, not '-1'"),
    (["--threads", "0"], "--threads must be a whole number from 1 to 1024, not '0'"),
    (["--timeout", "1e-7"], "--timeout must be a number at least 0.1 and at most 86400, not '1e-7'"),
    (["--resume="], "--resume needs a value"),
    (["--checkpoint-dir", ""], "--checkpoint-dir needs a value"),
    (["--checkpoint-copies", "-1"], "--checkpoint-copies must be a whole number from 0 on, not '-1'"),
    (["--epoch", "3"], "there is no option --epoch; did you mean --epochs?"),
    (["--xyzzy=3"], "there is no option --xyzzy; see --help"),
    (["train"], "'train' is not an option"),
    (
        ["--init-method", "10.0.0.1:80"],
        "--init-method must be like tcp://192.168.0.1:23456, not '10.0.0.1:80'",
    ),
    (["--init-method", "tcp://10.0.0.1"], "--init-method must be like tcp://"),
    (["--init-method", "tcp://10.0.0.1:99999"], "--init-method must be like tcp://"),
    (["--init-method", "tcp://10.0.0.1:80", "--world-size", "2"], "the rank is missing: give --init-method"),
    (["--init-method", "tcp://10.0.0.1:80", "--rank", "0"], "the world size is missing"),
    (["--rank", "2", "--world-size", "2"], "rank 2 is outside the 2 ranks 0 to 1"),
    (["--rank", "1", "--world-size", "2"], "rank 1 does not know where the 2 ranks meet"),
    (["--rank", "-1", "--world-size", "2"], "--rank must be a whole number from 0 on, not '-1'"),
    (["--world-size", "0"], "--world-size must be a whole number from 1 on, not '0'"),
    (["--gloo_socket_ifname", "eth99"], "--gloo-socket-ifname names 'eth99', but this machine has"),
]

BAD_VARIABLES = [
    ({"RANK": ""}, "the rank is missing"),
    (
        {"WORLD_SIZE": "four"},
        "the environment variable WORLD_SIZE must be a whole number from 1 on, not 'four'",
    ),
    ({"RANK": "4"}, "rank 4 is outside the 4 ranks 0 to 3"),
    ({"MASTER_ADDR": ""}, "rank 1 does not know where the 4 ranks meet"),
    (
        {"RINGCTL_FIRST_WORLD": "0"},
        "the environment variable RINGCTL_FIRST_WORLD must be a whole number from 1 on, not '0'",
    ),
    ({"MASTER_PORT": "65536"}, "the environment variable MASTER_PORT must be a whole number from 1 to 65535"),
]


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which importing torch ends the process."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "torch.py").write_text("import os; os._exit(99)")
    environ = {name: value for name, value in os.environ.items() if name not in RANK}
    return environ | {"PYTHONPATH": str(tmp_path / "blocked")}


def run(
    options: list[str], environ: dict[str, str], folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(MAIN), *options]
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=[" ".join(bad) for bad, _ in BAD_OPTIONS])
def test_a_wrong_option_is_one_sentence_and_exit_code_2_before_torch_is_imported(
    options: list[str], message: str, without_torch: dict[str, str], tmp_path: Path
) -> None:
    done = run(options, without_torch, tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"trainer: {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=[" ".join(bad) for bad, _ in BAD_OPTIONS])
def test_check_refuses_the_same_options(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="^" + re.escape(message)):
        parse(["--check", *options], {})


@pytest.mark.parametrize(("change", "message"), BAD_VARIABLES, ids=[message for _, message in BAD_VARIABLES])
def test_a_wrong_variable_is_one_sentence_and_exit_code_2_before_torch_is_imported(
    change: dict[str, str], message: str, without_torch: dict[str, str]
) -> None:
    done = run([], without_torch | RANK | change)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"trainer: {message}")
    assert done.stderr.count("\n") == 1


def test_check_accepts_right_options_without_torch_and_without_the_environment_of_a_rank(
    without_torch: dict[str, str], tmp_path: Path
) -> None:
    mine = idx.write(tmp_path / "mine", idx.mnist())
    done = run(["--check", "--sync", "all_reduce", "--data", str(mine)], without_torch | {"RANK": "7"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_block_on_torch_used_above_works(without_torch: dict[str, str]) -> None:
    assert run(["--steps", "1"], without_torch).returncode == 99


def test_help_names_every_choice_and_does_not_import_torch(without_torch: dict[str, str]) -> None:
    done = run(["--help"], without_torch)
    assert done.returncode == 0
    for name in (*STRATEGIES, *FORMATS, *MODELS):
        assert name in done.stdout


def test_alone_it_is_the_only_rank() -> None:
    assert parse([], {"OMP_NUM_THREADS": "3"}) == Config(threads=3)


def test_options_are_the_same_with_dashes_and_underscores() -> None:
    with_dashes = "--init-method tcp://h:80 --rank 1 --world-size 2 --gloo-socket-ifname lo --batch-size 8"
    with_underscores = (
        "--init_method=tcp://h:80 --rank 1 --world_size=2 --gloo_socket_ifname lo --batch_size=8"
    )
    config = parse(with_dashes.split(), {})
    assert config == parse(with_underscores.split(), {})
    assert (config.rank, config.world_size, config.init_method) == (1, 2, "tcp://h:80")
    assert (config.gloo_socket_ifname, config.batch_size) == ("lo", 8)


def test_values_keep_their_underscores(tmp_path: Path) -> None:
    mine = idx.write(tmp_path / "my_data", idx.mnist())
    assert parse([f"--data={mine}"], {}).data == str(mine)


def test_the_rank_comes_from_torchruns_variables() -> None:
    config = parse([], RANK)
    assert (config.rank, config.world_size, config.init_method) == (1, 4, "env://")


def test_ranks_of_a_torchrun_or_a_script_do_not_count_from_the_ranks_that_ringctl_started() -> None:
    told = {"RINGCTL_FIRST_WORLD": "8"}
    assert parse([], RANK | told).first_world == 8
    assert parse([], RANK | told | {"TORCHELASTIC_RUN_ID": "none"}).first_world is None
    by_script = ["--rank", "0", "--world-size", "2", "--init-method", "tcp://10.0.0.2:80"]
    assert parse(by_script, RANK | told).first_world is None
    assert parse(by_script, told).first_world is None


def test_options_win_over_variables() -> None:
    config = parse(["--rank", "0", "--world-size", "2", "--init-method", "tcp://10.0.0.2:80"], RANK)
    assert (config.rank, config.world_size, config.init_method) == (0, 2, "tcp://10.0.0.2:80")


def test_a_world_of_one_needs_no_place_to_meet() -> None:
    config = parse([], {"RANK": "0", "WORLD_SIZE": "1"})
    assert (config.world_size, config.init_method) == (1, "")


@pytest.mark.parametrize("variable", ["", "4,2", "lots"])
def test_without_a_plain_number_of_threads_the_usable_cores_count(variable: str) -> None:
    assert parse([], {"OMP_NUM_THREADS": variable}).threads == len(os.sched_getaffinity(0))
    assert parse(["--threads", "5"], {"OMP_NUM_THREADS": variable}).threads == 5


@pytest.mark.parametrize("name", ["all-reduce", "all_reduce"])
def test_a_name_may_have_dashes_or_underscores(name: str) -> None:
    assert parse(["--sync", name], {}).sync == "all-reduce"
