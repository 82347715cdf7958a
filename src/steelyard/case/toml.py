"""A table as TOML, with a comment beside each value that has one. The standard library reads TOML
and does not write it.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def write(table: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """The text of a table. `comments`: by dotted key; those of a table stand behind its header."""
    return "\n".join(_lines(table, comments, ())).strip("\n") + "\n"


def _lines(
    table: Mapping[str, Any], comments: Mapping[str, str], place: tuple[str, ...]
) -> list[str]:
    """Values first: what follows a header of a table inside would be that table's."""
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
    text = comments.get(".".join(place))
    return f" # {' '.join(text.split())}" if text else ""


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a case holds no {value}")
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_key(k)} = {_value(v)}' for k, v in value.items() if v is not None)}}}"
    return repr(value)
