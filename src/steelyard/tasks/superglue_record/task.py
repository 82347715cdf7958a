"""The row of ReCoRD (SuperGLUE): queries with a placeholder that one of a passage's entities fills,
as a cloze.

Its folder has the set's full name, for a record is what a run leaves; questions, records and keys
spell it `record`.
"""

from typing import Literal

from pydantic import Field

from steelyard.schema import Frozen
from steelyard.tasks.superglue_record import score
from steelyard.tasks.task import Score, Task
from steelyard.words import meaning


class MadeCloze(Frozen):
    """Passages with a word to be found again, which the package makes itself, from a seed."""

    queries: int = Field(ge=2)
    held_out: int = Field(ge=1, description="queries of the evaluation, beside those of training")
    entities: int = Field(4, ge=2, description="candidates of a query")
    seed: int = 0


class RecordData(Frozen):
    """Queries with a placeholder, to be filled with one of the entities of a passage."""

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
    passes=("before", "train"),  # what stops at a target has just been evaluated when it ends
    differences=score.differences,
    breakdowns=score.breakdowns,
    stopped=score.stopped,
    rates_in_samples=True,
    starts_trained=True,
    published_facts=("queries", "evaluated"),
)
