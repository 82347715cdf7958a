"""What an engine yields: marks where a phase of a step begins, and where a step ends."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Phase:
    """A phase of a step begins: `data`, `compute`, `evaluate`, `checkpoint`, `score`."""

    name: str


@dataclass(frozen=True)
class Work:
    """A step ends. Values may be zero-dimensional tensors still on the device; they are read after the pass."""

    counts: dict[str, int]
    values: dict[str, Any] = field(default_factory=dict)
