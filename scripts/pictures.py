"""Draw the pictures of docs/ring.md, in docs/pictures/:

python scripts/pictures.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
RANKS = 4
WIDTH = 820

# Each picture is a card with a background of its own, so it can be read on a page of any colour.
STYLE = """
  text { font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
  .title { font-weight: 600; font-size: 16px } .small { font-size: 12px } .soft { fill: #59636e }
  .inside { fill: #ffffff; font-size: 12px; font-weight: 600 }
  .card { fill: #ffffff; stroke: #d0d7de } .empty { fill: #eef1f4 } .box { fill: #f6f8fa; stroke: #8c959f }
  .line { stroke: #59636e; fill: none; stroke-width: 1.5 } .thin { stroke: #d0d7de } .tip { fill: #59636e }
  .new { fill: none; stroke: #1f2328; stroke-width: 2 } .gray { fill: #6e7781 }
  .c0 { fill: #2f6fd0 } .c1 { fill: #c2620e } .c2 { fill: #2c8a4b } .c3 { fill: #8b55c1 }
  .s0 { stroke: #2f6fd0 } .s1 { stroke: #c2620e } .s2 { stroke: #2c8a4b } .s3 { stroke: #8b55c1 }
  .curve { fill: none; stroke-width: 2.5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .soft { fill: #9da7b1 } .inside { fill: #ffffff }
    .card { fill: #0d1117; stroke: #30363d } .empty { fill: #21262d } .box { fill: #161b22; stroke: #6e7681 }
    .line { stroke: #9da7b1 } .thin { stroke: #30363d } .tip { fill: #9da7b1 } .new { stroke: #f0f6fc }
    .s0 { stroke: #5b95ee } .s1 { stroke: #e5883a } .s2 { stroke: #4fb36f } .s3 { stroke: #b183e0 }
  }
"""


class Picture:
    """Shapes on a card, in the order they are drawn."""

    def __init__(self, title: str, height: int) -> None:
        self._title, self._height = title, height
        self._shapes: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, kind: str, round: float = 3) -> None:
        self._shapes.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round:g}"/>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self._shapes.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def line(self, *points: tuple[float, float], kind: str = "line") -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._shapes.append(f'<polyline class="{kind}" points="{path}"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self._shapes.append(
            f'<line class="line" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" marker-end="url(#tip)"/>'
        )

    def circle(self, x: float, y: float, radius: float, kind: str) -> None:
        self._shapes.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>')

    def bracket(self, x1: float, x2: float, y: float, words: str) -> None:
        """A line under what lies between, and what it is."""
        self.line((x1, y - 6), (x1, y), (x2, y), (x2, y - 6))
        self.text((x1 + x2) / 2, y + 17, words, "small soft", "middle")

    def svg(self) -> str:
        tip = (
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="tip" d="M0 0 8 4 0 8z"/></marker>'
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" role="img">'
        card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{self._height - 1}" rx="8"/>'
        about = f"<title>{escape(self._title)}</title>"
        return "\n".join(
            [head, about, f"<style>{STYLE}</style>", f"<defs>{tip}</defs>", card, *self._shapes, "</svg>\n"]
        )


def two_rings() -> Picture:
    """Who sends when, in the naive ring and in the one that keeps every link busy, on one scale of time."""
    picture = Picture("The naive ring takes N times as long as the ring", 396)
    left, unit, row = 90, 112, 26
    hops = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 1), (1, 2)]

    picture.text(20, 30, "naive-ring: one rank sends everything, three wait", "title")
    for rank in range(RANKS):
        picture.text(20, 63 + row * rank, f"rank {rank}", "small")
        picture.rect(left, 48 + row * rank, len(hops) * unit, 20, "empty")
    for time, (sender, to) in enumerate(hops):
        x, y = left + time * unit, 48 + row * sender
        for chunk in range(RANKS):
            picture.rect(x + 1 + chunk * (unit - 2) / 4, y, (unit - 2) / 4, 20, f"c{chunk}", 0)
        picture.text(x + unit / 2, y + 14, f"all to rank {to}", "inside", "middle")
    picture.bracket(left + 2, left + 4 * unit - 2, 166, "first ring: the sum is made")
    picture.bracket(left + 4 * unit + 2, left + 6 * unit - 2, 166, "second ring: it is told")

    top = 222
    picture.text(20, top, "ring: every rank sends a quarter at a time, and nobody waits", "title")
    small = unit / RANKS
    for rank in range(RANKS):
        y = top + 18 + row * rank
        picture.text(20, y + 15, f"rank {rank}", "small")
        picture.rect(left, y, len(hops) * unit, 20, "empty")
        for step in range(2 * (RANKS - 1)):
            picture.rect(left + step * small + 1, y, small - 2, 20, f"c{(rank - step) % RANKS}", 2)
    for start, words in ((0, "make"), (3, "tell")):
        picture.bracket(left + start * small + 2, left + (start + 3) * small - 2, top + 128, words)
    picture.text(left + 6 * small + 14, top + 87, "done: N times as soon", "soft")
    picture.arrow(left + 4 * unit, top + 138, left + 6 * unit, top + 138)
    picture.text(left + 6 * unit, top + 157, "time", "small soft", "end")
    return picture


def laps() -> Picture:
    """Which parts of the sum each rank holds after each step of the ring."""
    picture = Picture("The two laps of the ring, step by step", 262)
    left, cell, gap = 66, 21, 25
    top = 84
    parts = [[{rank} for _ in range(RANKS)] for rank in range(RANKS)]  # of the sum, by rank and chunk
    picture.text(
        20, 30, "What each rank holds after each step: a chunk is full when all four parts are in it", "title"
    )
    for rank in range(RANKS):
        picture.text(12, top + rank * (cell + 4) + 15, f"rank {rank}", "small")
    for step in range(2 * RANKS - 1):
        arrived = set()
        if step:
            before = [[set(own) for own in row] for row in parts]
            for rank in range(RANKS):
                # In the first lap a rank hears of the chunk one before its own, then two, and so on; in the
                # second of its own, and so on.
                chunk = (rank - step) % RANKS if step < RANKS else (rank - (step - RANKS)) % RANKS
                parts[rank][chunk] = parts[rank][chunk] | before[(rank - 1) % RANKS][chunk]
                arrived.add((rank, chunk))
        x0 = left + step * (RANKS * cell + gap)
        words = "start" if not step else f"step {step}"
        picture.text(x0 + 2 * cell, top - 12, words, "small soft", "middle")
        for rank in range(RANKS):
            for chunk in range(RANKS):
                x, y = x0 + chunk * cell, top + rank * (cell + 4)
                share = len(parts[rank][chunk]) / RANKS
                picture.rect(x, y, cell - 2, cell, "empty", 2)
                picture.rect(x, y + cell * (1 - share), cell - 2, cell * share, f"c{chunk}", 2)
                if (rank, chunk) in arrived:
                    picture.rect(x, y, cell - 2, cell, "new", 2)
    width = RANKS * cell + gap
    under = top + RANKS * (cell + 4) + 12
    picture.bracket(
        left + width, left + 4 * width - gap, under, "reduce-scatter: what comes from the left is added"
    )
    picture.bracket(left + 4 * width, left + 7 * width - gap, under, "all-gather: it replaces what was there")
    picture.text(
        20,
        246,
        "Outlined: what has just arrived from the rank before (the one above; rank 0's is rank 3).",
        "small soft",
    )
    return picture


def overlap() -> Picture:
    """A step with communication after the backward pass, and beside it."""
    picture = Picture("Buckets travel while the backward pass still runs", 330)
    left, row = 90, 24
    layers = [("layer 4", 60, 2), ("layer 3", 124, 2), ("layer 2", 116, 1), ("layer 1", 64, 0)]
    forward = 110

    def backward(y: float) -> list[tuple[float, int]]:
        """Draw both passes; when each bucket is full."""
        picture.rect(left, y, forward - 2, row, "gray")
        picture.text(left + forward / 2, y + 16, "forward", "inside", "middle")
        x, full = left + forward, {}
        for name, width, bucket in layers:
            picture.rect(x, y, width - 2, row, f"c{bucket}")
            picture.text(x + width / 2, y + 16, name, "inside", "middle")
            x += width
            full[bucket] = x
        return [(full[bucket], bucket) for bucket in (2, 1, 0)]

    lengths = {2: 150, 1: 56, 0: 28}
    for top, title, waits in (
        (30, "One after the other", True),
        (186, "Each bucket begins as soon as backward has filled it", False),
    ):
        picture.text(20, top, title, "title")
        picture.text(20, top + 32, "compute", "small")
        picture.text(20, top + 64, "network", "small")
        ready = backward(top + 16)
        end_of_backward = free = ready[-1][0]
        if not waits:
            free = 0.0
        for full, bucket in ready:
            x = max(full, free)
            picture.rect(x, top + 48, lengths[bucket] - 2, row, f"c{bucket}")
            free = x + lengths[bucket]
        picture.bracket(end_of_backward, free - 2, top + 88, "comm_ms")
        picture.line((end_of_backward - 1, top + 8), (end_of_backward - 1, top + 82), kind="line thin")
    picture.text(
        20,
        316,
        "Colours are buckets. Only what sticks out behind the backward pass costs time.",
        "small soft",
    )
    return picture


def two_roundings() -> Picture:
    """The way of one share: coded once to its owner, added in fp32, coded once to all."""
    picture = Picture("Two roundings, however many ranks", 420)
    picture.text(20, 30, "Direct: each value is rounded twice, however many ranks there are", "title")
    owner, top, row = 0, 56, 44

    def rounding(x: float, y: float) -> None:
        picture.circle(x, y, 11, "c1")
        picture.text(x, y + 4, "Q", "inside", "middle")

    middle = top + 1.5 * row + 15
    for rank in range(RANKS):
        y = top + rank * row
        picture.rect(20, y, 150, 30, "box")
        picture.text(95, y + 20, f"rank {rank}" + (" (owner)" if rank == owner else ""), "", "middle")
        if rank == owner:
            picture.arrow(170, y + 15, 332, middle - 18)
            picture.text(182, y + 8, "its own part: as it is", "small soft")
        else:
            picture.arrow(170, y + 15, 190, y + 15)
            rounding(202, y + 15)
            picture.arrow(214, y + 15, 332, middle - 18 + 12 * rank)
        picture.rect(640, y, 160, 30, "box")
        picture.text(720, y + 20, f"rank {rank} decodes", "", "middle")
        picture.arrow(574, middle, 636, y + 15)
    picture.rect(336, middle - 32, 156, 64, "box")
    picture.text(414, middle - 8, "owner adds in fp32,", "", "middle")
    picture.text(414, middle + 14, "divides by N", "", "middle")
    picture.arrow(492, middle, 548, middle)
    rounding(562, middle)
    picture.text(528, middle + 60, "the same bytes to all", "small soft", "middle")
    picture.text(20, top + 4 * row + 10, "1st rounding (Q), of each rank's part", "small soft")
    picture.text(536, middle - 22, "2nd rounding", "small soft", "middle")

    picture.line((20, 256), (800, 256), kind="line thin")
    picture.text(
        20, 286, "A ring that codes what it passes on: N roundings, and the sum grows under them", "title"
    )
    y = 330
    for rank in range(RANKS):
        x = 20 + rank * 200
        picture.rect(x, y - 15, 120, 30, "box")
        picture.text(x + 60, y + 5, f"rank {rank}" if not rank else f"decode, add {rank}", "", "middle")
        picture.arrow(x + 120, y, x + 141, y)
        rounding(x + 153, y)
        if rank < RANKS - 1:
            picture.arrow(x + 165, y, x + 198, y)
    picture.text(
        20,
        376,
        "This is why naive-ring carries only fp32, and why ring goes straight to the owner as soon as",
        "small soft",
    )
    picture.text(
        20, 394, "a format is asked for: as many messages of the same size, fewer roundings.", "small soft"
    )
    return picture


MESSAGES = (("none", 1024, 0), ("bf16", 512, 0), ("fp16", 516, 4), ("int8", 260, 4), ("int4", 132, 4))
"""Format, bytes of the message of 256 values, and how many of them are the block's scale."""


def messages() -> Picture:
    """What 256 values take on the wire."""
    picture = Picture("What 256 values take on the wire", 236)
    picture.text(20, 30, "256 values on the wire, to scale", "title")
    names = {"none": "none (fp32)", "int8": "int8, fp8"}
    for number, (name, size, scale) in enumerate(MESSAGES):
        y, unit = 50 + number * 32, 0.58
        picture.text(20, y + 16, names.get(name, name))
        picture.rect(120, y, size * unit, 22, "c0", 2)
        if scale:
            picture.rect(120, y, scale * unit + 1.5, 22, "c1", 0)
        factor = "" if name == "none" else f", {1024 / size:.2f} times smaller"
        if name == "none":
            picture.text(110 + size * unit, y + 16, f"{size} bytes", "inside", "end")
        else:
            picture.text(130 + size * unit, y + 16, f"{size} bytes{factor}", "small")
    picture.text(
        20,
        222,
        "Orange: the scale of the block, one fp32 number; in a message all scales come first.",
        "small soft",
    )
    return picture


def traffic() -> Picture:
    """What a rank sends, by the number of ranks: all-gather of codes beside the ring."""
    picture = Picture("All-gather of small messages soon sends more than the ring of large ones", 408)
    left, top, width, height, most = 60, 52, 540, 260, 4.0
    picture.text(20, 30, "What every rank sends in a step, in sizes of the gradient", "title")

    def place(ranks: float, sizes: float) -> tuple[float, float]:
        return round(left + (ranks - 2) / 14 * width, 1), round(top + height * (1 - sizes / most), 1)

    for sizes in range(5):
        picture.line(place(2, sizes), place(16, sizes), kind="line thin")
        picture.text(left - 10, place(2, sizes)[1] + 5, str(sizes), "small soft", "end")
    for ranks in range(2, 17, 2):
        picture.text(place(ranks, 0)[0], top + height + 18, str(ranks), "small soft", "middle")
    picture.text(left + width / 2, top + height + 40, "ranks", "small soft", "middle")
    lines: list[tuple[Callable[[float], float], int, str, float]] = [
        (lambda n: (n - 1) / 2, 3, "16 bits, by all-gather", 3.75),
        (lambda n: (n - 1) / 4, 1, "8 bits, by all-gather", 3.75),
        (lambda n: 2 * (n - 1) / n, 0, "fp32, ring", 1.88),
        (lambda n: 2 * (n - 1) / n * 260 / 1024, 2, "int8, direct", 0.48),
    ]
    for sends, colour, words, at in lines:
        ends = [n / 4 for n in range(8, 65) if sends(n / 4) <= most]
        picture.line(*(place(n, sends(n)) for n in ends), kind=f"curve s{colour}")
        x, y = place(ends[-1], at)
        picture.circle(*place(ends[-1], sends(ends[-1])), 4, f"c{colour}")
        picture.text(x + 12, y + 5, words, "small")
    for ranks in (4, 8):
        picture.circle(*place(ranks, 2 * (ranks - 1) / ranks), 7, "new")
    picture.text(
        20,
        392,
        "Circles: from 4 ranks on with 16 bits, and from 8 on with 8 bits, all-gather saves nothing.",
        "small soft",
    )
    return picture


def feedback() -> Picture:
    """A gradient that is always too small for the code, with and without error feedback."""
    picture = Picture("Error feedback lets small gradients through", 330)
    left, top, width, height, steps, gradient = 60, 52, 540, 220, 20, 0.3
    picture.text(
        20, 30, "A gradient of 0.3, step after step, where the code knows whole numbers only", "title"
    )
    most = steps * gradient

    def place(step: float, total: float) -> tuple[float, float]:
        return round(left + step / steps * width, 1), round(top + height * (1 - total / most), 1)

    for total in range(0, 7, 2):
        picture.line(place(0, total), place(steps, total), kind="line thin")
        picture.text(left - 10, place(0, total)[1] + 5, str(total), "small soft", "end")
    for step in range(0, steps + 1, 5):
        picture.text(place(step, 0)[0], top + height + 18, str(step), "small soft", "middle")
    picture.text(left + width / 2, top + height + 40, "steps", "small soft", "middle")

    residual, arrived, stairs = 0.0, 0.0, [place(0, 0)]
    for step in range(1, steps + 1):
        residual += gradient
        code = float(round(residual))
        residual -= code
        stairs.append(place(step, arrived))
        arrived += code
        stairs.append(place(step, arrived))
    picture.line(place(0, 0), place(steps, most), kind="curve s0")
    picture.line(*stairs, kind="curve s2")
    picture.line(place(0, 0), place(steps, 0), kind="curve s1")
    for end, colour, words in (
        (float(most), 0, "what was meant, in all"),
        (0.0, 1, "without: nothing arrives"),
    ):
        picture.circle(*place(steps, end), 4, f"c{colour}")
        picture.text(place(steps, end)[0] + 12, place(steps, end)[1] + 5, words, "small")
    picture.text(place(steps, 5.2)[0] + 12, place(steps, 5.2)[1] + 5, "with feedback: never more", "small")
    picture.text(place(steps, 5.2)[0] + 12, place(steps, 5.2)[1] + 22, "than half a code off", "small")
    picture.circle(*place(steps, arrived), 3, "c2")
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "two-rings": two_rings,
    "laps": laps,
    "overlap": overlap,
    "two-roundings": two_roundings,
    "messages": messages,
    "traffic": traffic,
    "feedback": feedback,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())
