"""Describe the environment of a run (hardware, software, this package's revision), and prepare
compiler caches and the Python of the workers.

Used by the node agent (run/host.py) for the record's environment. No framework is imported: modules
are looked for, not loaded. An engine may live in another Python (`engine.python`): the agent starts
that one as `python -P -m steelyard.run.environment MODULE...`, which prints an `InterpreterFacts`
as one line of JSON.

By default torch and Triton keep their caches in the shared temporary folder and load machine code
from there, no matter who wrote it. Workers get cache folders that only their user can write, and
that last across runs.
"""

import hashlib
import os
import platform
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from steelyard import __version__, accelerators, files, plugins
from steelyard.accelerators import variables as names
from steelyard.accelerators.cpu import model_name
from steelyard.accelerators.row import Accelerator, Found
from steelyard.errors import MORE_MEMORY, OUT_OF_MEMORY_LINE, RequestError
from steelyard.record.facts import (
    DeviceFacts,
    Environment,
    Hardware,
    PeakFacts,
    Software,
    SourceFacts,
)
from steelyard.schema import Frozen

PACKAGES = (
    "accelerate",
    "jinja2",
    "megatron-core",
    "numpy",
    "paddlepaddle",
    "paddlepaddle-gpu",
    "psutil",
    "pydantic",
    "rich",
    "safetensors",
    "sentencepiece",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "typer",
)

# Files that container runtimes create at the root of the file system, and the runtime.
CONTAINER_FILES = {
    ".dockerenv": "docker",
    "run/.containerenv": "podman",
    ".singularity.d": "apptainer",
}
# Parts of cgroup names that container runtimes use.
CONTAINER_GROUPS = {"kubepods": "kubernetes", "docker": "docker", "libpod": "podman", "lxc": "lxc"}

MOST_BYTES = 64 << 10  # most that is read of a system file
PRELOADS = ("LD_AUDIT", "LD_PRELOAD")

PACKAGE = Path(__file__).resolve().parents[1]
# paths that git checks for changes: only the package, not results and notes elsewhere
SOURCES = (".", ":(exclude,glob)**/__pycache__/**")

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
CACHE_HINT = "name a folder of yours in XDG_CACHE_HOME"

LOOK_S = 60.0  # a first import over a network file system is slow
REFUSED = 65  # EX_DATAERR of sysexits.h: the last line of stderr is the whole reason
INTERPRETER = ["-P", "-m", "steelyard.run.environment"]


def of_host(
    accelerator: Accelerator, found: list[Found], variables: Mapping[str, str]
) -> Environment:
    """Return the hardware, software and package revision of this host, as far as known without a
    worker.

    `devices` are the devices in use, `variables` the environment of the workers, of which the
    listed names are recorded. Versions of the accelerators' libraries are None: a worker reports
    them.
    """
    hardware, software = _hardware(accelerator, found), _software(found, variables)
    return Environment(hardware=hardware, software=software, source=SourceFacts(**source()))


def packages() -> dict[str, str]:
    """Return the versions of the installed packages that a result may depend on, by name; none of
    them is imported, and those not installed are left out.
    """
    out = {}
    for name in sorted({*PACKAGES, *accelerators.names(lambda row: row.packages)}):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out


