"""Tokenizers, from `tokenizer.json`, from a SentencePiece `tokenizer.model`, from byte-level BPE's
`vocab.json` with `merges.txt`, from BERT's `vocab.txt`, or made by the package for its own data."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Protocol, TypeVar

from steelyard import files
from steelyard.errors import RequestError

MAX_TOKENIZER_BYTES = 256 << 20
MAX_CONFIG_BYTES = 16 << 20

Kind = TypeVar("Kind")


class Tokenizer(Protocol):
    source: str
    vocab: int
    # of the pieces in the order of their ids, so that two files of one vocabulary agree
    sha256: str
    end: int | None  # the token that ends a text, None where the tokenizer does not tell

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids with whatever begins a sequence for this tokenizer."""


class WordPieces(Tokenizer, Protocol):
    """A tokenizer that adds nothing to a text, and says which pieces begin, fill and mask one."""

    cls: int
    pad: int
    mask: int


class MadeTokenizer:
    """For made data: a piece is a word with its leading space, and its id a hash of it. The four
    answers have ids of their own, so that no other word can be one."""

    source = "made"
    end: int | None = 0

    def __init__(self, vocab: int) -> None:
        least = 3 + len(_ANSWERS)
        if vocab < least:
            raise RequestError(
                f"question.model.vocab={vocab} has no room for made data; allowed: {least} or more"
            )
        self.vocab = vocab
        self.sha256 = hashlib.sha256(f"made-1:{vocab}".encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[1, *map(self._id, re.findall(r" ?\w+|\s|[^\w\s]", text))] for text in texts]

    def _id(self, piece: str) -> int:
        if piece in _ANSWERS:
            return 2 + _ANSWERS.index(piece)
        first = 2 + len(_ANSWERS)
        return first + int.from_bytes(hashlib.sha256(piece.encode()).digest()[:4]) % (
            self.vocab - first
        )


_ANSWERS = (" A", " B", " C", " D")


class JsonTokenizer:
    """Hugging Face `tokenizers` file."""

    def __init__(self, path: Path) -> None:
        tokenizers = _need("tokenizers")
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
        # the library raises nothing narrower, and panics on some files
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise RequestError(f"{path}: not a tokenizer.json: {error}") from error
        self._inner.no_padding()
        self._inner.no_truncation()
        pieces = self._inner.get_vocab(with_added_tokens=True)
        if not pieces:
            raise RequestError(f"{path}: a tokenizer.json without tokens")
        self.source = path.name
        self.vocab = max(pieces.values()) + 1
        self.sha256 = _pieces_sha256(sorted(pieces, key=lambda piece: int(pieces[piece])))
        self.end: int | None = _configured_end(path.with_name("tokenizer_config.json"), pieces)

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._inner.encode_batch(texts)]


class SentencePieceTokenizer:
    """SentencePiece model file; the beginning-of-sequence token comes first where the model has
    one.
    """

    def __init__(self, path: Path) -> None:
        sentencepiece = _need("sentencepiece")
        try:
            self._inner = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise RequestError(f"{path}: not a SentencePiece model: {error}") from error
        self.source = path.name
        self.vocab = int(self._inner.get_piece_size())
        self.sha256 = _pieces_sha256([self._inner.id_to_piece(i) for i in range(self.vocab)])
        self.end: int | None = int(self._inner.eos_id()) if self._inner.eos_id() >= 0 else None

    def encode(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._inner.encode(texts, add_bos=self._inner.bos_id() >= 0)
        return ids


class BytePairTokenizer:
    """Byte-level BPE: `vocab.json`, `merges.txt`, and perhaps `special_tokens.txt` with tokens that
    follow the vocabulary's.

    These are ids to begin and end with and never a reading of a text, which may hold "</s>" as any
    other letters."""

    def __init__(self, path: Path) -> None:
        tokenizers = _need("tokenizers")
        byte_level = tokenizers.pre_tokenizers.ByteLevel
        ids = _vocabulary(path, byte_level.alphabet())
        merges = _merges(path, ids)
        special = _special(path.with_name("special_tokens.txt"), ids)
        try:
            self._inner = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges))
        except Exception as error:  # the library raises nothing narrower
            raise RequestError(f"{path}: not byte-level BPE: {error}") from error
        self._inner.pre_tokenizer = byte_level(add_prefix_space=False)
        pieces = [*sorted(ids, key=lambda piece: ids[piece]), *special]
        places = {piece: i for i, piece in enumerate(pieces)}
        self.source = path.name
        self.vocab = len(pieces)
        self.sha256 = _pieces_sha256(pieces)
        self.end: int | None = places.get("</s>", places.get("<|endoftext|>"))
        self._begin = [places["[CLS]"]] if "[CLS]" in special else []

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [self._begin + encoding.ids for encoding in self._inner.encode_batch(texts)]


