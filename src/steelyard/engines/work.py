"""What an engine yields: marks where a phase of a step begins, and where a step ends."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Phase:
    """A phase of a step begins: `data`, `meet`, `compute`, `exchange`, `evaluate`, `checkpoint`, `score`. In `meet` ranks wait
    until all have their data; `exchange` is what they exchange in a step, waiting for one another included. An engine marks
    them where they lie between other phases."""

    name: str


@dataclass(frozen=True)
class Work:
    """A step ends. Values may be zero-dimensional tensors still on the device; they are read after the pass."""

    counts: dict[str, int]
    values: dict[str, Any] = field(default_factory=dict)
