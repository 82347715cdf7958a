"""Datasheet peaks: peaks.toml as validated rows, looked up by the name that the driver reports."""

import tomllib
from collections import Counter
from functools import cache
from importlib.resources import files

from pydantic import Field, PositiveFloat, model_validator

from steelyard.schema import Frozen

PRECISIONS = frozenset({"fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8"})
GIB = 1 << 30
# A device shows a few per cent less than the memory on its label; products that share a name differ
# by a factor.
MEMORY_TOLERANCE = 0.1


class Peak(Frozen):
    """One device's dense peaks. A precision or bandwidth without a public figure is not there."""

    name: str
    accelerator: str
    match: tuple[str, ...] = Field(min_length=1)
    memory_gib: PositiveFloat | None = None
    flops_per_s: dict[str, PositiveFloat] = Field(min_length=1)
    bandwidth_bytes_per_s: PositiveFloat | None = None
    source: str = Field(min_length=1)
    note: str | None = None

    @model_validator(mode="after")
    def _known_precisions(self) -> "Peak":
        unknown = self.flops_per_s.keys() - PRECISIONS
        if unknown:
            raise ValueError(
                f"{self.name}: unknown precisions {sorted(unknown)}; known are {sorted(PRECISIONS)}"
            )
        return self

    def fits(self, device_name: str, memory_bytes: int | None) -> bool:
        if device_name not in self.match:
            return False
        if self.memory_gib is None:
            return True
        return (
            memory_bytes is not None
            and abs(memory_bytes / GIB / self.memory_gib - 1) <= MEMORY_TOLERANCE
        )


class _Table(Frozen):
    peak: tuple[Peak, ...]

    @model_validator(mode="after")
    def _one_row_a_device(self) -> "_Table":
        """A name may be in two rows only where memory tells them apart."""
        count = Counter(name for row in self.peak for name in row.match)
        for row in self.peak:
            twice = [name for name in row.match if count[name] > 1 and row.memory_gib is None]
            if twice:
                raise ValueError(
                    f"{row.name}: {twice} also in another row, and no memory_gib to tell them apart"
                )
        return self


def parse(text: str) -> tuple[Peak, ...]:
    return _Table.model_validate(tomllib.loads(text)).peak


@cache
def shipped() -> tuple[Peak, ...]:
    """The rows that come with this package."""
    return parse(files("steelyard.accelerators").joinpath("peaks.toml").read_text(encoding="utf-8"))
