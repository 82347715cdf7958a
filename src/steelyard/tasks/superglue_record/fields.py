"""What a case says of ReCoRD's data. All of it is in the key."""

from typing import Literal

from pydantic import Field

from steelyard.schema import Frozen


class MadeCloze(Frozen):
    """Passages with a word to be found again, which the package makes itself, from a seed."""

    queries: int = Field(ge=2)
    held_out: int = Field(ge=1, description="queries of the evaluation, beside those of training")
    entities: int = Field(4, ge=2, description="candidates of a query")
    seed: int = 0


class RecordData(Frozen):
    """Queries with a placeholder, to be filled with one of the entities of a passage."""

    kind: Literal["record"]
    wrong: int = Field(9, ge=1, description="wrong candidates of a training example, at most")
    fingerprint: str | None = None
    made: MadeCloze | None = None
