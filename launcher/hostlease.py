"""The lease on a run: its supervisors hear of each other, and none goes on as if it were alone.

Standard library only, Python 3.8 and up; hostd imports it. Rank 0's supervisor, the leader, hears datagrams
at the master's address and port, which are the run's own (its ranks use the port with TCP). The others tell
it once a second that they are there; it answers, and passes on what it was told. Who has ended says so
instead, more often, until the leader has heard it; the leader stays until all of the others have. The rules
are in docs/decisions/008-leases.md.

Each datagram is signed with a secret of this attempt, and counts only if it is newer than the last one of its
sender, so nobody else can hold a lease, end a run, or use what belonged to an attempt before.
"""

from __future__ import annotations

import json
import os
import time

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    import socket
    from typing import Any

BEAT_S = 1.0
BYE_S = 0.2  # who has ended, and waits only until the leader knows
LARGEST = 1400  # bytes: fits into one packet of every network
LONGEST_REASON = 150
EARLY_TIMES = 8  # leases: so long after its own start a host may still hear of another for the first time
BYES = 3  # a datagram may get lost; that all of them are is what the lease is for
ASLEEP_S = 1.0  # who comes to look so much later than meant was stopped meanwhile
AT_ONCE = 256  # datagrams read in one go
SIGNATURE = 32


def sign(secret: bytes, message: dict[str, Any]) -> bytes:
    import hashlib
    import hmac

    text = json.dumps(message, separators=(",", ":")).encode()
    return hmac.new(secret, text, hashlib.sha256).digest() + text


def verified(secret: bytes, data: bytes) -> dict[str, Any] | None:
    """The message, or None for whatever was not sent by one of us."""
    import hashlib
    import hmac

    text = data[SIGNATURE:]
    if not hmac.compare_digest(hmac.new(secret, text, hashlib.sha256).digest(), data[:SIGNATURE]):
        return None
    message = json.loads(text)
    return message if isinstance(message, dict) else None


