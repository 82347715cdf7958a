"""Print, after runs with --explain, where the time of a step goes and how to list its kernels."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.cli.out import Output, paged, say, tell

if TYPE_CHECKING:
    from steelyard.record.record import Record


def show(records: "list[Record]", out: Path, output: Output) -> None:
    """Print the waterfall of every run that was profiled, and a line on stderr that says how to
    list the kernels."""
    from steelyard import report

    page = report.explain_runs(records)
    if page is None:
        say("no waterfall: no run got to the steps that are profiled")
        return
    tell("\n" + paged(page, output.wide))
    if not output.silent:
        say(f"by kernel: steelyard report {shlex.quote(str(out))} --explain")
