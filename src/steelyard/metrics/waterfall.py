"""Where the time of a step goes, from the datasheet's peak down to what was measured: one row after
the other, and together they are the whole time.

The rows come from a profiled stretch (`--explain`), in which every instant of the device's time
belongs to one activity. The stretch is compared with the measured time of the same amount of work.
If the stretch is faster, the difference is a row of its own. If it is slower, because the profiler
costs time in every operator or the machine is busier by now, no time of the pass is missing: the
shares are then those of the stretch, and the page says so. Without a stretch the samples show less:
what matmuls would take at their measured rate, and the phases that the engine marked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import fsum

from steelyard.metrics import rates, spans
from steelyard.plan import flops
from steelyard.record.profile import KernelFacts, Profile
from steelyard.record.record import Record

# that samples have beside compute
PHASES = ("data", "meet", "exchange", "evaluate", "checkpoint", "score")
AGREE = 0.02  # how far a stretch may be from the measured pass, as a share of it
NEAR = 0.01  # how much longer it may take before shares are those of the stretch


@dataclass(frozen=True)
class Row:
    """`name` is a key of the catalogue of words, which says what it is and what to try."""

    name: str
    time_s: float
    share: float  # of `whole_s` of the waterfall


@dataclass(frozen=True)
class Waterfall:
    """The time of one rank: its steps, the measured time of the same amount of work, and the rows,
    which add up to `whole_s` within 1 %. `profile` is None if there are only samples."""

    rank: int
    steps: int
    measured_s: float
    rows: tuple[Row, ...]
    profile: Profile | None
    bandwidth_bytes_per_s: float | None

    @property
    def kernels(self) -> tuple[KernelFacts, ...]:
        """Those that are neither matmuls nor attention, largest first."""
        every = self.profile.kernels if self.profile else []
        return tuple(one for one in every if one.kind not in ("matmul", "attention"))

    @property
    def whole_s(self) -> float:
        """The time that shares are of: the measured time, or that of a stretch that was
        more than 1 % slower."""
        return _whole_s(self.profile, self.measured_s)

    @property
    def impossible(self) -> bool:
        """Whether a row is negative: the FLOPs at the datasheet's peak take longer than all kernels
        did."""
        return any(row.time_s < 0 for row in self.rows)

    @property
    def agrees(self) -> bool:
        """Whether the stretch is like what was measured."""
        return (
            self.profile is None
            or abs(self.profile.wall_s - self.measured_s) <= AGREE * self.measured_s
        )


@dataclass(frozen=True)
class _Stretch:
    """What rows are made of, in seconds."""

    profile: Profile
    kinds: dict[str, float]
    ideal_matmul_s: float | None  # at the datasheet's peak
    ideal_attention_s: float | None
    again: float  # share of matmuls and attention that is computed again to save memory

    def of(self, kind: str) -> float:
        return self.kinds.get(kind, 0.0)

    @property
    def whole_s(self) -> float:
        return _stretch_s(self.profile)

    @property
    def waited_s(self) -> float:
        """Time in which the device did nothing."""
        return max(0.0, self.profile.wall_s - fsum(self.kinds.values()))

    @property
    def data_s(self) -> float:
        """What of that the device waited for its inputs; copies of them are activities."""
        return min(self.waited_s, max(0.0, self.profile.data_s - self.of("copy")))

    def beyond(self, kind: str, ideal_s: float | None) -> float:
        return self.of(kind) * (1 - self.again) - (ideal_s or 0.0)


# In the order of the waterfall.
ROWS: tuple[tuple[str, Callable[[_Stretch], float]], ...] = (
    ("peak", lambda one: (one.ideal_matmul_s or 0.0) + (one.ideal_attention_s or 0.0)),
    ("matmul", lambda one: one.beyond("matmul", one.ideal_matmul_s)),
    ("attention", lambda one: one.beyond("attention", one.ideal_attention_s)),
    ("other", lambda one: one.of("other")),
    ("copy", lambda one: one.of("copy")),
    ("communication", lambda one: one.of("communication")),
    ("bubble", lambda one: one.of("bubble")),
    ("data", lambda one: one.data_s),
    ("host", lambda one: one.waited_s - one.data_s),
    ("recompute", lambda one: one.again * (one.of("matmul") + one.of("attention"))),
)

# Kernels are recognized by name. If FLOPs at the peak take longer than the kernels of their kind,
# other kernels compute a part of them: the rows that cannot be separated become one.
MERGED = (("products", ("matmul", "attention")), ("kernels", ("matmul", "attention", "other")))
# all of their time, where nothing is known to be below
WITHOUT_PEAK = {"matmul": "matmuls", "attention": "attentions"}


def waterfalls(record: Record) -> list[Waterfall]:
    """One a profiled rank, else one of the samples; none where nothing was measured."""
    made = [_profiled(record, profile) for profile in record.profile] or [_from_samples(record)]
    return [found for found in made if found is not None]


def _profiled(record: Record, profile: Profile) -> Waterfall | None:
    measured_s = _measured_s(record, profile)
    if not measured_s:
        return None
    stretch = _stretch(record, profile)
    known = {} if stretch.ideal_matmul_s is not None else WITHOUT_PEAK
    times = _merged([(name, of(stretch)) for name, of in ROWS])
    times = [(known.get(name, name), time_s) for name, time_s in times]
    times.append(("unexplained", max(0.0, measured_s - stretch.whole_s)))
    return _waterfall(record, profile.rank, profile.steps, measured_s, times, profile)


def _merged(times: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Merge as few of the rows of kernels as needed for none of them to be negative; all of them if
    none suffices."""
    out = times
    for name, parts in MERGED:
        if all(time_s >= 0 for _, time_s in out):
            return out
        merged = (name, fsum(time_s for part, time_s in times if part in parts))
        place = next(i for i, (part, _) in enumerate(times) if part in parts)
        rest = [row for row in times if row[0] not in parts]
        out = [*rest[:place], merged, *rest[place:]]
    return out


