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
from steelyard.report.ceilings_brief import BRIEF_LINES, yield_brief_pages
from steelyard.report.ceilings_page import build_ceilings_page
from steelyard.report.comparison_page import build_comparison_page
from steelyard.report.document import Lang, Page
from steelyard.report.flagperf import CasePage
from steelyard.report.group_tables import ENGINES, REPEATS, SCALING
from steelyard.report.history_page import build_history_page
from steelyard.report.plain_text import clean_line
from steelyard.report.report_page import build_report_page
from steelyard.report.summary import build_brief_page, build_summary_page
from steelyard.report.verdict_page import build_verdict_page, format_verdict
from steelyard.report.waterfall_page import build_short_waterfall_page, build_waterfall_page
from steelyard.words import LANGS, PageWords

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
    "build_verdict_page",
    "build_waterfall_page",
    "flagperf_pages",
    "format_page",
    "format_verdict",
    "render",
    "render_brief_ceilings",
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
    all_columns: bool = False,
) -> str:
    """Build a page from records and return it as a string in one of FORMATS (`text`, `md`, `html`);
    nothing is printed or written.

    `build(records, lang)` makes the page; the default is the whole report. `lang` is `en` or `zh`.
    `columns` is the terminal width that plain text must fit (None: no limit), and `all_columns`
    whether it keeps all columns of tables; the other formats ignore both. Raises RequestError if
    `records` is empty or the format or language is unknown.
    """
    page = build(_check_not_empty(records), _check_language(lang))
    return format_page(page, format, columns, all_columns)


def render_ceilings(
    records: list[SpecRecord],
    format: str,
    lang: str,
    columns: int | None = None,
    all_columns: bool = False,
) -> str:
    """Return the page of spec records (measured ceilings of machines, from `steelyard spec`) as a
    string in one of FORMATS.

    `columns` is the terminal width that plain text must fit (None: no limit), and `all_columns`
    whether it keeps all columns of tables. Raises RequestError if `records` is empty or the format
    or language is unknown.
    """
    page = build_ceilings_page(_check_not_empty(records), _check_language(lang))
    return format_page(page, format, columns, all_columns)


def render_brief_ceilings(
    records: list[SpecRecord], lang: str, columns: int | None = None, full_command: str = "--full"
) -> str:
    """Return the short page of spec records as plain text of at most `BRIEF_LINES` lines: the best
    rates of a machine, or one row for each of several records. Rows that do not fit are left out.

    `columns` is the terminal width; None means no limit. The last line names `full_command`, which
    shows all rows; it is not wrapped, so that it can be copied. Raises RequestError if `records` is
    empty or the language is unknown.
    """
    known_lang, text = _check_language(lang), ""
    hint = PageWords(known_lang)("spec.brief.more", clean_line(full_command))
    for page in yield_brief_pages(_check_not_empty(records), known_lang):
        text = f"{render_text(page, columns)}\n{hint}\n"
        if text.count("\n") <= BRIEF_LINES:
            break
    return text


def format_page(
    page: Page, format: str, columns: int | None = None, all_columns: bool = False
) -> str:
    """Render a page as a string in one of FORMATS; raise RequestError for an unknown format.

    `columns` is the terminal width that plain text must fit; None means no limit. With
    `all_columns` a table that is too wide for it is split, else columns are left out. Other formats
    ignore both.
    """
    if format not in FORMATS:
        raise RequestError(f"format {format!r} is not known; allowed: {', '.join(FORMATS)}")
    if format == "text":
        return render_text(page, columns, all_columns)
    return FORMATS[format](page)


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
