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
_LINE_FORMAT = (
    'a line is {"passage": {"text": "…", "entities": [{"start": 0, "end": 4}]}, '
    '"qas": [{"query": "… @placeholder …", "answers": [{"text": "…"}]}]}'
)
# As GLM's processor does. Single characters only, so that positions in a text do not shift.
_PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-"})


@dataclass(frozen=True)
class Query:
    """One query of ReCoRD: its `passage`, the `query` text with one placeholder, `entities`, the
    candidates (each once, sorted), `answers` (each once, in the order of the file), and `name`, the
    line of the file and the number of the query in it, from 1 (`LINE-NUMBER`). Texts are normalized
    (see `normalize_punctuation`); highlights of the passage are "- " items.
    """

    passage: str
    query: str  # with one placeholder
    entities: tuple[str, ...]  # each once, sorted
    answers: tuple[str, ...]  # each once, in the order of the file
    name: str  # line of the file and number of the query in it, from 1: `LINE-NUMBER`


def find_query_files(folder: Path) -> tuple[Path, Path]:
    """Return (training file, evaluation file) of a folder: train.jsonl and val.jsonl, each perhaps
    with .gz. Raises RequestError if the path is no folder or one of the files is missing.
    """
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise RequestError(
            f"data {str(folder)!r} {problem}; give the folder that holds ReCoRD's train.jsonl and"
            " val.jsonl with --data"
        )
    return _find_split(folder, "train"), _find_split(folder, "val")


def _find_split(folder: Path, stem: str) -> Path:
    """Return the file of one split in a folder: `stem` (train or val) with .jsonl, else with
    .jsonl.gz. Raises RequestError if both are missing.
    """
    for suffix in _SUFFIXES:
        if (path := folder / f"{stem}{suffix}").is_file():
            return path
    raise RequestError(
        f"{folder}: no {stem}.jsonl (.gz) in it; give a folder with train.jsonl and val.jsonl with"
        " --data"
    )


def read_queries(path: Path) -> list[Query]:
    """Read all queries of a file of ReCoRD, perhaps gzipped, in file order. Raises RequestError if
    it is unreadable, larger than 1 GiB unpacked, has a line of more than 1 MiB or a malformed one,
    or no queries.
    """
    lines = jsonl.read_json_lines(
        path, _LINE_FORMAT, MAX_LINE_BYTES, MAX_FILE_BYTES, ", which a file of ReCoRD has at most"
    )
    queries = [query for line in lines for query in _parse_line(line)]
    if not queries:
        raise RequestError(_empty_file_message(path))
    return queries


def check_source(folder: Path) -> None:
    """Raise RequestError if a folder does not hold ReCoRD's train and val files, or the first line
    of one is missing or malformed. Reads no further lines.
    """
    for path in find_query_files(folder):
        line = next(jsonl.read_json_lines(path, _LINE_FORMAT, MAX_LINE_BYTES), None)
        if line is None:
            raise RequestError(_empty_file_message(path))
        list(_parse_line(line))


def _empty_file_message(path: Path) -> str:
    """Return the error text for a file without queries."""
    return f"{path}: no queries; {_LINE_FORMAT}"


def normalize_punctuation(text: str) -> str:
    """Return a text with straight quotes, and hyphens for en dashes; its length does not change."""
    return text.translate(_PLAIN)


def _parse_line(line: jsonl.JsonLine) -> Iterator[Query]:
    """Yield the queries of a line, each with the line's passage and entities, and the name
    LINE-NUMBER (number in the line, from 1). Quotes and dashes are made plain, and "@highlight"
    lines of the passage become "- " items.

    Raises RequestError if something is missing or malformed, a text is empty, or a query has not
    exactly one placeholder. A line may have no queries.
    """
    value, location = line.value, line.location
    passage = value.get("passage") if isinstance(value, dict) else None
    if not isinstance(passage, dict) or not isinstance(value.get("qas"), list):
        raise RequestError(f"{location} is {shown(value)}; {_LINE_FORMAT}")
    text = normalize_punctuation(
        _require_words(passage.get("text"), "the passage's text", location)
    )
    entities = _parse_entities(passage.get("entities"), text, location)
    itemized = text.replace("@highlight\n", "- ")
    for i, element in enumerate(value["qas"], 1):
        if not isinstance(element, dict):
            raise RequestError(f"{location}: query {i} is {shown(element)}; {_LINE_FORMAT}")
        query = normalize_punctuation(_require_words(element.get("query"), f"query {i}", location))
        if (count := query.count(PLACEHOLDER)) != 1:
            raise RequestError(
                f"{location}: query {i} has {count} {PLACEHOLDER} in {shown(query)}; allowed: one"
            )
        yield Query(
            itemized,
            query,
            entities,
            _parse_answers(element.get("answers"), f"query {i}", location),
            f"{line.number}-{i}",
        )


def _parse_entities(entities: Any, text: str, location: str) -> tuple[str, ...]:
    """Return the distinct texts at the positions of a passage's entities, sorted; `text` is the
    passage before highlights are replaced, which would shift positions. Raises RequestError, which
    begins with `location`, if there are no entities, one is malformed, or its position is outside
    the passage.
    """
    if not isinstance(entities, list):
        raise RequestError(
            f"{location}: the passage's entities are {shown(entities)}; {_LINE_FORMAT}"
        )
    if not entities:
        raise RequestError(
            f"{location}: the passage has no entities, and its queries no candidates; allowed: 1 or"
            " more"
        )
    texts = set()
    for i, entity in enumerate(entities, 1):
        start, end = (
            (entity.get("start"), entity.get("end")) if isinstance(entity, dict) else (None, None)
        )
        if type(start) is not int or type(end) is not int:
            raise RequestError(
                f'{location}: entity {i} is {shown(entity)}; an entity is {{"start": 0, "end": 4}},'
                " two integers"
            )
        if not 0 <= start <= end < len(text):
            raise RequestError(
                f"{location}: entity {i} is from {start} to {end}; allowed: 0 to {len(text) - 1},"
                " the last character of the passage, and no end before its start"
            )
        texts.add(text[start : end + 1])
    return tuple(sorted(texts))


def _parse_answers(answers: Any, name: str, location: str) -> tuple[str, ...]:
    """Return the distinct texts of a query's answers, normalized, in file order; `name` names the
    query in errors. Raises RequestError if there are none (as in the test set), or one is malformed
    or empty.
    """
    if answers is not None and not isinstance(answers, list):
        raise RequestError(
            f"{location}: the answers of {name} are {shown(answers)}; {_LINE_FORMAT}"
        )
    if not answers:
        raise RequestError(
            f"{location}: {name} has no answers; the sets of training and evaluation have some, the"
            " test set none"
        )
    texts: dict[str, None] = {}
    for i, answer in enumerate(answers, 1):
        if not isinstance(answer, dict):
            raise RequestError(
                f"{location}: answer {i} of {name} is {shown(answer)}; {_LINE_FORMAT}"
            )
        texts[
            normalize_punctuation(
                _require_words(answer.get("text"), f"the text of answer {i} of {name}", location)
            )
        ] = None
    return tuple(texts)


def _require_words(value: Any, name: str, location: str) -> str:
    """Return a value, unchanged, that is a string of valid Unicode with more than white space.
    Otherwise raises RequestError, which begins with `location` and says what the value is by
    `name`.
    """
    text = jsonl.require_text(value, f"{location}: {name} is", _LINE_FORMAT)
    if not text.strip():
        raise RequestError(f"{location}: {name} is {shown(value)}; {_LINE_FORMAT}")
    return text
