"""What a host says of itself: standard library only, Python 3.8 and up, beside probe.py."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
import time

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from typing import Any

SIOCGIFCONF = 0x8912
PORTS_FROM = 20000  # below the usual ephemeral range, above what services use
RESOLVE_S = 3.0  # for all names together
STALE = ("TORCHELASTIC_", "PET_")
FIREWALLS = ("ufw", "firewall-cmd", "nft", "iptables")
CPU_FLAGS = ("avx", "avx2", "avx512f", "asimd")
READ_ONLY = os.strerror(errno.EROFS)
SAMPLES, SAMPLE_BYTES = 64, 1024  # of a data file
IDX_FILES = {
    "train-images-idx3-ubyte": 3,
    "train-labels-idx1-ubyte": 1,
    "t10k-images-idx3-ubyte": 3,
    "t10k-labels-idx1-ubyte": 1,
}


def text_of(path: str) -> str:
    """A small file of the system; "" if there is none."""
    try:
        with open(path, errors="replace") as f:
            return f.read(1 << 20)
    except OSError:
        return ""


def now() -> float:
    """The host's clock; tests set it wrong by a variable."""
    return time.time() + float(os.environ.get("RINGCTL_TEST_CLOCK_S") or 0)


# --- Cores, memory, limits -----------------------------------------------------------------------


def usable_cores() -> int:
    """How many cores a process of ours may use: affinity, and the cgroup's share where it is less."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = text_of("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def usable_memory() -> int:
    """Bytes that processes of ours may still take: what the machine has, or the cgroup leaves."""
    lines = text_of("/proc/meminfo").splitlines()
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for group in cgroups():
        limit, used = (text_of(f"{group}/memory.{what}").strip() for what in ("max", "current"))
        if limit.isdigit() and used.isdigit():
            found.append(max(0, int(limit) - int(used)))
    return min(found) if found else -1


def cgroups() -> list[str]:
    """The folders of our control group and those above it."""
    path = "/"
    for line in text_of("/proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            path = line[3:]
    parts = [part for part in path.split("/") if part]
    return ["/".join(["/sys/fs/cgroup"] + parts[:depth]) for depth in range(len(parts), -1, -1)]


def limits() -> tuple[list[int], int]:
    """((soft, hard) of open files, how many more threads the user may start); -1 for no limit."""
    import resource

    nofile = list(resource.getrlimit(resource.RLIMIT_NOFILE))
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if most < 0 or os.getuid() == 0:
        return nofile, -1
    return nofile, max(0, most - threads_of_user())


def threads_of_user() -> int:
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return count


def kills_on_logout() -> bool:
    """Whether logind would end our processes with the SSH session: its setting, unless the user lingers."""
    if not os.path.isdir("/run/systemd/system"):
        return False
    files = ["/etc/systemd/logind.conf"]
    for folder in (
        "/usr/lib/systemd/logind.conf.d",
        "/run/systemd/logind.conf.d",
        "/etc/systemd/logind.conf.d",
    ):
        try:
            files += [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
        except OSError:
            continue
    setting = "no"
    for path in files:
        for line in text_of(path).splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "KillUserProcesses":
                setting = value.strip().lower()
    lingers = os.path.exists(f"/var/lib/systemd/linger/{user_name()}")
    return setting in ("yes", "true", "1", "on") and not lingers


def user_name(uid: int | None = None) -> str:
    import pwd

    number = os.getuid() if uid is None else uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def cpu_flags() -> list[str]:
    for line in text_of("/proc/cpuinfo").splitlines():
        if line.lower().startswith(("flags", "features")):
            return [flag for flag in CPU_FLAGS if flag in line.split()]
    return []


def gpu_count() -> int:
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


# --- Network -------------------------------------------------------------------------------------


def ephemeral_range() -> tuple[int, int]:
    try:
        low, high = text_of("/proc/sys/net/ipv4/ip_local_port_range").split()
        return int(low), int(high)
    except ValueError:
        return 32768, 60999


def is_free(port: int) -> bool:
    """Whether somebody could listen there; the rest of an old connection is no obstacle."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
            s.listen(1)
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port that nobody listens on and that no outgoing connection will be given; 0 if there is none."""
    low, high = ephemeral_range()
    below, above = range(PORTS_FROM, max(PORTS_FROM, low)), range(max(PORTS_FROM, high + 1), 65536)
    count = len(below) + len(above)
    start = int.from_bytes(os.urandom(4), "big")
    for step in range(count):
        place = (start + step) % count
        port = below[place] if place < len(below) else above[place - len(below)]
        if is_free(port):
            return port
    return 0


def port_use(port: int) -> dict[str, Any] | None:
    """Whether the port that the user wants is free here, and who has it."""
    if not port:
        return None
    about: dict[str, Any] = {"port": port, "free": is_free(port), "reserved": is_reserved(port)}
    if not about["free"]:
        about["owner"], about["run"] = holder_of(port)
        about["free"] = about["owner"].endswith("(another preflight)")  # which will be gone in a moment
    return about


def is_reserved(port: int) -> bool:
    """Whether the kernel leaves it out when it gives ephemeral ports."""
    for part in text_of("/proc/sys/net/ipv4/ip_local_reserved_ports").strip().split(","):
        low, _, high = part.partition("-")
        if low.isdigit() and int(low) <= port <= int(high or low):
            return True
    return False


def holder_of(port: int) -> tuple[str, str]:
    """(who listens on a port, the run of ours it belongs to), as far as we may see."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in text_of(table).splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                user, inode = user_name(int(fields[7])), fields[9]
                pid = process_with(f"socket:[{inode}]")
                if pid is None:
                    return f"a process of {user}", ""
                words = text_of(f"/proc/{pid}/cmdline").replace("\0", " ").split()
                if words[-1:] and words[-1].endswith("probe,hostd:start"):
                    return f"pid {pid} of {user} (another preflight)", ""
                return f"pid {pid} of {user} ({' '.join(words)[:80]})", run_of(pid)
    return "somebody", ""


