"""Check whether other processes used the host's CPU cores while a run was measured.

Load averages count waiting threads, the run's own among them, so CPU time is compared instead: what
the cores did, less what the run's own processes did, is what others took. `validity.py` applies the
rule to a record; `steelyard check` uses the same limits before a run.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from steelyard import accelerators
from steelyard.metrics.result import Finding, judged, note
from steelyard.metrics.spans import span
from steelyard.record.facts import Load
from steelyard.record.record import Record, Value
from steelyard.words import Message, Values


@dataclass(frozen=True)
class Bounds:
    """Limits on the share (0 to 1) of the run's CPU cores that other processes take: above
    `note_above` a note is made, above `invalid_above` the run is invalid.
    """

    note: float
    most: float


# If the CPU is the device, the rate falls by the share that others take: 3 % is about what cases
# allow their interval, and 10 % is another result. Services of an idle host take 1 %.
CORES_ARE_THE_DEVICE = Bounds(note=0.03, most=0.10)
# If another device computes, a rank needs about one core to launch its kernels and some to read
# data. It waits once few cores are left; before that, others only cost it cache.
CORES_SERVE_A_DEVICE = Bounds(note=0.25, most=0.75)

# The least share of the run's own CPU time that the cores' busy time must show; a host that shows
# less does not count CPU time properly.
COUNTED = 0.9


@dataclass(frozen=True)
class Share:
    """The share (0 to 1) of the cores that the run may use which other processes took, over
    `time_s` seconds between two readings.

    A value of None is unknown; `why` then says why.
    """

    value: float | None
    time_s: float = 0.0
    why: Message | None = None


def bounds_of(accelerator: str | None) -> Bounds:
    """Return the limits for an accelerator by name: strict ones if the CPU itself is the device,
    else wide ones, also for an unknown name and None.
    """
    row = accelerators.table().get(accelerator or "")
    return CORES_ARE_THE_DEVICE if row is not None and row.is_host else CORES_SERVE_A_DEVICE


def share(load: Load, begin_s: float, end_s: float) -> Share:
    """Return the share of the run's cores that other processes took in a time range.

    The range, on the timeline of the readings (seconds), is widened to the last reading before it
    and the first after it. Cores that a quota keeps from the run are free for others; CPU time of
    the quota's control group beyond the run's own counts too. The value is None if a reading is
    missing on either side, or if the host counts less than 90 % of the CPU time that the run itself
    used.
    """
    first, last = bisect_right(load.t_s, begin_s) - 1, bisect_left(load.t_s, end_s)
    if first < 0 or last >= len(load.t_s):
        return Share(None, why=Message("busy.no_reading"))
    time_s = load.t_s[last] - load.t_s[first]
    busy_s, own_s = (column[last] - column[first] for column in (load.busy_s, load.own_s))
    if time_s <= 0 or busy_s < COUNTED * own_s:
        return Share(None, time_s, Message("busy.not_counted"))
    # Others may use the cores that a quota keeps from the run before they take any of the run's.
    spare_s = (load.allowed - load.cores) * time_s
    others_s = max(0.0, busy_s - own_s - spare_s)
    begun, ended = (load.group_s[first], load.group_s[last]) if load.group_s else (None, None)
    if begun is not None and ended is not None:
        others_s = max(others_s, ended - begun - own_s)
    # rounding of the ticks of many cores may add up to more than 1
    return Share(min(1.0, others_s / (load.cores * time_s)), time_s)


def _shares(record: Record) -> Iterator[tuple[str, Load, Share]]:
    """Yield (host name, its CPU load, share that others took) for each host, over the span that
    rates are taken from.

    Hosts without CPU readings, or without a rank in the span, are left out.
    """
    found = span(record)
    for host in record.hosts:
        windows = [
            found.borders[rank]
            for rank in host.ranks
            if found is not None and rank in found.borders
        ]
        if host.load is not None and windows:
            begin_s, end_s = min(begin for begin, _ in windows), max(end for _, end in windows)
            yield host.name, host.load, share(host.load, begin_s, end_s)


def is_busy(record: Record) -> bool:
    """Return whether other processes are known to have taken more of a host's cores than
    `invalid_above`, in a run of any size.
    """
    most = bounds_of(record.environment.hardware.accelerator).most
    return any(taken.value is not None and taken.value > most for _, _, taken in _shares(record))


def quiet(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    """Validity rule: check on each host that others took no more of its cores than allowed, over
    the span that rates are taken from.

    Yields check `quiet` with reason `busy`, a note if the share is worth one, and only a note if it
    is unknown. Size smoke, which measures nothing, gets notes but no check.
    """
    limit = bounds_of(record.environment.hardware.accelerator)
    for name, load, taken in _shares(record):
        if taken.value is None:
            why = taken.why or Message("busy.not_counted")
            yield note(Message("note.busy_unknown", {"host": name, "why": why}))
            continue
        told: Values = {
            "host": name,
            "share": taken.value,
            "cores": load.cores,
            "time": taken.time_s,
        }
        said = Message("busy.taken", told)
        noted = (
            Message("note.busy", {"taken": said, "least": limit.note})
            if taken.value > limit.note
            else None
        )
        if record.case.size != "smoke":
            limits: Values = {"taken": said, "most": limit.most}
            yield judged("quiet", taken.value <= limit.most, "busy", "check.quiet", limits, noted)
        elif noted is not None:
            yield note(noted)
