"""Check that the clocks of a run agree, so that a manipulated or broken clock does not go
unnoticed.

A clock that a preloaded library slows down makes every rate too high, and nothing else in a record
would show it; the kernel's uptime text and the device's events are beyond that library's reach. An
engine that replaces the functions which read clocks in its own process does not reach the node
agent, which times the borders of passes by the rank's messages. `validity.py` applies these rules
to a record.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import fsum

from steelyard.metrics import cpu_contention, device_readings
from steelyard.metrics.passes import find_rate_span, select_samples, select_windows
from steelyard.metrics.result import Finding, make_check, make_failed_check, make_note
from steelyard.record.record import PassFacts, Record, Sample, Value
from steelyard.words import Message, MessageValues

# share; clocks of one machine drift apart by less than a tenth of this, even when a time server
# corrects them
MAX_CLOCK_DIFFERENCE = 0.005
CLOCK_SLACK_S = 0.005  # two clocks are not read at the same instant
# /proc/uptime counts hundredths of a second; a device's clock is read from the host
CLOCK_RESOLUTION_S = {"uptime": 0.02, "device": 0.02}

FIRST_VERSION_WITH_BORDERS = 5  # of the formulas: with passes that the node agent timed too
# Seconds between a reading of the rank's clock and its message, beyond the time in which the agent
# sees it: the rank may lose its core in between. Up to 8 ms were seen on a heavily loaded host.
BORDER_SLACK_S, BUSY_BORDER_SLACK_S = 0.05, 0.5

REPORTED_PASS = "train"  # the only pass that external programs report
MAX_REPORTED_DIFFERENCE = 0.02
READ_SLACK_S = 0.1  # on a busy host a line is read some time after it was printed
REPORTED_ROUNDING_S = 5e-5  # programs report tenths of a millisecond; half of one


@dataclass(frozen=True)
class ClockPair:
    """Two measurements of one time interval, or point in time, by different clocks, compared; made
    by `_compare_clocks`, `_compare_reported` and `_pair_borders`.

    `excess_s` is by how many seconds they differ beyond what is allowed; 0 or negative if they
    agree. `values` fill the template of the check's message: the name of the interval, both times,
    and the allowed difference.
    """

    excess_s: float
    values: MessageValues


def _compare_clocks(
    interval_name: Message, clock_name: str, host_s: float, other_s: float
) -> ClockPair:
    """Return the pair of the host's clock and another clock over the same interval, in seconds, for
    the check's message. `interval_name` says which interval it is.

    Allowed are 0.5 % of the longer time and 5 ms, plus 20 ms for the coarse clocks "uptime" and
    "device" (`clock_name`).
    """
    allowed = (
        MAX_CLOCK_DIFFERENCE * max(host_s, other_s)
        + CLOCK_SLACK_S
        + CLOCK_RESOLUTION_S.get(clock_name, 0.0)
    )
    message_values: MessageValues = {
        "where": interval_name,
        "name": clock_name,
        "host": host_s,
        "other": other_s,
        "most": MAX_CLOCK_DIFFERENCE,
    }
    return ClockPair(abs(host_s - other_s) - allowed, message_values)


def check_clocks_agree(record: Record, metrics: dict[str, Value]) -> list[Finding]:
    """Validity rule: check that every clock a rank read counted the same seconds as its monotonic
    clock from its start to its end, and the device's clock the same as the host's in every pass.

    Returns one check `clocks_agree` (reason `clock`) on the pair that differs most, which names
    LD_PRELOAD and LD_AUDIT if it failed and they were set; empty for older records, which have no
    such clocks. `metrics` is not used.
    """
    pairs = [*_pair_rank_clocks(record), *_pair_pass_clocks(record)]
    if not pairs:
        return []  # older records have no such clocks
    worst = max(pairs, key=lambda pair: pair.excess_s)
    if worst.excess_s <= 0:
        return [
            make_check(
                "clocks_agree",
                True,
                "clock",
                "check.clocks_agree",
                {"count": len(pairs), "most": MAX_CLOCK_DIFFERENCE},
            )
        ]
    preloaded = _list_preloaded(record)
    if preloaded:
        message_values: MessageValues = {**worst.values, "preloaded": preloaded}
        return [
            make_failed_check(
                "clocks_agree", "clock", "check.clocks_agree_preloaded", message_values
            )
        ]
    return [make_failed_check("clocks_agree", "clock", "check.clocks_agree", worst.values)]


def check_borders_agree(record: Record, metrics: dict[str, Value]) -> list[Finding]:
    """Validity rule: check that every pass began and ended when the node agent saw the rank report
    it, from formulas version 5 on.

    Returns one check `borders_agree` (reason `clock`) on the border that differs most beyond what
    is allowed: the time in which the agent saw the message and 50 ms, or 0.5 s if the host was not
    known to be quiet. With a note for the first pass whose borders the agent did not see. Empty for
    older records. `metrics` is not used.
    """
    if record.formulas is None or record.formulas < FIRST_VERSION_WITH_BORDERS:
        return []
    slack_s = BORDER_SLACK_S if cpu_contention.is_quiet(record) else BUSY_BORDER_SLACK_S
    pairs = [pair for window in record.passes for pair in _pair_borders(window, slack_s)]
    unseen = next((window for window in record.passes if window.seen_start_s is None), None)
    findings = [] if unseen is None else [make_note(_name_unseen(unseen))]
    if pairs:
        worst = max(pairs, key=lambda pair: pair.excess_s)
        ok = worst.excess_s <= 0
        values = {"count": len(pairs), **worst.values} if ok else worst.values
        findings.append(make_check("borders_agree", ok, "clock", "check.borders_agree", values))
    return findings


def _name_unseen(window: PassFacts) -> Message:
    """Return the note that the node agent did not see the borders of this pass."""
    return Message("note.borders_unseen", {"pass": window.pass_name, "rank": window.rank})


def _pair_borders(window: PassFacts, slack_s: float) -> Iterator[ClockPair]:
    """Yield begin and end of a pass on a rank's clock, each paired with when the node agent saw it;
    nothing if it did not. They may differ by the time in which the agent saw it and `slack_s`.
    """
    if window.seen_start_s is None or window.seen_end_s is None or window.seen_within_s is None:
        return
    allowed_s = window.seen_within_s + slack_s
    end_s = window.start_s + window.wall_s
    for code, told_s, seen_s in (
        ("border.begin", window.start_s, window.seen_start_s),
        ("border.end", end_s, window.seen_end_s),
    ):
        values: MessageValues = {
            "border": Message(code, {"pass": window.pass_name, "rank": window.rank}),
            "told": told_s,
            "seen": seen_s,
            "most": allowed_s,
        }
        yield ClockPair(abs(told_s - seen_s) - allowed_s, values)


def check_reported_times(record: Record, metrics: dict[str, Value]) -> list[Finding]:
    """Validity rule: compare step times that an external program reported of itself with our own
    measurements; `metrics` is not used.

    Empty unless the record's clock is `reported`. Else check `reported` (reason `reported`), on the
    time between the program's output lines as they were read, over the whole pass and over the
    steady window, the worse of the two (passed if there are too few steps); a check
    `reported_in_use` for each device that counts its processes; and always a note.
    """
    if record.clock != "reported":
        return []
    rate_span = find_rate_span(record)
    parts = {
        "reported.all": select_samples(record, REPORTED_PASS),
        "reported.steady": rate_span.steps.get(rate_span.slowest_rank, []) if rate_span else [],
    }
    pairs = [
        pair
        for name, steps in parts.items()
        if (pair := _compare_reported(Message(name), steps)) is not None
    ]
    worst = max(pairs, key=lambda pair: pair.excess_s, default=None)
    if worst is None:
        finding = make_check("reported", True, "reported", "check.reported_few", {})
    else:
        finding = make_check(
            "reported", worst.excess_s <= 0, "reported", "check.reported", worst.values
        )
    return [finding, *_check_devices_in_use(record), make_note(Message("note.reported"))]


def _compare_reported(part_name: Message, steps: list[Sample]) -> ClockPair | None:
    """Return the pair of the summed step times that a program reported and the summed times between
    its output lines as they were read, for steps of one part of the pass; None if there are no
    steps after step 0.

    Step 0 is left out, because no line comes before it. 2 % of the read time, 0.1 s and 0.05 ms for
    each step may differ.
    """
    later_steps = [step for step in steps if step.step > 0]
    if not later_steps:
        return None
    reported_s = fsum(step.end_s - step.start_s for step in later_steps)
    read_s = fsum(step.host_end_s - step.host_start_s for step in later_steps)
    allowed = (
        MAX_REPORTED_DIFFERENCE * read_s + READ_SLACK_S + len(later_steps) * REPORTED_ROUNDING_S
    )
    values: MessageValues = {
        "where": part_name,
        "steps": len(later_steps),
        "told": reported_s,
        "seen": read_s,
        "most": MAX_REPORTED_DIFFERENCE,
    }
    return ClockPair(abs(reported_s - read_s) - allowed, values)


def _check_devices_in_use(record: Record) -> Iterator[Finding]:
    """Yield, for each rank's window of pass `train` and each device that counts its processes in
    it, a check `reported_in_use` (reason `reported`) that at least one process was seen on it.
    """
    for window in select_windows(record, REPORTED_PASS):
        for series in record.telemetry:
            counts = device_readings.select_readings(
                series, window.start_s, window.start_s + window.wall_s
            ).columns.processes
            known = [count for count in counts if count is not None]
            if known:
                message_values: MessageValues = {"device": series.device, "most": max(known)}
                yield make_check(
                    "reported_in_use",
                    max(known) > 0,
                    "reported",
                    "check.reported_in_use",
                    message_values,
                )


def _pair_rank_clocks(record: Record) -> Iterator[ClockPair]:
    """Yield each rank's monotonic clock paired with each other clock that the rank read; nothing
    for ranks without a monotonic clock.
    """
    for rank in record.ranks:
        clock_times = rank.clocks or {}
        for clock_name, elapsed_s in clock_times.items():
            if clock_name != "monotonic" and "monotonic" in clock_times:
                yield _compare_clocks(
                    Message("at.rank", {"rank": rank.rank}),
                    clock_name,
                    clock_times["monotonic"],
                    elapsed_s,
                )


def _pair_pass_clocks(record: Record) -> Iterator[ClockPair]:
    """Yield the wall time of each pass on each rank paired with the device's own time for it, if
    there is one.
    """
    for window in record.passes:
        if window.device_s is not None:
            interval_name = Message("at.pass", {"pass": window.pass_name, "rank": window.rank})
            yield _compare_clocks(interval_name, "device", window.wall_s, window.device_s)


def _list_preloaded(record: Record) -> str:
    """Return LD_PRELOAD and LD_AUDIT of the run as "NAME=value, ..."; empty if neither was set."""
    variables = record.environment.software.variables
    return ", ".join(
        f"{name}={variables[name]}" for name in ("LD_PRELOAD", "LD_AUDIT") if name in variables
    )
