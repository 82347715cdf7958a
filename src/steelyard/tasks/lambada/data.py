"""Read LAMBADA: passages of novels whose last word can only be guessed from the whole passage.

Reads JSON lines with the key `text` (OpenAI's formatting of the test set) from a file or the folder
that holds it. A worker calls `prepare`, the parent `check_source`.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from steelyard import files
from steelyard.data import jsonl, selection
from steelyard.data.prompt_batches import count_common_prefix
from steelyard.data.seeded_draws import choose_items
from steelyard.data.tokenizer import Tokenizer, require_end_token
from steelyard.errors import RequestError, short_repr
from steelyard.schema import to_canonical_json
from steelyard.tasks.lambada import score
from steelyard.tasks.lambada.task import GeneratedPassagesConfig, LambadaData
from steelyard.tasks.task import (
    DataFacts,
    PreparedData,
    TaskRequest,
    TokenizerFacts,
    fingerprint_parts,
    is_published,
)

FILE_NAMES = (
    "lambada_test.jsonl",
    "lambada_test_bak.jsonl",
    "lambada_test.jsonl.gz",
    "lambada_test_bak.jsonl.gz",
)
MAX_FILE_BYTES = 64 << 20
MAX_LINE_BYTES = 1 << 20
MAX_LINES = 1_000_000

_LINE_FORMAT = 'a line is {"text": "…"}'


@dataclass(frozen=True)
class LambadaTexts:
    """Tokenized passages to score, made by `encode_passages`; implements `PassageTexts`. Per
    passage: `rows`, its token ids with the begin token (if the tokenizer has one) and the end
    token; `groups`, its own number (nothing is shared); `index`, its position in the whole set;
    `last`, the tokens of its last word without the end token.
    """

    rows: list[list[int]]
    groups: list[int]  # every passage is a group of its own
    index: list[int]  # position of each passage in the whole set
    last: list[int]  # tokens of each last word, without the end token


def prepare(request: TaskRequest) -> PreparedData:
    """Read or generate passages, tokenize those that the request selects, and return them as
    `LambadaTexts` with facts and empty outputs. Raises RequestError if data are missing or wrong,
    the tokenizer does not fit, the selection does not exist, or a passage cannot be encoded as
    required (`encode_passages`).
    """
    fields: LambadaData = request.data
    texts, label = load_passages(fields, request.sources.data)
    tokenizer = request.load_tokenizer()
    pool = (
        None
        if request.rows is None
        else selection.find_positions(request.rows, len(texts), "passage")
    )
    passages = encode_passages(
        texts, tokenizer, request.positions, request.sample, request.seed, pool
    )
    digest = fingerprint_passages(texts, tokenizer)
    facts = DataFacts(
        source=label,
        rows=len(texts),
        rows_in_scope=len(passages.rows),
        tokens=sum(len(row) for row in passages.rows),
        fingerprint=digest,
        published=is_published(digest, fields.fingerprint),
        tokenizer=TokenizerFacts.from_tokenizer(tokenizer),
    )
    empty_outputs = score.make_passage_outputs(
        [len(row) - 1 for row in passages.rows], passages.last, passages.index
    )
    return PreparedData(passages, facts, empty_outputs)


def load_passages(data: LambadaData, source: Path | None) -> tuple[list[str], str]:
    """Return the passages and the name of their file; without a path, generated passages and
    "made". Raises RequestError if no path is given and the case generates none, if the file is
    missing or malformed, or if its number of passages is not the case's `rows`.
    """
    if source is None:
        if data.made is None:
            raise RequestError(
                "this size needs LAMBADA: give lambada_test.jsonl or the folder that holds it with"
                " --data"
            )
        return generate_passages(data.made), "made"
    path = _find_file(source)
    texts = read_passages(path)
    if len(texts) != data.rows:
        raise RequestError(
            f"{path}: {len(texts)} passages; the case has {data.rows}; "
            + (
                "data of your own are for --size full"
                if data.made
                else "give the whole test set, or set question.data.rows"
            )
        )
    return texts, path.name


def read_passages(source: Path) -> list[str]:
    """Read all passages, in line order, of a JSON-lines file (perhaps gzipped) or of the folder
    that holds it: the first of `FILE_NAMES` in it, else in its `data/`. Raises RequestError if the
    file is missing, unreadable, empty or above a limit (64 MiB, a million lines, 1 MiB in a line),
    or a line is malformed.
    """
    path = _find_file(source)
    with jsonl.refuse_unreadable(path, "; LAMBADA's test set has 1.8 MB"):
        content = files.read_file(path, MAX_FILE_BYTES)
    if content.count(b"\n") > MAX_LINES:
        raise RequestError(f"{path}: more than {MAX_LINES} lines; LAMBADA's test set has 5153")
    if not content:
        raise RequestError(_empty_file_message(path))
    return [
        _check_passage(line)
        for line in jsonl.parse_json_lines(_limit_lines(content, path), path, _LINE_FORMAT)
    ]


def check_source(source: Path) -> None:
    """Raise RequestError if LAMBADA's file, or the folder that holds it (or whose `data/` does), is
    missing or empty, or the first line is not one of LAMBADA. Reads no further lines.
    """
    path = _find_file(source)
    line = next(jsonl.read_json_lines(path, _LINE_FORMAT, MAX_LINE_BYTES), None)
    if line is None:
        raise RequestError(_empty_file_message(path))
    _check_passage(line)


def _empty_file_message(path: Path) -> str:
    """Return the error text for a file without lines."""
    return f"{path}: no lines; LAMBADA's test set has 5153"


def _find_file(source: Path) -> Path:
    """Return LAMBADA's data file: the path itself if it is a file, or the first of `FILE_NAMES` in
    the folder, else in its `data/`. Raises RequestError if there is none.
    """
    if source.is_file():
        return source
    if not source.is_dir():
        raise RequestError(
            f"data {str(source)!r} does not exist; give lambada_test.jsonl or the folder that holds"
            " it with --data"
        )
    for folder in (source, source / "data"):
        for name in FILE_NAMES:
            if (folder / name).is_file():
                return folder / name
    raise RequestError(
        f"{source}: no lambada_test.jsonl in it, nor in its data/; give that file or its folder"
        " with --data"
    )


def _limit_lines(content: bytes, path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, bytes) of each line of a file's content. Raises RequestError if one has
    more than `MAX_LINE_BYTES`; `path` is for the message.
    """
    for number, line in jsonl.split_lines(content):
        if len(line) > MAX_LINE_BYTES:
            raise RequestError(
                f"{path}: line {number} has {len(line)} bytes; allowed: at most {MAX_LINE_BYTES}"
            )
        yield number, line


