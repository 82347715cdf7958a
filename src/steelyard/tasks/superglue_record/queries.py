"""Read ReCoRD (SuperGLUE): passages of news, and queries with a placeholder that one of the
passage's entities fills.

A line holds a passage with the positions of its entities (first and last character, both included)
and its queries. Texts are normalized as in GLM's processor (`tasks/superglue/dataset.py` of
THUDM/GLM): straight quotes for curly ones, "-" for the en dash, and a highlight as a "- " item.

An entity's text is what stands at its position; an answer's text is its `text`. An answer's
position is ignored, and it need not be one of the entities, as in GLM's processor. In the 187 rows
of the real set that were available every answer is an entity.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from steelyard.data import jsonl
from steelyard.errors import RequestError

PLACEHOLDER = "@placeholder"
# unpacked; val.jsonl has 15 MB, and train.jsonl holds ten times as many queries
MAX_FILE_BYTES = 1 << 30
MAX_LINE_BYTES = 1 << 20

_SUFFIXES = (".jsonl", ".jsonl.gz")
_LINE = (
    'a line is {"passage": {"text": "…", "entities": [{"start": 0, "end": 4}]}, '
    '"qas": [{"query": "… @placeholder …", "answers": [{"text": "…"}]}]}'
)
# As GLM's processor does. Single characters only, so that positions in a text do not shift.
_PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-"})


@dataclass(frozen=True)
class Query:
    """One query with its passage, candidates and answers. Texts are normalized (see
    `normalize_punctuation`).
    """

    passage: str
    query: str  # with one placeholder
    entities: tuple[str, ...]  # each once, sorted
    answers: tuple[str, ...]  # each once, in the order of the file
    name: str  # line of the file and number of the query in it, from 1: `LINE-NUMBER`


def find(folder: Path) -> tuple[Path, Path]:
    """Return the training and the evaluation file (train.jsonl and val.jsonl, perhaps gzipped) of a
    folder. Raises RequestError if one is missing.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise RequestError(
            f"data {str(folder)!r} {what}; give the folder that holds ReCoRD's train.jsonl and"
            " val.jsonl with --data"
        )
    return _one(folder, "train"), _one(folder, "val")


def _one(folder: Path, stem: str) -> Path:
    """Return the file of one split (`stem` is train or val) in a folder. Raises RequestError if it
    is missing.
    """
    for suffix in _SUFFIXES:
        if (path := folder / f"{stem}{suffix}").is_file():
            return path
    raise RequestError(
        f"{folder}: no {stem}.jsonl (.gz) in it; give a folder with train.jsonl and val.jsonl with"
        " --data"
    )


def read(path: Path) -> list[Query]:
    """Read all queries of a file, perhaps gzipped, in line order. Raises RequestError if it is
    unreadable, too large, malformed or empty.
    """
    lines = jsonl.read(
        path, _LINE, MAX_LINE_BYTES, MAX_FILE_BYTES, ", which a file of ReCoRD has at most"
    )
    out = [query for line in lines for query in _queries(line)]
    if not out:
        raise RequestError(_empty(path))
    return out


def check_source(folder: Path) -> None:
    """Raise RequestError if a folder does not hold ReCoRD's files, judged by their names and first
    lines.
    """
    for path in find(folder):
        line = next(jsonl.read(path, _LINE, MAX_LINE_BYTES), None)
        if line is None:
            raise RequestError(_empty(path))
        list(_queries(line))


def _empty(path: Path) -> str:
    """Return the error text for a file without queries."""
    return f"{path}: no queries; {_LINE}"


def plain(text: str) -> str:
    """Return a text with straight quotes, and hyphens for en dashes; its length does not change."""
    return text.translate(_PLAIN)


def _queries(line: jsonl.Line) -> Iterator[Query]:
    """Yield the queries of a line. Raises RequestError if something is malformed, or a query has
    not exactly one placeholder.
    """
    found, where = line.value, line.where
    passage = found.get("passage") if isinstance(found, dict) else None
    if not isinstance(passage, dict) or not isinstance(found.get("qas"), list):
        raise RequestError(f"{where} is {shown(found)}; {_LINE}")
    text = plain(_text(passage.get("text"), "the passage's text", where))
    entities = _entities(passage.get("entities"), text, where)
    written = text.replace("@highlight\n", "- ")
    for i, one in enumerate(found["qas"], 1):
        if not isinstance(one, dict):
            raise RequestError(f"{where}: query {i} is {shown(one)}; {_LINE}")
        query = plain(_text(one.get("query"), f"query {i}", where))
        if (count := query.count(PLACEHOLDER)) != 1:
            raise RequestError(
                f"{where}: query {i} has {count} {PLACEHOLDER} in {shown(query)}; allowed: one"
            )
        yield Query(
            written,
            query,
            entities,
            _answers(one.get("answers"), f"query {i}", where),
            f"{line.number}-{i}",
        )


def _entities(found: Any, text: str, where: str) -> tuple[str, ...]:
    """Return the distinct texts of a passage's entities, sorted. Raises RequestError if there are
    none, or a position is outside the passage.
    """
    if not isinstance(found, list):
        raise RequestError(f"{where}: the passage's entities are {shown(found)}; {_LINE}")
    if not found:
        raise RequestError(
            f"{where}: the passage has no entities, and its queries no candidates; allowed: 1 or"
            " more"
        )
    out = set()
    for i, one in enumerate(found, 1):
        start, end = (one.get("start"), one.get("end")) if isinstance(one, dict) else (None, None)
        if type(start) is not int or type(end) is not int:
            raise RequestError(
                f'{where}: entity {i} is {shown(one)}; an entity is {{"start": 0, "end": 4}}, two'
                " integers"
            )
        if not 0 <= start <= end < len(text):
            raise RequestError(
                f"{where}: entity {i} is from {start} to {end}; allowed: 0 to {len(text) - 1}, the"
                " last character of the passage, and no end before its start"
            )
        out.add(text[start : end + 1])
    return tuple(sorted(out))


def _answers(found: Any, name: str, where: str) -> tuple[str, ...]:
    """Return the distinct texts of a query's answers in file order; `name` names the query in
    errors. Raises RequestError if there are none or one is malformed.
    """
    if found is not None and not isinstance(found, list):
        raise RequestError(f"{where}: the answers of {name} are {shown(found)}; {_LINE}")
    if not found:
        raise RequestError(
            f"{where}: {name} has no answers; the sets of training and evaluation have some, the"
            " test set none"
        )
    out: dict[str, None] = {}
    for i, one in enumerate(found, 1):
        if not isinstance(one, dict):
            raise RequestError(f"{where}: answer {i} of {name} is {shown(one)}; {_LINE}")
        out[plain(_text(one.get("text"), f"the text of answer {i} of {name}", where))] = None
    return tuple(out)


def _text(value: Any, name: str, where: str) -> str:
    """Return a value that is a string with more than white space. Raises RequestError, with `name`
    and `location`, otherwise.
    """
    text = jsonl.text(value, f"{where}: {name} is", _LINE)
    if not text.strip():
        raise RequestError(f"{where}: {name} is {shown(value)}; {_LINE}")
    return text
