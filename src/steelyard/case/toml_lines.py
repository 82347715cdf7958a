"""Find the line on which each key of a TOML file stands, for error messages: tomllib does not tell.

`case/problems.py` calls it with the text of a case file. The text was parsed before and is valid
TOML, so it is enough to find where statements begin: wherever a line begins outside of strings,
brackets and comments.
"""

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from steelyard.files import TOML_STRING

KeyPath = tuple[str | int, ...]

# The tokens that decide where a statement ends: strings, comments, brackets and line feeds.
_TOKEN = re.compile(rf"{TOML_STRING}|#[^\n]*|[\[\]{{}}\n]", re.DOTALL)


def find_line_numbers(text: str) -> dict[KeyPath, int]:
    """Return the first line (from 1) of every key and table of a TOML text, by key path.

    A key path is a tuple of keys; elements of an array of tables are indices from 0, as in
    `("reference", 0, "source")`. The text must be valid TOML.
    """
    line_numbers: dict[KeyPath, int] = {}
    latest_elements: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for line, statement in _split_statements(text.replace("\r\n", "\n")):
        if statement.startswith("[["):
            key_path = _add_array_indices(
                _parse_key(statement.removeprefix("[[").removesuffix("]]")),
                latest_elements,
                last=False,
            )
            latest_elements[key_path] = latest_elements.get(key_path, -1) + 1
            line_numbers.setdefault(key_path, line)
            table = (*key_path, latest_elements[key_path])
        elif statement.startswith("["):
            table = _add_array_indices(
                _parse_key(statement.removeprefix("[").removesuffix("]")),
                latest_elements,
                last=True,
            )
        else:
            key_path = (*table, *_parse_key(statement))
            for end in range(len(table) + 1, len(key_path)):
                line_numbers.setdefault(key_path[:end], line)
            line_numbers.setdefault(key_path, line)
            continue
        line_numbers.setdefault(table, line)
    return line_numbers


def _split_statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number of the first line (from 1) and the text of each statement of a TOML text,
    stripped and without comments: `[table]`, `[[array]]` or `key = value`.

    A statement over several lines (in strings or brackets) is yielded once.
    """
    begin, line, depth, current_line = 0, 1, 0, 1
    statement = ""  # the statement so far without its comments
    for match in [*_TOKEN.finditer(text), None]:
        token = "\n" if match is None else match[0]
        statement += text[begin : len(text) if match is None else match.start()]
        begin = len(text) if match is None else match.end()
        if token == "\n" and depth == 0:
            if statement.strip():
                yield line, statement.strip()
            statement, current_line = "", current_line + 1
            line = current_line
            continue
        current_line += token.count("\n")
        depth += (token in "[{") - (token in "]}") if len(token) == 1 and token != "\n" else 0
        statement += "" if token.startswith("#") else token


def _parse_key(statement: str) -> tuple[str, ...]:
    """Return the parts of the dotted key that a TOML statement begins with: the text before its
    first unquoted `=`, or all of it, parsed by tomllib. `a."b.c" = 1` gives ("a", "b.c").
    """
    before_equals = re.match(r"""(?:[^"'=]|"(?:\\.|[^"\\])*"|'[^']*')*""", statement)
    node: Any = tomllib.loads(f"{before_equals[0] if before_equals else ''} = 0")
    parts: list[str] = []
    while isinstance(node, dict):
        ((key, node),) = node.items()
        parts.append(key)
    return tuple(parts)


def _add_array_indices(
    keys: tuple[str, ...], latest_elements: dict[KeyPath, int], last: bool
) -> KeyPath:
    """Return the key path that a table header names by `keys`, with the index of the latest element
    inserted after each array of tables on the way.

    `latest_elements` maps the key path of an array to the index of its latest element so far. With
    `last`, that index is also added if the header itself names an array.
    """
    key_path: KeyPath = ()
    for number, key in enumerate(keys, 1):
        key_path = (*key_path, key)
        if key_path in latest_elements and (last or number < len(keys)):
            key_path = (*key_path, latest_elements[key_path])
    return key_path
