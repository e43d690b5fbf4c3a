from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import given

from trainer.sync.buckets import Span, cut, pieces, shares


def spans_of(sizes: list[int], start: int = 0) -> list[Span]:
    edges = list(itertools.accumulate(sizes, initial=start))
    return [Span(a, b) for a, b in itertools.pairwise(edges)]


@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=8), st.integers(1, 900), st.sampled_from([1, 4, 256])
)
def test_buckets_cover_everything_once_from_the_end(sizes: list[int], least: int, block: int) -> None:
    spans = spans_of(sizes, start=10)
    whole = Span(10, 10 + -(-sum(sizes) // block) * block)
    buckets = cut(spans, whole, least, block)
    assert [b.end for b in buckets] == [whole.end, *[b.start for b in buckets[:-1]]][: len(buckets)]
    assert not len(whole) or buckets[-1].start == whole.start
    assert all((b.start - whole.start) % block == 0 for b in buckets)
    assert all(len(b) >= least for b in buckets[:-1])


def test_a_large_parameter_does_not_wait_for_those_before_it() -> None:
    """As in mnist-cnn: the large layer is filled long before the convolutions."""
    conv, large, last = spans_of([18_000, 1_179_648, 1280])
    first, second = cut([conv, large, last], Span(0, 1_198_928), least=1_000_000, block=256)
    assert not first.overlaps(conv)
    assert len(first) > 0.99 * len(large)
    assert second == Span(0, first.start)


@given(st.integers(0, 5000), st.integers(1, 17), st.sampled_from([1, 4, 256]))
def test_shares_are_as_equal_as_whole_blocks_allow(count: int, parts: int, block: int) -> None:
    spans = shares(count, parts, block)
    assert len(spans) == parts
    assert [spans[0].start, *[span.end for span in spans]] == [*[span.start for span in spans], count]
    assert all(span.start % block == 0 or span.start == count for span in spans)
    assert len(spans[0]) - len(spans[-1]) < 2 * block
    assert max(map(len, spans)) == len(spans[0])


@given(st.integers(0, 100), st.integers(0, 3000), st.integers(1, 9))
def test_pieces_are_shares_of_a_span(start: int, count: int, parts: int) -> None:
    cut_up = pieces(Span(start, start + count), parts)
    assert [len(piece) for piece in cut_up] == [len(share) for share in shares(count, parts)]
    assert cut_up[0].start == start
