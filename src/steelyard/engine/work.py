"""The marks that an engine yields while it runs a pass: `Phase` begins a phase of a step, `Work`
ends a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Phase:
    """A mark that an engine yields where a phase of a step begins; `name` is `data`, `meet`,
    `compute`, `exchange`, `score`, `evaluate` or `checkpoint`. The phase lasts until the next mark,
    a `Phase` or a `Work`; the measured loop takes a time at each.

    In `meet` ranks wait until all have their data. `exchange` is the communication of a step,
    including waiting for one another, where it lies between other phases and can be told apart.
    """

    name: str


@dataclass(frozen=True)
class Work:
    """A mark that an engine yields where a step ends, with what it computed.

    - `rows`: the items of `job.inputs` that were computed, as indices of texts or keys of rows or
      samples; their tokens and samples are then counted from the data. None: `counts` has all.
    - `prefixes`: in division open, the groups whose shared prefix was computed in this step.
    - `counts`: `padded`, the padding tokens computed; or all counts, by an engine that gives no
      `rows`. Either way the sums over a pass must equal those of the data.
    - `values`: numbers of the step, such as loss and grad_norm; zero-dimensional device tensors are
      read after the pass.
    """

    counts: dict[str, int] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    rows: Sequence[Any] | None = None
    prefixes: Sequence[int] = ()
