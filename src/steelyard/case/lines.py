"""On which line of a TOML file each key stands. The parser of the standard library does not tell.

The text is known to be TOML: it was parsed before. So it is enough to see where statements begin,
which is wherever a line begins outside of strings, brackets and comments.
"""

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from steelyard.files import TOML_STRING

Place = tuple[str | int, ...]

# What decides where a statement ends: strings, comments, brackets and ends of lines.
_TOKEN = re.compile(rf"{TOML_STRING}|#[^\n]*|[\[\]{{}}\n]", re.DOTALL)


def numbers(text: str) -> dict[Place, int]:
    """The first line of every key and table, by its place; elements of an array of tables are
    counted from 0.
    """
    out: dict[Place, int] = {}
    arrays: dict[Place, int] = {}
    table: Place = ()
    for line, statement in _statements(text.replace("\r\n", "\n")):
        if statement.startswith("[["):
            place = _in_arrays(
                _keys(statement.removeprefix("[[").removesuffix("]]")), arrays, last=False
            )
            arrays[place] = arrays.get(place, -1) + 1
            out.setdefault(place, line)
            table = (*place, arrays[place])
        elif statement.startswith("["):
            table = _in_arrays(
                _keys(statement.removeprefix("[").removesuffix("]")), arrays, last=True
            )
        else:
            place = (*table, *_keys(statement))
            for end in range(len(table) + 1, len(place)):
                out.setdefault(place[:end], line)
            out.setdefault(place, line)
            continue
        out.setdefault(table, line)
    return out


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """The beginning of every statement up to its value, and its line: `[table]`, `[[array]]` or
    `key = `.
    """
    begin, line, depth, seen = 0, 1, 0, 1
    bare = ""  # the statement so far without its comments
    for found in [*_TOKEN.finditer(text), None]:
        token = "\n" if found is None else found[0]
        bare += text[begin : len(text) if found is None else found.start()]
        begin = len(text) if found is None else found.end()
        if token == "\n" and depth == 0:
            if bare.strip():
                yield line, bare.strip()
            bare, seen = "", seen + 1
            line = seen
            continue
        seen += token.count("\n")
        depth += (token in "[{") - (token in "]}") if len(token) == 1 and token != "\n" else 0
        bare += "" if token.startswith("#") else token


def _keys(statement: str) -> tuple[str, ...]:
    """The dotted key that a statement begins with, by the parser itself: what stands before its
    first `=` that is in no quotes."""
    quoted = re.match(r"""(?:[^"'=]|"(?:\\.|[^"\\])*"|'[^']*')*""", statement)
    node: Any = tomllib.loads(f"{quoted[0] if quoted else ''} = 0")
    out: list[str] = []
    while isinstance(node, dict):
        ((key, node),) = node.items()
        out.append(key)
    return tuple(out)


def _in_arrays(keys: tuple[str, ...], arrays: dict[Place, int], last: bool) -> Place:
    """The place that a header names: inside the element that came last of each array on the way.
    `last`: also where the header itself names an array."""
    place: Place = ()
    for number, key in enumerate(keys, 1):
        place = (*place, key)
        if place in arrays and (last or number < len(keys)):
            place = (*place, arrays[place])
    return place
