"""Print or write what `report`, `compare` and `history` show: text, Markdown, HTML, CSV, JSON, and
FlagPerf's page layout.

The pages themselves are made by `report/`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard import files, report
from steelyard.cli.printing import (
    find_width,
    print_json,
    print_stderr,
    print_stdout,
    print_verbatim,
)
from steelyard.errors import RequestError
from steelyard.record.ceilings_record import SpecRecord
from steelyard.record.record import Record
from steelyard.report import Page, as_csv, report_data
from steelyard.report.flagperf import CasePage
from steelyard.report.report_data import PageFile

CSV = "csv"
FLAGPERF = "flagperf"
PAGE_SEPARATOR = "\n---\n\n"  # between the pages of two cases, in Markdown


@dataclass(frozen=True)
class ExportOptions:
    """The options of `report` that say what is shown and how; creating one raises RequestError if
    they are unknown or cannot be combined. `given_format` is --format as typed or None; `format` is
    the one to write. `layout` is None or flagperf; `lang` the language; `to` the file to write,
    with a layout also a folder (None: stdout). `explain`: the waterfall; `full`: every detail;
    `wide`: no limit of width; `as_json`: data instead of a page.
    """

    given_format: str | None
    layout: str | None
    lang: str
    to: Path | None
    explain: bool
    full: bool
    wide: bool
    as_json: bool

    def __post_init__(self) -> None:
        """Raise RequestError for an unknown layout, format or language of `report`, and for options
        that cannot be combined: --layout with another format than md, --explain with --layout or
        csv, --json with a format or layout but without --to.
        """
        if self.layout not in (None, FLAGPERF):
            raise RequestError(f"--layout {self.layout!r}: allowed: {FLAGPERF}")
        check_format(self.format, self.lang, (CSV,))
        if self.layout and self.given_format not in (None, "md"):
            raise RequestError(
                f"--layout {FLAGPERF} is Markdown; leave out --format {self.given_format}"
            )
        if self.explain and (self.layout or self.format == CSV):
            option = f"--layout {FLAGPERF}" if self.layout else f"--format {CSV}"
            raise RequestError(
                f"--explain and {option} cannot be combined; run the command once with each"
            )
        if self.as_json and self.to is None and (self.given_format or self.layout):
            raise RequestError(
                "--json prints data, not a page; add --to FILE to write the page too, or leave out"
                " --json"
            )

    @property
    def format(self) -> str:
        """Return the format to write: `md` with a layout, otherwise the one asked for, otherwise
        `text`.
        """
        return "md" if self.layout else self.given_format or "text"


def _render_page(options: ExportOptions, specs: list[SpecRecord], records: list[Record]) -> str:
    """Return a page, or the CSV table of records, as text. Spec records are rendered if there are
    any, the others are then ignored. Text is as wide as the terminal, without limit with --wide or
    --to, and has all columns of tables with --full; it is the brief page unless --full or --json,
    or the waterfall with --explain. Raise RequestError for CSV of spec records.
    """
    if specs and options.format == CSV:
        raise RequestError(
            f"--format {CSV} lists runs; spec records have no metrics: use --json or another format"
        )
    width = find_width(options.wide or options.to is not None)
    short = options.format == "text" and not options.full and not options.as_json
    if specs and short:
        return report.render_brief_ceilings(specs, options.lang, width)
    if specs:
        return report.render_ceilings(specs, options.format, options.lang, width, options.full)
    if options.format == CSV:
        return as_csv.render_csv(records)
    make_page = (
        report.build_waterfall_page
        if options.explain
        else report.build_brief_page
        if short
        else report.build_report_page
    )
    return report.render(records, options.format, options.lang, make_page, width, options.full)


def export_records(options: ExportOptions, specs: list[SpecRecord], records: list[Record]) -> None:
    """Print spec records, or if there are none records of runs, on stdout as the options ask; or
    write them to the file or folder of --to, and print on stderr a line with the path of each file
    written.

    With --json, data is printed on stdout instead, and with --to the pages are written too, whose
    paths then stand in the data alone. Raise RequestError for what cannot be shown or written.
    """
    written = [] if options.to is None else _write_pages(options, options.to, specs, records)
    if options.as_json:
        exported = (
            report_data.build_ceilings_report(specs, written)
            if specs
            else report_data.build_report(records, options.explain, written)
        )
        print_json(exported.model_dump(mode="json", by_alias=True))
    elif options.to is not None:
        for page_file in written:
            print_stderr(f"{'table' if options.format == CSV else 'page'}: {page_file.path}")
    else:
        print_text = print_verbatim if options.format == CSV else print_stdout
        print_text(_render_all(options, specs, records))


def _write_pages(
    options: ExportOptions, to: Path, specs: list[SpecRecord], records: list[Record]
) -> list[PageFile]:
    """Write the page to the file `to`; with FlagPerf's layout, unless that name ends in .md, one
    file NAME.md per page (case, size and accelerator) in the folder `to`, which is created. Files
    that exist are replaced. Return format, language and path of each. Raise RequestError if one
    cannot be written.
    """
    if options.layout and to.suffix != ".md":
        try:
            to.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"--to {str(to)!r} cannot be created as a folder: {error.strerror}"
            ) from error
        text_by_path = {
            to / f"{page.name}.md": page.text
            for page in _make_flagperf_pages(options, specs, records)
        }
    else:
        text_by_path = {to: _render_all(options, specs, records)}
    for path, content in text_by_path.items():
        write_page(path, content)
    return [
        PageFile(format=options.format, lang=options.lang, path=str(path)) for path in text_by_path
    ]


def _render_all(options: ExportOptions, specs: list[SpecRecord], records: list[Record]) -> str:
    """Return everything as one text: with FlagPerf's layout the pages of all cases, separated by
    rules, else one page or table. Raise RequestError for what the format cannot show of spec
    records.
    """
    if options.layout:
        return PAGE_SEPARATOR.join(
            page.text for page in _make_flagperf_pages(options, specs, records)
        )
    return _render_page(options, specs, records)


def _make_flagperf_pages(
    options: ExportOptions, specs: list[SpecRecord], records: list[Record]
) -> list[CasePage]:
    """Return the pages in FlagPerf's layout, one (name and Markdown text) per case, size and
    accelerator, in the language of the options. Raise RequestError if there are spec records.
    """
    if specs:
        raise RequestError(
            f"--layout {FLAGPERF} shows runs, but these are spec records; leave out --layout"
        )
    return report.flagperf_pages(records, options.lang)


def check_format(format_: str, lang: str, other_formats: tuple[str, ...] = ()) -> None:
    """Raise RequestError for an unknown format or language; `other_formats` are allowed beside
    those of pages, such as csv.
    """
    if format_ not in (*report.FORMATS, *other_formats):
        raise RequestError(
            f"--format {format_!r}: allowed: {', '.join((*report.FORMATS, *other_formats))}"
        )
    if lang not in report.LANGS:
        raise RequestError(f"--lang {lang!r}: allowed: {', '.join(report.LANGS)}")


def show_page(
    make_page: Callable[[], Page],
    make_json: Callable[[], dict[str, Any]],
    format_: str,
    lang: str,
    to: Path | None,
    wide: bool,
    as_json: bool,
) -> None:
    """Print a page on stdout, as wide as the terminal unless `wide`, or write it to the file `to`
    without a limit of width and print its path on stderr.

    With `as_json`, what `make_json` returns is printed as JSON instead of the page; with `to` too,
    the page is written and a dict with its path is printed. `make_page` and `make_json` are called
    only if needed. Raise RequestError if the file cannot be written.
    """
    if to is None and as_json:
        print_json(make_json())
        return
    text = report.format_page(make_page(), format_, find_width(wide or to is not None))
    if to is None:
        print_stdout(text)
        return
    write_page(to, text)
    if as_json:
        print_json({"format": format_, "lang": lang, "page": None, "path": str(to)})
    else:
        print_stderr(f"page: {to}")


def write_page(path: Path, text: str) -> None:
    """Write a text as UTF-8 to the file of --to, completely or not at all, replacing an existing
    one. Raise RequestError if it cannot be written.
    """
    try:
        files.write_file(path, text.encode("utf-8"))
    except OSError as error:
        raise RequestError(f"--to {str(path)!r} cannot be written: {error.strerror}") from error
