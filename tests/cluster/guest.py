"""What runs inside a test host. A script of the standard library alone; a copy of it is on every host.

guest.py build            in new namespaces: makes the host's root from the JSON on stdin, enters it, sleeps
guest.py boot ID SHM      the host's first process: mounts what a reboot empties, starts sshd, reaps orphans
guest.py reap ARGV...     without namespaces: starts ARGV and stays the ancestor of all that comes of it
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from typing import Any

SSHD = ("/usr/sbin/sshd", "-E", "/var/log/sshd.log")

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 32, 4096, 16384
MNT_DETACH = 2
PR_SET_CHILD_SUBREAPER = 36
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "fd/0",
    "stdout": "fd/1",
    "stderr": "fd/2",
    "ptmx": "pts/ptmx",
}

libc = ctypes.CDLL(None, use_errno=True)


def build(spec: dict[str, Any]) -> None:
    """Make a root that holds the machine's /usr, a Python and what the spec says, and move into it."""
    root = spec["root"]
    mount("tmpfs", root, "tmpfs", MS_NODEV, "mode=0755")
    for folder, mode in spec["folders"]:
        os.makedirs(root + folder, exist_ok=True)
        os.chmod(root + folder, mode)
    for source, target in spec["read_only"]:
        os.makedirs(root + target, exist_ok=True)
        bind(source, root + target, read_only=True)
    copy_etc(root)
    for path, text, mode in spec["files"]:
        write(root + path, text, mode)
    for path, target in spec["links"]:
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(target, root + path)
    for source, target in spec["covers"]:
        bind(root + source, root + target)
    make_devices(root)
    make_sys(root)
    make_home(root, spec["home"])
    socket.sethostname(spec["hostname"])
    enter(root)


def copy_etc(root: str) -> None:
    """The few system files that programs look for; the rest of /etc is the host's own."""
    for name in ("bash.bashrc", "ld.so.cache", "localtime", "profile", "protocols", "services"):
        if os.path.lexists(f"/etc/{name}"):
            shutil.copy2(f"/etc/{name}", f"{root}/etc/{name}", follow_symlinks=False)


def make_devices(root: str) -> None:
    for name in DEVICES:
        write(f"{root}/dev/{name}", "", 0o666)
        bind(f"/dev/{name}", f"{root}/dev/{name}")
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, f"{root}/dev/{name}")


def make_sys(root: str) -> None:
    """A sysfs that shows this network namespace's interfaces, with the machine's control groups in it."""
    mount("sysfs", f"{root}/sys", "sysfs", MS_RDONLY, "")
    if os.path.isdir(f"{root}/sys/fs/cgroup"):
        bind("/sys/fs/cgroup", f"{root}/sys/fs/cgroup")


def make_home(root: str, home: dict[str, Any]) -> None:
    """A file system of its own, so that it can be full while the rest of the host is not."""
    os.makedirs(root + home["path"])
    options = "mode=0750,size={size},nr_inodes={inodes},uid={uid},gid={uid}".format(**home)
    mount("tmpfs", root + home["path"], "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.makedirs(f"{root}{home['path']}/.ssh")
    write(f"{root}{home['path']}/.ssh/authorized_keys", home["authorized_keys"], 0o600)
    for path, mode in ((".ssh", 0o700), (".ssh/authorized_keys", 0o600)):
        os.chmod(f"{root}{home['path']}/{path}", mode)
        os.chown(f"{root}{home['path']}/{path}", home["uid"], home["uid"])


def enter(root: str) -> None:
    """Make this the root of the mount namespace and let go of the machine's."""
    old = root + "/old"
    os.mkdir(old)
    check(libc.pivot_root(root.encode(), old.encode()), f"pivot_root {root}")
    os.chdir("/")
    check(libc.umount2(b"/old", MNT_DETACH), "umount /old")
    os.rmdir("/old")


def boot(boot_id: str, shm_size: str) -> None:
    """Do what a machine does between power-on and a listening sshd."""
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={shm_size}")
    mount("devpts", "/dev/pts", "devpts", MS_NOSUID, "newinstance,ptmxmode=0666,mode=0620,gid=5")
    write("/run/boot_id", boot_id + "\n", 0o444)
    bind("/run/boot_id", "/proc/sys/kernel/random/boot_id")
    os.mkdir("/run/sshd", 0o755)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))  # what a login has on a usual server
    subprocess.run(SSHD, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, check=True)


def reap_forever() -> None:
    """Collect every child that ends, our own or adopted. A child started later would inherit the mask."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        reap()
        signal.sigwait({signal.SIGCHLD})


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass  # no child at all


def report_ready() -> None:
    """Say so on stdout, and let go of it: whoever started us may go away."""
    print("ready", flush=True)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    result = libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode())
    check(result, f"mount {source} on {target}")


def bind(source: str, target: str, read_only: bool = False) -> None:
    mount(source, target, "", MS_BIND | MS_REC, "")
    if read_only:
        mount("", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY, "")


def check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def write(path: str, text: str, mode: int) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, mode)


def main(command: str, *arguments: str) -> None:
    os.umask(0o022)
    if command == "build":
        build(json.load(sys.stdin))
        report_ready()
        os.execv("/usr/bin/sleep", ["sleep", "infinity"])
    if command == "boot":
        boot(*arguments)
    elif command == "reap":
        check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
        subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    report_ready()
    reap_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
