"""The commands that run cases: `run`, `reproduce` and `conform`. They read the options and call the
modules that do the work.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli import complete
from steelyard.cli.options import (
    PLACE,
    THRESHOLD,
    AcceleratorOption,
    EngineOptions,
    HangAfter,
    Json,
    Out,
    Quiet,
    RunOptions,
    Threshold,
    TimeLimit,
    Wide,
    takes,
)
from steelyard.cli.out import Output, begin


@takes(RunOptions)
def run(options: RunOptions) -> int:
    """Run cases, check the answers, and write a record of each.

    Start with smoke. A real run needs --data, and usually --weights. Exit code 0: all valid; 1: a
    run is invalid or failed; 2: the request is wrong.

    \b
    Examples:
      steelyard run smoke
      steelyard run llama2-7b-mmlu --data auto --weights Llama-2-7b-hf/
      steelyard run llama2-7b-mmlu --data mmlu/ --tokenizer tokenizer.model
      steelyard run llama2-7b-mmlu --data mmlu/ --subjects anatomy,virology
      steelyard run --model SmolLM2-135M/ --task mmlu --data mmlu/
      steelyard run llama1-7b-openwebtext --data owt/owt --devices 8
      steelyard run llama2-7b-mmlu --data mmlu/ --engine all --repeat 3
      steelyard run llama1-7b-openwebtext --data owt/owt --steps 20 \\
        --sweep devices=1,2,4,8 --sweep micro_batch=1,2,4
    """
    begin("preparing", options.output)
    from steelyard.cli import requests, runs
    from steelyard.record.signature import try_key

    wanted, axes = requests.read(options)
    times = requests.checked_repeat(options.repeat)
    if options.sign is not None:
        try_key(options.sign)
    if axes:
        return runs.run_sweep(wanted, axes, times, options.output)
    if options.engine == requests.ALL:
        return runs.run_engines(wanted, times, options.output)
    return runs.run_each([one for one in wanted for _ in range(times)], options.output)


def reproduce(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RECORD", help="The record of the run, or a folder of repeats of it."
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The record's data, unless they are made; auto: as got."),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The record's weights, unless they are random."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="The record's tokenizer. Default: beside weights or data."
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(metavar="N", help="Run N times, in fresh processes.")] = 1,
    threshold: Threshold = THRESHOLD,
    settings: EngineOptions = None,
    accelerator: AcceleratorOption = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="local, ssh or slurm. Default: the site's, else local.",
            rich_help_panel=PLACE,
            autocompletion=complete.launchers,
        ),
    ] = None,
    site: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML file that describes the cluster; see run.",
            rich_help_panel=PLACE,
        ),
    ] = None,
    hang_after: HangAfter = 1800.0,
    time_limit: TimeLimit = None,
    out: Out = Path("records"),
    as_json: Json = False,
    quiet: Quiet = False,
    wide: Wide = False,
) -> int:
    """Run again what a record describes, then compare with it.

    Question, tune, plan, engine, passes and scope are the record's; data and weights must be the
    same. Exit code 0: valid and not significantly slower; 1: not so; 2: it cannot be the same run.

    \b
    Examples:
      steelyard reproduce records/20261116T041617-….json
      steelyard reproduce records/ --data mmlu/ --weights Llama-2-7b-hf/
    """
    output = Output(as_json, quiet, wide)
    begin("preparing", output)
    from steelyard.cli.reproduce import read_request, reproduce_record

    base, asked = read_request(source)
    asked = replace(
        asked,
        accelerator=accelerator or asked.accelerator,
        launcher=launcher or asked.launcher,
        site=site,
        weights=weights,
        data=data,
        tokenizer=tokenizer,
        out=out,
        hang_s=hang_after,
        limit_s=time_limit,
    )
    return reproduce_record(base, asked, settings or [], repeat, threshold, output)


def conform(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="ENGINE",
            help="An engine, shipped or from another package.",
            autocompletion=complete.engines,
        ),
    ],
    cases: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            metavar="CASE",
            help="Only this case. Default: all.",
            autocompletion=complete.shipped_cases,
        ),
    ] = None,
    accelerator: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Where to run both engines.", autocompletion=complete.accelerators
        ),
    ] = "cpu",
    settings: EngineOptions = None,
    as_json: Json = False,
) -> int:
    """Check that an engine computes what engine torch computes.

    Both run every case at size smoke. It compares loss and gradient norm of step 1, scores, answers
    and counts, each with a tolerance. Records of this version of the engine say the result. Exit
    code 0: it conforms; 1: it does not.

    \b
    Examples:
      steelyard conform transformers
      steelyard conform transformers --case llama2-7b-mmlu
    """
    begin("preparing", Output(as_json))
    from steelyard.cli.conform import compare_with_torch

    return compare_with_torch(engine, cases, accelerator, settings or [], as_json)
