"""Tasks that train on rows of tokens: what a record keeps beside its samples, which is the loss of
held-out rows before and after and why training stopped early; and the `Task` row of such a task.

Used by `tasks/openwebtext` and `tasks/alpaca`.
"""

from typing import Any

from steelyard.schema import FrozenModel
from steelyard.tasks.kind import TRAIN
from steelyard.tasks.task import BatchUnit, EarlyStop, OutputCount, Score, Task
from steelyard.words import get_meanings


class TrainPassOutputs(FrozenModel):
    """The outputs of the training pass on rows: `stopped`, an `EarlyStop` that says why and at
    which step it ended early, or None if it ran to its last step. Losses of steps are not kept
    here.
    """

    stopped: EarlyStop | None


class HeldOutRowsLoss(FrozenModel):
    """The outputs of a pass over held-out rows, `before` or `after`: `nll`, the summed loss in
    nats, None if it is not finite, and `targets`, the number of target tokens it is summed over.
    """

    nll: float | None
    targets: OutputCount


class HeldOutOutputs(FrozenModel):
    """What a record keeps of training on rows: `held_out`, the number of held-out rows, and in
    `passes` the outputs of each pass by name: `train` has why it ended (`TrainPassOutputs`),
    `before` and `after` the loss of the held-out rows (`HeldOutRowsLoss`).
    """

    held_out: int  # number of held-out rows
    passes: dict[str, TrainPassOutputs | HeldOutRowsLoss]


def make_held_out_outputs(held_out: int) -> HeldOutOutputs:
    """Return outputs without any pass. `held_out` is the number of held-out rows."""
    return HeldOutOutputs(held_out=held_out, passes={})


def check_held_out_outputs(pass_outputs: Any, outputs: HeldOutOutputs) -> dict[str, Any]:
    """Return a copy of an engine's outputs of a pass if a record can be made of them: a dict with
    exactly `stopped` (not looked into), or with `nll` (float or None) and `targets` (int). Raises
    TypeError otherwise. `outputs` is ignored.
    """
    if not isinstance(pass_outputs, dict) or set(pass_outputs) not in (
        {"stopped"},
        {"nll", "targets"},
    ):
        raise TypeError(
            "the engine's outputs must be `stopped` of the steps, or `nll` and `targets` of"
            " held-out rows"
        )
    if "targets" in pass_outputs and (
        not isinstance(pass_outputs["targets"], int)
        or not isinstance(pass_outputs["nll"], float | None)
    ):
        raise TypeError("the engine's outputs must be a float or None, and an integer")
    return dict(pass_outputs)


def merge_held_out_outputs(
    outputs: HeldOutOutputs, pass_name: str, replica_outputs: list[dict[str, Any]]
) -> HeldOutOutputs:
    """Return a copy of the outputs with one more pass, from the checked outputs of all replicas:
    for pass `train` the earliest stop, else the summed losses (None if one is None) and target
    counts. An earlier pass of that name is replaced.
    """
    merged: TrainPassOutputs | HeldOutRowsLoss
    if pass_name in TRAIN.stepped:
        merged = TrainPassOutputs(stopped=find_first_stop(replica_outputs))
    else:
        losses = [replica["nll"] for replica in replica_outputs]
        total = None if None in losses else float(sum(losses))
        merged = HeldOutRowsLoss(
            nll=total, targets=sum(replica["targets"] for replica in replica_outputs)
        )
    return outputs.model_copy(update={"passes": {**outputs.passes, pass_name: merged}})


def find_first_stop(replica_outputs: list[dict[str, Any]]) -> EarlyStop | None:
    """Return the stop with the lowest step among the replicas' `stopped`, the first of equal ones;
    None if none of them stopped early.
    """
    stops = [
        EarlyStop.model_validate(replica["stopped"])
        for replica in replica_outputs
        if replica.get("stopped")
    ]
    return min(stops, key=lambda stop: stop.step) if stops else None


def score_held_out_loss(outputs: HeldOutOutputs, pass_name: str) -> dict[str, float]:
    """Return {"loss": mean loss in nats per target token of the held-out rows} of a pass; empty if
    the pass is missing or trains, its loss is not finite, or there are no targets.
    """
    pass_outputs = outputs.passes.get(pass_name)
    is_known = (
        isinstance(pass_outputs, HeldOutRowsLoss)
        and pass_outputs.nll is not None
        and pass_outputs.targets
    )
    return {"loss": pass_outputs.nll / pass_outputs.targets} if is_known else {}  # type: ignore[union-attr, operator]


def find_early_stop(outputs: HeldOutOutputs) -> EarlyStop | None:
    """Return step and reason if the pass `train` ended early; None if it did not, or is missing."""
    pass_outputs = outputs.passes.get("train")
    return pass_outputs.stopped if isinstance(pass_outputs, TrainPassOutputs) else None


def is_held_out_loss_finite(outputs: HeldOutOutputs, pass_name: str) -> bool | None:
    """Return whether a pass's held-out loss is finite; None if the pass is missing or is `train`,
    which has no held-out loss.
    """
    pass_outputs = outputs.passes.get(pass_name)
    return pass_outputs.nll is not None if isinstance(pass_outputs, HeldOutRowsLoss) else None


def tally_nothing(outputs: HeldOutOutputs, pass_name: str) -> None:
    """Return None: steps are covered by the record's samples, so there are no items to count."""


LOSS_SCORES = (
    Score(
        "loss_before",
        "loss",
        *get_meanings("held_out.loss_before"),
        unit="nats",
        better="",
        form="number",
        of="before",
    ),
    Score(
        "loss_after",
        "loss",
        *get_meanings("held_out.loss_after"),
        unit="nats",
        better="lower",
        form="number",
        of="after",
    ),
)


def rows_task(
    name: str,
    noun: str,
    data: type[FrozenModel],
    reader: str,
    data_check: str,
    batch_unit: BatchUnit = "samples",
    starts_trained: bool = False,
    packs: bool = False,
) -> Task:
    """Return the `Task` row of a task that trains on rows of tokens and only adds how its data are
    read; outputs are held-out losses, quality is `loss_after`.

    `data` is the model of `question.data`, `reader` and `data_check` are "module:function", `noun`
    is what an item is called; the others are fields of `Task`.
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
        check=check_held_out_outputs,
        merge=merge_held_out_outputs,
        score=score_held_out_loss,
        tally=tally_nothing,
        scores=LOSS_SCORES,
        quality="loss_after",
        passes=TRAIN.passes,
        stopped=find_early_stop,
        held_out_finite=is_held_out_loss_finite,
        batch_unit=batch_unit,
        starts_trained=starts_trained,
        packs=packs,
    )
