"""Becomes the ranks: imports torch once, forks one process a rank, and there is the user's program.

The ranks' own Python runs it as a file. It imports nothing of ringctl, so that a rank finds nothing of us
among its modules or on its path; whoever else needs something of it imports it from here.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
STACK_SIGNAL = signal.SIGRTMIN + 9  # programs have their own uses for SIGUSR1; the trainer knows these two
INSIST_SIGNAL = signal.SIGRTMIN + 10


def prefork() -> None:
    """Import what every rank needs, fork one process a rank, and there become the user's program."""
    request = json.loads(sys.stdin.buffer.read())
    for fd in [request["report"]] + [fd for rank in request["ranks"] for fd in rank["fds"]]:
        os.set_inheritable(fd, False)  # nothing that an import starts is to keep them open
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    target, module = request["target"], request["module"]
    if not sys.flags.isolated and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(target))
    if request["preload"]:
        import_once()
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in request["ranks"]:
        if fork_orphan():
            enter_rank(rank, request)
            if module:
                run_module(target, request["args"])
            else:
                run_script(target, request["args"])
            return


def import_once() -> None:
    """torch, where there is one. If it cannot be imported, each rank says so itself when it tries."""
    import gc
    import importlib.util

    gc.disable()  # there is nothing to collect yet, and looking for it takes a tenth of the time
    if importlib.util.find_spec("torch") is not None:
        try:
            importlib.import_module("torch.distributed")
        except Exception:  # whatever it raises, the rank's own import raises again
            for name in [n for n in sys.modules if n.partition(".")[0] == "torch"]:
                del sys.modules[name]
    gc.enable()
    gc.freeze()


def fork_orphan() -> bool:
    """Fork twice, so that the new process is a child of the sub-reaper; True in the new process."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return False
    if os.fork():
        os._exit(0)
    return True


def enter_rank(rank: dict[str, Any], request: dict[str, Any]) -> None:
    """Everything that makes this process the rank: session, output, environment, fresh randomness."""
    deadline = time.monotonic() + 5.0
    while os.getppid() != request["supervisor"] and time.monotonic() < deadline:
        time.sleep(0.001)
    become_rank_process(request["supervisor"])
    out, err = rank["fds"]
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.write(request["report"], b"%d %d\n" % (rank["rank"], os.getpid()))  # a pipe takes so little whole
    for fd in [request["report"]] + [fd for other in request["ranks"] for fd in other["fds"]]:
        os.close(fd)
    os.environ.update(rank["env"])
    if hasattr(sys, "orig_argv"):  # novermin
        sys.orig_argv = list(rank["argv"])  # novermin  # type: ignore[attr-defined,unused-ignore]  # Python 3.10
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # its global state was drawn before the fork
    register_stacks(rank["env"]["RINGCTL_METRICS"], request["others"])
    sys.excepthook = without_our_frames


def without_our_frames(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    """Show a traceback as if the program had been started by itself."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    value.__traceback__ = trace
    sys.__excepthook__(kind, value, trace)


def fresh_main() -> dict[str, Any]:
    """A new `__main__`, as the interpreter has it before it runs a program."""
    import builtins
    import types

    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main.__dict__


def run_script(path: str, args: list[str]) -> None:
    import importlib.machinery

    full = os.path.abspath(path) if sys.version_info >= (3, 9) else path  # as the interpreter itself has it
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    names = fresh_main()
    names.update(__file__=full, __cached__=None, __loader__=loader)
    if sys.version_info < (3, 14):
        names["__annotations__"] = {}
    sys.argv = [path] + args
    with open(full, "rb") as f:
        code = compile(f.read(), full, "exec", dont_inherit=True)
    exec(code, names)


def run_module(name: str, args: list[str]) -> None:
    import runpy

    fresh_main()
    sys.argv = ["-m"] + args
    runpy._run_module_as_main(name, alter_argv=True)  # type: ignore[attr-defined]  # what `python -m` itself calls


# --- What each process of a rank does first ------------------------------------------------------


def become_rank_process(supervisor: int) -> None:
    """In the new process: own session, and dead as soon as the supervisor is."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)  # it died before the line above took effect
    raise_open_files()


def prctl(option: int, value: int) -> None:
    """prctl(2); raises OSError where the kernel refuses."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def is_subreaper() -> bool:
    """Whether orphans below this process become its children."""
    import ctypes

    is_one = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(is_one), 0, 0, 0)
    return bool(is_one.value)


def raise_open_files() -> None:
    """As many open files as the host allows: the usual soft limit is low for a connection to each peer."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        pass  # the host has lowered what it allows since: the rank keeps the limit it has


def stack_file(metrics: str) -> str:
    """Where a rank writes its stack when asked; that it is there says that the rank knows how to."""
    return metrics + ".stacks"


def register_stacks(metrics: str, beside: bool) -> None:
    """In the rank: have its stack written to its file when somebody asks.

    A signal ends what the thread that handles it waits for, and torch takes an interrupted pause between two
    tries to reach rank 0 for an error. So where there may be torch, a thread of our own answers `beside` the
    main one, which does not notice. The second signal is for whoever keeps the interpreter locked: the main
    thread itself answers it, as it does the first where it is alone.
    """
    import faulthandler

    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK  # whatever the attempt before has put there
    try:
        fd = out_of_the_way(os.open(stack_file(metrics), flags, 0o600))
    except OSError:
        return  # a full disk: the rank runs all the same
    for number in (STACK_SIGNAL, INSIST_SIGNAL):  # who sends them looks for a handler of either
        faulthandler.register(number, file=fd, all_threads=False, chain=False)
    if beside:
        start_answering(stack_file(metrics))


def out_of_the_way(fd: int) -> int:
    """The same file under a number that no program comes to, which closes what it does not know and opens
    files of its own."""
    import fcntl

    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1000)
    except OSError:
        return fd  # so many files are not allowed here
    os.close(fd)
    return high


def start_answering(path: str) -> None:
    """Start the thread. It gets no signal but the one that it waits for, which the program's threads block:
    all others are theirs, as their own masks say."""
    import _thread

    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        _thread.start_new_thread(answer, (path, _thread.get_ident()))  # one that `threading` does not count
        before.add(STACK_SIGNAL)
    except RuntimeError:
        pass  # no thread is to be had: the main one answers
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def answer(path: str, main_thread: int) -> None:
    """In a thread of the rank: write the main one's stack, innermost first, whenever the signal comes."""
    while True:
        signal.sigwait({STACK_SIGNAL})
        frame, lines = sys._current_frames().get(main_thread), ["Stack (most recent call first):\n"]
        while frame is not None:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno or 0} in {code.co_name}\n')
            frame = frame.f_back
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                os.write(fd, "".join(lines).encode(errors="replace"))
            finally:
                os.close(fd)
        except OSError:
            pass  # a full disk: then nobody learns where it is
        del frame, lines  # nothing of the program is kept alive from here


def main() -> int:
    prefork()
    return 0


if __name__ == "__main__":
    sys.exit(main())
