"""The verb check."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.options import Json
from steelyard.cli.out import answer, dump, one_line

if TYPE_CHECKING:
    from steelyard.metrics.fit import Row


def check(
    accelerator: Annotated[str | None, typer.Option(help="cuda or cpu; default: the first one found.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the records, whose disk is looked at.")] = Path("records"),
    as_json: Json = False,
) -> int:
    """Is this machine fit to measure? A table of findings, each ok, warn, bad or unknown; nothing is changed.

    Exit code 0: fit, warnings allowed; 1: not fit.

    \b
    Examples:
      steelyard check
      steelyard check --accelerator cpu --json
    """
    from steelyard.metrics import fit
    from steelyard.run import fitness

    machine = fitness.machine(accelerator, out)
    rows = fit.judge(machine)
    able = fit.fit(rows)
    if as_json:
        dump({"fit": able, "accelerator": machine.accelerator, "findings": fit.table(rows)})
    else:
        answer("\n".join([*_lines(rows), _verdict(rows, able)]))
    return 0 if able else 1


def _lines(rows: "list[Row]") -> list[str]:
    from steelyard.words import text

    width = max(len(text(row.name)) for row in rows)
    out = []
    for row in rows:
        out.append(f"{row.level:<7}  {text(row.name):<{width}}  {one_line(text(row.found))}")
        if row.step is not None:
            out.append(f"{'':<7}  {'':<{width}}  → {one_line(text(row.step))}")
    return out


def _verdict(rows: "list[Row]", able: bool) -> str:
    counts = {level: sum(row.level == level for row in rows) for level in ("bad", "warn", "unknown")}
    told = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
    return f"{'fit' if able else 'not fit'} to measure" + (f" ({told})" if told else "")
