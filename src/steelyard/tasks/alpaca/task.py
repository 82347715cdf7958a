"""The row of alpaca: instructions and their answers, to fine-tune a trained model on."""

from steelyard.tasks import held_out
from steelyard.tasks.alpaca.fields import ConversationData
from steelyard.tasks.task import Task

TASK = Task(
    name="alpaca",
    kind="train",
    work="train_rows",
    noun="sample",
    data=ConversationData,
    outputs=held_out.HeldOutOutputs,
    reader="steelyard.tasks.alpaca.prepare:prepare",
    data_check="steelyard.tasks.alpaca.conversations:check_source",
    check=held_out.check,
    merge=held_out.merge,
    score=held_out.score,
    tally=held_out.tally,
    scores=held_out.SCORES,
    quality="loss_after",
    passes=("before", "train", "after"),
    stopped=held_out.stopped,
    held_out_finite=held_out.finite,
    starts_trained=True,
    packs=True,
)
