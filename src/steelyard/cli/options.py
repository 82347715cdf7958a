"""Options and arguments that several verbs take."""

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli import complete

# Groups of options in the help of a verb that has many.
MAIN = "Most used"
QUESTION = "What is measured"
PART = "How much of it"
PLACE = "Devices and hosts"
OUTPUT = "Output"

Cases = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CASE",
        help="Cases, your own .toml files, or smoke: every case, tiny. None with --model.",
        autocompletion=complete.cases,
        show_default=False,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Hugging Face safetensors, Megatron shards, GLM's layout, or random. Default: random; with --model its folder.",
        rich_help_panel=MAIN,
    ),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="torch (ours, the default), transformers, megatron, paddle, flagscale, reference (GLM as published), or all: "
        "every one that can run the case, side by side.",
        rich_help_panel=MAIN,
        autocompletion=complete.engines_or_all,
    ),
]
ModelFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Instead of CASE: a model of your own, a Hugging Face folder. Its case is made in memory; see steelyard case new.",
        rich_help_panel=MAIN,
    ),
]
TaskOption = Annotated[
    str | None,
    typer.Option("--task", metavar="TASK", help="With --model: mmlu, lambada, openwebtext or alpaca.", rich_help_panel=MAIN),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.", rich_help_panel=OUTPUT)]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="No progress: only the result, warnings and errors.", rich_help_panel=OUTPUT),
]
Wide = Annotated[bool, typer.Option("--wide", help="Show all columns, not only those that fit.", rich_help_panel=OUTPUT)]
SizeOption = Annotated[
    str | None,
    typer.Option(
        "--size",
        metavar="SIZE",
        help="full (default) or smoke: tiny, seconds on a CPU, no download.",
        autocompletion=complete.sizes,
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="The case's data (size full): a folder, a file, or auto for what steelyard data get brought.",
        rich_help_panel=MAIN,
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="fp32, tf32, fp16, bf16, fp8; training: bf16-pure, fp8-pure; paddle: fp16-o2, bf16-o2. Default: the case's.",
        rich_help_panel=QUESTION,
        autocompletion=complete.precisions,
    ),
]
DivisionOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="closed: every token is computed. open: shared prefixes once. Default: the case's.",
        rich_help_panel=QUESTION,
        autocompletion=complete.divisions,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change any value of the case, such as tune.batch_tokens=16384 (steelyard show lists them). "
        "engine.python=PATH: the Python that workers run in.",
        rich_help_panel=QUESTION,
    ),
]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="engine.KEY=VALUE", help="Where the engine is, such as engine.python=venv/bin/python."),
]
AcceleratorOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="As steelyard list names it, such as cpu. Default: the first one found.",
        rich_help_panel=PLACE,
        autocompletion=complete.accelerators,
    ),
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder for the records.", rich_help_panel=OUTPUT)]
Records = Annotated[list[Path], typer.Argument(metavar="RECORD...", help="Records, or folders of records.")]
Format = Annotated[str, typer.Option("--format", metavar="FORMAT", help="text, md or html.", autocompletion=complete.formats)]
Lang = Annotated[str, typer.Option("--lang", metavar="LANG", help="en or zh.", autocompletion=complete.langs)]
To = Annotated[Path | None, typer.Option(metavar="FILE", help="Write to this file instead of stdout.")]
Threshold = Annotated[float, typer.Option(metavar="SHARE", help="Smaller changes of the rate do not count.")]
THRESHOLD = 0.01  # what is below it is of no use, however sure it is
HangAfter = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Stop the run when workers show no progress for so long.", rich_help_panel=PART),
]
TimeLimit = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Stop a run that takes longer than this.", rich_help_panel=PART)
]
# How much of a question is run.
Passes = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="Inference: val (eager), infer (compiled), bare (infer with nothing measured inside); default: val,infer. "
        "Training: before, train, after (held-out loss before and after); default: all, or until the case's target.",
        rich_help_panel=PART,
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(metavar="N", help="Stop after N steps; inference: after N batches of each pass.", rich_help_panel=PART),
]
SampleSize = Annotated[
    int | None,
    typer.Option(metavar="N", help="Inference: a seeded sample of N items. Training: N of each batch.", rich_help_panel=PART),
]
Subjects = Annotated[
    str | None,
    typer.Option(
        metavar="A,B", help="MMLU: the questions of these subjects alone; with --sample, N of them.", rich_help_panel=PART
    ),
]
Rows = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Inference: the items alone whose ids are in this file, one a line: places in the set counted from 0, ranges "
        "such as 12-20; MMLU also anatomy/12.",
        rich_help_panel=PART,
    ),
]
