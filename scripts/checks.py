"""Print docs/preflight.md, made from the table of checks that `ringctl preflight` goes through:

python scripts/checks.py > docs/preflight.md
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launcher.preflight.checks import CHECKS

PAGE = """# Preflight

<!-- Made by scripts/checks.py from launcher/preflight/checks.py; change it there. -->

    ringctl preflight                        # all hosts of the inventory
    ringctl preflight --world 2              # only those that a launch of two ranks would use
    ringctl preflight -- --data ~/mnist      # what follows -- is as for launch
    ringctl preflight --fix                  # mend what can safely be mended, after a yes

Every host is asked once, over one connection, by one small process that says what it finds and then dials
every other host, both ways, with a message larger than a jumbo frame. Nothing is started, and nothing is
changed without `--fix`. `ringctl launch` does the same first, and is silent when all is well; it starts
nothing if something is in the way. `launch --skip-preflight` starts unchecked: what preflight would have
named in a second then shows as a run that fails, or hangs.

What is found is `ok`, `warn` (worth knowing; it harms those who start by hand, or may harm later), `fail`, or
`skip` where a check does not apply or the host could not be asked. Some failures block: a run would not start
or not get far. Exit code 0: a run would start; 3: something blocks it; 4: a host could not be reached.

Below each finding stands what to do about it. A line is typed on the host that it is about, by someone who
may use `sudo` where it says so; one that begins with `ringctl`, `ssh` or `rsync` is typed here. A change of
the inventory reads: write `ifname: eth0` for server2 in the inventory.

`--only` and `--skip` take names from the table below, `--deep` also imports torch on every host, `--verbose`
shows every check and every fact.

## JSON

`ringctl preflight --json` prints one object:

| key | value |
| --- | --- |
| `ok` | whether nothing blocks |
| `checks` | a list of `name`, `host`, `peer`, `status`, `blocking`, `found`, `wanted`, `fix` |
| `pairs` | a list of `from`, `to`, `latency_ms`, `mbit_s`, `problem`, `seen` |
| `facts` | with `--verbose`: by host, all that it said; for people, and free to change |

`status` is one of the four words above. `peer` is "" unless the check is about the way from `peer` to `host`.
`latency_ms` and `mbit_s` are null where not known, `problem` is "" where there is none, and `seen` is
the address that `to` saw the connection come from.

## The checks

"""


def document() -> str:
    lines = ["| area | check | what is as it should be |", "| --- | --- | --- |"]
    lines += [f"| {check.area} | `{check.name}` | {check.about} |" for check in CHECKS]
    return PAGE + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
