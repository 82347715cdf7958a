"""Read conversations to fine-tune on from a file or the folder that holds it, or generate them.

Two forms are read, told apart by their first character and perhaps gzipped: alpaca's JSON (a list
of objects with `instruction`, `input` and `output`) and JSON lines of FlagAI's Aquila (objects with
`conversations`, a list of turns with `from` and `value`, and perhaps `instruction`). In alpaca's
JSON the human says the instruction and the input, if any, with the case's `joint` between them. The
converter that made FlagAI's `alpaca_data_train.jsonl`, the file of the published runs, is not
public; that file has three line feeds between the two. JSON lines already contain their joint, so
that field has no effect on them. An answer may be empty: alpaca's data has some.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Literal

from steelyard import files
from steelyard.data import jsonl
from steelyard.errors import RequestError
from steelyard.tasks.alpaca.task import AlpacaData, GeneratedConversationsConfig

MAX_FILE_BYTES = 1 << 30
MAX_GZIP_BYTES = 256 << 20
BEGIN_BYTES = 1 << 20  # of a file that `check_source` reads
DEFAULT_JOINT: str = AlpacaData.model_fields["joint"].default

Role = Literal["human", "assistant"]

_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
# Files of a tokenizer, which may lie beside the data.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_ROLES: dict[str, Role] = {
    "human": "human",
    "user": "human",
    "gpt": "assistant",
    "assistant": "assistant",
}
_ELEMENT_FORMAT = 'an element is {"instruction": "…", "input": "…", "output": "…"}'
_STRING = "allowed: a string"
_LINE_FORMAT = (
    'a line is {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}],'
    ' "instruction": "…"}'
)


@dataclass(frozen=True)
class Conversation:
    """One conversation: `turns` as (role, text), human and assistant alternating and the human
    first, the assistant at least once; and `instruction` to the assistant before them, mostly "".
    """

    turns: tuple[tuple[Role, str], ...]
    instruction: str = ""


def read_conversations(source: Path, joint: str = DEFAULT_JOINT) -> tuple[list[Conversation], str]:
    """Read all conversations of a file in file order; return them with the file's name. `source` is
    alpaca's JSON or conversations as JSON lines, perhaps gzipped, or a folder with exactly one such
    file (.json, .jsonl, perhaps .gz; tokenizer files aside).

    `joint` is put between instruction and input of alpaca's JSON, and has no effect on JSON lines.
    Raises RequestError if the file is missing, unreadable, too large or malformed, or a folder has
    none or several.
    """
    path = _find_file(source)
    return list(_parse_conversations(_read_content(path), path, joint)), path.name


def check_source(source: Path) -> None:
    """Raise RequestError if a data file (alpaca's JSON or JSON lines, perhaps gzipped, or a folder
    with exactly one such file) does not begin with a valid conversation. Parses no more than the
    first, and reads at most the first MiB (unpacked); a conversation that is cut there is accepted.
    """
    path = _find_file(source)
    with jsonl.refuse_unreadable(path):
        content = files.read_file_start(path, BEGIN_BYTES)
    cut = len(content) == BEGIN_BYTES
    if cut:
        content = content.decode("utf-8", "ignore").encode()  # drop a cut character at the end
    try:
        next(_parse_conversations(content, path, DEFAULT_JOINT))
    except RequestError as error:
        # Cut JSON is no error: it may continue behind the cut.
        if not cut or not isinstance(error.__cause__, ValueError):
            raise


def _parse_conversations(content: bytes, path: Path, joint: str) -> Iterator[Conversation]:
    """Parse a file's content and yield its conversations one at a time. A file that begins with "["
    is alpaca's JSON list, one with "{" conversations as JSON lines.

    `joint` is put between instruction and input of alpaca's, and has no effect on JSON lines;
    `path` is for messages. Raises RequestError if the file begins otherwise or is empty, or when it
    comes to a malformed element or line.
    """
    first = content.lstrip(b" \t\r\n")[:1]
    if first == b"[":
        yield from (
            _convert_element(element, location, joint)
            for element, location in _parse_elements(content, path)
        )
    elif first == b"{":
        yield from map(
            _convert_line, jsonl.parse_json_lines(jsonl.split_lines(content), path, _LINE_FORMAT)
        )
    else:
        begins = f"begins with {first!r}" if first else "is empty"
        raise RequestError(
            f"{path}: {begins}; allowed: alpaca's JSON, which is a list, or conversations, one"
            " object a line"
        )


def _find_file(source: Path) -> Path:
    """Return the data file: the path itself if it is a file, or the only .json or .jsonl (.gz) file
    of a folder, tokenizer files aside. Raises RequestError if the path does not exist or the folder
    has not exactly one.
    """
    if source.is_file():
        return source
    if not source.is_dir():
        raise RequestError(
            f"data {str(source)!r} does not exist; give alpaca_data.json or the folder that holds"
            " it with --data"
        )
    names = sorted(
        p.name
        for p in source.iterdir()
        if p.name.endswith(_SUFFIXES) and p.name not in _TOKENIZER_FILES and p.is_file()
    )
    if len(names) != 1:
        raise RequestError(
            f"{source}:"
            f" {', '.join(names[:3]) + (', …' if len(names) > 3 else '') or 'no .json or .jsonl'}"
            " in it; give a folder with one .json or .jsonl (.gz), or that file, with --data"
        )
    return source / names[0]


def _read_content(path: Path) -> bytes:
    """Return the bytes of a file, unpacked if gzipped. Raises RequestError if it cannot be read,
    has more than 1 GiB unpacked, or is a gzip of more than 256 MiB.
    """
    with jsonl.refuse_unreadable(path, "; alpaca's data has 23 MB"):
        with files.open_regular(path) as file:
            compressed = file.read(len(files.GZIP_MAGIC)) == files.GZIP_MAGIC
        if compressed and path.stat().st_size > MAX_GZIP_BYTES:
            raise RequestError(
                f"{path}: larger than {MAX_GZIP_BYTES} bytes, the limit for a compressed file"
            )
        return files.read_file(path, MAX_FILE_BYTES)


_SPACE = re.compile(r"[ \t\n\r]*")


def _skip_space(text: str, position: int) -> int:
    """Return the first position in `text`, from `position` on, that is not JSON white space; the
    text's length if there is none.
    """
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _parse_elements(content: bytes, path: Path) -> Iterator[tuple[Any, str]]:
    """Parse a JSON list element by element, and yield (element, its location for error messages);
    an element may be any JSON value.

    Raises RequestError at the first element that is not JSON, so that a wrong file is refused
    before it fills the memory; also if the content is not UTF-8, for an empty list, and for
    anything but a comma or the list's end behind an element, or text behind the list.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: not UTF-8: {error}") from error
    position = _skip_space(text, _skip_space(text, 0) + 1)
    if text[position : position + 1] == "]":
        raise RequestError(f"{path}: an empty list; alpaca's data has 52002 elements")
    number, separator = 0, ","
    while separator == ",":
        number += 1
        location = f"{path}: element {number}"
        try:
            element, position = files.JSON_DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{location} is not JSON: {files.explain_json_error(error)}; {_ELEMENT_FORMAT}"
            ) from error
        yield element, location
        position = _skip_space(text, position)
        separator = text[position : position + 1]
        position = _skip_space(text, position + 1)
    if separator != "]" or text[position:]:
        behind = f"element {number}" if separator != "]" else "the list"
        raise RequestError(
            f"{path}: {shown(separator if separator != ']' else text[position:])} behind"
            f" {behind}; the file is one JSON list"
        )


