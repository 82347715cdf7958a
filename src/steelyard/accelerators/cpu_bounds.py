"""The most that one core of this host's CPU can compute: FLOPs a cycle by its vector instructions,
times a clock that it cannot exceed.

A CPU has no row among the datasheet peaks. This is a bound and no peak: a core reaches it in no
program, and a rate above it was not measured. Where an instruction set or an architecture is not
known, there is no bound.
"""

import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CPUS = Path("/sys/devices/system/cpu")

# No CPU has been sold with a higher clock than 6.2 GHz (Core i9-14900KS); used where the host does
# not tell its own, as virtual machines do not.
ANY_CLOCK_HZ = 6.5e9
# Drivers whose cpuinfo_max_freq is the highest clock of a core; acpi-cpufreq leaves out the boost.
TRUSTED_DRIVERS = (
    *("intel_pstate", "intel_cpufreq", "amd-pstate", "amd-pstate-epp", "amd_pstate"),
    *("amd_pstate_epp", "cppc_cpufreq"),
)
CLOCK_MARGIN = 1.1  # over what such a driver tells


@dataclass(frozen=True)
class VectorRow:
    """Vector instructions and what a core does with them in a cycle at most: the `flag` by which
    the kernel lists them, FLOPs a cycle by matmul precision, and the `source` of these.
    """

    flag: str
    flops_per_cycle: Mapping[str, int]
    source: str


FLOPS_PER_CYCLE = "https://en.wikichip.org/wiki/flops"
X86_ROWS = (
    VectorRow("sse2", {"fp32": 8}, f"{FLOPS_PER_CYCLE}: a multiplication and an addition of 4"),
    VectorRow("avx", {"fp32": 16}, f"{FLOPS_PER_CYCLE}: a multiplication and an addition of 8"),
    VectorRow("fma", {"fp32": 32}, f"{FLOPS_PER_CYCLE}: two multiply-adds of 8"),
    VectorRow("avx512f", {"fp32": 64}, f"{FLOPS_PER_CYCLE}: two multiply-adds of 16"),
    VectorRow("avx512_bf16", {"bf16": 128}, "two VDPBF16PS of 32 multiply-adds"),
    VectorRow("avx512_fp16", {"fp16": 128}, "two VFMADD132PH of 32 multiply-adds"),
    VectorRow(
        "amx_bf16",
        {"bf16": 1024},
        "https://en.wikipedia.org/wiki/Advanced_Matrix_Extensions: TDPBF16PS of 8192 multiply-adds"
        " in 16 cycles",
    ),
    VectorRow("amx_fp16", {"fp16": 1024}, "TDPFP16PS, as TDPBF16PS"),
)
ARM_ROWS = (
    VectorRow("asimd", {"fp32": 32}, "four multiply-adds of 4: Neoverse V2, Apple M1"),
    VectorRow("asimdhp", {"fp16": 64}, "four multiply-adds of 8"),
    VectorRow("bf16", {"bf16": 128}, "four BFMMLA of 16 multiply-adds: Neoverse V2"),
    VectorRow("sve", {"fp32": 64, "fp16": 128}, "two multiply-adds of 512 bits: A64FX"),
    VectorRow("svebf16", {"bf16": 256}, "as four BFMMLA, of twice the width"),
)
# architecture → (key of the flags in /proc/cpuinfo, rows, beginnings of flags of matrix units)
ARCHITECTURES = {
    "x86_64": ("flags", X86_ROWS, "amx_"),
    "aarch64": ("Features", ARM_ROWS, "sme"),
}
# flags with these beginnings that bring no faster floating-point matmul than the rows
KNOWN_MATRIX_FLAGS = ("amx_tile", "amx_int8", "amx_bf16", "amx_fp16", "amx_complex")


@dataclass(frozen=True)
class CoreBound:
    """The most that one core can compute: `flops_per_cycle` by matmul precision, and `clock_hz`,
    which it does not exceed. `vectors` are the kernel's flags of the instructions, `clock_from`
    says where the clock is from: `cpufreq`, this host's, or `any`, that of the fastest CPU.
    """

    flops_per_cycle: dict[str, int]
    clock_hz: float
    vectors: list[str]
    clock_from: str


def read_core_bound(
    proc: Path = PROC, cpus: Path = CPUS, machine: str | None = None
) -> CoreBound | None:
    """Return the most that one core of this host's CPU can compute, or None if its architecture or
    one of its matrix units is not known. `proc` and `cpus` are the folders that are read, `machine`
    the architecture (None: this one).
    """
    architecture = ARCHITECTURES.get(platform.machine() if machine is None else machine)
    if architecture is None:
        return None
    key, rows, matrix_units = architecture
    flags = _read_flags(proc / "cpuinfo", key)
    unknown = [
        flag for flag in flags if flag.startswith(matrix_units) and flag not in KNOWN_MATRIX_FLAGS
    ]
    found = [row for row in rows if row.flag in flags]
    if unknown or not found:
        return None
    flops: dict[str, int] = {}
    for row in found:
        for precision, count in row.flops_per_cycle.items():
            flops[precision] = max(count, flops.get(precision, 0))
    clock_hz, clock_from = _read_highest_clock(cpus)
    return CoreBound(flops, clock_hz, [row.flag for row in found], clock_from)


def _read_flags(cpuinfo: Path, key: str) -> frozenset[str]:
    """Return the feature flags of the first CPU in /proc/cpuinfo; empty if it cannot be read."""
    with suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return frozenset(value.split())
    return frozenset()


def _read_highest_clock(cpus: Path) -> tuple[float, str]:
    """Return a clock in Hz that no core of this host exceeds, and where it is from: `cpufreq`, if
    every core's driver is one of `TRUSTED_DRIVERS`, else `any`.
    """
    clocks_hz = []
    for folder in cpus.glob("cpu[0-9]*/cpufreq"):
        with suppress(OSError, ValueError):
            if (folder / "scaling_driver").read_text().strip() in TRUSTED_DRIVERS:
                clocks_hz.append(1e3 * int((folder / "cpuinfo_max_freq").read_text()))
                continue
        return ANY_CLOCK_HZ, "any"
    return (CLOCK_MARGIN * max(clocks_hz), "cpufreq") if clocks_hz else (ANY_CLOCK_HZ, "any")
