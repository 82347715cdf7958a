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

Place = tuple[str | int, ...]

# The tokens that decide where a statement ends: strings, comments, brackets and line feeds.
_TOKEN = re.compile(rf"{TOML_STRING}|#[^\n]*|[\[\]{{}}\n]", re.DOTALL)


def numbers(text: str) -> dict[Place, int]:
    """Return the first line (from 1) of every key and table of a TOML text, by key path.

    A key path is a tuple of keys; elements of an array of tables are indices from 0, as in
    `("reference", 0, "source")`. The text must be valid TOML.
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
    """Yield the line number and text of each statement, stripped and without comments: `[table]`,
    `[[array]]` or `key = value`.

    A statement over several lines is yielded once, with its first line.
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
    """Return the parts of the dotted key that a statement begins with: the text before its first
    unquoted `=`, parsed by tomllib.
    """
    quoted = re.match(r"""(?:[^"'=]|"(?:\\.|[^"\\])*"|'[^']*')*""", statement)
    node: Any = tomllib.loads(f"{quoted[0] if quoted else ''} = 0")
    out: list[str] = []
    while isinstance(node, dict):
        ((key, node),) = node.items()
        out.append(key)
    return tuple(out)


def _in_arrays(keys: tuple[str, ...], arrays: dict[Place, int], last: bool) -> Place:
    """Return the key path that a table header names, with the index of the latest element after
    each array of tables on the way.

    `arrays` maps the key path of an array to the index of its latest element. With `last`, that
    index is also added if the header itself names an array.
    """
    place: Place = ()
    for number, key in enumerate(keys, 1):
        place = (*place, key)
        if place in arrays and (last or number < len(keys)):
            place = (*place, arrays[place])
    return place
