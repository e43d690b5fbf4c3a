"""Files of time-stamped lines, one a rank, merged by time behind a label: merge_files.py FILE ..."""

import heapq
import sys
from collections.abc import Iterator


def labelled(rank: int, path: str) -> Iterator[tuple[str, str]]:
    with open(path) as f:
        for line in f:
            stamp, _, text = line.partition(" ")
            yield stamp, f"[{rank}] {text}"


if __name__ == "__main__":
    for _, text in heapq.merge(*(labelled(rank, path) for rank, path in enumerate(sys.argv[1:]))):
        sys.stdout.write(text)
