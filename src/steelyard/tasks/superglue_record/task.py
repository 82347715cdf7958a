"""The row of ReCoRD (SuperGLUE): queries with a placeholder that one of a passage's entities fills, as a cloze.

Its folder has the set's full name, for a record is what a run leaves; questions, records and keys spell it `record`.
"""

from steelyard.tasks.superglue_record import score
from steelyard.tasks.superglue_record.fields import RecordData
from steelyard.tasks.task import Score, Task
from steelyard.words import meaning

_ACCURACY = meaning("superglue_record.acc")
SCORES = (
    Score("acc", "acc", *_ACCURACY),
    Score(
        "acc_before",
        "acc",
        *meaning("superglue_record.acc_before"),
        better="",
        of="before",
    ),
    Score(
        "acc_se",
        "se",
        *meaning("score.acc_se"),
        better="",
    ),
    Score(
        "em",
        "em",
        *meaning("superglue_record.em"),
    ),
    Score(
        "f1",
        "f1",
        *meaning("superglue_record.f1"),
    ),
)

TASK = Task(
    name="superglue_record",
    spelling="record",
    kind="train",
    work="train_cloze",
    noun="sample",
    data=RecordData,
    outputs=score.RecordOutputs,
    reader="steelyard.tasks.superglue_record.prepare:prepare",
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
