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
    """Read or generate MMLU's questions, make prompts of those that the request selects, and return
    them with facts and empty outputs. Raises RequestError if data are missing or wrong, or a prompt
    cannot be made (`prepare_questions`).
    """
    return questions.prepare_questions(
        request, *load_subjects(request.data, request.sources.data), location=TEST_FILE
    )


def load_subjects(data: MmluData, source: Path | None) -> tuple[list[Subject], str]:
    """Return the subjects and the name of the file or folder they are from; without a path,
    generated subjects and "made".

    Raises RequestError if no path is given and the case generates none, if the files cannot be read
    (`read_subjects`), their number of subjects is not the case's, or a subject has fewer examples
    than `shots`.
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
    """Read all subjects of MMLU, sorted by name. `source` is a tar, or a folder with dev/*_dev.csv
    and test/*_test.csv in it or in its data/, or with exactly one tar. Raises RequestError if there
    are no files, a subject lacks its dev or test file, or something is unreadable, malformed or
    above a limit (bytes, rows, members).
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
            f"{source}: {split}/{unpaired[0]}_{split}.csv is missing; every subject has a dev"
            " and a test file"
        )
    subjects, rows_left = [], MAX_ROWS
    for name in tests:
        dev = _parse_rows(files["dev", name], f"dev/{name}_dev.csv", rows_left)
        test = _parse_rows(files["test", name], f"test/{name}_test.csv", rows_left - len(dev))
        rows_left -= len(dev) + len(test)
        subjects.append(Subject(name, dev, test))
    return subjects


def check_source(source: Path) -> None:
    """Raise RequestError if a path (a tar, or a folder as for `read_subjects`) holds no file of
    MMLU, or the first one is not MMLU's CSV. Of a folder no more than that file is read, of a tar
    nothing behind it.
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
    """Yield (split, subject, content) of each CSV file of MMLU in a folder or tar, one at a time;
    `split` is dev or test. Raises RequestError if the path does not exist or a file cannot be read.
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
    """Yield (split, subject, content) of the CSV files in `dev/`, then `test/`, of a folder or else
    of its `data/`, sorted by name. If neither has `test/`, yield those of the only tar in the
    folder; nothing if there is not exactly one.
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
    """Return the bytes of a CSV file, unpacked if gzipped. Raises RequestError if it cannot be read
    or has more than `MAX_FILE_BYTES`.
    """
    with jsonl.refuse_unreadable(path):
        return files.read_file(path, MAX_FILE_BYTES)


def _iterate_tar(source: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield (split, subject, content) of the CSV files in folders `dev` and `test` of a tar, in its
    order; other members are skipped. Reads to its end, so that a compressed file's checksum is
    verified. Raises RequestError if it is no readable tar, or exceeds a limit: 1 GiB, 10,000
    members, 64 MiB in a file.
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
    """Parse the content of a CSV file without header into questions, in order. Raises RequestError,
    with the file's `name`, if it is not CSV in UTF-8, a row is malformed, it is empty, or it has
    more than `most_rows` rows.
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
    """Return a CSV row as a question (text, four choices, letter). Raises RequestError, with the
    file's `name` and the row's `number`, unless it has six columns and its answer is A, B, C or D.
    """
    if len(row) != 6:
        raise RequestError(
            f"{name}: row {number} has {len(row)} columns; a question has 6 (question, A, B, C, D,"
            " answer)"
        )
    if row[5] not in LETTERS or len(row[5]) != 1:
        raise RequestError(f"{name}: row {number} has the answer {row[5]!r}; allowed: A, B, C, D")
    return row[0], row[1], row[2], row[3], row[4], row[5]
