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


def format_toml(table: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Return a nested dict as TOML text that ends in a line feed; no file is written. None values
    are left out; single values of a table come before its tables, and lists are inline.

    `comments` are by dotted key and stand behind the value; that of a table stands behind its
    header. Raise ValueError for NaN and infinity.
    """
    return "\n".join(_format_lines(table, comments, ())).strip("\n") + "\n"


def _format_lines(
    table: Mapping[str, Any], comments: Mapping[str, str], key_path: tuple[str, ...]
) -> list[str]:
    """Return the lines of the table at `key_path`, without its own header: single values first,
    then nested tables with their headers, because whatever follows the header of a nested table
    belongs to that one.

    `comments` are by dotted key, and stand behind the value or the header on its line; None values
    are left out. Lists, also of dicts, are written inline. A table that holds only tables gets no
    header, an empty one does. Raise ValueError for NaN and infinity.
    """
    lines = []
    for key, value in table.items():
        if value is not None and not isinstance(value, dict):
            comment = _format_comment(comments, (*key_path, key))
            lines.append(f"{_format_key(key)} = {_format_value(value)}{comment}")
    for key, value in table.items():
        if isinstance(value, dict):
            inner_path = (*key_path, key)
            inner_lines = _format_lines(value, comments, inner_path)
            has_values = any(
                not isinstance(inner_value, dict) and inner_value is not None
                for inner_value in value.values()
            )
            lines += (
                [
                    "",
                    f"[{'.'.join(map(_format_key, inner_path))}]"
                    f"{_format_comment(comments, inner_path)}",
                    *inner_lines,
                ]
                if has_values or not value
                else inner_lines
            )
    return lines


def _format_comment(comments: Mapping[str, str], key_path: tuple[str, ...]) -> str:
    """Return the comment of a key on one line with its leading ` # `, or an empty text if it has
    none. `comments` are by dotted key.
    """
    text = comments.get(".".join(key_path))
    return f" # {' '.join(text.split())}" if text else ""


def _format_key(key: str) -> str:
    """Return a TOML key, in quotes if it needs them."""
    return key if _BARE.fullmatch(key) else _format_text(key)


def _format_text(value: str) -> str:
    """Return a quoted TOML string: that of JSON, with DEL escaped, which TOML does not allow."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _format_value(value: Any) -> str:
    """Return a value as inline TOML: bool, text, number, list or dict of these. Raise ValueError
    for NaN and infinity; None inside a dict is left out.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _format_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a case cannot hold {value}")
    if isinstance(value, list):
        return f"[{', '.join(map(_format_value, value))}]"
    if isinstance(value, dict):
        items = [
            f"{_format_key(k)} = {_format_value(v)}" for k, v in value.items() if v is not None
        ]
        return f"{{{', '.join(items)}}}"
    return repr(value)
