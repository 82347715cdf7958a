"""The commands `check` and `spec`: is this machine fit to measure, and what are its ceilings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.options import AcceleratorOption, Json, Out, Quiet, Wide
from steelyard.cli.out import (
    Output,
    answer,
    begin,
    columns,
    described,
    dump,
    one_line,
    say,
    say_status,
    tell,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from steelyard.metrics.fit import Row
    from steelyard.run.session import PhaseProgress


def check(
    accelerator: AcceleratorOption = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for records; its disk is checked.")
    ] = Path("records"),
    as_json: Json = False,
) -> int:
    """Check whether this machine is fit to measure. Each finding is ok, warn, bad or unknown.
    Nothing is changed.

    Exit code 0: fit, perhaps with warnings; 1: not fit.

    \b
    Examples:
      steelyard check
      steelyard check --accelerator cpu --json
    """
    begin("checking", Output(as_json))
    from steelyard.metrics import fit
    from steelyard.run import fitness

    machine = fitness.machine(accelerator, out)
    rows = fit.judge(machine)
    able = fit.fit(rows)
    if as_json:
        dump({"fit": able, "accelerator": machine.accelerator, "findings": fit.table(rows)})
    else:
        answer("\n".join([*_findings(rows), _verdict(rows, able)]))
    return 0 if able else 1


def _findings(rows: "list[Row]") -> list[str]:
    """Return a line for each finding, its level first, and below it a line with what helps, if
    there is any; wrapped to the terminal.
    """
    from steelyard.words import text

    out: list[tuple[str, str]] = []
    for row in rows:
        out.append((f"{row.level:<7}  {text(row.name)}", text(row.found)))
        out += [] if row.step is None else [("", f"→ {text(row.step)}")]
    return described(out)


def _verdict(rows: "list[Row]", able: bool) -> str:
    """Return the last line of `check`: `fit to measure` or `not fit to measure`, with the number of
    findings that are not ok.
    """
    counts = {
        level: sum(row.level == level for row in rows) for level in ("bad", "warn", "unknown")
    }
    told = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
    return f"{'fit' if able else 'not fit'} to measure" + (f" ({told})" if told else "")


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
    out: Out = Path("records"),
    as_json: Json = False,
    quiet: Quiet = False,
    wide: Wide = False,
) -> int:
    """Measure what this machine can do, against its datasheet.

    Matmul by precision and shape, memory, copies, attention, collectives. Every kernel is checked
    against fp64, run until its rate is steady, and compared with the datasheet. It writes a record
    of kind spec, which verify and report read. Exit code 0: measured; 1: failed, the record says
    why.

    \b
    Examples:
      steelyard spec --quick
      steelyard spec --accelerator cuda --devices 8 --out ceilings
    """
    output = Output(as_json, quiet, wide)
    begin("preparing", output)
    from rich.console import Console

    from steelyard import report
    from steelyard.cli.progress import Display
    from steelyard.record import spec as records
    from steelyard.run.ceilings_run import SpecRun

    run = SpecRun(accelerator, devices, quick, out, limit)
    console = Console(stderr=True, quiet=output.silent)
    with Display(console, f"spec {run.accelerator.name}") as display:
        shown = display.show if console.is_terminal else _lines(output.silent)
        made, path = run.to_record(
            _whole(shown), lambda warning: say(f"warning: {one_line(warning)}")
        )
    if as_json:
        dump({"records": [records.printed(made)]}, tell)
    else:
        tell(report.render_spec([made], "text", "en", columns(wide)))
        if not quiet or made.status != "valid":
            say_status(made, path)
    return 0 if made.status == "valid" else 1


def _whole(show: "Callable[[PhaseProgress], None]") -> "Callable[[PhaseProgress], None]":
    """Return a progress callback that calls `show` with the time since the first row of the
    measurement began instead of that of the current row, so that the time left is estimated for all
    rows.
    """
    from dataclasses import replace

    from steelyard.run.clock import now

    begun: list[float] = []

    def watch(progress: "PhaseProgress") -> None:
        """Call `show`; from the first progress with a total on, `elapsed_s` counts from that
        moment.
        """
        if progress.total > 0 and not begun:
            begun.append(now())
        show(replace(progress, elapsed_s=now() - begun[0]) if begun else progress)

    return watch


def _lines(silent: bool) -> "Callable[[PhaseProgress], None]":
    """Return a progress callback for output that is no terminal: it prints a line on stderr when a
    new group of rows begins, and nothing if `silent`.
    """
    from steelyard.run.session import STARTING

    said = [STARTING]

    def watch(progress: "PhaseProgress") -> None:
        """Print a line if this progress is the first of its group: the first word of its phase."""
        group = progress.phase.partition(" ")[0]
        if not silent and group not in said:
            said.append(group)
            say(
                one_line(
                    f"{group}: {progress.done} of {progress.total} rows done"
                    if progress.total
                    else group
                )
            )

    return watch
