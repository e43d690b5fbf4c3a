"""The faults, each a function of the scene: it starts a run, does something to it, and says how that must end
all the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.launcher.ringctl import ringctl, start, wait_for
from tests.soak import tricks
from tests.soak.scene import AGAIN, LEASE_S, Run, Scene, wait


@dataclass(frozen=True)
class Expected:
    """How things have to be after a fault."""

    runs: tuple[str, ...]  # those that it was about
    succeeded: bool = (
        True  # all of them, and every rank of them; else they are over and nothing is left of them
    )
    training: bool = False  # with the bits of an undisturbed one
    shown: tuple[Run, ...] = field(default=())  # launches that lived, and so must have shown every line once


HANGS_S = 10.0  # longer than --timeout of the training
Fault = Callable[[Scene], Expected]


def whole(*runs: Run, training: bool = False) -> Expected:
    for run in runs:
        run.finish()
    return Expected(tuple(run.id for run in runs), training=training, shown=runs)


@contextlib.contextmanager
def killer(scene: Scene, pid: int) -> Iterator[None]:
    """Kills a process as it takes one of its next steps that change a file."""
    step = scene.chance.choice(list(tricks.STEPS))
    tracer = tricks.killed_at(pid, step, scene.chance.randint(1, tricks.STEPS[step]))
    try:
        yield
    finally:
        tracer.kill()
        tracer.wait()


# --- One rank, or what looks after it ------------------------------------------------------------


def rank_killed(scene: Scene) -> Expected:
    run = scene.train().at_step(scene.chance.randrange(1, 35))
    host = scene.any_host()
    for rank in scene.state(host, run.id)["ranks"]:
        scene.kill(host, rank["pid"], signal.SIGKILL)
    return whole(run, training=True)


def rank_hangs(scene: Scene) -> Expected:
    """Stopped, as a debugger does it, for longer than the others wait for it; then it may go on."""
    run = scene.train().at_step(scene.chance.randrange(1, 25))
    host = scene.any_host()
    pids = [rank["pid"] for rank in scene.state(host, run.id)["ranks"]]
    for number, seconds in ((signal.SIGSTOP, HANGS_S), (signal.SIGCONT, 0.0)):
        for pid in pids:
            scene.kill(host, pid, number)
        wait(seconds)
    return whole(run, training=True)


def supervisor_killed(scene: Scene) -> Expected:
    run = scene.train().at_step(scene.chance.randrange(1, 35))
    host = scene.any_host()
    scene.kill(host, scene.state(host, run.id)["hostd"]["pid"], signal.SIGKILL)
    return whole(run, training=True)


def warden_killed(scene: Scene) -> Expected:
    run = scene.count().at_step(scene.chance.randrange(1, 100))
    host = scene.any_host()
    scene.kill(host, scene.state(host, run.id)["warden"]["pid"], signal.SIGKILL)
    return whole(run)


def host_rebooted(scene: Scene) -> Expected:
    run = scene.train().at_step(scene.chance.randrange(6, 35))
    scene.cluster.reboot(scene.any_host())
    return whole(run, training=True)


def checkpoint_cut_short(scene: Scene) -> Expected:
    """The newest one, on one host, while the run is down: it goes on from the one before."""
    run = scene.train().at_step(22)
    host = scene.any_host()
    folders = sorted((scene.on(host, run.id) / "checkpoints").glob("step-*"))
    for file in folders[-1].glob("*.pt") if folders else ():
        os.truncate(file, file.stat().st_size // 2)
    for rank in scene.state(host, run.id)["ranks"]:
        scene.kill(host, rank["pid"], signal.SIGKILL)
    return whole(run, training=True)


def disk_full(scene: Scene) -> Expected:
    """For a moment, on one host, while it trains and saves."""
    run = scene.train().at_step(scene.chance.randrange(1, 20))
    host = scene.any_host()
    scene.cluster.fill_disk(host)
    try:
        wait(scene.between(0.2, 2.0))
    finally:
        scene.cluster.free_disk(host)
    return whole(run, training=True)


def supervisor_killed_at_a_write(scene: Scene) -> Expected:
    """Or as it is about to make something safe, to rename or to remove it."""
    run = scene.count(300).at_step(scene.chance.randrange(1, 60))
    host = scene.any_host()
    pid = tricks.number_here(scene.cluster, host, scene.state(host, run.id)["hostd"]["pid"])
    with killer(scene, pid):
        return whole(run)


def number_of_a_process_taken_by_another(scene: Scene) -> Expected:
    """Supervisors and ranks are killed before they can say so, and others get their numbers: they are not
    ours."""
    run = Run(scene, "launch", "--", "python3", "count.py", "3000").at_step(5)
    host = scene.any_host()
    state = scene.state(host, run.id)
    who = [state["warden"], state["hostd"], *state["ranks"]]
    pids = [each["pid"] for each in who if each["pid"]]
    for pid in pids:
        scene.kill(host, pid, signal.SIGKILL)
    with contextlib.ExitStack() as others:
        taken = [pid for pid in pids if others.enter_context(tricks.taken_number(scene.cluster, host, pid))]
        before = {pid: tricks.number_here(scene.cluster, host, pid) for pid in taken}
        ringctl("stop", run.id, "--grace", "0.5")
        run.finish()
        after = {pid: tricks.number_here(scene.cluster, host, pid) for pid in taken}
        assert taken, "no number could be had"
        assert after == before, "what was not ours was ended"
    return Expected((run.id,), succeeded=False, shown=(run,))


def clock_set(scene: Scene) -> Expected:
    """By an hour, on one host, while it trains; if a rank fails then, it starts again by that clock."""
    host = scene.any_host()
    with tricks.own_clock(scene.cluster, host) as set_clock:
        run = scene.train().at_step(scene.chance.randrange(1, 30))
        set_clock(scene.chance.choice((-3600, 3600)))
        if scene.chance.random() < 0.5:
            for rank in scene.state(host, run.id)["ranks"]:
                scene.kill(host, rank["pid"], signal.SIGKILL)
        expected = whole(run, training=True)
    times = [event["time"] for event in scene.events(host, run.id)]
    assert max(times) - min(times) > 3000, "it was not set"
    return expected


def log_in_many_files(scene: Scene) -> Expected:
    """While it is followed, and a connection is lost."""
    host = scene.any_host()
    with tricks.short_segments(scene.cluster, host, scene.chance.randrange(500, 5000)):
        run = scene.count(300).at_step(scene.chance.randrange(1, 50))
        follower = Run(scene, "logs", run.id, "--follow")
        follower.id = run.id
        scene.cluster.end_sessions(host)
        expected = whole(run, follower)
    assert len(list(scene.on(host, run.id).glob("events-1-*.jsonl"))) > 1, "it was in one file"
    return expected


# --- The network ---------------------------------------------------------------------------------


def cable_out_for_a_moment(scene: Scene) -> Expected:
    run = scene.train().at_step(scene.chance.randrange(1, 35))
    host = scene.any_host()
    scene.cluster.cut(host)
    wait(scene.between(0.1, 0.6 * LEASE_S))
    scene.cluster.heal(host)
    return whole(run, training=True)


def cable_out_for_long(scene: Scene) -> Expected:
    run = scene.train().at_step(scene.chance.randrange(1, 30))
    host = scene.any_host()
    scene.cluster.cut(host)
    wait(scene.between(1.5 * LEASE_S, 3 * LEASE_S))
    scene.cluster.heal(host)
    return whole(run, training=True)


def cable_flaps(scene: Scene) -> Expected:
    run = scene.train().at_step(scene.chance.randrange(1, 30))
    host = scene.any_host()
    for _ in range(scene.chance.randrange(2, 6)):
        scene.cluster.cut(host)
        wait(scene.between(0.05, 0.5))
        scene.cluster.heal(host)
        wait(scene.between(0.05, 0.5))
    return whole(run, training=True)


def packets_lost_one_way(scene: Scene) -> Expected:
    run = scene.train().at_step(scene.chance.randrange(1, 30))
    one, other = scene.chance.sample(scene.cluster.names, 2)
    scene.cluster.drop_from(one, other)
    wait(scene.between(0.5, 2 * LEASE_S))
    scene.cluster.clear_rules(one)
    return whole(run, training=True)


def sshd_restarted(scene: Scene) -> Expected:
    run = scene.count().at_step(scene.chance.randrange(1, 100))
    host = scene.any_host()
    scene.cluster.stop_sshd(host)
    scene.cluster.end_sessions(host)
    wait(scene.between(0.0, 1.0))
    scene.cluster.start_sshd(host)
    return whole(run)


# --- The controller ------------------------------------------------------------------------------


def launch_killed_while_following(scene: Scene) -> Expected:
    """The next command has somebody watch the run, which comes to its end; also if a rank fails meanwhile."""
    run = scene.train().at_step(scene.chance.randrange(1, 30))
    run.kill()
    if scene.chance.random() < 0.5:
        host = scene.any_host()
        for rank in scene.state(host, run.id)["ranks"]:
            scene.kill(host, rank["pid"], signal.SIGKILL)
    said = ringctl("ps").stderr
    assert run.id in said, said
    wait_for(lambda: not (scene.home / "watch" / f"{run.id}.json").exists(), "the watcher's end", 120)
    return Expected((run.id,), training=True)


def launch_killed_on_its_way(scene: Scene) -> Expected:
    """At any moment from its start on; `stop` then ends whatever there is."""
    before = set(scene.runs())
    run = scene.count(1000)
    wait(scene.between(0.2, 2.5))
    run.kill()
    mine = tuple(sorted(set(scene.runs()) - before))
    for one in mine:
        ringctl("stop", one, "--grace", "0.5")
    return Expected(mine, succeeded=False)


def launch_killed_at_a_write(scene: Scene) -> Expected:
    """Of its history, say, or of what it watches."""
    before = set(scene.runs())
    run = scene.count(1000)
    with killer(scene, run.process.pid):
        wait(scene.between(0.5, 3.0))
        run.kill()
    mine = tuple(sorted(set(scene.runs()) - before))
    for one in mine:
        ringctl("stop", one, "--grace", "0.5")
    return Expected(mine, succeeded=False)


def stop_killed_on_its_way(scene: Scene) -> Expected:
    run = scene.count(1000).at_step(5)
    first = start("stop", run.id, "--grace", "0.5")
    wait(scene.between(0.2, 1.0))
    first.kill()
    first.communicate()
    ringctl("stop", run.id, "--grace", "0.5")
    run.finish()
    return Expected((run.id,), succeeded=False, shown=(run,))


def two_stops_at_once(scene: Scene) -> Expected:
    run = scene.count(1000).at_step(5)
    both = [start("stop", run.id, "--grace", "0.5") for _ in range(2)]
    for one in both:
        out, err = one.communicate(timeout=60)
        assert one.returncode == 0, out + err
    run.finish()
    return Expected((run.id,), succeeded=False, shown=(run,))


def two_launches_at_once(scene: Scene) -> Expected:
    before = set(scene.runs())
    both = [scene.count(60), scene.count(60)]
    for one in both:
        one.finish()
    ids = sorted(set(scene.runs()) - before)
    assert len(ids) == 2, [one.err.read_text() for one in both]
    for one in both:
        one.id = str(one.seen()[-1]["run"])
    return Expected(tuple(ids), shown=tuple(both))


def stopped_while_it_starts_again(scene: Scene) -> Expected:
    run = scene.count(1000).at_step(5)
    host = scene.any_host()
    for rank in scene.state(host, run.id)["ranks"]:
        scene.kill(host, rank["pid"], signal.SIGKILL)
    wait(scene.between(0.5, 4.0))
    ringctl("stop", run.id, "--grace", "0.5")
    run.finish()
    return Expected((run.id,), succeeded=False, shown=(run,))


def ranks_that_do_not_want_to_end(scene: Scene) -> Expected:
    """Deaf to TERM, and with a grandchild in a session of its own and without an environment."""
    script = (
        'trap "" TERM; setsid env -i sh -c "trap \\"\\" TERM HUP; sleep 1000" & while :; do sleep 0.1; done'
    )
    run = Run(scene, "launch", "--", "sh", "-c", script).begun()
    wait_for(
        lambda: all(scene.state(h, run.id)["state"] == "running" for h in scene.cluster.names), "ranks", 60
    )
    ringctl("stop", run.id, "--grace", "0.3")
    run.finish()
    return Expected((run.id,), succeeded=False, shown=(run,))


def two_restarts_at_once(scene: Scene) -> Expected:
    """Of a run that somebody has stopped: one of them gets it, and it goes on from where it was."""
    run = scene.count(400).at_step(10)
    ringctl("stop", run.id, "--grace", "0.5")
    run.finish()
    both = [start("restart", run.id, "--json") for _ in range(2)]
    for one in both:
        one.communicate(timeout=90)
    codes = sorted(one.returncode for one in both)
    assert codes in ([0, 1], [0, 0], [1, 130], [0, 130]), codes
    if codes[0]:  # the later one has ended what the other had begun
        ringctl("restart", run.id)
    return Expected((run.id,))


def followed_through_attempts(scene: Scene) -> Expected:
    """Two who follow the log of a detached run, one rank of which fails again and again."""
    run = Run(scene, "launch", "--detach", *AGAIN, "--", "python3", "count.py", "200", "fail")
    assert run.finish() == 0, run.err.read_text()
    run.id = str(run.seen()[-1]["run"])
    followers = [Run(scene, "logs", run.id, "--follow") for _ in range(2)]
    for follower in followers:
        follower.id = run.id
    return whole(*followers)


def ranks_that_print_anything(scene: Scene) -> Expected:
    """Bytes that are no text, escapes, returns, and lines of megabytes; with a connection lost meanwhile."""
    run = Run(
        scene, "launch", *AGAIN, "--", "python3", "noise.py", str(scene.chance.randrange(10**6))
    ).begun()
    wait(scene.between(0.5, 2.0))
    host = scene.any_host()
    scene.cluster.end_sessions(host)
    return whole(run)


def host_left_out_and_taken_in_again(scene: Scene) -> Expected:
    """It is away for long: the run goes on without it to its end, and once more with it when it is back."""
    run = scene.train("--min-world", "3").at_step(scene.chance.randrange(6, 30))
    host = scene.any_host()
    scene.cluster.cut(host)
    assert run.finish() == 0, run.err.read_text()[-1500:]
    scene.cluster.heal(host)
    wait_for(lambda: scene.state(host, run.id)["state"] != "running", "the end on the one that was lost", 60)
    wait_for(lambda: ringctl("preflight", code=None).returncode == 0, "the hosts to see each other again", 60)
    ringctl("restart", run.id, "--grow")
    world = json.loads(ringctl("status", run.id, "--json").stdout)["world"]
    assert world == len(scene.cluster.names), world
    return Expected((run.id,))


FAULTS: dict[str, Fault] = {
    fault.__name__.replace("_", " "): fault
    for fault in (
        rank_killed, rank_hangs, supervisor_killed, warden_killed, host_rebooted, checkpoint_cut_short,
        disk_full, supervisor_killed_at_a_write, number_of_a_process_taken_by_another, clock_set,
        log_in_many_files, cable_out_for_a_moment, cable_out_for_long, cable_flaps, packets_lost_one_way,
        sshd_restarted, launch_killed_while_following, launch_killed_on_its_way, launch_killed_at_a_write,
        stop_killed_on_its_way, two_stops_at_once, two_launches_at_once, stopped_while_it_starts_again,
        ranks_that_do_not_want_to_end, two_restarts_at_once, followed_through_attempts,
        ranks_that_print_anything, host_left_out_and_taken_in_again,
    )
}  # fmt: skip
