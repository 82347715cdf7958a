"""MMLU: 57 subjects of four-way questions, asked after five answered examples of the same subject.

Read from the published layout (`data/dev/*_dev.csv`, `data/test/*_test.csv`), as a folder or a tar that is never unpacked.
"""

import csv
import hashlib
import io
import lzma
import random
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from steelyard import files
from steelyard.data import archive, selection
from steelyard.data.sample import chosen
from steelyard.data.tokenizer import Tokenizer
from steelyard.errors import RequestError
from steelyard.schema import canonical
from steelyard.tasks.mmlu.fields import MadeQuestions, MmluData

LETTERS = "ABCD"
MAX_TAR_BYTES = 1 << 30  # packed, and unpacked
USUAL = "; MMLU's tar has 166 MB"
MAX_FILE_BYTES = 64 << 20
MAX_ALL_BYTES = 256 << 20
MAX_MEMBERS = 10_000
MAX_ROWS = 200_000  # in all: one of a few bytes takes 500 of memory; MMLU has 14,327

McqRow = tuple[str, str, str, str, str, str]  # question, four choices, the answer's letter


@dataclass(frozen=True)
class Subject:
    name: str
    dev: tuple[McqRow, ...]
    test: tuple[McqRow, ...]


@dataclass(frozen=True)
class Prompts:
    """Tokenised questions. Prompts of one group begin with the same tokens."""

    rows: list[list[int]]
    groups: list[int]
    index: list[int]  # which question of the whole set each is
    gold: list[int]
    subject_of: list[int]
    subjects: list[str]
    letters: list[int]  # the four answers' tokens
    shortened: int


def load(data: MmluData, source: Path | None) -> tuple[list[Subject], str]:
    """The subjects and the name of where they came from."""
    if source is None:
        if data.made is None:
            raise RequestError(
                "this size needs MMLU: give its folder (with data/dev/*.csv and data/test/*.csv) or its .tar with --data"
            )
        return make(data.made, data.shots), "made"
    subjects = read(source)
    if len(subjects) != data.subjects:
        raise RequestError(
            f"{source}: {len(subjects)} subjects; the case has {data.subjects}; "
            + ("data of your own are for --size full" if data.made else "a file of dev/ or test/ is missing")
        )
    for subject in subjects:
        if len(subject.dev) < data.shots:
            raise RequestError(
                f"{source}: dev/{subject.name}_dev.csv has {len(subject.dev)} rows; the case asks after {data.shots} examples"
            )
    return subjects, source.name


def read(source: Path) -> list[Subject]:
    """All subjects of a folder or a tar, in the order of their names."""
    files: dict[tuple[str, str], bytes] = {}
    size = 0
    for split, name, content in _files(source):
        files[split, name] = content
        size += len(content)
        if size > MAX_ALL_BYTES:
            raise RequestError(f"{source}: its files are larger than {MAX_ALL_BYTES} bytes in all; MMLU has 7 MB")
    tests = sorted(name for split, name in files if split == "test")
    devs = {name for split, name in files if split == "dev"}
    if not tests:
        raise RequestError(_none(source))
    odd = sorted(devs ^ set(tests))
    if odd:
        split = "dev" if odd[0] not in devs else "test"
        raise RequestError(f"{source}: {split}/{odd[0]}_{split}.csv is missing; every subject has a dev and a test file")
    out, left = [], MAX_ROWS
    for name in tests:
        dev = _rows(files["dev", name], f"dev/{name}_dev.csv", left)
        test = _rows(files["test", name], f"test/{name}_test.csv", left - len(dev))
        left -= len(dev) + len(test)
        out.append(Subject(name, dev, test))
    return out


def check_source(source: Path) -> None:
    """Raise RequestError if a folder or tar has no file of MMLU, or the first of them has no rows
    of it."""
    found = next(_files(source), None)
    if found is None:
        raise RequestError(_none(source))
    split, name, content = found
    _rows(content, f"{split}/{name}_{split}.csv", MAX_ROWS)


def _none(source: Path) -> str:
    return f"{source}: no test/*_test.csv in it; give the folder or tar that holds data/dev and data/test"


def _files(source: Path) -> Iterator[tuple[str, str, bytes]]:
    if source.is_dir():
        yield from _folder_files(source)
    elif source.is_file():
        yield from _tar_files(source)
    else:
        raise RequestError(f"data {str(source)!r} does not exist; give MMLU's folder or its .tar with --data")


