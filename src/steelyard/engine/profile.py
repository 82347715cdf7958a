"""A profiled stretch of work: activities of a device, and how its time divides among them."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol

Kind = Literal["matmul", "attention", "other", "copy", "communication", "bubble"]
# At any instant one activity has the time: what computes before what moves data. So communication
# counts where it is exposed.
PRIORITY: tuple[Kind, ...] = ("matmul", "attention", "other", "copy", "communication", "bubble")


@dataclass(frozen=True)
class Activity:
    """A kernel on a device, or an operator on a CPU. `lane` is what it cannot overlap in: a stream,
    a thread. Activities of one lane may be nested; the innermost has the time. `size_bytes`: the
    tensors that its call names, each once."""

    name: str
    kind: Kind
    begin_s: float
    end_s: float
    lane: str
    size_bytes: int | None = None


@dataclass(frozen=True)
class Kernel:
    """All calls of one name. `time_s` is what the device did nothing of higher priority in."""

    name: str
    kind: Kind
    calls: int
    time_s: float
    size_bytes: int | None


class Profiler(Protocol):
    """Watches the device between `start` and `stop`; the device is idle at both."""

    def start(self) -> None: ...

    def stop(self, trace: Path | None) -> list[Activity]:
        """What it saw; the whole trace is left in a file where one is named (Chrome's format,
        gzip).
        """


@dataclass(frozen=True)
class _Segment:
    begin_s: float
    end_s: float
    owner: int  # the number of an activity


def divide(activities: Sequence[Activity]) -> list[Kernel]:
    """The time in which anything ran, each instant given to one activity; largest first."""
    lanes: dict[str, list[int]] = {}
    for number, one in enumerate(activities):
        lanes.setdefault(one.lane, []).append(number)
    segments = [
        segment for numbers in lanes.values() for segment in _innermost(activities, numbers)
    ]
    time_s: defaultdict[tuple[str, Kind], float] = defaultdict(float)
    for owner, spent_s in _exclusive(activities, segments):
        time_s[_key(activities[owner])] += spent_s
    calls = Counter(map(_key, activities))
    sizes: dict[tuple[str, Kind], int | None] = {}
    for one in activities:
        before = sizes.get(_key(one), 0)
        sizes[_key(one)] = (
            None if before is None or one.size_bytes is None else before + one.size_bytes
        )
    found = [
        Kernel(name, kind, calls[name, kind], time_s[name, kind], sizes[name, kind])
        for name, kind in calls
    ]
    return sorted(found, key=lambda one: (-one.time_s, one.name))


def _key(one: Activity) -> tuple[str, Kind]:
    return one.name, one.kind


def _innermost(activities: Sequence[Activity], numbers: list[int]) -> Iterator[_Segment]:
    """The activities of a lane cut into pieces that do not overlap: at every instant the one that
    began last.
    """
    numbers = sorted(numbers, key=lambda n: (activities[n].begin_s, -activities[n].end_s))
    stack: list[int] = []
    at_s = 0.0

    def until(time_s: float) -> Iterator[_Segment]:
        nonlocal at_s
        while stack:
            end_s = min(activities[stack[-1]].end_s, time_s)
            if end_s > at_s:
                yield _Segment(at_s, end_s, stack[-1])
                at_s = end_s
            if activities[stack[-1]].end_s > time_s:
                return
            stack.pop()

    for number in numbers:
        yield from until(activities[number].begin_s)
        at_s = max(at_s, activities[number].begin_s)
        stack.append(number)
    yield from until(float("inf"))


def _exclusive(
    activities: Sequence[Activity], segments: list[_Segment]
) -> Iterator[tuple[int, float]]:
    """Every instant to the segment of highest priority among all lanes."""
    rank = {kind: place for place, kind in enumerate(PRIORITY)}
    segments = sorted(segments, key=lambda one: one.begin_s)
    edges = sorted({edge for one in segments for edge in (one.begin_s, one.end_s)})
    active: list[tuple[int, float, int]] = []  # priority, end, owner
    coming = 0
    for begin_s, end_s in pairwise(edges):
        while coming < len(segments) and segments[coming].begin_s <= begin_s:
            one = segments[coming]
            heappush(active, (rank[activities[one.owner].kind], one.end_s, one.owner))
            coming += 1
        while active and active[0][1] <= begin_s:
            heappop(active)
        if active:
            yield active[0][2], end_s - begin_s
