"""Datasheet peaks: peaks.toml as validated rows, looked up by the name that the driver reports."""

import tomllib
from collections import Counter
from collections.abc import Mapping
from datetime import date
from functools import cache
from importlib.resources import files

from pydantic import Field, PositiveFloat, model_validator

from steelyard.errors import RequestError
from steelyard.schema import FrozenModel

PRECISIONS = frozenset({"fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8"})
BANDWIDTH = "bandwidth"  # the name of the figure that no precision has
GIB = 1 << 30
# A device shows a few per cent less memory than its label says; products that share a name differ
# by a factor.
MEMORY_TOLERANCE = 0.1


def check_precision_name(name: str) -> None:
    """Raise RequestError if `name` is not in `PRECISIONS`."""
    if name not in PRECISIONS:
        allowed = ", ".join(sorted(PRECISIONS))
        raise RequestError(f"precision {name!r} is not known; allowed: {allowed}")


def list_figures(
    flops_per_s: Mapping[str, float], bandwidth_bytes_per_s: float | None
) -> dict[str, float]:
    """Return the figures of a datasheet row in one dict: FLOP/s by precision and, unless it is
    None, the memory bandwidth in B/s as `BANDWIDTH`.
    """
    bandwidth = {} if bandwidth_bytes_per_s is None else {BANDWIDTH: bandwidth_bytes_per_s}
    return {**flops_per_s, **bandwidth}


class SupersededFigures(FrozenModel):
    """Figures that a row of peaks.toml had from one date until another, and has no longer: FLOP/s
    by precision (`flops_per_s`) and memory bandwidth in B/s (None: unchanged), each only if it
    differs from today's; `why` says what was wrong with them. Records of that time keep them.
    Validation refuses unknown precisions, no figure at all, and an end before the start.
    """

    since: date
    until: date
    flops_per_s: dict[str, PositiveFloat] = Field(default_factory=dict)
    bandwidth_bytes_per_s: PositiveFloat | None = None
    why: str = Field(min_length=1)

    @model_validator(mode="after")
    def _check_figures(self) -> "SupersededFigures":
        """Return the superseded figures as they are; raise ValueError if a precision is not in
        `PRECISIONS`, there is no figure, or `until` is not after `since`. Called by pydantic after
        validation.
        """
        unknown = self.flops_per_s.keys() - PRECISIONS
        if unknown:
            raise ValueError(
                f"superseded: unknown precisions {sorted(unknown)}; allowed: {sorted(PRECISIONS)}"
            )
        if not self.flops_per_s and self.bandwidth_bytes_per_s is None:
            raise ValueError("superseded: neither flops_per_s nor bandwidth_bytes_per_s")
        if self.until <= self.since:
            raise ValueError(f"superseded: until {self.until} is not after since {self.since}")
        return self


class Peak(FrozenModel):
    """The dense datasheet peaks of one device: FLOP/s by precision (`flops_per_s`), and memory
    bandwidth in B/s (`bandwidth_bytes_per_s`, None: no public figure); a row of peaks.toml or of an
    accelerator. Precisions without a public figure are missing.

    `match` are the names that drivers report for it, `accelerator` the accelerator's name;
    `memory_gib` tells devices of the same name apart (None: any memory); `source` says where the
    figures are from; `superseded` are figures that the row had before. `is_of_device` matches name
    and memory (within 10 %). Validation refuses unknown precisions, and superseded figures that
    equal today's.
    """

    name: str
    accelerator: str
    match: tuple[str, ...] = Field(min_length=1)
    memory_gib: PositiveFloat | None = None
    flops_per_s: dict[str, PositiveFloat] = Field(min_length=1)
    bandwidth_bytes_per_s: PositiveFloat | None = None
    source: str = Field(min_length=1)
    note: str | None = None
    superseded: tuple[SupersededFigures, ...] = ()

    @model_validator(mode="after")
    def _check_figures(self) -> "Peak":
        """Return the row of datasheet peaks as it is; raise ValueError if `flops_per_s` has a
        precision that is not in `PRECISIONS`, or a superseded figure equals today's. Called by
        pydantic after validation.
        """
        unknown = self.flops_per_s.keys() - PRECISIONS
        if unknown:
            raise ValueError(
                f"{self.name}: unknown precisions {sorted(unknown)}; allowed: {sorted(PRECISIONS)}"
            )
        current = list_figures(self.flops_per_s, self.bandwidth_bytes_per_s)
        for earlier in self.superseded:
            figures = list_figures(earlier.flops_per_s, earlier.bandwidth_bytes_per_s)
            equal = sorted(name for name, value in figures.items() if current.get(name) == value)
            if equal:
                raise ValueError(f"{self.name}: superseded {', '.join(equal)} is today's figure")
        return self

    def is_of_device(self, device_name: str, memory_bytes: int | None) -> bool:
        """Return whether these are the datasheet peaks of a device of this name and memory: its
        name is one of `match`, and, only if the row states `memory_gib`, its memory is known and
        within 10 % of that.
        """
        if device_name not in self.match:
            return False
        if self.memory_gib is None:
            return True
        return (
            memory_bytes is not None
            and abs(memory_bytes / GIB / self.memory_gib - 1) <= MEMORY_TOLERANCE
        )


class _PeakTable(FrozenModel):
    """The whole of peaks.toml: its rows, in `peak`. Validation raises ValueError if a device name
    is in two rows of which one does not state its memory.
    """

    peak: tuple[Peak, ...]

    @model_validator(mode="after")
    def _check_names(self) -> "_PeakTable":
        """Return the table as it is; raise ValueError if a device name is in two rows, of which one
        does not state its memory. Called by pydantic after validation.
        """
        count = Counter(name for row in self.peak for name in row.match)
        for row in self.peak:
            duplicates = [name for name in row.match if count[name] > 1 and row.memory_gib is None]
            if duplicates:
                raise ValueError(
                    f"{row.name}: {duplicates} also in another row, and no memory_gib to tell them"
                    " apart"
                )
        return self


def parse_peaks(text: str) -> tuple[Peak, ...]:
    """Return the rows of a TOML text like peaks.toml. Raises ValueError (pydantic's, or tomllib's)
    if it is not valid.
    """
    return _PeakTable.model_validate(tomllib.loads(text)).peak


@cache
def load_shipped_peaks() -> tuple[Peak, ...]:
    """Return the rows of peaks.toml, which come with this package; read once."""
    return parse_peaks(
        files("steelyard.accelerators").joinpath("peaks.toml").read_text(encoding="utf-8")
    )