def _convert_element(element: Any, location: str, joint: str) -> Conversation:
    """Return an object of alpaca's JSON as a conversation of two turns: the human's instruction,
    with `joint` and the input behind it if there is an input, and the assistant's output. Raises
    RequestError, which begins with `location`, if it is no object, `instruction` or `output` is
    missing, or a field is no string of valid Unicode.
    """
    if not isinstance(element, dict):
        raise RequestError(f"{location} is {shown(element)}; {_ELEMENT_FORMAT}")
    for key in ("instruction", "output"):
        if key not in element:
            raise RequestError(f"{location} has no {key}; {_ELEMENT_FORMAT}")
    instruction, extra_input, answer = (
        jsonl.require_text(element.get(key, ""), f"{location}: {key} is", _STRING)
        for key in ("instruction", "input", "output")
    )
    return Conversation(
        (
            ("human", f"{instruction}{joint}{extra_input}" if extra_input else instruction),
            ("assistant", answer),
        )
    )


def _convert_line(line: jsonl.JsonLine) -> Conversation:
    """Return a JSON line as a conversation. Raises RequestError if it is not of the form of
    `_LINE_FORMAT`: turns must alternate between human ("human" or "user") and assistant ("gpt" or
    "assistant"), the human first and the assistant at least once; the last turn may be the human's.
    Texts must be valid Unicode; `instruction` may be missing.
    """
    value, location = line.value, line.location
    turns = value.get("conversations") if isinstance(value, dict) else None
    if not isinstance(turns, list):
        raise RequestError(f"{location} is {shown(value)}; {_LINE_FORMAT}")
    checked_turns = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or not {"from", "value"} <= set(turn):
            raise RequestError(
                f'{location}: turn {number} is {shown(turn)}; a turn is {{"from": "human", "value":'
                ' "…"}'
            )
        speaker = turn["from"]
        role = _ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise RequestError(
                f"{location}: turn {number} is from {shown(speaker)}; allowed: {', '.join(_ROLES)}"
            )
        if role != ("human", "assistant")[(number - 1) % 2]:
            raise RequestError(
                f"{location}: turn {number} is the {role}'s; turns alternate, and the human begins"
            )
        checked_turns.append(
            (
                role,
                jsonl.require_text(
                    turn["value"], f"{location}: the value of turn {number} is", _STRING
                ),
            )
        )
    if len(checked_turns) < 2:
        raise RequestError(f"{location}: no turn of the assistant; it has nothing to train on")
    return Conversation(
        tuple(checked_turns),
        jsonl.require_text(value.get("instruction", ""), f"{location}: instruction is", _STRING),
    )


