"""The row of OpenWebText: a corpus of documents as token files, to train on from random weights."""

from steelyard.tasks.held_out import rows_task
from steelyard.tasks.openwebtext.fields import CorpusData

TASK = rows_task(
    name="openwebtext",
    noun="row",
    data=CorpusData,
    reader="steelyard.tasks.openwebtext.data:prepare",
    data_check="steelyard.data.corpus:check_files",
    batch_unit="rows",
)
