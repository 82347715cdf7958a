"""What a case says of MMLU's data. All of it is in the key."""

from typing import Literal

from pydantic import Field

from steelyard.tasks.questions import QuestionFields


class MmluData(QuestionFields):
    """Multiple-choice questions. `fingerprint` is that of the published set; other rows or tokens are another question."""

    kind: Literal["mmlu"]
    subjects: int = Field(57, ge=1)
