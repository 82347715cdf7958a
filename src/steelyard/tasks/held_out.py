"""Tasks that train on rows of tokens: what a record keeps beside its samples, which is the loss of
held-out rows before and after and why training stopped early; and the `Task` row of such a task.

Used by `tasks/openwebtext` and `tasks/alpaca`.
"""

from typing import Any

from steelyard.schema import Frozen
from steelyard.tasks.kind import TRAIN
from steelyard.tasks.task import BatchUnit, Many, Score, Stopped, Task
from steelyard.words import meaning


class Steps(Frozen):
    """The outputs of the training pass: why it ended early, or None if it ran to its last step."""

    stopped: Stopped | None


class RowsLoss(Frozen):
    """The outputs of a pass over held-out rows: the summed loss in nats, None if it is not finite,
    and the number of target tokens.
    """

    nll: float | None
    targets: Many


class HeldOutOutputs(Frozen):
    """What a record keeps of training on rows: the number of held-out rows, and the outputs of each
    pass.
    """

    held_out: int  # number of held-out rows
    passes: dict[str, Steps | RowsLoss]


def outputs(held_out: int) -> HeldOutOutputs:
    """Return outputs without any pass. `held_out` is the number of held-out rows."""
    return HeldOutOutputs(held_out=held_out, passes={})


def check(table: Any, outputs: HeldOutOutputs) -> dict[str, Any]:
    """Return an engine's outputs of a pass if a record can be made of them: `stopped`, or `nll`
    (float or None) and `targets` (int). Raises TypeError otherwise.
    """
    if not isinstance(table, dict) or set(table) not in ({"stopped"}, {"nll", "targets"}):
        raise TypeError(
            "the engine's outputs must be `stopped` of the steps, or `nll` and `targets` of"
            " held-out rows"
        )
    if "targets" in table and (
        not isinstance(table["targets"], int) or not isinstance(table["nll"], float | None)
    ):
        raise TypeError("the engine's outputs must be a float or None, and an integer")
    return dict(table)


def merge(outputs: HeldOutOutputs, name: str, tables: list[dict[str, Any]]) -> HeldOutOutputs:
    """Return the outputs with one more pass, from the outputs of all replicas: the earliest stop,
    or the losses added up (None if one is None).
    """
    found: Steps | RowsLoss
    if name in TRAIN.stepped:
        found = Steps(stopped=first_stop(tables))
    else:
        parts = [table["nll"] for table in tables]
        known = None if None in parts else float(sum(parts))
        found = RowsLoss(nll=known, targets=sum(table["targets"] for table in tables))
    return outputs.model_copy(update={"passes": {**outputs.passes, name: found}})


def first_stop(tables: list[dict[str, Any]]) -> Stopped | None:
    """Return the earliest stop that a replica reported, or None."""
    stopped = [Stopped.model_validate(table["stopped"]) for table in tables if table.get("stopped")]
    return min(stopped, key=lambda one: one.step) if stopped else None


def score(outputs: HeldOutOutputs, name: str) -> dict[str, float]:
    """Return `loss`, the mean loss in nats per target token of the held-out rows; empty if the pass
    has none, it is not finite, or there are no targets.
    """
    found = outputs.passes.get(name)
    known = isinstance(found, RowsLoss) and found.nll is not None and found.targets
    return {"loss": found.nll / found.targets} if known else {}  # type: ignore[union-attr, operator]


def stopped(outputs: HeldOutOutputs) -> Stopped | None:
    """Return why the pass `train` ended early; None if it did not, or is missing."""
    found = outputs.passes.get("train")
    return found.stopped if isinstance(found, Steps) else None


def finite(outputs: HeldOutOutputs, name: str) -> bool | None:
    """Return whether a pass's held-out loss is finite; None if the pass has no held-out loss."""
    found = outputs.passes.get(name)
    return found.nll is not None if isinstance(found, RowsLoss) else None


def tally(outputs: HeldOutOutputs, name: str) -> None:
    """Return None: steps are covered by the record's samples, so there are no items to count."""


SCORES = (
    Score(
        "loss_before",
        "loss",
        *meaning("held_out.loss_before"),
        unit="nats",
        better="",
        form="number",
        of="before",
    ),
    Score(
        "loss_after",
        "loss",
        *meaning("held_out.loss_after"),
        unit="nats",
        better="lower",
        form="number",
        of="after",
    ),
)


def rows_task(
    name: str,
    noun: str,
    data: type[Frozen],
    reader: str,
    data_check: str,
    batch_unit: BatchUnit = "samples",
    starts_trained: bool = False,
    packs: bool = False,
) -> Task:
    """Return the `Task` row of a task that trains on rows of tokens and only adds how its data are
    read: `data` is the model of `question.data`, `reader` and `data_check` are "module:function".
    """
    return Task(
        name=name,
        kind=TRAIN.name,
        work="train_rows",
        noun=noun,
        data=data,
        outputs=HeldOutOutputs,
        reader=reader,
        data_check=data_check,
        check=check,
        merge=merge,
        score=score,
        tally=tally,
        scores=SCORES,
        quality="loss_after",
        passes=TRAIN.passes,
        stopped=stopped,
        held_out_finite=finite,
        batch_unit=batch_unit,
        starts_trained=starts_trained,
        packs=packs,
    )
