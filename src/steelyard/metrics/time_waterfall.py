"""Divide the time of a step into rows, from the datasheet's peak down to what was measured;
together they are the whole time.

The rows come from profiled steps after the pass (`--explain`), in which every instant of the
device's time belongs to one activity. The profile is compared with the measured time of the same
amount of work. If the profile is faster, the difference is a row of its own. If it is slower,
because the profiler costs time in every operator or the machine has become busier, the shares are
those of the profile, and the page says so. Without a profile the samples show less: what matmuls
would take at their measured rate, and the phases that the engine marked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import fsum

from steelyard.metrics import passes, rates
from steelyard.metrics.declared_hardware import is_hardware_declared
from steelyard.plan import flops
from steelyard.record.profile_facts import KernelFacts, Profile
from steelyard.record.record import Record

# phases of samples beside compute
NON_COMPUTE_PHASES = ("data", "meet", "exchange", "evaluate", "checkpoint", "score")
MAX_DIFFERENCE = 0.02  # of a profile's time from the measured time, as a share of it
MAX_SLOWER = 0.01  # share; if the profile is slower by more, rows are shares of the profile


@dataclass(frozen=True)
class WaterfallRow:
    """One row of a waterfall: an activity or loss, its seconds (`time_s`), which may be negative,
    and `share`, its part of the waterfall's `whole_s`. `name`, such as "matmul" or "data", is a key
    of the catalogue of words, which explains it and what to try.
    """

    name: str
    time_s: float
    share: float  # of the waterfall's `whole_s`


@dataclass(frozen=True)
class Waterfall:
    """The time of one rank, divided into `rows` (`WaterfallRow`) that add up to `whole_s` within 1
    %; made by `make_waterfalls`.

    `steps` is the number of steps it covers, `measured_s` the time that the same work took as
    measured. `profile` is None if the rows come from samples. `bandwidth_bytes_per_s` is the
    datasheet's memory bandwidth; None if unknown. Properties: `kernels` (profiled ones but matmuls
    and attention), `whole_s` (what shares are relative to: `measured_s`, or the profile's time if
    over 1 % longer), `is_impossible` (a row is negative), `is_close` (profile and measured time
    agree within 2 %).
    """

    rank: int
    steps: int
    measured_s: float
    rows: tuple[WaterfallRow, ...]
    profile: Profile | None
    bandwidth_bytes_per_s: float | None

    @property
    def kernels(self) -> tuple[KernelFacts, ...]:
        """Return the profiled kernels of a waterfall that are neither matmuls nor attention, in the
        order of the profile (largest first); empty without a profile.
        """
        all_kernels = self.profile.kernels if self.profile else []
        return tuple(kernel for kernel in all_kernels if kernel.kind not in ("matmul", "attention"))

    @property
    def whole_s(self) -> float:
        """Return the seconds that the shares of a waterfall are relative to: the measured time, or
        that of the profile if it was more than 1 % longer.
        """
        return _whole_s(self.profile, self.measured_s)

    @property
    def is_impossible(self) -> bool:
        """Return whether a row of the waterfall is negative: the FLOPs at the datasheet's peak take
        longer than all kernels did.
        """
        return any(row.time_s < 0 for row in self.rows)

    @property
    def is_close(self) -> bool:
        """Return whether the profile's wall time is within 2 % of the measured time; True without a
        profile.
        """
        return (
            self.profile is None
            or abs(self.profile.wall_s - self.measured_s) <= MAX_DIFFERENCE * self.measured_s
        )


@dataclass(frozen=True)
class _ProfileTimes:
    """The times of a profile that the rows of a waterfall are computed from, in seconds; made by
    `_make_profile_times`.

    `kinds` has the kernels' time by kind (matmul, attention, other, copy, communication, bubble).
    `ideal_matmul_s` and `ideal_attention_s` are those of one rank's model FLOPs at the datasheet's
    peak; None if no peak is known. `recomputed_share` (0 to 1) is the part of matmul and attention
    time that recomputes activations to save memory. Properties and methods: `kind_s(kind)`,
    `whole_s` of the profiled steps, `waited_s` (the device did nothing), `data_s` (of that, for
    inputs), `above_ideal_s(kind, ideal_s)`.
    """

    profile: Profile
    kinds: dict[str, float]
    ideal_matmul_s: float | None  # seconds at the datasheet's peak
    ideal_attention_s: float | None
    recomputed_share: float  # of matmul and attention time

    def kind_s(self, kind: str) -> float:
        """Return the profile's kernel time of a kind (such as "matmul") in seconds; 0 if there is
        none.
        """
        return self.kinds.get(kind, 0.0)

    @property
    def whole_s(self) -> float:
        """Return the time of the profiled steps in seconds."""
        return _profile_s(self.profile)

    @property
    def waited_s(self) -> float:
        """Return the seconds in which the device did nothing."""
        return max(0.0, self.profile.wall_s - fsum(self.kinds.values()))

    @property
    def data_s(self) -> float:
        """Return the seconds, within `waited_s`, in which the device waited for its inputs: the
        profile's time for data less that of copies, which count as activity.
        """
        return min(self.waited_s, max(0.0, self.profile.data_s - self.kind_s("copy")))

    def above_ideal_s(self, kind: str, ideal_s: float | None) -> float:
        """Return the kernel time of a kind without recomputation, less its ideal time, in seconds;
        may be negative.
        """
        return self.kind_s(kind) * (1 - self.recomputed_share) - (ideal_s or 0.0)


# In the order of the waterfall.
PROFILE_ROWS: tuple[tuple[str, Callable[[_ProfileTimes], float]], ...] = (
    ("peak", lambda one: (one.ideal_matmul_s or 0.0) + (one.ideal_attention_s or 0.0)),
    ("matmul", lambda one: one.above_ideal_s("matmul", one.ideal_matmul_s)),
    ("attention", lambda one: one.above_ideal_s("attention", one.ideal_attention_s)),
    ("other", lambda one: one.kind_s("other")),
    ("copy", lambda one: one.kind_s("copy")),
    ("communication", lambda one: one.kind_s("communication")),
    ("bubble", lambda one: one.kind_s("bubble")),
    ("data", lambda one: one.data_s),
    ("host", lambda one: one.waited_s - one.data_s),
    (
        "recompute",
        lambda one: one.recomputed_share * (one.kind_s("matmul") + one.kind_s("attention")),
    ),
)

# Kernels are recognized by name. If FLOPs at the peak take longer than the kernels of their kind,
# other kernels compute a part of them: the rows that cannot be separated become one.
MERGED_ROWS = (("products", ("matmul", "attention")), ("kernels", ("matmul", "attention", "other")))
# names of rows that hold the whole time of a kind, because no peak is known
NAMES_WITHOUT_PEAK = {"matmul": "matmuls", "attention": "attentions"}


def make_waterfalls(record: Record) -> list[Waterfall]:
    """Return one waterfall for each profiled rank whose measured time is known; for a record
    without profiles one of the slowest rank, from its samples; empty if nothing was measured.
    """
    candidates = [_from_profile(record, profile) for profile in record.profile] or [
        _from_samples(record)
    ]
    return [waterfall for waterfall in candidates if waterfall is not None]


def _from_profile(record: Record, profile: Profile) -> Waterfall | None:
    """Return the waterfall of a profile (of one rank, `--explain`); None if the measured time is
    unknown. That is what the profiled work takes at the rate of the run (`_measured_s`).

    Rows are `PROFILE_ROWS`, in that order; those of 0 s are left out. If one would be negative,
    matmul and attention become one row `products`, or, if that is not enough, these and other one
    row `kernels`, which may stay negative. Without a datasheet peak, unmerged matmul and attention
    rows are of their whole time (`matmuls`, `attentions`). Measured time beyond the profile's is
    row `unexplained`, last.
    """
    measured_s = _measured_s(record, profile)
    if not measured_s:
        return None
    profile_times = _make_profile_times(record, profile)
    new_names = {} if profile_times.ideal_matmul_s is not None else NAMES_WITHOUT_PEAK
    times = _merge_negative_rows([(name, time_of(profile_times)) for name, time_of in PROFILE_ROWS])
    times = [(new_names.get(name, name), time_s) for name, time_s in times]
    times.append(("unexplained", max(0.0, measured_s - profile_times.whole_s)))
    return _make_waterfall(record, profile.rank, profile.steps, measured_s, times, profile)


def _merge_negative_rows(times: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Return the (name, seconds) pairs as they are if none is negative; else with matmul and
    attention as one row `products`, or, if a row is still negative, these and other as one row
    `kernels`, even if that is negative. The merged row stands where the first of its parts was.
    """
    rows = times
    for name, parts in MERGED_ROWS:
        if all(time_s >= 0 for _, time_s in rows):
            return rows
        merged = (name, fsum(time_s for part, time_s in times if part in parts))
        position = next(i for i, (part, _) in enumerate(times) if part in parts)
        others = [row for row in times if row[0] not in parts]
        rows = [*others[:position], merged, *others[position:]]
    return rows


