"""Saving beside the training: the loop takes a copy of its state, and a thread brings it to the disk.

There is one such thread on a rank at most, and the threads of all ranks agree in a group of their own, so
that what they say cannot mix with what the training says.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from trainer import group
from trainer.checkpoint import Checkpoints
from trainer.checkpoint_files import copied
from trainer.config import Config
from trainer.errors import TrainerError

CLOSE_S = 5.0  # how long a save under way may take to end after the training has failed


@contextmanager
def saving(checkpoints: Checkpoints, config: Config) -> Iterator[Saver]:
    """What saves beside the training inside the block. However that ends, nothing waits for it for long."""
    saver = Saver(checkpoints, group.another(config.timeout) if config.checkpoint_every else None)
    try:
        yield saver
    finally:
        saver.close()


class Saver:
    """Saves one checkpoint after the other. All ranks call its methods at the same time."""

    def __init__(self, checkpoints: Checkpoints, among: dist.ProcessGroup | None) -> None:
        self.folder = checkpoints.folder
        self._checkpoints = checkpoints
        self._among = among
        self._thread: threading.Thread | None = None
        self._step = 0
        self._is_saved = True
        self._failure: BaseException | None = None

    def save(self, step: int, epoch: int, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Save these as they are now. Returns at once, or when the save before this is done."""
        self.wait()
        self._step = step
        kept = copied(shared if self._checkpoints.writes_model else {}), copied(own)
        # It must not keep the process alive when another part of it has failed.
        self._thread = threading.Thread(
            target=self._work, args=(step, epoch, *kept), name="checkpoints", daemon=True
        )
        self._thread.start()

    def wait(self) -> bool:
        """Return when nothing is under way: whether the last save succeeded. Raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return self._is_saved

    def close(self) -> None:
        """End this. What the training had no time to hear of is told."""
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                self._tell("the other ranks, or a disk, did not answer in time")
                return
        if self._failure is not None:
            try:
                with group.explained("another rank is gone"):
                    raise self._failure
            except TrainerError as error:
                self._tell(str(error))
            except BaseException:
                self._tell(traceback.format_exc())
        elif self._among is not None:
            dist.destroy_process_group(self._among)

    def _work(self, step: int, epoch: int, shared: dict[str, Any], own: dict[str, Any]) -> None:
        try:
            self._is_saved = self._checkpoints.save(step, epoch, shared, own, self._among)
        except BaseException as error:  # `wait` raises it where it is expected, or `close` tells it
            self._failure = error

    def _tell(self, why: str) -> None:
        text = f"rank {group.rank()} could not finish the checkpoint of step {self._step}: {why}"
        print(f"trainer: warning: {text}", file=sys.stderr, flush=True)
