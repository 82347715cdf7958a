"""Options and arguments that several verbs take."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
SizeOption = Annotated[
    str | None, typer.Option(help="full (published model and data, the default) or smoke (tiny, made, seconds).")
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        help="fp32, tf32, fp16 or bf16 (training also bf16-pure, engine paddle fp16-o2 and bf16-o2); default: the case's."
    ),
]
DivisionOption = Annotated[
    str | None, typer.Option(help="closed (every token computed) or open (shared prefixes computed once).")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override any value, such as tune.batch_tokens=16384; engine.python is the Python of workers.",
    ),
]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="engine.KEY=VALUE", help="Where the engine lives, such as engine.python=venv/bin/python."),
]
Records = Annotated[list[Path], typer.Argument(metavar="RECORD...", help="Records, or folders of records.")]
Format = Annotated[str, typer.Option("--format", help="text, md or html.")]
Lang = Annotated[str, typer.Option(help="en or zh.")]
To = Annotated[Path | None, typer.Option(help="Write to this file instead of stdout.")]
Threshold = Annotated[float, typer.Option(help="The share of the rate beyond which a change matters.")]
THRESHOLD = 0.01  # what is below it is of no use, however sure it is
