"""Turn records into what a user reads: pages as text, Markdown or HTML in two languages, and tables
after a run.

The functions named build_* take records or results of `metrics` and return a `Page`, which is data
without a format; `format_page` and the renderers in FORMATS make a string of it. CSV is in
`as_csv`, the JSON of `report --json` in `report_data`. Nothing here writes a file or prints: `cli`
does.
"""

from collections.abc import Callable
from typing import TypeVar

from steelyard.errors import RequestError
from steelyard.record.record import Record
from steelyard.record.spec import SpecRecord
from steelyard.report import flagperf
from steelyard.report.as_html import html
from steelyard.report.as_md import md
from steelyard.report.as_text import text
from steelyard.report.build import page
from steelyard.report.compare import page as comparison
from steelyard.report.document import Lang, Page
from steelyard.report.flagperf import CasePage
from steelyard.report.group_tables import ENGINES, REPEATS, SCALING
from steelyard.report.history import page as history
from steelyard.report.spec import page as spec_page
from steelyard.report.summary import brief, table
from steelyard.report.waterfall import after_run as explain_runs
from steelyard.report.waterfall import page as explain
from steelyard.words import LANGS

Kind = TypeVar("Kind")
repeats, engines, scaling = REPEATS.page, ENGINES.page, SCALING.page
FORMATS: dict[str, Callable[[Page], str]] = {"text": text, "md": md, "html": html}

__all__ = [
    "FORMATS",
    "LANGS",
    "CasePage",
    "Lang",
    "Page",
    "as_format",
    "brief",
    "comparison",
    "engines",
    "explain",
    "explain_runs",
    "flagperf_pages",
    "history",
    "html",
    "md",
    "page",
    "render",
    "render_spec",
    "repeats",
    "scaling",
    "table",
    "text",
]


def render(
    records: list[Record],
    format: str,
    lang: str,
    made: Callable[[list[Record], Lang], Page] = page,
    columns: int | None = None,
) -> str:
    """Build a page from records and return it as a string in one of FORMATS (`text`, `md`, `html`).

    `build` makes the page; the default is the whole report. `columns` is the terminal width that
    plain text must fit; the other formats ignore it. Raises RequestError if `records` is empty or
    the format or language is unknown.
    """
    return as_format(made(_some(records), _spoken(lang)), format, columns)


def render_spec(
    records: list[SpecRecord], format: str, lang: str, columns: int | None = None
) -> str:
    """Return the page of spec records (measured ceilings of machines) as a string in one of
    FORMATS.

    `columns` is the terminal width for plain text. Raises RequestError if `records` is empty or the
    format or language is unknown.
    """
    return as_format(spec_page(_some(records), _spoken(lang)), format, columns)


def as_format(page: Page, format: str, columns: int | None = None) -> str:
    """Render a page as a string in one of FORMATS; raise RequestError for an unknown format.

    `columns` is the terminal width that plain text must fit; None means no limit. Other formats
    ignore it.
    """
    if format not in FORMATS:
        raise RequestError(f"format {format!r} is not known; allowed: {', '.join(FORMATS)}")
    return text(page, columns) if format == "text" else FORMATS[format](page)


def flagperf_pages(records: list[Record], lang: str) -> list[CasePage]:
    """Return one Markdown page for each case, size and kind of accelerator, in the form of
    FlagPerf's published pages.

    Raises RequestError if `records` is empty, the language is unknown, or FlagPerf has no page for
    a record's task.
    """
    return flagperf.pages(_some(records), _spoken(lang))


def _spoken(lang: str) -> Lang:
    """Return `lang` as a `Lang`, or raise RequestError if it is not in LANGS."""
    found = next((one for one in LANGS if one == lang), None)
    if found is None:
        raise RequestError(f"language {lang!r} is not known; allowed: {', '.join(LANGS)}")
    return found


def _some(records: list[Kind]) -> list[Kind]:
    """Return the same list, or raise RequestError if it is empty."""
    if not records:
        raise RequestError("no records; give the path of at least one")
    return records
