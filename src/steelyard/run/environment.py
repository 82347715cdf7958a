"""Describe the environment of a run (hardware, software, this package's revision), and prepare
compiler caches and the Python of the workers.

Used by the node agent (run/host.py) for the record's environment. No framework is imported: modules
are looked for, not loaded. An engine may live in another Python (`engine.python`): the agent starts
that one as `python -P -m steelyard.run.environment MODULE...`, which prints an `InterpreterFacts`
as one line of JSON. What an engine's workers can import is identified there too
(run/engine_identity.py).

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
from pydantic import TypeAdapter, ValidationError

from steelyard import __version__, accelerators, files, plugins
from steelyard.accelerators import environment_variables as names
from steelyard.accelerators.cpu import read_model_name
from steelyard.accelerators.peaks import Peak
from steelyard.accelerators.row import Accelerator, DetectedDevice
from steelyard.errors import MORE_MEMORY_HINT, OUT_OF_MEMORY_LINE, RequestError
from steelyard.record.run_facts import (
    DeviceFacts,
    Environment,
    Hardware,
    PeakFacts,
    Software,
    SourceFacts,
)
from steelyard.run.engine_identity import EngineIdentity
from steelyard.schema import FrozenModel

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

MAX_FILE_BYTES = 64 << 10  # most that is read of a system file
PRELOADS = ("LD_AUDIT", "LD_PRELOAD")

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
# paths that git checks for changes: only the package, not results and notes elsewhere
SOURCE_PATHS = (".", ":(exclude,glob)**/__pycache__/**")

CACHE_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
CACHE_HINT = "set XDG_CACHE_HOME to a folder of yours"

INSPECT_S = 60.0  # a first import over a network file system is slow
REFUSED = 65  # EX_DATAERR of sysexits.h: the last line of stderr is the whole reason
INSPECT_ARGUMENTS = ["-P", "-m", "steelyard.run.environment"]
IDENTIFY_ARGUMENTS = ["-P", "-m", "steelyard.run.engine_identity"]
IDENTIFY_S = 20.0  # it takes half a second of CPU time; a network file system is slow


def describe_host(
    accelerator: Accelerator, devices: list[DetectedDevice], variables: Mapping[str, str]
) -> Environment:
    """Return the hardware, software and package revision of this host, as far as known without a
    worker.

    `devices` are the devices in use, `variables` the environment of the workers, of which only
    names that may be recorded are stated. Versions of the accelerators' libraries are None: a
    worker reports them.
    """
    hardware, software = (
        _describe_hardware(accelerator, devices),
        _describe_software(devices, variables),
    )
    return Environment(
        hardware=hardware, software=software, source=SourceFacts(**describe_source())
    )


def list_package_versions() -> dict[str, str]:
    """Return the versions, by name and sorted by it, of the installed packages that a result may
    depend on (`PACKAGES` and those of the accelerators); none of them is imported, and those not
    installed are left out.
    """
    versions = {}
    for name in sorted({*PACKAGES, *accelerators.collect_names(lambda row: row.packages)}):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


@cache
def hash_package(package: Path = PACKAGE_FOLDER) -> str:
    """Return a hash of 16 hex digits over names and contents of the .py, .toml, .json and .html
    files of a package folder, by default this package; cached for the life of the process. All
    hosts of a run must have the same.
    """
    digest = hashlib.sha256()
    for path in sorted(
        path for path in package.rglob("*") if path.suffix in (".py", ".toml", ".json", ".html")
    ):
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def read_product_name(root: Path = Path("/")) -> str | None:
    """Return the product name that the firmware gives for this machine, or None."""
    return read_system_file(root / "sys/class/dmi/id/product_name") or None


def detect_container(root: Path = Path("/")) -> str | None:
    """Return the name of the container runtime around this process (docker, podman, apptainer,
    kubernetes or lxc), as far as files of the root folder or, if none is there, cgroup names show
    it; else None.
    """
    for name, runtime in CONTAINER_FILES.items():
        if (root / name).exists():
            return runtime
    groups = read_system_file(root / "proc/self/cgroup")
    return next((runtime for mark, runtime in CONTAINER_GROUPS.items() if mark in groups), None)


def describe_source(package: Path = PACKAGE_FOLDER) -> dict[str, Any]:
    """Return `version`, git `revision` (commit hash) and `dirty` (whether the package's files
    differ from it) of this package.

    The revision is known only where the package lies in src/ of its own git work tree, or from
    STEELYARD_REVISION; an installed copy has none, even inside another repository. `dirty` is None
    without a work tree. Runs git.
    """
    top = files.run_git(package, "rev-parse", "--show-toplevel")
    revision = dirty = None
    if top is not None and Path(top) == package.resolve().parents[1]:
        revision = files.run_git(package, "rev-parse", "--verify", "HEAD")
        changes = files.run_git(
            package, "status", "--porcelain", "--untracked-files=all", "--", *SOURCE_PATHS
        )
        dirty = None if revision is None or changes is None else changes != ""
    # container images set it, as they have no repository
    revision = revision or os.environ.get("STEELYARD_REVISION")
    return {"version": __version__, "revision": revision, "dirty": dirty}


def _describe_hardware(accelerator: Accelerator, devices: list[DetectedDevice]) -> Hardware:
    """Return this host's hardware for the record: machine, CPU model, physical cores (else logical
    ones), memory in bytes, the given devices, and their datasheet peak (None: unknown, or not the
    same for all).
    """
    return Hardware(
        machine=read_product_name(),
        cpu=read_model_name(),
        cpu_cores=psutil.cpu_count(logical=False) or os.cpu_count(),
        memory_bytes=psutil.virtual_memory().total,
        accelerator=accelerator.name,
        devices=[
            DeviceFacts(name=d.name, uuid=d.uuid, memory_bytes=d.memory_bytes) for d in devices
        ],
        peak=_make_peak_facts(_find_shared_peak(accelerator, devices)),
    )


def _find_shared_peak(accelerator: Accelerator, devices: list[DetectedDevice]) -> Peak | None:
    """Return the datasheet row of the devices (peak FLOP/s and bandwidth), or None if there are no
    devices, their row is unknown, or they do not all have the same.
    """
    rows = [accelerators.find_peak(accelerator, device) for device in devices]
    return rows[0] if rows and all(row == rows[0] for row in rows) else None


def _make_peak_facts(peak: Peak | None) -> PeakFacts | None:
    """Return what a record states of a datasheet row; None for None."""
    recorded = {"name", "flops_per_s", "bandwidth_bytes_per_s", "source", "note"}
    return None if peak is None else PeakFacts(**peak.model_dump(mode="json", include=recorded))


def find_host_providers(accelerator: Accelerator, devices: list[DetectedDevice]) -> dict[str, str]:
    """Return the package that brings the row of this host's accelerator as `accelerator`, and if
    the devices' datasheet peak is one of that row's, and not of peaks.toml, the same as `peak`;
    empty if the row is this package's own.
    """
    provider = plugins.find_provider(accelerators.ENTRY_POINT_GROUP, accelerator.name)
    if provider is None:
        return {}
    peak = _find_shared_peak(accelerator, devices)
    parts = ("accelerator", "peak") if peak in accelerator.peaks else ("accelerator",)
    return dict.fromkeys(parts, str(provider))


def _describe_software(devices: list[DetectedDevice], variables: Mapping[str, str]) -> Software:
    """Return this host's software for the record: OS, kernel, driver of the first device,
    container, Python, package versions, and those of the workers' `variables` that a record may
    state, with the names of preloaded libraries. Versions of the accelerators' libraries are None.
    """
    allowed = accelerators.collect_names(lambda row: row.variables).union(names.TORCH_VARIABLES)
    recorded = {
        name: value for name, value in sorted(variables.items()) if names.is_recorded(name, allowed)
    }
    return Software(
        os=_read_os_name(),
        kernel=platform.release(),
        driver=devices[0].driver if devices else None,
        container=detect_container(),
        python=platform.python_version(),
        packages=list_package_versions(),
        variables={**recorded, **_list_preloads(variables)},
        **dict.fromkeys(sorted(accelerators.collect_names(lambda row: row.libraries))),
    )


def _list_preloads(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the libraries in LD_PRELOAD and LD_AUDIT, which can replace any function, a clock's
    too: file names joined by `:`, without their folders. Variables that are unset or empty are left
    out.
    """
    libraries_by_name = {
        name: re.split(r"[:\s]+", variables.get(name, "").strip()) for name in PRELOADS
    }
    return {
        name: ":".join(Path(library).name for library in libraries if library)
        for name, libraries in libraries_by_name.items()
        if any(libraries)
    }


