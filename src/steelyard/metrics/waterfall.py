"""Where the time of a step goes, from the datasheet's peak down to what was measured: one row after the other, and together
they are the measured time.

The rows come from a profiled stretch (`--explain`), in which every instant of the device's time belongs to one activity. Its
time is set beside that of the measured pass for the same work; what is left between the two is a row of its own. Without a
stretch the samples alone tell less: what matmuls would take at their measured rate, and the phases that the engine marked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import fsum

from steelyard.metrics import rates, spans
from steelyard.plan import flops
from steelyard.record.profile import KernelFacts, Profile
from steelyard.record.record import Record

PHASES = ("data", "meet", "exchange", "evaluate", "checkpoint", "score")  # that samples have beside compute
AGREE = 0.02  # how far a stretch may be from the measured pass, as a share of it


@dataclass(frozen=True)
class Row:
    """`name` is a key of the catalogue of words, which says what it is and what to try."""

    name: str
    time_s: float
    share: float  # of the measured time


@dataclass(frozen=True)
class Waterfall:
    """Of one rank: its steps, the measured time of as much work, and the rows, which add up to it. `profile` is None where only
    samples tell."""

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
    def agrees(self) -> bool:
        """Whether the stretch is like what was measured."""
        return self.profile is None or abs(self.profile.wall_s - self.measured_s) <= AGREE * self.measured_s


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

WITHOUT_PEAK = {"matmul": "matmuls", "attention": "attentions"}  # all of their time, where nothing is known to be below


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
    times = [*((known.get(name, name), of(stretch)) for name, of in ROWS), ("unexplained", measured_s - profile.wall_s)]
    return _waterfall(record, profile.rank, profile.steps, measured_s, times, profile)


def _from_samples(record: Record) -> Waterfall | None:
    """Of the slowest rank. What the engine did not separate is one row."""
    span, kind = spans.span(record), record.question.kind
    if span is None or not span.wall_s or not span.counts.get("tokens") or record.clock == "reported":
        return None
    steps = span.steps.get(span.slowest, [])
    work = (flops.work(record.question.model, span.counts, "causal", kind) or 0) / spans.devices(record)
    peak, achieved = rates.datasheet_peak(record).value, rates.achievable(record).value
    ideal_s = work / peak if peak else 0.0
    products_s = work / achieved if achieved else ideal_s
    phases = {name: fsum(one.phases.get(name, 0.0) for one in steps) for name in PHASES}
    times = [("peak", ideal_s), ("rate", products_s - ideal_s), *phases.items()]
    times.append(("rest", span.wall_s - fsum(time_s for _, time_s in times)))
    return _waterfall(record, span.slowest, len(steps), span.wall_s, times, None)


def _waterfall(
    record: Record, rank: int, steps: int, measured_s: float, times: list[tuple[str, float]], profile: Profile | None
) -> Waterfall:
    rows = tuple(Row(name, time_s, time_s / measured_s) for name, time_s in times if time_s)
    peak = record.environment.hardware.peak
    return Waterfall(rank, steps, measured_s, rows, profile, peak.bandwidth_bytes_per_s if peak else None)


def _measured_s(record: Record, profile: Profile) -> float | None:
    """The time of the profiled work at the rate of the measured pass."""
    span, kind = spans.span(record), record.question.kind
    if span is None or not profile.counts.get("tokens") or not span.counts.get("tokens"):
        return None
    model = record.question.model
    whole, part = (flops.work(model, counts, "causal", kind) for counts in (span.counts, profile.counts))
    if not whole or not part:
        return None
    return span.wall_s * part * record.plan.dp / whole  # a replica computes one of as many parts at the same time


def _stretch(record: Record, profile: Profile) -> _Stretch:
    question, plan = record.question, record.plan
    kinds: dict[str, float] = {}
    for one in profile.kernels:
        kinds[one.kind] = kinds.get(one.kind, 0.0) + one.time_s
    whole = flops.work(question.model, profile.counts, "causal", question.kind) or 0
    attention = flops.FORWARDS[question.kind] * flops.attention(question.model, profile.counts)
    peak = rates.datasheet_peak(record).value
    ranks = plan.tp * plan.pp  # that hold one model, each a part
    ideal = [None if not peak else part / ranks / peak for part in (whole - attention, attention)]
    return _Stretch(profile, kinds, ideal[0], ideal[1], _again(record, profile, whole))


def _again(record: Record, profile: Profile, whole: int) -> float:
    """The share of a step's products that are a second forward of the layers. What `selective` computes again is the engine's
    own choice, and stays where it is."""
    if record.question.kind != "train" or record.tune.recompute != "full":
        return 0.0
    second = flops.causal(record.question.model, {**profile.counts, "logits": 0})
    return second / (whole + second)