@cache
def package_hash(package: Path = PACKAGE) -> str:
    """Return a hash of 16 hex digits over the .py, .toml, .json and .html files of a package
    folder, by default this package; cached. All hosts of a run must have the same.
    """
    found = hashlib.sha256()
    for path in sorted(
        path for path in package.rglob("*") if path.suffix in (".py", ".toml", ".json", ".html")
    ):
        found.update(f"{path.relative_to(package)}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def machine(root: Path = Path("/")) -> str | None:
    """Return the product name that the firmware gives for this machine, or None."""
    return system_text(root / "sys/class/dmi/id/product_name") or None


def container(root: Path = Path("/")) -> str | None:
    """Return the name of the container runtime around this process, such as `docker`, as far as
    files and cgroup names show it; else None.
    """
    for name, runtime in CONTAINER_FILES.items():
        if (root / name).exists():
            return runtime
    groups = system_text(root / "proc/self/cgroup")
    return next((runtime for mark, runtime in CONTAINER_GROUPS.items() if mark in groups), None)


def source(package: Path = PACKAGE) -> dict[str, Any]:
    """Return `version`, git `revision` and `dirty` of this package.

    The revision is known only where the package lies in src/ of its own git work tree, or from
    STEELYARD_REVISION; an installed copy has none, even inside another repository. `dirty` is None
    without a work tree.
    """
    top = files.git(package, "rev-parse", "--show-toplevel")
    revision = dirty = None
    if top is not None and Path(top) == package.resolve().parents[1]:
        revision = files.git(package, "rev-parse", "--verify", "HEAD")
        changes = files.git(
            package, "status", "--porcelain", "--untracked-files=all", "--", *SOURCES
        )
        dirty = None if revision is None or changes is None else changes != ""
    # container images set it, as they have no repository
    revision = revision or os.environ.get("STEELYARD_REVISION")
    return {"version": __version__, "revision": revision, "dirty": dirty}


def _hardware(accelerator: Accelerator, found: list[Found]) -> Hardware:
    """Return this host's hardware: machine, CPU, memory, the given devices and their datasheet
    peak.
    """
    return Hardware(
        machine=machine(),
        cpu=model_name(),
        cpu_cores=psutil.cpu_count(logical=False) or os.cpu_count(),
        memory_bytes=psutil.virtual_memory().total,
        accelerator=accelerator.name,
        devices=[DeviceFacts(name=d.name, uuid=d.uuid, memory_bytes=d.memory_bytes) for d in found],
        peak=_peak(accelerator, found),
    )


def _peak(accelerator: Accelerator, found: list[Found]) -> PeakFacts | None:
    """Return the datasheet row of the devices, or None if it is unknown or they do not all share
    one.
    """
    rows = [accelerators.peak(accelerator, device) for device in found]
    if not rows or rows[0] is None or any(row != rows[0] for row in rows):
        return None
    kept = {"name", "flops_per_s", "bandwidth_bytes_per_s", "source", "note"}
    return PeakFacts(**rows[0].model_dump(mode="json", include=kept))


def _software(found: list[Found], variables: Mapping[str, str]) -> Software:
    """Return this host's software: OS, driver, Python, package versions and those of the workers'
    `variables` that a record may state; library versions are None.
    """
    allowed = accelerators.names(lambda row: row.variables).union(names.TORCH)
    told = {name: value for name, value in sorted(variables.items()) if names.kept(name, allowed)}
    return Software(
        os=_os_name(),
        kernel=platform.release(),
        driver=found[0].driver if found else None,
        container=container(),
        python=platform.python_version(),
        packages=packages(),
        variables={**told, **_preloaded(variables)},
        **dict.fromkeys(sorted(accelerators.names(lambda row: row.libraries))),
    )


def _preloaded(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the libraries in LD_PRELOAD and LD_AUDIT, which can replace any function, a clock's
    too: file names joined by `:`, without their folders. Variables that are unset or empty are left
    out.
    """
    named = {name: re.split(r"[:\s]+", variables.get(name, "").strip()) for name in PRELOADS}
    return {
        name: ":".join(Path(one).name for one in every if one)
        for name, every in named.items()
        if any(every)
    }


def _os_name() -> str:
    """Return the name of the operating system from os-release, else the platform's name."""
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:  # not a Linux, or one without os-release
        return platform.platform()


def system_text(path: Path) -> str:
    """Return the stripped text of a small system file, at most `MAX_FILE_BYTES` of it; empty if it
    is absent or unreadable.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MOST_BYTES).strip()
    except OSError:
        return ""


def cache_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Create the user's private compiler cache folders and return the variables that name them, for
    the workers' environment.

    Variables that are already set in `environment` are left out. Returns an empty dict if no folder
    can be created; raises RequestError if a folder is not private to the user.
    """
    try:
        return {
            name: str(private_cache(environment, folder))
            for name, folder in CACHES.items()
            if not environment.get(name)
        }
    except OSError:
        return {}


def cache_variables_within(folder: Path) -> dict[str, str]:
    """Return the cache variables with paths inside the private folder of a run, which is removed at
    its end; no folder is created.
    """
    return {name: str(folder / "cache" / place) for name, place in CACHES.items()}


def private_cache(environment: Mapping[str, str], name: str = "") -> Path:
    """Create ~/.cache/steelyard (or below XDG_CACHE_HOME) and its subfolder `name` if missing, and
    return the subfolder.

    Raises RequestError if one of the two is a link, belongs to another user or can be written by
    others; OSError if it cannot be created.
    """
    home = Path(environment.get("XDG_CACHE_HOME") or "")
    home = home if home.is_absolute() else Path(environment.get("HOME") or Path.home()) / ".cache"
    top = home / "steelyard"
    for folder in (top, top / name):
        _make_private(folder)
    return top / name


def _make_private(folder: Path) -> None:
    """Create a folder with mode 0700 if it is missing; raise RequestError if it is a link, belongs
    to another user or can be written by others.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    wrong = {
        "is a link": stat.S_ISLNK(found.st_mode),
        f"belongs to user {found.st_uid}": found.st_uid != os.geteuid(),
        "is one that others can write": bool(found.st_mode & 0o022),
    }
    for what, holds in wrong.items():
        if holds:
            raise RequestError(
                f"the cache {str(folder)!r} {what}: other users could change what is in it; remove"
                f" it, or {CACHE_HINT}"
            )


class Interpreter(Frozen):
    """A Python in which workers run: its version, package versions, steelyard version and the hash
    of its files (`package`), and which of the needed modules it lacks.
    """

    python: str
    packages: dict[str, str]
    version: str
    package: str
    lacking: list[str]


def this_interpreter(needs: Sequence[str]) -> Interpreter:
    """Describe the Python that runs this function; `needs` are the names of modules to look for."""
    return Interpreter(
        python=platform.python_version(),
        packages=packages(),
        version=__version__,
        package=package_hash(),
        lacking=lacking_modules(needs),
    )


def lacking_modules(needs: Sequence[str]) -> list[str]:
    """Return those of the named modules that this Python does not have; raise RequestError if one
    is installed but the package around it fails to import.
    """
    return [name for name in needs if not plugins.installed(name)]


def look_at_interpreter(
    path: str, needs: Sequence[str], variables: Mapping[str, str]
) -> Interpreter:
    """Start the Python at `path` in a process and return its description, if workers that need
    these modules can run in it.

    `variables` is its environment. Raises RequestError with one line if it does not start, fails,
    does not answer within `INSPECT_S` seconds, has another steelyard, or lacks a module.
    """
    named = f"engine.python {path!r}"
    install = shlex.join([path, "-m", "pip", "install", f"steelyard=={__version__}"])
    try:
        done = subprocess.run(
            [path, *INTERPRETER, *needs],
            capture_output=True,
            text=True,
            timeout=LOOK_S,
            env=dict(variables),
            check=False,
        )
    except OSError as error:
        why = error.strerror or str(error)
        raise RequestError(
            f"{named} cannot be started: {why}; name a Python that has steelyard and the engine"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise RequestError(
            f"{named} does not answer within {LOOK_S:g} s; name another Python"
        ) from error
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        if done.returncode == REFUSED:
            raise RequestError(f"{named}: {why}")
        if OUT_OF_MEMORY_LINE.match(why):
            raise RequestError(f"{named} ran out of memory: {why}; {MORE_MEMORY}, then run again")
        raise RequestError(
            f"{named} ended with exit code {done.returncode}: {why}; steelyard is installed there"
            f" by: {install}"
        )
    try:
        found = Interpreter.model_validate_json(done.stdout)
    except ValidationError as error:
        raise RequestError(
            f"{named} has another steelyard; install this one there: {install}"
        ) from error
    _check_interpreter(found, named, install)
    return found


def _check_interpreter(found: Interpreter, named: str, install: str) -> None:
    """Raise RequestError if the other Python's steelyard differs from this one in version or files,
    or if it lacks a module; `label` and `install` are the name and the install command for the
    message.
    """
    if found.version != __version__:
        raise RequestError(
            f"{named} has steelyard {found.version}, here is {__version__}; install this version"
            f" there: {install}"
        )
    if found.package != package_hash():
        here = package_hash()
        raise RequestError(
            f"{named} has another steelyard {found.version} (files {found.package}, here {here});"
            " install this one there"
        )
    if found.lacking:
        raise RequestError(
            f"{named} has no {found.lacking[0]}, and the engine needs it; install it there"
        )


def main() -> None:
    """Print the description of this Python, which looks for the modules named in the arguments, as
    a line of JSON; on RequestError print its text to stderr and exit with code 65.
    """
    try:
        found = this_interpreter(sys.argv[1:])
    except RequestError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(REFUSED)
    os.write(1, found.model_dump_json().encode() + b"\n")


if __name__ == "__main__":
    main()
