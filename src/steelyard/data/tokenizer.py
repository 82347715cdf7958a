"""Tokenizers, from `tokenizer.json`, from a SentencePiece `tokenizer.model`, or made by the package for its own data."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from steelyard.errors import RequestError

MAX_TOKENIZER_BYTES = 256 << 20


class Tokenizer(Protocol):
    @property
    def source(self) -> str: ...

    @property
    def vocab(self) -> int: ...

    @property
    def sha256(self) -> str:
        """Of the pieces in the order of their ids, so that two files of one vocabulary agree."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids with whatever begins a sequence for this tokenizer."""


@dataclass(frozen=True)
class MadeTokenizer:
    """For made data: a piece is a word with its leading space, and its id a hash of it. The four answers have ids of
    their own, so that no other word can be one."""

    vocab: int
    source: str = "made"

    def __post_init__(self) -> None:
        least = 3 + len(_ANSWERS)
        if self.vocab < least:
            raise RequestError(f"question.model.vocab={self.vocab} has no room for made data; allowed: {least} and more")

    @property
    def sha256(self) -> str:
        return hashlib.sha256(f"made-1:{self.vocab}".encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[1, *map(self._id, re.findall(r" ?\w+|\s|[^\w\s]", text))] for text in texts]

    def _id(self, piece: str) -> int:
        if piece in _ANSWERS:
            return 2 + _ANSWERS.index(piece)
        first = 2 + len(_ANSWERS)
        return first + int.from_bytes(hashlib.sha256(piece.encode()).digest()[:4]) % (self.vocab - first)


_ANSWERS = (" A", " B", " C", " D")


class JsonTokenizer:
    """Hugging Face `tokenizers` file."""

    def __init__(self, path: Path) -> None:
        tokenizers = _need("tokenizers")
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise RequestError(f"{path}: not a tokenizer.json: {error}") from error
        self._inner.no_padding()
        self._inner.no_truncation()
        pieces = self._inner.get_vocab(with_added_tokens=True)
        if not pieces:
            raise RequestError(f"{path}: a tokenizer.json without tokens")
        self.source = path.name
        self.vocab = max(pieces.values()) + 1
        self.sha256 = _pieces_sha256(sorted(pieces, key=lambda piece: int(pieces[piece])))

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._inner.encode_batch(texts)]


class SentencePieceTokenizer:
    """SentencePiece model file; the beginning-of-sequence token comes first where the model has one."""

    def __init__(self, path: Path) -> None:
        sentencepiece = _need("sentencepiece")
        try:
            self._inner = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise RequestError(f"{path}: not a SentencePiece model: {error}") from error
        self.source = path.name
        self.vocab = int(self._inner.get_piece_size())
        self.sha256 = _pieces_sha256([self._inner.id_to_piece(i) for i in range(self.vocab)])

    def encode(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._inner.encode(texts, add_bos=self._inner.bos_id() >= 0)
        return ids


def _pieces_sha256(pieces: list[str]) -> str:
    return hashlib.sha256(json.dumps(pieces, ensure_ascii=True).encode()).hexdigest()


def _need(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RequestError(f"{module} is not installed; pip install 'steelyard[torch]'") from error


FILES: dict[str, Callable[[Path], Tokenizer]] = {"tokenizer.json": JsonTokenizer, "tokenizer.model": SentencePieceTokenizer}


def load(places: list[Path]) -> Tokenizer:
    """The first tokenizer found: each place is a file, or a folder that holds one (or a `tokenizer/` folder with one)."""
    for place in places:
        for folder in (place, place / "tokenizer"):
            for name, kind in FILES.items():
                path = place if place.is_file() and place.name.endswith(Path(name).suffix) else folder / name
                if path.is_file():
                    if path.stat().st_size > MAX_TOKENIZER_BYTES:
                        raise RequestError(
                            f"{path}: {path.stat().st_size} bytes; a tokenizer has at most {MAX_TOKENIZER_BYTES}"
                        )
                    return kind(path)
    looked = ", ".join(str(place) for place in places) or "nowhere"
    raise RequestError(
        f"no tokenizer found (looked in: {looked}); put tokenizer.json or tokenizer.model beside the weights or the data, "
        "or name it with --tokenizer"
    )


def check_vocab(tokenizer: Tokenizer, vocab: int) -> None:
    """A model's vocabulary is its tokenizer's, up to rows added to round it up."""
    room = 1024
    if not vocab - room < tokenizer.vocab <= vocab:
        raise RequestError(
            f"tokenizer {tokenizer.source} has {tokenizer.vocab} tokens and the model {vocab}; "
            f"allowed: {max(1, vocab - room + 1)} to {vocab}; name the model's own tokenizer with --tokenizer"
        )
