"""What a case says of LAMBADA's data. All of it is in the key."""

from typing import Literal

from pydantic import Field

from steelyard.schema import Frozen


class MadePassages(Frozen):
    """Passages that the package makes itself, from a seed."""

    passages: int = Field(ge=1)
    seed: int = 0


class LambadaData(Frozen):
    """Passages whose last word is to be predicted."""

    kind: Literal["lambada"]
    rows: int = Field(5153, ge=1, description="passages of the set; another number is another set")
    fingerprint: str | None = None
    made: MadePassages | None = None
