"""The strategies, between real processes over gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, example, given, settings
from torch import Tensor, nn

from tests.trainer import gradients as g
from tests.trainer.gradients import Shape
from tests.trainer.ranks import together
from trainer import compress
from trainer.config import Config
from trainer.errors import InputError, TrainerError
from trainer.flat import Flat
from trainer.sync import STRATEGIES, create
from trainer.sync.direct import DirectMean
from trainer.sync.naive_ring import NaiveRing
from trainer.sync.overlap import Overlapping
from trainer.sync.ring import Ring
from trainer.sync.rings import RingMean
from trainer.sync.strategy import Strategy

# How far a mean may be from the exact one, as a share of the largest gradient: one rounding for the way to
# the owner and one for the way back.
ERRORS = {
    "none": 1e-6,
    "fp16": 2 * 2**-11,
    "bf16": 2 * 2**-8,
    "fp8-e4m3": 2 * 2**-4,
    "fp8-e5m2": 2 * 2**-3,
    "int8": 2 / (2 * 127),
    "int4": 2 / (2 * 7),
    "topk": 1e-6,  # when it sends all
    "powersgd": 1e-5,  # when it is as wide as the matrix
}
PAIRS = [
    (name, format)
    for name, known in STRATEGIES.items()
    if name != "serial"
    for format in known.formats
    if format != compress.AUTO
]
pytestmark = pytest.mark.usefixtures("with_ddp")
SMALL = Config(bucket_mb=0.002, topk_ratio=1.0, powersgd_rank=64)

shapes_of_models = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 300)),
        st.tuples(st.integers(1, 40), st.integers(1, 40)),
        st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 7]), st.just(3), st.just(3)),
    ),
    min_size=1,
    max_size=5,
)


def config(name: str, format: str, **more: Any) -> Config:
    return Config(**{**vars(SMALL), "sync": name, "compress": format, **more})


def assert_is_the_mean(results: Sequence[bytes], shapes: Sequence[Shape], seed: int, format: str) -> None:
    assert len(set(results)) == 1, f"{format}: ranks differ"
    world = len(results)
    largest = max(float(g.flat(g.part(rank, shapes, seed)).abs().max()) for rank in range(world))
    error = (g.numbers(results[0]).double() - g.mean(world, shapes, seed)).abs().max()
    assert float(error) <= 1.01 * ERRORS[format] * largest, f"{format}: wrong by {error}, {largest=}"


@settings(
    max_examples=2,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # an example costs seconds: none is spent on a smaller one
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(world=st.integers(2, 8), shapes=shapes_of_models, seed=st.integers(0, 99))
@example(world=2, shapes=[(1,)], seed=0)
@example(world=8, shapes=[(3,), (1, 2)], seed=1)  # fewer than ranks
@example(world=5, shapes=[(101, 103), (997,)], seed=2)  # primes
def test_all_ranks_end_with_the_same_bytes_which_are_the_mean(
    world: int, shapes: list[Shape], seed: int, tmp_path: Path
) -> None:
    def work(rank: int) -> list[bytes]:
        held = []
        for name, format in PAIRS:
            with g.strategy(shapes, config(name, format)) as made:
                held.append(g.averaged(made, g.part(rank, shapes, seed)))
        return held

    for (name, format), *results in zip(PAIRS, *together(world, tmp_path, work), strict=True):
        # torch's hook divides and then rounds the growing sum at every rank.
        error = "bf16" if (name, format) == ("ddp", "fp16") else format
        assert_is_the_mean(results, shapes, seed, error)


def test_parameters_without_elements_or_with_other_strides_are_no_problem(tmp_path: Path) -> None:
    shapes: list[Shape] = [(0,), (4, 0), (5, 3)]

    def work(rank: int) -> list[bytes]:
        held = []
        for name, format in PAIRS:
            if name == "ddp":  # torch's own does not take empty parameters
                continue
            model = g.Given(shapes)
            model.all[2] = nn.Parameter(torch.zeros(3, 5).t())
            made = create(model, Flat(model), config(name, format))
            held.append(g.averaged(made, g.part(rank, shapes)))
            made.close()
        return held

    pairs = [pair for pair in PAIRS if pair[0] != "ddp"]
    for (_, format), *results in zip(pairs, *together(3, tmp_path, work), strict=True):
        assert_is_the_mean(results, shapes, 0, format)


def test_uncompressed_gradients_may_have_any_precision(tmp_path: Path) -> None:
    shapes: list[Shape] = [(7,), (30, 11)]
    kinds = [
        (name, dtype)
        for name in STRATEGIES
        if name not in ("serial", "ddp")
        for dtype in (torch.float64, torch.bfloat16, torch.float16)
    ]

    def work(rank: int) -> list[bytes]:
        held = []
        for name, dtype in kinds:
            with g.strategy(shapes, config(name, "none"), dtype) as made:
                held.append(g.averaged(made, g.part(rank, shapes, dtype=dtype)))
        return held

    for (name, dtype), *results in zip(kinds, *together(3, tmp_path, work), strict=True):
        assert len(set(results)) == 1, name
        got = g.numbers(results[0], dtype).double()
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(got, g.mean(3, shapes, dtype=dtype), rtol=tolerance, atol=tolerance)


def test_compression_of_another_precision_than_fp32_is_refused_with_the_reason(tmp_path: Path) -> None:
    def work(_: int) -> None:
        with (
            pytest.raises(InputError, match=r"int8 needs an fp32 model, not torch\.float64"),
            g.strategy([(3, 3)], config("ring", "int8"), torch.float64),
        ):
            pass

    together(2, tmp_path, work)


def test_a_model_of_several_precisions_is_refused() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2).double())])
    with pytest.raises(TrainerError, match=r"one type .* torch.float32 on cpu, torch.float64 on cpu"):
        Flat(model)


class ReceivesIntoItsOwnGradient(NaiveRing):
    """The often-copied ring that receives over its own part, and then adds what arrived to itself."""

    def _average(self, gradient: Tensor) -> None:
        if self.rank > 0:
            dist.recv(gradient, self.rank - 1)
            gradient.add_(gradient)
        self._send(gradient, (self.rank + 1) % self.world)
        if self.rank < self.world - 1:
            dist.recv(gradient, (self.rank - 1) % self.world)
            if self.rank + 1 < self.world - 1:
                self._send(gradient, self.rank + 1)
        gradient.div_(self.world)


def test_the_tests_above_see_a_ring_that_receives_into_its_own_gradient(tmp_path: Path) -> None:
    shapes: list[Shape] = [(7,), (5, 4)]

    def work(rank: int) -> bytes:
        model = g.Given(shapes)
        return g.averaged(ReceivesIntoItsOwnGradient(model, Flat(model), SMALL), g.part(rank, shapes))

    with pytest.raises(AssertionError):
        assert_is_the_mean(together(3, tmp_path, work), shapes, 0, "none")


def test_many_steps_in_a_row_do_not_mix_and_every_rank_counts_as_much(tmp_path: Path) -> None:
    world = 3
    pairs = [(name, "none") for name in STRATEGIES if name != "serial"] + [("ring", "int8")]

    def work(rank: int) -> list[list[float]]:
        means = []
        for name, format in pairs:
            with g.strategy([(2,), (2, 1)], config(name, format)) as made:
                seen = []
                for number in range(30):
                    mine = 3.0 * number if rank == number % world else 0.0
                    given = [torch.full((2,), mine), torch.full((2, 1), mine)]
                    seen.append(float(g.numbers(g.averaged(made, given)).mean()))
                means.append(seen)
        return means

    for got in together(world, tmp_path, work):
        for seen in got:
            assert seen == pytest.approx([float(number) for number in range(30)], rel=0.01)


def test_what_is_sent_is_counted_and_is_what_the_formulas_say(tmp_path: Path) -> None:
    world, vectors, matrices = 3, 10, 1024
    shapes: list[Shape] = [(vectors,), (2, matrices // 2)]
    whole = 4 * (vectors + matrices)
    exact_vectors = 4 * vectors
    sent = {
        ("naive-ring", "none"): whole,
        ("ring", "none"): whole,
        ("all-reduce", "none"): whole,
        ("reduce-broadcast", "none"): whole,
        ("ddp", "none"): whole,
        ("ddp", "fp16"): whole // 2,
        ("ring", "fp16"): 516 * 4 + exact_vectors,
        ("ring", "bf16"): 2 * matrices + exact_vectors,
        ("ring", "fp8-e4m3"): 260 * 4 + exact_vectors,
        ("ring", "fp8-e5m2"): 260 * 4 + exact_vectors,
        ("ring", "int8"): 260 * 4 + exact_vectors,
        ("ring", "int4"): 132 * 4 + exact_vectors,
    }

    def work(rank: int) -> list[int]:
        counts = []
        for pair in sent:
            with g.strategy(shapes, config(*pair)) as made:
                g.step(made, g.part(rank, shapes))
                counts.append(made.bytes_sent)
        return counts

    totals = [sum(counts) for counts in zip(*together(world, tmp_path, work), strict=True)]
    assert dict(zip(sent, totals, strict=True)) == {
        pair: pytest.approx(2 * (world - 1) * size, abs=world) for pair, size in sent.items()
    }


def test_topk_sends_what_its_ratio_says(tmp_path: Path) -> None:
    def work(rank: int) -> int:
        with g.strategy([(100, 100)], config("ring", "topk", topk_ratio=0.01)) as made:
            g.step(made, g.part(rank, [(100, 100)]))
            return made.bytes_sent

    # Each kept value costs 4 bytes and 2 for its place; a hundredth of 10,000, rounded up in each share.
    assert sum(together(2, tmp_path, work)) == pytest.approx(2 * 100 * 6, rel=0.1)


def test_uncompressed_buffers_take_less_than_one_and_a_half_times_the_gradients(tmp_path: Path) -> None:
    def work(_: int) -> float:
        with g.strategy([(50,), (300, 400)], config("ring", "none")) as made:
            assert isinstance(made, Overlapping)
            return made.held / made.flat.gradients.nbytes

    assert max(together(4, tmp_path, work)) <= 1.5  # with the gradients themselves 2.5


def relative_error(got: Sequence[bytes], meant: Tensor) -> float:
    """How far all ranks are from what they should have, as a share of it; they must agree."""
    assert len(set(got)) == 1
    return float((g.numbers(got[0]).double() - meant).norm() / meant.norm())


def test_the_error_of_a_quantised_mean_does_not_grow_with_the_number_of_ranks(tmp_path: Path) -> None:
    shapes: list[Shape] = [(256, 256)]
    formats = ("int8", "int4")

    def work(rank: int) -> list[bytes]:
        held = []
        for format in formats:
            with g.strategy(shapes, config("ring", format)) as made:
                held.append(g.averaged(made, g.part(rank, shapes)))
        return held

    errors = {
        (format, world): relative_error(got, g.mean(world, shapes))
        for world in (2, 16)
        for format, *got in zip(formats, *together(world, tmp_path, work), strict=True)
    }
    for format in formats:
        assert errors[format, 16] <= 1.2 * errors[format, 2], format
    assert errors["int8", 16] <= 0.012


def test_error_feedback_lets_everything_through_in_time(tmp_path: Path) -> None:
    shapes: list[Shape] = [(32, 64)]
    steps = 60
    options = {"topk_ratio": 0.1, "powersgd_rank": 2}
    limits = {"fp8-e5m2": 0.01, "int8": 0.01, "int4": 0.01, "topk": 0.2, "powersgd": 0.5}
    kinds = [(format, feedback) for format in limits for feedback in (True, False)]

    def work(rank: int) -> list[bytes]:
        sums = []
        for format, feedback in kinds:
            with g.strategy(shapes, config("ring", format, error_feedback=feedback, **options)) as made:
                total = torch.zeros(32 * 64)
                for _ in range(steps):
                    total += g.numbers(g.averaged(made, g.part(rank, shapes)))
                sums.append(total.numpy().tobytes())
        return sums

    meant = steps * g.mean(2, shapes)
    errors = {
        kind: relative_error(sums, meant)
        for kind, *sums in zip(kinds, *together(2, tmp_path, work), strict=True)
    }
    for format, limit in limits.items():
        assert errors[format, True] < errors[format, False] / 3, format
        assert errors[format, True] < limit, format


def test_powersgd_finds_gradients_again_after_one_that_was_zero(tmp_path: Path) -> None:
    shapes: list[Shape] = [(32, 64)]
    thin = torch.zeros(32, 64)
    thin[3] = torch.arange(64.0)  # of rank one: a second column has nothing to find

    def work(_: int) -> tuple[list[bytes], list[bytes], bytes]:
        settings = config("ring", "powersgd", powersgd_rank=2, error_feedback=False)
        with g.strategy(shapes, settings) as fresh:
            expected = [g.averaged(fresh, g.part(0, shapes)) for _ in range(2)]
        with g.strategy(shapes, settings) as made:
            g.averaged(made, [torch.zeros(32, 64)])
            after = [g.averaged(made, g.part(0, shapes)) for _ in range(2)]
        with g.strategy(shapes, settings) as made:
            g.averaged(made, [thin])
            return expected, after, g.averaged(made, g.part(0, shapes))

    (expected, after, after_thin), other = together(2, tmp_path, work)
    assert (expected, after, after_thin) == other
    assert after == expected
    assert torch.linalg.matrix_rank(g.numbers(after_thin).view(32, 64)) == 2


def test_a_residual_can_be_saved_and_put_back(tmp_path: Path) -> None:
    shapes: list[Shape] = [(9,), (40, 30)]
    formats = ["none", "int4", "topk", "powersgd"]
    options = {"topk_ratio": 0.1, "powersgd_rank": 2}

    def work(rank: int) -> list[bool]:
        same = []
        for format in formats:
            settings = config("ring", format, **options)
            with g.strategy(shapes, settings) as made:
                for seed in range(3):
                    g.step(made, g.part(rank, shapes, seed))
                saved = {name: value.clone() for name, value in made.state_dict().items()}
                expected = g.averaged(made, g.part(rank, shapes, 3))
            with g.strategy(shapes, settings) as resumed:
                resumed.load_state_dict(saved)
                same.append(g.averaged(resumed, g.part(rank, shapes, 3)) == expected)
        return same

    assert together(2, tmp_path, work) == [[True] * len(formats)] * 2


def test_the_state_of_another_format_is_refused(tmp_path: Path) -> None:
    def work(_: int) -> None:
        with (
            g.strategy([(4, 4)], config("ring", "int4")) as four,
            g.strategy([(4, 4)], config("ring", "int8")) as eight,
            pytest.raises(TrainerError, match="trained with --compress int4, not int8"),
        ):
            eight.load_state_dict(four.state_dict())

    together(2, tmp_path, work)


BAD_VALUES = [float("nan"), float("inf"), float("-inf")]


def test_a_gradient_that_is_not_finite_is_named_by_rank_and_parameter_on_all_ranks(tmp_path: Path) -> None:
    shapes: list[Shape] = [(6,), (20, 30), (5, 2)]

    def work(rank: int) -> list[str]:
        said = []
        for name, format in PAIRS:
            for bad in BAD_VALUES:
                mine = g.part(rank, shapes)
                if rank == 1:
                    mine[1][3, 4] = bad
                with g.strategy(shapes, config(name, format, powersgd_rank=2)) as made:
                    with pytest.raises(TrainerError) as caught:
                        g.step(made, mine)
                    said.append(str(caught.value))
        return said

    for said in together(3, tmp_path, work):
        for (name, format), message in zip([pair for pair in PAIRS for _ in BAD_VALUES], said, strict=True):
            assert message.startswith("the gradient of rank 1 in all.1 has an infinity or a NaN"), (
                name,
                format,
            )


def test_a_step_that_is_not_finite_can_be_left_out_and_leaves_nothing_behind(tmp_path: Path) -> None:
    shapes: list[Shape] = [(6,), (20, 30)]
    options = {"topk_ratio": 0.5, "powersgd_rank": 2, "on_nonfinite": "skip"}

    def work(rank: int) -> list[tuple[bool, bool, int, bool, bytes]]:
        told = []
        for name, format in PAIRS:
            with g.strategy(shapes, config(name, format, **options)) as made:
                first = g.step(made, g.part(rank, shapes))
                bad = g.part(rank, shapes, 1)
                if rank == 0:
                    bad[0][2] = bad[1][1, 1] = bad[1][-1, -1] = float("nan")
                second = g.step(made, bad)
                third = g.step(made, g.part(rank, shapes, 2))
                told.append((first, second, made.skipped, third, g.held(made)))
        return told

    ranks = together(3, tmp_path, work)
    for pair, *told in zip(PAIRS, *ranks, strict=True):
        assert [each[:4] for each in told] == [(True, False, 1, True)] * 3, pair
        assert len({each[4] for each in told}) == 1, pair
        assert bool(g.numbers(told[0][4]).isfinite().all()), pair


def test_a_sum_that_overflows_is_not_blamed_on_anyone(tmp_path: Path) -> None:
    def work(_: int) -> str:
        with g.strategy([(4, 4)], config("ring", "none")) as made:
            with pytest.raises(TrainerError) as caught:
                g.step(made, [torch.full((4, 4), 3e38)])
            return str(caught.value)

    for message in together(2, tmp_path, work):
        assert message.startswith("the sum of all ranks' gradients has an infinity")


class Gate(torch.autograd.Function):
    """Lets values through, and the backward pass only when `wait` has returned something true."""

    @staticmethod
    def forward(context: Any, values: Tensor, wait: Callable[[], bool]) -> Tensor:
        context.wait = wait
        return values.clone()

    @staticmethod
    def backward(context: Any, *gradient: Tensor) -> tuple[Tensor, None]:
        assert context.wait(), "nobody opened the gate"
        return gradient[0], None


def step_with_gate(model: nn.Sequential, made: Strategy, inputs: Tensor, wait: Callable[[], bool]) -> None:
    """A step of two layers whose backward pass waits between the second and the first."""
    made.begin()
    middle: Any = Gate.apply(model[0](inputs), wait)  # type: ignore[no-untyped-call]  # torch does not type it
    model[1](middle).square().sum().backward()
    assert made.finish()


def test_a_bucket_travels_while_the_backward_pass_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()
    real_start = RingMean.start

    def start(self: RingMean) -> None:
        real_start(self)
        started.set()

    monkeypatch.setattr(RingMean, "start", start)

    def work(_: int) -> None:
        model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
        made = create(model, Flat(model), config("ring", "none"))
        step_with_gate(model, made, torch.ones(1, 30), lambda: started.wait(30))
        made.close()

    together(2, tmp_path, work)


@pytest.mark.parametrize("format", ["none", "int8"])
def test_a_rank_whose_backward_pass_is_late_is_waited_for(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is already in the second half of its first bucket when the others begin with the second one."""
    kind: Any = RingMean if format == "none" else DirectMean
    late = threading.Event()
    real_finish = kind.finish
    world = 3

    def finish(self: Any) -> Iterator[int]:
        for number, phase in enumerate(real_finish(self)):
            if number == world - 1:
                late.set()
            yield phase

    monkeypatch.setattr(kind, "finish", finish)

    def work(rank: int) -> bytes:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        made = create(model, Flat(model), config("ring", format))
        for _ in range(3):
            late.clear()
            step_with_gate(model, made, torch.randn(2, 40), lambda: rank > 0 or late.wait(30))
        made.close()
        return g.held(made)

    assert len(set(together(world, tmp_path, work))) == 1


