"""The environment that ranks start in: conda, virtual or a Python, found and activated without its tools."""

from __future__ import annotations

import os
import signal
import time

from launcher.hostanswer import SENTINEL, Refused
from launcher.hostdisk import read_json
from launcher.hostproc import has_ended, leaving_nothing, send
from launcher.hostruns import home_folder

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

CONDA_BASES = """
    ~/miniconda3 ~/anaconda3 ~/miniforge3 ~/mambaforge ~/miniconda ~/anaconda ~/miniforge ~/conda ~/.conda
    ~/micromamba ~/.local/share/mamba ~/.micromamba /opt/conda /opt/miniconda3 /opt/anaconda3 /opt/miniforge3
    /opt/mambaforge /opt/miniconda /opt/anaconda /usr/local/miniconda3 /usr/local/anaconda3
    /usr/local/miniforge3 /usr/share/miniconda
""".split()  # noqa: SIM905 - reads better than twenty quoted lines
CONDA_TOOLS = ("conda", "mamba", "micromamba")
CONDA_UNSET = "***unset***"  # what conda writes for a variable that was set and is not any more
LOGIN_S = 10.0  # a login shell that takes longer waits for something
ACTIVATION_S = 30.0  # with two logins still within what a controller waits for a start
OF_THE_SHELL = ("_", "PWD", "OLDPWD", "SHLVL")  # what a shell sets for itself
STALE = ("TORCHELASTIC_", "GROUP_", "ROLE_", "PET_", "RINGCTL_")


def clean_environ(environ: dict[str, str]) -> dict[str, str]:
    """Without what another launcher, or another run of ours, left in it; our home folder stays."""
    return {k: v for k, v in environ.items() if k == "RINGCTL_HOME" or not k.startswith(STALE)}


def find_program(name: str, path: str, cwd: str) -> str | None:
    """The executable that a shell in `cwd` would start for `name`."""
    places = [""] if "/" in name else path.split(":")
    for place in places:
        candidate = os.path.join(cwd, place, os.path.expanduser(name))
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return None


def with_python(environ: dict[str, str], python: str) -> dict[str, str]:
    path = os.path.dirname(python) + ":" + environ.get("PATH", os.defpath)
    return {k: v for k, v in dict(environ, PATH=path).items() if k != "PYTHONHOME"}


def recorded_prefixes() -> list[str]:
    """Environments that conda, mamba and micromamba have noted for this user, wherever they are."""
    try:
        with open(os.path.expanduser("~/.conda/environments.txt")) as f:
            return [line.strip() for line in f if line.strip()]
    except (OSError, ValueError):
        return []


def conda_bases(environ: dict[str, str]) -> list[str]:
    """Folders that may have conda environments below `envs/`, the most telling first."""
    path = environ.get("PATH", os.defpath)
    tools = [environ.get("CONDA_EXE"), environ.get("MAMBA_EXE")]
    tools += [find_program(name, path, "/") for name in CONDA_TOOLS]
    bases = [os.path.dirname(os.path.dirname(os.path.realpath(tool))) for tool in tools if tool]
    for prefix in [environ.get("MAMBA_ROOT_PREFIX"), environ.get("CONDA_PREFIX")] + recorded_prefixes():
        if prefix:
            above, folder = os.path.split(os.path.dirname(prefix))
            bases.append(above if folder == "envs" else prefix)
    return bases + [os.path.expanduser(base) for base in CONDA_BASES]


def named_prefix(name: str, environ: dict[str, str]) -> str | None:
    """The folder of a conda environment, by what `environ` and the user's records tell."""
    bases = conda_bases(environ)
    prefixes = bases if name == "base" else [os.path.join(base, "envs", name) for base in bases]
    for prefix in prefixes + [p for p in recorded_prefixes() if os.path.basename(p) == name]:
        if has_python(prefix) and os.path.isdir(os.path.join(prefix, "conda-meta")):
            return prefix
    return None


def has_python(prefix: str) -> bool:
    return os.path.isfile(os.path.join(prefix, "bin", "python"))


def made_venv(name: str) -> str | None:
    """What `ringctl env create` made where there is no conda. The link's target: a newer one replaces the
    link, and a run stays with what it started in."""
    prefix = os.path.realpath(os.path.join(home_folder(), "venvs", name))
    return prefix if has_python(prefix) else None


def env_record(name: str) -> str:
    """Where `ringctl env create` notes how far it came."""
    return os.path.join(home_folder(), "envs", name, "record.json")


def find_prefix(name: str) -> str | None:
    """An environment by its name. Login shells come last: they take time, and may do anything."""
    found = named_prefix(name, dict(os.environ)) or made_venv(name)
    logins = login_environs() if found is None else iter(())
    return found or next(filter(None, (named_prefix(name, environ) for environ in logins)), None)


def conda_prefix(name: str) -> str:
    """The folder of the environment that `{conda: NAME}` or `{conda: PATH}` means, without conda on PATH."""
    if "/" in name:
        prefix = os.path.expanduser(name)
        if not has_python(prefix):
            raise Refused(f"there is no conda environment at {prefix}")
        return prefix
    if (read_json(env_record(name)) or {}).get("state") == "creating":
        raise Refused(f"the environment {name!r} on this host is not finished; repeat: ringctl env create")
    found = find_prefix(name)
    if found is None:
        raise Refused(f"there is no conda environment {name!r} on this host; create it: ringctl env create")
    return found


