"""The `Task` row of MMLU: questions of 57 subjects with four choices, asked after answered
examples.
"""

from typing import Literal

from pydantic import Field

from steelyard.tasks.choices import choice_task
from steelyard.tasks.questions import QuestionFields


class MmluData(QuestionFields):
    """The fields of `question.data` of MMLU (`kind` "mmlu"): those of `QuestionFields` (shots,
    context, subjects, fingerprint, made), with 57 as the default number of `subjects`; data files
    with another number are refused.
    """

    kind: Literal["mmlu"]
    subjects: int = Field(57, ge=1)


TASK = choice_task(
    "mmlu",
    MmluData,
    reader="steelyard.tasks.mmlu.data:prepare",
    data_check="steelyard.tasks.mmlu.data:check_source",
)
