"""Load tokenizers: Hugging Face's `tokenizer.json`, a SentencePiece `tokenizer.model`, byte-level
BPE (`vocab.json` with `merges.txt`), BERT's `vocab.txt`; and the tokenizer of generated data.
"""

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
    """What tasks need of a tokenizer: `encode`, and `source`, its file name ("made" for generated
    data), `vocab`, its number of ids, `sha256` of its vocabulary, and `end`, the id of the token
    that ends a text (None: unknown).
    """

    source: str
    vocab: int
    # of the pieces in the order of their ids: equal for any file format of one vocabulary
    sha256: str
    end: int | None  # id of the token that ends a text; None if not known

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, with whatever this tokenizer begins (and perhaps ends)
        a sequence with.
        """


class WordPieces(Tokenizer, Protocol):
    """A tokenizer (`Tokenizer`: `encode`, `source`, `vocab`, `sha256`, `end`) whose `encode` adds
    nothing around a text, and that has the ids of BERT's special tokens [CLS], [PAD] and [MASK] as
    `cls`, `pad` and `mask`.
    """

    cls: int
    pad: int
    mask: int


class WordHashTokenizer:
    """The tokenizer of generated data, a `Tokenizer` with `source` "made": a token is a word with
    its leading space, a white-space character or a punctuation mark, and its id a hash of it modulo
    the ids left in `vocab`, so that words may share an id.

    Id 0 (`end`) ends a text, 1 begins one. The four answers " A" to " D" have ids of their own (2
    to 5), so that no other word shares them.
    """

    source = "made"
    end: int | None = 0

    def __init__(self, vocab: int) -> None:
        """Set the vocabulary size and the hash of this tokenizer of generated data. Raises
        RequestError if `vocab` is below 7: six special ids and one for words.
        """
        min_vocab = 3 + len(_ANSWERS)
        if vocab < min_vocab:
            raise RequestError(
                f"question.model.vocab={vocab} is too small for generated data; allowed:"
                f" {min_vocab} or more"
            )
        self.vocab = vocab
        self.sha256 = hashlib.sha256(f"made-1:{vocab}".encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return, for each text of generated data, id 1 (begin) and the ids of its words,
        white-space characters and punctuation marks; no end token is added.
        """
        return [
            [1, *map(self._hash_piece, re.findall(r" ?\w+|\s|[^\w\s]", text))] for text in texts
        ]

    def _hash_piece(self, piece: str) -> int:
        """Return the id of a piece of text in the tokenizer of generated data: the fixed id (2 to
        5) of an answer (" A" to " D"), or a hashed one (6 to `vocab` - 1) of any other piece, which
        several pieces may share.
        """
        if piece in _ANSWERS:
            return 2 + _ANSWERS.index(piece)
        first = 2 + len(_ANSWERS)
        return first + int.from_bytes(hashlib.sha256(piece.encode()).digest()[:4]) % (
            self.vocab - first
        )


_ANSWERS = (" A", " B", " C", " D")


class JsonTokenizer:
    """A `Tokenizer` from a Hugging Face `tokenizer.json`, without padding or truncation; `encode`
    adds what the file's post-processor adds. `source` is the file's name, `vocab` the highest id +
    1 (added tokens included). `end` is the id of the `eos_token` that a `tokenizer_config.json`
    beside it names; None if there is none, or it is not in the vocabulary.
    """

    def __init__(self, path: Path) -> None:
        """Load the tokenizer.json at `path`. Raises RequestError if it is none or has no tokens, if
        the tokenizer_config.json beside it is malformed, or if package tokenizers is not installed.
        """
        tokenizers = _import_package("tokenizers")
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
        self.sha256 = _hash_pieces(sorted(pieces, key=lambda piece: int(pieces[piece])))
        self.end: int | None = _read_end_token(path.with_name("tokenizer_config.json"), pieces)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text with the special tokens that the file's post-processor
        adds.
        """
        return [encoding.ids for encoding in self._inner.encode_batch(texts)]

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, without special tokens."""
        text: str = self._inner.decode(ids, skip_special_tokens=True)
        return text


class SentencePieceTokenizer:
    """A `Tokenizer` from a SentencePiece model file; `source` is its name, `vocab` its number of
    pieces. `encode` puts the beginning-of-sequence token first if the model has one, and adds no
    end; `end` is the model's end-of-sequence token, or None.
    """

    def __init__(self, path: Path) -> None:
        """Load the model file at `path`. Raises RequestError if it is no SentencePiece model, or
        package sentencepiece is not installed.
        """
        sentencepiece = _import_package("sentencepiece")
        try:
            self._inner = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise RequestError(f"{path}: not a SentencePiece model: {error}") from error
        self.source = path.name
        self.vocab = int(self._inner.get_piece_size())
        self.sha256 = _hash_pieces([self._inner.id_to_piece(i) for i in range(self.vocab)])
        self.end: int | None = int(self._inner.eos_id()) if self._inner.eos_id() >= 0 else None

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, after the beginning-of-sequence token if the model has
        one; no end token is added.
        """
        ids: list[list[int]] = self._inner.encode(texts, add_bos=self._inner.bos_id() >= 0)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, without special tokens."""
        text: str = self._inner.decode(list(ids))
        return text