def _from_samples(record: Record) -> Waterfall | None:
    """Return a waterfall of the slowest rank of the span that rates are taken over, from its
    samples.

    Rows are `peak` (causal FLOPs at the datasheet's peak, 0 s if unknown), `rate` (more time at the
    measured matmul rate), each phase but compute, and `rest`. If matmuls at the measured rate would
    take longer than the time outside these phases, `rate` and `rest` are one row `together`, last.
    None if there is no span, no time, no tokens, times that a program reported, hardware that is
    only declared, or requests of which nobody counted what was computed.
    """
    rate_span, forwards = passes.find_rate_span(record), record.task.kind_row.forwards
    is_known = record.clock != "reported" and not is_hardware_declared(record)
    if rate_span is None or not rate_span.wall_s or not is_known:
        return None
    counts = rate_span.counts if rate_span.computed is None else rate_span.computed
    if not counts.get("tokens"):
        return None
    steps = rate_span.steps.get(rate_span.slowest_rank, [])
    flops_per_device = (
        flops.count_flops(record.question.model, counts, "causal", forwards) or 0
    ) / passes.count_devices(record)
    peak, achieved = rates.datasheet_peak(record).value, rates.matmul_rate(record).value
    ideal_s = flops_per_device / peak if peak else 0.0
    products_s = flops_per_device / achieved if achieved else ideal_s
    phases = {
        name: fsum(sample.phases.get(name, 0.0) for sample in steps) for name in NON_COMPUTE_PHASES
    }
    computed_s = rate_span.wall_s - fsum(phases.values())
    if products_s <= computed_s:
        times = [
            ("peak", ideal_s),
            ("rate", products_s - ideal_s),
            *phases.items(),
            ("rest", computed_s - products_s),
        ]
    else:  # the matmul rate was measured while the device was slower than in the pass
        times = [("peak", ideal_s), *phases.items(), ("together", computed_s - ideal_s)]
    return _make_waterfall(
        record, rate_span.slowest_rank, len(steps), rate_span.wall_s, times, None
    )


