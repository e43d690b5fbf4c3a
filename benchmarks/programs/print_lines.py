"""A rank that prints: print_lines.py COUNT."""

import os
import sys


def line(rank: int, number: int) -> str:
    """What a rank prints as its line `number`, about as long as a line of a training log."""
    return f"rank {rank} line {number:06d} loss {number % 977 / 977:.4f} and some more words"


if __name__ == "__main__":
    own = int(os.environ["RANK"])
    for number in range(int(sys.argv[1])):
        sys.stdout.write(line(own, number) + "\n")
        sys.stdout.flush()
