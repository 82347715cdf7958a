"""Test what accelerators report for `steelyard spec`: precisions they lack, and memory capacity
that is not measured.
"""

from pathlib import Path

import psutil
import pytest
import torch

from steelyard.accelerators import cpu, cpu_torch, cuda_torch

HOST_BYTES = psutil.virtual_memory().total
CGROUP_LIMIT_TEXT = "not measured: limit of the control group"
HOST_MEMORY_TEXT = "not measured: memory of the host, which no control group limits further"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "1000\n"}, (1000, CGROUP_LIMIT_TEXT)),
        (
            "0::/a/b\n",
            {"a/b/memory.max": "max\n", "a/memory.max": "2000\n"},
            (2000, CGROUP_LIMIT_TEXT),
        ),
        ("0::/\n", {"memory.max": "3000\n"}, (3000, CGROUP_LIMIT_TEXT)),
        (
            "4:memory:/a\n0::/\n",
            {"memory/a/memory.limit_in_bytes": "4000\n"},
            (4000, CGROUP_LIMIT_TEXT),
        ),
        (
            "4:memory:/a\n",
            {"memory/a/memory.limit_in_bytes": str(2**63 - 4096)},
            (HOST_BYTES, HOST_MEMORY_TEXT),
        ),
        ("0::/a\n", {"a/memory.max": "max\n"}, (HOST_BYTES, HOST_MEMORY_TEXT)),
        ("nothing", {}, (HOST_BYTES, HOST_MEMORY_TEXT)),
    ],
)
def test_memory_capacity_of_a_cpu_is_the_limit_of_its_cgroup_or_host(
    groups: str, files: dict[str, str], expected, tmp_path: Path
):
    proc, cgroups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    assert cpu.read_memory_limit(proc, cgroups) == expected


def test_memory_capacity_of_a_cpu_is_not_measured():
    capacity_bytes, explanation = cpu_torch.CpuTorchDevice(0, lambda: 0.0).capacity()
    assert 0 < capacity_bytes <= HOST_BYTES
    assert explanation.startswith("not measured: ")


@pytest.mark.parametrize(
    ("capability", "lacking"),
    [
        ((7, 0), {"int8", "bf16", "tf32", "fp8"}),
        ((7, 5), {"bf16", "tf32", "fp8"}),
        ((8, 0), {"fp8"}),
        ((8, 9), set()),
        ((9, 0), set()),
    ],
)
def test_precisions_that_a_cuda_device_lacks_follow_its_capability(
    capability, lacking, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    device = cuda_torch.CudaTorchDevice.__new__(cuda_torch.CudaTorchDevice)
    device._index = 0
    assert set(device.lacks) == lacking
    assert device.capacity() is None
    if "fp8" in lacking:
        assert (
            device.lacks["fp8"]
            == f"compute capability {capability[0]}.{capability[1]}: fp8 needs 8.9"
        )
