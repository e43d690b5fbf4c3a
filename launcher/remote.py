"""One command on many hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from launcher.agent import SENTINEL, Agent
from launcher.errors import HostError, RingctlError
from launcher.fanout import fan_out
from launcher.logs import ranges
from launcher.transport import Completed, TimedOut

Show = Callable[[str, Completed], None]

# What a shell does at the end of its stdin: nobody waits any more (Ctrl-C, a timeout, the controller is
# gone). It ends all of its own process group and session, and all below them: `timeout` has a group of its
# own, `setsid` a session. What it finds in /proc is remembered with its start, for parents end before their
# children do, and those then have another one. They stand still until nobody is new, so that none begins
# something else before it is told to end. What is no whole line there has a newline in its name, and could be
# forged; nor are names patterns of files (set -f). All it needs is the shell: no `ps`, no Python, and no
# `sleep`, for there may be no room for another process. Without /proc, or in a container that it came into
# from outside (its group is 0 there), its own group has to do.
END_ALL = """
    set -f
    trap "" TERM
    read -r nothing <&3
    line=
    read -r line </proc/self/stat
    me=${line%% *} found=" "
    set -- ${line##*) }
    own=$3
    [ "${own:-0}" != 0 ] || own=none
    look() {
        all= was=$found found=" " before= groups= single= new=
        set +f
        for each in /proc/[0-9]*/stat; do
            set -f
            read -r line <"$each" || continue
            each=${each#/proc/}
            set -- ${line##*) }
            [ $# -gt 20 ] || continue
            all="$all ${each%/stat}.${20}:$2:$3:$4:"
        done
        while [ "$before" != "$found" ]; do
            before=$found
            for each in $all; do
                is=${each%%:*} rest=${each#*:}
                case $found in *" $is "*) continue ;; esac
                case $each$was/$found in
                    *:"$own":* | *" $is "*/* | */*" ${rest%%:*}."*) found="$found$is " ;;
                    *) continue ;;
                esac
                case $was in *" $is "*) ;; *) new=1 ;; esac
                rest=${rest#*:}
                case ${rest%%:*} in
                    0) ;;
                    "$own") [ "${is%.*}" = "$me" ] || single="$single ${is%.*}" ;;
                    *) groups="$groups -${rest%%:*}" ;;
                esac
            done
        done
    }
    tell() { for each in $groups $single; do kill -s "$1" -- "$each"; done; }
    all_stand_still() {
        new=1 times=0
        while [ "$new" ] && [ "$((times += 1))" -le 100 ]; do
            look
            tell STOP
        done
    }
    all_stand_still
    tell TERM
    tell CONT
    if [ "$own" != none ] && read -r now rest </proc/uptime; then
        last=$((${now%%.*} + 2))
        while look && [ "$groups$single" ] && read -r now rest </proc/uptime; do
            [ "${now%%.*}" -lt "$last" ] || break
        done
        all_stand_still
        tell KILL
    else
        kill -TERM 0
        sleep 1
    fi
    kill -KILL 0
"""

# Whatever a login shell prints comes before the mark ($1). The shell stays, so that a command that is killed
# still has an exit code. Who only listens does not learn that the other end has gone without a word, as
# after an outage: so a beat goes out on stderr every $2 seconds, and the host's TCP gives up on it. A
# controller that is suspended (Ctrl-Z) still has its kernel take them. The NULs are none in what is written
# here, so that a list of processes has no beat in it.
SCRIPT = """
printf "%s\\n" "$1"
printf "%s\\n" "$1" >&2
exec 3<&0 </dev/null
{
    trap 'kill -KILL $! 2>/dev/null; exit' TERM
    while :; do sleep "$2" 2>/dev/null & wait $!; printf '\\000--ringctl-beat--\\000' >&2; done
} >/dev/null 3<&- &
ringctl_beating=$!
shift 2
{ END_ALL } >/dev/null 2>&1 &
"$@" 3<&-
code=$?
exec 2>/dev/null
kill -KILL $!
kill -TERM $ringctl_beating
wait $ringctl_beating
exit $code
""".replace("END_ALL", END_ALL)
BEAT = b"\0--ringctl-beat--\0"
BEAT_S = 20
PIECE = 1 << 20
NO_COMMAND = "look at the account's login shell there, and at what ends it early (~/.bashrc)"


def execute(
    agents: Mapping[str, Agent], command: Sequence[str], timeout: float, show: Show | None
) -> dict[str, Completed | RingctlError]:
    """Run it everywhere; `show` gets each host's output as soon as it is whole, or given up on. The command
    does not outlive our waiting for it; what it had put in the background before it ended may."""
    argv = ["/bin/sh", "-c", SCRIPT, "sh", SENTINEL.decode().strip(), str(BEAT_S), *command]

    def work(name: str) -> Completed:
        try:
            done = agents[name].transport.run(argv, None, timeout)
        except TimedOut as error:
            error.out, error.err = after_mark(error.out), after_mark(error.err)
            raise
        if SENTINEL not in done.out:
            fix = "" if done.began else NO_COMMAND
            raise HostError(name, f"it ran no command; it said: {done.last_words}", fix=fix)
        return Completed(done.exit_code, after_mark(done.out), after_mark(done.err))

    def done(name: str, result: Completed | RingctlError) -> None:
        if show is not None and isinstance(result, TimedOut):
            show(name, Completed(-1, result.out, result.err))
        elif show is not None and isinstance(result, Completed):
            show(name, result)

    return fan_out(agents, work, done)


def after_mark(data: bytes) -> bytes:
    """What the command itself printed. Where a login shell makes one stream of both, there are two marks."""
    return data.replace(BEAT, b"").partition(SENTINEL)[2].removeprefix(SENTINEL)


def labelled(host: str, data: bytes) -> Iterator[bytes]:
    """Each line behind its host's name; a piece at a time, for there may be a hundred million of them."""
    label, begin = f"[{host}] ".encode(), 0
    while begin < len(data):
        end = data.find(b"\n", begin + PIECE) + 1 or len(data)
        yield label + data[begin:end].removesuffix(b"\n").replace(b"\n", b"\n" + label) + b"\n"
        begin = end


def summary(codes: Mapping[str, int], failed: Mapping[str, RingctlError]) -> list[str]:
    """Hosts by exit code, then those that could not be asked."""
    lines = []
    for code in sorted(set(codes.values())):
        hosts = [host for host, its in codes.items() if its == code]
        lines.append(f"exit code {code}: {len(hosts)} of {len(codes) + len(failed)} ({grouped(hosts)})")
    return lines + [f"error: {error}" for error in failed.values()]


def grouped(names: Sequence[str]) -> str:
    """server1, server2, server3, other -> server1-3, other."""
    numbers: dict[str, list[int]] = {}
    others = []
    for name in names:
        stem = name.rstrip("0123456789")
        digits = name[len(stem) :]
        if digits and not digits.startswith("0"):
            numbers.setdefault(stem, []).append(int(digits))
        else:
            others.append(name)
    return ", ".join([stem + ranges(its) for stem, its in numbers.items()] + others)


def result_json(host: str, done: Completed | RingctlError) -> dict[str, Any]:
    if isinstance(done, RingctlError) and not isinstance(done, TimedOut):
        return {"host": host, "error": done.message}
    out, err = (data.decode("utf-8", "surrogateescape") for data in (done.out, done.err))
    result = {"error": done.message} if isinstance(done, TimedOut) else {"exit_code": done.exit_code}
    return {"host": host, **result, "out": out, "err": err}