class BytePairTokenizer:
    """A byte-level BPE tokenizer from `vocab.json`, `merges.txt` and optionally
    `special_tokens.txt`, whose tokens get the ids after the vocabulary.

    A text begins with [CLS] if that is a special token. Special tokens are never read from a text:
    "</s>" in it is ordinary characters. Its `end` is "</s>", else "<|endoftext|>", else None.
    """

    def __init__(self, path: Path) -> None:
        """Load `path` (vocab.json) and the files beside it. Raises RequestError if one is
        malformed, merges.txt is missing, or package tokenizers is not installed.
        """
        tokenizers = _import_package("tokenizers")
        byte_level = tokenizers.pre_tokenizers.ByteLevel
        ids = _read_vocabulary(path, byte_level.alphabet())
        merges = _read_merges(path, ids)
        special = _read_special_tokens(path.with_name("special_tokens.txt"), ids)
        try:
            self._inner = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges))
        except Exception as error:  # the library raises nothing narrower
            raise RequestError(f"{path}: not byte-level BPE: {error}") from error
        self._inner.pre_tokenizer = byte_level(add_prefix_space=False)
        pieces = [*sorted(ids, key=lambda piece: ids[piece]), *special]
        piece_ids = {piece: i for i, piece in enumerate(pieces)}
        self.source = path.name
        self.vocab = len(pieces)
        self.sha256 = _hash_pieces(pieces)
        self.end: int | None = piece_ids.get("</s>", piece_ids.get("<|endoftext|>"))
        self._begin = [piece_ids["[CLS]"]] if "[CLS]" in special else []

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, after [CLS] if that is a special token; no end token
        is added.
        """
        return [self._begin + encoding.ids for encoding in self._inner.encode_batch(texts)]


class WordPieceTokenizer:
    """BERT's uncased word-piece tokenizer from `vocab.txt`: one piece per line, whose line number
    from 0 is its id.

    A text is encoded without anything around it, and "[MASK]" in it is read as three pieces:
    special tokens are only put by id (`pad`, `cls`, `mask`). `end` is None.
    """

    def __init__(self, path: Path) -> None:
        """Load the vocab.txt at `path`. Raises RequestError if it is unreadable, a line is empty,
        repeated or has space around it, one of [PAD], [UNK], [CLS] and [MASK] is missing, or
        package tokenizers is not installed.
        """
        tokenizers = _import_package("tokenizers")
        pieces = _read_lines(path)
        ids = {piece: i for i, piece in enumerate(pieces)}
        for i, piece in enumerate(pieces):
            if not piece or piece != piece.strip() or ids[piece] != i:
                raise RequestError(
                    f"{path}: line {i + 1} is {shown(piece)}; allowed: one piece a line, with no"
                    " space around it, each once"
                )
        for name in _SPECIAL_TOKENS:
            if name not in ids:
                raise RequestError(
                    f"{path}: no piece {name}; BERT's vocab.txt has {', '.join(_SPECIAL_TOKENS)};"
                    " name"
                    " that with --tokenizer"
                )
        self._inner = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids))
        self._inner.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
        self._inner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self.source = path.name
        self.vocab = len(pieces)
        self.sha256 = _hash_pieces(pieces)
        # BERT ends a text with [SEP], GLM with [PAD]; vocab.txt does not say which
        self.end: int | None = None
        self.pad, self.cls, self.mask = ids["[PAD]"], ids["[CLS]"], ids["[MASK]"]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text's BERT word pieces, in lower case and with no special tokens
        added.
        """
        return [
            encoding.ids for encoding in self._inner.encode_batch(texts, add_special_tokens=False)
        ]


_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[MASK]")


def _read_end_token(path: Path, pieces: dict[str, int]) -> int | None:
    """Return the id of the `eos_token` in a `tokenizer_config.json` by the ids in `pieces`; None if
    there is no such file, no eos_token, or it is no token of the vocabulary. Raises RequestError if
    the file is unreadable, not JSON or no object, or eos_token is neither a string nor an object
    with a string `content`.
    """
    if not path.is_file():
        return None
    config = _read_json(path, MAX_CONFIG_BYTES)
    if not isinstance(config, dict):
        raise RequestError(
            f"{path}: {shown(config)}; a tokenizer_config.json is a table; repair or remove it"
        )
    token = config.get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    if token is not None and not isinstance(name, str):
        raise RequestError(
            f"{path}: eos_token is {shown(token)}; allowed: a string, or a table with a string as"
            " content"
        )
    return None if name is None else pieces.get(name)