class WordPieceTokenizer:
    """BERT's uncased word pieces: `vocab.txt`, one a line, whose number (from 0) is the piece's id.

    A text is its words and nothing around them, and "[MASK]" in one is three pieces: the special
    ones are ids to put."""

    def __init__(self, path: Path) -> None:
        tokenizers = _need("tokenizers")
        pieces = _lines(path)
        ids = {piece: i for i, piece in enumerate(pieces)}
        for i, piece in enumerate(pieces):
            if not piece or piece != piece.strip() or ids[piece] != i:
                raise RequestError(
                    f"{path}: line {i + 1} is {shown(piece)}; allowed: one piece a line, with no"
                    " space around it, each once"
                )
        for name in _SPECIAL:
            if name not in ids:
                raise RequestError(
                    f"{path}: no piece {name}; BERT's vocab.txt has {', '.join(_SPECIAL)}; name"
                    " that with --tokenizer"
                )
        self._inner = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids))
        self._inner.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
        self._inner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self.source = path.name
        self.vocab = len(pieces)
        self.sha256 = _pieces_sha256(pieces)
        # BERT's ends a text with [SEP], GLM with [PAD]; the file does not say
        self.end: int | None = None
        self.pad, self.cls, self.mask = ids["[PAD]"], ids["[CLS]"], ids["[MASK]"]

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [
            encoding.ids for encoding in self._inner.encode_batch(texts, add_special_tokens=False)
        ]


_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[MASK]")


def _configured_end(path: Path, pieces: dict[str, int]) -> int | None:
    """What `tokenizer_config.json` names as the end: a tokenizer.json does not say which of its
    tokens that is.
    """
    if not path.is_file():
        return None
    table = _json(path, MAX_CONFIG_BYTES)
    if not isinstance(table, dict):
        raise RequestError(
            f"{path}: {shown(table)}; a tokenizer_config.json is a table; repair or remove it"
        )
    token = table.get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    if token is not None and not isinstance(name, str):
        raise RequestError(
            f"{path}: eos_token is {shown(token)}; allowed: a string, or a table with a string as"
            " content"
        )
    return None if name is None else pieces.get(name)


def _vocabulary(path: Path, alphabet: list[str]) -> dict[str, int]:
    """Pieces and their ids, which are all the numbers from 0 on; with a piece for each byte there
    is nothing unknown.
    """
    table = _json(path, MAX_TOKENIZER_BYTES)
    if not isinstance(table, dict) or not all(type(i) is int for i in table.values()):
        raise RequestError(
            f"{path}: not a vocabulary; allowed: a table of pieces and their ids, which are"
            " integers"
        )
    lacking = sorted(set(alphabet) - set(table))
    if lacking:
        raise RequestError(
            f"{path}: no piece {lacking[0]!r}; a byte-level vocabulary has one for each of the 256"
            " bytes"
        )
    ids: dict[str, int] = table
    holders: dict[int, str] = {}
    for piece, i in ids.items():
        if i in holders:
            raise RequestError(
                f"{path}: {shown(holders[i])} and {shown(piece)} have the id {i}; an id is one"
                " piece's"
            )
        holders[i] = piece
    hole = next((i for i in range(len(ids)) if i not in holders), None)
    if hole is not None:
        raise RequestError(
            f"{path}: no piece has the id {hole}; the ids of {len(ids)} pieces are 0 to"
            f" {len(ids) - 1}"
        )
    return ids


def _merges(vocabulary: Path, ids: dict[str, int]) -> list[tuple[str, str]]:
    path = vocabulary.with_name("merges.txt")
    if not path.is_file():
        raise RequestError(
            f"{vocabulary}: no merges.txt beside it; put it there, or name another tokenizer with"
            " --tokenizer"
        )
    out = []
    for number, line in enumerate(_lines(path), 1):
        if line.startswith("#version"):
            continue
        one, _, other = line.partition(" ")
        # The library aborts on a merge whose result is no piece.
        if not (one in ids and other in ids and one + other in ids):
            raise RequestError(
                f"{path}: line {number} is {shown(line)}; a merge is two pieces of"
                f" {vocabulary.name}, a space between them, that are a third one together"
            )
        out.append((one, other))
    return out


