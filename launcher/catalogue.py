"""The table of known failures: what a log shows, what it means, what to do. Diagnosis, `ringctl explain` and
docs/troubleshooting.md are all made from it.

Where several rows match one rank, the first of the strongest kind counts, so the more particular stand first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["cause", "symptom", "consequence"]
STRENGTH: dict[Kind, int] = {"cause": 0, "symptom": 1, "consequence": 2}


@dataclass(frozen=True)
class Row:
    """One known failure. `{host}` in `fix` stands for the host it happened on."""

    id: str
    title: str  # how a user would put it
    patterns: tuple[str, ...]  # regular expressions, searched in single lines of a log
    cause: str  # one sentence, without its full stop
    fix: str  # what to do; what stands in backquotes can be typed
    seen_by: str = ""  # how preflight sees it beforehand
    auto: str = ""  # what ringctl does about it by itself
    kind: Kind = (
        "cause"  # a symptom has several possible causes; a consequence follows another rank's failure
    )
    signals: tuple[str, ...] = ()  # a rank that one of these ended, and that said nothing known
    between_hosts: bool = False  # does not apply where all ranks are on one host
    only_torch: bool = False  # any other connection ends in these words too: they count in what torch says

    @property
    def consequence(self) -> bool:
        return self.kind == "consequence"


THEMES: tuple[tuple[str, tuple[Row, ...]], ...] = (
    (
        "Finding and reaching each other",
        (
            Row(
                "loopback_name",
                "gloo tells the other hosts a 127.x address",
                (
                    r"remote=\[127\.",
                    r"connect \[127\.",
                    r"connect to (?:any network address of )?\(127\.",
                    r"Unable to resolve hostname to a \(local\) address",
                ),
                "a rank listened on its loopback interface, where other hosts cannot reach it; without an "
                "interface "
                "gloo takes whatever the host's own name means, often 127.0.1.1",
                "let ringctl choose the interface (take `lo` and `ifname` out of the inventory), "
                "or by hand `export GLOO_SOCKET_IFNAME=<the interface towards the other hosts>` on each host",
                seen_by="each host looks up its own name",
                auto=(
                    "sets GLOO_SOCKET_IFNAME on every host from its own route to the others; /etc/hosts "
                    "stays as it "
                    "is"
                ),
                between_hosts=True,
            ),
            Row(
                "multihomed",
                "gloo connects to docker0, virbr0 or a VPN",
                (
                    r"remote=\[172\.17\.",
                    r"connect \[172\.17\.",
                    r"remote=\[192\.168\.122\.",
                    r"connect \[192\.168\.122\.",
                    r"remote=\[100\.(?:6[4-9]|[7-9]\d|1[01]\d|12[0-7])\.",
                    r"connect to (?:any network address of )?\(172\.17\.",
                    r"connect to (?:any network address of )?\(192\.168\.122\.",
                ),
                "an address that only means something on one host (a Docker or libvirt bridge, a VPN) was "
                "taken for "
                "the network between the hosts",
                "take `ifname` out of the inventory, or name the interface that has the address the others "
                "know: "
                "`ringctl preflight` shows it",
                seen_by="compares the interface with the host's route to its peers, and dials every pair",
                auto="takes the interface from the route to the other hosts",
                between_hosts=True,
            ),
            Row(
                "alias_missing",
                "a host name is not known",
                (
                    r"gai error",
                    r"Name or service not known",
                    r"Temporary failure in name resolution",
                    r"^\S*Error.*\bhost not found\b",
                ),
                "a name of another host is not in this host's /etc/hosts or DNS",
                "write the numeric address in the inventory, or add the line that `ringctl preflight` prints "
                "to /etc/hosts on {host}",
                seen_by="every host looks up every name of the inventory and compares",
                auto="gives ranks numeric addresses, so names need not be known",
            ),
            Row(
                "ifname",
                "the network interface is not there",
                (r"Unable to find address for: (\S+)", r"names '\S+', but this machine has"),
                "the interface named for gradients is not on this host or has no IPv4 address (`^lo` and "
                "the like "
                "are "
                "NCCL's notation; gloo does not know it)",
                "take `ifname` out of the inventory: it is found by itself",
                seen_by="looks for the interface and its address on each host",
                auto="takes the interface from the route to the other hosts",
            ),
            Row(
                "port_used",
                "the master port is in use",
                (
                    r"EADDRINUSE",
                    r"errno: 98\b",
                    r"[Aa]ddress already in use",
                    r"the master port is taken:",
                ),
                "something else listens on the master port: another job, what is left of an old run, or a "
                "connection "
                "that got the port because it lies in the ephemeral range",
                "leave out --master-port and master_port, so that a free one is taken; `ringctl ps` shows "
                "runs of "
                "yours "
                "that may hold it",
                seen_by=(
                    "tries the port on the master, says who holds it, compares it with the ephemeral range"
                ),
                auto="chooses another port, also when it is taken between the check and the start",
            ),
            Row(
                "no_route",
                "there is no way to that address",
                (r"Network is unreachable", r"errno: 101\b", r"No route to host", r"errno: 113\b"),
                "the host has no way to the address it was given: the address is wrong, an interface or the "
                "other host is down, or a firewall refuses",
                "correct `address` or `data_address` in the inventory; `ringctl preflight` shows what each "
                "host reaches, and why not",
                seen_by="dials every pair of hosts",
                kind="symptom",
            ),
            Row(
                "host_gone",
                "a host cannot be heard any more",
                (r"cannot be heard any more", r"was not heard of for \d+ s"),
                "the host is off, or was cut off from the network, while its ranks ran",
                "is the host on, and its network up? Once it can be reached: `ringctl stop`",
                seen_by="the first connection",
                between_hosts=True,
            ),
            Row(
                "mtu",
                "small messages pass and large ones never arrive",
                (r"nothing came of the first large exchange",),
                "packets between the hosts are lost: those that are larger than a link on the way takes "
                "(MTU) if small ones pass, else all, as behind a firewall that was raised after they had met",
                "`ringctl preflight` says which; for large ones, give all hosts the same MTU: "
                "`ip link set dev <interface> mtu 1500`",
                seen_by="compares MTUs, and sends every pair more than a jumbo frame holds",
                kind="symptom",
                between_hosts=True,
            ),
            Row(
                "ipv6",
                "IPv4 and IPv6 are mixed",
                (r"ss_family",),
                "one rank told the others an IPv4 address, and another an IPv6 address",
                "write numeric IPv4 addresses in the inventory, or by hand `export GLOO_SOCKET_IFNAME=<the "
                "interface towards the other hosts>` on each host",
                seen_by="families of every name",
                auto="gives ranks numeric IPv4 addresses; `errno: 97` in a log is harmless",
            ),
            Row(
                "stale_env",
                "a variable is left from torchrun",
                (r"could not reach its own store",),
                "rank 0 looked for a store that it has to open itself: TORCHELASTIC_USE_AGENT_STORE, left "
                "from a torchrun, says that somebody else has, or MASTER_ADDR is not an address of its host",
                "`unset TORCHELASTIC_USE_AGENT_STORE` before starting by hand; MASTER_ADDR is rank 0's own "
                "address",
                seen_by="looks for it in the environment that a login has",
                auto="removes TORCHELASTIC_*, GROUP_*, ROLE_* and PET_* from the ranks' environment",
            ),
        ),
    ),
    (
        "The Python that runs the ranks",
        (
            Row(
                "no_torch",
                "torch is not found",
                (r"No module named 'torch'",),
                "torch is not installed in the Python that runs the ranks, or conda's environment was not "
                "activated: "
                "its set-up sits in .bashrc behind a guard for interactive shells",
                "`ringctl env create` makes the environment on all hosts; or name the right one as `env` in "
                "the "
                "inventory; on this machine alone `pip install 'ringctl[trainer]'`",
                seen_by="asks the environment's own Python for torch",
                auto="finds the environment and calls its Python by absolute path, without conda's set-up",
            ),
            Row(
                "conda_shell",
                "conda works by hand but not over SSH",
                (r"not been properly configured to use 'conda activate'", r"conda: .*not found"),
                "conda's set-up sits in .bashrc behind a guard that ends it for shells that are not "
                "interactive",
                "name the environment as `env: {conda: NAME}` in the inventory instead of activating it in "
                "the "
                "command",
                seen_by="looks for conda in the usual places and in the user's own records",
                auto="finds the environment and calls its Python by absolute path",
            ),
            Row(
                "env_missing",
                "the environment does not exist",
                (
                    r"Could not find conda environment",
                    r"EnvironmentNameNotFound",
                    r"there is no (?:conda|virtual) environment",
                ),
                "the environment was never created on this host",
                "`ringctl env create`",
                seen_by="looks for it on each host",
                auto="`ringctl preflight --fix` creates it",
            ),
            Row(
                "module_missing",
                "another module is not found",
                (r"No module named '(?!torch')[\w.]+'", r"ImportError: cannot import name"),
                "the ranks' environment lacks a package that the program imports, or has another version of "
                "it",
                "install it in the environment on every host: `ringctl exec -- pip install PACKAGE`",
            ),
            Row(
                "library_missing",
                "a shared library is missing or too old",
                (r"cannot open shared object file", r"(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+' not found"),
                "a compiled package was built for another system than this host's",
                "install the packages on the host itself instead of copying them: `ringctl env create`",
            ),
            Row(
                "torchvision_pair",
                "torchvision does not fit torch",
                (r"operator torchvision::nms does not exist",),
                "torchvision was built for another torch, such as a CUDA wheel beside a CPU torch",
                "reinstall both together, from the same place: `pip install --force-reinstall torch "
                "torchvision`, with the index that torch came from; `ringctl env create` makes a pair that "
                "fits",
                seen_by="compares both packages in the environment; `--deep` imports them",
            ),
            Row(
                "versions",
                "hosts have different versions",
                (
                    r"use_libuv was requested",
                    r"unsupported pickle protocol",
                ),
                "torch or Python differ between the hosts",
                "`ringctl env create` makes the same environment everywhere",
                seen_by="compares torch, torchvision, Python and CPU architecture of all hosts",
            ),
            Row(
                "python_old",
                "the host's Python is too old",
                (
                    r"^\S*(Error|ERROR)\S*:? .*requires (a different )?Python",
                    r"launcher/host\w+\.py.*SyntaxError",
                    r"SyntaxError: future feature annotations",
                ),
                "a Python older than 3.8 was to run ringctl's supervisor, or one too old for a package",
                "name a newer one as `python` of {host} in the inventory",
                seen_by="asks for the version",
            ),
            Row(
                "cuda_missing",
                "the program wants a GPU and there is none",
                (
                    r"Torch not compiled with CUDA enabled",
                    r"Found no NVIDIA driver",
                    r"No CUDA GPUs are available",
                    r"doesn't have NCCL built in",
                    r"ProcessGroupNCCL is only supported with GPUs",
                ),
                "the program asks for CUDA or NCCL on a host that has no GPU, or a torch without CUDA",
                'use `backend="gloo"` and `device="cpu"` in the program, '
                "or install a CUDA build of torch on {host}",
                seen_by="lists GPUs with `--verbose`",
            ),
            Row(
                "sigill",
                "illegal instruction",
                (r"Illegal instruction", r"exitcode\s*: -4\b"),
                "this build of torch needs CPU instructions (AVX2, AVX-512) that the host lacks",
                "install a build for that CPU on {host}, or leave the host out: `ringctl launch --exclude "
                "{host}`",
                seen_by="CPU flags",
                signals=("SIGILL",),
            ),
        ),
    ),
    (
        "What a rank needs of its host",
        (
            Row(
                "oom",
                "out of memory",
                (
                    r"DefaultCPUAllocator: can't allocate memory",
                    r"DefaultCPUAllocator: not enough memory",
                    r"\bMemoryError\b",
                    r"std::bad_alloc",
                    r"CUDA out of memory",
                    r"Cannot allocate memory",
                    r"[Oo]ut of memory: Kill",
                    r"oom-kill",
                ),
                "the host, or the memory limit that the rank runs under, ran out of memory",
                "use a smaller --batch-size or fewer ranks on {host} (`slots` in the inventory)",
                seen_by=(
                    "free memory and the control group's limit; the kernel's count of OOM kills before and "
                    "after"
                ),
            ),
            Row(
                "killed",
                "Killed, exit code 137 or -9",
                (
                    r"^Killed(?:: 9)?\s*$",  # as shells say it, and no program
                    r"^\S+: line \d+:\s+\d+ Killed\b",
                    r"exitcode\s*: -9\b",
                    r"Signal 9 \(SIGKILL\)",
                    r"exit(?:ed with)? (?:code|status) 137\b",
                ),
                "usually out of memory, else somebody's kill -9",
                "use a smaller --batch-size or fewer ranks on {host}; `dmesg | grep -i oom` on {host} shows "
                "whether "
                "it "
                "was the kernel",
                signals=("SIGKILL",),
            ),
            Row(
                "shm",
                "bus error, or shared memory cannot be opened",
                (
                    r"[Bb]us error",
                    r"unable to open shared memory",
                    r"exitcode\s*: -7\b",
                    r"insufficient shared memory",
                ),
                "/dev/shm is too small for what the data loader's workers put there",
                "use `num_workers=0` in the program, or enlarge it: `mount -o remount,size=2g /dev/shm` as "
                "root on "
                "{host}",
                seen_by="free space of /dev/shm",
                signals=("SIGBUS",),
            ),
            Row(
                "disk",
                "no space left",
                (r"No space left on device", r"Disk quota exceeded", r"\bENOSPC\b"),
                "the disk is full, out of inodes, or the quota is used up",
                "free some space on {host}: `df -h ~ && df -i ~` there shows what is full",
                seen_by="free space, inodes and a write test in the run and data folders",
            ),
            Row(
                "readonly",
                "a folder cannot be written",
                (r"Read-only file system", r"PermissionError: \[Errno 13\]"),
                "the user of the ranks may not read or write a file there",
                "correct the owner: `chown -R $USER <the folder named above>` on {host}, or use another "
                "folder",
                seen_by="a write test in the run and data folders",
            ),
            Row(
                "nofile",
                "too many open files",
                (r"Too many open files", r"received 0 items of ancdata"),
                "the limit of open files is too low for this many connections or loader workers",
                "`ulimit -n 65536` before starting by hand",
                seen_by="RLIMIT_NOFILE",
                auto="raises the soft limit to the hard one for the run",
            ),
            Row(
                "threads",
                "threads cannot be created",
                (r"[Tt]hread creation failed", r"can't start new thread", r"pthread_create failed"),
                "the limit of processes and threads is reached: each rank takes as many threads as there "
                "are cores",
                "`ringctl launch -e OMP_NUM_THREADS=1 ...`, or raise `ulimit -u` on {host}",
                seen_by="cores and RLIMIT_NPROC",
                auto="sets OMP_NUM_THREADS to the cores divided by the ranks of the host",
            ),
            Row(
                "dataset",
                "the data set is missing or damaged",
                (
                    r"File not found or corrupted",
                    r"Dataset not found",
                    r"Error downloading",
                    r"HTTP Error 40[34]",
                    r"EOFError: (?:Compressed file ended|Ran out of input)",
                    r"is not an MNIST file: copy it again",
                    r"bytes instead of [\d,]+: copy it again",
                    r"no usable \S+\.gz",
                    r"lacks MNIST's files",
                    r"has no images, or labels other than",
                ),
                "the files of the data set are not on this host, or were cut short: several ranks "
                "downloading at "
                "once "
                "do that",
                "`ringctl preflight --fix` puts it there; or copy it again to {host}, or use --data mini",
                seen_by="sizes and hashes of the unpacked files",
                auto="downloads once a host, into a temporary name, checks the bytes, then renames",
            ),
            Row(
                "file_missing",
                "a file is not there",
                (r"FileNotFoundError: \[Errno 2\]", r"can't open file '.*': \[Errno 2\]"),
                "the program reads a file that is not on this host: only the folder that you launch from "
                "goes along",
                "put it into that folder, or copy it to the same place on every host: `ringctl exec -- ls "
                "-l FILE` "
                "shows "
                "where it is",
            ),
        ),
    ),
    (
        "What the program does",
        (
            Row(
                "code_differs",
                "ranks run different code",
                (
                    r"DDP expects same model",
                    r"appears not to match (?:sizes|strides) of the same param",
                    r"[Cc]ollective mismatch",
                    r"Received data size doesn't match expected size",
                    r"op\.preamble\.length <= op\.nbytes",
                    r"Detected mismatch between collectives",
                ),
                "the ranks exchanged tensors of different sizes: one has other code or another model, or "
                "their "
                "calls are "
                "out of step",
                "`ringctl push` brings the same code to all hosts; in the program, each rank must make the "
                "same "
                "calls "
                "with the same shapes",
                seen_by="compares the digest of the code on all hosts",
                auto="pushes one snapshot, and every rank runs a copy of it",
            ),
            Row(
                "unused_parameters",
                "DDP waits for gradients that do not come",
                (r"Expected to have finished reduction in the prior iteration",),
                "some parameters of the model took no part in the loss, and DistributedDataParallel waits "
                "for them",
                "`DistributedDataParallel(model, find_unused_parameters=True)`, or leave the unused layers "
                "out",
            ),
            Row(
                "uneven",
                "some ranks have more batches than others",
                (r"Detected at least one rank that exhausted inputs",),
                "the ranks did not make the same number of collective calls: one had fewer batches, or left "
                "its loop "
                "earlier",
                "give all ranks as many batches: `DistributedSampler(..., drop_last=True)` and "
                "`DataLoader(..., drop_last=True)`, or wrap the loop in `with model.join():`",
            ),
            Row(
                "unpicklable",
                "an object cannot be sent",
                (r"PicklingError", r"Can't pickle", r"cannot pickle '"),
                "an object that goes to another process (all_gather_object, a loader's worker, torch.save) "
                "holds "
                "something that cannot be pickled, such as a lambda or an open file",
                "send plain data, or define the function at the top of a module",
            ),
            Row(
                "loss_nan",
                "the loss is not a number any more",
                (r"the loss became (?:nan|inf|-inf)", r"has an infinity or a NaN"),
                "the training diverged",
                "try a smaller learning rate: `ringctl launch -- --lr 0.001`; `--on-nonfinite skip` leaves "
                "out such steps",
            ),
            Row(
                "crash",
                "a crash inside a library",
                (r"[Ss]egmentation fault", r"exitcode\s*: -11\b", r"exitcode\s*: -6\b"),
                "a compiled library crashed; mixed versions of packages are the usual reason",
                "`ringctl launch -e PYTHONFAULTHANDLER=1 ...` shows where; then `ringctl env create` for a "
                "clean "
                "environment",
                signals=("SIGSEGV", "SIGABRT", "SIGFPE"),
            ),
        ),
    ),
    (
        "Somebody ended it",
        (
            Row(
                "sighup",
                "the SSH session ended and took the run along",
                (
                    r"Received 1 death signal",
                    r"got signal: 1\b",
                    r"(got|received|caught|by) (signal )?SIGHUP\b",
                    r"^Hangup\b",
                ),
                "the terminal or SSH session that it was started from went away",
                "start it with `ringctl launch --detach`, or by hand with `setsid nohup ... </dev/null &`",
                auto="starts ranks in sessions of their own, with stdin closed",
                signals=("SIGHUP",),
            ),
            Row(
                "logout_kill",
                "the process is gone after logging out",
                (r"its supervisor was killed",),
                "logind ended what the user had left running (KillUserProcesses=yes), or somebody, or the "
                "kernel for want of memory, killed the supervisor",
                "`loginctl enable-linger` on {host}",
                seen_by="logind's configuration and whether the user lingers",
            ),
            Row(
                "terminated",
                "somebody ended the rank",
                (
                    r"exitcode\s*: -15\b",
                    r"^Terminated\b",
                    r"got signal: 15\b",
                    r"its supervisor was told to end",
                ),
                "it got a SIGTERM or SIGINT from outside: a batch system, a shutdown, or another user of the "
                "account",
                "see who did: `last -x | head` and `journalctl --since -1h` on {host}",
                signals=("SIGTERM", "SIGINT"),
            ),
        ),
    ),
    (
        "SSH",
        (
            Row(
                "ssh_hostkey",
                "the host key is unknown or has changed",
                (
                    r"Host key verification failed",
                    r"unknown host key",
                    r"REMOTE HOST IDENTIFICATION HAS CHANGED",
                ),
                "the server is new or was reinstalled, or someone is in between",
                "compare the fingerprint with the server's own, then `ringctl trust {host}`",
                seen_by="the first connection",
                auto="never: no key is accepted unasked",
            ),
            Row(
                "ssh_auth",
                "SSH refuses the key",
                (
                    r"(paramiko|ssh|SSH).*Authentication failed",
                    r"Permission denied \(publickey",
                    r"Too many authentication failures",
                ),
                "the server does not take any of the keys: a wrong key, an agent that offers too many, or a "
                "~/.ssh "
                "that "
                "others may write",
                "name the key as `identity_file` in the inventory; `chmod go-w ~ ~/.ssh "
                "~/.ssh/authorized_keys` on "
                "{host}",
                seen_by="the first connection, and which keys were offered",
            ),
            Row(
                "ssh_limits",
                "SSH connections are refused now and then",
                (
                    r"exchange_identification: .*(?:closed|reset)",
                    r"channel \d+: open failed",
                    r"administratively prohibited",
                    r"[Ss]ession open refused",
                ),
                "sshd limits how many log in at once (MaxStartups) or how many sessions a connection may "
                "have (MaxSessions), or does not let a jump host's users go on (AllowTcpForwarding)",
                "raise MaxStartups and MaxSessions in sshd_config of {host} or of the jump host, and allow "
                "forwarding there",
                auto="one connection a host, a bounded number at once, tried again with jitter",
            ),
            Row(
                "ssh_noise",
                ".bashrc prints something",
                (r"Received message too long",),
                "the shell's start-up files print something where a program expects to speak",
                "print only in interactive shells: `[[ $- == *i* ]] || return` at the top of ~/.bashrc on "
                "{host}",
                seen_by="what comes before ringctl's own output",
                auto="marks the beginning of its own output and ignores what comes before",
            ),
            Row(
                "clock",
                "clocks are apart",
                (r"certificate is not yet valid", r"Clock skew detected"),
                "the host's clock is wrong",
                "`timedatectl set-ntp true` as root on {host}",
                seen_by="the time on each host, corrected by the round trip",
                auto="merges logs by corrected time",
            ),
        ),
    ),
    (
        "Symptoms: several causes are possible",
        (
            Row(
                "firewall",
                "ranks meet, but cannot connect to each other",
                (
                    r"connectFullMesh failed .*(?:Connect timeout|Connection timed out)",
                    r"timed out connecting: SO_ERROR: Connection timed out",
                    r"errno: 110\b",
                ),
                "packets between the hosts are dropped: gloo listens on random ports, and a firewall lets "
                "only the "
                "master "
                "port through",
                "allow TCP between these hosts, such as `ufw allow from <address of the other host>` on "
                "each; "
                "`ringctl preflight` names the pairs and prints the lines",
                seen_by="every host dials a random port of every other, both ways, with a payload",
                kind="symptom",
                between_hosts=True,
            ),
            Row(
                "refused",
                "another rank does not listen where it said",
                (
                    r"connectFullMesh failed .*Connection refused",
                    r"SO_ERROR: Connection refused",
                    r"connectFullMesh failed .*Connect timeout",
                ),
                "the other rank had ended already, it told an address that means another machine here, or a "
                "firewall there refuses",
                "look at the other ranks' output; `ringctl preflight` checks the addresses and dials "
                "every pair",
                seen_by="every host dials every other",
                kind="symptom",
            ),
            Row(
                "store_timeout",
                "rank 0 cannot be reached",
                (
                    r"client socket has timed out after .* while trying to connect to \((.+), (\d+)\)",
                    r"client socket has failed to connect to any network address of \((.+), (\d+)\)",
                    r"could not reach rank 0 at",
                ),
                "rank 0 does not answer at the master address and port: it is not up, the address is wrong, "
                "or "
                "packets "
                "are dropped",
                "see rank 0's own output (`ringctl logs --rank 0`), then `ringctl preflight`, which dials "
                "that port "
                "from "
                "every host",
                seen_by="every host dials the master's address and port",
                auto="gives ranks a numeric address of the master",
                kind="symptom",
            ),
            Row(
                "ranks",
                "not all ranks have come",
                (
                    r"waiting for clients\. (\d+)/(\d+)",
                    r"wait timeout after \d+ms, keys:",
                    r"(?:^|: )ranks? ([\d, -]+) (?:has|have) not come",
                    r"Ranks? ([\d, ]+) failed to pass monitoredBarrier",
                ),
                "a rank never came to the meeting, came under another number, or still does something else",
                "see what the missing ranks say (`ringctl logs --rank N`), then start again",
                seen_by="the plan holds every rank from 0 to N-1 once",
                auto="names the missing ranks and their hosts",
                kind="symptom",
            ),
            Row(
                "two_runs",
                "two runs use the same port",
                (r"two runs use the same port",),
                "another run has the master port, and ranks of both came to the same meeting",
                "leave out --master-port and master_port, so that each run takes a free one; `ringctl ps` "
                "shows the other run, and `ringctl stop RUN` ends it",
                seen_by="tries the port on the master and says who holds it",
                auto="does not start a run on the master port of another, and keeps their ranks apart",
                kind="symptom",
            ),
            Row(
                "rank_twice",
                "two processes have the same rank",
                (r"process with rank \d+ came before", r"rank \d+ is there twice"),
                "a process with that number was there before: a command was started twice, or one rank "
                "again while the others still waited",
                "end what is left (`ringctl stop`), then start each rank once",
                seen_by="the plan holds every rank from 0 to N-1 once",
                auto="gives every process a rank of its own, and a run a port of its own",
                kind="symptom",
            ),
        ),
    ),
    (
        "Consequences: another rank went first",
        (
            Row(
                "hang",
                "a collective timed out",
                (
                    r"Timed out waiting \d+ms",
                    r"Application timeout caused pair closure",
                    r"Watchdog caught collective",
                ),
                "no answer from another rank in time: it hangs, has fewer batches, or its host is gone",
                "`ringctl explain` names the silent rank and the call it sits in; a shorter process-group "
                "timeout "
                "tells "
                "sooner (`ringctl launch -- --timeout 30`)",
                auto=(
                    "takes the stacks of ranks that make no progress, and says which one is behind and where"
                ),
                kind="consequence",
            ),
            Row(
                "peer_died",
                "the connection to another rank was closed",
                (
                    r"Connection closed by peer",
                    r"Connection reset by peer",
                    r"Broken pipe",
                    r"Socket closed",
                    r"lost another rank",
                ),
                "another rank ended while this one was exchanging data with it",
                "look at the rank that failed first",
                kind="consequence",
                only_torch=True,
            ),
            Row(
                "store_died",
                "the connection to rank 0's store was closed",
                (r"got 0 bytes", r"recvValue\w* failed"),
                "rank 0, which holds the rendezvous store, ended",
                "look at rank 0: `ringctl logs --rank 0`",
                kind="consequence",
                only_torch=True,
            ),
        ),
    ),
)

ROWS: tuple[Row, ...] = tuple(row for _, rows in THEMES for row in rows)
BY_ID = {row.id: row for row in ROWS}
BY_SIGNAL = {name: row for row in ROWS for name in row.signals}
NOISE = re.compile(r"errno: 97\b")  # torch tries IPv6 first and says so where there is none
FROM_TORCH = re.compile(  # in what torch, gloo, NCCL or ringctl's trainer say of a connection between ranks
    r"\bgloo(?:[/\\]|::)|\bc10d\b|\bDist\w*Error\b|\bTCPStore\b|\bSocketImpl\b|\bNCCL\b|lost another rank|"
    r"(?:by peer|Socket closed|Read error|read|writev?) \[[^\]]+\]:\d"
)


@functools.cache
def _compiled(row: Row) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in row.patterns))


@functools.cache
def _any(only_torch: bool) -> re.Pattern[str]:
    rows = [row for row in ROWS if row.only_torch is only_torch]
    return re.compile("|".join(f"(?:{pattern})" for row in rows for pattern in row.patterns))


NOT_LITERAL = re.compile(  # what of a regular expression need not be in the text as it stands there
    r"\(.*\)[?*+]?|\[[^]]*\][?*+]?|\\[bdDsSwW][?*+]?|\\?.[?*]|[.^$+]|(?<!\\)\\(?=\W)"
)


def literal(pattern: str) -> str:
    """The longest piece that every line has that the pattern matches."""
    plain = re.sub(r"\\([^\w\s])", lambda match: f"\0{ord(match[1]):03d}", pattern)
    pieces = NOT_LITERAL.split(plain)
    return max((re.sub(r"\0(\d{3})", lambda m: chr(int(m[1])), piece) for piece in pieces), key=len)


@functools.cache
def _literals() -> tuple[str, ...]:
    return tuple({literal(pattern) for row in ROWS for pattern in row.patterns})


def may_be_known(text: str) -> bool:
    """False if no line of `text` is known; much quicker than to ask of each."""
    return any(piece in text for piece in _literals())


def is_known(line: str, *, from_torch: bool = False) -> bool:
    """Whether any row matches: a search or two, for logs of millions of lines."""
    known = _any(False).search(line) or (is_from_torch(line, from_torch) and _any(True).search(line))
    return bool(known) and not NOISE.search(line)


def is_from_torch(line: str, from_torch: bool) -> bool:
    return from_torch or bool(FROM_TORCH.search(line))


def find(lines: Iterable[str], *, one_host: bool = False, from_torch: bool = False) -> Row | None:
    """The strongest row that matches one of the lines; the first in the table among equals. `from_torch` if
    something else than their words says that they are torch's."""
    said = [line for line in lines if is_known(line, from_torch=from_torch)]
    torchs = [line for line in said if is_from_torch(line, from_torch)]
    rows = [(row, torchs if row.only_torch else said) for row in ROWS if not (one_host and row.between_hosts)]
    found = [row for row, words in rows if any(_compiled(row).search(line) for line in words)]
    return min(found, key=lambda row: STRENGTH[row.kind], default=None)
