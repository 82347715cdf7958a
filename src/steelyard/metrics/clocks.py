"""Check that the clocks of a run agree, so that a manipulated or broken clock does not go
unnoticed.

A clock that a preloaded library slows down makes every rate too high, and nothing else in a record
would show it; the kernel's uptime text and the device's events are beyond that library's reach.
`validity.py` applies both rules to a record.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import fsum

from steelyard.metrics import readings
from steelyard.metrics.result import Finding, failed, judged, note
from steelyard.metrics.spans import samples, span, windows
from steelyard.record.record import Record, Sample, Value
from steelyard.words import Message, Values

# share; clocks of one machine drift apart by less than a tenth of this, even when a time server
# corrects them
APART = 0.005
SLACK_S = 0.005  # two clocks are not read at the same instant
# /proc/uptime counts hundredths of a second; a device's clock is read from the host
COARSE_S = {"uptime": 0.02, "device": 0.02}

PASS = "train"  # the only pass that external programs report
REPORTED_APART = 0.02
READ_SLACK_S = 0.1  # on a busy host a line is read some time after it was printed
ROUNDED_S = 5e-5  # programs report tenths of a millisecond; half of one


@dataclass(frozen=True)
class Pair:
    """Two measurements of one time interval.

    `excess_s` is by how many seconds they differ beyond what is allowed; at most 0 if they agree.
    `values` fill the message of the check.
    """

    excess_s: float
    values: Values


def _pair(where: Message, name: str, host_s: float, other_s: float) -> Pair:
    """Compare the host's clock with another clock over the same interval.

    0.5 % and 5 ms may differ, plus the resolution of a coarse clock (`clock_name`).
    """
    allowed = APART * max(host_s, other_s) + SLACK_S + COARSE_S.get(name, 0.0)
    told: Values = {"where": where, "name": name, "host": host_s, "other": other_s, "most": APART}
    return Pair(abs(host_s - other_s) - allowed, told)


def agree(record: Record, values: dict[str, Value]) -> list[Finding]:
    """Validity rule: check that every clock a worker read counted the same seconds from its start
    to its end, and the device's clock in every pass.

    Returns one check `clocks_agree` (reason `clock`) on the worst pair, which names libraries
    preloaded into the run if it failed; nothing for older records, which have no such clocks.
    """
    pairs = [*_of_ranks(record), *_of_passes(record)]
    if not pairs:
        return []  # older records have no such clocks
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
    """Validity rule: compare step times that an external program reported of itself with our own
    measurements.

    Returns nothing unless the record's clock is `reported`. Else check `reported`, on the times
    between the program's output lines as they were read, over the whole pass and over the steady
    window; a check for each device that it was in use; and a note.
    """
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
    """Compare the summed step times that a program reported with the times at which its output
    lines were read; None if there are no steps after the first.

    The first step is left out, because no line comes before it. 2 %, 0.1 s and rounding of each
    reported time may differ.
    """
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
    """Yield a check for each train window and each device that counts its processes: at least one
    process was seen on it during the pass.
    """
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
    """Yield each rank's monotonic clock paired with each other clock that the rank read; nothing
    for ranks without a monotonic clock.
    """
    for rank in record.ranks:
        told = rank.clocks or {}
        for name, passed_s in told.items():
            if name != "monotonic" and "monotonic" in told:
                yield _pair(
                    Message("at.rank", {"rank": rank.rank}), name, told["monotonic"], passed_s
                )


def _of_passes(record: Record) -> Iterator[Pair]:
    """Yield the wall time of each pass on each rank paired with the device's own time for it, if
    there is one.
    """
    for window in record.passes:
        if window.device_s is not None:
            where = Message("at.pass", {"pass": window.pass_name, "rank": window.rank})
            yield _pair(where, "device", window.wall_s, window.device_s)


def _preloaded(record: Record) -> str:
    """Return LD_PRELOAD and LD_AUDIT of the run as "NAME=value, ..."; empty if neither was set."""
    variables = record.environment.software.variables
    return ", ".join(
        f"{name}={variables[name]}" for name in ("LD_PRELOAD", "LD_AUDIT") if name in variables
    )
