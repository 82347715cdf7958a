"""Whether other processes used the host's cores while a run was measured.

Load averages count waiting threads, the run's own among them. CPU time does not lie that way: what
the cores did, less what the run's own processes did, is what others took.
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
    """Shares of the cores that a run may use, taken by others: what is worth a note, and what makes
    a run invalid.
    """

    note: float
    most: float


# Where the cores are the device, what others take is missing from the rate, one for one: 3 % is
# about what cases allow their interval, and 10 % is another result. Services of an idle host take 1
# %.
CORES_ARE_THE_DEVICE = Bounds(note=0.03, most=0.10)
# Where another device works, a rank needs about one core to launch its kernels and some to read
# data. It waits once few cores are left; before that, others cost it nothing but caches.
CORES_SERVE_A_DEVICE = Bounds(note=0.25, most=0.75)

# of the run's own time that the cores must show at least: a host that shows less does not count
COUNTED = 0.9


@dataclass(frozen=True)
class Share:
    """What others took of the cores that the run may use, between two readings; None with the
    reason, where nobody knows.
    """

    value: float | None
    time_s: float = 0.0
    why: Message | None = None


def bounds_of(accelerator: str | None) -> Bounds:
    """Return the bounds for an accelerator by its row; one that no row is known of has devices of
    its own."""
    row = accelerators.table().get(accelerator or "")
    return CORES_ARE_THE_DEVICE if row is not None and row.is_host else CORES_SERVE_A_DEVICE


def share(load: Load, begin_s: float, end_s: float) -> Share:
    """Between the last reading before the window and the first after it: a window may be shorter
    than a second.
    """
    first, last = bisect_right(load.t_s, begin_s) - 1, bisect_left(load.t_s, end_s)
    if first < 0 or last >= len(load.t_s):
        return Share(None, why=Message("busy.no_reading"))
    time_s = load.t_s[last] - load.t_s[first]
    busy_s, own_s = (column[last] - column[first] for column in (load.busy_s, load.own_s))
    if time_s <= 0 or busy_s < COUNTED * own_s:
        return Share(None, time_s, Message("busy.not_counted"))
    # Others may have the cores that a quota keeps from the run, before they take any of its own.
    spare_s = (load.allowed - load.cores) * time_s
    others_s = max(0.0, busy_s - own_s - spare_s)
    begun, ended = (load.group_s[first], load.group_s[last]) if load.group_s else (None, None)
    if begun is not None and ended is not None:
        others_s = max(others_s, ended - begun - own_s)
    # ticks of many cores may add up to more
    return Share(min(1.0, others_s / (load.cores * time_s)), time_s)


def _shares(record: Record) -> Iterator[tuple[str, Load, Share]]:
    """Yield the name, the load and the share that others took of every host that counts CPU time,
    over the part of the run that rates are taken from."""
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
    """Return whether others are known to have taken more of a host's cores than a full run allows,
    whatever the size of this run."""
    most = bounds_of(record.environment.hardware.accelerator).most
    return any(taken.value is not None and taken.value > most for _, _, taken in _shares(record))


def quiet(record: Record, values: dict[str, Value]) -> Iterator[Finding]:
    """Judge every host, over what rates are taken from. Size smoke, which measures nothing, gets
    the note alone."""
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
