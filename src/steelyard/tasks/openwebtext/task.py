"""The row of OpenWebText: a corpus of documents as token files, to train on from random weights."""

from steelyard.tasks import held_out
from steelyard.tasks.openwebtext.fields import CorpusData
from steelyard.tasks.task import Task

TASK = Task(
    name="openwebtext",
    kind="train",
    work="train_rows",
    noun="row",
    data=CorpusData,
    outputs=held_out.HeldOutOutputs,
    reader="steelyard.tasks.openwebtext.prepare:prepare",
    data_check="steelyard.data.corpus:check_files",
    check=held_out.check,
    merge=held_out.merge,
    score=held_out.score,
    tally=held_out.tally,
    scores=held_out.SCORES,
    quality="loss_after",
    passes=("before", "train", "after"),
    stopped=held_out.stopped,
    held_out_finite=held_out.finite,
    batch_unit="rows",
)
