"""The verbs for records that are there: report, verify and schema."""

from pathlib import Path
from typing import Annotated, Any

import typer

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
    from steelyard.metrics.verify import MISFITS

    try:
        return report.render(_read(places), format_, lang)
    except MISFITS as error:
        where = ", ".join(map(str, places))
        raise RequestError(
            f"{where}: no page can be made of it: {type(error).__name__}: {error}; try steelyard verify"
        ) from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--to {str(path)!r} cannot be written: {error.strerror}") from error


def _paths(places: list[Path]) -> list[Path]:
    out: list[Path] = []
    for place in places:
        out += sorted(place.glob("*.json")) if place.is_dir() else [place]
    if not out:
        raise RequestError(f"no records in {', '.join(str(place) for place in places)}; give records or a folder of them")
    return out


def _read(places: list[Path]) -> list[Any]:
    from steelyard.metrics.verify import read

    return [read(path) for path in _paths(places)]


def verify(records: Records, as_json: Json = False) -> int:
    """Recompute every metric of records from their raw samples, and check their hashes.

    Example: steelyard verify records/
    """
    from steelyard.metrics.verify import verify as check

    paths = _paths(records)
    found = {str(path): check(path) if len(paths) == 1 else _verdict(path) for path in paths}
    wrong = {path: lines for path, lines in found.items() if lines}
    if as_json:
        dump({"records": [{"path": path, "ok": not lines, "wrong": lines} for path, lines in found.items()]})
    else:
        for path, lines in found.items():
            answer(f"{'ok' if not lines else 'WRONG'}  {path}")
            for line in lines:
                answer(f"  {line}")
    return 1 if wrong else 0


def _verdict(path: Path) -> list[str]:
    """One of several: what is no record at all is wrong, and the others are still looked at."""
    from steelyard.metrics.verify import verify as check

    try:
        return check(path)
    except RequestError as error:
        return [one_line(error)]


def schema(as_json: Json = False) -> None:
    """The JSON Schema of a record.

    Example: steelyard schema > record.schema.json
    """
    from steelyard.record import record

    dump(record.schema())
