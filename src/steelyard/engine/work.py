"""What an engine yields: marks where a phase of a step begins, and where a step ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Phase:
    """A phase of a step begins: `data`, `meet`, `compute`, `exchange`, `evaluate`, `checkpoint`,
    `score`. In `meet` ranks wait until all have their data; `exchange` is what they exchange in a
    step, waiting for one another included. An engine marks them where they lie between other
    phases."""

    name: str


@dataclass(frozen=True)
class Work:
    """A step ends. `rows` names what it computed of `job.inputs`: numbers of texts, keys of rows or
    samples; what they count is taken from the data. `prefixes`, division open: groups whose common
    beginning was computed in it. An engine may count by itself instead; either way all must come to
    what the data hold. Of `counts` only `padded` is its own to say. Values may be zero-dimensional
    tensors still on the device; they are read after the pass."""

    counts: dict[str, int] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    rows: Sequence[Any] | None = None
    prefixes: Sequence[int] = ()
