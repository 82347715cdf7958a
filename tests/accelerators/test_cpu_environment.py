"""Test the probe for AMX that a virtual machine advertises but cannot run: a process that dies of
SIGILL disables it, and it runs once.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steelyard.accelerators import cpu

SIGILL_PROBE = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set up a process that has not probed yet, on a CPU with the AMX flag whose probe dies of
    SIGILL.
    """
    monkeypatch.delenv(cpu.ISA_VARIABLE, raising=False)
    monkeypatch.setattr(cpu, "AMX_PROBE", SIGILL_PROBE)
    monkeypatch.setattr(cpu, "_read_flags", lambda: {"avx512f", "amx_bf16"})
    cpu._can_multiply_bf16.cache_clear()
    yield
    cpu._can_multiply_bf16.cache_clear()


@pytest.mark.process
def test_amx_is_disabled_when_its_probe_dies_of_sigill() -> None:
    assert (
        cpu.choose_worker_environment("bf16") == cpu.choose_worker_environment("fp8") == WITHOUT_AMX
    )


def test_a_cpu_without_the_amx_flag_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_read_flags", lambda: {"avx512f", "avx512_bf16"})
    assert cpu.choose_worker_environment("bf16") == cpu.choose_worker_environment("fp8") == {}
    assert cpu._can_multiply_bf16.cache_info().misses == 0


@pytest.mark.parametrize("matmul", ["fp32", "fp16", "tf32"])
def test_other_precisions_are_not_probed(matmul: str) -> None:
    assert cpu.choose_worker_environment(matmul) == {}
    assert cpu._can_multiply_bf16.cache_info().misses == 0


@pytest.mark.process
@pytest.mark.parametrize(
    "probe",
    ["pass", "raise SystemExit(3)", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"],
)
def test_other_failures_of_the_probe_change_nothing(
    monkeypatch: pytest.MonkeyPatch, probe: str
) -> None:
    monkeypatch.setattr(cpu, "AMX_PROBE", probe)
    assert cpu.choose_worker_environment("bf16") == {}


@pytest.mark.process
def test_a_probe_that_hangs_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "AMX_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(cpu, "PROBE_TIMEOUT_S", 0.2)
    assert cpu.choose_worker_environment("bf16") == {}


def test_a_users_setting_is_not_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.ISA_VARIABLE, "AVX2")
    assert cpu.choose_worker_environment("bf16") == {}
    assert cpu._can_multiply_bf16.cache_info().misses == 0


@pytest.mark.process
def test_the_probe_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probes_run: list[Any] = []
    real_run = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        probes_run.append(command[-1])
        return real_run(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    assert [cpu.choose_worker_environment("bf16") for _ in range(3)] == [WITHOUT_AMX] * 3
    assert probes_run == [SIGILL_PROBE]


def test_without_torch_nothing_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "find_spec", lambda name: None)
    assert cpu.choose_worker_environment("bf16") == {}


def test_flags_are_read_from_cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nflags\t\t: fpu amx_bf16 amx_tile\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    assert cpu._read_flags(cpuinfo) == {"fpu", "amx_bf16", "amx_tile"}
    assert cpu._read_flags(tmp_path / "absent") == set()
