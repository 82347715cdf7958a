"""Formulas of the metric table that only training has: its three rates, losses, gradient norm,
predicted memory.

They read the pass `train`. Each takes a record and returns a `Result`: a value, or None with the
reason.
"""

from dataclasses import asdict
from math import fsum
from statistics import fmean

from steelyard.metrics import stats
from steelyard.metrics.result import GIB, Result, absent, work_name
from steelyard.metrics.spans import samples, span, total, wall_s, working
from steelyard.models.shapes import LlamaModel
from steelyard.plan import memory
from steelyard.record.record import Record
from steelyard.words import Message

PASS = "train"
ASIDE = ("evaluate", "checkpoint")  # phases of the pass in which nothing is trained


def _rate(record: Record, time_s: float | None) -> Result:
    """Return all work of the pass (tokens or samples, all replicas) over `time_s`; absent if there
    is no work or no positive time.
    """
    done = total(record, PASS).get(work_name(record))
    return Result(done / time_s) if done and time_s and time_s > 0 else absent(PASS)


def p_whole(record: Record) -> Result:
    """Return tokens or samples per second over the wall time of the whole pass, including
    evaluations, checkpoints and data waits.
    """
    return _rate(record, wall_s(record, PASS))


def p_train(record: Record) -> Result:
    """Return tokens or samples per second over the wall time of the whole pass without evaluations
    and checkpoints.
    """
    time_s = wall_s(record, PASS)
    return _rate(record, None if time_s is None else time_s - _aside_s(record))


def _aside_s(record: Record) -> float:
    """Return the seconds of the pass spent on evaluations and checkpoints, on the rank that spent
    most; 0 if none did.
    """
    by_rank = stats.grouped(samples(record, PASS), lambda sample: sample.rank)
    sums = (
        fsum(sample.phases.get(name, 0.0) for sample in own for name in ASIDE)
        for own in by_rank.values()
    )
    return max(sums, default=0.0)


def p_core(record: Record) -> Result:
    """Return tokens or samples per second of compute time, in the steady window; None if the engine
    does not separate compute time.
    """
    found = span(record)
    if found is None:
        return absent(PASS)
    if found.compute_s is None:
        return Result(None, Message("metric.no_compute"))
    done = found.counts.get(work_name(record))
    return Result(done / found.compute_s, found.note) if done and found.compute_s else absent(PASS)


def values(record: Record, name: str) -> list[float | None]:
    """Return a value of every working step, such as "loss" or "grad_norm", in step order.

    It is read from the lowest rank, since all ranks have the same. None stands for a number that is
    not finite. In a resumed run losses (only these) begin with those of the run that it resumed.
    Empty if no step was made.
    """
    ranks = working(record, PASS)
    earlier = record.restarts[-1].losses if record.restarts and name == "loss" and ranks else []
    return (
        [*earlier] + [step.values[name] for step in ranks[min(ranks)] if name in step.values]
        if ranks
        else []
    )


def _mean_loss(chosen: list[float | None]) -> Result:
    """Return the mean of the losses; without a value if there are none, or one is not finite."""
    finite = [value for value in chosen if value is not None]
    if not chosen:
        return Result(None, Message("metric.no_loss"))
    return (
        Result(fmean(finite))
        if len(finite) == len(chosen)
        else Result(None, Message("metric.loss_not_finite"))
    )


def _tenth(losses: list[float | None]) -> int:
    """Return a tenth of the number of losses, at least 1."""
    return max(1, len(losses) // 10)


def loss(record: Record) -> Result:
    """Return the mean training loss (nats) of the last tenth of the steps, at least one; None if
    one of them is not finite.
    """
    losses = values(record, "loss")
    return _mean_loss(losses[-_tenth(losses) :])


def loss_first(record: Record) -> Result:
    """Return the mean training loss (nats) of the first tenth of the steps, at least one; None if
    one of them is not finite.
    """
    losses = values(record, "loss")
    return _mean_loss(losses[: _tenth(losses)])


def grad_norm(record: Record) -> Result:
    """Return the gradient norm of the last step, before clipping; None if there is none or it is
    not finite.
    """
    norms = values(record, "grad_norm")
    if not norms:
        return Result(None, Message("metric.no_norm"))
    return Result(norms[-1], None if norms[-1] is not None else Message("metric.norm_not_finite"))


def mem_predicted(record: Record) -> Result:
    """Return the GiB that the fullest pipeline stage must hold, predicted from shapes, precision,
    tune and plan; the note lists its parts.

    None for models other than llama, and if the layers cannot be divided into that many stages.
    """
    question = record.question
    if not isinstance(question.model, LlamaModel) or question.train is None:
        return Result(None, Message("metric.not_predicted", {"family": question.model.family}))
    # older records do not say; they were predicted without it
    lean = record.engine.details.block == "fused"
    units = record.engine.details.exchanged == "units"
    try:
        stages = memory.predict(
            question.model,
            question.precision,
            record.tune,
            record.plan,
            question.train,
            lean,
            units,
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