def _check_passage(line: jsonl.JsonLine) -> str:
    """Return the passage in key `text` of a line, unchanged. Raises RequestError unless it is a
    string of valid Unicode, of at least two words with a space between, that does not end in white
    space.
    """
    text = line.value.get("text") if isinstance(line.value, dict) else None
    if not isinstance(text, str):
        raise RequestError(f"{line.location} is {short_repr(line.raw.decode())}; {_LINE_FORMAT}")
    # Texts are not stripped: one that ends in white space has no last word, and a last word needs
    # words before it.
    if text != text.rstrip() or not text.rpartition(" ")[0].strip():
        raise RequestError(
            f"{line.location} has the text {short_repr(text)}; it needs two words with a space"
            " between, and to end in one"
        )
    return jsonl.require_text(text, f"{line.location} has the text", _LINE_FORMAT)


def fingerprint_passages(texts: list[str], tokenizer: Tokenizer) -> str:
    """Return the SHA-256 (hex) of all passages in order and of the tokenizer's vocabulary."""
    return fingerprint_parts(tokenizer, [to_canonical_json(texts)])


def encode_passages(
    texts: list[str],
    tokenizer: Tokenizer,
    positions: int,
    sample: int | None,
    seed: int,
    pool: list[int] | None = None,
) -> LambadaTexts:
    """Tokenize all passages, or those at the positions in `pool`, or a seeded sample of these, in
    the order of the set; each gets the end token once.

    The last word is what follows the last space; its tokens are those from the first on that
    differs from the text without it. Raises RequestError if a passage has more tokens than
    `positions`, its last word has no token of its own, the tokenizer has no end token, or the
    sample is larger than the set.
    """
    end = require_end_token(tokenizer)
    index = choose_items(len(texts), sample, seed, "passage", pool)
    # The last word is what follows the last space.
    whole_texts = [_strip_end(ids, end) for ids in tokenizer.encode([texts[i] for i in index])]
    without_last_word = [
        _strip_end(ids, end)
        for ids in tokenizer.encode([texts[i].rpartition(" ")[0] for i in index])
    ]
    rows, last = [], []
    for i, whole, before in zip(index, whole_texts, without_last_word, strict=True):
        if len(whole) + 1 > positions:
            raise RequestError(
                f"passage {i + 1} (its line) has {len(whole) + 1} tokens; the model has {positions}"
                " positions, and no passage is cut"
            )
        rows.append([*whole, end])
        last.append(len(whole) - count_common_prefix([whole, before]))
        if not last[-1]:
            raise RequestError(
                f"tokenizer {tokenizer.source}: the last word of passage {i + 1} (its line) has no"
                " token of its own"
            )
    return LambadaTexts(rows, list(range(len(rows))), index, last)


def _strip_end(ids: list[int], end: int) -> list[int]:
    """Return tokens without the end token that some tokenizers append themselves."""
    return ids[:-1] if ids[-1:] == [end] else ids


_WHO = ("Mira", "Jonas", "Adele", "Tomas", "Ruth", "Anselm", "Clara", "Edvard")
# With hyphens, so that some last words are several tokens.
_THINGS = (
    "lantern",
    "ledger",
    "kettle",
    "compass",
    "violin",
    "ladder",
    "saddle",
    "mirror",
    "tide-table",
    "bell-rope",
)
_PLACES = (
    "harbour",
    "orchard",
    "chapel",
    "quarry",
    "mill",
    "station",
    "garden",
    "bridge",
    "cellar",
    "market",
)
_DEEDS = ("carried", "brought", "dragged", "lent", "promised", "returned")
_TURNS = ("", "that evening", "without a word", "in the rain", "once more")
_CLOSINGS = (
    "Nobody else had ever asked about the",
    "On the way home they spoke of the",
    "In the end there was still the",
)


def generate_passages(config: GeneratedPassagesConfig) -> list[str]:
    """Generate `config.passages` distinct passages from a seed: who took what where, ending with
    one of these things.
    """
    rng = random.Random(f"lambada:{config.seed}")
    passages: dict[str, None] = {}
    while len(passages) < config.passages:
        passages[_generate_passage(rng)] = None
    return list(passages)


def _generate_passage(rng: random.Random) -> str:
    """Generate one passage of one to five sentences and an unfinished one, whose last word occurs
    earlier in it. Advances `rng`.
    """
    things = rng.sample(_THINGS, rng.randrange(1, 6))
    sentences = []
    for thing in things:
        turn = rng.choice(_TURNS)
        deed = f"{rng.choice(_WHO)} {rng.choice(_DEEDS)} the {thing} to the {rng.choice(_PLACES)}"
        sentences.append(f"{deed} {turn}." if turn else f"{deed}.")
    return " ".join([*sentences, f"{rng.choice(_CLOSINGS)} {rng.choice(things)}"])
