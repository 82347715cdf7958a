"""The verb check."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli import terminal
from steelyard.cli.options import AcceleratorOption, Json
from steelyard.cli.out import Output, answer, begin, dump, wrapped

if TYPE_CHECKING:
    from steelyard.metrics.fit import Row


def check(
    accelerator: AcceleratorOption = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for records; its disk is checked.")] = Path("records"),
    as_json: Json = False,
) -> int:
    """Check whether this machine is fit to measure. Each finding is ok, warn, bad or unknown. Nothing is changed.

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
        answer("\n".join([*_lines(rows), _verdict(rows, able)]))
    return 0 if able else 1


def _lines(rows: "list[Row]") -> list[str]:
    from steelyard.words import text

    name_width = max(len(text(row.name)) for row in rows)
    indent = " " * (7 + 2 + name_width + 2)
    room = (terminal.columns() or terminal.COLUMNS) - len(indent)
    out = []
    for row in rows:
        first, *more = wrapped(text(row.found), room)
        out += [f"{row.level:<7}  {text(row.name):<{name_width}}  {first}", *(indent + line for line in more)]
        if row.step is not None:
            first, *more = wrapped(text(row.step), room - 2)
            out += [f"{indent}→ {first}", *(f"{indent}  {line}" for line in more)]
    return out


def _verdict(rows: "list[Row]", able: bool) -> str:
    counts = {level: sum(row.level == level for row in rows) for level in ("bad", "warn", "unknown")}
    told = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
    return f"{'fit' if able else 'not fit'} to measure" + (f" ({told})" if told else "")