def _folder_files(source: Path) -> Iterator[tuple[str, str, bytes]]:
    for root in (source, source / "data"):
        if (root / "test").is_dir():
            for split in ("dev", "test"):
                for path in sorted((root / split).glob(f"*_{split}.csv")):
                    yield split, path.name.removesuffix(f"_{split}.csv"), _content(path)
            return
    tars = sorted(p for p in source.iterdir() if p.name.endswith((".tar", ".tar.gz", ".tgz")))
    if len(tars) == 1:
        yield from _tar_files(tars[0])


def _content(path: Path) -> bytes:
    """Return the bytes of a CSV file. Raise RequestError if it cannot be read or is too large."""
    try:
        return files.read(path, MAX_FILE_BYTES)
    except files.TooLargeError as error:
        raise RequestError(f"{path}: larger than {MAX_FILE_BYTES} bytes") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from error


def _tar_files(source: Path) -> Iterator[tuple[str, str, bytes]]:
    try:
        with archive.opened(source, MAX_TAR_BYTES, USUAL) as (tar, whole):
            for count, member in enumerate(tar, 1):
                if count > MAX_MEMBERS:
                    raise RequestError(f"{source}: more than {MAX_MEMBERS} members; MMLU has 173")
                folder, _, name = member.name.rpartition("/")
                split = folder.rpartition("/")[2]
                if split not in ("dev", "test") or not name.endswith(f"_{split}.csv") or not member.isreg():
                    continue
                if member.size > MAX_FILE_BYTES:
                    raise RequestError(f"{source}: {member.name} is larger than {MAX_FILE_BYTES} bytes")
                content = tar.extractfile(member)
                if content is not None:
                    yield split, name.removesuffix(f"_{split}.csv"), content.read()
            while whole.read(1 << 20):
                pass  # a compressed file's checksum stands at its end, and tarfile does not read so far
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        first = str(error).partition("\n")[0].rstrip(":")  # the others say how each compression failed
        raise RequestError(f"{source}: not a readable tar: {first}") from error


def _rows(content: bytes, name: str, most: int) -> tuple[McqRow, ...]:
    out: list[McqRow] = []
    try:
        for number, row in enumerate(csv.reader(io.StringIO(content.decode("utf-8"), newline=""), strict=True), 1):
            if number > most:
                raise RequestError(f"{name}: with it there are more than {MAX_ROWS} rows; MMLU has 14,327")
            out.append(_row(row, name, number))
    except (UnicodeDecodeError, csv.Error) as error:
        raise RequestError(f"{name}: not CSV in UTF-8: {error}") from error
    if not out:
        raise RequestError(f"{name}: no rows")
    return tuple(out)


def _row(row: list[str], name: str, number: int) -> McqRow:
    if len(row) != 6:
        raise RequestError(f"{name}: row {number} has {len(row)} columns; a question has 6 (question, A, B, C, D, answer)")
    if row[5] not in LETTERS or len(row[5]) != 1:
        raise RequestError(f"{name}: row {number} has the answer {row[5]!r}; allowed: A, B, C, D")
    return row[0], row[1], row[2], row[3], row[4], row[5]


def fingerprint(subjects: list[Subject], tokenizer: Tokenizer) -> str:
    """The hash of all rows and of the vocabulary they are read with."""
    digest = hashlib.sha256(tokenizer.sha256.encode())
    for subject in subjects:
        digest.update(canonical([subject.name, subject.dev, subject.test]).encode())
    return digest.hexdigest()


def text(row: McqRow) -> str:
    """A question with its choices, up to the place of the answer."""
    choices = "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, row[1:5], strict=True))
    return f"{row[0]}{choices}\nAnswer:"


def header(subject: str) -> str:
    # Each word has a space before it, the first one too: two spaces, as in the published prompts.
    words = "".join(f" {word}" for word in subject.split("_"))
    return f"The following are multiple choice questions (with answers) about {words}.\n\n"


def prompt(subject: Subject, row: McqRow, shots: int, dropped: int = 0) -> str:
    """A question after its examples, the first `dropped` of them left out."""
    examples = "".join(f"{text(example)} {example[5]}\n\n" for example in subject.dev[dropped:shots])
    return header(subject.name) + examples + text(row)


