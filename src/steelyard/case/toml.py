"""Format a table as TOML, with comments beside values. The standard library reads TOML and does not
write it.

`case/new_case.py` formats new case files with it.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def write(table: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Return a dict as TOML text; no file is written. None values are left out.

    `comments` are by dotted key; that of a table stands behind its header. Raise ValueError for NaN
    and infinity.
    """
    return "\n".join(_lines(table, comments, ())).strip("\n") + "\n"


def _lines(
    table: Mapping[str, Any], comments: Mapping[str, str], place: tuple[str, ...]
) -> list[str]:
    """Return the lines of the table at `key_path`: single values first, then nested tables, because
    whatever follows the header of a nested table belongs to that one. Lists, also of dicts, are
    written inline.
    """
    out = []
    for key, value in table.items():
        if value is not None and not isinstance(value, dict):
            out.append(f"{_key(key)} = {_value(value)}{_comment(comments, (*place, key))}")
    for key, value in table.items():
        if isinstance(value, dict):
            whole = (*place, key)
            inner = _lines(value, comments, whole)
            plain = any(not isinstance(one, dict) and one is not None for one in value.values())
            out += (
                ["", f"[{'.'.join(map(_key, whole))}]{_comment(comments, whole)}", *inner]
                if plain or not value
                else inner
            )
    return out


def _comment(comments: Mapping[str, str], place: tuple[str, ...]) -> str:
    """Return the comment of a key on one line with its leading ` # `, or an empty text."""
    text = comments.get(".".join(place))
    return f" # {' '.join(text.split())}" if text else ""


def _key(key: str) -> str:
    """Return a TOML key, in quotes if it needs them."""
    return key if _BARE.fullmatch(key) else _text(key)


def _text(value: str) -> str:
    """Return a quoted TOML string: that of JSON, with DEL escaped, which TOML does not allow."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    """Return a value as inline TOML. Raise ValueError for NaN and infinity; None inside a dict is
    left out.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a case holds no {value}")
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return (
            "{"
            f"{', '.join(f'{_key(k)} = {_value(v)}' for k, v in value.items() if v is not None)}"
            "}"
        )
    return repr(value)