def process_with(link: str) -> int | None:
    """The process of ours that has this open."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                for fd in os.listdir(f"/proc/{name}/fd"):
                    if os.readlink(f"/proc/{name}/fd/{fd}") == link:
                        return int(name)
            except OSError:
                continue
    return None


def run_of(pid: int) -> str:
    for pair in text_of(f"/proc/{pid}/environ").split("\0"):
        if pair.startswith("RINGCTL_RUN="):
            return pair.partition("=")[2]
    return ""


def interfaces() -> list[dict[str, Any]]:
    """All interfaces, once for each of their IPv4 addresses; a second address may have a label (eth0:1)."""
    addresses = labelled_addresses()
    named = [name for _, name in socket.if_nameindex()]
    bare = [(name, "") for name in named if name not in {label.split(":")[0] for label, _ in addresses}]
    found = []
    for label, address in addresses + bare:
        name = label.split(":")[0]
        mtu = text_of(f"/sys/class/net/{name}/mtu").strip()
        state = text_of(f"/sys/class/net/{name}/operstate").strip()
        up = state in ("up", "unknown")  # loopback and tunnels do not know
        found.append({"name": label, "address": address, "mtu": int(mtu or 0), "up": up})
    return found


def labelled_addresses() -> list[tuple[str, str]]:
    """(interface or label, IPv4 address), as the kernel lists them."""
    import array
    import fcntl

    size = struct.calcsize("16s24x")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        space = array.array("B", bytes(size * 256))
        request = struct.pack("iL", len(space), space.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(s.fileno(), SIOCGIFCONF, request))[0]
    data = space.tobytes()[:used]
    entries = [data[start : start + size] for start in range(0, used - size + 1, size)]
    return [(e[:16].rstrip(b"\0").decode(errors="replace"), socket.inet_ntoa(e[20:24])) for e in entries]


def firewalls() -> list[str]:
    """Tools to let somebody in with, the one in charge first. Of the two that are services, only if it is."""
    in_charge = {
        "ufw": lambda: "ENABLED=yes" in text_of("/etc/ufw/ufw.conf").split(),
        "firewall-cmd": lambda: runs("firewalld"),
    }
    return [name for name in FIREWALLS if has_program(name) and in_charge.get(name, lambda: True)()]


def runs(name: str) -> bool:
    return any(text_of(f"/proc/{pid}/comm").strip() == name for pid in os.listdir("/proc") if pid.isdigit())


def source_address(peer: str) -> str:
    """The address this host would use towards `peer`; "" if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect((peer, 9))  # sends nothing: only the kernel's choice of route is asked
        except OSError:
            return ""
        return str(s.getsockname()[0])