def _read_vocabulary(path: Path, alphabet: list[str]) -> dict[str, int]:
    """Read `vocab.json` and return the id of each piece. Raises RequestError unless it is an object
    with integers as values, which are exactly 0 to n-1, and each of the 256 characters of
    `alphabet`, which stand for the bytes, is a piece.
    """
    content = _read_json(path, MAX_TOKENIZER_BYTES)
    if not isinstance(content, dict) or not all(type(i) is int for i in content.values()):
        raise RequestError(
            f"{path}: not a vocabulary; allowed: a table of pieces and their ids, which are"
            " integers"
        )
    missing = sorted(set(alphabet) - set(content))
    if missing:
        raise RequestError(
            f"{path}: no piece {missing[0]!r}; a byte-level vocabulary has one for each of the 256"
            " bytes"
        )
    ids: dict[str, int] = content
    pieces_by_id: dict[int, str] = {}
    for piece, i in ids.items():
        if i in pieces_by_id:
            raise RequestError(
                f"{path}: {shown(pieces_by_id[i])} and {shown(piece)} have the id {i}; each id"
                " belongs to one piece"
            )
        pieces_by_id[i] = piece
    missing_id = next((i for i in range(len(ids)) if i not in pieces_by_id), None)
    if missing_id is not None:
        raise RequestError(
            f"{path}: no piece has the id {missing_id}; the ids of {len(ids)} pieces are 0 to"
            f" {len(ids) - 1}"
        )
    return ids


