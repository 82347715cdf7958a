"""The verbs for records that are there: report, verify and schema."""

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard import files
from steelyard.cli import terminal
from steelyard.cli.options import Json, Lang, Records, Wide
from steelyard.cli.out import answer, dump, one_line, say
from steelyard.cli.report_options import Layout, ReportFormat, ReportTo
from steelyard.errors import RequestError

if TYPE_CHECKING:
    from steelyard.record.record import Record
    from steelyard.record.signature import Signature
    from steelyard.record.spec import SpecRecord
    from steelyard.report import Page

SHOWN = 3  # spec records that a line names


def report_(
    records: Records,
    format_: ReportFormat = None,
    layout: Layout = None,
    lang: Lang = "en",
    to: ReportTo = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Only why the rate is not higher: where the time of a step goes.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Text: every detail and all columns, not one screen a case.")] = False,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Show records on the terminal, or write a page, a table or data.

    The terminal shows one screen a case; --full prints all of the page.

    \b
    Examples:
      steelyard report records/
      steelyard report records/ --full
      steelyard report records/ --format html --to page.html
      steelyard report records/ --explain

    \b
    One row a record, for a spreadsheet:
      steelyard report records/ --format csv --to runs.csv

    \b
    Numbers for a program (steelyard schema report says what is in it):
      steelyard report records/ --json

    \b
    The form of FlagPerf's published pages, to submit there; one file a case:
      steelyard report records/ --layout flagperf --lang zh --to pages/
    """
    from steelyard import report
    from steelyard.cli import export

    wanted = export.Export(format_, layout, lang, to, explain, as_json)
    of_spec, runs = by_kind(paths(records))
    specs = [] if runs else read_specs(of_spec)
    if not wanted.is_page:
        export.show(wanted, specs, read(records) if runs else [])
        return
    columns = _columns(to, full, wide)
    if specs:
        show(report.render_spec(specs, wanted.format, lang, columns), to, False, wanted.format, lang)
        return
    short = wanted.format == "text" and not full
    made = report.explain if explain else report.brief if short else report.page
    show(report.render(read(records), wanted.format, lang, made, columns), to, False, wanted.format, lang)


def rendered(page: "Page", format_: str, to: Path | None, as_json: bool, wide: bool) -> str:
    """A page in one of the formats; text as wide as the terminal, and in a file as wide as it likes."""
    from steelyard import report

    return report.as_format(page, format_, _columns(to, as_json, wide))


def _columns(to: Path | None, whole: bool, wide: bool) -> int | None:
    return terminal.columns(wide or whole or to is not None)


def check_format(format_: str, lang: str, others: tuple[str, ...] = ()) -> None:
    """`others` are formats that are no pages."""
    from steelyard import report

    if format_ not in (*report.FORMATS, *others):
        raise RequestError(f"--format {format_!r}: allowed: {', '.join((*report.FORMATS, *others))}")
    if lang not in report.LANGS:
        raise RequestError(f"--lang {lang!r}: allowed: {', '.join(report.LANGS)}")


def show(page: str, to: Path | None, as_json: bool, format_: str, lang: str) -> None:
    """A page on stdout, or in a file and its place on stderr; as JSON where it is."""
    if to is not None:
        write(to, page)
    if as_json:
        dump({"format": format_, "lang": lang, "page": None if to else page, "path": str(to) if to else None})
    elif to is None:
        answer(page)
    else:
        say(f"page: {to}")


def by_kind(every: list[Path]) -> tuple[list[Path], list[Path]]:
    """Separate the paths of spec records from all others, which are read as records of runs."""
    from steelyard.record import sealed

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
    count, them = f"{len(of_spec)} spec records", "them"
    if len(of_spec) == 1:
        count, them = "1 spec record", "it"
    how = f"show {them} with: steelyard report {shown}"
    if not runs:
        raise RequestError(f"{count} and no run; {how}")
    say(f"left out: {one_line(f'{count}; {how}')}")
    return runs


def read_specs(every: list[Path]) -> "list[SpecRecord]":
    """Read spec records that verify, and raise RequestError for the first that does not."""
    from steelyard.metrics import ceilings

    return [ceilings.read(path) for path in every]


def write(path: Path, text: str) -> None:
    try:
        files.write(path, text.encode("utf-8"))
    except OSError as error:
        raise RequestError(f"--to {str(path)!r} cannot be written: {error.strerror}") from error


def paths(places: list[Path]) -> list[Path]:
    """The files of records, one by one."""
    out: list[Path] = []
    for place in places:
        out += _below(place) if place.is_dir() else [place]
    if not out:
        raise RequestError(f"no records in {', '.join(str(place) for place in places)}; give records or a folder of them")
    return out


def _below(folder: Path) -> list[Path]:
    """Records in a folder and the folders in it, but for those of checkpoints, whose tables are JSON too."""
    return sorted(path for path in folder.rglob("*.json") if "checkpoints" not in path.relative_to(folder).parts)


def read(places: list[Path]) -> "list[Record]":
    """Read the records of runs from files and folders, without the spec records among them. Raise
    RequestError if there is no run, or for the first that does not verify."""
    from steelyard.metrics import verify

    return [verify.read(path) for path in only_runs(paths(places))]


def verify(
    records: Records,
    signers: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="SSH allowed_signers file; every record must be signed by one of them."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Check records: metrics, hashes and signatures.

    Every metric is computed again from the raw samples. A record that asks another question than the shipped case of
    its name verifies, with a remark. Exit code 0: all verify; 1: one does not.

    \b
    Examples:
      steelyard verify records/
      steelyard verify records/ --signers allowed_signers
    """
    every = paths(records)
    found = [_verdict(path, signers, alone=len(every) == 1) for path in every]
    if as_json:
        dump({"records": [asdict(one) | {"path": str(one.path), "ok": not one.wrong} for one in found]})
    else:
        for one in found:
            answer(f"{'WRONG' if one.wrong else 'ok'}  {one_line(one.path)}")
            signed = [str(one.signature)] if one.signature is not None and str(one.signature) not in one.wrong else []
            for line in (*one.wrong, *one.remarks, *signed):
                answer(f"  {one_line(line)}")
    return 1 if any(one.wrong for one in found) else 0


@dataclass(frozen=True)
class Verdict:
    path: Path
    wrong: list[str]
    remarks: list[str]
    signature: "Signature | None"


def _verdict(path: Path, signers: Path | None, alone: bool) -> Verdict:
    """Of several records one that is none is wrong, and the others are still looked at; alone, it is a wrong request."""
    from steelyard.metrics import ceilings, verify
    from steelyard.record import sealed, signature

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


def schema(
    of: Annotated[str, typer.Argument(metavar="[record|spec|report|worker|rank]", help="Which schema to print.")] = "record",
    as_json: Json = False,
) -> None:
    """Print the JSON Schema of records, reports and worker files.

    record: of a run. spec: a record of kind spec. report: what report --json prints. worker: a worker's input.
    rank: what a rank writes.

    \b
    Examples:
      steelyard schema > record.schema.json
      steelyard schema worker
    """
    from steelyard.record import record
    from steelyard.record import spec as of_spec
    from steelyard.report import data as of_report
    from steelyard.run import boundary

    schemas: dict[str, Callable[[], dict[str, Any]]] = {
        "record": record.schema,
        "spec": of_spec.schema,
        "report": of_report.schema,
        "worker": boundary.WorkerSpec.model_json_schema,
        "rank": boundary.RankFile.model_json_schema,
    }
    if of not in schemas:
        raise RequestError(f"schema {of!r}: allowed: {', '.join(schemas)}")
    dump(schemas[of]())
