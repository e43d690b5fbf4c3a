"""ringctl's own files that run on hosts, and how they get there: by content, once, whole.

There they are the package `launcher` as well, cut down to these files, so that they import each other by the
same names everywhere.
"""

from __future__ import annotations

import functools
import json
import os

PACKAGE = os.path.dirname(os.path.abspath(__file__))
HERE = os.path.dirname(PACKAGE)
FILES = (
    "__init__.py",
    "hostd.py",
    "hoststart.py",
    "hostwarden.py",
    "hostsupervisor.py",
    "hostending.py",
    "hostranks.py",
    "hostcode.py",
    "hostprefork.py",
    "hostoutput.py",
    "hostpending.py",
    "hostprogress.py",
    "hostactivate.py",
    "hostevents.py",
    "hostfollow.py",
    "hostword.py",
    "hoststop.py",
    "hostbooks.py",
    "hostruns.py",
    "hostproc.py",
    "hostdisk.py",
    "hostanswer.py",
    "hostlease.py",
    "hostslots.py",
    "hosttop.py",
    "hoststore.py",
    "hostenv.py",
    "hostlook.py",
    "hostdata.py",
    "hostfiles.py",
    "preflight/__init__.py",
    "preflight/probe.py",
    "preflight/hostfacts.py",
    "preflight/mesh.py",
)
NAMES = [f"launcher/{file}" for file in FILES]

MISSING = b"--ringctl-missing--\n"

# Runs a file of the kit, or several in one process ("hoststore:check,probe"), each with its line of stdin.
# Imported rather than run as a script, so that Python keeps its compiled form. These lines are read by
# whatever Python a host has, so they are such that a very old one can still say that it is. A kit of which
# a part is gone, empty, cut short or garbled counts as missing. The standard library comes first: on this
# machine the folder is one that anything may be installed in. Whoever started us may
# have had SIGCHLD ignored: then nobody could wait for a child.
OLD = b"--ringctl-old--"
PROGRAM = """
import os, signal, sys
if sys.version_info < (3, 8):
    sys.stdout.write("--ringctl-old--%d.%d\\n" % tuple(sys.version_info[:2]))
    sys.exit(1)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
folder, sizes = os.path.expanduser(sys.argv.pop(1)), SIZES
paths = [(os.path.join(folder, name), sizes[name]) for name in sizes]
whole = all(os.path.isfile(path) and os.path.getsize(path) >= size for path, size in paths)
sys.path.append(folder)
code = 0
for call in sys.argv.pop(1).split(","):
    words = call.split(":")
    name = [name for name in sizes if name.endswith("/" + words[0] + ".py")][0]
    try:
        main = whole and __import__(name[:-3].replace("/", "."), fromlist=["main"]).main
    except (ImportError, SyntaxError, ValueError, EOFError, AttributeError):
        main = None
    if not main:
        sys.stdout.write("--ringctl-missing--\\n")
        break
    sys.argv[1:] = words[1:] or sys.argv[1:]
    code = main() or code
sys.exit(code)
"""
RUN = PROGRAM.replace("SIZES", repr(dict.fromkeys(NAMES, 1)))  # here: they may be newer than we are

# Writes the kit from stdin: beside its place first, then renamed, so that it is there whole or not at all.
# One that is there and damaged (a crash may leave empty files) is moved aside. What the disk refuses is told
# with what it has left. Who began to send it and says no more has gone without a word.
CANNOT = b"--ringctl-cannot--"
INSTALL = """
import json, os, shutil, signal, sys, tempfile, time
os.umask(0o077)
signal.alarm(60)
folder, files = os.path.expanduser(sys.argv[1]), json.loads(sys.stdin.buffer.read())
signal.alarm(0)
kits, beside = os.path.dirname(folder), ""
parts = sorted(set(os.path.dirname(name) for name in files))

def whole():
    try:
        return all(open(os.path.join(folder, name), encoding="utf-8").read() == files[name] for name in files)
    except (OSError, ValueError):
        return False

def settle(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)

try:
    os.makedirs(kits, exist_ok=True)
    for name in os.listdir(kits):
        path = os.path.join(kits, name)
        if name.startswith("tmp") and time.time() - os.lstat(path).st_ctime > 3600:
            shutil.rmtree(path, ignore_errors=True)
    if whole():
        for part in parts:
            shutil.rmtree(os.path.join(folder, part, "__pycache__"), ignore_errors=True)
    else:
        beside = tempfile.mkdtemp(dir=kits)
        for part in parts:
            os.makedirs(os.path.join(beside, part))
        for name, text in files.items():
            with open(os.path.join(beside, name), "w", encoding="utf-8") as f:
                f.write(text)
            settle(os.path.join(beside, name))
        for part in [""] + parts:
            settle(os.path.join(beside, part))
        if os.path.lexists(folder) and not whole():
            os.rename(folder, beside + "-old")
        os.rename(beside, folder)
        settle(kits)
except OSError as error:
    if not whole():
        shutil.rmtree(beside, ignore_errors=True)
        home = os.path.expanduser("~")
        where = next(place for place in (kits, os.path.dirname(kits), home) if os.path.isdir(place))
        about, own = os.statvfs(where), os.stat(where).st_dev != os.stat(home).st_dev
        left = about.f_favail if about.f_files else -1
        place = str(error.filename or folder)
        print("--ringctl-cannot--" + json.dumps([error.errno, error.strerror, place, left, own]))
        sys.exit(1)
for path in (beside, beside + "-old") if beside else ():
    shutil.rmtree(path, ignore_errors=True)
print("--ringctl-installed--")
"""
INSTALLED = b"--ringctl-installed--\n"


def module(source: str) -> str:
    """The name that RUN knows a file of the kit by."""
    return os.path.basename(source).removesuffix(".py")


@functools.cache
def texts() -> dict[str, str]:
    files = {}
    for name in NAMES:
        with open(os.path.join(HERE, name), encoding="utf-8") as f:
            files[name] = f.read()
    return files


@functools.cache
def contents() -> bytes:
    """What INSTALL reads."""
    return json.dumps(texts(), sort_keys=True).encode()


@functools.cache
def run_there() -> str:
    """RUN for another host, where each file is as long as it is here."""
    return PROGRAM.replace("SIZES", repr({name: len(text.encode()) for name, text in texts().items()}))


@functools.cache
def folder() -> str:
    """Where this version of the kit is on a host."""
    import hashlib  # not needed for this machine, where `ringctl ps` should cost next to nothing

    return f"~/.ringctl/kit/{hashlib.sha256(contents()).hexdigest()[:16]}"