def select(subjects: list[Subject], names: tuple[str, ...] | None, rows: tuple[str, ...] | None) -> list[int] | None:
    """The questions that were named, by their places in the whole set; None: all."""
    places, begin = {}, 0
    for subject in subjects:
        places[subject.name] = range(begin, begin + len(subject.test))
        begin += len(subject.test)
    if rows is not None:
        return selection.places(rows, begin, "question", places)
    return None if names is None else selection.of_groups(names, places)


def encode(
    subjects: list[Subject],
    data: MmluData,
    tokenizer: Tokenizer,
    sample: int | None,
    seed: int,
    pool: list[int] | None = None,
) -> Prompts:
    """Prompts of all questions (of `pool`, where it is given), or of a seeded sample; leading examples are dropped until a
    prompt fits the context."""
    every = [(s, q) for s, subject in enumerate(subjects) for q in range(len(subject.test))]
    index = chosen(len(every), sample, seed, pool=pool)
    pairs = [every[i] for i in index]
    dropped = [0] * len(pairs)
    rows: list[list[int]] = [[] for _ in pairs]
    todo = list(range(len(pairs)))
    while todo:
        texts = [prompt(subjects[pairs[i][0]], subjects[pairs[i][0]].test[pairs[i][1]], data.shots, dropped[i]) for i in todo]
        for i, ids in zip(todo, tokenizer.encode(texts), strict=True):
            rows[i] = ids
        todo = [i for i in todo if len(rows[i]) > data.context]
        for i in todo:
            dropped[i] += 1
            if dropped[i] > data.shots:
                s, q = pairs[i]
                raise RequestError(
                    f"test/{subjects[s].name}_test.csv: row {q + 1} alone has {len(rows[i])} tokens; "
                    f"the context is {data.context}"
                )
    return Prompts(
        rows=rows,
        groups=_number([(s, d) for (s, _), d in zip(pairs, dropped, strict=True)]),
        index=index,
        gold=[LETTERS.index(subjects[s].test[q][5]) for s, q in pairs],
        subject_of=[s for s, _ in pairs],
        subjects=[subject.name for subject in subjects],
        letters=answer_tokens(tokenizer),
        shortened=sum(1 for d in dropped if d),
    )


def _number(keys: list[tuple[int, int]]) -> list[int]:
    numbers: dict[tuple[int, int], int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def answer_tokens(tokenizer: Tokenizer) -> list[int]:
    """The one token each answer is, as it follows "Answer:"."""
    before, *after = tokenizer.encode(["Answer:", *(f"Answer: {letter}" for letter in LETTERS)])
    out = []
    for letter, ids in zip(LETTERS, after, strict=True):
        if ids[: len(before)] != before or len(ids) != len(before) + 1:
            raise RequestError(f"tokenizer {tokenizer.source}: the answer ' {letter}' is not one token; it cannot be scored")
        out.append(ids[-1])
    return out


_NOUNS = ("lake", "river", "hill", "stone", "cloud", "field", "tower", "garden", "harbour", "forest", "island", "valley")
_VERBS = ("holds", "carries", "follows", "covers", "crosses", "reaches", "feeds", "guards")
_MADE_NAMES = ("tides", "orchards", "signals", "quarries", "ledgers", "lanterns")


def make(made: MadeQuestions, shots: int) -> list[Subject]:
    """Questions of the package's own making: which thing stands in which relation to another."""
    rng = random.Random(f"mmlu:{made.seed}")
    out = []
    for i in range(made.subjects):
        name = f"made_{_MADE_NAMES[i % len(_MADE_NAMES)]}_{i}"
        rows = [_made_row(rng) for _ in range(shots + made.questions)]
        out.append(Subject(name, tuple(rows[:shots]), tuple(rows[shots:])))
    return sorted(out, key=lambda subject: subject.name)


def _made_row(rng: random.Random) -> McqRow:
    things = rng.sample(_NOUNS, 5)
    verb, filler = rng.choice(_VERBS), " ".join(rng.choices(_NOUNS, k=rng.randrange(0, 9)))
    question = f"The {things[4]} {verb} the {things[0]} near {filler or 'nothing'}. What does the {things[4]} {verb[:-1]}?"
    choices = things[:4]
    rng.shuffle(choices)
    return (question, choices[0], choices[1], choices[2], choices[3], LETTERS[choices.index(things[0])])
