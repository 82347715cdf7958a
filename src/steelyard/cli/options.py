"""Declare the options that commands share, those of `run` as one dataclass, and the order in which
help lists them.

Each `...Option` is an Annotated type that typer reads from a command's signature.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from steelyard.cli import complete
from steelyard.cli.printing import OutputOptions

# Titles of option groups in the help of a command with many options, the most used first.
MAIN_GROUP = "Most used"
QUESTION_GROUP = "What is measured"
SCOPE_GROUP = "How much of it"
DEVICES_GROUP = "Devices and hosts"
SEVERAL_RUNS_GROUP = "Several runs"
TRAINING_GROUP = "Training"
DETAIL_GROUP = "Detail"
OUTPUT_GROUP = "Output"
OTHER_GROUP = "Options"
MAX_UNGROUPED = 10  # up to this number, options are not grouped
SMOKE = "smoke"  # a size; in place of a case name: every case at that size
HELP_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}

Options = TypeVar("Options")

JsonOption = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON document and nothing else.", rich_help_panel=OUTPUT_GROUP
    ),
]
QuietOption = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="No progress: only the result, warnings and errors.",
        rich_help_panel=OUTPUT_GROUP,
    ),
]
WideOption = Annotated[
    bool,
    typer.Option(
        "--wide", help="Show all columns, not only those that fit.", rich_help_panel=OUTPUT_GROUP
    ),
]
SizeOption = Annotated[
    str | None,
    typer.Option(
        "--size",
        metavar="SIZE",
        help="full (default) or smoke: tiny, seconds on a CPU, no download.",
        rich_help_panel=MAIN_GROUP,
        autocompletion=complete.sizes,
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=(
            "fp32, tf32, fp16, bf16, fp8; training: bf16-pure, fp8-pure; paddle: fp16-o2, bf16-o2."
            " Default: the case's."
        ),
        rich_help_panel=QUESTION_GROUP,
        autocompletion=complete.precisions,
    ),
]
DivisionOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="closed: every token is computed. open: shared prefixes once. Default: the case's.",
        rich_help_panel=QUESTION_GROUP,
        autocompletion=complete.divisions,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help=(
            "Change any value of the case, such as tune.batch_tokens=16384 or load.concurrency=4"
            " (steelyard show lists them). engine.python=PATH: the Python that workers run in;"
            " engine.endpoint=URL: the server of engine http."
        ),
        rich_help_panel=QUESTION_GROUP,
    ),
]
EngineSetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="engine.KEY=VALUE",
        help="Where the engine is, such as engine.python=venv/bin/python.",
    ),
]
AcceleratorOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="As steelyard list names it, such as cpu. Default: the first one found.",
        rich_help_panel=DEVICES_GROUP,
        autocompletion=complete.accelerators,
    ),
]
OutOption = Annotated[
    Path, typer.Option(metavar="DIR", help="Folder for the records.", rich_help_panel=OUTPUT_GROUP)
]
RecordsArgument = Annotated[
    list[Path], typer.Argument(metavar="RECORD...", help="Records, or folders of records.")
]
FormatOption = Annotated[
    str,
    typer.Option(
        "--format", metavar="FORMAT", help="text, md or html.", autocompletion=complete.formats
    ),
]
LangOption = Annotated[
    str, typer.Option("--lang", metavar="LANG", help="en or zh.", autocompletion=complete.langs)
]
ToOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write to this file instead of stdout.")
]
ThresholdOption = Annotated[
    float, typer.Option(metavar="SHARE", help="Smaller changes of the rate do not count.")
]
DEFAULT_THRESHOLD = 0.01  # a smaller change is not useful to know, even if it is significant
HangAfterOption = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="Stop the run when workers show no progress for this long.",
        rich_help_panel=SCOPE_GROUP,
    ),
]
TimeLimitOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Stop a run that takes longer than this.",
        rich_help_panel=SCOPE_GROUP,
    ),
]

# Options of `data get` and `weights get`.
FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from", metavar="DIR", help="Take the files from this folder; nothing is downloaded."
    ),
]
MirrorsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--mirror", metavar="URL", help="Try URL/NAME/FILE first. Several are tried in order."
    ),
]
AgainOption = Annotated[bool, typer.Option("--again", help="Download again, even if it is here.")]
RepinOption = Annotated[
    bool,
    typer.Option(
        "--repin", help="Download again and accept bytes other than those pinned at first use."
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Close a connection that sends nothing for this long."),
]


@dataclass(frozen=True)
class RunOptions:
    """The command line of `run`, one field per option (`cases` is the argument), in the order in
    which help lists them; typer makes its parameters from the annotations (`take_options`). Values
    are as typed, else the field's default (mostly None: not given); nothing is checked here.
    `output` returns the options on printing (`OutputOptions`).
    """

    cases: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CASE",
            help="Cases, your own .toml files, or smoke: every case, tiny. None with --model.",
            autocompletion=complete.cases,
            show_default=False,
        ),
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help=(
                "The case's data (size full): a folder, a file, or auto for what steelyard data"
                " get downloaded."
            ),
            rich_help_panel=MAIN_GROUP,
        ),
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help=(
                "Hugging Face safetensors, Megatron shards, GLM's layout, or random. "
                "Default: random; with --model its folder."
            ),
            rich_help_panel=MAIN_GROUP,
        ),
    ] = None
    size: SizeOption = None
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=(
                "torch (ours), transformers, megatron, paddle, flagscale, reference (GLM as"
                " published), http (a server of yours), transformers-serve, vllm, or all: every"
                " one that can run the case, side by side. Default: the first that can run the"
                " case."
            ),
            rich_help_panel=MAIN_GROUP,
            autocompletion=complete.engines_or_all,
        ),
    ] = None
    devices: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Devices per host. Default: the site's, else 1; smoke: what each case names.",
            rich_help_panel=MAIN_GROUP,
        ),
    ] = None
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=(
                "Instead of CASE: a model of your own, a Hugging Face folder. Its case is made in"
                " memory; see steelyard case new."
            ),
            rich_help_panel=MAIN_GROUP,
        ),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            metavar="TASK",
            help="With --model: mmlu, lambada, openwebtext, alpaca or generate.",
            rich_help_panel=MAIN_GROUP,
        ),
    ] = None
    precision: PrecisionOption = None
    division: DivisionOption = None
    settings: SetOption = None
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help=(
                "tokenizer.json, tokenizer.model, vocab.json with merges.txt, or vocab.txt."
                " Default: beside weights or data."
            ),
            rich_help_panel=QUESTION_GROUP,
        ),
    ] = None
    passes: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help=(
                "Inference: val (eager), infer (compiled), bare (infer with nothing measured"
                " inside); default: val,infer. Training: before, train, after (held-out loss before"
                " and after); default: all, or until the case's target. Generation: generate,"
                " check (of the answers, by torch)."
            ),
            rich_help_panel=SCOPE_GROUP,
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Stop after N steps; inference: after N batches of each pass.",
            rich_help_panel=SCOPE_GROUP,
        ),
    ] = None
    sample: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=(
                "Inference: a seeded sample of N items. Training: N of each batch. Generation: N"
                " requests."
            ),
            rich_help_panel=SCOPE_GROUP,
        ),
    ] = None
    subjects: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="MMLU: only the questions of these subjects; with --sample, N of them.",
            rich_help_panel=SCOPE_GROUP,
        ),
    ] = None
    rows: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Inference: only the items whose ids are in this file, one per line: positions in"
                " the set counted from 0, ranges such as 12-20; MMLU also anatomy/12."
            ),
            rich_help_panel=SCOPE_GROUP,
        ),
    ] = None
    hang_after: HangAfterOption = 1800.0
    time_limit: TimeLimitOption = None
    accelerator: AcceleratorOption = None
    parallel: Annotated[
        str | None,
        typer.Option(
            metavar="DEGREES",
            help=(
                "Such as TP2DP4. A degree without a number takes the devices that are left."
                " Default: the case's."
            ),
            rich_help_panel=DEVICES_GROUP,
        ),
    ] = None
    nodes: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Hosts. Several need --launcher ssh or slurm.",
            rich_help_panel=DEVICES_GROUP,
        ),
    ] = 1
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=(
                "local (this host), ssh, or slurm (uses the allocation, or asks for one). Default:"
                " the site's, else local."
            ),
            rich_help_panel=DEVICES_GROUP,
            autocompletion=complete.launchers,
        ),
    ] = None
    site: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "TOML file that describes the cluster: launcher, hosts, interface, machine,"
                " network. Default: ~/.config/steelyard/site.toml, if it is there."
            ),
            rich_help_panel=DEVICES_GROUP,
        ),
    ] = None
    repeat: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Run N times in fresh processes; print the mean and its interval.",
            rich_help_panel=SEVERAL_RUNS_GROUP,
        ),
    ] = 1
    sweeps: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=A,B,...",
            help=(
                "Run once for each value of a --set key (tune keys also by short name), devices or"
                " nodes. Several sweeps make a grid. Points with a valid or unproven record in"
                " --out are not run again."
            ),
            rich_help_panel=SEVERAL_RUNS_GROUP,
        ),
    ] = None
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Save a checkpoint every N steps, under checkpoints/ in --out.",
            rich_help_panel=TRAINING_GROUP,
        ),
    ] = None
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RECORD",
            help=(
                "Continue from the last complete checkpoint of a run: its record, or its checkpoint"
                " folder. --parallel and --devices may differ."
            ),
            rich_help_panel=TRAINING_GROUP,
        ),
    ] = None
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Profile a few steps after the run: where the time goes.",
            rich_help_panel=DETAIL_GROUP,
        ),
    ] = False
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="With --explain: keep the trace (Chrome format) beside the record.",
            rich_help_panel=DETAIL_GROUP,
        ),
    ] = False
    out: OutOption = Path("records")
    as_json: JsonOption = False
    quiet: QuietOption = False
    wide: WideOption = False
    sign: Annotated[
        Path | None,
        typer.Option(
            metavar="KEY",
            help="Sign each record with this SSH key; see steelyard sign -h.",
            rich_help_panel=OUTPUT_GROUP,
        ),
    ] = None

    @property
    def output(self) -> OutputOptions:
        """Return the options that say how much is printed."""
        return OutputOptions(self.as_json, self.quiet, self.wide)


def take_options(
    options_class: type[Options],
) -> Callable[[Callable[[Options], int]], Callable[..., int]]:
    """Return a decorator that turns a function of one options object into a function that typer
    takes for a command.

    `options_class` is a dataclass; typer sees its fields as the command's parameters, through
    signature and annotations. The docstring of the function is kept as the help text.
    """

    def decorate(verb: Callable[[Options], int]) -> Callable[..., int]:
        """Return a function that makes the options object from its keyword arguments, calls `verb`
        with it and returns its exit code; with verb's docstring, and signature and annotations of
        the options class.
        """

        def command(**values: Any) -> int:
            """Call the command with an options object made from typer's keyword arguments, and
            return its exit code.
            """
            return verb(options_class(**values))

        command.__doc__ = verb.__doc__
        command.__annotations__ = get_type_hints(options_class, include_extras=True)
        # setattr: __signature__ is no attribute of a function's type
        setattr(command, "__signature__", inspect.signature(options_class))  # noqa: B010
        return command

    return decorate


class GroupedCommand(TyperCommand):
    """A typer command whose help lists arguments first, then options.

    If there are more than ten options they are listed in groups, by `rich_help_panel`, in the order
    in which the groups first appear.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write this command's help on arguments, then options, to click's `formatter`, in titled
        sections; empty ones are left out. Options are in groups only if there are more than ten,
        else in one.
        """
        arguments: list[tuple[str, str]] = []
        options: list[tuple[str, tuple[str, str]]] = []
        for param in self.get_params(ctx):
            help_row = param.get_help_record(ctx)
            if help_row is not None and param.param_type_name == "argument":
                arguments.append(help_row)
            elif help_row is not None:
                options.append((getattr(param, "rich_help_panel", None) or OTHER_GROUP, help_row))
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": arguments}
        for group, help_row in options:
            groups.setdefault(group if len(options) > MAX_UNGROUPED else OTHER_GROUP, []).append(
                help_row
            )
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
