"""Settings of an untrusted file against those of a case: refused if they differ. Without torch."""

import math
from pathlib import Path
from typing import Any

from steelyard.errors import RequestError, short_repr


def agree(path: Path, key: str, found: Any, field: str, wanted: Any) -> None:
    """Refuse a setting of a file that is not the model's."""
    # some tools keep 1e-5 as its fp32
    both = isinstance(found, float) and isinstance(wanted, float)
    if not (math.isclose(found, wanted, rel_tol=1e-6) if both else found == wanted):
        raise RequestError(
            f"{path}: {key} is {short_repr(found)}, the case's {field} is {wanted!r}; "
            "give weights of the case's model, or the case of theirs"
        )


def allow(path: Path, key: str, found: Any, allowed: tuple[Any, ...]) -> None:
    """Refuse a setting of a file that changes what a model computes."""
    if found is not None and found not in allowed:
        raise RequestError(
            f"{path}: {key} is {short_repr(found)}, allowed:"
            f" {', '.join(map(repr, allowed)) or None}; give weights of a plain Llama, or save"
            " these in that form"
        )
