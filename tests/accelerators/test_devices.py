"""Test both sides of the built-in accelerators: what the parent reads of a device, and the device
class that torch engines use.
"""

import platform
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from fixtures.nvml import FIND_DEVICES, build_fake_nvml, run_python
from steelyard.accelerators import cpu, cpu_torch, nvml
from steelyard.accelerators.events import HostEvent
from steelyard.accelerators.row import TelemetrySource
from steelyard.engines.torch.framework import TorchFramework
from steelyard.errors import RequestError
from steelyard.kernels import jit
from steelyard.run.clock import now

READ_PROGRAM = """
import json
from steelyard.accelerators import nvml
found = nvml.make_sources(nvml.find_nvidia_devices(None))
print(json.dumps([[source.device, source.read_all(()), *(source.read(()) for _ in range(10))] for source in found]))
"""  # noqa: E501
FIRST_READING = {
    "memory_bytes": 1000,
    "sm_clock_mhz": 1980,
    "memory_clock_mhz": 3201,
    "power_w": 650.5,
    "energy_j": 5000.0,
    "temperature_c": 61,
    "reasons": ["sw_power_cap"],
    "processes": 2,
}
SECOND_READING = {
    "memory_bytes": 2000,
    "sm_clock_mhz": 1200,
    "memory_clock_mhz": 2619,
    "power_w": 300.25,
    "energy_j": None,
    "temperature_c": 85,
    "reasons": ["hw_slowdown", "hw_power_brake_slowdown"],
    "processes": 2,
}


@pytest.mark.process
def test_devices_are_read_with_energy_every_tenth_time(fake: str) -> None:
    readings = run_python(READ_PROGRAM, LD_LIBRARY_PATH=fake, FAKE_NVML_PROCESSES="2")
    without_energy = [{**FIRST_READING, "energy_j": None}] * 9
    assert readings == [
        ["cuda:0", FIRST_READING, *without_energy, {**FIRST_READING, "energy_j": 5000.5}],
        ["cuda:1", *[SECOND_READING] * 11],
    ]


@pytest.mark.process
def test_readings_of_an_old_driver(tmp_path: Path) -> None:
    (_, first_reading, *_), (_, second_reading, *_) = run_python(
        READ_PROGRAM, LD_LIBRARY_PATH=build_fake_nvml(tmp_path / "old", "-DOLD_DRIVER")
    )
    assert first_reading == {
        **FIRST_READING,
        "memory_bytes": 1512,
        "temperature_c": 62,
        "reasons": ["gpu_idle", "sw_power_cap"],
        "processes": 0,
    }
    assert second_reading["reasons"] == ["gpu_idle", "hw_slowdown", "hw_power_brake_slowdown"]


@pytest.mark.process
def test_readings_that_a_driver_lacks_are_none(tmp_path: Path) -> None:
    folder = build_fake_nvml(tmp_path / "bare", "-DBARE")
    assert run_python(READ_PROGRAM, LD_LIBRARY_PATH=folder) == [
        ["cuda:0", *[dict.fromkeys(FIRST_READING)] * 11],
        ["cuda:1", *[dict.fromkeys(FIRST_READING)] * 11],
    ]
    _, devices = run_python(FIND_DEVICES, LD_LIBRARY_PATH=folder)
    assert [device["memory_bytes"] for device in devices] == [None, None]


@pytest.mark.process
def test_the_sampler_records_every_cuda_device(fake: str) -> None:
    code = """
import json, os
from steelyard.accelerators import CUDA
from steelyard.run.clock import now
from steelyard.run.telemetry import DeviceReadings, TelemetrySampler
sampler = TelemetrySampler(CUDA.sources(CUDA.find()), now())
os.environ["FAKE_NVML_PROCESSES"] = "3"
sampler.start()
os.environ["FAKE_NVML_PROCESSES"] = "4"
sampler.stop()
period_s, rows = sampler.take_new_rows()
kept = [DeviceReadings("here", source.device, dict(CUDA.severity)) for source in sampler.sources]
for one, columns in zip(kept, rows):
    one.add(period_s, columns)
print(json.dumps([one.to_series().model_dump(mode="json") for one in kept]))
"""
    series = run_python(code, LD_LIBRARY_PATH=fake, CUDA_VISIBLE_DEVICES="1,0")
    assert [
        (device_series["device"], device_series["baseline_processes"]) for device_series in series
    ] == [("cuda:0", 3), ("cuda:1", 3)]
    assert [device_series["columns"]["sm_clock_mhz"][0] for device_series in series] == [1200, 1980]
    assert [device_series["columns"]["processes"][-1] for device_series in series] == [4, 4]
    energy = [
        device_series
        for device_series in series[1]["columns"]["energy_j"]
        if device_series is not None
    ]
    assert energy[0] == 5000.0  # energy is always read at the start and the end
    assert energy[-1] == series[1]["columns"]["energy_j"][-1] > energy[0]


