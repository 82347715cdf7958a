"""Datasheet peaks: peaks.toml as validated rows, looked up by the name that the driver reports."""

import tomllib
from collections import Counter
from functools import cache
from importlib.resources import files

from pydantic import Field, PositiveFloat, model_validator

from steelyard.errors import RequestError
from steelyard.schema import FrozenModel

PRECISIONS = frozenset({"fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8"})
GIB = 1 << 30
# A device shows a few per cent less memory than its label says; products that share a name differ
# by a factor.
MEMORY_TOLERANCE = 0.1


def check_precision_name(name: str) -> None:
    """Raise RequestError if `name` is not in `PRECISIONS`."""
    if name not in PRECISIONS:
        allowed = ", ".join(sorted(PRECISIONS))
        raise RequestError(f"precision {name!r} is not known; allowed: {allowed}")


class Peak(FrozenModel):
    """The dense datasheet peaks of one device: FLOP/s by precision (`flops_per_s`), and memory
    bandwidth in B/s (`bandwidth_bytes_per_s`, None: no public figure); a row of peaks.toml or of an
    accelerator. Precisions without a public figure are missing.

    `match` are the names that drivers report for it, `accelerator` the accelerator's name;
    `memory_gib` tells devices of the same name apart (None: any memory); `source` says where the
    figures are from. `is_of_device` matches name and memory (within 10 %). Validation refuses
    unknown precisions.
    """

    name: str
    accelerator: str
    match: tuple[str, ...] = Field(min_length=1)
    memory_gib: PositiveFloat | None = None
    flops_per_s: dict[str, PositiveFloat] = Field(min_length=1)
    bandwidth_bytes_per_s: PositiveFloat | None = None
    source: str = Field(min_length=1)
    note: str | None = None

    @model_validator(mode="after")
    def _check_precisions(self) -> "Peak":
        """Return the row of datasheet peaks as it is; raise ValueError if `flops_per_s` has a
        precision that is not in `PRECISIONS`. Called by pydantic after validation.
        """
        unknown = self.flops_per_s.keys() - PRECISIONS
        if unknown:
            raise ValueError(
                f"{self.name}: unknown precisions {sorted(unknown)}; allowed: {sorted(PRECISIONS)}"
            )
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
