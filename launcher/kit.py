"""ringctl's own files that run on hosts, and how they get there: by content, once, whole."""

from __future__ import annotations

import functools
import json
import os

PACKAGE = os.path.dirname(os.path.abspath(__file__))
FILES = (
    "hostd.py",
    "hoststore.py",
    "hostenv.py",
    "hostlook.py",
    "hostdata.py",
    "preflight/probe.py",
    "preflight/hostfacts.py",
    "preflight/mesh.py",
)

HERE = os.pathsep.join(dict.fromkeys(os.path.dirname(os.path.join(PACKAGE, file)) for file in FILES))

MISSING = b"--ringctl-missing--\n"

# Runs a file of the kit, or several in one process ("hoststore:check,probe"), each with its line of stdin.
# Imported rather than run as a script, so that Python keeps its compiled form. These lines are read by
# whatever Python a host has, so they are such that a very old one can still say that it is.
OLD = b"--ringctl-old--"
RUN = """
import os, sys
if sys.version_info < (3, 8):
    sys.stdout.write("--ringctl-old--%d.%d\\n" % tuple(sys.version_info[:2]))
    sys.exit(1)
sys.path[:0] = [os.path.expanduser(folder) for folder in sys.argv.pop(1).split(os.pathsep)]
code = 0
for call in sys.argv.pop(1).split(","):
    words = call.split(":")
    try:
        module = __import__(words[0])
    except ImportError:
        sys.stdout.write("--ringctl-missing--\\n")
        break
    sys.argv[1:] = words[1:] or sys.argv[1:]
    code = module.main() or code
sys.exit(code)
"""

# Writes the kit from stdin: beside its place first, then renamed, so that it is there whole or not at all.
# What the disk refuses is told with what it has left.
CANNOT = b"--ringctl-cannot--"
INSTALL = """
import json, os, shutil, sys, tempfile
os.umask(0o077)
folder, files = os.path.expanduser(sys.argv[1]), json.loads(sys.stdin.buffer.read())
beside = ""
try:
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    beside = tempfile.mkdtemp(dir=os.path.dirname(folder))
    for name, text in files.items():
        with open(os.path.join(beside, name), "w", encoding="utf-8") as f:
            f.write(text)
    os.rename(beside, folder)
except OSError as error:
    shutil.rmtree(beside, ignore_errors=True)
    if not os.path.isdir(folder):
        about = os.statvfs(os.path.expanduser("~"))
        left = about.f_favail if about.f_files else -1
        print("--ringctl-cannot--" + json.dumps([error.errno, error.strerror, str(error.filename), left]))
        sys.exit(1)
print("--ringctl-installed--")
"""
INSTALLED = b"--ringctl-installed--\n"


def module(source: str) -> str:
    """The name that a file of the kit is imported by."""
    return os.path.basename(source).removesuffix(".py")


@functools.cache
def contents() -> bytes:
    """What INSTALL reads."""
    files = {}
    for source in FILES:
        with open(os.path.join(PACKAGE, source), encoding="utf-8") as f:
            files[module(source) + ".py"] = f.read()
    return json.dumps(files, sort_keys=True).encode()


@functools.cache
def folder() -> str:
    """Where this version of the kit is on a host."""
    import hashlib  # not needed for this machine, where `ringctl ps` should cost next to nothing

    return f"~/.ringctl/kit/{hashlib.sha256(contents()).hexdigest()[:16]}"