def _special(path: Path, ids: dict[str, int]) -> list[str]:
    """The tokens of `special_tokens.txt`, one a line; their order gives their ids, so that no line
    may be passed over.
    """
    tokens = _lines(path) if path.is_file() else []
    for i, token in enumerate(tokens):
        if not token or token != token.strip() or token in ids or token in tokens[:i]:
            raise RequestError(
                f"{path}: line {i + 1} is {shown(token)}; allowed: one token a line, with no space"
                " around it, each once"
            )
    return tokens


def _lines(path: Path) -> list[str]:
    try:
        text = _content(path, MAX_TOKENIZER_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: not UTF-8: {error}") from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]


def _json(path: Path, most: int) -> Any:
    try:
        return files.parse(_content(path, most))
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: not UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not JSON: {error}") from error


def _content(path: Path, most: int) -> bytes:
    try:
        return files.read(path, most, unpack=False)
    except files.TooLargeError as error:
        raise RequestError(f"{path}: {path.stat().st_size} bytes; the limit is {most}") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from error


def _pieces_sha256(pieces: list[str]) -> str:
    return hashlib.sha256(json.dumps(pieces, ensure_ascii=True).encode()).hexdigest()


def _need(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RequestError(f"{module} is not installed; pip install 'steelyard[torch]'") from error


FILES: dict[str, Callable[[Path], Tokenizer]] = {
    "tokenizer.json": JsonTokenizer,
    "tokenizer.model": SentencePieceTokenizer,
    "vocab.json": BytePairTokenizer,
    "vocab.txt": WordPieceTokenizer,
}
_PIECES: dict[str, Callable[[Path], WordPieces]] = {"vocab.txt": WordPieceTokenizer}


def load(places: list[Path]) -> Tokenizer:
    """The first tokenizer found: each place is a file, or a folder that holds one (or a
    `tokenizer/` folder with one).
    """
    return _first(
        places, FILES, "tokenizer.json, tokenizer.model, vocab.json with merges.txt, or vocab.txt"
    )


def present(places: list[Path]) -> bool:
    """Return whether `load` finds a tokenizer in these places, without reading it."""
    return any(path.is_file() for place in places for path, _ in _candidates(place, FILES))


def load_pieces(places: list[Path]) -> WordPieces:
    """The first word pieces found: those of `vocab.txt`, also where another form of the same
    tokenizer lies beside it.
    """
    return _first(places, _PIECES, "BERT's vocab.txt")


def _first(places: list[Path], kinds: Mapping[str, Callable[[Path], Kind]], wanted: str) -> Kind:
    for place in places:
        for path, kind in _candidates(place, kinds):
            if path.is_file():
                if path.stat().st_size > MAX_TOKENIZER_BYTES:
                    raise RequestError(
                        f"{path}: {path.stat().st_size} bytes; the limit is {MAX_TOKENIZER_BYTES}"
                    )
                return kind(path)
    looked = ", ".join(str(place) for place in places) or "nowhere"
    raise RequestError(
        f"no tokenizer found (looked in: {looked}); put {wanted} beside the weights or the data, or"
        " name it with --tokenizer"
    )


def _candidates(
    place: Path, kinds: Mapping[str, Callable[[Path], Kind]]
) -> Iterator[tuple[Path, Callable[[Path], Kind]]]:
    """A file is what its name says, and under another name what its suffix says."""
    if place.is_file():
        named = [name for name in kinds if name == place.name] or [
            n for n in kinds if place.name.endswith(Path(n).suffix)
        ]
        for name in named[:1]:
            yield place, kinds[name]
        return
    for folder in (place, place / "tokenizer"):
        for name, kind in kinds.items():
            yield folder / name, kind


def end_of(tokenizer: Tokenizer, instead: str = "name another with --tokenizer") -> int:
    """Return the token that ends a text. Raise RequestError if the tokenizer does not tell;
    `instead` is what else helps."""
    if tokenizer.end is None:
        raise RequestError(
            f"tokenizer {tokenizer.source} does not say which token ends a text; put its"
            f" tokenizer_config.json (with eos_token) beside it, or {instead}"
        )
    return tokenizer.end


def check_vocab(tokenizer: Tokenizer, vocab: int) -> None:
    """A model's vocabulary is its tokenizer's, up to rows added to round it up."""
    room = 1024
    if not vocab - room < tokenizer.vocab <= vocab:
        raise RequestError(
            f"tokenizer {tokenizer.source} has {tokenizer.vocab} tokens and the model {vocab};"
            f" allowed: {max(1, vocab - room + 1)} to {vocab}; name the model's own tokenizer with"
            " --tokenizer"
        )
