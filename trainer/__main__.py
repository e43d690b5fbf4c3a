"""Start the trainer: `python -m trainer`, `python -m trainer.train`, or `python .../trainer/__main__.py`.

By path it is safe from a `trainer.py` in the user's folder, which `-m` would find first.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Sequence

if not __package__:
    # Run by path, Python searches this file's own folder; the package is found from the one above.
    _here = os.path.dirname(os.path.realpath(__file__))
    if sys.path and os.path.realpath(sys.path[0]) == _here:
        del sys.path[0]
    sys.path.insert(0, os.path.dirname(_here))

from trainer.config import parse
from trainer.errors import TrainerError

NEEDED = ("torch", "torchvision", "numpy")
WRITER = "writes stacks"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer with these options (the command line's if None) and return its exit code."""
    show_stacks_on_signal()
    try:
        start(sys.argv[1:] if argv is None else argv)
    except TrainerError as error:
        print(f"trainer: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        print(f"trainer: {error} in {sys.executable}: pip install 'ringctl[trainer]' there", file=sys.stderr)
        return TrainerError.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def start(words: Sequence[str]) -> None:
    """Train, or compare ways to train, or only look at the options; as the words say."""
    if "--bench" in words:
        from trainer.bench import program

        place = list(words).index("--bench")
        program.start([*words[place + 1 :], *words[:place]])
        return
    config = parse(words, os.environ)
    if not config.check:
        # Only now: importing torch takes seconds, and a mistake should be told at once.
        from trainer.train import train

        train(config)


def show_stacks_on_signal() -> None:
    """Tell where every thread is, even in the middle of an exchange: on stderr on `kill -USR1`, or under
    ringctl in the file where its supervisor looks, on the signals that it sends."""
    metrics = os.environ.get("RINGCTL_METRICS")
    look, insist = signal.SIGRTMIN + 9, signal.SIGRTMIN + 10
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        where = os.open(f"{metrics}.stacks", flags, 0o600) if metrics else sys.stderr.fileno()
        for number in (signal.SIGUSR1, look, insist):
            faulthandler.register(number, file=where, all_threads=number != insist)
    except (OSError, ValueError, AttributeError):
        return  # no disk, or no stderr: nobody could read it
    if all(thread.name != WRITER for thread in threading.enumerate()):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the thread takes no other
        threading.Thread(target=write_stacks, args=(where, look), name=WRITER, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, {*before, look})


def write_stacks(where: int, look: int) -> None:
    """In a thread, so that a look does not interrupt the main one: that would end torch's tries to reach
    rank 0. ringctl knows the thread by this name, and that it is not the one it asks for."""
    while True:
        signal.sigwait({look})
        faulthandler.dump_traceback(where, all_threads=True)


if __name__ == "__main__":
    sys.exit(main())