def _read_merges(vocabulary: Path, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Read `merges.txt` beside the file `vocabulary` and return its pairs of pieces in order; lines
    that begin with "#version" are skipped. Raises RequestError if it is missing, or a line is no
    merge of two pieces in `ids` into a third.
    """
    path = vocabulary.with_name("merges.txt")
    if not path.is_file():
        raise RequestError(
            f"{vocabulary}: no merges.txt beside it; put it there, or name another tokenizer with"
            " --tokenizer"
        )
    merges = []
    for number, line in enumerate(_read_lines(path), 1):
        if line.startswith("#version"):
            continue
        left, _, right = line.partition(" ")
        # The library aborts on a merge whose result is not in the vocabulary.
        if not (left in ids and right in ids and left + right in ids):
            raise RequestError(
                f"{path}: line {number} is {shown(line)}; a merge is two pieces of"
                f" {vocabulary.name}, a space between them, that are a third one together"
            )
        merges.append((left, right))
    return merges


def _read_special_tokens(path: Path, ids: dict[str, int]) -> list[str]:
    """Return the tokens of `special_tokens.txt` in order (their ids follow the vocabulary `ids`),
    or none if there is no such file. Raises RequestError for empty lines, space around a token,
    repeated tokens, and tokens of the vocabulary.
    """
    tokens = _read_lines(path) if path.is_file() else []
    for i, token in enumerate(tokens):
        if not token or token != token.strip() or token in ids or token in tokens[:i]:
            raise RequestError(
                f"{path}: line {i + 1} is {shown(token)}; allowed: one token a line, with no space"
                " around it, each once"
            )
    return tokens


def _read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file without line ends (LF or CRLF), a last empty one left out.
    Raises RequestError if it cannot be read, is larger than `MAX_TOKENIZER_BYTES` or is not UTF-8.
    """
    try:
        text = _read_content(path, MAX_TOKENIZER_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: not UTF-8: {error}") from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]


def _read_json(path: Path, most_bytes: int) -> Any:
    """Return the parsed JSON of a file of at most `most_bytes` bytes. Raises RequestError if it
    cannot be read, is larger, not UTF-8 or not JSON.
    """
    try:
        return files.parse_json(_read_content(path, most_bytes))
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: not UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not JSON: {error}") from error


def _read_content(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a file as they are, gzip not unpacked. Raises RequestError if it cannot
    be read or has more than `most_bytes` bytes.
    """
    try:
        return files.read_file(path, most_bytes, unpack=False)
    except files.TooLargeError as error:
        raise RequestError(
            f"{path}: {path.stat().st_size} bytes; the limit is {most_bytes}"
        ) from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from error


def _hash_pieces(pieces: list[str]) -> str:
    """Return the SHA-256 (hex) of the pieces, which are in the order of their ids, written as a
    JSON list.
    """
    return hashlib.sha256(json.dumps(pieces, ensure_ascii=True).encode()).hexdigest()


def _import_package(module: str) -> Any:
    """Import an optional package and return its module. Raises RequestError with the install
    command if it cannot be imported.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RequestError(f"{module} is not installed; pip install 'steelyard[torch]'") from error


TOKENIZER_FILES: dict[str, Callable[[Path], Tokenizer]] = {
    "tokenizer.json": JsonTokenizer,
    "tokenizer.model": SentencePieceTokenizer,
    "vocab.json": BytePairTokenizer,
    "vocab.txt": WordPieceTokenizer,
}
_WORD_PIECE_FILES: dict[str, Callable[[Path], WordPieces]] = {"vocab.txt": WordPieceTokenizer}


def load_tokenizer(paths: list[Path]) -> Tokenizer:
    """Load the first tokenizer found in `paths`: each is a tokenizer file, or a folder that holds
    one, itself or in its `tokenizer/`. In a folder the order is that of `TOKENIZER_FILES`. Raises
    RequestError if there is none, or the one found is malformed or too large.
    """
    return _load_first(
        paths,
        TOKENIZER_FILES,
        "tokenizer.json, tokenizer.model, vocab.json with merges.txt, or vocab.txt",
    )


def has_tokenizer(paths: list[Path]) -> bool:
    """Return whether `load_tokenizer` would find a file in these paths (files, or folders searched
    themselves and in their `tokenizer/`), without reading it: it may still be malformed.
    """
    return any(
        path.is_file() for start in paths for path, _ in _iterate_candidates(start, TOKENIZER_FILES)
    )


def load_word_pieces(paths: list[Path]) -> WordPieces:
    """Load the first `vocab.txt` of BERT found in `paths` (files, or folders and their
    `tokenizer/`), even if another form of the tokenizer lies beside it. Raises RequestError if
    there is none or it is malformed.
    """
    return _load_first(paths, _WORD_PIECE_FILES, "BERT's vocab.txt")


def _load_first(
    paths: list[Path], loaders: Mapping[str, Callable[[Path], Kind]], file_names: str
) -> Kind:
    """Load the first tokenizer file that exists in `paths` and return it. Each path is a file, or a
    folder that is searched itself and then in its `tokenizer/`, in the order of `loaders`, which
    maps file names to the classes that load them; a file of another name is loaded by its suffix.

    A path without such a file is passed over. Raises RequestError if none has one (`file_names`
    says what to put there), or if the one found is too large or malformed; later ones are then not
    tried.
    """
    for start in paths:
        for path, loader in _iterate_candidates(start, loaders):
            if path.is_file():
                if path.stat().st_size > MAX_TOKENIZER_BYTES:
                    raise RequestError(
                        f"{path}: {path.stat().st_size} bytes; the limit is {MAX_TOKENIZER_BYTES}"
                    )
                return loader(path)
    searched = ", ".join(str(start) for start in paths) or "no folder"
    raise RequestError(
        f"no tokenizer found (looked in: {searched}); put {file_names} beside the weights or the"
        " data, or"
        " name it with --tokenizer"
    )


def _iterate_candidates(
    path: Path, loaders: Mapping[str, Callable[[Path], Kind]]
) -> Iterator[tuple[Path, Callable[[Path], Kind]]]:
    """Yield (path, class that loads it) where a tokenizer may be; `loaders` maps file names to
    classes. A path that is a file is yielded itself if its name is in `loaders`, or else its suffix
    is that of such a name; of a folder all names in it and in its `tokenizer/`, whether they exist
    or not.
    """
    if path.is_file():
        names = [name for name in loaders if name == path.name] or [
            n for n in loaders if path.name.endswith(Path(n).suffix)
        ]
        for name in names[:1]:
            yield path, loaders[name]
        return
    for folder in (path, path / "tokenizer"):
        for name, loader in loaders.items():
            yield folder / name, loader


def require_end_token(tokenizer: Tokenizer, remedy: str = "name another with --tokenizer") -> int:
    """Return the id of the token that ends a text. Raises RequestError if the tokenizer does not
    say which; `remedy` is what else the message proposes.
    """
    if tokenizer.end is None:
        raise RequestError(
            f"tokenizer {tokenizer.source} does not say which token ends a text; put its"
            f" tokenizer_config.json (with eos_token) beside it, or {remedy}"
        )
    return tokenizer.end


def check_vocabulary_size(tokenizer: Tokenizer, vocab: int) -> None:
    """Raise RequestError unless the tokenizer has at most `vocab` tokens, the model's embedding
    rows, and fewer than 1024 less than that (models round their rows up).
    """
    max_rounding = 1024
    if not vocab - max_rounding < tokenizer.vocab <= vocab:
        raise RequestError(
            f"tokenizer {tokenizer.source} has {tokenizer.vocab} tokens and the model {vocab};"
            f" allowed: {max(1, vocab - max_rounding + 1)} to {vocab}; name the model's own"
            " tokenizer with"
            " --tokenizer"
        )
