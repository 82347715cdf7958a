"""Check whether other processes used the host's CPU cores while a run was measured.

Load averages count waiting threads, the run's own among them, so CPU time is compared instead: what
the cores did, less what the run's own processes did, is what others took. `validity.py` applies the
rule to a record; `steelyard check` uses the same limits before a run.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from steelyard import accelerators
from steelyard.metrics.declared_hardware import is_hardware_declared
from steelyard.metrics.passes import find_rate_span
from steelyard.metrics.result import Finding, make_check, make_note
from steelyard.record.record import Record, Value
from steelyard.record.run_facts import CpuLoad
from steelyard.words import Message, MessageValues


@dataclass(frozen=True)
class ContentionLimits:
    """Limits on the share (0 to 1) of the run's CPU cores that other processes take: above
    `note_above` a note is made, above `invalid_above` the run is invalid. `find_contention_limits`
    chooses between two: lower ones if the CPU itself is the device, higher ones else.
    """

    note_above: float
    invalid_above: float


# If the CPU is the device, the rate falls by the share that others take: 3 % is about what cases
# allow their interval, and 10 % is another result. Services of an idle host take 1 %.
CPU_IS_DEVICE_LIMITS = ContentionLimits(note_above=0.03, invalid_above=0.10)
# If another device computes, a rank needs about one core to launch its kernels and some to read
# data. It waits once few cores are left; before that, others only cost it cache.
CPU_SERVES_DEVICE_LIMITS = ContentionLimits(note_above=0.25, invalid_above=0.75)

# The least share of the run's own CPU time that the cores' busy time must show; a host that shows
# less does not count CPU time properly.
MIN_COUNTED_SHARE = 0.9


@dataclass(frozen=True)
class ContentionShare:
    """How much of the CPU cores that the run may use other processes took; from
    `measure_contention`.

    `value` is the share (0 to 1) over `time_s` seconds between two readings. A value of None is
    unknown; `why`, a message, then says why, and is None otherwise.
    """

    value: float | None
    time_s: float = 0.0
    why: Message | None = None


def find_contention_limits(accelerator: str | None) -> ContentionLimits:
    """Return the limits on others' share of the cores for an accelerator by name:
    `CPU_IS_DEVICE_LIMITS` (note above 3 %, invalid above 10 %) if the CPU itself is the device,
    else `CPU_SERVES_DEVICE_LIMITS` (25 % and 75 %), also for an unknown name and None.
    """
    row = accelerators.load_accelerators().get(accelerator or "")
    return CPU_IS_DEVICE_LIMITS if row is not None and row.is_host else CPU_SERVES_DEVICE_LIMITS


def measure_contention(load: CpuLoad, begin_s: float, end_s: float) -> ContentionShare:
    """Return the share (0 to 1) of the run's cores that other processes took in a time range.

    The range, in seconds on the timeline of the readings, is widened to the last reading before it
    and the first after it. Others' time is the cores' busy time less the run's own, less what fits
    on cores that a quota keeps from the run; or, if more, the CPU time of the quota's control group
    beyond the run's own. The value is None, with the reason, if a reading is missing on either
    side, or if the host counts less than 90 % of the CPU time that the run itself used.
    """
    before_index, after_index = bisect_right(load.t_s, begin_s) - 1, bisect_left(load.t_s, end_s)
    if before_index < 0 or after_index >= len(load.t_s):
        return ContentionShare(None, why=Message("busy.no_reading"))
    time_s = load.t_s[after_index] - load.t_s[before_index]
    busy_s, own_s = (
        column[after_index] - column[before_index] for column in (load.busy_s, load.own_s)
    )
    if time_s <= 0 or busy_s < MIN_COUNTED_SHARE * own_s:
        return ContentionShare(None, time_s, Message("busy.not_counted"))
    # Others may use the cores that a quota keeps from the run before they take any of the run's.
    spare_s = (load.allowed - load.cores) * time_s
    others_s = max(0.0, busy_s - own_s - spare_s)
    group_begin_s, group_end_s = (
        (load.group_s[before_index], load.group_s[after_index]) if load.group_s else (None, None)
    )
    if group_begin_s is not None and group_end_s is not None:
        others_s = max(others_s, group_end_s - group_begin_s - own_s)
    # rounding of the ticks of many cores may add up to more than 1
    return ContentionShare(min(1.0, others_s / (load.cores * time_s)), time_s)


def _measure_hosts(record: Record) -> Iterator[tuple[str, CpuLoad, ContentionShare]]:
    """Yield (host name, its CPU readings, share that others took) for each host, from the first
    begin to the last end of its ranks in the span that rates are taken over.

    Hosts without CPU readings, or without a rank in the span, are left out.
    """
    rate_span = find_rate_span(record)
    for host in record.hosts:
        windows = [
            rate_span.bounds[rank]
            for rank in host.ranks
            if rate_span is not None and rank in rate_span.bounds
        ]
        if host.load is not None and windows:
            begin_s, end_s = min(begin for begin, _ in windows), max(end for _, end in windows)
            yield host.name, host.load, measure_contention(host.load, begin_s, end_s)


def is_busy(record: Record) -> bool:
    """Return whether on any host other processes are known to have taken a larger share of the
    run's cores than `invalid_above` of its accelerator, in a run of any size; False if it is
    unknown.
    """
    max_share = find_contention_limits(record.environment.hardware.accelerator).invalid_above
    return any(
        taken.value is not None and taken.value > max_share
        for _, _, taken in _measure_hosts(record)
    )


def is_quiet(record: Record) -> bool:
    """Return whether on every host other processes are known to have taken no larger share of the
    run's cores than `note_above` of its accelerator; False if it is unknown for one.
    """
    max_share = find_contention_limits(record.environment.hardware.accelerator).note_above
    shares = [taken.value for _, _, taken in _measure_hosts(record)]
    return len(shares) == len(record.hosts) > 0 and all(
        share is not None and share <= max_share for share in shares
    )


def check_contention(record: Record, metrics: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: yield for each host a check `quiet` (reason `busy`) that others took at most
    the share `invalid_above` of the run's cores, over the span that rates are taken over; with a
    note if it is above `note_above`.

    If the share is unknown, only a note. Size smoke, which measures nothing, gets notes but no
    check. Nothing if the hardware is only declared: its server may run beside the client, which has
    limits of its own. `metrics` is not used.
    """
    if is_hardware_declared(record):
        return
    contention_limits = find_contention_limits(record.environment.hardware.accelerator)
    for host_name, load, taken in _measure_hosts(record):
        if taken.value is None:
            why = taken.why or Message("busy.not_counted")
            yield make_note(Message("note.busy_unknown", {"host": host_name, "why": why}))
            continue
        message_values: MessageValues = {
            "host": host_name,
            "share": taken.value,
            "cores": load.cores,
            "time": taken.time_s,
        }
        taken_message = Message("busy.taken", message_values)
        contention_note = (
            Message("note.busy", {"taken": taken_message, "least": contention_limits.note_above})
            if taken.value > contention_limits.note_above
            else None
        )
        if record.case.size != "smoke":
            check_values: MessageValues = {
                "taken": taken_message,
                "most": contention_limits.invalid_above,
            }
            yield make_check(
                "quiet",
                taken.value <= contention_limits.invalid_above,
                "busy",
                "check.quiet",
                check_values,
                contention_note,
            )
        elif contention_note is not None:
            yield make_note(contention_note)
