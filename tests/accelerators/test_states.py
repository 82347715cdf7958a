"""Test reading device settings from a fake NVML library, and `steelyard check` on such devices."""

from pathlib import Path
from typing import Any

import pytest

from fixtures.golden import golden
from fixtures.nvml import build_fake_nvml, run_python
from steelyard.record.run_facts import DeviceState

pytestmark = pytest.mark.process

STATES_PROGRAM = (
    "import json; from steelyard import accelerators as a;"
    " print(json.dumps(a.CUDA.states(a.CUDA.find())))"
)
CHECK_PROGRAM = """
import io, json, sys
from contextlib import redirect_stdout
from steelyard.run import machine_inspection
from steelyard import cli
machine_inspection.WATCH_S = 0.01
sys.argv = ["steelyard", "check", "--json"]
out, code = io.StringIO(), 0
try:
    with redirect_stdout(out):
        cli.main()
except SystemExit as end:
    code = end.code
print(json.dumps([code, json.loads(out.getvalue())]))
"""


def test_every_device_setting_is_read(fake: str) -> None:
    first_state, second_state = run_python(STATES_PROGRAM, LD_LIBRARY_PATH=fake)
    assert first_state == {
        "device": "cuda:0",
        "persistence": True,
        "processes": 0,
        "sm_clock_mhz": 1980,
        "sm_clock_max_mhz": 1980,
        "application_clock_mhz": 1980,
        "application_clock_default_mhz": 1980,
        "power_limit_w": 700.0,
        "power_default_w": 700.0,
        "ecc": True,
        "mig": False,
        "reasons": ["sw_power_cap"],
        "temperature_c": 61,
        "slowdown_c": 92,
        "runtime": "12.8",
        "invalidating": [],
        "numa_node": None,
    }
    changed = {
        "persistence": False,
        "application_clock_mhz": 1200,
        "power_limit_w": 350.0,
        "ecc": False,
        "mig": True,
    }
    assert {name: second_state[name] for name in changed} == changed
    assert second_state["invalidating"] == ["hw_slowdown", "hw_power_brake_slowdown"]
    assert set(DeviceState.model_fields) == set(first_state)


def test_settings_that_a_driver_lacks_are_none(tmp_path: Path) -> None:
    first_state, _ = run_python(
        STATES_PROGRAM, LD_LIBRARY_PATH=build_fake_nvml(tmp_path / "bare", "-DBARE")
    )
    assert {name: value for name, value in first_state.items() if value is not None} == {
        "device": "cuda:0"
    }


def findings_by_name(check_result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the findings of `steelyard check --json` by name."""
    return {row["name"]: row for row in check_result["findings"]}


def test_check_reports_findings_and_next_steps(fake: str) -> None:
    code, check_result = run_python(CHECK_PROGRAM, LD_LIBRARY_PATH=fake, FAKE_NVML_PROCESSES="2")
    findings = findings_by_name(check_result)
    assert (code, check_result["fit"], check_result["accelerator"]) == (1, False, "cuda")
    assert findings["driver"] == {
        "name": "driver",
        "found": "570.86.15",
        "level": "ok",
        "step": None,
    }
    assert findings["devices"]["found"] == "2 cuda: NVIDIA H200"
    levels = {name: row["level"] for name, row in findings.items() if name.endswith("cuda:1")}
    assert levels == {
        "persistence mode of cuda:1": "warn",
        "processes on cuda:1": "bad",
        "clocks of cuda:1": "warn",
        "power limit of cuda:1": "warn",
        "ECC of cuda:1": "warn",
        "MIG of cuda:1": "bad",
        "slowdown reasons of cuda:1": "bad",
        "temperature of cuda:1": "warn",
        "NUMA node of cuda:1": "unknown",
    }
    assert findings["persistence mode of cuda:1"]["step"] == golden("ask-the-operator-of-the-host")


def test_check_with_a_driver_that_does_not_answer(fake: str) -> None:
    code, check_result = run_python(CHECK_PROGRAM, LD_LIBRARY_PATH=fake, FAKE_NVML_INIT="18")
    assert (code, findings_by_name(check_result)["driver"]["level"]) == (1, "bad")
    assert findings_by_name(check_result)["driver"]["found"].startswith(
        golden("nvml-rm-has-detected-an-nvml-2")
    )
