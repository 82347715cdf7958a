"""Find and read records: files and folders that a command line names, runs and spec records apart."""

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

SHOWN = 3  # spec records that a line names


def paths(places: list[Path]) -> list[Path]:
    """Return the files of records, one by one; those in folders too. Raise RequestError if there is
    none.
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
    """Records in a folder and the folders in it, but for those of checkpoints, whose tables are
    JSON too.
    """
    return sorted(
        path
        for path in folder.rglob("*.json")
        if "checkpoints" not in path.relative_to(folder).parts
    )


def by_kind(every: list[Path]) -> tuple[list[Path], list[Path]]:
    """Separate the paths of spec records from all others, which are read as records of runs."""
    out: tuple[list[Path], list[Path]] = ([], [])
    for path in every:
        out[sealed.kind(path) != "spec"].append(path)
    return out


def only_runs(every: list[Path]) -> list[Path]:
    """Return the paths that are no spec records, and print a line on the spec records that are left
    out. Raise RequestError if there is no other path."""
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
    """Read spec records that verify, and raise RequestError for the first that does not."""
    return [ceilings.read(path) for path in every]


def read(places: list[Path]) -> list[Record]:
    """Read the records of runs from files and folders, without the spec records among them. Raise
    RequestError if there is no run, or for the first that does not verify."""
    return [verify.read(path) for path in only_runs(paths(places))]


@dataclass(frozen=True)
class Verdict:
    path: Path
    wrong: list[str]
    remarks: list[str]
    signature: Signature | None


def verdict(path: Path, signers: Path | None, alone: bool) -> Verdict:
    """Verify a record and its signature. A file that is no record is a wrong one, or raises
    RequestError if `alone`.
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
