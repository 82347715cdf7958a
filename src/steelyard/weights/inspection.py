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
from steelyard.models.shapes import VARIANT_FIELDS
from steelyard.schema import FrozenModel
from steelyard.weights.checkpoint_tensors import OpenedCheckpoint, detect_family

DTYPE_LABELS = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}


@dataclass(frozen=True)
class Inspection:
    """A checkpoint as its files describe it, for `weights inspect`, made by `inspect_checkpoint`.
    `layout` is the format, `tp` the number of tensor-parallel shards, `iteration` the checkpoint's
    name in its folder (None if it has none), `parameters` their number; `files` are (name, bytes),
    `size_bytes` their sum; `dtype` lists all dtypes, the one of most parameters first, such as
    `bf16+fp32`; `header_sha256` is of the headers, as in a record.

    `shape` are the model's dimensions, None where the files do not tell, without features that a
    plain Llama lacks; `notes` include why it cannot be used as it is.
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


def inspect_checkpoint(folder: Path) -> Inspection:
    """Read the headers of a folder's checkpoint, of any family and format, and describe it; no
    values are read.

    An incomplete model is not refused: the problem becomes a note, and the parameters are then
    counted from the tensors that are there. Raise RequestError if the folder cannot be opened as a
    checkpoint; a folder that no family recognizes is opened as a Llama's, whose reader says what is
    missing.
    """
    family = families.find_family(detect_family(folder) or families.LLAMA.name)
    source: OpenedCheckpoint = plugins.load_reference(family.checkpoint)(folder)
    headers, config = source.headers, source.read_dimensions()
    notes = [*headers.notes]
    dtypes, parameters = Counter[str](), 0
    for stored in headers.tensors:
        dtypes[DTYPE_LABELS.get(stored.dtype, stored.dtype.lower())] += math.prod(stored.shape)
        parameters += math.prod(stored.shape)
    try:
        parameters = source.count_parameters()
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
            field: _to_plain(value)
            for field, value in config.items()
            if field not in VARIANT_FIELDS or _is_unusual(config, field)
        },
        notes=notes,
        header_sha256=headers.digest,
    )


def _to_plain(value: Any) -> Any:
    """Return a pydantic model as a dict, any other value as it is."""
    return value.model_dump() if isinstance(value, FrozenModel) else value


def _is_unusual(config: dict[str, Any], field: str) -> bool:
    """Return whether a dimension that few models set differs from a plain Llama's: it is set, or
    for `head_dim` it is known and not `hidden / heads`.
    """
    if field != "head_dim":
        return bool(config[field])
    dimensions = [config[name] for name in ("head_dim", "heads", "hidden")]
    return None not in dimensions and dimensions[0] * dimensions[1] != dimensions[2]
