"""Formulas of the metric table that only training has: its three rates, losses, gradient norm,
predicted memory.

They read the pass `train`. Each takes a record and returns a `Result`: a value, or None with the
reason.
"""

from dataclasses import asdict
from math import fsum
from statistics import fmean

from steelyard.metrics import stats
from steelyard.metrics.passes import (
    find_rate_span,
    group_working_steps,
    select_samples,
    sum_counts,
    wall_s,
)
from steelyard.metrics.result import GIB, Result, make_absent_result, work_name
from steelyard.models.shapes import LlamaModel
from steelyard.plan import memory
from steelyard.record.record import Record
from steelyard.words import Message

TRAINING_PASS = "train"
NON_TRAINING_PHASES = ("evaluate", "checkpoint")  # phases of the pass in which nothing is trained


def _divide_work(record: Record, time_s: float | None) -> Result:
    """Return all work of pass `train` (tokens or samples, all replicas) per second of `time_s`;
    without a value if there is no work or no positive time.
    """
    count = sum_counts(record, TRAINING_PASS).get(work_name(record))
    return (
        Result(count / time_s)
        if count and time_s and time_s > 0
        else make_absent_result(TRAINING_PASS)
    )


def p_whole(record: Record) -> Result:
    """Return tokens or samples per second of all devices, over the wall time of the whole pass
    `train`, including evaluations, checkpoints and data waits; without a value if it did not run or
    counted nothing.
    """
    return _divide_work(record, wall_s(record, TRAINING_PASS))


def p_train(record: Record) -> Result:
    """Return tokens or samples per second of all devices, over the wall time of the whole pass
    `train` less that of evaluations and checkpoints (of the rank that spent most on them); without
    a value if it did not run, counted nothing or no time is left.
    """
    time_s = wall_s(record, TRAINING_PASS)
    return _divide_work(record, None if time_s is None else time_s - _non_training_s(record))


def _non_training_s(record: Record) -> float:
    """Return the seconds of pass `train` in phases `evaluate` and `checkpoint`, on the rank that
    spent most; 0 if there were none.
    """
    by_rank = stats.group_by(select_samples(record, TRAINING_PASS), lambda sample: sample.rank)
    sums = (
        fsum(
            sample.phases.get(name, 0.0) for sample in rank_samples for name in NON_TRAINING_PHASES
        )
        for rank_samples in by_rank.values()
    )
    return max(sums, default=0.0)


def p_core(record: Record) -> Result:
    """Return tokens or samples per second of compute time (phases compute and exchange) of all
    devices, in the steady window; without a value, with the reason, if there is no window or the
    engine does not separate compute time.
    """
    rate_span = find_rate_span(record)
    if rate_span is None:
        return make_absent_result(TRAINING_PASS)
    if rate_span.compute_s is None:
        return Result(None, Message("metric.no_compute"))
    count = rate_span.counts.get(work_name(record))
    return (
        Result(count / rate_span.compute_s, rate_span.note)
        if count and rate_span.compute_s
        else make_absent_result(TRAINING_PASS)
    )


def list_step_values(record: Record, value_name: str) -> list[float | None]:
    """Return a value of every working step of pass `train`, such as "loss" or "grad_norm", in step
    order; steps that lack it are left out.

    It is read from the lowest rank, since all ranks have the same. None stands for a number that is
    not finite. In a resumed run losses (only these) begin with those of the run that it resumed.
    Empty if no step was made.
    """
    steps_by_rank = group_working_steps(record, TRAINING_PASS)
    earlier_losses = (
        record.restarts[-1].losses
        if record.restarts and value_name == "loss" and steps_by_rank
        else []
    )
    return (
        [*earlier_losses]
        + [
            step.values[value_name]
            for step in steps_by_rank[min(steps_by_rank)]
            if value_name in step.values
        ]
        if steps_by_rank
        else []
    )


def _mean_loss(losses: list[float | None]) -> Result:
    """Return the mean of the losses; without a value, with the reason, if there are none, or one is
    None, which stands for a loss that is not finite.
    """
    finite = [value for value in losses if value is not None]
    if not losses:
        return Result(None, Message("metric.no_loss"))
    return (
        Result(fmean(finite))
        if len(finite) == len(losses)
        else Result(None, Message("metric.loss_not_finite"))
    )


def _count_tenth(losses: list[float | None]) -> int:
    """Return a tenth of the number of losses, at least 1."""
    return max(1, len(losses) // 10)


def loss(record: Record) -> Result:
    """Return the mean training loss (nats) of the last tenth of the steps, rounded down, at least
    one; without a value if there are none or one of them is not finite. Steps before a restart
    count.
    """
    losses = list_step_values(record, "loss")
    return _mean_loss(losses[-_count_tenth(losses) :])


def loss_first(record: Record) -> Result:
    """Return the mean training loss (nats) of the first tenth of the steps, rounded down, at least
    one; without a value if there are none or one of them is not finite. Steps before a restart
    count.
    """
    losses = list_step_values(record, "loss")
    return _mean_loss(losses[: _count_tenth(losses)])


def grad_norm(record: Record) -> Result:
    """Return the gradient norm of the last working step, before clipping; without a value, with the
    reason, if no step has one or the last is not finite.
    """
    norms = list_step_values(record, "grad_norm")
    if not norms:
        return Result(None, Message("metric.no_norm"))
    return Result(norms[-1], None if norms[-1] is not None else Message("metric.norm_not_finite"))


def mem_predicted(record: Record) -> Result:
    """Return the GiB that a device of the fullest pipeline stage must hold in training, predicted
    from shapes, precision, tune and plan; the note lists its parts.

    Without a value for models other than Llama's family, cases that do not train, and more stages
    than layers (or than 1024).
    """
    question = record.question
    if not isinstance(question.model, LlamaModel) or question.train is None:
        return Result(None, Message("metric.not_predicted", {"family": question.model.family}))
    # older records do not say; they were predicted without it
    is_fused = record.engine.details.block == "fused"
    has_units = record.engine.details.exchanged == "units"
    try:
        stages = memory.predict_stages(
            question.model,
            question.precision,
            record.tune,
            record.plan,
            question.train,
            is_fused,
            has_units,
        )
    except ValueError:
        return Result(
            None,
            Message(
                "metric.unpredictable", {"stages": record.plan.pp, "layers": question.model.layers}
            ),
        )
    fullest = max(stages, key=lambda stage: stage.total)
    parts = tuple(
        Message(f"part.{name}", {"gib": size / GIB})
        for name, size in asdict(fullest).items()
        if size
    )
    return Result(fullest.total / GIB, Message("metric.predicted", {"parts": parts}))
