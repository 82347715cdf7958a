"""Read MMLU: 57 subjects of four-way questions, asked after five answered examples of the same
subject.

Reads the published layout (`data/dev/*_dev.csv`, `data/test/*_test.csv`) from a folder, or from a
tar that is never unpacked to disk. A worker calls `prepare`, the parent `check_source`.
"""

import csv
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from steelyard import files
from steelyard.data import archive, jsonl
from steelyard.errors import RequestError
from steelyard.tasks import questions
from steelyard.tasks.choices import LETTERS
from steelyard.tasks.mmlu.task import MmluData
from steelyard.tasks.questions import McqRow, Subject
from steelyard.tasks.task import PreparedData, TaskRequest

TEST_FILE = "test/{}_test.csv"  # file of a subject's questions, for messages
MAX_TAR_BYTES = 1 << 30  # limit of the file, and of its unpacked size
SIZE_HINT = "; MMLU's tar has 166 MB"
MAX_FILE_BYTES = 64 << 20
MAX_ALL_BYTES = 256 << 20
MAX_MEMBERS = 10_000
MAX_ROWS = 200_000  # in all; a row takes at least 500 bytes of memory; MMLU has 14,327


def prepare(request: TaskRequest) -> PreparedData:
    """Read or generate MMLU's questions, and make prompts of those that the request selects. Raises
    RequestError if data are missing or wrong.
    """
    return questions.prepare_questions(
        request, *load_subjects(request.data, request.sources.data), location=TEST_FILE
    )


def load_subjects(data: MmluData, source: Path | None) -> tuple[list[Subject], str]:
    """Return the subjects and the name of their source, "made" if generated (no path given).

    Raises RequestError if the case generates none and no path is given, if the number of subjects
    is not the case's, or a subject has fewer examples than `shots`.
    """
    if source is None:
        if data.made is None:
            raise RequestError(
                "this size needs MMLU: give its folder (with data/dev/*.csv and data/test/*.csv) or"
                " its .tar with --data"
            )
        return questions.generate_questions("mmlu", data.made, data.shots), "made"
    subjects = read_subjects(source)
    if len(subjects) != data.subjects:
        raise RequestError(
            f"{source}: {len(subjects)} subjects; the case has {data.subjects}; "
            + (
                "data of your own are for --size full"
                if data.made
                else "a file of dev/ or test/ is missing"
            )
        )
    for subject in subjects:
        if len(subject.dev) < data.shots:
            raise RequestError(
                f"{source}: dev/{subject.name}_dev.csv has {len(subject.dev)} rows; the case asks"
                f" after {data.shots} examples"
            )
    return subjects, source.name


def read_subjects(source: Path) -> list[Subject]:
    """Read all subjects of a folder or tar, sorted by name. Raises RequestError if files are
    missing, malformed or too large.
    """
    files: dict[tuple[str, str], bytes] = {}
    size = 0
    for split, name, content in _iterate_files(source):
        files[split, name] = content
        size += len(content)
        if size > MAX_ALL_BYTES:
            raise RequestError(
                f"{source}: its files are larger than {MAX_ALL_BYTES} bytes in all; MMLU has 7 MB"
            )
    tests = sorted(name for split, name in files if split == "test")
    devs = {name for split, name in files if split == "dev"}
    if not tests:
        raise RequestError(_no_files_message(source))
    unpaired = sorted(devs ^ set(tests))
    if unpaired:
        split = "dev" if unpaired[0] not in devs else "test"
        raise RequestError(
            f"{source}: {split}/{unpaired[0]}_{split}.csv is missing; every subject has a dev and a test"
            " file"
        )
    subjects, rows_left = [], MAX_ROWS
    for name in tests:
        dev = _parse_rows(files["dev", name], f"dev/{name}_dev.csv", rows_left)
        test = _parse_rows(files["test", name], f"test/{name}_test.csv", rows_left - len(dev))
        rows_left -= len(dev) + len(test)
        subjects.append(Subject(name, dev, test))
    return subjects


def check_source(source: Path) -> None:
    """Raise RequestError if a folder or tar holds no file of MMLU, or the first one is not MMLU's
    CSV. Reads no more than that file.
    """
    first_file = next(_iterate_files(source), None)
    if first_file is None:
        raise RequestError(_no_files_message(source))
    split, name, content = first_file
    _parse_rows(content, f"{split}/{name}_{split}.csv", MAX_ROWS)


