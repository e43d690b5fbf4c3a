"""What every strategy shares: the order of a step, and what happens to gradients that are not numbers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from trainer import group
from trainer.config import Config
from trainer.errors import TrainerError
from trainer.flat import Flat
from trainer.sync.buckets import Span, cut


class Strategy:
    """A way for the gradients of all ranks to become their mean. A step of every rank is

        strategy.begin()                    # gradients are zero
        loss(strategy.model(...)).backward()
        if strategy.finish(): ...           # gradients are the mean, the same bits on every rank

    Each process makes one, after it has joined the group; `close` it, also after a failure.
    """

    settles = False
    """Whether its first step adds in another order than all later ones, which may round differently."""

    def __init__(self, model: nn.Module, flat: Flat, config: Config) -> None:
        self.model = model
        """What to call for a forward pass; a strategy may wrap it."""
        self.flat = flat
        self.config = config
        self.rank, self.world = group.rank(), group.world()
        self.bytes_sent = 0
        """What this rank has handed to the network so far."""
        self.skipped = 0
        """Steps that `--on-nonfinite skip` left out."""
        self.notes: list[str] = []
        """What the strategy has to tell the user; whoever tells it empties the list."""
        self._bad: str = ""

    def begin(self) -> None:
        """Get ready for a backward pass."""
        self._bad = ""
        self.flat.gradients.zero_()

    def finish(self) -> bool:
        """Wait until the gradients are the mean. False if they are to be left alone, on all ranks alike."""
        self.meet()
        return finite(self.flat.gradients) or self._not_finite()

    def meet(self) -> None:
        """Make the gradients the mean over all ranks, the same bits on each."""
        raise NotImplementedError

    def last_step_done(self) -> None:
        """Note what is to be told of the run as a whole."""

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank alone knows and needs to go on as if never interrupted."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise TrainerError(f"there is no place for {', '.join(state)} with --sync {self.config.sync}")

    def forget_nonfinite(self) -> None:
        """Take out of the own memory what must not reach the next step."""

    def buckets(self, whole: Span, block: int = 1) -> list[Span]:
        """This part of the flat gradients in buckets of about `--bucket-mb`, in the order they are filled."""
        spans = [Span(slot.start, slot.end) for slot in self.flat.slots if slot.start >= whole.start]
        return cut(spans, whole, max(1, int(self.config.bucket_mb * 1e6 / 4)), block)

    def close(self) -> None:
        """End what runs beside the training."""

    def look(self, gradients: Tensor) -> None:
        """See whether this part of the flat gradients, still this rank's own, is where trouble begins.

        Whoever sends a part looks at it just before, when the processor needs it in its cache anyway.
        """
        if self._bad or finite(gradients):
            return
        start = gradients.storage_offset() - self.flat.gradients.storage_offset()
        for slot in self.flat.slots:
            inside = gradients[max(0, slot.start - start) : max(0, slot.end - start)]
            if not finite(inside):
                self._bad = slot.name
                return

    def _not_finite(self) -> bool:
        """Every rank holds the same mean, so every rank comes here, or none."""
        found = [f"rank {rank} in {name}" for rank, name in enumerate(group.gather_texts(self._bad)) if name]
        where = f"the gradient of {', '.join(found)}" if found else "the sum of all ranks' gradients"
        what = f"{where} has an infinity or a NaN"
        if self.config.on_nonfinite == "raise":
            raise TrainerError(f"{what}: try a smaller --lr, or leave out such steps: --on-nonfinite skip")
        self.skipped += 1
        self.forget_nonfinite()
        self.notes.append(f"{what}: step left out ({self.skipped} so far)")
        return False


def finite(values: Tensor) -> bool:
    """Whether there is no infinity and no NaN in them."""
    # A sum is many times faster to see, and finite only if all are. It may overflow by itself.
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
