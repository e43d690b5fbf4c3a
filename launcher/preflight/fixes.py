"""Pure: what to type about what a check found."""

from __future__ import annotations

import shlex

from launcher.model import Facts, Host

QUIET_SHELL = "put  case $- in *i*) ;; *) return;; esac  at the top of .bashrc there"
OTHER_PORT = "leave out master_port, so that a free one is taken, or write another one"


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


def hosts_line(facts: Facts, address: str, name: str) -> str:
    """The command that makes a name mean an address on a host, in place of what it means there now."""
    line = f"{address} {name}"
    drop = ""
    if any(name in known.split()[1:] for known in facts.hosts_lines):
        pattern = name.replace(".", r"\.")
        drop = f"sudo sed -i -E 's/([[:space:]]){pattern}([[:space:]]|$)/\\1\\2/' /etc/hosts && "
    return f"{drop}echo {shlex.quote(line)} | sudo tee -a /etc/hosts"


def interface(host: str, right: str) -> str:
    if not right:
        return f"leave out `ifname` of {host}: it is found by itself"
    return f"write `ifname: {right}` for {host}, or leave it out: it is found by itself"


def firewall(target: Facts, source: str) -> str:
    """On the host that does not let the other in, with the tool that it has."""
    lines = {
        "ufw": f"sudo ufw allow proto tcp from {source}",
        "firewall-cmd": "sudo firewall-cmd --permanent --zone=trusted "
        f"--add-source={source} && sudo firewall-cmd --reload",
        "nft": f"sudo nft insert rule inet filter input ip saddr {source} tcp dport 1-65535 accept"
        "  # in the table and chain that drops it: sudo nft list ruleset",
        "iptables": f"sudo iptables -I INPUT -p tcp -s {source} -j ACCEPT",
    }
    tool = next((name for name in lines if name in target.firewalls), "iptables")
    return lines[tool]


def mtu(name: str, wanted: int) -> str:
    return f"sudo ip link set dev {name} mtu {wanted}"


def environment(host: Host) -> str:
    if host.env is not None and host.env.kind == "conda" and "/" not in host.env.value:
        return f"ringctl env create --include {host.name}"
    if host.env is None:
        return f"name the environment that has torch as `env` of {host.name} in the inventory"
    return f"correct `env` of {host.name} in the inventory, or install it there"


def dataset(host: Host, folder: str) -> str:
    where = f"{host.user}@{host.address}" if host.user else host.address
    return f"rsync -a {shlex.quote(folder + '/')} {where}:{shlex.quote(folder + '/')}"
