"""Print or write what `report`, `compare` and `history` show: text, Markdown, HTML, CSV, JSON, and
FlagPerf's page layout.

The pages themselves are made by `report/`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard import files, report
from steelyard.cli.out import answer, columns, dump, say, verbatim
from steelyard.errors import RequestError
from steelyard.record.record import Record
from steelyard.record.spec import SpecRecord
from steelyard.report import Page, as_csv, data
from steelyard.report.data import PageFile
from steelyard.report.flagperf import CasePage

CSV = "csv"
FLAGPERF = "flagperf"
RULE = "\n---\n\n"  # between the pages of two cases, in Markdown


@dataclass(frozen=True)
class Export:
    """The options of `report` that say what is shown and how. Creating one raises RequestError if
    they cannot be combined.
    """

    asked_format: str | None
    layout: str | None
    lang: str
    to: Path | None
    explain: bool
    full: bool
    wide: bool
    as_json: bool

    def __post_init__(self) -> None:
        """Raise RequestError for an unknown layout, format or language, and for options that cannot
        be combined.
        """
        if self.layout not in (None, FLAGPERF):
            raise RequestError(f"--layout {self.layout!r}: allowed: {FLAGPERF}")
        check_format(self.format, self.lang, (CSV,))
        if self.layout and self.asked_format not in (None, "md"):
            raise RequestError(
                f"--layout {FLAGPERF} is Markdown; leave out --format {self.asked_format}"
            )
        if self.explain and (self.layout or self.format == CSV):
            other = f"--layout {FLAGPERF}" if self.layout else f"--format {CSV}"
            raise RequestError(
                f"--explain and {other} do not go together; ask for them one after the other"
            )
        if self.as_json and self.to is None and (self.asked_format or self.layout):
            raise RequestError(
                "--json prints data, not a page; add --to FILE to write the page too, or leave out"
                " --json"
            )

    @property
    def format(self) -> str:
        """Return the format to write: `md` with a layout, otherwise the one asked for, otherwise
        `text`.
        """
        return "md" if self.layout else self.asked_format or "text"


def _text(wanted: Export, specs: list[SpecRecord], records: list[Record]) -> str:
    """Render a page, or the CSV table of records. Spec records are rendered if there are any, the
    others are then ignored. Raise RequestError for CSV of spec records.
    """
    if specs and wanted.format == CSV:
        raise RequestError(
            f"--format {CSV} is of runs; records of kind spec have no metrics: take --json or"
            " another format"
        )
    room = columns(wanted.wide or wanted.full or wanted.to is not None)
    if specs:
        return report.render_spec(specs, wanted.format, wanted.lang, room)
    if wanted.format == CSV:
        return as_csv.table(records)
    short = wanted.format == "text" and not wanted.full and not wanted.as_json
    page = report.explain if wanted.explain else report.brief if short else report.page
    return report.render(records, wanted.format, wanted.lang, page, room)


def export(wanted: Export, specs: list[SpecRecord], records: list[Record]) -> None:
    """Print spec records, or if there are none records of runs, as the options ask; or write them
    to the file or folder of --to and print its path.

    With --json, data is printed, and the page is also written if --to is given. Raise RequestError
    for what cannot be shown or written.
    """
    written = [] if wanted.to is None else _write(wanted, wanted.to, specs, records)
    if wanted.as_json:
        found = (
            data.report_spec(specs, written)
            if specs
            else data.report(records, wanted.explain, written)
        )
        dump(found.model_dump(mode="json", by_alias=True))
    elif wanted.to is not None:
        for one in written:
            say(f"{'table' if wanted.format == CSV else 'page'}: {one.path}")
    else:
        out = verbatim if wanted.format == CSV else answer
        out(_whole(wanted, specs, records))


def _write(
    wanted: Export, to: Path, specs: list[SpecRecord], records: list[Record]
) -> list[PageFile]:
    """Write the page to the file `to` and return what was written; with FlagPerf's layout one file
    per case in the folder `to`, which is created, unless its name ends in .md. Raise RequestError
    if it cannot be written.
    """
    if wanted.layout and to.suffix != ".md":
        try:
            to.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"--to {str(to)!r} is no folder that can be made: {error.strerror}"
            ) from error
        files = {to / f"{page.name}.md": page.text for page in _flagperf(wanted, specs, records)}
    else:
        files = {to: _whole(wanted, specs, records)}
    for path, content in files.items():
        write(path, content)
    return [PageFile(format=wanted.format, lang=wanted.lang, path=str(path)) for path in files]


def _whole(wanted: Export, specs: list[SpecRecord], records: list[Record]) -> str:
    """Render everything as one text: with FlagPerf's layout the pages of all cases, separated by
    rules.
    """
    if wanted.layout:
        return RULE.join(page.text for page in _flagperf(wanted, specs, records))
    return _text(wanted, specs, records)


def _flagperf(wanted: Export, specs: list[SpecRecord], records: list[Record]) -> list[CasePage]:
    """Return one page per case in FlagPerf's layout. Raise RequestError for spec records."""
    if specs:
        raise RequestError(
            f"--layout {FLAGPERF} is of runs, and these records are of kind spec; leave out"
            " --layout"
        )
    return report.flagperf_pages(records, wanted.lang)


def check_format(format_: str, lang: str, others: tuple[str, ...] = ()) -> None:
    """Raise RequestError for an unknown format or language; `others` are formats that are allowed
    beside those of pages, such as csv.
    """
    if format_ not in (*report.FORMATS, *others):
        raise RequestError(
            f"--format {format_!r}: allowed: {', '.join((*report.FORMATS, *others))}"
        )
    if lang not in report.LANGS:
        raise RequestError(f"--lang {lang!r}: allowed: {', '.join(report.LANGS)}")


def show(
    page: Callable[[], Page],
    table: Callable[[], dict[str, Any]],
    format_: str,
    lang: str,
    to: Path | None,
    wide: bool,
    as_json: bool,
) -> None:
    """Print a page as wide as the terminal, or write it to the file `to` without a limit of width
    and print its path.

    With `as_json`, `table()` is printed as JSON instead of the page, or after writing it a dict
    with its path. `page` and `table` are called only if needed. Raise RequestError if the file
    cannot be written.
    """
    if to is None and as_json:
        dump(table())
        return
    text = report.as_format(page(), format_, columns(wide or to is not None))
    if to is None:
        answer(text)
        return
    write(to, text)
    if as_json:
        dump({"format": format_, "lang": lang, "page": None, "path": str(to)})
    else:
        say(f"page: {to}")


def write(path: Path, text: str) -> None:
    """Write a text to the file of --to in one step (whole or not at all). Raise RequestError if it
    cannot be written.
    """
    try:
        files.write(path, text.encode("utf-8"))
    except OSError as error:
        raise RequestError(f"--to {str(path)!r} cannot be written: {error.strerror}") from error