def _make_waterfall(
    record: Record,
    rank: int,
    steps: int,
    measured_s: float,
    times: list[tuple[str, float]],
    profile: Profile | None,
) -> Waterfall:
    """Return a waterfall of (name, seconds) pairs in this order; rows of 0 s are left out, and
    shares are relative to `_whole_s`. The memory bandwidth comes from the record's datasheet row.
    """
    whole_s = _whole_s(profile, measured_s)
    rows = tuple(WaterfallRow(name, time_s, time_s / whole_s) for name, time_s in times if time_s)
    peak = record.environment.hardware.peak
    return Waterfall(
        rank, steps, measured_s, rows, profile, peak.bandwidth_bytes_per_s if peak else None
    )


def _whole_s(profile: Profile | None, measured_s: float) -> float:
    """Return the seconds that a waterfall's shares are relative to: the measured time, or the
    profile's (`_profile_s`) if that is more than 1 % longer; the measured time without a profile.
    """
    profile_s = 0.0 if profile is None else _profile_s(profile)
    return profile_s if profile_s > (1 + MAX_SLOWER) * measured_s else measured_s


def _profile_s(profile: Profile) -> float:
    """Return the seconds of a profile: its wall time, or the sum of its kernels if that is longer,
    as in older records, which include activity after its end.
    """
    return max(profile.wall_s, fsum(kernel.time_s for kernel in profile.kernels))


def _measured_s(record: Record, profile: Profile) -> float | None:
    """Return the seconds that the profiled work takes at the rate of the span that rates are taken
    over; None if either counted no tokens or FLOPs.

    Work is compared in causal FLOPs. A profile is of one replica, the span of all, so that its
    share is multiplied by DP.
    """
    rate_span, forwards = passes.find_rate_span(record), record.task.kind_row.forwards
    if rate_span is None:
        return None
    span_counts = rate_span.counts if rate_span.computed is None else rate_span.computed
    if not profile.counts.get("tokens") or not span_counts.get("tokens"):
        return None
    model = record.question.model
    whole, part = (
        flops.count_flops(model, counts, "causal", forwards)
        for counts in (span_counts, profile.counts)
    )
    if not whole or not part:
        return None
    # replicas work in parallel, each on one of `dp` parts
    return rate_span.wall_s * part * record.plan.dp / whole


def _make_profile_times(record: Record, profile: Profile) -> _ProfileTimes:
    """Return a profile's kernel seconds summed by kind, the ideal seconds of its matmul and
    attention FLOPs on one rank at the datasheet's peak (None without a peak), and the share that is
    recomputation. FLOPs of a replica are divided evenly over its TP · PP ranks.
    """
    question, plan = record.question, record.plan
    kinds: dict[str, float] = {}
    for kernel in profile.kernels:
        kinds[kernel.kind] = kinds.get(kernel.kind, 0.0) + kernel.time_s
    forwards = record.task.kind_row.forwards
    whole = flops.count_flops(question.model, profile.counts, "causal", forwards) or 0
    attention = forwards * flops.count_attention_flops(question.model, profile.counts)
    peak = rates.datasheet_peak(record).value
    ranks = plan.tp * plan.pp  # that together hold one replica
    ideal = [None if not peak else part / ranks / peak for part in (whole - attention, attention)]
    return _ProfileTimes(
        profile, kinds, ideal[0], ideal[1], _recomputed_share(record, profile, whole)
    )


def _recomputed_share(record: Record, profile: Profile, step_flops: int) -> float:
    """Return the share (0 to 1) of matmul and attention FLOPs that is a second forward of the
    layers, without logits: 0 unless the run trains with recompute "full". `step_flops` are the
    profile's causal FLOPs without it. What "selective" recomputes is the engine's choice and not
    counted.
    """
    if not record.task.kind_row.trains or record.tune.recompute != "full":
        return 0.0
    second_forward = flops.count_causal_flops(
        record.question.model, {**profile.counts, "logits": 0}
    )
    return second_forward / (step_flops + second_forward)
