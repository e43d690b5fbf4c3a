"""Pure: what to do about what a check found, so exact that it can be done without a thought.

A line of a fix is a command to type on the host that the finding is about; a command to type on this machine,
which begins with `ringctl`, `ssh` or `rsync`; or a change of the inventory, in the words of `write` and
`leave_out`. Behind a # it says what else there is to know.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.model import Facts, Host

GUARD = "case $- in *i*) ;; *) return;; esac"
QUIET_SHELL = f"sed -i.bak --follow-symlinks '1i {GUARD}' ~/.bashrc  # or into what else its shell reads"
OTHER_PORT = "write `master_port: auto` in the inventory, or leave out --master-port: a free one is taken"
NEW_VENV, NEW_FOLDER = "~/venvs/ring", "~/ring"
DISK_LOW, INODES_LOW = 200 << 20, 1000  # what should be left
SYSTEM_PYTHONS = ("/usr/bin/", "/bin/", "/usr/local/bin/")  # belong to the distribution's packages


def duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size or (seconds >= size and unit == "h"):
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def size(number: int) -> str:
    for unit, of in (("GB", 1 << 30), ("MB", 1 << 20), ("kB", 1 << 10)):
        if number >= of:
            return f"{number / of:.1f} {unit}" if number < 10 * of else f"{number // of} {unit}"
    return f"{number} bytes"


def path(text: str) -> str:
    """Quoted, but for the ~ or ~name that a shell should understand."""
    home, slash, rest = text.partition("/")
    if not re.fullmatch(r"~[\w.-]*", home):
        return shlex.quote(text)
    return f"{home}{slash}{shlex.quote(rest) if rest else ''}"


# --- The inventory -------------------------------------------------------------------------------


def write(host: Host, key: str, value: str) -> str:
    return f"write `{key}: {value}` for {host.name} in the inventory"


def leave_out(host: Host, key: str) -> str:
    return f"leave out `{key}` of {host.name} in the inventory: it is found by itself"


def found_by_itself(host: Host, key: str, right: str) -> str:
    """What the host itself takes for right; nothing, where it does not know either."""
    return write(host, key, right) if right else leave_out(host, key)


# --- The network ---------------------------------------------------------------------------------


def hosts_line(facts: Facts, address: str, name: str) -> str:
    """The command that makes a name mean an address on a host, in place of what it means there now. The file
    is written into, not replaced: in a container it is a mount of its own."""
    read = "cat"
    if any(name in known.split()[1:] for known in facts.hosts_lines):
        pattern = re.sub(r"[^\w-]", r"[\g<0>]", name)
        drop = rf":a; s/^([^#]*[[:space:]]){pattern}([[:space:]#]|$)/\1\2/; ta"  # each time it stands there
        read = f"sed -E {shlex.quote(drop)}"
    line = shlex.quote(f"{address} {name}")
    return f"""hosts=$({read} /etc/hosts) && printf '%s\\n' "$hosts" {line} | sudo tee /etc/hosts"""


@dataclass(frozen=True)
class Way:
    """Connections into a host or out of it, as the tools for firewalls call them."""

    hooks: str
    chain: str
    nft: str
    iptables: str
    ufw: str
    rich: str


WAY_IN = Way("input|prerouting", "INPUT", "saddr", "-s", "allow proto tcp from", "source")
WAY_OUT = Way("output|postrouting", "OUTPUT", "daddr", "-d", "allow out proto tcp to", "destination")


def firewall(facts: Facts, peers: Sequence[str], way: Way = WAY_IN) -> str:
    """On the host that does not let the peers in, or nothing out to them; with the tool in charge there."""
    iptables = f"sudo iptables -I {way.chain} -p tcp {way.iptables} {','.join(peers)} -j ACCEPT"
    lines = {
        "ufw": f"for peer in {' '.join(peers)}; do sudo ufw prepend {way.ufw} $peer; done",
        "firewall-cmd": firewalld_line(peers, way),
        "nft": nft_line(peers, way),
        "iptables": f"{iptables}  # until it is rebooted",
    }
    tool = next((name for name in facts.firewalls if name in lines), "iptables")
    return lines[tool]


def firewalld_line(peers: Sequence[str], way: Way) -> str:
    rule = f'rule family="ipv4" {way.rich} address="%s" protocol value="tcp" accept'
    rules = " ".join(f"--add-rich-rule={shlex.quote(rule % peer)}" for peer in peers)
    return f"sudo firewall-cmd --permanent {rules} && sudo firewall-cmd --reload"


def nft_line(peers: Sequence[str], way: Way) -> str:
    """Into every chain that sees what passes: what one of them accepts, the next may still drop. Which they
    are, only root is told. A rule for each peer: of one with a set of them, iptables would lose the set."""
    program = (
        """$1 == "table" {t = $2 " " $3; ip4 = $2 ~ /^(inet|ip)$/} $1 == "chain" {c = $2} """
        f"""ip4 && /type filter hook ({way.hooks}) / {{split("{" ".join(peers)}", peers); for (i in peers) """
        f"""print "insert rule", t, c, "ip {way.nft}", peers[i], "meta l4proto tcp accept"; n++}} """
        """END {if (!n) {print "nft has no chain for it; try iptables-legacy -S" >"/dev/stderr"; exit 1}}"""
    )
    rules = f"rules=$(sudo nft list chains | awk '{program}')"
    return f"""{rules} && echo "$rules" | sudo nft -f -  # until it is rebooted"""


