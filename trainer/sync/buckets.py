"""Cut the flat gradients into buckets: those that a backward pass fills first travel first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """The elements from `start` up to `end`."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def overlaps(self, other: Span) -> bool:
        return self.start < other.end and other.start < self.end


def cut(spans: Sequence[Span], whole: Span, least: int, block: int = 1) -> list[Span]:
    """Spans that together make up `whole`, from its end to its start, where a backward pass arrives last.

    Each holds whole parameters (`spans`, in order) of at least `least` elements together; what is left at the
    start may be less. They begin at multiples of `block` counted from the start of `whole`: the odd elements
    go with the bucket that is full later.
    """
    buckets = []
    end = whole.end
    for span in reversed(spans):
        start = whole.start + -(-(span.start - whole.start) // block) * block
        if end - start >= least and start > whole.start:
            buckets.append(Span(start, end))
            end = start
    if end > whole.start:
        buckets.append(Span(whole.start, end))
    return buckets


def shares(count: int, parts: int, block: int = 1) -> list[Span]:
    """`count` elements in `parts` spans as equal as whole blocks allow, the larger ones first."""
    blocks = -(-count // block)
    size, more = divmod(blocks, parts)
    edges = [0]
    for part in range(parts):
        edges.append(edges[-1] + size + (part < more))
    return [Span(min(a * block, count), min(b * block, count)) for a, b in itertools.pairwise(edges)]


def pieces(span: Span, parts: int, block: int = 1) -> list[Span]:
    """A span in so many pieces."""
    return [
        Span(span.start + piece.start, span.start + piece.end) for piece in shares(len(span), parts, block)
    ]
