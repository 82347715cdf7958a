"""Select and sum what a record's passes measured: samples, counts, times, and the span that rates
are taken over.

Formulas and rules build on this module. Times are seconds; `pass_name` is one of the passes in the
glossary, such as `infer` or `train`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# sum() adds floats differently from Python 3.12 on, and a record must verify everywhere
from math import fsum

from steelyard import plugins
from steelyard.metrics import formulas_1, stats
from steelyard.metrics.declared_hardware import count_declared_devices
from steelyard.plan import degrees
from steelyard.record.record import PassFacts, Record, Sample
from steelyard.words import Message

PHASES = ("data", "meet", "compute", "exchange", "score", "evaluate", "checkpoint")
OTHER_PHASE = "other"  # time in no phase: launch gaps, and what an engine does not mark


@dataclass(frozen=True)
class RateSlices:
    """Consecutive slices of a span, from which the interval of its rates follows: the `work` that
    was done in each by name of a count, and `time_s`, by the same names, the seconds that it took,
    or whatever else the work is measured by (in an open loop the work that was offered).
    """

    work: dict[str, tuple[float, ...]]
    time_s: dict[str, tuple[float, ...]]

    @property
    def count(self) -> int:
        """The number of slices."""
        return max(map(len, self.work.values()), default=0)

    def estimate_interval(self, rate: float, count_name: str) -> tuple[float, float] | None:
        """Return the 95 % interval of a rate of this count (`stats.estimate_rate_interval`); None
        if the slices are too few for one.
        """
        return stats.estimate_rate_interval(
            rate, self.work.get(count_name, ()), self.time_s.get(count_name, ())
        )


@dataclass(frozen=True)
class RateSpan:
    """The part of a run over which rates, FLOPs and energy are computed: the whole headline pass in
    scoring, its steady window (steps after warm-up) in training, the window of its requests in
    generation.

    `counts` (tokens, samples, logits, ... by name) are summed over replicas; `wall_s` in seconds is
    that of `slowest_rank`. `compute_s` is None if the engine does not separate compute time.
    `bounds` are (begin, end) by rank in seconds from the start of the run, `steps` the samples that
    counted work, by rank. `note` is a message that describes a steady window; None for a whole
    pass. `computed` are the counts that FLOPs follow from, where they are not `counts` (None);
    empty if they are unknown. `slices` are what the interval of a rate follows from, where it is
    not `steps` (None).
    """

    counts: dict[str, int]
    wall_s: float
    compute_s: float | None
    bounds: dict[int, tuple[float, float]]  # begin and end in seconds, by rank
    steps: dict[int, list[Sample]]  # working steps by rank
    slowest_rank: int  # the rank with the longest wall time
    note: Message | None = None
    computed: dict[str, int] | None = None
    slices: RateSlices | None = None


def find_headline_pass(record: Record) -> str | None:
    """Return the name of the pass that rates and quality come from: the first of `Kind.headline`
    that ran (`train` in training; `infer`, else `val`, in scoring); None if none of these ran.
    """
    passes_run = {window.pass_name for window in record.passes}
    return next((name for name in record.task.kind_row.headline if name in passes_run), None)


def count_devices(record: Record) -> int:
    """Return the number of devices of the run's plan, on all nodes; of a server that was not
    started here, the number that its user declares.
    """
    return count_declared_devices(record) or record.plan.world


def select_windows(record: Record, pass_name: str) -> list[PassFacts]:
    """Return the time windows of a pass, one for each rank that ran it; empty if none did."""
    return [window for window in record.passes if window.pass_name == pass_name]


def select_samples(record: Record, pass_name: str) -> list[Sample]:
    """Return the samples (measured steps) of a pass, of all ranks, in the order of the record."""
    return [sample for sample in record.samples if sample.pass_name == pass_name]


def group_working_steps(record: Record, pass_name: str) -> dict[int, list[Sample]]:
    """Return the samples of a pass that counted work (their `counts` are not empty), in lists by
    rank, in the order of the record; ranks without any are left out.

    Other samples only evaluate, write a checkpoint or read answers back.
    """
    return stats.group_by(
        (sample for sample in select_samples(record, pass_name) if sample.counts),
        lambda sample: sample.rank,
    )


def sum_counts(record: Record, pass_name: str) -> dict[str, int]:
    """Return the counts of a pass (tokens, samples, logits, padded, ...) summed over the samples of
    the first rank of each replica, because the other ranks of a replica count the same work; empty
    if there are none.
    """
    return _sum_sample_counts(record, select_samples(record, pass_name))


def _sum_sample_counts(record: Record, selected: list[Sample]) -> dict[str, int]:
    """Return the counts of these samples by name (tokens, samples, ...), summed over those of the
    first rank of each replica; other samples are skipped.

    Ranks that hold one model together, as a tensor-parallel group or as pipeline stages, count the
    same work.
    """
    counts = Counter[str]()
    for sample in selected:
        placement = degrees.find_position(record.plan, sample.rank)
        if placement.tp == placement.pp == 0:
            counts.update(sample.counts)
    return dict(counts)


def wall_s(record: Record, pass_name: str) -> float | None:
    """Return the wall time of a pass in seconds, of the slowest rank; None if no rank ran it."""
    return max((window.wall_s for window in select_windows(record, pass_name)), default=None)


def step_compute_s(sample: Sample) -> float | None:
    """Return the compute time of a step in seconds: phases `compute` plus `exchange`, from inputs
    on the device to the last kernel.

    None if the engine does not mark `compute`.
    """
    compute_phase_s = sample.phases.get("compute")
    return None if compute_phase_s is None else compute_phase_s + sample.phases.get("exchange", 0.0)


def compute_s(record: Record, pass_name: str) -> float | None:
    """Return the compute time of a pass in seconds (`step_compute_s`): summed over each rank's
    working steps, of the rank with the longest.

    None if the engine does not mark `compute` in every step, or there are no working steps.
    """
    by_rank = _list_compute_times(group_working_steps(record, pass_name).values())
    return None if by_rank is None else max(map(fsum, by_rank), default=None)


def _list_compute_times(groups: Iterable[Sequence[Sample]]) -> list[list[float]] | None:
    """Return the compute time in seconds of each step (`step_compute_s`), in the same groups and
    order; None if it is unknown for any step. A group is the steps of one rank, or one step of all
    ranks.
    """
    times_by_group = [list(map(step_compute_s, steps)) for steps in groups]
    known = [[time_s for time_s in times if time_s is not None] for times in times_by_group]
    return known if list(map(len, known)) == list(map(len, times_by_group)) else None


def find_rate_span(record: Record) -> RateSpan | None:
    """Return the span that rates are taken over: the whole headline pass, its steady window if the
    kind of work has one (`Kind.steady`: training), or what the function that the kind names
    (`Kind.span`: generation) finds.

    None if no headline pass ran, training has no working step, or that function finds none.
    """
    pass_name = find_headline_pass(record)
    if pass_name is None:
        return None
    if record.task.kind_row.span:
        span: RateSpan | None = plugins.load_reference(record.task.kind_row.span)(record, pass_name)
        return span
    return (
        _make_steady_span(record, pass_name)
        if record.task.kind_row.steady
        else _make_whole_span(record, pass_name)
    )


def _make_whole_span(record: Record, pass_name: str) -> RateSpan:
    """Return the span of the whole pass: `wall_s` and `slowest_rank` are those of the rank with the
    longest wall time, `bounds` each rank's own window, `note` None. Raises ValueError if no rank
    ran the pass.
    """
    pass_windows = select_windows(record, pass_name)
    slowest = max(pass_windows, key=lambda window: window.wall_s)
    bounds = {
        window.rank: (window.start_s, window.start_s + window.wall_s) for window in pass_windows
    }
    counts, compute = sum_counts(record, pass_name), compute_s(record, pass_name)
    return RateSpan(
        counts,
        slowest.wall_s,
        compute,
        bounds,
        group_working_steps(record, pass_name),
        slowest.rank,
    )


def _make_steady_span(record: Record, pass_name: str) -> RateSpan | None:
    """Return the span of the steady window: from the first steady step to the last step that every
    rank finished; None if there is no step.

    Time of evaluations and checkpoints between these steps is included. The first steady step is
    found from the slowest rank's time in each step, from formulas version 2 on also from its
    tokens. `bounds` lacks ranks that have no window of the pass. If times were reported by a
    program (clock `reported`), rank 0's bounds hold for all ranks.
    """
    steps_by_rank = group_working_steps(record, pass_name)
    count = min(map(len, steps_by_rank.values()), default=0)
    if not count:
        return None
    times = [
        max(steps[i].end_s - steps[i].start_s for steps in steps_by_rank.values())
        for i in range(count)
    ]
    if record.formulas is None:
        first_step, method = formulas_1.find_steady_start_v1(times)
    else:
        tokens = [
            _sum_sample_counts(record, [steps[i] for steps in steps_by_rank.values()]).get(
                "tokens", 0
            )
            for i in range(count)
        ]
        first_step, method = stats.find_steady_start(times, tokens)
    window_steps = {rank: steps[first_step:count] for rank, steps in steps_by_rank.items()}
    wall_by_rank = {
        rank: steps[-1].end_s - steps[0].start_s for rank, steps in window_steps.items()
    }
    slowest = max(wall_by_rank, key=lambda rank: wall_by_rank[rank])
    pass_start_s = {window.rank: window.start_s for window in select_windows(record, pass_name)}
    bounds = {
        r: (pass_start_s[r] + s[0].start_s, pass_start_s[r] + s[-1].end_s)
        for r, s in window_steps.items()
        if r in pass_start_s
    }
    if record.clock == "reported" and 0 in bounds:  # one process reports for all ranks
        bounds = {facts.rank: bounds[0] for facts in record.ranks}
    counts = _sum_sample_counts(
        record, [sample for steps in window_steps.values() for sample in steps]
    )
    note = Message("steady.window", {"first": first_step, "last": count - 1, "how": method})
    return RateSpan(
        counts,
        wall_by_rank[slowest],
        _sum_compute_by_step(window_steps),
        bounds,
        window_steps,
        slowest,
        note,
    )


def _sum_compute_by_step(window_steps: dict[int, list[Sample]]) -> float | None:
    """Return the sum over steps of the slowest rank's compute time in seconds, because ranks wait
    for one another in every step; None if it is unknown in one step.

    `window_steps` has, by rank, the steps of the steady window, equally many for each rank;
    ValueError if not.
    """
    by_step = _list_compute_times(zip(*window_steps.values(), strict=True))
    return None if by_step is None else fsum(map(max, by_step))


def phases_per_step(record: Record) -> dict[str, float]:
    """Return the mean seconds of a step by phase (data, meet, compute, exchange, ...), on the
    slowest rank of the span that rates are taken over; they add up to the span's wall time over its
    working steps, unless the phases alone are longer.

    Phases are in the order of a step, then `other` for time in no phase (at least 0). Phases of
    other samples in the span, such as evaluations, are divided among all working steps. Empty if
    there is no span or no step.
    """
    rate_span, name = find_rate_span(record), find_headline_pass(record)
    steps = rate_span.steps.get(rate_span.slowest_rank, []) if rate_span is not None else []
    if rate_span is None or name is None or not steps:
        return {}
    rank_samples = [
        sample for sample in select_samples(record, name) if sample.rank == rate_span.slowest_rank
    ]
    if record.task.kind_row.steady:
        rank_samples = [
            sample
            for sample in rank_samples
            if steps[0].start_s <= sample.start_s and sample.end_s <= steps[-1].end_s
        ]
    names = sort_phases({phase for sample in rank_samples for phase in sample.phases})
    out = {
        name: fsum(sample.phases.get(name, 0.0) for sample in rank_samples) / len(steps)
        for name in names
    }
    other_s = rate_span.wall_s / len(steps) - fsum(out.values())
    return out | {OTHER_PHASE: max(0.0, other_s)}


def tokens_per_step(record: Record) -> float | None:
    """Return the mean number of tokens in a working step of the span that rates are taken over, all
    replicas together; None if there is no span, step or token. Step times can be compared only
    between equal step sizes.
    """
    rate_span = find_rate_span(record)
    steps = rate_span.steps.get(rate_span.slowest_rank, []) if rate_span is not None else []
    return (
        rate_span.counts["tokens"] / len(steps)
        if rate_span is not None and steps and rate_span.counts.get("tokens")
        else None
    )


def sort_phases(names: Iterable[str]) -> list[str]:
    """Return the phases sorted in the order of a step; unknown ones follow alphabetically, and
    `other` is last.
    """
    return sorted(
        names,
        key=lambda name: (
            PHASES.index(name) if name in PHASES else len(PHASES),
            name == OTHER_PHASE,
            name,
        ),
    )