def test_slowdown_reasons_have_names_and_severities() -> None:
    assert nvml.list_reason_names(0) == []
    assert nvml.list_reason_names(0x1FF) == [reason.name for reason in nvml.CLOCK_REASONS[:9]]
    assert nvml.list_reason_names(0x1004) == ["sw_power_cap", "unknown_0x1000"]
    assert "unknown_0x1000" not in nvml.SEVERITY
    by_severity = {
        severity: [
            clock_reason.name
            for clock_reason in nvml.CLOCK_REASONS[:9]
            if nvml.SEVERITY[clock_reason.name] == severity
        ]
        for severity in ("note", "nothing")
    }
    assert by_severity == {
        "note": ["sw_power_cap"],
        "nothing": ["gpu_idle", "applications_clocks", "sync_boost", "display_clock"],
    }
    slowdown_names = [
        "hw_slowdown",
        "sw_thermal_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
    ]
    assert [nvml.SEVERITY[name] for name in slowdown_names] == ["invalidates"] * 4


def test_reason_bits_equal_those_of_pynvml() -> None:
    import pynvml

    official = {
        "applications_clocks": "ApplicationsClocksSetting",
        "display_clock": "DisplayClockSetting",
    }
    for reason in nvml.CLOCK_REASONS[:9]:
        suffix = official.get(reason.name, reason.name.title().replace("_", ""))
        assert reason.bit == getattr(pynvml, f"nvmlClocksEventReason{suffix}")


def test_the_cpu_model_name_is_read_from_cpuinfo(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nmodel\t\t: 85\nmodel name\t: Xeon: the first \nmodel name\t: Xeon, the"
        " second\n"
    )
    assert cpu.read_model_name(cpuinfo) == "Xeon: the first"
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert cpu.read_model_name(cpuinfo) == platform.machine()
    assert cpu.read_model_name(tmp_path / "absent") == platform.machine()


