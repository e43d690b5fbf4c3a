"""Checks of the machine: its shell, clock, memory, limits, processor and disk."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator

from launcher.model import Folder, Host, Status
from launcher.occupancy import taken
from launcher.preflight import fixes
from launcher.preflight.fixes import DISK_LOW, INODES_LOW
from launcher.preflight.view import Finding, View, blocker
from launcher.text import count

MEGA = 1 << 20
CLOCK_S = 1.0
RANK_BYTES = 400 * MEGA  # what a rank with torch takes, about
RANK_THREADS = 64
DISK_FULL, INODES_GONE = 20 * MEGA, 100
SHM_LOW = 128 * MEGA


def ssh_noise(view: View) -> Iterator[Finding]:
    if view.facts.noise:
        first = view.facts.noise.splitlines()[0][:60]
        yield Finding(
            "warn",
            f"its login shell prints {first!r}",
            "nothing is printed where nobody is at a terminal",
            fixes.QUIET_SHELL,
        )


def clock(view: View) -> Iterator[Finding]:
    off, wanted = view.facts.clock_s, f"at most {CLOCK_S:g} s apart"
    if off is None or abs(off) <= CLOCK_S + view.facts.clock_error_s:
        return
    all_off = [each.facts.clock_s for each in view.views.values() if each.facts.clock_s is not None]
    if len(all_off) > 1 and max(all_off) - min(all_off) <= 2 * CLOCK_S:
        way = "behind" if off > 0 else "ahead of"
        found = f"this machine's clock is {fixes.duration(abs(off))} {way} those of all hosts"
        yield Finding("warn", found, wanted, f"{fixes.SET_CLOCK}  # on this machine")
    else:
        way = "ahead of" if off > 0 else "behind"
        found = f"its clock is {fixes.duration(abs(off))} {way} this machine's"
        yield Finding("warn", found, wanted, fixes.SET_CLOCK)


def memory(view: View) -> Iterator[Finding]:
    wanted = RANK_BYTES * view.ranks
    if 0 <= view.facts.memory < wanted:
        fewer = view.facts.memory // RANK_BYTES
        slots = f"{fixes.write(view.host, 'slots', str(fewer))}, or " if fewer else ""
        yield Finding(
            "warn",
            f"{fixes.size(view.facts.memory)} of memory are free",
            f"about {fixes.size(wanted)} for {count(view.ranks, 'rank')}",
            f"{slots}end what is not needed there",
        )


def shm(view: View) -> Iterator[Finding]:
    if 0 <= view.facts.shm < SHM_LOW:
        yield Finding(
            "warn",
            f"/dev/shm has {fixes.size(view.facts.shm)} left",
            f"at least {fixes.size(SHM_LOW)} for workers of a data loader",
            fixes.BIGGER_SHM,
        )


def nofile(view: View) -> Iterator[Finding]:
    hard = view.facts.nofile[1] if view.facts.nofile else -1
    wanted = 192 + 16 * sum(view.need.ranks.values())
    if 0 <= hard < wanted:
        fix = fixes.limit("nofile")
        yield blocker(f"a process may open {hard} files", f"at least {wanted}", fix)


def threads(view: View) -> Iterator[Finding]:
    wanted = RANK_THREADS * view.ranks
    if 0 <= view.facts.threads < wanted:
        yield Finding(
            "warn",
            f"the user may start {view.facts.threads} more threads",
            f"at least {wanted} for {count(view.ranks, 'rank')}",
            fixes.limit("nproc"),
        )


def logout_kill(view: View) -> Iterator[Finding]:
    if view.facts.kills_on_logout:
        yield Finding(
            "fail",
            "logind ends a user's processes when the SSH session ends (KillUserProcesses)",
            "runs go on after logout",
            fixes.LINGER,
        )


def cpu(view: View) -> Iterator[Finding]:
    if view.facts.machine in ("x86_64", "amd64") and "avx2" not in view.facts.cpu_flags:
        yield Finding(
            "warn",
            "its processor lacks AVX2: torch may be slow, or end with an illegal instruction",
            "AVX2",
            f"leave it out: --exclude {view.host.name}; or install a build of torch that does without",
        )


def machine(view: View) -> Iterator[Finding]:
    usual = Counter(facts.machine for facts in view.survey.facts.values()).most_common(1)[0][0]
    if view.facts.machine != usual:
        found = f"it is a {view.facts.machine}, the other hosts are {usual}: numbers may drift apart"
        fix = f"leave it out: --exclude {view.host.name}"
        yield Finding("warn", found, "the same kind of processor", fix)


def busy(view: View) -> Iterator[Finding]:
    if view.facts.runs:
        names = ", ".join(view.facts.runs)
        stops = "; ".join(f"ringctl stop {run}" for run in view.facts.runs)
        yield Finding("warn", f"it runs {names}", "no other run", stops)


def slots_taken(view: View) -> Iterator[Finding]:
    """Only where others are there: of our own runs, `busy` tells."""
    foreign = [each for each in view.facts.taken if each.run != view.need.run]
    counted = [each for each in foreign if not (each.shared and view.need.shared)]
    others = [each for each in counted if each.run not in view.facts.runs]
    # How many slots this machine has, nobody says where there is no inventory.
    slots = max(view.host.slots, view.facts.cores) if view.host.local else view.host.slots
    has = taken(counted)
    if others and has + view.ranks > slots:
        by = ", ".join(f"run {each.run} of user {each.user}" for each in others[:3])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        elsewhere = "" if view.host.local else f", or leave it out: --exclude {view.host.name}"
        yield Finding(
            "warn",
            f"{has} of {count(slots, 'slot')} {'is' if has == 1 else 'are'} taken by {by}{more}",
            f"{count(view.ranks, 'slot')} for this run",
            f"wait until that has ended (ringctl hosts){elsewhere}",
        )


BY_OTHERS = "can be written to by others"


def folders(view: View) -> Iterator[Finding]:
    for place in view.facts.folders:
        if place.problem and not is_full(place.problem):
            plain = place.problem.startswith("there is no folder") or place.problem.endswith(BY_OTHERS)
            found = place.problem if plain else f"cannot write: {place.problem}"
            fix = own_folder(place) if place.role == "home" else workdir(view.host, place)
            yield blocker(found, "a folder that can be written to", fix)


def own_folder(place: Folder) -> str:
    """What lets us write into ringctl's own."""
    if "Read-only" in place.problem:
        return fixes.writable(place.path)
    if place.problem.endswith("is no folder"):
        return fixes.aside(place.path)
    if place.problem.endswith(BY_OTHERS):
        return f"chmod go-w {shlex.quote(place.path)}"
    if place.path.endswith("/.ringctl"):
        return fixes.owner()
    return "let RINGCTL_HOME there name a folder of your own, or take it out of what its shell reads"


