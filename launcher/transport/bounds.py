"""What a server may send at once: paramiko grants it a window, and takes whatever comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import paramiko
from paramiko.common import MSG_CHANNEL_DATA, MSG_CHANNEL_EXTENDED_DATA
from paramiko.packet import Packetizer

LONGEST_PACKET = 1 << 18  # as sshd has it; what we ask for is shorter


class Unasked(paramiko.SSHException):
    """A server sent more than it may; the connection is over."""


class BoundedPackets(Packetizer):
    """Of a length that is believed before anything has come of it."""

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        if n > LONGEST_PACKET:
            raise Unasked(f"Invalid packet length {n}")
        return super().read_all(n, check_rekey)


def within_window(feed: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """What nobody has taken yet of both streams is no more than what the channel asked for."""

    def fed(channel: Any, message: Any) -> None:
        feed(channel, message)
        held = len(channel.in_buffer) + len(channel.in_stderr_buffer)
        if held > channel.in_window_size + LONGEST_PACKET:
            channel.in_buffer.empty()  # whoever comes back often has much of it before Python frees it
            channel.in_stderr_buffer.empty()
            raise Unasked(
                f"Invalid amount of data: {held} bytes, and {channel.in_window_size} were asked for"
            )

    return fed


class BoundedTransport(paramiko.Transport):
    """One that ends when its server sends more than it may."""

    _channel_handler_table: ClassVar[dict[int, Callable[[Any, Any], None]]] = {
        kind: within_window(handle) if kind in (MSG_CHANNEL_DATA, MSG_CHANNEL_EXTENDED_DATA) else handle
        for kind, handle in vars(paramiko.Transport)["_channel_handler_table"].items()
    }

    def __init__(self, sock: Any, **options: Any) -> None:
        super().__init__(sock, packetizer_class=BoundedPackets, **options)