def mtu(name: str, wanted: int) -> str:
    return f"sudo ip link set dev {name.partition(':')[0]} mtu {wanted}"


# --- Python --------------------------------------------------------------------------------------


def environment(host: Host, facts: Facts, versions: Mapping[str, str], here: str) -> str:
    """For a host that has no environment, or none that works; `here` is the name of the one that the
    environment.yaml of this folder makes. What is there already is left alone: it may be somebody's."""
    if is_made(host, here):
        return f"ringctl env create --include {host.name}"
    missing = facts.env is None or facts.env.kind == "missing"
    named = host.env.value if host.env and host.env.kind == "venv" and missing else ""
    folder = path(named or NEW_VENV)
    make = f"{shlex.quote(facts.python)} -m venv {folder} && {pip(f'{folder}/bin/python', versions)}"
    return make if named else f"{make}\n{write(host, 'env', f'{{venv: {NEW_VENV}}}')}"


def packages(host: Host, facts: Facts, versions: Mapping[str, str], here: str) -> str:
    """For an environment that works and lacks some; a system's own Python is left alone."""
    if facts.env is None or is_made(host, here) or facts.env.path.startswith(SYSTEM_PYTHONS):
        return environment(host, facts, versions, here)
    return pip(shlex.quote(facts.env.path), versions)


def by_name(host: Host) -> bool:
    """Whether its environment is one of conda's, known by its name."""
    return host.env is not None and host.env.kind == "conda" and "/" not in host.env.value


def is_made(host: Host, here: str) -> bool:
    """Whether its environment is the one that `ringctl env create` makes in this folder."""
    return by_name(host) and host.env is not None and host.env.value == here


def pip(python: str, versions: Mapping[str, str]) -> str:
    """`versions` by package; "" for whichever fits the others."""
    wanted = [f"{name}=={version}" if version else name for name, version in versions.items()]
    return f"{python} -m pip install --upgrade {shlex.join(wanted)}"


def without_variables(names: Sequence[str]) -> str:
    """Whatever sets them stays as it is: it may do so in the middle of something."""
    line = shlex.quote(f"unset {shlex.join(names)}")
    return f"printf '\\n%s\\n' {line} >>~/.bashrc  # or behind where else they are set"


# --- Disks and limits ----------------------------------------------------------------------------


BIGGER_SHM = (
    "sudo mount -o remount,size=$(($(df -k --output=used /dev/shm | tail -n 1) / 1024 + 2048))M /dev/shm"
)
LINGER = "sudo loginctl enable-linger $(id -u)"
SET_CLOCK = "sudo timedatectl set-ntp true"


def limit(what: str) -> str:
    return f"""echo "$(id -un) - {what} 65536" | sudo tee -a /etc/security/limits.d/99-ringctl.conf"""


def owner() -> str:
    """Of ringctl's own folder, and of no other: whatever else is not ours is not ours to take."""
    own = "~/.ringctl"
    return f"sudo mkdir -p {own} && sudo chown -R $(id -u) {own} && chmod -R u+rwX {own}"


def aside(place: str) -> str:
    return f"mv {path(place)} {path(place + '.old')}"


def other_folder(host: Host) -> str:
    """For a workdir that cannot be used: one of our own."""
    return f"mkdir -p {NEW_FOLDER}\n{write(host, 'workdir', NEW_FOLDER)}"


def writable(place: str) -> str:
    return f'sudo mount -o remount,rw "$(findmnt -no TARGET -T {path(place)})"'


def room(place: str, left: int = 0) -> str:
    """What takes the room there, the largest last; what of it can go, only a person knows."""
    more = size(DISK_LOW - left)
    return f"du -xahD {path(place)} | sort -h | tail -n 20  # and remove {more} that nobody needs"


def room_for_files(place: str, left: int = 0) -> str:
    what = f"and remove {INODES_LOW - left} files that nobody needs"
    return f"du -xD --inodes {path(place)} | sort -n | tail -n 20  # {what}"


def dataset(host: Host, folder: str) -> str:
    """From this machine, over the connection that the inventory describes. The folder is made there, and gone
    into by the shell, which knows what ~ means: rsync makes no parents, and the older ones quote nothing."""
    ssh = "".join(
        f" {option} {shlex.quote(str(value))}"
        for option, value in (("-p", host.port), ("-i", host.identity_file))
        if value
    )
    address = f"[{host.address}]" if ":" in host.address else host.address
    where = shlex.quote(f"{host.user}@{address}:." if host.user else f"{address}:.")
    through = f"-e {shlex.quote(f'ssh{ssh}')} " if ssh else ""
    enter = shlex.quote(f"mkdir -p {path(folder)} && cd {path(folder)} && rsync")
    return f"rsync -a {through}--rsync-path={enter} {path(folder.rstrip('/') + '/')} {where}"