_WORDS = (
    *(
        "lamp",
        "stone",
        "tide",
        "bell",
        "ladder",
        "mirror",
        "kettle",
        "orchard",
        "bridge",
        "violin",
        "ledger",
        "compass",
    ),
    *(
        "harbour",
        "saddle",
        "candle",
        "market",
        "garden",
        "anchor",
        "basket",
        "feather",
        "hammer",
        "island",
        "needle",
        "window",
    ),
)


def generate_conversations(
    config: GeneratedConversationsConfig, joint: str = DEFAULT_JOINT
) -> list[Conversation]:
    """Generate `config.conversations` distinct conversations of one or two exchanges from a seed,
    in which words are to be repeated. Some have instruction and input with `joint` between them.
    """
    rng = random.Random(f"alpaca:{config.seed}")
    conversations: dict[Conversation, None] = {}
    while len(conversations) < config.conversations:
        conversations[
            Conversation(
                tuple(
                    turn
                    for _ in range(rng.choice((1, 1, 1, 2)))
                    for turn in _generate_exchange(rng, joint)
                )
            )
        ] = None
    return list(conversations)


def _generate_exchange(rng: random.Random, joint: str) -> tuple[tuple[Role, str], tuple[Role, str]]:
    """Generate one exchange from three random words: a request of the human, and the assistant's
    right answer, as two (role, text). Advances `rng`.
    """
    first, second, third = rng.sample(_WORDS, 3)
    request, answer = rng.choice(
        (
            (f"Repeat the word {first}.", first),
            (f"Repeat the words.{joint} {first} {second} {third}", f"{first} {second} {third}"),
            (f"Which word is the first: {first}, {second} or {third}?", first),
            (f"Which word is the last: {first}, {second} or {third}?", third),
            (f"Say {first} and {second} the other way round.", f"{second} and {first}"),
        )
    )
    return ("human", request), ("assistant", answer)
