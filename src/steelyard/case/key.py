"""Compute the key of a question: a hash that is equal for records that answer the same question.

A published key never changes. A field that was added later therefore enters the hash only if it
differs from its default; LATER_FIELDS lists all such fields.
"""

import hashlib
from typing import Any

from steelyard.schema import to_canonical_json

# Fields that older keys do not hold: their key path in a question, and the default with which they
# stay out of the hash.
LATER_FIELDS: tuple[tuple[tuple[str, ...], Any], ...] = (
    (("train", "evaluate_every"), None),
    (("train",), None),  # scoring has no train table, and had keys before training existed
    (("data", "joint"), "\n"),  # of task alpaca
    (("data", "last_target"), False),
    (("model", "head_dim"), None),
    (("model", "qk_norm"), False),
    (("model", "window"), None),
    (("model", "rope_scaling"), None),
    (("precision", "kv"), None),
    (("load",), None),  # only generation has one
)


def compute_question_key(question: dict[str, Any], fingerprint: str) -> str:
    """Return the key of a question: the first 16 hex digits of the SHA-256 of its canonical JSON
    (`make_hash_input`).

    `question` is the dict that a record holds, `fingerprint` identifies the data that was read.
    """
    return hashlib.sha256(
        to_canonical_json(make_hash_input(question, fingerprint)).encode()
    ).hexdigest()[:16]


def make_hash_input(question: dict[str, Any], fingerprint: str) -> dict[str, Any]:
    """Return a copy of the question dict as it is hashed: with the fingerprint of the data that was
    read under `data`, and without the fields of LATER_FIELDS that have their default. Nothing is
    changed in place.
    """
    hash_input = {**question, "data": {**question["data"], "fingerprint": fingerprint}}
    for key_path, default in LATER_FIELDS:
        hash_input = _without_default(hash_input, key_path, default)
    return hash_input


def _without_default(
    table: dict[str, Any], key_path: tuple[str, ...], default: Any
) -> dict[str, Any]:
    """Return the dict without the key at `key_path` (nested keys) if its value equals `default` in
    value and type; otherwise an equal dict. Nothing is changed in place.
    """
    first, *inner_path = key_path
    if first not in table:
        return table
    if inner_path:
        inner = table[first]
        return (
            {**table, first: _without_default(inner, tuple(inner_path), default)}
            if isinstance(inner, dict)
            else table
        )
    if table[first] != default or type(table[first]) is not type(default):
        return table
    return {name: value for name, value in table.items() if name != first}