def data_path(request: dict[str, Any], has: list[dict[str, Any]]) -> tuple[str, str, dict[str, str]]:
    """(address, interface) for gradients: what the inventory names, as far as it is there, else the way to
    the peers, loopback when there are none; and the interface towards each peer."""
    peers, ifname, own = request.get("peers") or [], request.get("ifname") or "", request.get("data_address")
    names = {each["address"]: each["name"] for each in has if each["address"]}
    sources = {peer: source_address(peer) for peer in peers}
    routes = {peer: names.get(source, "") for peer, source in sources.items()}
    if own in names and ifname in ("", names[own]):
        return str(own), names[own], routes
    for each in has:
        if each["name"] == ifname and each["address"]:
            return each["address"], ifname, routes
    for source in sources.values():
        if source in names:
            return source, names[source], routes
    return "127.0.0.1", names.get("127.0.0.1", "lo"), routes


def meanings(names: list[str]) -> dict[str, list[str]]:
    """The addresses of each name as programs here would be told them; none where that took too long."""
    import threading

    found: dict[str, list[str]] = {name: [] for name in names}
    todo = list(names)

    def resolve() -> None:
        while todo:
            try:
                name = todo.pop(0)
                found[name] = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name.encode(), None)})
            except (OSError, UnicodeError, IndexError):
                continue

    threads = [threading.Thread(target=resolve, daemon=True) for _ in range(min(4, len(names)))]
    deadline = time.monotonic() + RESOLVE_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {name: list(addresses) for name, addresses in found.items()}


def hosts_lines(names: list[str]) -> list[str]:
    """Lines of /etc/hosts about these names."""
    lines = [line.partition("#")[0].strip() for line in text_of("/etc/hosts").splitlines()]
    return [line for line in lines if set(line.split()[1:]) & set(names)][:100]


# --- Folders -------------------------------------------------------------------------------------


def home_folder() -> str:
    return os.environ.get("RINGCTL_HOME") or os.path.expanduser("~/.ringctl")


def identity() -> str:
    """The same for two names of one host: this machine since it was started, and this user's folder on it."""
    place = os.stat(os.path.expanduser("~"))
    return f"{text_of('/proc/sys/kernel/random/boot_id').strip()}:{place.st_dev}:{place.st_ino}"


def folder(role: str, path: str) -> dict[str, Any]:
    """A place that is written to: what is free, and whether writing works."""
    path = os.path.abspath(os.path.expanduser(path))
    about: dict[str, Any] = {"role": role, "path": path}
    place, below = path, ""
    while not os.path.isdir(place):
        place, below = os.path.dirname(place), place
    if role == "workdir" and below:
        can_be_made = os.access(place, os.W_OK | os.X_OK) and not os.path.lexists(below)
        also = "" if can_be_made else ", and it cannot be made"
        return dict(about, problem=f"there is no folder {path}{also}")
    if os.path.lexists(below):
        return dict(about, problem=f"{below} is no folder")
    if role == "home" and os.path.isdir(os.path.join(place, "runs")):
        place = os.path.join(place, "runs")
    try:
        about.update(free_space(place))
        about["on_home_disk"] = os.stat(place).st_dev == os.stat(os.path.expanduser("~")).st_dev
        tried = write_test(place)
        about["problem"] = tried if READ_ONLY in tried else foreign(role, path) or tried
    except OSError as error:
        about["problem"] = foreign(role, path) or f"{place}: {error.strerror}"
    return about