def test_auto_takes_one_format_on_all_ranks_and_says_why(tmp_path: Path) -> None:
    def work(rank: int) -> tuple[str, list[str], bytes]:
        with g.strategy([(30, 40)], config("ring", "auto")) as made:
            for seed in range(14):
                held = g.averaged(made, g.part(rank, [(30, 40)], seed))
            assert isinstance(made, Ring)
            return made.format, made.notes, held

    (format, notes, held), *others = together(3, tmp_path, work)
    assert format in compress.AUTO_CHOICES
    assert [other[0] for other in others] == [format] * 2
    assert {held} == {other[2] for other in others}
    (note,) = notes
    assert note.startswith(f"--compress auto takes {format}: the first steps took none ")


@pytest.mark.parametrize(("steps", "used"), [(3, "none was"), (6, "none and fp16 were")])
def test_auto_that_has_too_few_steps_to_choose_says_so(steps: int, used: str, tmp_path: Path) -> None:
    def work(rank: int) -> list[str]:
        with g.strategy([(30, 40)], config("ring", "auto")) as made:
            for seed in range(steps):
                g.step(made, g.part(rank, [(30, 40)], seed))
            made.last_step_done()
            return made.notes

    note = f"--compress auto: too few steps to choose; {used} used"
    assert together(2, tmp_path, work) == [[note]] * 2


def test_serial_refuses_to_be_one_of_many(tmp_path: Path) -> None:
    def work(_: int) -> None:
        with (
            pytest.raises(InputError, match="for one process, and this is one of 2"),
            g.strategy([(2,)], Config(sync="serial")),
        ):
            pass

    together(2, tmp_path, work)
