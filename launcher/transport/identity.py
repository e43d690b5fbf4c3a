"""Who we are to a server, proven as ssh does it: with keys of the agent, with key files, at last with a
password. What is secret is asked for on the terminal, once, however many hosts want it."""

from __future__ import annotations

import base64
import contextlib
import os
import shlex
import sys
import termios
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import paramiko

USUAL_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
PASSWORD_TYPES = {"password", "keyboard-interactive"}


class Denied(paramiko.AuthenticationException):
    """We could not prove who we are. Says why, and what to do."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix


# --- Secrets -------------------------------------------------------------------------------------


class Secrets:
    """Passphrases and passwords, each asked for once, and the keys they open, each opened once."""

    def __init__(self, no_input: bool) -> None:
        self.may_ask = not no_input and sys.stdin.isatty()
        self._lock = threading.RLock()  # one question at a time
        self._answers: dict[str, str] = {}
        self._keys: dict[str, paramiko.PKey | Denied] = {}
        self._interrupted = False

    def ask(self, question: str) -> str:
        """What the user types, unseen; KeyboardInterrupt for this host and all others on Ctrl-C."""
        with self._lock:
            if self._interrupted:
                raise KeyboardInterrupt
            if question not in self._answers:
                try:
                    self._answers[question] = read_secret(question)
                except KeyboardInterrupt:
                    self._interrupted = True
                    raise
            return self._answers[question]

    def key(self, path: str) -> paramiko.PKey:
        """The private key in a file; Denied if it cannot be had."""
        with self._lock:
            if path not in self._keys:
                try:
                    self._keys[path] = self._open(path)
                except Denied as error:
                    self._keys[path] = error
            found = self._keys[path]
        if isinstance(found, Denied):
            raise found
        return found

    def _open(self, path: str) -> paramiko.PKey:
        try:
            return read_key(path, None)
        except TypeError:
            if not self.may_ask:
                raise Denied(
                    f"the key file {path} is encrypted and nobody is there to ask for its passphrase",
                    f"give it to an agent first: ssh-add {shlex.quote(path)}",
                ) from None
        passphrase = self.ask(f"Passphrase for {path}: ").encode()
        try:
            return read_key(path, passphrase)
        except Denied:
            raise Denied(f"that is not the passphrase of the key file {path}", "try again") from None


def read_key(path: str, passphrase: bytes | None) -> paramiko.PKey:
    """TypeError, as the library has it, if it is encrypted and there is no passphrase."""
    try:
        return paramiko.PKey.from_path(path, passphrase)  # type: ignore[arg-type]  # it wants bytes, not str
    except OSError as error:
        raise Denied(f"the key file {path} cannot be read: {error.strerror}") from None
    except (ValueError, paramiko.pkey.UnknownKeyType, paramiko.SSHException):
        raise Denied(f"the file {path} is not a private key that can be used here") from None


def read_secret(question: str) -> str:
    """A line typed on the terminal, unseen. Threads ask, and Ctrl-C would end only the main one's wait: so
    here it is a character that ends the line."""
    tty = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    try:
        before = termios.tcgetattr(tty)
        quiet = termios.tcgetattr(tty)
        quiet[3] &= ~(termios.ECHO | termios.ISIG)
        quiet[6][termios.VEOL] = b"\x03"
        termios.tcsetattr(tty, termios.TCSAFLUSH, quiet)
        try:
            os.write(tty, question.encode())
            typed = os.read(tty, 4096)
        finally:
            termios.tcsetattr(tty, termios.TCSAFLUSH, before)
            os.write(tty, b"\n")
    finally:
        os.close(tty)
    if not typed or typed.endswith(b"\x03"):
        raise KeyboardInterrupt
    return typed.rstrip(b"\r\n").decode(errors="surrogateescape")


# --- Proving it ----------------------------------------------------------------------------------


@dataclass
class Identity:
    """What paramiko calls a strategy: `authenticate` is all it asks of one."""

    user: str
    where: str  # "train@192.168.0.1", for questions and complaints
    ssh_words: str  # the same on the command line of ssh
    files: list[str]  # in the order in which they are offered
    only: bool  # the agent's other keys stay out of it
    secrets: Secrets
    offered: list[str] = field(default_factory=list)

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        problem: Denied | None = None
        self.offered = []
        with agent_keys() as held:
            for name, in_agent in self.keys(held):
                try:
                    key = in_agent or self.secrets.key(name)
                except Denied as error:
                    problem = problem or error
                    continue
                self.offered.append(name)
                left = self.attempt(transport, key)
                if left == []:
                    return []
                if left is not None and "publickey" not in left:
                    break  # not with keys, or not with keys alone
        if self.secrets.may_ask and password_types(transport, self.user):
            return self.with_password(transport)
        raise self.complaint(problem)

    def keys(self, held: list[paramiko.AgentKey]) -> Iterator[tuple[str, paramiko.PKey | None]]:
        """(name, the agent's key, or None for a file of that name), in ssh's order: files that are in the
        agent, what else is in the agent, other files."""
        in_agent = {key.asbytes(): key for key in held}
        public = {path: public_part(path) for path in self.files}
        named = [path for path in self.files if public[path] in in_agent]
        yield from ((path, in_agent[public[path] or b""]) for path in named)
        if not self.only:
            mine = {public[path] for path in named}
            others = [key for blob, key in in_agent.items() if blob not in mine]
            yield from ((f"{key.comment or key.get_name()} of the agent", key) for key in others)
        yield from ((path, None) for path in self.files if path not in named)

    def attempt(self, transport: paramiko.Transport, key: paramiko.PKey) -> list[str] | None:
        """[] if that was enough, else what else the server wants or takes; None if just not this key."""
        try:
            return list(transport.auth_publickey(self.user, key))
        except paramiko.BadAuthenticationType as error:
            return list(error.allowed_types)
        except paramiko.SSHException:
            if transport.is_active():
                return None
            raise Denied(
                f"{self.where} hung up after {len(self.offered)} keys: {', '.join(self.offered)}",
                "say which one it is: identity_file in the inventory, and IdentitiesOnly in ~/.ssh/config",
            ) from None

    def with_password(self, transport: paramiko.Transport) -> list[str]:
        password = self.secrets.ask(f"Password for {self.where}: ")
        try:
            return list(transport.auth_password(self.user, password))
        except paramiko.SSHException:
            raise Denied(f"{self.where} does not take that password", "try again") from None

    def complaint(self, problem: Denied | None) -> Denied:
        if problem and not self.offered:
            return problem
        keys = f"none of the keys offered: {', '.join(self.offered)}" if self.offered else "no key to offer"
        what = "it takes" if self.offered else "there was"
        also = f" ({problem})" if problem else ""
        return Denied(f"authentication failed for {self.where}: {what} {keys}{also}", self.let_in())

    def let_in(self) -> str:
        """The command that makes the server take a key of ours, for who has another way in."""
        if not self.offered:
            own = USUAL_KEYS[0]
            return f"ssh-keygen -t ed25519 -f {own} && ssh-copy-id -i {own} {self.ssh_words}"
        own, public = "", ""
        if self.files:
            key = shlex.quote(self.files[0])
            own = f"-i {key} "
            there = os.path.isfile(f"{self.files[0]}.pub")
            public = "" if there else f"ssh-keygen -y -f {key} >{key}.pub && "
        other = "or name another key: identity_file in the inventory"
        return f"{public}ssh-copy-id {own}{self.ssh_words}  # {other}"


@contextlib.contextmanager
def agent_keys() -> Iterator[list[paramiko.AgentKey]]:
    """The keys of the user's agent; none where there is no agent, or one that does not answer."""
    try:
        agent = paramiko.Agent()
    except (paramiko.SSHException, OSError):
        yield []
        return
    try:
        yield list(agent.get_keys())
    finally:
        agent.close()


def password_types(transport: paramiko.Transport, user: str) -> set[str]:
    """Which ways of asking for a password the server has."""
    try:
        transport.auth_none(user)
    except paramiko.BadAuthenticationType as error:
        return PASSWORD_TYPES & set(error.allowed_types)
    except paramiko.SSHException:
        pass
    return set()


def public_part(path: str) -> bytes | None:
    """The public key of a private one, which can be told without its passphrase; None if it cannot."""
    for name in (path + ".pub", path):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(name, "rb") as file:
                data = file.read(1 << 16)
            if data.startswith(b"-----BEGIN OPENSSH PRIVATE KEY-----"):
                return in_private(base64.b64decode(b"".join(data.split(b"\n")[1:-1]).partition(b"-")[0]))
            return base64.b64decode(data.split()[1], validate=True)
    return None


def in_private(data: bytes) -> bytes:
    """Behind the magic word are cipher, key derivation, its options, how many keys; then the public one."""
    message = paramiko.Message(data.partition(b"openssh-key-v1\0")[2])
    for _ in range(3):
        message.get_binary()
    message.get_int()
    return message.get_binary()
