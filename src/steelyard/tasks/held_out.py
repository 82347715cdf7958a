"""What a record keeps of training on rows, beside its samples: the loss of held-out rows before and
after, and why it stopped early. Shared by the tasks that train on rows."""

from typing import Any

from steelyard.schema import Frozen
from steelyard.tasks.kind import TRAIN
from steelyard.tasks.task import BatchUnit, Many, Score, Stopped, Task
from steelyard.words import meaning


class Steps(Frozen):
    """The pass that trains."""

    stopped: Stopped | None


class RowsLoss(Frozen):
    """A pass over held-out rows: the summed loss in nats, None where it is not finite, and the
    tokens it is of.
    """

    nll: float | None
    targets: Many


class HeldOutOutputs(Frozen):
    held_out: int  # rows
    passes: dict[str, Steps | RowsLoss]


def outputs(held_out: int) -> HeldOutOutputs:
    """The part that does not depend on a pass."""
    return HeldOutOutputs(held_out=held_out, passes={})


def check(table: Any, outputs: HeldOutOutputs) -> dict[str, Any]:
    """An engine's outputs of a pass, if a record can be made of them."""
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
    """With a pass's outputs of all replicas."""
    found: Steps | RowsLoss
    if name in TRAIN.stepped:
        found = Steps(stopped=first_stop(tables))
    else:
        parts = [table["nll"] for table in tables]
        known = None if None in parts else float(sum(parts))
        found = RowsLoss(nll=known, targets=sum(table["targets"] for table in tables))
    return outputs.model_copy(update={"passes": {**outputs.passes, name: found}})


def first_stop(tables: list[dict[str, Any]]) -> Stopped | None:
    """The earliest of the replicas' reasons to stop."""
    stopped = [Stopped.model_validate(table["stopped"]) for table in tables if table.get("stopped")]
    return min(stopped, key=lambda one: one.step) if stopped else None


def score(outputs: HeldOutOutputs, name: str) -> dict[str, float]:
    """The mean loss of the held-out rows, each target counted the same, of a pass that looked at
    them.
    """
    found = outputs.passes.get(name)
    known = isinstance(found, RowsLoss) and found.nll is not None and found.targets
    return {"loss": found.nll / found.targets} if known else {}  # type: ignore[union-attr, operator]


def stopped(outputs: HeldOutOutputs) -> Stopped | None:
    found = outputs.passes.get("train")
    return found.stopped if isinstance(found, Steps) else None


def finite(outputs: HeldOutOutputs, name: str) -> bool | None:
    found = outputs.passes.get(name)
    return found.nll is not None if isinstance(found, RowsLoss) else None


def tally(outputs: HeldOutOutputs, name: str) -> None:
    """Steps are covered by samples, which the record has: nothing to count here."""


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
    """Return the row of a task that trains on rows of tokens: what it adds is how data are read."""
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
