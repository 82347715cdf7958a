"""Describe the checkpoint in a folder, of any family and format, from its headers: `steelyard
weights inspect`.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard import plugins
from steelyard.errors import RequestError
from steelyard.models import families
from steelyard.models.shapes import VARIANTS
from steelyard.schema import Frozen
from steelyard.weights.checkpoint import Opened, family_of

SHOWN = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}


@dataclass(frozen=True)
class Inspection:
    """A checkpoint as its files describe it. `size_bytes` is the size of the files; `dtype` lists
    all dtypes with the most frequent first, such as `bf16+fp32`; `shape` are the model's
    dimensions, None where the files do not tell; `notes` include why it cannot be used as it is.
    """

    layout: str  # the format; `--json` calls it layout
    tp: int
    iteration: str | None
    dtype: str
    parameters: int
    size_bytes: int
    files: list[tuple[str, int]]
    shape: dict[str, Any]
    notes: list[str]
    header_sha256: str  # of the headers, as in a record


def inspect(folder: Path) -> Inspection:
    """Read the headers of a folder's checkpoint and describe it.

    An incomplete model is not refused: the problem becomes a note, and the parameters are then
    counted from the tensors that are there. Raise RequestError if the folder cannot be opened as a
    checkpoint; a folder that no family recognizes is opened as a Llama's, whose reader says what is
    missing.
    """
    family = families.row(family_of(folder) or families.LLAMA.name)
    source: Opened = plugins.load(family.checkpoint)(folder)
    headers, config = source.headers, source.config()
    notes = [*headers.notes]
    dtypes, parameters = Counter[str](), 0
    for stored in headers.tensors:
        dtypes[SHOWN.get(stored.dtype, stored.dtype.lower())] += math.prod(stored.shape)
        parameters += math.prod(stored.shape)
    try:
        parameters = source.count()
    except RequestError as error:
        notes.append(str(error))
    return Inspection(
        layout=headers.format,
        tp=headers.tp,
        iteration=headers.iteration,
        dtype="+".join(name for name, _ in dtypes.most_common()),
        parameters=parameters,
        size_bytes=sum(size for _, size in headers.files),
        files=headers.files,
        shape={
            field: _plain(value)
            for field, value in config.items()
            if field not in VARIANTS or _unusual(config, field)
        },
        notes=notes,
        header_sha256=headers.digest,
    )


def _plain(value: Any) -> Any:
    """Return a pydantic model as a dict, any other value as it is."""
    return value.model_dump() if isinstance(value, Frozen) else value


def _unusual(config: dict[str, Any], field: str) -> bool:
    """Return whether a dimension that few models set differs from a plain Llama's: it is set, or
    for `head_dim` it is known and not `hidden / heads`.
    """
    if field != "head_dim":
        return bool(config[field])
    told = [config[name] for name in ("head_dim", "heads", "hidden")]
    return None not in told and told[0] * told[1] != told[2]