def _from_samples(record: Record) -> Waterfall | None:
    """Of the slowest rank. What the engine did not separate is one row."""
    span, forwards = spans.span(record), record.task.kind_row.forwards
    if (
        span is None
        or not span.wall_s
        or not span.counts.get("tokens")
        or record.clock == "reported"
    ):
        return None
    steps = span.steps.get(span.slowest, [])
    work = (
        flops.work(record.question.model, span.counts, "causal", forwards) or 0
    ) / spans.devices(record)
    peak, achieved = rates.datasheet_peak(record).value, rates.achievable(record).value
    ideal_s = work / peak if peak else 0.0
    products_s = work / achieved if achieved else ideal_s
    phases = {name: fsum(one.phases.get(name, 0.0) for one in steps) for name in PHASES}
    computed_s = span.wall_s - fsum(phases.values())
    if products_s <= computed_s:
        times = [
            ("peak", ideal_s),
            ("rate", products_s - ideal_s),
            *phases.items(),
            ("rest", computed_s - products_s),
        ]
    else:  # the rate was measured while the device was slower than in the pass
        times = [("peak", ideal_s), *phases.items(), ("together", computed_s - ideal_s)]
    return _waterfall(record, span.slowest, len(steps), span.wall_s, times, None)


def _waterfall(
    record: Record,
    rank: int,
    steps: int,
    measured_s: float,
    times: list[tuple[str, float]],
    profile: Profile | None,
) -> Waterfall:
    whole_s = _whole_s(profile, measured_s)
    rows = tuple(Row(name, time_s, time_s / whole_s) for name, time_s in times if time_s)
    peak = record.environment.hardware.peak
    return Waterfall(
        rank, steps, measured_s, rows, profile, peak.bandwidth_bytes_per_s if peak else None
    )


def _whole_s(profile: Profile | None, measured_s: float) -> float:
    stretch_s = 0.0 if profile is None else _stretch_s(profile)
    return stretch_s if stretch_s > (1 + NEAR) * measured_s else measured_s


def _stretch_s(profile: Profile) -> float:
    """The time of a stretch. Older records also have the activities between its end and that of the
    profiler."""
    return max(profile.wall_s, fsum(one.time_s for one in profile.kernels))


def _measured_s(record: Record, profile: Profile) -> float | None:
    """The time of the profiled work at the rate of the measured pass."""
    span, forwards = spans.span(record), record.task.kind_row.forwards
    if span is None or not profile.counts.get("tokens") or not span.counts.get("tokens"):
        return None
    model = record.question.model
    whole, part = (
        flops.work(model, counts, "causal", forwards) for counts in (span.counts, profile.counts)
    )
    if not whole or not part:
        return None
    # a replica computes one of as many parts at the same time
    return span.wall_s * part * record.plan.dp / whole


def _stretch(record: Record, profile: Profile) -> _Stretch:
    question, plan = record.question, record.plan
    kinds: dict[str, float] = {}
    for one in profile.kernels:
        kinds[one.kind] = kinds.get(one.kind, 0.0) + one.time_s
    forwards = record.task.kind_row.forwards
    whole = flops.work(question.model, profile.counts, "causal", forwards) or 0
    attention = forwards * flops.attention(question.model, profile.counts)
    peak = rates.datasheet_peak(record).value
    ranks = plan.tp * plan.pp  # that hold one model, each a part
    ideal = [None if not peak else part / ranks / peak for part in (whole - attention, attention)]
    return _Stretch(profile, kinds, ideal[0], ideal[1], _again(record, profile, whole))


def _again(record: Record, profile: Profile, whole: int) -> float:
    """The share of a step's products that are a second forward of the layers. What `selective`
    computes again is the engine's own choice, and stays where it is."""
    if not record.task.kind_row.trains or record.tune.recompute != "full":
        return 0.0
    second = flops.causal(record.question.model, {**profile.counts, "logits": 0})
    return second / (whole + second)
