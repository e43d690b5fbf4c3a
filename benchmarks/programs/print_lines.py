"""A rank that prints: print_lines.py COUNT. It adds the time when it began to the file $BENCH_BEGAN."""

import os
import sys
import time


def line(rank: int, number: int) -> str:
    """What a rank prints as its line `number`, about as long as a line of a training log."""
    return f"rank {rank} line {number:06d} loss {number % 977 / 977:.4f} and some more words"


if __name__ == "__main__":
    own = int(os.environ["RANK"])
    with open(os.environ["BENCH_BEGAN"], "a") as f:
        f.write(f"{time.time()!r}\n")
    for number in range(int(sys.argv[1])):
        sys.stdout.write(line(own, number) + "\n")
        sys.stdout.flush()
