"""The key of a question: a hash that says whether two records answer the same one.

A key never changes once it is published. So a field that came later enters the hash only where it
differs from its default, and every such field is a row of LATER.
"""

import hashlib
from typing import Any

from steelyard.schema import canonical

# Fields that older keys do not hold: where they stand in a question, and the default with which
# they stay out.
LATER: tuple[tuple[tuple[str, ...], Any], ...] = (
    (("train", "evaluate_every"), None),
    (("train",), None),  # scoring has none, and had keys before there was training
    (("data", "joint"), "\n"),  # alpaca's
    (("data", "last_target"), False),
    (("model", "head_dim"), None),
    (("model", "qk_norm"), False),
    (("model", "window"), None),
    (("model", "rope_scaling"), None),
)


def key_of(question: dict[str, Any], fingerprint: str) -> str:
    """The key of a question as a table, such as a record holds, with the fingerprint of the data
    that were really read.
    """
    return hashlib.sha256(canonical(hashed(question, fingerprint)).encode()).hexdigest()[:16]


def hashed(question: dict[str, Any], fingerprint: str) -> dict[str, Any]:
    """The table that a key is the hash of."""
    asked = {**question, "data": {**question["data"], "fingerprint": fingerprint}}
    for place, default in LATER:
        asked = _without_default(asked, place, default)
    return asked


def _without_default(table: dict[str, Any], place: tuple[str, ...], default: Any) -> dict[str, Any]:
    first, *rest = place
    if first not in table:
        return table
    if rest:
        inner = table[first]
        return (
            {**table, first: _without_default(inner, tuple(rest), default)}
            if isinstance(inner, dict)
            else table
        )
    if table[first] != default or type(table[first]) is not type(default):
        return table
    return {name: value for name, value in table.items() if name != first}
