"""The environment of a run: hardware, software, the package's revision, compiler caches, and the
Python of the workers.

Nothing of a framework is imported: modules are looked for, not loaded. An engine may live in
another Python (`engine.python`). The host's agent starts that one as `python -P -m
steelyard.run.environment MODULE...`, which answers with one line of JSON: what it has.

Torch and Triton would share a cache folder under the temporary one, and load machine code from it,
no matter who wrote it. Workers get folders that only their user can write, and that last across
runs.
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

# What a container runtime leaves at the root of its file system.
CONTAINER_FILES = {
    ".dockerenv": "docker",
    "run/.containerenv": "podman",
    ".singularity.d": "apptainer",
}
# What it leaves in the names of control groups.
CONTAINER_GROUPS = {"kubepods": "kubernetes", "docker": "docker", "libpod": "podman", "lxc": "lxc"}

MOST_BYTES = 64 << 10  # of a file of the system that is read
PRELOADS = ("LD_AUDIT", "LD_PRELOAD")

PACKAGE = Path(__file__).resolve().parents[1]
# what runs: results and notes elsewhere in the tree change nothing
SOURCES = (".", ":(exclude,glob)**/__pycache__/**")

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
CACHE_HINT = "name a folder of yours in XDG_CACHE_HOME"

LOOK_S = 60.0  # a first import over a network file system takes its time
REFUSED = 65  # EX_DATAERR of sysexits.h: what is wrong is the last line of stderr, whole
INTERPRETER = ["-P", "-m", "steelyard.run.environment"]


def of_host(
    accelerator: Accelerator, found: list[Found], variables: Mapping[str, str]
) -> Environment:
    """All that is known of this host without a worker, which gets these variables. Versions of the
    accelerators' libraries are null: a worker reports them."""
    hardware, software = _hardware(accelerator, found), _software(found, variables)
    return Environment(hardware=hardware, software=software, source=SourceFacts(**source()))


def packages() -> dict[str, str]:
    """Versions of the installed packages that a result may depend on, none of them imported."""
    out = {}
    for name in sorted({*PACKAGES, *accelerators.names(lambda row: row.packages)}):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out


@cache
def package_hash(package: Path = PACKAGE) -> str:
    """Of all files of this package: hosts of a run must have the same."""
    found = hashlib.sha256()
    for path in sorted(
        path for path in package.rglob("*") if path.suffix in (".py", ".toml", ".json", ".html")
    ):
        found.update(f"{path.relative_to(package)}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def machine(root: Path = Path("/")) -> str | None:
    """The product name that the firmware gives."""
    return system_text(root / "sys/class/dmi/id/product_name") or None


def container(root: Path = Path("/")) -> str | None:
    """The container runtime around this process, as far as it shows."""
    for name, runtime in CONTAINER_FILES.items():
        if (root / name).exists():
            return runtime
    groups = system_text(root / "proc/self/cgroup")
    return next((runtime for mark, runtime in CONTAINER_GROUPS.items() if mark in groups), None)


def source(package: Path = PACKAGE) -> dict[str, Any]:
    """The version, and the git revision where the package lies in its own work tree, in src/ at its
    top. An installed copy has none, even inside somebody's repository."""
    top = files.git(package, "rev-parse", "--show-toplevel")
    revision = dirty = None
    if top is not None and Path(top) == package.resolve().parents[1]:
        revision = files.git(package, "rev-parse", "--verify", "HEAD")
        changes = files.git(
            package, "status", "--porcelain", "--untracked-files=all", "--", *SOURCES
        )
        dirty = None if revision is None or changes is None else changes != ""
    # for copies without a repository, container images say
    revision = revision or os.environ.get("STEELYARD_REVISION")
    return {"version": __version__, "revision": revision, "dirty": dirty}


def _hardware(accelerator: Accelerator, found: list[Found]) -> Hardware:
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
    """The datasheet row, where all devices share it."""
    rows = [accelerators.peak(accelerator, device) for device in found]
    if not rows or rows[0] is None or any(row != rows[0] for row in rows):
        return None
    kept = {"name", "flops_per_s", "bandwidth_bytes_per_s", "source", "note"}
    return PeakFacts(**rows[0].model_dump(mode="json", include=kept))


def _software(found: list[Found], variables: Mapping[str, str]) -> Software:
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
    """Libraries that stand before all others and can change what any function does, a clock's too:
    by name, not by place.
    """
    named = {name: re.split(r"[:\s]+", variables.get(name, "").strip()) for name in PRELOADS}
    return {
        name: ":".join(Path(one).name for one in every if one)
        for name, every in named.items()
        if any(every)
    }


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:  # not a Linux, or one without os-release
        return platform.platform()


def system_text(path: Path) -> str:
    """Return the text of a small file of the system, empty if it is absent or not ours to read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MOST_BYTES).strip()
    except OSError:
        return ""


def cache_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What workers are told of caches, each a folder that is made and checked here. One that is
    named already stays. Nothing, where a user has no place for any."""
    try:
        return {
            name: str(private_cache(environment, folder))
            for name, folder in CACHES.items()
            if not environment.get(name)
        }
    except OSError:
        return {}


def cache_variables_within(folder: Path) -> dict[str, str]:
    """The same in the private folder of a run, which ends with it."""
    return {name: str(folder / "cache" / place) for name, place in CACHES.items()}


def private_cache(environment: Mapping[str, str], name: str = "") -> Path:
    """A folder of this user's cache that nobody else can write."""
    home = Path(environment.get("XDG_CACHE_HOME") or "")
    home = home if home.is_absolute() else Path(environment.get("HOME") or Path.home()) / ".cache"
    top = home / "steelyard"
    for folder in (top, top / name):
        _make_private(folder)
    return top / name


def _make_private(folder: Path) -> None:
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
    """A Python that workers run in: its version, its packages, its steelyard, and which of the
    asked modules it lacks.
    """

    python: str
    packages: dict[str, str]
    version: str
    package: str
    lacking: list[str]


def this_interpreter(needs: Sequence[str]) -> Interpreter:
    """Return the Python that runs this."""
    return Interpreter(
        python=platform.python_version(),
        packages=packages(),
        version=__version__,
        package=package_hash(),
        lacking=lacking_modules(needs),
    )


def lacking_modules(needs: Sequence[str]) -> list[str]:
    """Return the modules that this Python does not have; raise RequestError if one is there but
    cannot be imported.
    """
    return [name for name in needs if not plugins.installed(name)]


def look_at_interpreter(
    path: str, needs: Sequence[str], variables: Mapping[str, str]
) -> Interpreter:
    """The Python at a path, if workers of an engine that needs these modules can run in it; else
    RequestError, one line.
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
    try:
        found = this_interpreter(sys.argv[1:])
    except RequestError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(REFUSED)
    os.write(1, found.model_dump_json().encode() + b"\n")


if __name__ == "__main__":
    main()
