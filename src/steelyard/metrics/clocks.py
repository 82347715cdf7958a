"""Whether the clocks of a run agree. A clock that a preloaded library slows down makes every rate too high, and nothing else
in a record would show it; the kernel's own text and the device's events are not that library's to change."""

from collections.abc import Iterator
from dataclasses import dataclass

from steelyard.metrics.result import Finding
from steelyard.record.record import Check, Record, Value

APART = 0.005  # clocks of one machine drift apart by less than a tenth of this, corrections by a time server included
SLACK_S = 0.005  # two readings are not made at once
COARSE_S = {"uptime": 0.02, "device": 0.02}  # the kernel's text counts hundredths; a device is read from the host


@dataclass(frozen=True)
class Pair:
    """Two clocks over one time."""

    where: str
    name: str
    host_s: float
    other_s: float

    @property
    def excess_s(self) -> float:
        """What they are apart beyond what is allowed."""
        allowed = APART * max(self.host_s, self.other_s) + SLACK_S + COARSE_S.get(self.name, 0.0)
        return abs(self.host_s - self.other_s) - allowed


def agree(record: Record, values: dict[str, Value]) -> list[Finding]:
    """Every clock that a worker read counted the same seconds from its start to its end, and the device's in every pass."""
    pairs = [*_of_ranks(record), *_of_passes(record)]
    if not pairs:
        return []  # an older record
    worst = max(pairs, key=lambda pair: pair.excess_s)
    ok = worst.excess_s <= 0
    if ok:
        text = f"{len(pairs)} comparisons of clocks agree within {APART:.1%}"
    else:
        text = (
            f"{worst.where}: while the monotonic clock counted {worst.host_s:.3f} s, clock {worst.name} counted"
            f" {worst.other_s:.3f} s; at most {APART:.1%} apart is allowed{_preloaded(record)}"
        )
    return [(Check(name="clocks_agree", ok=ok, detail=text), "clock", None)]


def _of_ranks(record: Record) -> Iterator[Pair]:
    for rank in record.ranks:
        told = rank.clocks or {}
        for name, passed_s in told.items():
            if name != "monotonic" and "monotonic" in told:
                yield Pair(f"rank {rank.rank}", name, told["monotonic"], passed_s)


def _of_passes(record: Record) -> Iterator[Pair]:
    for window in record.passes:
        if window.device_s is not None:
            yield Pair(f"{window.pass_name} on rank {window.rank}", "device", window.wall_s, window.device_s)


def _preloaded(record: Record) -> str:
    variables = record.environment.software.variables
    names = [f"{name} is {variables[name]}" for name in ("LD_PRELOAD", "LD_AUDIT") if name in variables]
    return f" ({', '.join(names)})" if names else ""
