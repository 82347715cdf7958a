"""Options that only `report` takes."""

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli import complete

ReportFormat = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="text (the default), md, html or csv.",
        autocompletion=complete.report_formats,
    ),
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout", metavar="LAYOUT", help="flagperf: order, tables and columns of FlagPerf's published pages, in Markdown."
    ),
]
ReportTo = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write to this file. With --layout flagperf also a folder: one file a case."),
]
