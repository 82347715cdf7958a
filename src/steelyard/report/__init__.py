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
from steelyard.record.ceilings_record import SpecRecord
from steelyard.record.record import Record
from steelyard.report import flagperf
from steelyard.report.as_html import render_html
from steelyard.report.as_md import render_markdown
from steelyard.report.as_text import render_text
from steelyard.report.ceilings_page import build_ceilings_page
from steelyard.report.comparison_page import build_comparison_page
from steelyard.report.document import Lang, Page
from steelyard.report.flagperf import CasePage
from steelyard.report.group_tables import ENGINES, REPEATS, SCALING
from steelyard.report.history_page import build_history_page
from steelyard.report.report_page import build_report_page
from steelyard.report.summary import build_brief_page, build_summary_page
from steelyard.report.waterfall_page import build_short_waterfall_page, build_waterfall_page
from steelyard.words import LANGS

Kind = TypeVar("Kind")
build_repeats_page, build_engines_page, build_scaling_page = (
    REPEATS.build_page,
    ENGINES.build_page,
    SCALING.build_page,
)
FORMATS: dict[str, Callable[[Page], str]] = {
    "text": render_text,
    "md": render_markdown,
    "html": render_html,
}

__all__ = [
    "FORMATS",
    "LANGS",
    "CasePage",
    "Lang",
    "Page",
    "build_brief_page",
    "build_comparison_page",
    "build_engines_page",
    "build_history_page",
    "build_repeats_page",
    "build_report_page",
    "build_scaling_page",
    "build_short_waterfall_page",
    "build_summary_page",
    "build_waterfall_page",
    "flagperf_pages",
    "format_page",
    "render",
    "render_ceilings",
    "render_html",
    "render_markdown",
    "render_text",
]


def render(
    records: list[Record],
    format: str,
    lang: str,
    build: Callable[[list[Record], Lang], Page] = build_report_page,
    columns: int | None = None,
) -> str:
    """Build a page from records and return it as a string in one of FORMATS (`text`, `md`, `html`);
    nothing is printed or written.

    `build(records, lang)` makes the page; the default is the whole report. `lang` is `en` or `zh`.
    `columns` is the terminal width that plain text must fit (None: no limit); the other formats
    ignore it. Raises RequestError if `records` is empty or the format or language is unknown.
    """
    return format_page(build(_check_not_empty(records), _check_language(lang)), format, columns)


def render_ceilings(
    records: list[SpecRecord], format: str, lang: str, columns: int | None = None
) -> str:
    """Return the page of spec records (measured ceilings of machines, from `steelyard spec`) as a
    string in one of FORMATS.

    `columns` is the terminal width that plain text must fit; None means no limit. Raises
    RequestError if `records` is empty or the format or language is unknown.
    """
    return format_page(
        build_ceilings_page(_check_not_empty(records), _check_language(lang)), format, columns
    )


def format_page(page: Page, format: str, columns: int | None = None) -> str:
    """Render a page as a string in one of FORMATS; raise RequestError for an unknown format.

    `columns` is the terminal width that plain text must fit; None means no limit. Other formats
    ignore it.
    """
    if format not in FORMATS:
        raise RequestError(f"format {format!r} is not known; allowed: {', '.join(FORMATS)}")
    return render_text(page, columns) if format == "text" else FORMATS[format](page)


def flagperf_pages(records: list[Record], lang: str) -> list[CasePage]:
    """Return one Markdown page for each case (name, size, and what differs from the shipped case)
    and kind of accelerator, in the form of FlagPerf's published pages; nothing is written.

    Raises RequestError if `records` is empty, the language is unknown, or FlagPerf has no page for
    a record's task.
    """
    return flagperf.build_flagperf_pages(_check_not_empty(records), _check_language(lang))


def _check_language(lang: str) -> Lang:
    """Return `lang` as a `Lang`, or raise RequestError if it is not in LANGS."""
    known = next((language for language in LANGS if language == lang), None)
    if known is None:
        raise RequestError(f"language {lang!r} is not known; allowed: {', '.join(LANGS)}")
    return known


def _check_not_empty(records: list[Kind]) -> list[Kind]:
    """Return the same list, or raise RequestError if there are no records in it."""
    if not records:
        raise RequestError("no records given; name at least one record file or folder")
    return records