def foreign(role: str, path: str) -> str:
    """Whether it, or ringctl's own folder in it, belongs to someone else. ringctl's own must be ours alone;
    another one may be shared, as long as we can write to it."""
    from launcher.hoststore import not_ours

    problem = not_ours(path) if role == "home" else ""
    if problem:
        return problem
    for place in (path, os.path.join(path, "runs")):
        try:
            owner = os.stat(place).st_uid
        except OSError:
            continue
        if owner != os.getuid() and not os.access(place, os.W_OK | os.X_OK):
            return f"{place} belongs to {user_name(owner)}"
    return ""


def free_space(place: str) -> dict[str, int]:
    about = os.statvfs(place)
    inodes = about.f_favail if about.f_files else -1
    return {"free_bytes": about.f_bavail * about.f_frsize, "free_inodes": inodes}


def write_test(place: str) -> str:
    """Why a file cannot be written there; "" if it can. The file has no name, or not for long."""
    try:
        try:
            fd = os.open(place, os.O_TMPFILE | os.O_WRONLY, 0o600)
        except (OSError, AttributeError):  # this file system has no such files, or it is full
            name = os.path.join(place, f".ringctl-probe-{os.getpid()}")
            fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            os.unlink(name)
        try:
            os.write(fd, bytes(1 << 16))
        finally:
            os.close(fd)
    except OSError as error:
        return f"{place}: {error.strerror}"
    return ""


def dataset(path: str) -> dict[str, str]:
    """MNIST's files in the folder that ranks will be told: the shape of each, or what is wrong with it."""
    root = os.path.expanduser(path)
    place, suffix = idx_place(root)
    if place:
        return {name: idx_file(os.path.join(place, name), suffix) for name in IDX_FILES}
    if not os.path.isdir(root):
        return {"": f"there is no folder {path}"}
    return {"": f"{path} lacks MNIST's files: {', '.join(IDX_FILES)}, or all four as .gz"}


def idx_place(root: str) -> tuple[str, str]:
    """(the folder at or below `root` with all four files, "" or ".gz"); "" if there is none."""
    for suffix in ("", ".gz"):
        for place in (os.path.join(root, "MNIST", "raw"), os.path.join(root, "raw"), root):
            if all(os.path.isfile(os.path.join(place, name + suffix)) for name in IDX_FILES):
                return place, suffix
    return "", ""


def idx_file(path: str, suffix: str) -> str:
    """Its dimensions, as "10000 x 28 x 28"; else what is wrong, beginning with "!"."""
    import math

    try:
        size = os.path.getsize(path + suffix)
        if suffix:
            return packed_idx_file(path + suffix)
        with open(path, "rb") as f:
            head = f.read(16)
    except OSError as error:
        return f"! {path}{suffix}: {error.strerror}"
    if len(head) < 8 or head[:3] != b"\0\0\x08" or len(head) < 4 + 4 * head[3] or head[3] > 3:
        return f"! {path} is not one of MNIST's files"
    shape = struct.unpack(f">{head[3]}I", head[4 : 4 + 4 * head[3]])
    wanted = 4 + 4 * head[3] + math.prod(shape)
    if size != wanted:
        return f"! {path} has {size:,} bytes instead of {wanted:,}"
    return " x ".join(map(str, shape)) + f", {sample_of(path, size):08x}"


