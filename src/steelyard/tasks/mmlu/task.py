"""The row of MMLU: 57 subjects of four-way questions, asked after answered examples."""

from typing import Literal

from pydantic import Field

from steelyard.tasks.choices import choice_task
from steelyard.tasks.questions import QuestionFields


class MmluData(QuestionFields):
    """Multiple-choice questions. `fingerprint` is that of the published set; other rows or tokens
    are another question."""

    kind: Literal["mmlu"]
    subjects: int = Field(57, ge=1)


TASK = choice_task(
    "mmlu",
    MmluData,
    reader="steelyard.tasks.mmlu.data:prepare",
    data_check="steelyard.tasks.mmlu.data:check_source",
)
