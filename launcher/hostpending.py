"""What a supervisor has read of a rank's pipe and not written, or how far it has read its metrics, kept where
its warden finds it."""

from __future__ import annotations

import mmap

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from collections.abc import Sequence

AT_WORK, HEAD = 0, 3  # the first byte: something is read or written now; then the length of what is kept


class Pending:
    """Memory that a warden and its hostd share, made before the one forks the other. As long as hostd reads
    and writes, nobody else can tell what would be lost with it; in between it is the beginning of a line."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def begin(self) -> None:
        self._memory[AT_WORK] = 1

    def done(self, rest: Sequence[bytes]) -> None:
        """All is written but these pieces of a line. If they are too long to be kept, it is as before."""
        size = 0
        for piece in rest:
            size += len(piece)
            if size > mmap.PAGESIZE - HEAD:  # and there may be millions, of a byte each
                return
        self._memory[1:HEAD] = size.to_bytes(HEAD - 1, "little")
        self._memory[HEAD : HEAD + size] = b"".join(rest)
        self._memory[AT_WORK] = 0

    @property
    def rest(self) -> bytes | None:
        """The beginning of a line, perhaps an empty one; None if more than that is lost."""
        size = int.from_bytes(self._memory[1:HEAD], "little")
        return None if self._memory[AT_WORK] else self._memory[HEAD : HEAD + size]
