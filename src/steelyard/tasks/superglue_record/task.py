"""The `Task` row of ReCoRD (SuperGLUE): queries with a placeholder to be filled with an entity of a
passage, as a cloze.

The folder has the full name of the data set, because a record here is the file of a run. In
questions, records and keys the task is spelled `record`.
"""

from typing import Literal

from pydantic import Field

from steelyard.schema import Frozen
from steelyard.tasks.superglue_record import score
from steelyard.tasks.task import Score, Task
from steelyard.words import meaning


class MadeCloze(Frozen):
    """How many queries to generate for training and evaluation, with how many candidates, and from
    which seed.
    """

    queries: int = Field(ge=2)
    held_out: int = Field(ge=1, description="queries of the evaluation, beside those of training")
    entities: int = Field(4, ge=2, description="candidates of a query")
    seed: int = 0


class RecordData(Frozen):
    """The fields of `question.data` of ReCoRD. `fingerprint` is that of the published data set."""

    kind: Literal["record"]
    wrong: int = Field(9, ge=1, description="wrong candidates of a training example, at most")
    fingerprint: str | None = None
    made: MadeCloze | None = None


_ACCURACY = meaning("superglue_record.acc")
SCORES = (
    Score("acc", "acc", *_ACCURACY),
    Score("acc_before", "acc", *meaning("superglue_record.acc_before"), better="", of="before"),
    Score("acc_se", "se", *meaning("score.acc_se"), better=""),
    Score("em", "em", *meaning("superglue_record.em")),
    Score("f1", "f1", *meaning("superglue_record.f1")),
)

TASK = Task(
    name="superglue_record",
    spelling="record",
    kind="train",
    work="train_cloze",
    noun="sample",
    data=RecordData,
    outputs=score.RecordOutputs,
    reader="steelyard.tasks.superglue_record.data:prepare",
    data_check="steelyard.tasks.superglue_record.queries:check_source",
    check=score.check,
    merge=score.merge,
    score=score.score,
    tally=score.tally,
    scores=SCORES,
    quality="acc",
    # no `after`: training that ends at a target has just been evaluated
    passes=("before", "train"),
    differences=score.differences,
    breakdowns=score.breakdowns,
    stopped=score.stopped,
    rates_in_samples=True,
    starts_trained=True,
    published_facts=("queries", "evaluated"),
)
