"""The process group of all ranks: joining and leaving it, and the few things all ranks do together.

With one rank there is no group, and everything here is a no-op.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from trainer import device
from trainer.config import Config
from trainer.errors import InputError, TrainerError

TELL_S = 5.0  # whoever has not come by then is named
LATER_S = 3.0  # rank 0 waits so much longer: a rank that cannot reach it knows more than that it is missing
MEETING = "ringctl/meeting"  # where rank 0 says who meets in a store
REFUSED = "ringctl/refused"  # where a rank says why they cannot
ANY_TEXT = "surrogatepass"  # the path of a file need not be UTF-8


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def joined(config: Config, store: Store | None = None) -> Iterator[None]:
    """Be a member of the group inside the block; TrainerError if the others do not come, or go away. They
    meet in `store`, or where `config` says."""
    if config.world_size == 1:
        yield
        return
    if config.gloo_socket_ifname:
        os.environ["GLOO_SOCKET_IFNAME"] = config.gloo_socket_ifname
    with explained(f"rank {config.rank} could not meet the other {config.world_size - 1}"):
        store = meeting_place(config) if store is None else store
        if store is not None:
            _wait_until_all_are_here(store, config)
        dist.init_process_group(
            device.backend(config),
            init_method=config.init_method if store is None else None,
            store=store,
            rank=config.rank,
            world_size=config.world_size,
            timeout=timedelta(seconds=config.timeout),
        )
    with explained(f"rank {config.rank} lost another rank, whose own output says why"):
        yield
        dist.barrier()  # nobody leaves while another still needs it
        dist.destroy_process_group()


def meeting_place(config: Config) -> Store | None:
    """Where the ranks meet, or None where torch has to find it: in a file, or in torchrun's own store."""
    if config.init_method == "env://":
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return None
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    else:
        url = urlsplit(config.init_method)
        if url.scheme != "tcp" or not url.hostname or not url.port:
            return None
        host, port = url.hostname, url.port
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]  # torch does not declare it
            host,
            port,
            config.world_size,
            is_master=config.rank == 0,
            timeout=timedelta(seconds=config.timeout),
            wait_for_workers=False,  # torch would wait without a word, and then not know for whom
        )
    except dist.DistNetworkError as error:
        if config.rank == 0 and "EADDRINUSE" in str(error):
            taken = f"rank 0 is there already, or something else has port {port}"
            raise InputError(f"{taken} (address already in use): end it, or take another port") from None
        raise


def _wait_until_all_are_here(store: Store, config: Config) -> None:
    """Return when every rank has come; rank 0 says for whom it waits. TrainerError names who did not come,
    InputError who does not belong here."""
    if config.rank == 0:
        meeting = {"run": config.run, "attempt": config.attempt, "world_size": config.world_size}
        store.set(MEETING, json.dumps(meeting))
    _wait_for({0: MEETING}, store, config)
    _refuse_strangers(json.loads(store.get(MEETING)), store, config)
    if store.add(f"{_here(config.rank)}/times", 1) > 1:
        raise InputError(
            f"a process with rank {config.rank} came before: give each process a rank of its own; "
            "if that one has ended, start all ranks again"
        )
    store.set(_here(config.rank), "")
    _wait_for({number: _here(number) for number in range(config.world_size)}, store, config)


def _refuse_strangers(meeting: Mapping[str, Any], store: Store, config: Config) -> None:
    """Raise InputError if this rank is of another run than rank 0, or was told another number of ranks."""
    ours, theirs = _origin(config.run, config.attempt), _origin(meeting["run"], meeting["attempt"])
    if ours != theirs:
        raise InputError(
            f"rank {config.rank} belongs to {ours}, but here meets {theirs}: two runs use the same port"
        )
    if config.world_size != meeting["world_size"]:
        said = f"rank {config.rank} has world size {config.world_size}, and rank 0 {meeting['world_size']}"
        why = f"{said}: start all ranks with the same"
        store.set(REFUSED, why)
        raise InputError(why)


def _origin(run: str, attempt: int) -> str:
    return f"attempt {attempt} of run {run}" if run else "a run that was started by hand"


def _wait_for(keys: Mapping[int, str], store: Store, config: Config) -> None:
    """Return when each of these ranks has set its key; rank 0 says for whom it waits."""
    patience = config.timeout + (min(LATER_S, config.timeout / 2) if config.rank == 0 else 0.0)
    began, tell_at, pause = time.monotonic(), TELL_S, 0.002
    while not store.check(list(keys.values())):
        if store.check([REFUSED]):
            raise InputError(store.get(REFUSED).decode())
        waited = time.monotonic() - began
        if waited >= min(patience, tell_at):
            missing = [number for number, key in keys.items() if not store.check([key])]
            if missing and waited >= patience:
                raise TrainerError(
                    f"rank {config.rank} could not meet the other {config.world_size - 1}: "
                    f"{_not_come(missing)} within {patience:g} s"
                )
            if missing and config.rank == 0:
                print(f"trainer: still waiting: {_not_come(missing)}", file=sys.stderr, flush=True)
            tell_at *= 2
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _here(number: int) -> str:
    return f"ringctl/here/{number}"


def _not_come(missing: Sequence[int]) -> str:
    names = ", ".join(map(str, missing))
    return f"ranks {names} have not come" if len(missing) > 1 else f"rank {names} has not come"


def wait_for_all(seconds: float) -> None:
    """Return when every rank has come here; fail, naming those that have not, after `seconds`."""
    if dist.is_initialized() and dist.get_backend() != "gloo":
        dist.barrier()  # the other backends have none that names who is missing
    elif dist.is_initialized():
        dist.monitored_barrier(timeout=timedelta(seconds=seconds), wait_all_ranks=True)


def another(seconds: float) -> dist.ProcessGroup | None:
    """A group of the same ranks, for what a thread says beside the training. All ranks must call it."""
    if not dist.is_initialized():
        return None
    made: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    return made


def copy_from_rank_0(tensor: Tensor) -> None:
    copy_from(0, tensor)


def copy_from(source: int, tensor: Tensor) -> None:
    """Replace `tensor` by the one of rank `source`."""
    if dist.is_initialized():
        dist.broadcast(tensor, src=source)


def copy_bytes_from(source: int, raw: bytes) -> bytes:
    """What rank `source` gave to this."""
    length = torch.tensor(len(raw))
    copy_from(source, length)
    content = torch.zeros(int(length), dtype=torch.uint8)
    if rank() == source:
        content = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    copy_from(source, content)
    return content.numpy().tobytes()


def add_over_ranks(tensor: Tensor) -> None:
    """Replace `tensor` by its sum over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def gather_texts(own: str, among: dist.ProcessGroup | None = None) -> list[str]:
    """What every rank said, in their order. All ranks must call it, with the same group of theirs."""
    if not dist.is_initialized():
        return [own]
    raw = torch.tensor(list(own.encode(errors=ANY_TEXT)), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world())]
    dist.all_gather(lengths, torch.tensor([len(raw)]), group=among)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(raw)] = raw
    texts = [torch.empty_like(padded) for _ in lengths]
    if longest:
        dist.all_gather(texts, padded, group=among)
    return [
        bytes(text[: int(length)].tolist()).decode(errors=ANY_TEXT)
        for text, length in zip(texts, lengths, strict=True)
    ]


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn torch's and gloo's complaints about the network into a TrainerError that keeps their words."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise  # a mistake in this code, or in a model
        reason = str(error).partition(" This is typically caused by")[0].strip()
        raise TrainerError(f"{what}: {reason}") from error