def _read_os_name() -> str:
    """Return the name of the operating system from os-release, else the platform's name."""
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:  # not a Linux, or one without os-release
        return platform.platform()


def read_system_file(path: Path) -> str:
    """Return the stripped text of a small system file, at most `MAX_FILE_BYTES` of it; empty if it
    is absent or unreadable.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_FILE_BYTES).strip()
    except OSError:
        return ""


def make_cache_folders(environment: Mapping[str, str]) -> dict[str, str]:
    """Create the user's private compiler cache folders (torch inductor, Triton) and return the
    variables that name them, for the workers' environment.

    Variables that are already set in `environment` are left out. Returns an empty dict if a folder
    cannot be created; raises RequestError if a folder is a link, another user's or writable by
    others.
    """
    try:
        return {
            name: str(make_private_cache(environment, folder))
            for name, folder in CACHE_FOLDERS.items()
            if not environment.get(name)
        }
    except OSError:
        return {}


def name_run_cache_folders(folder: Path) -> dict[str, str]:
    """Return the cache variables with paths inside the private folder of a run, which is removed at
    its end; no folder is created.
    """
    return {name: str(folder / "cache" / subfolder) for name, subfolder in CACHE_FOLDERS.items()}


def make_private_cache(environment: Mapping[str, str], name: str = "") -> Path:
    """Create ~/.cache/steelyard (or below an absolute XDG_CACHE_HOME) and its subfolder `name` if
    missing, and return the subfolder, for `name` "" the folder itself. `environment` is where HOME
    and XDG_CACHE_HOME are looked up.

    Raises RequestError if one of the two is a link, belongs to another user or can be written by
    others; OSError if it cannot be created.
    """
    home = Path(environment.get("XDG_CACHE_HOME") or "")
    home = home if home.is_absolute() else Path(environment.get("HOME") or Path.home()) / ".cache"
    top = home / "steelyard"
    for folder in (top, top / name):
        _make_private_folder(folder)
    return top / name


def _make_private_folder(folder: Path) -> None:
    """Create a folder with mode 0700, and its parents, if it is missing; raise RequestError if it
    is a link, belongs to another user or can be written by group or others, OSError if it cannot be
    created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    problems = {
        "is a link": stat.S_ISLNK(status.st_mode),
        f"belongs to user {status.st_uid}": status.st_uid != os.geteuid(),
        "can be written by other users": bool(status.st_mode & 0o022),
    }
    for problem, holds in problems.items():
        if holds:
            raise RequestError(
                f"the cache {str(folder)!r} {problem}: other users could change what is in it;"
                " remove"
                f" it, or {CACHE_HINT}"
            )


