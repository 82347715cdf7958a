"""Find, read and verify the records that a command line names: files and folders, with records of
runs and spec records told apart.

Commands on records (`report`, `compare`, `verify`, `sign`, ...) call it.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

from steelyard.cli.out import one_line, say
from steelyard.errors import RequestError
from steelyard.metrics import ceilings, verify
from steelyard.record import sealed, signature
from steelyard.record.record import Record
from steelyard.record.signature import Signature
from steelyard.record.spec import SpecRecord

SHOWN = 3  # spec records that a message names at most


def paths(places: list[Path]) -> list[Path]:
    """Return the paths of records: files as they were given, existing or not, and every .json file
    in folders and below them.

    Raise RequestError if there is none.
    """
    out: list[Path] = []
    for place in places:
        out += _below(place) if place.is_dir() else [place]
    if not out:
        raise RequestError(
            f"no records in {', '.join(str(place) for place in places)}; give records or a folder"
            " of them"
        )
    return out


def _below(folder: Path) -> list[Path]:
    """Return the .json files in a folder and below it, sorted, without those in folders named
    `checkpoints`, which hold JSON that is no record.
    """
    return sorted(
        path
        for path in folder.rglob("*.json")
        if "checkpoints" not in path.relative_to(folder).parts
    )


def by_kind(every: list[Path]) -> tuple[list[Path], list[Path]]:
    """Split paths into those of spec records and all others, which are taken for records of runs.
    The first bytes of each file are read.
    """
    out: tuple[list[Path], list[Path]] = ([], [])
    for path in every:
        out[sealed.kind(path) != "spec"].append(path)
    return out


def only_runs(every: list[Path]) -> list[Path]:
    """Return the paths that are not spec records, and print a line on stderr that names spec
    records that are left out. Raise RequestError if nothing else is there.
    """
    of_spec, runs = by_kind(every)
    if not of_spec:
        return runs
    named = [shlex.quote(str(path)) for path in of_spec[:SHOWN]]
    shown = " ".join([*named, "…"] if len(of_spec) > SHOWN else named)
    count, them = (
        ("1 spec record", "it") if len(of_spec) == 1 else (f"{len(of_spec)} spec records", "them")
    )
    how = f"show {them} with: steelyard report {shown}"
    if not runs:
        raise RequestError(f"{count} and no run; {how}")
    say(f"left out: {one_line(f'{count}; {how}')}")
    return runs


def read_specs(every: list[Path]) -> list[SpecRecord]:
    """Read and verify spec records. Raise RequestError for the first that does not verify."""
    return [ceilings.read(path) for path in every]


def read(places: list[Path]) -> list[Record]:
    """Read and verify the records of runs in files and folders; spec records among them are left
    out, with a line on stderr.

    Raise RequestError if there is no run record, or for the first that does not verify.
    """
    return [verify.read(path) for path in only_runs(paths(places))]


@dataclass(frozen=True)
class Verdict:
    """The result of verifying one record: what is wrong (empty: it verifies), remarks that are no
    errors, and its signature (None if the file is no record).
    """

    path: Path
    wrong: list[str]
    remarks: list[str]
    signature: Signature | None


def verdict(path: Path, signers: Path | None, alone: bool) -> Verdict:
    """Verify a record of a run or a spec record, and its signature. With `signers`, an
    allowed_signers file of SSH, a record that none of them signed is wrong.

    A file that is no record gives a result with the error in `wrong`, or raises RequestError if
    `alone`, that is if it is the only one.
    """
    try:
        of_spec = sealed.kind(path) == "spec"
        wrong = ceilings.verify(path) if of_spec else verify.verify(path)
        remarks = [] if of_spec else verify.remarks(path)
    except RequestError as error:
        if alone:
            raise
        return Verdict(path, [one_line(error)], [], None)
    signed = signature.check(path, signers)
    if signed.state == "bad" or (signers is not None and signed.state != "known"):
        wrong = [*wrong, str(signed)]
    return Verdict(path, wrong, remarks, signed)
