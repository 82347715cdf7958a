"""What a case says of MMLU's data. All of it is in the key."""

from typing import Literal

from pydantic import Field

from steelyard.schema import Frozen


class MadeQuestions(Frozen):
    """Questions that the package makes itself, from a seed."""

    subjects: int = Field(ge=1)
    questions: int = Field(ge=1)
    seed: int = 0


class MmluData(Frozen):
    """Multiple-choice questions. `fingerprint` is that of the published set; other rows or tokens are another question."""

    kind: Literal["mmlu"]
    shots: int = Field(5, ge=0, le=5)
    context: int = Field(2048, ge=16)
    subjects: int = Field(57, ge=1)
    fingerprint: str | None = None
    made: MadeQuestions | None = None
