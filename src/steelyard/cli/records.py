"""Find, read and verify the records that a command line names: files and folders, with records of
runs and spec records told apart.

Commands on records (`report`, `compare`, `verify`, `sign`, ...) call it.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

from steelyard.cli.printing import print_stderr, to_one_line
from steelyard.errors import RequestError
from steelyard.metrics import ceiling_rates, verify
from steelyard.record import record_file, signature
from steelyard.record.ceilings_record import SpecRecord
from steelyard.record.record import Record
from steelyard.record.signature import Signature

MAX_NAMED = 3  # spec records that a message names at most


def find_record_paths(paths_given: list[Path]) -> list[Path]:
    """Return the paths of records that a command line names: files as they were given, existing or
    not, and every .json file in folders and below them (not in `checkpoints`), sorted within each
    folder. Nothing is opened.

    Raise RequestError if there is none.
    """
    found_paths: list[Path] = []
    for path in paths_given:
        found_paths += _find_below(path) if path.is_dir() else [path]
    if not found_paths:
        raise RequestError(
            f"no records in {', '.join(str(path) for path in paths_given)}; give records"
            " or a folder of them"
        )
    return found_paths


def _find_below(folder: Path) -> list[Path]:
    """Return the .json files in a folder and below it, sorted, without those in folders named
    `checkpoints`, which hold JSON that is no record.
    """
    return sorted(
        path
        for path in folder.rglob("*.json")
        if "checkpoints" not in path.relative_to(folder).parts
    )


def split_spec_records(record_paths: list[Path]) -> tuple[list[Path], list[Path]]:
    """Return two lists of paths, in order: those of spec records, and all others, which are taken
    for records of runs, unreadable files too. The first bytes of each file are read.
    """
    specs_and_runs: tuple[list[Path], list[Path]] = ([], [])
    for path in record_paths:
        specs_and_runs[record_file.read_record_kind(path) != "spec"].append(path)
    return specs_and_runs


def drop_spec_records(record_paths: list[Path]) -> list[Path]:
    """Return the paths that are not spec records, in order, by the first bytes of each file. If
    some are, print one line on stderr that names up to three of them and how to show them. Raise
    RequestError if all are.
    """
    spec_paths, run_paths = split_spec_records(record_paths)
    if not spec_paths:
        return run_paths
    quoted = [shlex.quote(str(path)) for path in spec_paths[:MAX_NAMED]]
    shown = " ".join([*quoted, "…"] if len(spec_paths) > MAX_NAMED else quoted)
    count, pronoun = (
        ("1 spec record", "it")
        if len(spec_paths) == 1
        else (f"{len(spec_paths)} spec records", "them")
    )
    hint = f"show {pronoun} with: steelyard report {shown}"
    if not run_paths:
        raise RequestError(f"{count} and no run; {hint}")
    print_stderr(f"left out: {to_one_line(f'{count}; {hint}')}")
    return run_paths


def read_spec_records(spec_paths: list[Path]) -> list[SpecRecord]:
    """Read and verify spec records. Raise RequestError for the first that does not verify."""
    return [ceiling_rates.read_verified_spec_record(path) for path in spec_paths]


def read_run_records(paths_given: list[Path]) -> list[Record]:
    """Read and verify the records of runs that files and folders name (`find_record_paths`), and
    return them in that order; spec records among them, and copies of a record, are left out, with a
    line on stderr: copies must not count as repeats.

    Raise RequestError if there is no run record, or for the first that does not verify.
    """
    paths = drop_spec_records(find_record_paths(paths_given))
    records = [verify.read_verified_record(path) for path in paths]
    by_id = {record.id: record for record in reversed(records)}
    copies = len(records) - len(by_id)
    if copies:
        print_stderr(f"left out: {copies} {'copy' if copies == 1 else 'copies'} of other records")
    return list(reversed(by_id.values()))


@dataclass(frozen=True)
class RecordVerification:
    """The result of verifying one record by `verify_record`: its `path`, what is `wrong` as
    sentences (empty: it verifies), `remarks` that are no errors, and its `signature` (None if the
    file is no record).
    """

    path: Path
    wrong: list[str]
    remarks: list[str]
    signature: Signature | None


def verify_record(path: Path, signers: Path | None, alone: bool) -> RecordVerification:
    """Verify a record of a run or a spec record, and its signature, and return the result. A
    signature that does not fit makes it wrong; with `signers`, an allowed_signers file of SSH, so
    does one that is missing or of nobody there.

    A file that is no record gives a result with the error in `wrong`, or raises RequestError if
    `alone`, that is if it is the only one. RequestError too if `signers` cannot be used.
    """
    try:
        is_spec = record_file.read_record_kind(path) == "spec"
        wrong, remarks = (
            (ceiling_rates.verify_spec_record(path), ceiling_rates.list_spec_remarks(path))
            if is_spec
            else verify.verify_with_remarks(path)
        )
    except RequestError as error:
        if alone:
            raise
        return RecordVerification(path, [to_one_line(error)], [], None)
    signed = signature.check_signature(path, signers)
    if signed.state == "bad" or (signers is not None and signed.state != "known"):
        wrong = [*wrong, str(signed)]
    return RecordVerification(path, wrong, remarks, signed)
