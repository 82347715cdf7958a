"""The commands `check` and `spec`: is this machine fit to measure, and what are its ceilings."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.options import AcceleratorOption, JsonOption, OutOption, QuietOption, WideOption
from steelyard.cli.printing import (
    OutputOptions,
    find_width,
    format_descriptions,
    print_json,
    print_run_result,
    print_run_status,
    print_start_line,
    print_stderr,
    print_stdout,
    to_one_line,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from steelyard.metrics.fitness_rules import FitnessRow
    from steelyard.run.session import PhaseProgress


def check(
    accelerator: AcceleratorOption = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for records; its disk is checked.")
    ] = Path("records"),
    as_json: JsonOption = False,
) -> int:
    """Check whether this machine is fit to measure. Each finding is ok, warn, bad or unknown.
    Nothing is changed.

    Exit code 0: fit, perhaps with warnings; 1: not fit.

    \b
    Examples:
      steelyard check
      steelyard check --accelerator cpu --json
    """
    print_start_line("checking", OutputOptions(as_json))
    from steelyard.metrics import fitness_rules
    from steelyard.run import machine_inspection

    machine = machine_inspection.inspect_machine(accelerator, out)
    rows = fitness_rules.judge_machine(machine)
    is_fit = fitness_rules.is_fit(rows)
    if as_json:
        print_json(
            {
                "fit": is_fit,
                "accelerator": machine.accelerator,
                "findings": fitness_rules.make_json_rows(rows),
            }
        )
    else:
        print_stdout("\n".join([*_format_findings(rows), _format_verdict(rows, is_fit)]))
    return 0 if is_fit else 1


def _format_findings(rows: "list[FitnessRow]") -> list[str]:
    """Return the lines of `check` for its findings, wrapped to the terminal: level (ok, warn, bad,
    unknown), name and finding, and below it, after an arrow, what helps, if there is anything.
    """
    from steelyard.words import render_text

    pairs: list[tuple[str, str]] = []
    for row in rows:
        pairs.append((f"{row.level:<7}  {render_text(row.name)}", render_text(row.found)))
        pairs += [] if row.step is None else [("", f"→ {render_text(row.step)}")]
    return format_descriptions(pairs)


def _format_verdict(rows: "list[FitnessRow]", is_fit: bool) -> str:
    """Return the last line of `check`: `fit to measure` or `not fit to measure`, with the numbers
    of findings that are bad, warn and unknown in parentheses, such as `(1 bad, 2 warn)`; none if
    all are ok.
    """
    counts = {
        level: sum(row.level == level for row in rows) for level in ("bad", "warn", "unknown")
    }
    summary = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
    return f"{'fit' if is_fit else 'not fit'} to measure" + (f" ({summary})" if summary else "")


def spec(
    quick: Annotated[
        bool, typer.Option("--quick", help="Less than 30 s: fewer shapes, shorter measurements.")
    ] = False,
    devices: Annotated[
        int,
        typer.Option(
            metavar="N", help="Devices of this host, all at once; two or more: collectives too."
        ),
    ] = 1,
    accelerator: AcceleratorOption = None,
    limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Start no row after this time; important rows come first. Default: 1200.",
        ),
    ] = None,
    out: OutOption = Path("records"),
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Print every row with shape, interval, clock and remark, not only the best.",
        ),
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    wide: WideOption = False,
) -> int:
    """Measure what this machine can do, against its datasheet.

    Matmul by precision and shape, memory, copies, attention, collectives. Every kernel is checked
    against fp64, run until its rate is steady, and compared with the datasheet. It writes a record
    of kind spec, which verify and report read. Exit code 0: measured; 1: failed, the record says
    why.

    It prints one screen: the best matmul rate of each precision, memory, links, and what could not
    be measured. --full prints every row; report RECORD --full prints them later.

    \b
    Examples:
      steelyard spec --quick
      steelyard spec --quick --full
      steelyard spec --accelerator cuda --devices 8 --out ceilings
      steelyard report ceilings/ --full
    """
    output = OutputOptions(as_json, quiet, wide)
    print_start_line("preparing", output)
    from rich.console import Console

    from steelyard import report
    from steelyard.cli.progress import ProgressDisplay
    from steelyard.record import ceilings_record as records
    from steelyard.run.ceilings_parent import CeilingsRun

    run = CeilingsRun(accelerator, devices, quick, out, limit)
    console = Console(stderr=True, quiet=output.silent)
    with ProgressDisplay(console, f"spec {run.accelerator.name}") as display:
        show_progress = display.show if console.is_terminal else _print_group_lines(output.silent)
        record, path = run.run_and_record(
            _count_from_first_row(show_progress),
            lambda warning: print_stderr(f"warning: {to_one_line(warning)}"),
        )
    if as_json:
        print_json({"records": [records.spec_record_to_english_json(record)]}, print_run_result)
    elif full:
        print_run_result(report.render_ceilings([record], "text", "en", find_width(wide)))
    else:
        command = f"steelyard report {shlex.quote(str(path))} --full"
        print_run_result(report.render_brief_ceilings([record], "en", find_width(wide), command))
    if not as_json and (not quiet or record.status != "valid"):
        # The short page has the reasons already, without the text of exceptions.
        print_run_status(record, path, with_reasons=full)
    return 0 if record.status == "valid" else 1


def _count_from_first_row(
    show: "Callable[[PhaseProgress], None]",
) -> "Callable[[PhaseProgress], None]":
    """Return a progress callback for `spec` that passes each progress on to `show`, with
    `elapsed_s` counted from when the first row (one benchmark) began instead of from the current
    row, so that the time left is estimated for all rows.
    """
    from dataclasses import replace

    from steelyard.run.clock import now

    begin_s: list[float] = []

    def watch(progress: "PhaseProgress") -> None:
        """Call `show` with this progress; from the first one with a total on, its `elapsed_s`
        counts from that moment.
        """
        if progress.total > 0 and not begin_s:
            begin_s.append(now())
        show(replace(progress, elapsed_s=now() - begin_s[0]) if begin_s else progress)

    return watch


def _print_group_lines(silent: bool) -> "Callable[[PhaseProgress], None]":
    """Return a progress callback of `spec` for output that is no terminal: it prints a line on
    stderr when a new group of rows (such as matmul) begins, and nothing if `silent`.
    """
    from steelyard.run.session import STARTING

    printed = [STARTING]

    def watch(progress: "PhaseProgress") -> None:
        """Print a line on stderr if this progress is the first of its group, which is the first
        word of its phase: the group, and how many rows of all are done.
        """
        group = progress.phase.partition(" ")[0]
        if not silent and group not in printed:
            printed.append(group)
            print_stderr(
                to_one_line(
                    f"{group}: {progress.done} of {progress.total} rows done"
                    if progress.total
                    else group
                )
            )

    return watch
