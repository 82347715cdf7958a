"""The environment of a run: hardware, software, this package's revision and whether it was changed. Without torch."""

import hashlib
import os
import platform
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from steelyard import __version__, accelerators, files
from steelyard.accelerators import variables as names
from steelyard.accelerators.cpu import model_name
from steelyard.accelerators.row import Accelerator, Found
from steelyard.record.facts import DeviceFacts, Environment, Hardware, PeakFacts, Software, SourceFacts

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

PRELOADS = ("LD_AUDIT", "LD_PRELOAD")

PACKAGE = Path(__file__).resolve().parents[1]
SOURCES = (".", ":(exclude,glob)**/__pycache__/**")  # what runs: results and notes elsewhere in the tree change nothing


def of_host(accelerator: Accelerator, found: list[Found], variables: Mapping[str, str]) -> Environment:
    """All that is known of this host without a worker, which gets these variables. Versions of the accelerators'
    libraries are null: a worker reports them."""
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
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".toml", ".json", ".html")):
        found.update(f"{path.relative_to(package)}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def machine(root: Path = Path("/")) -> str | None:
    """The product name that the firmware gives."""
    return _text(root / "sys/class/dmi/id/product_name") or None


def container(root: Path = Path("/")) -> str | None:
    """The container runtime around this process, as far as it shows."""
    for name, runtime in CONTAINER_FILES.items():
        if (root / name).exists():
            return runtime
    groups = _text(root / "proc/self/cgroup")
    return next((runtime for mark, runtime in CONTAINER_GROUPS.items() if mark in groups), None)


def source(package: Path = PACKAGE) -> dict[str, Any]:
    """The version, and the git revision where the package lies in its own work tree, in src/ at its top. An installed
    copy has none, even inside somebody's repository."""
    top = files.git(package, "rev-parse", "--show-toplevel")
    revision = None
    dirty = None
    if top is not None and Path(top) == package.resolve().parents[1]:
        revision = files.git(package, "rev-parse", "--verify", "HEAD")
        changes = files.git(package, "status", "--porcelain", "--untracked-files=all", "--", *SOURCES)
        dirty = None if revision is None or changes is None else changes != ""
    revision = revision or os.environ.get("STEELYARD_REVISION")  # for copies without a repository, container images say
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
    """Libraries that stand before all others and can change what any function does, a clock's too: by name, not by place."""
    named = {name: re.split(r"[:\s]+", variables.get(name, "").strip()) for name in PRELOADS}
    return {name: ":".join(Path(one).name for one in every if one) for name, every in named.items() if any(every)}


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:  # not a Linux, or one without os-release
        return platform.platform()


def _text(path: Path) -> str:
    """A small file of the system, empty where it is absent or not ours to read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
