"""The verbs for records that are there: report, verify and schema."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard import files
from steelyard.cli.options import Json, Records
from steelyard.cli.out import answer, dump, one_line, say
from steelyard.errors import RequestError


def report_(
    records: Records,
    format_: Annotated[str, typer.Option("--format", help="text, md or html.")] = "text",
    lang: Annotated[str, typer.Option(help="en or zh.")] = "en",
    to: Annotated[Path | None, typer.Option(help="Write to this file instead of stdout.")] = None,
    as_json: Json = False,
) -> None:
    """The result page of records: environment, strategy, what each metric means, values, published rows.

    Example: steelyard report records/*.json --format html --to page.html
    """
    from steelyard import report

    if format_ not in report.FORMATS:
        raise RequestError(f"--format {format_!r}: allowed: {', '.join(report.FORMATS)}")
    if lang not in report.LANGS:
        raise RequestError(f"--lang {lang!r}: allowed: {', '.join(report.LANGS)}")
    page = _page(records, format_, lang)
    if to is not None:
        _write(to, page)
    if as_json:
        dump({"format": format_, "lang": lang, "page": None if to else page, "path": str(to) if to else None})
    elif to is None:
        answer(page)
    else:
        say(f"page: {to}")


def _page(places: list[Path], format_: str, lang: str) -> str:
    from steelyard import report
    from steelyard.metrics import ceilings
    from steelyard.metrics.verify import read
    from steelyard.record import sealed

    paths = _paths(places)
    of_spec = [path for path in paths if sealed.kind(path) == "spec"]
    if not of_spec:
        return report.render([read(path) for path in paths], format_, lang)
    if len(of_spec) < len(paths):
        runs = next(path for path in paths if path not in of_spec)
        raise RequestError(f"{of_spec[0]} is of kind spec, and {runs} is a run: they make two pages; report them apart")
    return report.render_spec([ceilings.read(path) for path in paths], format_, lang)


def _write(path: Path, text: str) -> None:
    try:
        files.write(path, text.encode("utf-8"))
    except OSError as error:
        raise RequestError(f"--to {str(path)!r} cannot be written: {error.strerror}") from error


def _paths(places: list[Path]) -> list[Path]:
    out: list[Path] = []
    for place in places:
        out += _below(place) if place.is_dir() else [place]
    if not out:
        raise RequestError(f"no records in {', '.join(str(place) for place in places)}; give records or a folder of them")
    return out


def _below(folder: Path) -> list[Path]:
    """Records in a folder and the folders in it, but for those of checkpoints, whose tables are JSON too."""
    return sorted(path for path in folder.rglob("*.json") if "checkpoints" not in path.relative_to(folder).parts)


def verify(records: Records, as_json: Json = False) -> int:
    """Recompute every metric of records from their raw samples, and check their hashes.

    A record whose question is not that of the shipped case of its name is sound, and that is said beside it.

    Example: steelyard verify records/
    """
    paths = _paths(records)
    found = [_verdict(path, alone=len(paths) == 1) for path in paths]
    if as_json:
        dump({"records": [asdict(one) | {"path": str(one.path), "ok": not one.wrong} for one in found]})
    else:
        for one in found:
            answer(f"{'WRONG' if one.wrong else 'ok'}  {one_line(one.path)}")
            for line in (*one.wrong, *one.remarks):
                answer(f"  {one_line(line)}")
    return 1 if any(one.wrong for one in found) else 0


@dataclass(frozen=True)
class Verdict:
    path: Path
    wrong: list[str]
    remarks: list[str]


def _verdict(path: Path, alone: bool) -> Verdict:
    """Of several records one that is none is wrong, and the others are still looked at; alone, it is a wrong request."""
    from steelyard.metrics import ceilings, verify
    from steelyard.record import sealed

    try:
        if sealed.kind(path) == "spec":
            return Verdict(path, ceilings.verify(path), [])
        return Verdict(path, verify.verify(path), verify.remarks(path))
    except RequestError as error:
        if alone:
            raise
        return Verdict(path, [one_line(error)], [])


def schema(
    of: Annotated[str, typer.Argument(metavar="[record|spec|worker|rank]", help="What to print the schema of.")] = "record",
    as_json: Json = False,
) -> None:
    """The JSON Schema of a record, of one of kind spec, of what a worker is told (worker), or of what it leaves (rank).

    \b
    Examples:
      steelyard schema > record.schema.json
      steelyard schema worker
    """
    from steelyard.record import record
    from steelyard.record import spec as of_spec
    from steelyard.run import spec

    schemas: dict[str, Callable[[], dict[str, Any]]] = {
        "record": record.schema,
        "spec": of_spec.schema,
        "worker": spec.WorkerSpec.model_json_schema,
        "rank": spec.RankFile.model_json_schema,
    }
    if of not in schemas:
        raise RequestError(f"schema {of!r}: allowed: {', '.join(schemas)}")
    dump(schemas[of]())
