"""MNIST's files from this machine to the hosts that lack them: read, verified, sent, verified again."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Mapping

from launcher.agent import Agent, understood
from launcher.errors import InputError, RingctlError
from launcher.fanout import fan_out
from launcher.logs import visible
from launcher.preflight import hostfacts
from launcher.push import Packer

COPY_S = 3600.0


def is_whole(folder: str) -> bool:
    """Whether the folder is on this machine, with all that a host could be given of it."""
    found = hostfacts.dataset(folder)
    return bool(found) and all(name and words[:1] != "!" for name, words in found.items())


def contents(folder: str) -> dict[str, bytes]:
    """The four files, unpacked; InputError if one cannot be read."""
    place, suffix = hostfacts.idx_place(os.path.expanduser(folder))
    found = {}
    for name in hostfacts.IDX_FILES:
        path = os.path.join(place, name + suffix)
        try:
            with gzip.open(path) if suffix else open(path, "rb") as f:
                found[name] = f.read()
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return found


def copy(agents: Mapping[str, Agent], folder: str) -> dict[str, str | RingctlError]:
    """Put them into the same folder of the hosts; what is whole there stays as it is."""
    try:
        files = contents(folder)
    except InputError as error:
        return dict.fromkeys(agents, error)
    about = [(name, hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()]
    packer = Packer()
    for data in files.values():
        packer.add(data)
    body = packer.finish()

    def put(name: str) -> str:
        request = {"folder": folder, "files": about}
        answer = agents[name].ask("hostdata.py", [], request, body, timeout=COPY_S)
        with understood(name):
            folder_there, missing = visible(answer["folder"]), len(answer["written"])
        return f"has the dataset in {folder_there} ({missing} files were missing)"

    return fan_out(agents, put)
