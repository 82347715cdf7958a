"""Base classes of the pydantic models that cross a file or a process boundary, and one canonical
JSON for hashes.

Records, rank files, messages between processes, questions and cases are made of these models.
"""

import json
from typing import Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

# Which operands of a matmul are transposed, in BLAS letters: the forward pass is x·Wᵀ (nt), the
# gradient of the input g·W (nn), that of the weight gᵀ·x (tn).
MatmulLayout = Literal["nt", "nn", "tn"]


class FrozenModel(BaseModel):
    """Base class of the pydantic models here that are written to files or sent between processes:
    fields cannot be set after construction, unknown keys are refused, and so are NaN and infinity,
    which JSON does not have. Fields may be set by name or by alias.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True
    )


class GrownModel(FrozenModel):
    """A `FrozenModel` that got fields after files with it were first written.

    A subclass names these fields in `LATER` (empty by default); those that are None are left out
    when the model is serialized, so that what was written before keeps its bytes and hashes.
    """

    LATER: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _serialize_known(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the model as a dict for serialization, without those fields of `LATER` that are
        None.
        """
        return {
            name: value
            for name, value in dump(self).items()
            if value is not None or name not in self.LATER
        }


class ExtensibleModel(FrozenModel):
    """A `FrozenModel` with some known fields that accepts other keys too, for an accelerator, a
    plug-in or a later version may add them. Serialized are only the fields and keys that were given
    to the constructor, not defaults.
    """

    model_config = ConfigDict(extra="allow")

    @model_serializer(mode="wrap")
    def _serialize_set_fields(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the model as a dict for serialization, with only the keys that were given to the
        constructor; defaults are left out.
        """
        return {name: value for name, value in dump(self).items() if name in self.model_fields_set}


def to_canonical_json(value: Any) -> str:
    """Return a value as JSON in the one spelling that hashes are taken over: keys sorted, no
    spaces, no escapes for non-ASCII characters. Raise ValueError for NaN or infinity.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def describe_first_problem(error: ValidationError) -> str:
    """Return the first problem of a pydantic validation error as "path.to.field: message", or the
    message alone for the model as a whole.
    """
    first = error.errors()[0]
    location = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")  # pydantic's prefix for a ValueError
    return f"{location}: {message}" if location else message
