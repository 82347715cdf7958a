"""What a case says of OpenWebText's data. All of it is in the key."""

from typing import Literal

from pydantic import Field

from steelyard.schema import Frozen


class MadeText(Frozen):
    """Documents that the package makes itself, from a seed."""

    documents: int = Field(ge=3)
    seed: int = 0


class CorpusData(Frozen):
    """A corpus of documents as token files."""

    kind: Literal["openwebtext"]
    held_out: int = Field(ge=1, description="rows of validation documents for the loss before and after")
    fingerprint: str | None = None
    made: MadeText | None = None