def activate(spec: dict[str, str] | None, environ: dict[str, str]) -> dict[str, str]:
    """The environment of a process inside conda / venv / python; None leaves it as it is."""
    if spec is None:
        return environ
    value = os.path.expanduser(spec["value"])
    if spec["kind"] == "python":
        python = find_program(value, environ.get("PATH", os.defpath), os.getcwd())
        if python is None:
            raise Refused(f"there is no Python at {value}")
        return with_python(environ, python)
    if spec["kind"] == "venv":
        if not has_python(value):
            raise Refused(f"there is no virtual environment at {value}")
        return inside_venv(environ, value)
    prefix = conda_prefix(spec["value"])
    if not os.path.isdir(os.path.join(prefix, "conda-meta")):
        return inside_venv(environ, prefix)
    inside = with_python(environ, os.path.join(prefix, "bin", "python"))
    inside.update(CONDA_PREFIX=prefix, CONDA_DEFAULT_ENV=spec["value"], CONDA_SHLVL="1")
    inside.update(conda_variables(prefix))
    return run_activation_scripts(prefix, inside)


def inside_venv(environ: dict[str, str], prefix: str) -> dict[str, str]:
    return dict(with_python(environ, os.path.join(prefix, "bin", "python")), VIRTUAL_ENV=prefix)


def conda_variables(prefix: str) -> dict[str, str]:
    """What packages, and then `conda env config vars`, set in an environment."""
    import glob

    found: dict[str, Any] = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(prefix), "etc/conda/env_vars.d/*"))):
        found.update(read_json(path) or {})
    found.update((read_json(os.path.join(prefix, "conda-meta", "state")) or {}).get("env_vars") or {})
    return {k: str(v) for k, v in found.items() if k != "PATH" and v != CONDA_UNSET}


def run_activation_scripts(prefix: str, environ: dict[str, str]) -> dict[str, str]:
    """What the environment is after the packages' own activate.d scripts."""
    import glob

    scripts = sorted(glob.glob(os.path.join(glob.escape(prefix), "etc/conda/activate.d/*.sh")))
    if not scripts:
        return environ
    shell = find_program("bash", environ["PATH"], "/") or "/bin/sh"
    code = 'for f in "$@"; do echo "$f" >&2; . "$f" >/dev/null; done; printf %s "$0"; env -0'
    inside, said = shell_environ([shell, "-c", code, SENTINEL.decode()] + scripts, environ, ACTIVATION_S)
    if inside is None:
        last = max((said.rfind(script), script) for script in scripts)[1]
        words = said.rpartition(last)[2].strip()[-300:]
        raise Refused(f"{last} did not come to its end" + (f"; it said: {words}" if words else ""))
    own = {k: v for k, v in inside.items() if k not in OF_THE_SHELL}
    return dict(own, **{k: environ[k] for k in OF_THE_SHELL if k in environ})


def login_environs() -> Iterator[dict[str, str]]:
    """What the user has after logging in by hand: conda's set-up often sits behind .bashrc's interactive
    guard. First as the login shell sees it, then as bash does that is started in a terminal. An agent that
    one of them starts, as it would for the user, ends with it: to the next one it would be another."""
    path = os.environ.get("PATH", os.defpath)
    shell = os.environ.get("SHELL") or "/bin/sh"
    attempts = [[shell, "-ic" if shell.endswith("csh") else "-lic"]]
    bash = find_program("bash", path, "/")
    attempts += [[bash, "-ic"]] if bash else []
    for start in attempts:
        command = f"echo {SENTINEL.decode().strip()}; env -0"  # the same to every shell
        with leaving_nothing():
            environ, _ = shell_environ(start + [command], dict(os.environ, TERM="dumb"), LOGIN_S)
        if environ is not None:
            yield environ


def shell_environ(
    argv: list[str], environ: dict[str, str], seconds: float
) -> tuple[dict[str, str] | None, str]:
    """(environment, stderr) of a shell whose commands end with printing SENTINEL and `env -0`; None if they
    did not get there in time. Its output goes to memory, which nobody waits for: what it leaves in the
    background cannot keep us, and ends with the shell. What has a session of its own is for whoever asks:
    of the scripts that ranks are activated by, it ends with the run."""
    import subprocess

    with os.fdopen(os.memfd_create("out"), "rb") as out, os.fdopen(os.memfd_create("err"), "rb") as err:
        try:
            process = subprocess.Popen(
                argv, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            return None, f"{argv[0]}: {error.strerror}"
        try:
            deadline = time.monotonic() + seconds
            while not has_ended(process.pid) and time.monotonic() < deadline:
                time.sleep(0.005)
        finally:  # also if we are told to end meanwhile
            send(process.pid, signal.SIGKILL, group=True)
            process.wait()
        text, said = (os.pread(f.fileno(), os.fstat(f.fileno()).st_size, 0) for f in (out, err))
    _, found, after = text.rpartition(SENTINEL)
    pairs = after.decode("utf-8", "surrogateescape").split("\0")
    after_it = dict(pair.partition("=")[::2] for pair in pairs if "=" in pair)
    return after_it if found else None, said.decode(errors="replace")
