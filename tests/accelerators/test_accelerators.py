"""Test the accelerator table: devices that NVML reports, CUDA_VISIBLE_DEVICES, and third-party
accelerators.
"""

from importlib.metadata import EntryPoint

import pytest

from fixtures.golden import golden
from fixtures.nvml import FIND_DEVICES, run_python
from steelyard import accelerators, plugins
from steelyard.accelerators import Accelerator, DetectedDevice, nvml
from steelyard.errors import RequestError

A = DetectedDevice(
    "NVIDIA H200", "GPU-aaaa0000-0000-0000-0000-000000000000", 150754820096, 0, "570.86.15"
)
B = DetectedDevice(
    "NVIDIA H200", "GPU-aabb1111-0000-0000-0000-000000000000", 150754820096, 1, "570.86.15"
)


@pytest.mark.process
def test_importing_accelerators_imports_no_framework() -> None:
    code = "import sys, json, steelyard.accelerators; print(json.dumps(list(sys.modules)))"
    assert not {"torch", "transformers", "pynvml", "numpy"} & set(run_python(code))


@pytest.mark.process
def test_sampling_in_the_parent_does_not_import_torch() -> None:
    code = """
import json, os, sys
from steelyard import accelerators
from steelyard.run.clock import now
from steelyard.run.telemetry import TelemetrySampler
sampler = TelemetrySampler(accelerators.CPU.sources(accelerators.CPU.find()), now())
sampler.start()
sampler.stop()
print(json.dumps("torch" in sys.modules))
"""
    assert run_python(code) is False


@pytest.mark.process
def test_devices_come_from_nvml(fake: str) -> None:
    name, devices = run_python(FIND_DEVICES, LD_LIBRARY_PATH=fake)
    assert name == "cuda"
    assert [DetectedDevice(**device) for device in devices] == [A, B]


DRIVER_NOT_LOADED = {"FAKE_NVML_INIT": "9"}


@pytest.mark.process
@pytest.mark.parametrize(
    "setting", [*({"CUDA_VISIBLE_DEVICES": value} for value in ("", "-1", " ")), DRIVER_NOT_LOADED]
)
def test_no_visible_device_or_driver_means_cpu(fake: str, setting: dict[str, str]) -> None:
    assert run_python(FIND_DEVICES, LD_LIBRARY_PATH=fake, **setting) == ["cpu", []]


@pytest.mark.process
def test_a_missing_nvml_library_means_cpu() -> None:
    missing = """
import pynvml
def missing(name): raise OSError(name)
pynvml.CDLL = missing
"""
    assert run_python(missing + FIND_DEVICES) == ["cpu", []]


@pytest.mark.process
def test_a_broken_driver_is_an_error(fake: str) -> None:
    version_mismatch = "18"
    assert run_python(FIND_DEVICES, LD_LIBRARY_PATH=fake, FAKE_NVML_INIT=version_mismatch) == (
        golden("nvml-rm-has-detected-an-nvml")
    )


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [A, B]),
        ("1,0", [B, A]),
        ("1", [B]),
        (" 0 , 1 ", [A, B]),
        ("0,7,1", [A]),
        ("7", []),
        ("0,-1,1", [A]),
        ("0,0", []),
        ("nonsense", []),
        (A.uuid, [A]),
        ("GPU-aabb", [B]),
        ("GPU-aabb,GPU-aaaa", [B, A]),
        ("GPU-aa", []),
        ("GPU-cc", []),
    ],
)
def test_cuda_visible_devices_selects_devices(
    visible: str | None, expected: list[DetectedDevice]
) -> None:
    assert nvml.select_visible([A, B], visible) == expected


def test_a_mig_device_is_refused() -> None:
    with pytest.raises(RequestError, match="'MIG-1', a MIG device; use whole devices"):
        nvml.select_visible([A, B], "MIG-1")


def make_accelerator(name: str, devices: list[DetectedDevice]) -> Accelerator:
    """Return an accelerator that finds these devices."""
    return Accelerator(name, lambda: devices, lambda devices: [], {"torch": "collections:Counter"})


NPU = make_accelerator("npu", [DetectedDevice("Ascend910B3", None, None, 0, None)])
NO_NPU = make_accelerator("npu", [])
OTHER_CPU = make_accelerator("cpu", [])


def install_entry_point(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make a constant of this module the only third-party accelerator, and hide all CUDA
    devices.
    """
    entry = EntryPoint(name.lower(), f"{__name__}:{name}", accelerators.ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        plugins,
        "_find_entry_points",
        lambda group, path: (entry,) if group == accelerators.ENTRY_POINT_GROUP else (),
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_third_party_accelerator_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    install_entry_point(monkeypatch, "NPU")
    assert list(accelerators.load_accelerators()) == ["cuda", "npu", "cpu"]
    assert accelerators.detect_accelerator() is NPU
    assert accelerators.find_accelerator("npu") is NPU


def test_a_third_party_accelerator_without_devices_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_entry_point(monkeypatch, "NO_NPU")
    assert accelerators.detect_accelerator() is accelerators.CPU


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("OTHER_CPU", "accelerator 'cpu' is defined twice"),
        ("A", "accelerator 'a' .* is not of type Accelerator"),
        ("NOTHING", "accelerator 'nothing' .*; fix or uninstall its package"),
    ],
)
def test_an_invalid_third_party_accelerator_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    install_entry_point(monkeypatch, name)
    with pytest.raises(RequestError, match=message):
        accelerators.load_accelerators()


def test_an_unknown_accelerator_is_refused() -> None:
    with pytest.raises(RequestError, match="accelerator 'tpu' is not known; allowed: cuda, cpu"):
        accelerators.find_accelerator("tpu")
