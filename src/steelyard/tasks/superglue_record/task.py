"""The `Task` row of ReCoRD (SuperGLUE): queries with a placeholder to be filled with an entity of a
passage, as a cloze.

The folder has the full name of the data set, because a record here is the file of a run. In
questions, records and keys the task is spelled `record`.
"""

from typing import Literal

from pydantic import Field

from steelyard.schema import FrozenModel
from steelyard.tasks.superglue_record import score
from steelyard.tasks.task import Score, Task
from steelyard.words import get_meanings


class GeneratedClozeConfig(FrozenModel):
    """How to generate queries (`question.data.made`): the number of `queries` to train on and of
    `held_out` ones to evaluate, each with `entities` candidates, and the `seed`, 0 by default.
    """

    queries: int = Field(ge=2)
    held_out: int = Field(ge=1, description="queries of the evaluation, beside those of training")
    entities: int = Field(4, ge=2, description="candidates of a query")
    seed: int = 0


class SuperglueRecordData(FrozenModel):
    """The fields of `question.data` of ReCoRD. `wrong` is the most wrong candidates of a training
    sample. `fingerprint` is that of the published data set (other data are not refused), `made` how
    to generate queries if no data path is given; None: data are required.
    """

    kind: Literal["record"]
    wrong: int = Field(9, ge=1, description="wrong candidates of a training example, at most")
    fingerprint: str | None = None
    made: GeneratedClozeConfig | None = None


_ACCURACY = get_meanings("superglue_record.acc")
SUPERGLUE_RECORD_SCORES = (
    Score("acc", "acc", *_ACCURACY),
    Score(
        "acc_before", "acc", *get_meanings("superglue_record.acc_before"), better="", of="before"
    ),
    Score("acc_se", "se", *get_meanings("score.acc_se"), better=""),
    Score("em", "em", *get_meanings("superglue_record.em")),
    Score("f1", "f1", *get_meanings("superglue_record.f1")),
)

TASK = Task(
    name="superglue_record",
    spelling="record",
    kind="train",
    work="train_cloze",
    noun="sample",
    data=SuperglueRecordData,
    outputs=score.ClozeOutputs,
    reader="steelyard.tasks.superglue_record.data:prepare",
    data_check="steelyard.tasks.superglue_record.queries:check_source",
    check=score.check_cloze_outputs,
    merge=score.merge_cloze_outputs,
    score=score.score_cloze_outputs,
    tally=score.tally_cloze_answers,
    scores=SUPERGLUE_RECORD_SCORES,
    quality="acc",
    # no `after`: training that ends at a target has just been evaluated
    passes=("before", "train"),
    differences=score.compare_cloze_outputs,
    breakdowns=score.make_cloze_breakdowns,
    stopped=score.find_cloze_stop,
    rates_in_samples=True,
    starts_trained=True,
    published_facts=("queries", "evaluated"),
)
