"""Start a benchmark: `python -m trainer.bench table` or `python -m trainer.bench collectives`."""

from __future__ import annotations

import sys

from trainer.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["--bench", *sys.argv[1:]]))