class InterpreterFacts(FrozenModel):
    """A Python in which workers run: its version (`python`), package versions by name (`packages`),
    the `version` of its steelyard and the hash of its files (`package`), and which of the needed
    modules it lacks (`lacking`). `main` prints it as JSON in that Python, `inspect_interpreter`
    reads it.
    """

    python: str
    packages: dict[str, str]
    version: str
    package: str
    lacking: list[str]


def describe_this_interpreter(needs: Sequence[str]) -> InterpreterFacts:
    """Return the facts of the Python that runs this function; `needs` are the names of modules to
    look for. Raises RequestError if a package around one fails to import.
    """
    return InterpreterFacts(
        python=platform.python_version(),
        packages=list_package_versions(),
        version=__version__,
        package=hash_package(),
        lacking=find_missing_modules(needs),
    )


def find_missing_modules(needs: Sequence[str]) -> list[str]:
    """Return those of the named modules that this Python does not have; raise RequestError if one
    is installed but the package around it fails to import.
    """
    return [name for name in needs if not plugins.is_installed(name)]


def inspect_interpreter(
    path: str, needs: Sequence[str], variables: Mapping[str, str]
) -> InterpreterFacts:
    """Start the Python at `path` in a process and return its facts, if workers that need these
    modules can run in it.

    `variables` is its whole environment. Raises RequestError with one line if it cannot be started,
    fails or runs out of memory, does not answer within `INSPECT_S` seconds, has another steelyard
    (version or files), or lacks a module.
    """
    label = f"engine.python {path!r}"
    install = shlex.join([path, "-m", "pip", "install", f"steelyard=={__version__}"])
    try:
        completed = subprocess.run(
            [path, *INSPECT_ARGUMENTS, *needs],
            capture_output=True,
            text=True,
            timeout=INSPECT_S,
            env=dict(variables),
            check=False,
        )
    except OSError as error:
        why = error.strerror or str(error)
        raise RequestError(
            f"{label} cannot be started: {why}; name a Python that has steelyard and the engine"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise RequestError(
            f"{label} does not answer within {INSPECT_S:g} s; name another Python"
        ) from error
    if completed.returncode:
        why = (completed.stderr.strip().splitlines() or ["no output"])[-1]
        if completed.returncode == REFUSED:
            raise RequestError(f"{label}: {why}")
        if OUT_OF_MEMORY_LINE.match(why):
            raise RequestError(
                f"{label} ran out of memory: {why}; {MORE_MEMORY_HINT}, then run again"
            )
        raise RequestError(
            f"{label} ended with exit code {completed.returncode}: {why}; install steelyard there:"
            f" {install}"
        )
    try:
        interpreter = InterpreterFacts.model_validate_json(completed.stdout)
    except ValidationError as error:
        raise RequestError(
            f"{label} has another steelyard; install this one there: {install}"
        ) from error
    _check_interpreter(interpreter, label, install)
    return interpreter


def _check_interpreter(interpreter: InterpreterFacts, label: str, install: str) -> None:
    """Raise RequestError if the other Python's steelyard differs from this one in version or files,
    or if it lacks a needed module. For the message, `label` names that Python, and `install` is the
    command that installs steelyard there.
    """
    if interpreter.version != __version__:
        raise RequestError(
            f"{label} has steelyard {interpreter.version}, here is {__version__}; install this"
            " version"
            f" there: {install}"
        )
    if interpreter.package != hash_package():
        own_hash = hash_package()
        raise RequestError(
            f"{label} has another steelyard {interpreter.version} (files {interpreter.package},"
            f" here {own_hash});"
            " install this one there"
        )
    if interpreter.lacking:
        raise RequestError(
            f"{label} has no {interpreter.lacking[0]}, and the engine needs it; install it there"
        )


def identify_engine(
    path: str, modules: Sequence[str], variables: Mapping[str, str]
) -> EngineIdentity:
    """Start the Python at `path` in a process and return the identity of the engine that these
    modules implement there. `variables` is its whole environment, that of the workers.

    Nothing is raised: if it cannot be started, fails, or takes longer than `IDENTIFY_S` seconds,
    the hash is None and `problem` says so.
    """
    try:
        completed = subprocess.run(
            [path, *IDENTIFY_ARGUMENTS, *modules],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=IDENTIFY_S,
            env=dict(variables),
            check=False,
        )
    except OSError as error:
        return EngineIdentity(problem=f"{path!r} cannot be started: {error.strerror or error}")
    except subprocess.TimeoutExpired:
        return EngineIdentity(problem=f"reading the files took more than {IDENTIFY_S:g} s")
    # code that Python runs as it starts may print before
    answer, errors = (
        (text.decode("utf-8", "replace").strip().splitlines() or ["no output"])[-1]
        for text in (completed.stdout, completed.stderr)
    )
    if completed.returncode:
        return EngineIdentity(
            problem=f"reading the files ended with exit code {completed.returncode}: {errors}"
        )
    try:
        return TypeAdapter(EngineIdentity).validate_json(answer)
    except ValidationError:
        return EngineIdentity(problem=f"{path!r} gave no answer")


def main() -> None:
    """Print the facts of this Python as a line of JSON on stdout, after looking for the modules
    named in the arguments; on RequestError print its text to stderr and exit with code `REFUSED`
    (65).
    """
    try:
        interpreter = describe_this_interpreter(sys.argv[1:])
    except RequestError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(REFUSED)
    os.write(1, interpreter.model_dump_json().encode() + b"\n")


if __name__ == "__main__":
    main()
