"""Tests of what a record says about its machine, and of when it names a source revision."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest

from steelyard import __version__, accelerators
from steelyard.accelerators import CPU, CUDA, Accelerator, DetectedDevice
from steelyard.accelerators.cpu import read_model_name
from steelyard.run import environment

pytestmark = pytest.mark.process

H200 = DetectedDevice("NVIDIA H200", "GPU-1", 150754820096, 0, "570.86.15")
A100 = DetectedDevice("NVIDIA A100-SXM4-40GB", "GPU-2", 42949672960, 1, "570.86.15")


def describe_host_as_json(
    accelerator: Accelerator,
    devices: list[DetectedDevice],
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Describe a host with these devices as the JSON values of a record."""
    return environment.describe_host(accelerator, devices, variables or {}).model_dump(mode="json")


def test_environment_holds_hardware_software_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_PROTO", "LL")  # workers do not get it: not recorded
    variables = {
        "NCCL_ALGO": "Ring",
        "TORCH_HOME": "/somewhere",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": "/elsewhere",
    }
    facts = describe_host_as_json(CUDA, [H200, H200], variables)
    assert json.loads(json.dumps(facts)) == facts
    hardware, software = facts["hardware"], facts["software"]
    peak = hardware.pop("peak")
    assert hardware == {
        "machine": environment.read_product_name(),
        "cpu": read_model_name(),
        "cpu_cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerator": "cuda",
        "devices": [{"name": "NVIDIA H200", "uuid": "GPU-1", "memory_bytes": 150754820096}] * 2,
    }
    assert set(peak) == {"name", "flops_per_s", "bandwidth_bytes_per_s", "source", "note"}
    assert (peak["name"], peak["flops_per_s"]["bf16"]) == ("NVIDIA H200 SXM 141GB", 989.4e12)
    assert software == {
        "os": software["os"],
        "kernel": platform.release(),
        "driver": "570.86.15",
        "container": environment.detect_container(),
        "python": platform.python_version(),
        "packages": environment.list_package_versions(),
        "cuda": None,
        "cudnn": None,
        "variables": {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "1"},
    }
    assert set(facts) == {"hardware", "software", "source"}
    assert facts["source"]["version"] == __version__


def test_no_peak_for_unknown_or_mixed_devices() -> None:
    def peak_of(devices: list[DetectedDevice]) -> object:
        return describe_host_as_json(CUDA, devices)["hardware"]["peak"]

    assert peak_of(CPU.find()) is None
    assert peak_of([H200, A100]) is None
    assert peak_of([]) is None
    assert peak_of([A100]) is not None


def test_the_cpu_has_no_driver() -> None:
    facts = describe_host_as_json(CPU, CPU.find())
    assert facts["software"]["driver"] is None
    assert facts["hardware"]["devices"] == [
        {"name": read_model_name(), "uuid": None, "memory_bytes": psutil.virtual_memory().total}
    ]


def test_os_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        platform,
        "freedesktop_os_release",
        lambda: {"PRETTY_NAME": "Debian GNU/Linux 12 (bookworm)"},
    )
    assert describe_host_as_json(CPU, [])["software"]["os"] == "Debian GNU/Linux 12 (bookworm)"

    def absent() -> dict[str, str]:
        raise OSError

    monkeypatch.setattr(platform, "freedesktop_os_release", absent)
    assert describe_host_as_json(CPU, [])["software"]["os"] == platform.platform()


def test_packages_are_not_imported() -> None:
    code = """
import json, sys
from steelyard.run import environment
print(json.dumps([environment.list_package_versions(), list(sys.modules)]))
"""
    root = Path(accelerators.__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    versions, modules = json.loads(result.stdout)
    assert versions["pydantic"] == version("pydantic")
    assert versions["torch"] == version("torch")
    assert not {"torch", "transformers", "numpy", "tokenizers", "pynvml"} & set(modules)


def test_an_absent_package_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("psutil", "no-such-package-here"))
    monkeypatch.setattr(accelerators, "load_accelerators", dict)
    assert environment.list_package_versions() == {"psutil": version("psutil")}


def test_machine(tmp_path: Path) -> None:
    assert environment.read_product_name(tmp_path) is None
    dmi_folder = tmp_path / "sys/class/dmi/id"
    dmi_folder.mkdir(parents=True)
    (dmi_folder / "product_name").write_text("DGX H200\n")
    assert environment.read_product_name(tmp_path) == "DGX H200"
    (dmi_folder / "product_name").write_text("\n")
    assert environment.read_product_name(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (".dockerenv", "", "docker"),
        ("run/.containerenv", "", "podman"),
        (".singularity.d", "", "apptainer"),
        ("proc/self/cgroup", "0::/kubepods/besteffort/pod1/docker-2\n", "kubernetes"),
        ("proc/self/cgroup", "1:cpu:/docker/0123\n", "docker"),
        ("proc/self/cgroup", "0::/user.slice\n", None),
        ("other", "", None),
    ],
)
def test_container(tmp_path: Path, name: str, text: str, expected: str | None) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert environment.detect_container(tmp_path) == expected


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder without the GIT_ variables of the environment, and return its stripped
    output.
    """
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    variables = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    result = subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a git work tree with a committed package in src/."""
    package = tmp_path / "tree/src/steelyard"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(tmp_path / "tree", "init", "--quiet")
    git(tmp_path / "tree", "add", ".")
    git(tmp_path / "tree", "commit", "--quiet", "-m", "first")
    return tmp_path / "tree"


def test_revision_of_a_clean_and_a_changed_tree(tree: Path) -> None:
    package = tree / "src/steelyard"
    clean = {"version": __version__, "revision": git(tree, "rev-parse", "HEAD"), "dirty": False}
    assert environment.describe_source(package) == clean
    (tree / "results.json").write_text("{}")
    (package / "__pycache__").mkdir()
    (package / "__pycache__/a.pyc").write_text("")
    assert environment.describe_source(package) == clean
    (package / "new.py").write_text("")
    assert environment.describe_source(package) == {**clean, "dirty": True}
    (package / "new.py").unlink()
    (package / "__init__.py").write_text("changed = 1\n")
    assert environment.describe_source(package) == {**clean, "dirty": True}


def test_git_dir_of_the_environment_is_ignored(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert environment.describe_source(tree / "src/steelyard")["revision"] == git(
        tree, "rev-parse", "HEAD"
    )


UNKNOWN = {"version": __version__, "revision": None, "dirty": None}


def test_an_installed_copy_has_no_revision(tree: Path, tmp_path: Path) -> None:
    inside = tree / ".venv/lib/python3.11/site-packages/steelyard"
    outside = tmp_path / "site-packages/steelyard"
    for package in (inside, outside):
        package.mkdir(parents=True)
        assert environment.describe_source(package) == UNKNOWN


def test_a_tree_without_a_commit_has_no_revision(tmp_path: Path) -> None:
    package = tmp_path / "src/steelyard"
    package.mkdir(parents=True)
    git(tmp_path, "init", "--quiet")
    assert environment.describe_source(package) == UNKNOWN


def test_no_revision_without_git(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert environment.describe_source(tree / "src/steelyard") == UNKNOWN


def test_no_revision_when_git_times_out(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(command: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", time_out)
    assert environment.describe_source(tree / "src/steelyard") == UNKNOWN
