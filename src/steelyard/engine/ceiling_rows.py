"""Ceilings that `steelyard spec` measures: what a framework offers, one row for each thing a device
can do.

A framework's `FrameworkCeilings` (engines/torch/device_ceilings.py is torch's) yields
`CeilingRow`s. The worker of `steelyard spec` (run/ceilings_worker.py) prepares each row, checks its
result once and times it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from steelyard.plan.ceiling_shapes import CeilingGroup, CeilingUnit
from steelyard.words import Message, render_text


class UnavailableError(Exception):
    """Raised by `CeilingRow.prepare` if the device cannot run a row of `steelyard spec`, or not
    within the time for one call; `reason` is why, a message or an English sentence, which the
    record shows instead of a rate. Other rows are measured all the same.
    """

    def __init__(self, reason: Message | str) -> None:
        """Keep the reason; the text of the exception is the reason in English."""
        super().__init__(render_text(reason))
        self.reason = reason


@dataclass(frozen=True)
class PreparedCeiling:
    """A row of `steelyard spec` with its memory allocated, ready to be called any number of times;
    made by `CeilingRow.prepare`.

    `call` starts the operation once and need not wait for the device; its result is ignored.
    `amount` is the FLOPs or bytes of one call; of a capacity, the result in bytes. `check` runs the
    row once and returns (error, bound): the error is the largest difference from the fp64 result as
    a fraction of that result's root mean square (or a count of wrong numbers with bound 0), not
    finite if the result is no number. `check` is None if there is nothing to compare. `detail` goes
    to the record: sizes, shapes, how it was measured.
    """

    call: Callable[[], Any]
    amount: float  # FLOPs or bytes of one call
    check: Callable[[], tuple[float, float]] | None = None
    detail: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class CallBudget:
    """The time limit of one call of a row of `steelyard spec`, by which rows choose how large they
    are. `rate` is the best rate so far of rows of the same group, precision and kind, in FLOP/s or
    B/s, or one guessed from plain matmuls; None if neither is known. `call_s` is the longest that
    one call may take, in seconds. `max_amount` is rate x call_s, the most FLOPs or bytes of one
    call; None (no rate known) means no limit.
    """

    rate: float | None
    call_s: float

    @property
    def max_amount(self) -> float | None:
        """Return the most FLOPs or bytes that one call within this budget may have (rate x call_s),
        or None if no rate is known, which means no limit.
        """
        return None if self.rate is None else self.rate * self.call_s


@dataclass(frozen=True)
class CeilingRow:
    """One ceiling that a framework can measure on this rank's device, not prepared yet. `group` is
    matmul, memory, capacity, copy, attention or collective; `name` that of the row; `precision` of
    matmuls and attention, else None; `unit` FLOP/s, B/s or B. `kind`: rows of one group, precision
    and kind are about equally fast. `all_ranks`: all ranks must call it together, equally often.

    `prepare(budget)` allocates the row's memory in a size that the budget allows and returns a
    `PreparedCeiling`, or raises UnavailableError. It is not called if `unavailable` has a reason
    why the device cannot run the row (None: not known before trying). A row whose unit is `B` is a
    capacity: its amount is the result, and it is never called.
    """

    group: CeilingGroup
    name: str
    precision: str | None
    unit: CeilingUnit
    prepare: Callable[[CallBudget], PreparedCeiling]
    # why the device cannot run it, if that is known before trying
    unavailable: Message | str | None = None
    kind: str = ""  # rows of one group, precision and kind are about equally fast
    all_ranks: bool = False  # all ranks must call it together, equally often


class FrameworkCeilings(Protocol):
    """The ceilings that a framework can measure on one rank's device (a protocol); the worker of
    `steelyard spec` prepares, checks and times them. Constructed with the framework object, after
    it has joined all ranks.

    `rows(quick)` yields the `CeilingRow`s in the order of measuring, the same on all ranks, fewer
    and smaller ones with `quick`. `all_reduce_max(value)` returns the maximum over ranks, which all
    call together. `release_memory()`, called after each row, gives cached memory back to the
    device. `explain_error(error, precision)` words an exception of a row.
    """

    def rows(self, quick: bool) -> Iterator[CeilingRow]:
        """Yield the rows of this framework's device in the order in which they are measured; with
        `quick`, fewer and smaller ones. All ranks must yield the same rows.
        """

    def all_reduce_max(self, value: float) -> float:
        """Return the largest of the values that all ranks pass; every rank must call it. One rank
        alone gets its own value.
        """

    def release_memory(self) -> None:
        """Give cached memory that the last row allocated back to the device; called after every
        row.
        """

    def explain_error(self, error: Exception, precision: str | None) -> Message:
        """Return why a row in this precision (None: it has none) has no number, for an exception
        that was raised when it was prepared, checked or timed. The text of the exception is no part
        of the message.
        """
