"""What a host is asked about runs: `hostd COMMAND`, with one JSON request on stdin.

    start    hoststart.py     make the run's folder, start the ranks detached, answer once they are under way
    follow   hostfollow.py    the run's events from a cursor on, raw, until the run is over
    runs     hostruns.py      the state of every run on this host
    tell     hoststop.py      that a run is about to be stopped, on all of its hosts
    stop     hoststop.py      end a run: TERM, grace, KILL, then a sweep for whatever still carries its id
    stacks   hostprogress.py  have the supervisor note where each rank is, as events of the run
    secrets  hostruns.py      the run's variables that no log may show, with their values
    slots    hostruns.py      which runs have slots of this host, of whichever user; its load, memory and disk

It is pushed to every host with all that it imports (kit.py): standard library only, Python 3.8 and up. The
processes of a run are drawn in hostwarden.py.
"""

from __future__ import annotations

import json
import signal
import sys

from launcher.hostanswer import answered
from launcher.hostfollow import command_follow
from launcher.hostprogress import command_stacks
from launcher.hostruns import command_runs, command_secrets, command_slots
from launcher.hoststart import claim_slots, command_start, give_back
from launcher.hoststop import command_stop, command_tell
from launcher.hostword import command_again

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

REQUEST_S = 60  # whoever began to ask and says no more has gone without a word


def main() -> int:
    command = sys.argv[1]
    commands: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
        "start": command_start,
        "follow": command_follow,
        "runs": command_runs,
        "again": command_again,
        "tell": command_tell,
        "stop": command_stop,
        "stacks": command_stacks,
        "secrets": command_secrets,
        "slots": command_slots,
    }
    claimed = None
    signal.alarm(REQUEST_S)
    text = sys.stdin.buffer.readline()
    if command == "start" and text.startswith(b'{"claim":'):
        claimed = json.loads(text)
        if answered(claim_slots, command, claimed):
            return 1
        signal.alarm(REQUEST_S)
        text = b""
    text += sys.stdin.buffer.read()
    signal.alarm(0)
    if command == "start" and not text:  # whoever was about to start something has thought better of it
        if claimed:
            give_back(claimed)
        return 0
    code = answered(commands[command], command, json.loads(text or b"{}"))
    if claimed and code:
        give_back(claimed)
    return code


if __name__ == "__main__":
    sys.exit(main())
