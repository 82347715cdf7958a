"""What `report` gives beside a page on a terminal: CSV, JSON, and pages in the form of FlagPerf's published ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.cli.out import answer, dump, say, verbatim
from steelyard.cli.report import check_format, write
from steelyard.errors import RequestError

if TYPE_CHECKING:
    from steelyard.record.record import Record
    from steelyard.record.spec import SpecRecord
    from steelyard.report.data import PageFile
    from steelyard.report.flagperf import CasePage

CSV = "csv"
FLAGPERF = "flagperf"
RULE = "\n---\n\n"  # between the pages of two cases


@dataclass(frozen=True)
class Export:
    """What was asked for, if it goes together."""

    asked_format: str | None
    layout: str | None
    lang: str
    to: Path | None
    explain: bool
    as_json: bool

    def __post_init__(self) -> None:
        if self.layout not in (None, FLAGPERF):
            raise RequestError(f"--layout {self.layout!r}: allowed: {FLAGPERF}")
        check_format(self.format, self.lang, (CSV,))
        if self.layout and self.asked_format not in (None, "md"):
            raise RequestError(f"--layout {FLAGPERF} is Markdown; leave out --format {self.asked_format}")
        if self.explain and (self.layout or self.format == CSV):
            other = f"--layout {FLAGPERF}" if self.layout else f"--format {CSV}"
            raise RequestError(f"--explain and {other} do not go together; ask for them one after the other")
        if self.as_json and self.to is None and (self.asked_format or self.layout):
            raise RequestError("--json prints data, not a page; add --to FILE to write the page too, or leave out --json")

    @property
    def format(self) -> str:
        return "md" if self.layout else self.asked_format or "text"

    @property
    def is_page(self) -> bool:
        """Whether it is a page and nothing else."""
        return not self.as_json and not self.layout and self.format != CSV


def _text(wanted: Export, specs: "list[SpecRecord]", records: "list[Record]") -> str:
    """A page, or the table of records."""
    from steelyard import report
    from steelyard.report import as_csv

    if specs and wanted.format == CSV:
        raise RequestError(f"--format {CSV} is of runs; records of kind spec have no metrics: take --json or another format")
    if specs:
        return report.render_spec(specs, wanted.format, wanted.lang)
    if wanted.format == CSV:
        return as_csv.table(records)
    return report.render(records, wanted.format, wanted.lang, report.explain if wanted.explain else report.page)


def show(wanted: Export, specs: "list[SpecRecord]", records: "list[Record]") -> None:
    from steelyard.report import data

    written = [] if wanted.to is None else _write(wanted, wanted.to, specs, records)
    if wanted.as_json:
        found = data.report_spec(specs, written) if specs else data.report(records, wanted.explain, written)
        dump(found.model_dump(mode="json", by_alias=True))
    elif wanted.to is not None:
        for one in written:
            say(f"{'table' if wanted.format == CSV else 'page'}: {one.path}")
    else:
        out = verbatim if wanted.format == CSV else answer
        out(_whole(wanted, specs, records))


def _write(wanted: Export, to: Path, specs: "list[SpecRecord]", records: "list[Record]") -> "list[PageFile]":
    """What was asked for, in a file; pages of FlagPerf's form in a folder too, unless the name ends in .md."""
    from steelyard.report.data import PageFile

    if wanted.layout and to.suffix != ".md":
        _make(to)
        files = {to / f"{page.name}.md": page.text for page in _flagperf(wanted, specs, records)}
    else:
        files = {to: _whole(wanted, specs, records)}
    for path, content in files.items():
        write(path, content)
    return [PageFile(format=wanted.format, lang=wanted.lang, path=str(path)) for path in files]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"--to {str(folder)!r} is no folder that can be made: {error.strerror}") from error


def _whole(wanted: Export, specs: "list[SpecRecord]", records: "list[Record]") -> str:
    """In one text: pages of several cases one after the other."""
    if wanted.layout:
        return RULE.join(page.text for page in _flagperf(wanted, specs, records))
    return _text(wanted, specs, records)


def _flagperf(wanted: Export, specs: "list[SpecRecord]", records: "list[Record]") -> "list[CasePage]":
    from steelyard import report

    if specs:
        raise RequestError(f"--layout {FLAGPERF} is of runs, and these records are of kind spec; leave out --layout")
    return report.flagperf_pages(records, wanted.lang)
