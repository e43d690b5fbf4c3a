"""The formats by themselves: what a message says of the values it was made of."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from trainer import compress
from trainer.compress import FORMATS, feedback
from trainer.compress.powersgd import orthogonal
from trainer.config import Config

CODES = [name for name in FORMATS if name != compress.LOW_RANK]
SCALED = ["fp16", "fp8-e4m3", "fp8-e5m2", "int8", "int4"]
ALL = Config(topk_ratio=1.0)
# The largest error of a value, as a share of the largest magnitude in its block of 256.
STEP = {"fp16": 16 / 65504, "fp8-e4m3": 16 / 448, "fp8-e5m2": 4096 / 57344, "int8": 1 / 254, "int4": 1 / 14}
# The largest error of a value as a share of itself.
RELATIVE = {"none": 0.0, "bf16": 2**-8, "topk": 0.0}
HUGE = float(torch.finfo(torch.float32).max)
TINY = float(torch.finfo(torch.float32).tiny)


def through(name: str, values: Tensor, config: Config = ALL) -> Tensor:
    """The values after a journey."""
    format = compress.create(name, config)
    message = torch.empty(format.size(len(values)), dtype=torch.uint8)
    before = values.clone()
    format.encode(values, message)
    assert torch.equal(values.view(torch.int32), before.view(torch.int32)), "encoding changed the values"
    decoded = torch.full_like(values, 7.0)
    format.decode(message, decoded)
    added = torch.ones_like(values)
    format.add(message, added)
    torch.testing.assert_close(added, decoded + 1, equal_nan=True)
    return decoded


def normal(count: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(SCALED),
    blocks=st.integers(0, 5),
    scales=st.lists(st.floats(-30, 30), min_size=5, max_size=5),
    seed=st.integers(0, 1000),
)
def test_no_value_is_off_by_more_than_half_a_step_of_its_own_block(
    name: str, blocks: int, scales: list[float], seed: int
) -> None:
    values = normal(256 * blocks, seed=seed).view(blocks, 256)
    values *= 10 ** torch.tensor(scales[:blocks]).view(blocks, 1)
    error = (through(name, values.view(-1)).view(blocks, 256) - values).abs()
    largest = values.abs().max(dim=1, keepdim=True).values
    assert bool((error <= 1.001 * STEP[name] * largest).all())


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_formats_without_a_scale_keep_each_value_by_itself(name: str, scale: float) -> None:
    values = normal(1024, scale)
    assert bool(((through(name, values) - values).abs() <= RELATIVE[name] * values.abs()).all())


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("value", [0.5, 1.0, -3.0, 1e-20, 1e20, HUGE, -HUGE, TINY * 1e6])
def test_a_value_that_is_the_largest_of_its_block_comes_back_as_it_was(name: str, value: float) -> None:
    values = torch.zeros(512)
    values[300] = value
    decoded = through(name, values)
    assert float(decoded[300]) == pytest.approx(value, rel=1e-6)
    assert int(decoded.count_nonzero()) == 1


@pytest.mark.parametrize("name", CODES)
def test_zeros_stay_zeros_and_values_too_small_for_normal_numbers_stay_small(name: str) -> None:
    assert not through(name, torch.zeros(512)).any()
    decoded = through(name, torch.full((512,), TINY / 1000))
    assert bool((decoded.abs() <= TINY).all())


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_does_not_come_back_as_a_number_nor_reach_other_blocks(
    name: str, bad: float
) -> None:
    values = normal(768)
    values[300] = bad
    decoded = through(name, values, Config(topk_ratio=0.1))
    assert not bool(decoded[300].isfinite())
    assert bool(decoded[:256].isfinite().all())
    assert bool(decoded[512:].isfinite().all())


@pytest.mark.parametrize("name", CODES)
def test_a_message_has_the_size_that_was_promised_and_is_smaller(name: str) -> None:
    format = compress.create(name, Config())
    bits = {"none": 32, "fp16": 16.125, "bf16": 16, "int4": 4.125, "topk": 0.48}.get(name, 8.125)
    assert format.size(25600) * 8 / 25600 == pytest.approx(bits, rel=0.01)
    assert format.size(0) == 0


@pytest.mark.parametrize("name", SCALED)
def test_part_of_a_block_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="257 values are not whole blocks of 256"):
        compress.create(name, ALL).size(257)


@settings(deadline=None, max_examples=30)
@given(count=st.integers(1, 400), ratio=st.floats(0.001, 1), seed=st.integers(0, 1000))
def test_topk_keeps_exactly_the_largest(count: int, ratio: float, seed: int) -> None:
    values = normal(4 * count, seed=seed)
    decoded = through("topk", values, Config(topk_ratio=ratio))
    kept = decoded != 0
    assert torch.equal(decoded[kept], values[kept])
    assert int(kept.sum()) == -int(-ratio * len(values) // 1)
    if not bool(kept.all()):
        assert float(values[kept].abs().min()) >= float(values[~kept].abs().max())


def test_topk_also_finds_its_places_in_long_messages() -> None:
    values = torch.zeros(200_000)
    values[199_999], values[0], values[70_000] = 3.0, -2.0, 1.0
    assert torch.equal(through("topk", values, Config(topk_ratio=3 / 200_000)), values)


@pytest.mark.parametrize("name", [name for name in CODES if compress.load(name).feedback])
def test_what_a_message_lost_is_in_the_residual_and_comes_with_the_next(name: str) -> None:
    format = compress.create(name, Config(topk_ratio=0.1))
    meant = normal(2048)
    message, residual = torch.empty(format.size(2048), dtype=torch.uint8), torch.zeros(2048)
    total = torch.zeros(2048)
    for count in range(1, 30):
        feedback.encode(format, meant, message, residual)
        format.add(message, total)
        torch.testing.assert_close(total + residual, count * meant, rtol=1e-4, atol=1e-4)


def test_every_8_bit_code_of_e4m3_decodes_as_torch_does_it() -> None:
    format = compress.create("fp8-e4m3", ALL)
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8)
    message = torch.cat([torch.ones(1).view(torch.uint8), codes])
    decoded = torch.empty(256)
    format.decode(message, decoded)
    assert torch.equal(decoded, codes.view(torch.float8_e4m3fn).float())


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 60), columns=st.integers(1, 8), seed=st.integers(0, 1000))
def test_orthogonal_columns_span_the_same_space(rows: int, columns: int, seed: int) -> None:
    columns = min(rows, columns)
    given = normal(rows * columns, seed=seed).view(rows, columns).double()
    made = orthogonal(given)
    torch.testing.assert_close(made.T @ made, torch.eye(columns, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(made @ (made.T @ given), given, rtol=1e-6, atol=1e-6)


def test_a_column_of_zeros_stays_one() -> None:
    assert not orthogonal(torch.zeros(5, 2)).any()


@pytest.mark.parametrize("value", [1.0, 0.1, 0.3, 1e-30])
def test_a_column_that_adds_nothing_does_not_count_again(value: float) -> None:
    column = torch.full((40, 1), value)
    given = torch.cat([column, 3 * column, column / 7, normal(40).view(40, 1) * value], dim=1)
    made = orthogonal(given)
    assert made.norm(dim=0).tolist() == pytest.approx([1.0, 0.0, 0.0, 1.0], abs=1e-6)
    torch.testing.assert_close(made @ (made.T @ given), given, rtol=1e-5, atol=0.0)
