"""Whether what is installed has holes that are known here: the part of pip-audit that needs no connection.

    make audit

It knows only the table below: holes in what ringctl is made of that its use of a package could meet. Where
there is a connection, `pip-audit` knows the others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import metadata

# package: (the first version without the hole, the hole)
FIXED = {
    "paramiko": ("3.4.0", "CVE-2023-48795: somebody in between drops the first messages of a connection"),
    "cryptography": ("42.0.4", "CVE-2023-50782, CVE-2024-26130: RSA timing, and a crash on a PKCS#12 file"),
    "pyyaml": ("5.4", "CVE-2020-14343: code in a file that is loaded with the full loader"),
    "torch": ("2.6.0", "CVE-2025-32434: code in a file that is loaded with weights_only"),
}


def numbers(version: str) -> tuple[int, ...]:
    """The release as numbers: 2.13.0+cpu -> (2, 13, 0)."""
    return tuple(int(part) for part in re.split(r"[.]", re.split(r"[^0-9.]", version)[0]) if part)


def holes(installed: Mapping[str, str]) -> list[str]:
    """A line for each package that is older than it should be."""
    return [
        f"{name} {installed[name]}: take {first} or newer ({hole})"
        for name, (first, hole) in FIXED.items()
        if name in installed and numbers(installed[name]) < numbers(first)
    ]


def main() -> int:
    installed = {each.metadata["Name"].lower(): each.version for each in metadata.distributions()}
    found = holes(installed)
    print("\n".join(found) or f"none of the {len(FIXED)} holes that are known here")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
