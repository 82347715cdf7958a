"""What an engine yields: marks where a phase of a step begins, and where a step ends."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Phase:
    """A phase of a step begins: `data`, `compute`, `exchange`, `evaluate`, `checkpoint`, `score`. `exchange` is what ranks
    exchange in a step, waiting for one another included; an engine marks it where it lies between other phases."""

    name: str


@dataclass(frozen=True)
class Work:
    """A step ends. Values may be zero-dimensional tensors still on the device; they are read after the pass."""

    counts: dict[str, int]
    values: dict[str, Any] = field(default_factory=dict)
