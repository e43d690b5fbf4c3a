"""The ring: gradients in buckets that travel while the backward pass still runs.

Uncompressed buckets go around a real ring (rings.py). Compressed ones go straight to the rank that adds them
up (direct.py): as many bytes, but two roundings in all instead of one at every hop. Parameters of one
dimension always travel in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from trainer import compress
from trainer.compress.powersgd import PowerSGD
from trainer.config import Config
from trainer.errors import InputError, TrainerError
from trainer.flat import Flat
from trainer.sync.buckets import Span
from trainer.sync.choice import Choice
from trainer.sync.direct import DirectMean
from trainer.sync.overlap import Exchange, Overlapping
from trainer.sync.rings import RingMean


class Ring(Overlapping):
    """Averages in buckets of `--bucket-mb`, in the format that `--compress` names."""

    def __init__(self, model: nn.Module, flat: Flat, config: Config) -> None:
        super().__init__(model, flat, config)
        if config.compress != "none" and flat.gradients.dtype != torch.float32:
            raise InputError(f"--compress {config.compress} needs an fp32 model, not {flat.gradients.dtype}")
        self._residual: Tensor | None = None
        self._low_rank: PowerSGD | None = None
        self._tag = 0
        self._choice = Choice(compress.AUTO_CHOICES) if config.compress == compress.AUTO else None
        self.format = ""
        """The name of the format in use."""
        self._use_format(self._choice.trying if self._choice else config.compress)

    def begin(self) -> None:
        if self._choice is not None:
            self._choice.step_begins()
        super().begin()

    def finish(self) -> bool:
        sent_before = self.bytes_sent
        good = super().finish()
        if self._choice is not None:
            decided = self._choice.step_ends(self.bytes_sent - sent_before)
            if self._choice.trying != self.format:
                self._use_format(self._choice.trying)
            if decided:
                self.notes.append(decided)
                self._choice = None
        return good

    def last_step_done(self) -> None:
        if self._choice is not None:
            self.notes.append(self._choice.not_made())

    def state_dict(self) -> dict[str, Tensor]:
        if self._choice is not None:
            return {}  # who goes on from here measures the link anew
        state = {"format": torch.tensor(list(self.format.encode()), dtype=torch.uint8)}
        if self._residual is not None:
            state["residual"] = self._residual
        if self._low_rank is not None:
            state["low_rank"] = self._low_rank.right
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if not state and self._choice is not None:
            return
        name = bytes(state["format"].tolist()).decode()
        if self.config.compress not in (compress.AUTO, name):
            raise TrainerError(f"this was trained with --compress {name}, not {self.config.compress}")
        if self._choice is not None:
            self.notes.append(f"--compress auto stays with {name}, which it took before the checkpoint")
        self._choice = None
        self._use_format(name)
        if self._residual is not None:
            self._residual.copy_(state["residual"])
        if self._low_rank is not None:
            self._low_rank.right.copy_(state["low_rank"])

    def forget_nonfinite(self) -> None:
        """A step that is left out takes along what the residual had added to it; the rest stays."""
        if self._residual is not None:
            self._residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self.flat.matrices.zero_()  # also behind the last gradient, where a block of NaNs has left some
        if self._low_rank is not None:
            self._low_rank.start_anew()

    def _use_format(self, name: str) -> None:
        self.format = name
        self._residual = self._low_rank = None
        self._tag = 0
        self.use(list(self._exact() if name == "none" else self._compressed(name)))

    def _exact(self) -> Iterator[tuple[Span, Exchange]]:
        gradients = self.flat.gradients
        for span in self.buckets(Span(0, len(gradients))):
            yield span, self._tagged(RingMean(gradients[span.start : span.end], self._tag, self.look))

    def _compressed(self, name: str) -> Iterator[tuple[Span, Exchange]]:
        flat, first = self.flat, len(self.flat.vectors)
        matrices = Span(first, first + len(flat.matrices))
        if self.config.error_feedback and compress.load(name).feedback:
            self._residual = torch.zeros_like(flat.matrices)
        if name == compress.LOW_RANK:
            self._low_rank = PowerSGD(
                flat.matrices,
                self.look,
                self._shaped(flat.matrices),
                self._shaped(self._residual),
                self.config,
            )
            yield matrices, self._low_rank
        else:
            for span in self.buckets(matrices, compress.load(name).block):
                format = compress.create(name, self.config)  # each its own: one may begin as another goes on
                place = slice(span.start - first, span.end - first)
                residual = None if self._residual is None else self._residual[place]
                yield (
                    span,
                    self._tagged(DirectMean(flat.matrices[place], self._tag, self.look, format, residual)),
                )
        exact = compress.create("none", self.config)
        yield Span(0, first), self._tagged(DirectMean(flat.vectors, self._tag, self.look, exact))

    def _shaped(self, flat: Tensor | None) -> list[Tensor]:
        """A tensor like `flat.matrices` as one matrix for each parameter."""
        if flat is None:
            return []
        first = len(self.flat.vectors)
        return [
            flat[slot.start - first : slot.end - first].view(len(slot.parameter), -1)
            for slot in self.flat.slots
            if slot.start >= first and slot.end > slot.start
        ]

    def _tagged(self, exchange: RingMean | DirectMean) -> Exchange:
        """Give the next exchange tags that this one does not use."""
        self._tag += exchange.tags
        return exchange