def _no_files_message(source: Path) -> str:
    """Return the error text for a path without MMLU's files."""
    return (
        f"{source}: no test/*_test.csv in it; give the folder or tar that holds data/dev and"
        " data/test"
    )


def _iterate_files(source: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield (split, subject, content) of each CSV file in a folder or tar. Raises RequestError if
    the path does not exist.
    """
    if source.is_dir():
        yield from _iterate_folder(source)
    elif source.is_file():
        yield from _iterate_tar(source)
    else:
        raise RequestError(
            f"data {str(source)!r} does not exist; give MMLU's folder or its .tar with --data"
        )


def _iterate_folder(source: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield (split, subject, content) of the CSV files in `dev/` and `test/` of a folder or of its
    `data/`; else those of the only tar in the folder; else nothing.
    """
    for root in (source, source / "data"):
        if (root / "test").is_dir():
            for split in ("dev", "test"):
                for path in sorted((root / split).glob(f"*_{split}.csv")):
                    yield split, path.name.removesuffix(f"_{split}.csv"), _read_csv_bytes(path)
            return
    tars = sorted(p for p in source.iterdir() if p.name.endswith((".tar", ".tar.gz", ".tgz")))
    if len(tars) == 1:
        yield from _iterate_tar(tars[0])


def _read_csv_bytes(path: Path) -> bytes:
    """Return the bytes of a CSV file. Raises RequestError if it cannot be read or is too large."""
    with jsonl.refuse_unreadable(path):
        return files.read_file(path, MAX_FILE_BYTES)


def _iterate_tar(source: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield (split, subject, content) of the CSV files of a tar, other members skipped. Reads to
    its end, so that a compressed file's checksum is verified. Raises RequestError if it is no
    readable tar or exceeds a limit.
    """
    try:
        with archive.open_tar(source, MAX_TAR_BYTES, SIZE_HINT) as (tar, stream):
            for count, member in enumerate(tar, 1):
                if count > MAX_MEMBERS:
                    raise RequestError(f"{source}: more than {MAX_MEMBERS} members; MMLU has 173")
                folder, _, name = member.name.rpartition("/")
                split = folder.rpartition("/")[2]
                if (
                    split not in ("dev", "test")
                    or not name.endswith(f"_{split}.csv")
                    or not member.isreg()
                ):
                    continue
                if member.size > MAX_FILE_BYTES:
                    raise RequestError(
                        f"{source}: {member.name} is larger than {MAX_FILE_BYTES} bytes"
                    )
                content = tar.extractfile(member)
                if content is not None:
                    yield split, name.removesuffix(f"_{split}.csv"), content.read()
            while stream.read(1 << 20):
                # the checksum of a compressed file is at its end, which tarfile does not read
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        # each decompressor has errors of its own
        first = str(error).partition("\n")[0].rstrip(":")
        raise RequestError(f"{source}: not a readable tar: {first}") from error


def _parse_rows(content: bytes, name: str, most_rows: int) -> tuple[McqRow, ...]:
    """Parse a CSV file into questions. Raises RequestError, with the file's `name`, if it is
    malformed, empty, or has more than `most_rows` rows.
    """
    rows: list[McqRow] = []
    try:
        for number, row in enumerate(
            csv.reader(io.StringIO(content.decode("utf-8"), newline=""), strict=True), 1
        ):
            if number > most_rows:
                raise RequestError(
                    f"{name}: with it there are more than {MAX_ROWS} rows; MMLU has 14,327"
                )
            rows.append(_check_row(row, name, number))
    except (UnicodeDecodeError, csv.Error) as error:
        raise RequestError(f"{name}: not CSV in UTF-8: {error}") from error
    if not rows:
        raise RequestError(f"{name}: no rows")
    return tuple(rows)


def _check_row(row: list[str], name: str, number: int) -> McqRow:
    """Return a CSV row as a question. Raises RequestError unless it has six columns and its answer
    is A, B, C or D.
    """
    if len(row) != 6:
        raise RequestError(
            f"{name}: row {number} has {len(row)} columns; a question has 6 (question, A, B, C, D,"
            " answer)"
        )
    if row[5] not in LETTERS or len(row[5]) != 1:
        raise RequestError(f"{name}: row {number} has the answer {row[5]!r}; allowed: A, B, C, D")
    return row[0], row[1], row[2], row[3], row[4], row[5]