class Lease:
    """What one supervisor knows of the others, on its own monotonic clock."""

    def __init__(self, about: dict[str, Any], host: str) -> None:
        self.host, self.leader = host, str(about["leader"])
        self.place = (str(about["address"]), int(about["port"]))
        self.seconds = float(about["seconds"])
        self._others = int(about["others"])  # how many hosts besides the leader's
        self.over: dict[str, Any] | None = None  # how the run ended, if not well: {"state", "reason"}
        self._secret = bytes.fromhex(str(about["secret"]))
        self._socket: socket.socket | None = None
        self._opened = 0.0
        self._heard: dict[str, float] = {}  # when each was last heard of who ever was, and has not ended
        self._newest: dict[str, int] = {}
        self._addresses: dict[str, Any] = {}  # of the others, on the leader
        self._told: dict[str, float] = {}  # whom the leader misses, for how long
        self._told_at = 0.0
        self._next_beat = 0.0
        self._looked = 0.0  # when we last did: nobody is missed for the time in which we could not,
        self._excused: set[str] = set()  # but only once: a host that may always be late is heard in between
        self._words: dict[str, Any] = {"kind": "here"}  # what the leader is told
        self._ended = False  # on the leader: its own ranks have, or are about to
        self._known = False  # elsewhere: the leader has heard that they have here

    @property
    def leads(self) -> bool:
        return self.host == self.leader

    def open(self, now: float) -> int:
        """The descriptor to wait at; -1 if there can be no lease here, and the run goes on without."""
        import socket

        end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        end.setblocking(False)
        try:
            if self.leads:
                end.bind(self.place)
            else:
                end.connect(self.place)
        except OSError as error:
            end.close()
            os.write(2, f"no lease on the run: {self.place}: {error.strerror}\n".encode())
            return -1
        self._socket, self._opened, self._looked = end, now, now
        return end.fileno()

    def beat(self, now: float) -> float:
        """Called several times a second. For how long that could not be done: we were stopped, perhaps with
        all the others."""
        asleep, self._looked = now - self._looked, now
        if asleep > ASLEEP_S:
            if self.leader not in self._excused:
                self._told_at = min(self._told_at + asleep, now)
            for host in self._heard.keys() - self._excused:
                self._heard[host] = min(self._heard[host] + asleep, now)
            self._excused |= self._heard.keys()
        if not self.leads and now >= self._next_beat:
            waits = self._words["kind"] == "bye" and not self._known
            self._next_beat = now + (BYE_S if waits else BEAT_S)
            self._send(self._words, None)
        return asleep if asleep > ASLEEP_S else 0.0

    def attend(self, seconds: float) -> None:
        """Do all that a lease asks for, for so long or until something came."""
        import select

        if self._socket is None:
            time.sleep(seconds)
            return
        word = select.poll()
        word.register(self._socket, select.POLLIN)
        word.poll(seconds * 1000)
        self.receive(time.monotonic())
        self.beat(time.monotonic())

    def receive(self, now: float) -> None:
        """Take in what has come, but not for ever."""
        for _ in range(AT_ONCE):
            try:
                data, address = self._socket.recvfrom(LARGEST) if self._socket else (b"", None)
            except OSError:  # nothing more, or nobody listens there at the moment
                return
            message = verified(self._secret, data)
            if message is not None:
                self._take(message, address, now)

    def _take(self, message: dict[str, Any], address: Any, now: float) -> None:
        sender, number = str(message["host"]), int(message["number"])
        # The leader hears all others, and they hear the leader.
        known = sender != self.host if self.leads else sender == self.leader
        if not known or number <= self._newest.get(sender, -1):
            return
        self._newest[sender] = number
        self._heard[sender] = now
        self._excused.discard(sender)
        self._addresses[sender] = address
        if not self.leads:
            self._take_answer(message, now)
            return
        ended = message["kind"] == "bye"
        if ended:
            self._bye(sender, message)
        self._send(self._answer(now, known=ended), address)

    def _take_answer(self, message: dict[str, Any], now: float) -> None:
        self._told = {name: float(s) for name, s in message["silent"].items() if name != self.host}
        self._told_at = now
        self._known = self._known or message["known"]
        self.over = self.over or message["over"]
        if message["ended"]:
            self._heard.pop(self.leader)

    def _bye(self, sender: str, message: dict[str, Any]) -> None:
        """Whoever has ended is not missed. What did not end well is told to all the others at once."""
        self._heard.pop(sender)
        if message["state"] != "succeeded" and not self.over:
            self.over = {"state": message["state"], "reason": message["reason"]}
            self._tell_all()

    def _tell_all(self) -> None:
        for host in self._heard:
            self._send(self._answer(time.monotonic()), self._addresses[host])

    def _answer(self, now: float, known: bool = False) -> dict[str, Any]:
        silent = dict(sorted(self.silent(now).items())[:4])
        return {"kind": "here", "silent": silent, "over": self.over, "ended": self._ended, "known": known}

    def silent(self, now: float) -> dict[str, float]:
        """Those who were there once and have not been heard of for longer than the lease: for how long."""
        found = {host: now - heard for host, heard in self._heard.items() if now - heard > self.seconds}
        return found or (self._told if now - self._told_at <= self.seconds else {})

    def bye(self, state: str, reason: str) -> None:
        """This host's part is over: say so to whoever can be told, and from now on whenever there is word."""
        words = {"state": state, "reason": reason[:LONGEST_REASON]}
        if self.leads:
            self._ended = True
            self.over = self.over or (words if state != "succeeded" else None)
        else:
            self._words = dict(words, kind="bye")
        for _ in range(BYES):
            if self.leads:
                self._tell_all()
            else:
                self._send(self._words, None)

    def is_needed(self, now: float, since: float) -> bool:
        """Whether the lease is to be kept, though all has ended here `since` then. The leader does that for
        those that go on, the others until the leader knows: each for one that is heard of, or for a lease;
        for those that were not heard of yet for some leases from the start, for theirs may take a while."""
        early = self._socket is not None and now - self._opened <= EARLY_TIMES * self.seconds
        if self.leads:
            late = early and len(self._newest) < self._others
            return late or any(now - max(heard, since) <= self.seconds for heard in self._heard.values())
        met = self.leader in self._newest
        return not (self._known or self.over) and (now - since <= self.seconds if met else early)

    def _send(self, message: dict[str, Any], address: Any) -> None:
        if self._socket is None:
            return
        data = sign(self._secret, dict(message, host=self.host, number=time.monotonic_ns()))
        try:
            if address is None:
                self._socket.send(data)
            else:
                self._socket.sendto(data, address)
        except OSError:
            pass  # it is not there, or cannot be reached: that is what silence is made of