def test_resident_bytes_are_summed_over_a_process_tree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Process 1 has two threads, one of which started process 2, which started process 3, which has
    ended.
    """
    children_by_task = {"1/task/1": "", "1/task/9": "2 ", "2/task/2": "3 ", "5/task/5": ""}
    for task, children in children_by_task.items():
        (tmp_path / task).mkdir(parents=True)
        (tmp_path / task / "children").write_text(children)
    for pid, pages in {1: 300, 2: 20, 5: 7}.items():
        (tmp_path / str(pid) / "statm").write_text(f"9999 {pages} 5 1 0 60 0\n")
    monkeypatch.setattr(cpu, "PROC", tmp_path)
    monkeypatch.setattr(cpu, "PAGE_BYTES", 1)
    monkeypatch.setattr(cpu, "SEARCH_EVERY", 2)
    source: TelemetrySource = cpu.make_cpu_source()
    assert source.device == "cpu"
    assert source.read((1,)) == {"memory_bytes": 320}
    assert source.read((1, 5)) == {"memory_bytes": 327}
    assert source.read((5,)) == {"memory_bytes": 7}
    (tmp_path / "5/task/5/children").write_text("1")
    assert source.read((5,)) == {"memory_bytes": 7}
    assert source.read((5,)) == {"memory_bytes": 327}
    assert source.read((4,)) == {"memory_bytes": None}
    assert cpu.make_cpu_source().read(()) == {"memory_bytes": None}


def test_the_torch_device_of_a_cpu() -> None:

    device = cpu_torch.CpuTorchDevice(3, now)
    total = psutil.virtual_memory().total
    assert (device.backend, device.matmul_shape, device.torch_device) == (
        "gloo",
        1024,
        torch.device("cpu"),
    )
    assert isinstance(device.event(), HostEvent)
    device.synchronize()
    device.reset_memory()
    memory = device.memory()
    assert (memory["allocated_bytes"], memory["reserved_bytes"]) == (None, None)
    assert 0 < memory["in_use_bytes"] < total
    assert device.identity() == {
        "name": cpu.read_model_name(),
        "uuid": None,
        "memory_bytes": total,
        "capability": None,
        "multiprocessors": None,
    }
    assert device.versions() == {"cuda": None, "cudnn": None, "nccl": None}
    assert device.attention("bf16", True) == "rows"
    for precision in ("fp32", "fp16", "bf16"):
        device.set_precision(precision)
    with pytest.raises(
        RequestError,
        match="a CPU has no precision 'tf32'; use --precision with one of: fp32, fp16, bf16",
    ):
        device.set_precision("tf32")


class FakeEvent:
    """A CUDA event whose times come from `clock_ms`."""

    clock_ms = iter((1000.0, 1250.0))

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms = next(self.clock_ms)

    def elapsed_time(self, later: "FakeEvent") -> float:
        return later.at_ms - self.at_ms


def test_the_torch_device_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:

    from steelyard.accelerators import cuda_torch

    calls: list[tuple[str, int]] = []
    for name in ("set_device", "synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda index, name=name: calls.append((name, index)))
    properties = SimpleNamespace(
        name="NVIDIA H200",
        uuid="aaaa0000",
        total_memory=10,
        major=9,
        minor=0,
        multi_processor_count=132,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", {2: properties}.get)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {2: 7}.get)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", {2: 8}.get)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    device = cuda_torch.CudaTorchDevice(2, now)
    device.synchronize()
    device.reset_memory()
    assert calls == [("set_device", 2), ("synchronize", 2), ("reset_peak_memory_stats", 2)]
    assert (device.backend, device.matmul_shape, device.torch_device) == (
        "nccl",
        8192,
        torch.device("cuda", 2),
    )
    assert device.event().elapsed_s(device.event()) == 0.25
    assert device.memory() == {"allocated_bytes": 7, "reserved_bytes": 8}
    assert device.identity() == {
        "name": "NVIDIA H200",
        "uuid": "GPU-aaaa0000",
        "memory_bytes": 10,
        "capability": "9.0",
        "multiprocessors": 132,
    }
    assert [device.attention(name, False) for name in ("fp16", "bf16", "fp32")] == [
        "flash",
        "flash",
        "efficient",
    ]
    FakeEvent.clock_ms = iter((0.0,))
    with pytest.raises(TypeError, match="different clocks"):
        device.event().elapsed_s(HostEvent(now))


def test_versions_of_cuda_cudnn_and_nccl(monkeypatch: pytest.MonkeyPatch) -> None:

    from steelyard.accelerators import cuda_torch

    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr("torch.backends.cudnn.m.version", lambda: 91002)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    assert cuda_torch.CudaTorchDevice(0, now).versions() == {
        "cuda": "12.8",
        "cudnn": "9.10.2",
        "nccl": "2.27.5",
    }
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert cuda_torch.CudaTorchDevice(0, now).versions()["nccl"] is None
    assert cuda_torch.format_cudnn_version(None) is None


@pytest.mark.process
def test_tf32_is_enabled_only_for_precision_tf32() -> None:
    """All settings that torch or its compiler reads agree, and setting them raises no error or
    warning.
    """
    code = """
import json, warnings
import torch
from steelyard.accelerators import cuda_torch
warnings.simplefilter("error")
torch.cuda.set_device = lambda index: None
device = cuda_torch.CudaTorchDevice(0, lambda: 0.0)
out = []
for precision in ("fp32", "tf32", "bf16", "tf32", "fp16"):
    device.set_precision(precision)
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    newer = matmul.fp32_precision == "tf32", cudnn.conv.fp32_precision == "tf32"
    out.append([matmul.allow_tf32, cudnn.allow_tf32, *newer, torch.get_float32_matmul_precision() == "high"])
print(json.dumps(out))
"""  # noqa: E501
    assert run_python(code) == [[False] * 5, [True] * 5, [False] * 5, [True] * 5, [False] * 5]


class WithTriton(cpu_torch.CpuTorchDevice):
    """A device class of another backend that declares that Triton runs on it."""

    triton = True

    @property
    def torch_device(self) -> torch.device:
        return torch.device("xpu")


class WithoutTriton(WithTriton):
    """The same device class, declaring that Triton does not run on it."""

    triton = False


@pytest.mark.parametrize(
    ("device", "runs"),
    [(WithTriton, True), (WithoutTriton, False), (cpu_torch.CpuTorchDevice, False)],
)
def test_a_device_class_declares_whether_triton_runs(
    device: type, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "TRITON_INSTALLED", True)
    monkeypatch.setattr(jit, "_device_types_without_triton", ["cpu"])
    framework = TorchFramework(f"{device.__module__}:{device.__name__}", 0, now)
    assert jit.has_triton(framework.device.torch_device) is runs
