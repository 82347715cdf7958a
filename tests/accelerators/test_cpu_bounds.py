"""Tests of what one core can compute at most, from the files of made-up machines."""

from pathlib import Path

import pytest

from steelyard.accelerators import cpu_bounds
from steelyard.accelerators.cpu_bounds import CoreBound, read_core_bound


def make_machine(
    folder: Path,
    flags: str,
    key: str = "flags",
    clocks_khz: dict[int, tuple[str, str]] | None = None,
) -> tuple[Path, Path]:
    """Write the files of a machine whose CPUs have these flags and, by CPU, a frequency driver and
    highest clock; return its /proc and its folder of CPUs.
    """
    proc, cpus = folder / "proc", folder / "cpu"
    proc.mkdir()
    cpus.mkdir()
    (proc / "cpuinfo").write_text(f"processor\t: 0\n{key}\t\t: {flags}\n\nprocessor\t: 1\n")
    for number, (driver, clock) in (clocks_khz or {}).items():
        (cpus / f"cpu{number}" / "cpufreq").mkdir(parents=True)
        (cpus / f"cpu{number}" / "cpufreq" / "scaling_driver").write_text(f"{driver}\n")
        (cpus / f"cpu{number}" / "cpufreq" / "cpuinfo_max_freq").write_text(f"{clock}\n")
    return proc, cpus


X86 = "fpu sse2 avx fma avx2"


@pytest.mark.parametrize(
    ("machine", "flags", "flops"),
    [
        ("x86_64", "fpu sse2", {"fp32": 8}),
        ("x86_64", "fpu sse2 avx", {"fp32": 16}),
        ("x86_64", X86, {"fp32": 32}),
        ("x86_64", f"{X86} avx512f", {"fp32": 64}),
        ("x86_64", f"{X86} avx512f avx512_bf16", {"fp32": 64, "bf16": 128}),
        (
            "x86_64",
            f"{X86} avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8",
            {"fp32": 64, "bf16": 1024, "fp16": 128},
        ),
        ("aarch64", "fp asimd", {"fp32": 32}),
        ("aarch64", "fp asimd asimdhp bf16", {"fp32": 32, "fp16": 64, "bf16": 128}),
        ("aarch64", "fp asimd sve svebf16", {"fp32": 64, "fp16": 128, "bf16": 256}),
    ],
)
def test_flops_per_cycle_follow_from_the_vector_instructions(
    tmp_path: Path, machine: str, flags: str, flops: dict[str, int]
) -> None:
    key = "flags" if machine == "x86_64" else "Features"
    bound = read_core_bound(*make_machine(tmp_path, flags, key), machine)
    assert bound is not None
    assert (bound.flops_per_cycle, bound.clock_hz, bound.clock_from) == (flops, 6.5e9, "any")


@pytest.mark.parametrize(
    ("machine", "flags"),
    [
        ("x86_64", "fpu"),
        ("x86_64", f"{X86} amx_tile amx_tf32"),  # a matrix unit that no row knows
        ("aarch64", "fp asimd sme"),
        ("riscv64", "rv64imafdcv"),
    ],
)
def test_an_unknown_machine_has_no_bound(tmp_path: Path, machine: str, flags: str) -> None:
    key = "flags" if machine == "x86_64" else "Features"
    assert read_core_bound(*make_machine(tmp_path, flags, key), machine) is None


@pytest.mark.parametrize(
    ("clocks", "clock_hz", "clock_from"),
    [
        (
            {0: ("intel_pstate", "3900000"), 1: ("intel_pstate", "4000000")},
            pytest.approx(4.4e9),
            "cpufreq",
        ),
        ({0: ("acpi-cpufreq", "2450000")}, 6.5e9, "any"),  # without the boost
        ({0: ("amd-pstate", "3700000"), 1: ("none", "3700000")}, 6.5e9, "any"),
        ({0: ("amd-pstate", "unknown")}, 6.5e9, "any"),
    ],
)
def test_the_clock_is_the_hosts_own_where_it_is_known(
    tmp_path: Path, clocks: dict[int, tuple[str, str]], clock_hz: float, clock_from: str
) -> None:
    bound = read_core_bound(*make_machine(tmp_path, X86, clocks_khz=clocks), "x86_64")
    assert bound == CoreBound({"fp32": 32}, clock_hz, ["sse2", "avx", "fma"], clock_from)


def test_a_machine_without_files_has_no_bound(tmp_path: Path) -> None:
    assert read_core_bound(tmp_path, tmp_path, "x86_64") is None


def test_every_row_has_a_source() -> None:
    assert all(row.source for row in (*cpu_bounds.X86_ROWS, *cpu_bounds.ARM_ROWS))
