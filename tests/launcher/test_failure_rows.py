"""Failures of the catalogue that take one machine only, brought about for real, and explained. And for all of
the catalogue: each of its failures is brought about by a test, or it is said why that cannot be."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import traceback
import zipfile
from pathlib import Path
from typing import Any

import pytest

from launcher.catalogue import BY_ID
from launcher.diagnose import Cause
from tests.launcher import test_failure_rows_hosts, test_failures
from tests.launcher.failing import (
    by_hand,
    explained,
    failure,
    failure_and_screen,
    failure_together,
    produces,
    program,
    speak_to,
    together,
)
from tests.launcher.ringctl import detach, ringctl, state, wait_for
from tests.trainer.ranks import each, free_port

NOT_HERE: dict[str, str] = {}  # rows that no test can bring about on one machine, and why


def test_every_row_is_brought_about_by_a_test_or_it_is_said_why_not() -> None:
    modules = (test_failures, test_failure_rows_hosts, sys.modules[__name__])
    tests = [test for module in modules for name, test in vars(module).items() if name.startswith("test_")]
    produced = {id_ for test in tests for id_ in getattr(test, "rows", ())}
    assert produced - BY_ID.keys() == set(), "there is no such row"
    assert BY_ID.keys() - produced == NOT_HERE.keys(), "give each row a test, with @produces"
    assert all(NOT_HERE.values())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def of_one(command: list[str], id_: str, **options: Any) -> Cause:
    """Why a rank alone failed, which must be this."""
    cause = failure(command, prefork=False, **options)
    assert (cause.id, cause.rank, cause.host, cause.known) == (id_, 0, "localhost", True), cause
    return cause


# --- Looking for rank 0 --------------------------------------------------------------------------

OTHER_PORT = """
import socket
mine = socket.socket()
mine.bind(("127.0.0.1", 0))  # so that nobody listens there
if rank == 1: os.environ["MASTER_PORT"] = str(mine.getsockname()[1])
join()
"""


@produces("store_timeout")
def test_a_rank_that_dials_a_wrong_port_is_named_with_that_port() -> None:
    cause = failure_together(OTHER_PORT, timeout=1)
    assert (cause.rank, cause.host, cause.id) == (1, "localhost", "store_timeout")
    assert cause.text.startswith("rank 1 on localhost could not reach rank 0 at 127.0.0.1 port ")
    assert "; rank 0 on localhost was up and waited for it, so that is not the address and port" in cause.text
    assert "ringctl preflight" in cause.fix


@produces("stale_env")
def test_a_variable_left_from_torchrun_is_told_by_rank_0_looking_for_itself() -> None:
    left = "os.environ['TORCHELASTIC_USE_AGENT_STORE'] = 'True'\n"
    cause = by_hand(together(f"{left}join()", timeout=0.5), world=2)
    assert (cause.rank, cause.host, cause.id) == (0, "here", "stale_env")
    assert "`unset TORCHELASTIC_USE_AGENT_STORE`" in cause.fix


MEET = "store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), 2, rank == 0)\n"


@produces("store_died")
def test_a_rank_0_that_leaves_while_others_need_its_store_is_named() -> None:
    body = MEET + "join(store=store, rank=rank, world_size=2)\nrank == 0 and sys.exit()\nstore.get('rate')"
    cause, screen = failure_and_screen(together(body), world=2)
    assert (cause.rank, cause.host, cause.id) == (0, "localhost", "store_died")
    assert "rank 0 on localhost had ended by itself, without an error: the store" in cause.text
    assert "; rank 1 on localhost waited for it in `store.get('rate')`" in cause.text
    assert "dist.barrier()" in cause.fix
    alone = explained(screen.log_of(1))
    assert (alone.rank, alone.id) == (1, "store_died")
    assert "not in this log" in alone.fix


# --- Ways between ranks --------------------------------------------------------------------------

ELSEWHERE = """
import ctypes, subprocess
def move():  # to a machine of its own, as far as the network goes
    assert ctypes.CDLL(None, use_errno=True).unshare(0x40000000) == 0
