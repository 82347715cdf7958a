"""What a checkpoint holds, of any family, as its headers tell it."""

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
    """A checkpoint as its files describe it. Sizes are of the files; what a shape's fields are not
    told is None.
    """

    layout: str  # the format; files that others read have it under this name
    tp: int
    iteration: str | None
    dtype: str
    parameters: int
    size_bytes: int
    files: list[tuple[str, int]]
    shape: dict[str, Any]
    notes: list[str]
    header_sha256: str  # as records say it


def inspect(folder: Path) -> Inspection:
    """What a folder holds. What keeps it from being used as it is, is a note. Of a folder that no
    family knows, the reader of Llamas says what is missing."""
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
    return value.model_dump() if isinstance(value, Frozen) else value


def _unusual(config: dict[str, Any], field: str) -> bool:
    """Whether a field in which few models differ from a plain Llama is told."""
    if field != "head_dim":
        return bool(config[field])
    told = [config[name] for name in ("head_dim", "heads", "hidden")]
    return None not in told and told[0] * told[1] != told[2]
