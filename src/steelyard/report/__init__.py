"""Records as pages in three formats and two languages, as CSV, as data, and the short table after a
run.
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
    """Return a page of these records in one of FORMATS: the whole one, or what `made` makes.

    `columns` limits plain text. Raise RequestError for no records, or an unknown format or
    language."""
    return as_format(made(_some(records), _spoken(lang)), format, columns)


def render_spec(
    records: list[SpecRecord], format: str, lang: str, columns: int | None = None
) -> str:
    """Return a page of records of what a machine can do, as `render` does."""
    return as_format(spec_page(_some(records), _spoken(lang)), format, columns)


def as_format(page: Page, format: str, columns: int | None = None) -> str:
    """Return a page as text in one of FORMATS, or raise RequestError; `columns` limits plain
    text."""
    if format not in FORMATS:
        raise RequestError(f"format {format!r} is not known; allowed: {', '.join(FORMATS)}")
    return text(page, columns) if format == "text" else FORMATS[format](page)


def flagperf_pages(records: list[Record], lang: str) -> list[CasePage]:
    """Return records in the form of FlagPerf's published pages, one a case and kind of
    accelerator."""
    return flagperf.pages(_some(records), _spoken(lang))


def _spoken(lang: str) -> Lang:
    found = next((one for one in LANGS if one == lang), None)
    if found is None:
        raise RequestError(f"language {lang!r} is not known; allowed: {', '.join(LANGS)}")
    return found


def _some(records: list[Kind]) -> list[Kind]:
    if not records:
        raise RequestError("no records; give the path of at least one")
    return records
