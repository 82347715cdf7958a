"""The row of alpaca: instructions and their answers, to fine-tune a trained model on."""

from steelyard.tasks.alpaca.fields import ConversationData
from steelyard.tasks.held_out import rows_task

TASK = rows_task(
    name="alpaca",
    noun="sample",
    data=ConversationData,
    reader="steelyard.tasks.alpaca.prepare:prepare",
    data_check="steelyard.tasks.alpaca.conversations:check_source",
    starts_trained=True,
    packs=True,
)
