"""Pure: what to do about what a check found, so exact that it can be done without a thought.

A line of a fix is a command to type on the host that the finding is about; a command to type on this machine,
which begins with `ringctl`, `ssh` or `rsync`; or a change of the inventory, in the words of `write` and
`leave_out`. Behind a # it says what else there is to know.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from launcher.model import Facts, Host

GUARD = "case $- in *i*) ;; *) return;; esac"
QUIET_SHELL = f"sed -i --follow-symlinks '1i {GUARD}' ~/.bashrc  # or into what else its shell reads"
OTHER_PORT = "write `master_port: auto` in the inventory, or leave out --master-port: a free one is taken"
NEW_VENV = "~/venvs/ring"
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
    """Quoted, but for the ~ that a shell should understand."""
    home, slash, rest = text.partition("/")
    return f"~{slash}{shlex.quote(rest) if rest else ''}" if home == "~" else shlex.quote(text)


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
    """The command that makes a name mean an address on a host, in place of what it means there now."""
    line = f"{address} {name}"
    drop = ""
    if any(name in known.split()[1:] for known in facts.hosts_lines):
        pattern = name.replace(".", r"\.")
        drop = f"sudo sed -i -E 's/([[:space:]]){pattern}([[:space:]]|$)/\\1\\2/' /etc/hosts && "
    return f"{drop}echo {shlex.quote(line)} | sudo tee -a /etc/hosts"


def firewall(target: Facts, sources: Sequence[str]) -> str:
    """On the host that does not let the others in, with the tool that is in charge there."""
    lines = {
        "ufw": f"for peer in {' '.join(sources)}; do sudo ufw allow proto tcp from $peer; done",
        "firewall-cmd": "sudo firewall-cmd --permanent --zone=trusted "
        f"{' '.join(f'--add-source={source}' for source in sources)} && sudo firewall-cmd --reload",
        "nft": nft_line(sources),
        "iptables": f"sudo iptables -I INPUT -p tcp -s {','.join(sources)} -j ACCEPT  # until it is rebooted",
    }
    tool = next((name for name in target.firewalls if name in lines), "iptables")
    return lines[tool]


def nft_line(sources: Sequence[str]) -> str:
    """Into every chain that sees what arrives: what one of them accepts, the next may still drop. Which they
    are, only root is told. A rule for each peer: of one with a set of them, iptables would lose the set."""
    program = (
        """$1 == "table" {t = $2 " " $3; ip4 = $2 ~ /^(inet|ip)$/} $1 == "chain" {c = $2} """
        f"""ip4 && /hook input/ {{split("{" ".join(sources)}", peers); for (i in peers) """
        """print "insert rule", t, c, "ip saddr", peers[i], "meta l4proto tcp accept"}"""
    )
    return f"sudo nft list chains | awk '{program}' | sudo nft -f -  # until it is rebooted"


def mtu(name: str, wanted: int) -> str:
    return f"sudo ip link set dev {name} mtu {wanted}"


# --- Python --------------------------------------------------------------------------------------


def environment(host: Host, facts: Facts, versions: Mapping[str, str]) -> str:
    """For a host that has no environment, or none that works. What is there already is left alone: it may
    be somebody's."""
    if by_name(host):
        return f"ringctl env create --include {host.name}"
    missing = facts.env is None or facts.env.kind == "missing"
    named = host.env.value if host.env and host.env.kind == "venv" and missing else ""
    folder = path(named or NEW_VENV)
    make = f"{shlex.quote(facts.python)} -m venv {folder} && {pip(f'{folder}/bin/python', versions)}"
    return make if named else f"{make}\n{write(host, 'env', f'{{venv: {NEW_VENV}}}')}"


def packages(host: Host, facts: Facts, versions: Mapping[str, str]) -> str:
    """For an environment that works and lacks some; a system's own Python is left alone."""
    if facts.env is None or by_name(host) or facts.env.path.startswith(SYSTEM_PYTHONS):
        return environment(host, facts, versions)
    return pip(shlex.quote(facts.env.path), versions)


def by_name(host: Host) -> bool:
    """Whether its environment is one that `ringctl env create` makes."""
    return host.env is not None and host.env.kind == "conda" and "/" not in host.env.value


def pip(python: str, versions: Mapping[str, str]) -> str:
    """`versions` by package; "" for whichever fits the others."""
    wanted = [f"{name}=={version}" if version else name for name, version in versions.items()]
    return f"{python} -m pip install --upgrade {shlex.join(wanted)}"


def without_variables(names: Sequence[str]) -> str:
    pattern = "|".join(map(re.escape, names))
    return f"sed -i.bak -E {shlex.quote(f'/({pattern})=/d')} ~/.bashrc  # or where else they are set"


# --- Disks and limits ----------------------------------------------------------------------------


def limit(user: str, what: str) -> str:
    return f"echo '{user} - {what} 65536' | sudo tee -a /etc/security/limits.d/99-ringctl.conf"


def owner(user: str, place: str) -> str:
    return f"sudo chown -R {user} {path(place)} && chmod -R u+rwX {path(place)}"


def writable(place: str) -> str:
    return f"sudo mount -o remount,rw $(findmnt -nro TARGET -T {path(place)})"


def room(place: str, left: int = 0) -> str:
    """What takes the room there, the largest last; what of it can go, only a person knows."""
    more = size(DISK_LOW - left)
    return f"du -xah {path(place)} | sort -h | tail -n 20  # and remove {more} that nobody needs"


def room_for_files(place: str, left: int = 0) -> str:
    more = INODES_LOW - left
    return f"du -x --inodes {path(place)} | sort -n | tail -n 20  # and remove {more} files that nobody needs"


def dataset(host: Host, folder: str) -> str:
    """From this machine, over the connection that the inventory describes."""
    ssh = "".join(
        f" {option} {shlex.quote(str(value))}"
        for option, value in (("-p", host.port), ("-i", host.identity_file))
        if value
    )
    where = f"{host.user}@{host.address}" if host.user else host.address
    through = f"-e {shlex.quote(f'ssh{ssh}')} " if ssh else ""
    there = folder[2:] if folder.startswith("~/") else folder
    return f"rsync -a {through}{path(folder + '/')} {where}:{shlex.quote(there + '/')}"
