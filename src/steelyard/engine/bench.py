"""Rows of `steelyard spec`: one thing that a device can do, made ready by a framework, held and
timed by a worker.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from steelyard.plan.ceilings import Group, Unit


class LacksError(Exception):
    """The device has no such thing, or it cannot be had in time; the text is the reason."""


@dataclass(frozen=True)
class Made:
    """Ready to be called again and again. `check` runs it once and says how far the result is from
    that in fp64 (a share of its root mean square; not finite where it is none) and how far it may
    be; None where there is nothing to compare."""

    work: Callable[[], Any]
    amount: float  # FLOPs or bytes of one call
    check: Callable[[], tuple[float, float]] | None = None
    detail: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Budgeted:
    """What a row may take: `rate` is the best of its group and precision so far, `call_s` the
    longest one call may take.
    """

    rate: float | None
    call_s: float

    @property
    def most(self) -> float | None:
        """FLOPs or bytes of a call; None where nothing is known of the rate."""
        return None if self.rate is None else self.rate * self.call_s


@dataclass(frozen=True)
class Row:
    """`make` takes the memory that the row needs, and may raise LacksError. An amount of bytes is
    not called.
    """

    group: Group
    name: str
    precision: str | None
    unit: Unit
    make: Callable[[Budgeted], Made]
    # why the device has no such thing, where that is known before it is tried
    lacks: str | None = None
    like: str = ""  # rows of a group and a precision that are alike are about equally fast
    together: bool = False  # all ranks call it at once, equally often


class Ceilings(Protocol):
    """What a framework can show of a device. Made with its Framework object, which has joined all
    ranks.
    """

    def rows(self, quick: bool) -> Iterator[Row]: ...

    def agree(self, value: float) -> float:
        """The largest of what all ranks say."""

    def release(self) -> None:
        """Give back memory that the last row took."""