def workdir(host: Host, place: Folder) -> str:
    """It is made where it can be; what is there and not ours is left to whom it belongs to."""
    if place.problem == f"there is no folder {place.path}":
        return f"mkdir -p {shlex.quote(place.path)}"
    return fixes.other_folder(host)


def disk(view: View) -> Iterator[Finding]:
    wanted = f"at least {fixes.size(DISK_LOW)}"
    for place in view.facts.folders:
        if is_full(place.problem) and place.free_inodes != 0:  # what is left may be another's quota
            yield blocker(f"cannot write: {place.problem}", wanted, fixes.room(place_of(place)))
        elif place.free_bytes < DISK_LOW and not place.problem:
            found = f"{place.path} has {fixes.size(place.free_bytes)} left"
            fix = fixes.room(place_of(place), place.free_bytes)
            status: Status = "fail" if place.free_bytes < DISK_FULL else "warn"
            yield Finding(status, found, wanted, fix, blocking=status == "fail")


def inodes(view: View) -> Iterator[Finding]:
    for place in view.facts.folders:
        if place.problem and not is_full(place.problem):
            continue  # `folders` says so
        fix = fixes.room_for_files(place_of(place), place.free_inodes)
        found = f"{place.path} has room for {place.free_inodes} more files"
        if 0 <= place.free_inodes < INODES_GONE:
            yield blocker(found, f"at least {INODES_LOW}", fix)
        elif 0 <= place.free_inodes < INODES_LOW:
            yield Finding("warn", found, f"at least {INODES_LOW}", fix)


def place_of(folder: Folder) -> str:
    """Where to look for what takes its room."""
    return "~" if folder.role == "home" and folder.on_home_disk else folder.path


def is_full(problem: str) -> bool:
    return "No space left" in problem or "quota" in problem.lower()
