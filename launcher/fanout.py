"""Do one thing on many hosts at once; never stop at the first that fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from launcher.errors import HostError, RingctlError

K = TypeVar("K")
R = TypeVar("R")

AT_ONCE = 64


def fan_out(
    items: Iterable[K],
    work: Callable[[K], R],
    done: Callable[[K, R | RingctlError], None] | None = None,
) -> dict[K, R | RingctlError]:
    """{item: its result, or the error it ended with}, in the order given. `done` hears of each as it comes,
    in the caller's own thread. Our own bugs are raised once all others are done; Ctrl-C at once: then nobody
    waits for what is under way; closing the hosts' connections ends it."""

    def attempt(item: K) -> R | RingctlError:
        try:
            return work(item)
        except RingctlError as error:
            return error

    todo = list(items)
    results: dict[K, R | RingctlError] = {}
    for item, result in at_once(todo, attempt) if len(todo) > 1 else ((item, attempt(item)) for item in todo):
        results[item] = result
        if done is not None:
            done(item, result)
    return {item: results[item] for item in todo}


def at_once(todo: list[K], work: Callable[[K], R]) -> Iterable[tuple[K, R]]:
    """Each with its result, as they come, and then the first exception, if there was one. Threads of its own:
    those of a ThreadPoolExecutor keep the process alive until the last of them is done, also after Ctrl-C."""
    from queue import SimpleQueue  # what costs time to import, `ringctl ps` on one machine need not pay
    from threading import Thread

    waiting = deque(todo)
    finished: SimpleQueue[tuple[K, R] | BaseException] = SimpleQueue()

    def worker() -> None:
        while waiting:
            try:
                item = waiting.popleft()
            except IndexError:  # another one was faster
                return
            try:
                finished.put((item, work(item)))
            except BaseException as error:  # raised again where it is waited for
                finished.put(error)

    for number in range(min(AT_ONCE, len(todo))):
        try:
            Thread(target=worker, daemon=True).start()
        except RuntimeError:  # no more are to be had: those that there are do it all
            if not number:
                raise
            break
    failed: BaseException | None = None
    try:
        for _ in todo:
            got = finished.get()
            if isinstance(got, BaseException):
                failed = failed or got
            else:
                yield got
        if failed:
            raise failed
    finally:
        waiting.clear()


def succeeded(results: dict[K, R | RingctlError]) -> dict[K, R]:
    """The results; raises the first error, with how many more there were."""
    errors = [result for result in results.values() if isinstance(result, RingctlError)]
    if errors:
        if len(errors) > 1:
            errors[0].message += f" (and {len(errors) - 1} more hosts failed)"
        raise errors[0]
    return {item: result for item, result in results.items() if not isinstance(result, RingctlError)}


def exit_code(errors: Iterable[RingctlError]) -> int:
    """What they mean together: an unreachable host counts more than anything else."""
    codes = [error.exit_code for error in errors]
    return HostError.exit_code if HostError.exit_code in codes else max(codes, default=0)
