"""Do one thing on many hosts at once; never stop at the first that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from launcher.errors import RingctlError

K = TypeVar("K")
R = TypeVar("R")

AT_ONCE = 64


def fan_out(items: Iterable[K], work: Callable[[K], R]) -> dict[K, R | RingctlError]:
    """{item: its result, or the error it ended with}, in the order given. Our own bugs are raised."""

    def attempt(item: K) -> R | RingctlError:
        try:
            return work(item)
        except RingctlError as error:
            return error

    todo = list(items)
    if len(todo) < 2:
        return {item: attempt(item) for item in todo}
    from concurrent.futures import ThreadPoolExecutor  # costs what `ringctl ps` on one machine need not pay

    with ThreadPoolExecutor(max_workers=min(AT_ONCE, len(todo))) as pool:
        return dict(zip(todo, pool.map(attempt, todo), strict=True))


def succeeded(results: dict[K, R | RingctlError]) -> dict[K, R]:
    """The results; raises the first error, with how many more there were."""
    errors = [result for result in results.values() if isinstance(result, RingctlError)]
    if errors:
        if len(errors) > 1:
            errors[0].message += f" (and {len(errors) - 1} more hosts failed)"
        raise errors[0]
    return {item: result for item, result in results.items() if not isinstance(result, RingctlError)}
