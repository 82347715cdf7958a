"""Device activities of a profiled stretch of steps, and the division of the device's time among
them.

A framework's `Profiler` returns activities; run/explain.py passes them to `divide_device_time` and
writes the result to the record (`--explain`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol

ActivityKind = Literal["matmul", "attention", "other", "copy", "communication", "bubble"]
# At any instant one activity has the time: what computes before what moves data. So communication
# counts where it is exposed.
PRIORITY: tuple[ActivityKind, ...] = (
    "matmul",
    "attention",
    "other",
    "copy",
    "communication",
    "bubble",
)


@dataclass(frozen=True)
class Activity:
    """One kernel on a device, or one operator on a CPU, as a profiler saw it: `name`, `kind`
    (matmul, attention, other, copy, communication or bubble), `begin_s` and `end_s` in seconds on
    the trace's clock.

    `lane` is the stream or thread it ran in: activities of one lane do not run at the same time,
    but may be nested, and then the innermost counts. `size_bytes` is the size of all tensors that
    the call names, each once; None if unknown.
    """

    name: str
    kind: ActivityKind
    begin_s: float
    end_s: float
    lane: str
    size_bytes: int | None = None


@dataclass(frozen=True)
class KernelTotal:
    """All activities of one `name` and `kind` taken together; made by `divide_device_time`. `calls`
    is their number, `time_s` the seconds of the device's time that went to them: those in which
    nothing of higher priority ran. `size_bytes` is the sum of the sizes of tensors over calls, None
    if it is unknown for one of them.
    """

    name: str
    kind: ActivityKind
    calls: int
    time_s: float
    size_bytes: int | None


class Profiler(Protocol):
    """A framework's profiler, which records what the device does between `start()` and
    `stop(trace)` (a protocol); `stop` returns a list of `Activity` and, if `trace` is a path,
    writes the whole trace there. The caller has synchronized the device before both. Made by
    `Framework.profiler`, for one recording.
    """

    def start(self) -> None:
        """Begin to record what the device does; called once, before `stop`."""

    def stop(self, trace: Path | None) -> list[Activity]:
        """End recording and return the activities. If `trace` is a path, also write the whole trace
        there, in Chrome's format, gzipped.
        """


@dataclass(frozen=True)
class _Segment:
    """A stretch of time, from `begin_s` to `end_s` in seconds on the trace's clock, in which one
    activity was the innermost of its lane; `owner` is the index of that activity in the list of
    all.
    """

    begin_s: float
    end_s: float
    owner: int  # the number of an activity


def divide_device_time(activities: Sequence[Activity]) -> list[KernelTotal]:
    """Divide the time in which the device did anything among its kernels, and return one total per
    name and kind, longest first, then by name.

    Each instant goes to one activity: within a lane to the innermost, among lanes to the kind that
    comes first in `PRIORITY`. Times in which nothing ran are not in the result; a kernel that
    others covered all the time is, with 0 s.
    """
    lanes: dict[str, list[int]] = {}
    for number, activity in enumerate(activities):
        lanes.setdefault(activity.lane, []).append(number)
    segments = [
        segment
        for numbers in lanes.values()
        for segment in _cut_lane_into_segments(activities, numbers)
    ]
    time_s: defaultdict[tuple[str, ActivityKind], float] = defaultdict(float)
    for owner, spent_s in _divide_by_priority(activities, segments):
        time_s[_name_and_kind(activities[owner])] += spent_s
    calls = Counter(map(_name_and_kind, activities))
    sizes: dict[tuple[str, ActivityKind], int | None] = {}
    for activity in activities:
        size_so_far = sizes.get(_name_and_kind(activity), 0)
        sizes[_name_and_kind(activity)] = (
            None
            if size_so_far is None or activity.size_bytes is None
            else size_so_far + activity.size_bytes
        )
    totals = [
        KernelTotal(name, kind, calls[name, kind], time_s[name, kind], sizes[name, kind])
        for name, kind in calls
    ]
    return sorted(totals, key=lambda activity: (-activity.time_s, activity.name))


def _name_and_kind(activity: Activity) -> tuple[str, ActivityKind]:
    """Return (name, kind) of an activity, by which calls are added up."""
    return activity.name, activity.kind


def _cut_lane_into_segments(
    activities: Sequence[Activity], indices: list[int]
) -> Iterator[_Segment]:
    """Cut the activities of one lane (`indices` into `activities`) into segments that do not
    overlap, yielded in the order of time. At each instant the owner is the activity that began
    last; of two that begin together, the shorter one.
    """
    indices = sorted(indices, key=lambda n: (activities[n].begin_s, -activities[n].end_s))
    stack: list[int] = []
    cut_until_s = 0.0

    def pop_segments_until(time_s: float) -> Iterator[_Segment]:
        """Yield the segments up to `time_s` of the activities on the stack, innermost first, and
        pop those that have ended by then. Moves `cut_until_s`, the time up to which the lane is
        cut.
        """
        nonlocal cut_until_s
        while stack:
            end_s = min(activities[stack[-1]].end_s, time_s)
            if end_s > cut_until_s:
                yield _Segment(cut_until_s, end_s, stack[-1])
                cut_until_s = end_s
            if activities[stack[-1]].end_s > time_s:
                return
            stack.pop()

    for index in indices:
        yield from pop_segments_until(activities[index].begin_s)
        cut_until_s = max(cut_until_s, activities[index].begin_s)
        stack.append(index)
    yield from pop_segments_until(float("inf"))


def _divide_by_priority(
    activities: Sequence[Activity], segments: list[_Segment]
) -> Iterator[tuple[int, float]]:
    """Yield (index of an activity, seconds) so that each instant is given once: to the segment
    whose kind comes first in `PRIORITY` among all lanes, of equal kinds to the one that ends first.
    Instants without any segment are left out; an activity may come several times. `segments` may be
    in any order; their owners are indices into `activities`.
    """
    priority = {kind: position for position, kind in enumerate(PRIORITY)}
    segments = sorted(segments, key=lambda segment: segment.begin_s)
    edges = sorted({edge for segment in segments for edge in (segment.begin_s, segment.end_s)})
    active: list[tuple[int, float, int]] = []  # priority, end, owner
    next_segment = 0
    for begin_s, end_s in pairwise(edges):
        while next_segment < len(segments) and segments[next_segment].begin_s <= begin_s:
            segment = segments[next_segment]
            heappush(
                active, (priority[activities[segment.owner].kind], segment.end_s, segment.owner)
            )
            next_segment += 1
        while active and active[0][1] <= begin_s:
            heappop(active)
        if active:
            yield active[0][2], end_s - begin_s