"""
OWN_DEVICE = """
options = dist.ProcessGroupGloo._Options()
options._timeout = datetime.timedelta(seconds=0.3)
options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
dist.ProcessGroupGloo(store, rank, 2, options)
"""


@produces("no_route")
def test_an_address_that_no_route_leads_to_is_told() -> None:
    cause = by_hand(
        together(f"{ELSEWHERE}if rank == 1: move(); os.environ['MASTER_ADDR'] = '192.0.2.7'; join()", 0.3),
        world=2,
    )
    assert (cause.rank, cause.host, cause.id) == (1, "here", "no_route")
    assert "Network is unreachable" in cause.text
    assert "`data_address`" in cause.fix


@produces("refused")
def test_an_address_that_means_another_machine_here_is_told() -> None:
    move = "if rank == 1: move(); subprocess.run(['ip', 'link', 'set', 'lo', 'up'], check=True)\n"
    address = "address = '127.0.0.1' if rank else '127.0.0.2'"  # the larger one connects to the other
    cause = by_hand(together(f"{ELSEWHERE}{MEET}{move}{address}{OWN_DEVICE}"), world=2)
    assert (cause.rank, cause.host, cause.id) == (0, "here", "refused")
    assert "Connection refused, remote=[127.0.0.1]" in cause.text
    assert "ringctl preflight" in cause.fix


@produces("ipv6")
def test_ranks_with_addresses_of_two_families_are_told() -> None:
    cause = by_hand(together(f"{MEET}address = '::1' if rank else '127.0.0.1'{OWN_DEVICE}"), world=2)
    assert (cause.rank, cause.host, cause.id) == (0, "here", "ipv6")
    assert "numeric IPv4 addresses" in cause.fix


# --- What the program asks for -------------------------------------------------------------------


@produces("cuda_missing")
@pytest.mark.parametrize("wish", ["torch.ones(1).cuda()", "torch.distributed.init_process_group('nccl')"])
def test_a_gpu_that_is_not_there_is_told(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cause = by_hand(program(f"import torch\n{wish}\n"))
    assert (cause.rank, cause.host, cause.id) == (0, "here", "cuda_missing")
    assert [frame.text for frame in cause.trace] == [wish]
    assert '`backend="gloo"`' in cause.fix


@produces("torchvision_pair")
def test_a_torchvision_that_does_not_fit_torch_is_told() -> None:
    found = importlib.util.find_spec("torchvision")
    assert found is not None
    assert found.origin is not None
    os.mkdir("torchvision")
    for path in Path(found.origin).parent.iterdir():
        if path.suffix != ".so":  # without what was compiled for this torch it is one for another
            Path("torchvision", path.name).symlink_to(path)
    cause = of_one(program("import torchvision\n"), "torchvision_pair")
    assert "pip install --force-reinstall torch torchvision" in cause.fix


@produces("loss_nan")
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_training_that_diverges_is_told(nonfinite: str) -> None:
    options = ["--lr", "1e30", "--steps", "3", "--threads", "1", "--on-nonfinite", nonfinite]
    cause = by_hand(program(f"from trainer.__main__ import main\nmain({options})\n"))
    assert (cause.rank, cause.id) == (0, "loss_nan")
    assert "--lr" in cause.fix


@produces("unused_parameters")
@pytest.mark.usefixtures("with_ddp")
def test_layers_that_take_no_part_are_told(tmp_path: Path) -> None:
    def train(rank: int) -> str:
        import torch
        from torch import distributed as dist

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.used, self.unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.used(x)  # type: ignore[no-any-return]  # torch's modules are untyped

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=rank, world_size=2)
        model = torch.nn.parallel.DistributedDataParallel(Model())
        try:
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
        except RuntimeError:
            return traceback.format_exc()
        return ""

    for log in each(2, train):
        cause = explained(log)
        assert cause.id == "unused_parameters"
        assert "find_unused_parameters=True" in cause.fix
        assert [frame.text for frame in cause.trace] == ["model(torch.ones(1, 2)).sum().backward()"]


# --- What the host gives -------------------------------------------------------------------------


@produces("threads")
def test_threads_that_cannot_be_had_are_told() -> None:
    body = """
    import os, resource, threading
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    if os.getuid() == 0:
        os.setuid(65534)  # no limit holds for root
    threading.Thread(target=print).start()
    """
    _, path = program(body)
    assert "OMP_NUM_THREADS=1" in of_one([sys.executable, "-S", path], "threads").fix


@produces("conda_shell")
@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_a_conda_that_the_shell_does_not_know_is_told(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = os.environ["PATH"].split(":")
    monkeypatch.setenv("PATH", ":".join(f for f in folders if not Path(f, "conda").exists()))
    cause = of_one([shell, "-c", "conda activate fl38 && python train.py"], "conda_shell")
    assert "`env: {conda: NAME}`" in cause.fix


@produces("clock")
def test_a_clock_that_is_behind_is_told() -> None:
    body = """
    import datetime, ssl
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "server")])
    blank = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    begin, end = now + datetime.timedelta(hours=1), now + datetime.timedelta(hours=2)
    signed = blank.not_valid_before(begin).not_valid_after(end).sign(key, hashes.SHA256())
    pem = signed.public_bytes(serialization.Encoding.PEM)
    plain = serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    with open("server.pem", "wb") as file:
        file.write(pem + secret)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cadata=pem.decode())
    server.load_cert_chain("server.pem")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(back, there, server_hostname="server"), server.wrap_bio(there, back, True)]
    for end in ends * 2:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            pass
    """
    cause = of_one(program(body), "clock")
    assert "certificate is not yet valid" in cause.text
    assert "`timedatectl set-ntp true` as root on localhost" in cause.fix
    Path("Makefile").write_text("all:\n\ttrue\n")
    os.utime("Makefile", (1 << 32, 1 << 32))
    assert explained(subprocess.run(["make"], stderr=subprocess.PIPE, text=True).stderr).id == "clock"


@produces("python_old")
def test_a_python_that_is_too_old_for_a_package_is_told() -> None:
    wheel = "new_one-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        about = "Metadata-Version: 2.1\nName: new-one\nVersion: 1.0\nRequires-Python: >=99\n"
        file.writestr("new_one-1.0.dist-info/METADATA", about)
        file.writestr("new_one-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr("new_one-1.0.dist-info/RECORD", "")
    install = ["python", "-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--no-deps"]
    cause = of_one([*install, "--target", "here", str(Path(wheel).resolve())], "python_old")
    assert "name a newer one as `python` of localhost" in cause.fix


@produces("versions")
def test_pythons_that_do_not_understand_each_other_are_told() -> None:
    newer = bytes([0x80, pickle.HIGHEST_PROTOCOL + 1]) + b"N."  # as a later Python would send it
    Path("sent").write_bytes(newer)
    read = program("import pickle\npickle.load(open('sent', 'rb'))\n")
    assert "ringctl env create" in of_one(read, "versions").fix


# --- Who ends it, and who else is there ----------------------------------------------------------


@produces("logout_kill")
def test_a_supervisor_that_was_killed_is_told() -> None:
    run = detach(["sleep", "600"])
    os.kill(state(run)["hostd"]["pid"], signal.SIGKILL)

    def about() -> Any:
        return json.loads(ringctl("explain", run, "--json", code=None).stdout)

    told = wait_for(lambda: about()["id"] and about(), "its end")
    assert (told["id"], told["host"], told["explained"]) == ("logout_kill", "localhost", True)
    assert "the run was ended on localhost: its supervisor was killed (logind" in told["cause"]
    assert "`loginctl enable-linger` on localhost" in told["fix"]


@produces("two_runs", "rank_twice")
def test_strangers_and_doubles_at_the_meeting_are_told(tmp_path: Path) -> None:
    port = free_port()
    who = [(0, "mine"), (1, "yours"), (1, "mine"), (1, "mine")]  # of three: rank 2 never comes

    def start(number: int) -> None:
        from trainer.__main__ import main

        rank, run = who[number]
        speak_to(tmp_path / f"{number}.log")
        os.environ["RINGCTL_RUN"] = run
        place = ["--init-method", f"tcp://127.0.0.1:{port}", "--rank", str(rank), "--world-size", "3"]
        main([*place, "--gloo_socket_ifname", "lo", "--timeout", "1"])

    each(4, start)
    causes = [explained((tmp_path / f"{number}.log").read_text()) for number in range(4)]
    assert [causes[0].id, causes[1].id, *sorted(cause.id for cause in causes[2:])] == [
        "ranks",
        "two_runs",
        "rank_twice",
        "ranks",
    ]
    assert "run yours, but here meets attempt 1 of run mine" in causes[1].text
    assert "`ringctl ps`" in causes[1].fix
    double = next(cause for cause in causes if cause.id == "rank_twice")
    assert "start each rank once" in double.fix
