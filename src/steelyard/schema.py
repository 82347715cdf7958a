"""What crosses a file or a process: frozen, typed tables, and one spelling of each for hashes."""

import json
from typing import Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

# Which operands of a matmul are stored transposed, in the words of BLAS: a forward is x·Wᵀ, the
# gradient of its input g·W, that of its weight gᵀ·x.
Layout = Literal["nt", "nn", "tn"]


class Frozen(BaseModel):
    """A table with known keys. Neither NaN nor infinity: JSON, and so a hash, has none."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True
    )


class GrownTable(Frozen):
    """A table that has got fields since it was first written. Those are None where nothing is
    known, and then not written: what was written before keeps its bytes."""

    LATER: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _as_known(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {
            name: value
            for name, value in dump(self).items()
            if value is not None or name not in self.LATER
        }


class OpenTable(Frozen):
    """A table with some known keys; a plug-in or a later version may add others. What was not told
    is not written either.
    """

    model_config = ConfigDict(extra="allow")

    @model_serializer(mode="wrap")
    def _as_told(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if name in self.model_fields_set}


def canonical(value: Any) -> str:
    """One spelling for one value: what hashes are taken over."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def first_problem(error: ValidationError) -> str:
    """The first thing that is wrong with a table: where, and what."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    what = first["msg"].removeprefix("Value error, ")  # what our own checks raise
    return f"{where}: {what}" if where else what
