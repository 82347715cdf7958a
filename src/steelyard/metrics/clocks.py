"""Whether the clocks of a run agree. A clock that a preloaded library slows down makes every rate
too high, and nothing else in a record would show it; the kernel's own text and the device's events
are not that library's to change."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import fsum

from steelyard.metrics import readings
from steelyard.metrics.result import Finding, failed, judged, note
from steelyard.metrics.spans import samples, span, windows
from steelyard.record.record import Record, Sample, Value
from steelyard.words import Message, Values

# clocks of one machine drift apart by less than a tenth of this, corrections by a time server
# included
APART = 0.005
SLACK_S = 0.005  # two readings are not made at once
# the kernel's text counts hundredths; a device is read from the host
COARSE_S = {"uptime": 0.02, "device": 0.02}

PASS = "train"  # the only one that programs report
REPORTED_APART = 0.02
READ_SLACK_S = 0.1  # a line is read when its reader gets a turn on a busy host
ROUNDED_S = 5e-5  # half of a tenth of a millisecond, in which they are told


@dataclass(frozen=True)
class Pair:
    """Two measurements of one time, what they are apart beyond what is allowed, and what a check
    says of them."""

    excess_s: float
    values: Values


def _pair(where: Message, name: str, host_s: float, other_s: float) -> Pair:
    """Compare two clocks."""
    allowed = APART * max(host_s, other_s) + SLACK_S + COARSE_S.get(name, 0.0)
    told: Values = {"where": where, "name": name, "host": host_s, "other": other_s, "most": APART}
    return Pair(abs(host_s - other_s) - allowed, told)


def agree(record: Record, values: dict[str, Value]) -> list[Finding]:
    """Every clock that a worker read counted the same seconds from its start to its end, and the
    device's in every pass.
    """
    pairs = [*_of_ranks(record), *_of_passes(record)]
    if not pairs:
        return []  # an older record
    worst = max(pairs, key=lambda pair: pair.excess_s)
    if worst.excess_s <= 0:
        return [
            judged(
                "clocks_agree",
                True,
                "clock",
                "check.clocks_agree",
                {"count": len(pairs), "most": APART},
            )
        ]
    preloaded = _preloaded(record)
    if preloaded:
        told: Values = {**worst.values, "preloaded": preloaded}
        return [failed("clocks_agree", "clock", "check.clocks_agree_preloaded", told)]
    return [failed("clocks_agree", "clock", "check.clocks_agree", worst.values)]


def reported(record: Record, values: dict[str, Value]) -> list[Finding]:
    """Times that a program told of itself, beside ours: between its lines as they were read, over
    all of the pass and over what rates are taken from; and beside the readings of its devices. The
    first line has no line before it."""
    if record.clock != "reported":
        return []
    found = span(record)
    parts = {
        "reported.all": samples(record, PASS),
        "reported.steady": found.steps.get(found.slowest, []) if found else [],
    }
    pairs = [
        pair
        for name, steps in parts.items()
        if (pair := _between(Message(name), steps)) is not None
    ]
    worst = max(pairs, key=lambda pair: pair.excess_s, default=None)
    if worst is None:
        told = judged("reported", True, "reported", "check.reported_few", {})
    else:
        told = judged("reported", worst.excess_s <= 0, "reported", "check.reported", worst.values)
    return [told, *_in_use(record), note(Message("note.reported"))]


def _between(where: Message, steps: list[Sample]) -> Pair | None:
    """Compare the times that a program told with those of its lines, from the end of a step to that
    of the last. Each time that is told is rounded."""
    rest = [step for step in steps if step.step > 0]
    if not rest:
        return None
    told_s = fsum(step.end_s - step.start_s for step in rest)
    seen_s = fsum(step.host_end_s - step.host_start_s for step in rest)
    allowed = REPORTED_APART * seen_s + READ_SLACK_S + len(rest) * ROUNDED_S
    values: Values = {
        "where": where,
        "steps": len(rest),
        "told": told_s,
        "seen": seen_s,
        "most": REPORTED_APART,
    }
    return Pair(abs(told_s - seen_s) - allowed, values)


def _in_use(record: Record) -> Iterator[Finding]:
    """A device that counts its processes shows one while steps are told of it."""
    for window in windows(record, PASS):
        for series in record.telemetry:
            counts = readings.window(
                series, window.start_s, window.start_s + window.wall_s
            ).columns.processes
            known = [count for count in counts if count is not None]
            if known:
                told: Values = {"device": series.device, "most": max(known)}
                yield judged(
                    "reported_in_use", max(known) > 0, "reported", "check.reported_in_use", told
                )


def _of_ranks(record: Record) -> Iterator[Pair]:
    for rank in record.ranks:
        told = rank.clocks or {}
        for name, passed_s in told.items():
            if name != "monotonic" and "monotonic" in told:
                yield _pair(
                    Message("at.rank", {"rank": rank.rank}), name, told["monotonic"], passed_s
                )


def _of_passes(record: Record) -> Iterator[Pair]:
    for window in record.passes:
        if window.device_s is not None:
            where = Message("at.pass", {"pass": window.pass_name, "rank": window.rank})
            yield _pair(where, "device", window.wall_s, window.device_s)


def _preloaded(record: Record) -> str:
    variables = record.environment.software.variables
    return ", ".join(
        f"{name}={variables[name]}" for name in ("LD_PRELOAD", "LD_AUDIT") if name in variables
    )
