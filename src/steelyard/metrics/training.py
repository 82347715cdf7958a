"""Formulas that training alone has: its three rates, its losses, and the memory its shapes ask for."""

from collections.abc import Callable
from dataclasses import asdict
from math import fsum

from steelyard.case.case import Tune
from steelyard.case.precision import Precision
from steelyard.case.question import Model, Train
from steelyard.metrics.result import GIB, Known, absent, work_name
from steelyard.metrics.spans import samples, span, total, wall_s, working
from steelyard.plan import memory
from steelyard.record.record import Record

PASS = "train"
ASIDE = ("evaluate", "checkpoint")  # phases of the pass that train nothing


def _rate(record: Record, time_s: float | None) -> Known:
    done = total(record, PASS).get(work_name(record))
    return Known(done / time_s) if done and time_s and time_s > 0 else absent(PASS)


def p_whole(record: Record) -> Known:
    return _rate(record, wall_s(record, PASS))


def p_train(record: Record) -> Known:
    time_s = wall_s(record, PASS)
    return _rate(record, None if time_s is None else time_s - _aside_s(record))


def _aside_s(record: Record) -> float:
    """Time of the pass that was spent on evaluations and checkpoints, on the rank where it was longest."""
    by_rank: dict[int, list[float]] = {}
    for sample in samples(record, PASS):
        by_rank.setdefault(sample.rank, []).extend(sample.phases.get(name, 0.0) for name in ASIDE)
    return max(map(fsum, by_rank.values()), default=0.0)


def p_core(record: Record) -> Known:
    found = span(record)
    if found is None:
        return absent(PASS)
    if found.compute_s is None:
        return Known(None, "the engine does not separate compute time")
    done = found.counts.get(work_name(record))
    return Known(done / found.compute_s, found.note) if done and found.compute_s else absent(PASS)


def values(record: Record, name: str) -> list[float | None]:
    """A value of every step, from the lowest rank: it is the same on all. None is a number that is not finite. Losses are
    also those of the run that this one goes on from."""
    ranks = working(record, PASS)
    earlier = record.restarts[-1]["losses"] if record.restarts and name == "loss" and ranks else []
    return [*earlier] + [step.values[name] for step in ranks[min(ranks)] if name in step.values] if ranks else []


def _mean(chosen: list[float | None]) -> Known:
    finite = [value for value in chosen if value is not None]
    if not chosen:
        return Known(None, "no step gave a loss")
    return Known(fsum(finite) / len(finite)) if len(finite) == len(chosen) else Known(None, "a loss is not finite")


def _tenth(losses: list[float | None]) -> int:
    return max(1, len(losses) // 10)


def loss(record: Record) -> Known:
    """Mean loss of the last tenth of the steps, at least one."""
    losses = values(record, "loss")
    return _mean(losses[-_tenth(losses) :])


def loss_first(record: Record) -> Known:
    losses = values(record, "loss")
    return _mean(losses[: _tenth(losses)])


def held_out(name: str) -> Callable[[Record], Known]:
    """Mean loss of the held-out rows, each target counted the same."""

    def formula(record: Record) -> Known:
        found = record.outputs.get("passes", {}).get(name)
        if found is None or not found["targets"]:
            return absent(name)
        nll = found["nll"]
        return Known(None, "the held-out loss is not finite") if nll is None else Known(nll / found["targets"])

    return formula


def grad_norm(record: Record) -> Known:
    """Of the last step, before clipping."""
    norms = values(record, "grad_norm")
    if not norms:
        return Known(None, "no step gave a norm")
    return Known(norms[-1], None if norms[-1] is not None else "the norm is not finite")


def mem_predicted(record: Record) -> Known:
    """What the fullest rank must hold, from shapes alone."""
    question = record.case.question
    if question["model"]["family"] != "llama":
        return Known(None, f"what a model of family {question['model']['family']} holds is not predicted")
    model, precision = Model.model_validate(question["model"]), Precision.model_validate(question["precision"])
    tune, train = Tune.model_validate(record.tune), Train.model_validate(question["train"])
    try:
        lean = record.engine.details.get("block") == "fused"  # older records do not say, and had the other one in mind
        stages = memory.predict(model, precision, tune, record.plan, train, lean)
    except ValueError as error:
        return Known(None, str(error))
    fullest = max(stages, key=lambda stage: stage.total)
    parts = ", ".join(f"{name} {size / GIB:.3g}" for name, size in asdict(fullest).items() if size)
    return Known(fullest.total / GIB, f"{parts} GiB; what the framework itself takes is unknown and not in it")