def sample_of(path: str, size: int) -> int:
    """A checksum of pieces from all over a file: tells other data of the same shape, and takes no time."""
    import zlib

    total = 0
    with open(path, "rb") as f:
        for number in range(SAMPLES):
            f.seek(size * number // SAMPLES)
            total = zlib.crc32(f.read(SAMPLE_BYTES), total)
    return total


def packed_idx_file(path: str) -> str:
    """A packed file is whole if its last four bytes say the length that its first ones need."""
    import gzip
    import math
    import zlib

    try:
        with gzip.open(path, "rb") as f:
            head = f.read(16)
        with open(path, "rb") as raw:
            raw.seek(-4, os.SEEK_END)
            length = struct.unpack("<I", raw.read(4))[0]
        shape = struct.unpack(f">{head[3]}I", head[4 : 4 + 4 * head[3]])
    except (OSError, EOFError, zlib.error, struct.error, IndexError):
        return f"! {path} is damaged"
    if length != 4 + 4 * head[3] + math.prod(shape):
        return f"! {path} is cut short"
    return " x ".join(map(str, shape))


# --- What is asked -------------------------------------------------------------------------------


def plan_facts(request: dict[str, Any], has: list[dict[str, Any]]) -> dict[str, Any]:
    """What planning needs."""
    address, ifname, routes = data_path(request, has)
    return {
        "home": home_folder(),
        "cores": usable_cores(),
        "free_port": free_port(),
        "data_address": address,
        "ifname": ifname,
        "routes": routes,
        "python": sys.executable,
        "cwd": os.getcwd(),
    }


def all_facts(request: dict[str, Any]) -> dict[str, Any]:
    """All that is known to go wrong, looked at. The environment's own Python works meanwhile."""
    import contextlib

    from launcher import hostlook
    from launcher.hostanswer import leaving_when_told

    with leaving_when_told(), contextlib.closing(hostlook.Looking(request)) as environment:
        return dict(own_facts(request), env=environment.result())


def own_facts(request: dict[str, Any]) -> dict[str, Any]:
    from launcher import hostslots

    hostname = socket.gethostname()
    has = interfaces()
    names = [name for name in dict.fromkeys([hostname] + request["names"]) if not is_number(name)]
    nofile, threads = limits()
    places = [folder("home", home_folder())]
    places += [folder("workdir", request["workdir"])] if request.get("workdir") else []
    about = plan_facts(request, has)
    about.update(
        hostname=hostname, identity=identity(), user=user_name(), machine=os.uname().machine,
        names=meanings(names), hosts_lines=hosts_lines(names), interfaces=has,
        port=port_use(int(request.get("port") or 0)),
        ephemeral=ephemeral_range(), memory=usable_memory(), shm=shared_memory(), folders=places,
        nofile=nofile, threads=threads, kills_on_logout=kills_on_logout(), cpu_flags=cpu_flags(),
        gpus=gpu_count(), runs=runs_here(),
        taken=hostslots.taken()[0], stale=sorted(k for k in os.environ if k.startswith(STALE)),
        firewalls=firewalls(),
        data=dataset(request["data"]) if request.get("data") else {},
    )  # fmt: skip
    return about


def is_number(name: str) -> bool:
    try:
        socket.inet_aton(name)
    except OSError:
        return ":" in name
    return True


def shared_memory() -> int:
    try:
        return free_space("/dev/shm")["free_bytes"]
    except OSError:
        return -1


def runs_here() -> list[str]:
    from launcher.hostruns import command_runs

    try:
        states = command_runs({})["runs"]
    except OSError:
        return []  # a folder that is not ours: that has a check of its own
    return [str(state["run"]) for state in states if state.get("state") in ("starting", "running")]


def has_program(name: str) -> bool:
    folders = os.environ.get("PATH", os.defpath).split(":") + ["/usr/sbin", "/sbin"]
    return any(os.access(os.path.join(each, name), os.X_OK) for each in folders)
