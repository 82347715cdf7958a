"""The commands that run cases: `run`, `reproduce` and `conform`. They read the options and call the
modules that do the work.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli import complete
from steelyard.cli.options import (
    DEFAULT_THRESHOLD,
    DEVICES_GROUP,
    AcceleratorOption,
    EngineSetOption,
    HangAfterOption,
    JsonOption,
    OutOption,
    QuietOption,
    RunOptions,
    ThresholdOption,
    TimeLimitOption,
    WideOption,
    take_options,
)
from steelyard.cli.printing import OutputOptions, print_start_line


@take_options(RunOptions)
def run(options: RunOptions) -> int:
    """Run cases, check the answers, and write a record of each.

    Start with smoke. A real run needs --data, and usually --weights. Exit code 0: all valid, or
    unproven (too few steps to prove the rate, with a warning); 1: a run is invalid or failed; 2:
    the request is wrong.

    \b
    Examples:
      steelyard run smoke
      steelyard run llama2-7b-mmlu --data auto --weights Llama-2-7b-hf/
      steelyard run llama2-7b-mmlu --data mmlu/ --tokenizer tokenizer.model
      steelyard run llama2-7b-mmlu --data mmlu/ --subjects anatomy,virology
      steelyard run --model SmolLM2-135M/ --task mmlu --data mmlu/
      steelyard run llama1-7b-openwebtext --data owt/owt --devices 8
      steelyard run llama3-8b-generate --sweep load.concurrency=1,4,16
      steelyard run llama3-8b-generate --engine http \\
        --set engine.endpoint=http://127.0.0.1:8000/v1
      steelyard run llama2-7b-mmlu --data mmlu/ --engine all --repeat 3
      steelyard run llama1-7b-openwebtext --data owt/owt --steps 20 \\
        --sweep devices=1,2,4,8 --sweep micro_batch=1,2,4
    """
    print_start_line("preparing", options.output)
    from steelyard.cli import execute_runs, requests
    from steelyard.record.signature import try_signing_key

    requested, axes = requests.make_requests(options)
    times = requests.check_repeat(options.repeat)
    if options.sign is not None:
        try_signing_key(options.sign)
    if axes:
        return execute_runs.run_sweep(requested, axes, times, options.output)
    if options.engine == requests.ALL_ENGINES:
        return execute_runs.run_engines(requested, times, options.output)
    return execute_runs.run_each(
        [request for request in requested for _ in range(times)], options.output
    )


def reproduce(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RECORD", help="The record of the run, or a folder of repeats of it."
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="The record's data, unless it is generated; auto: what data get downloaded.",
        ),
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
    threshold: ThresholdOption = DEFAULT_THRESHOLD,
    settings: EngineSetOption = None,
    accelerator: AcceleratorOption = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="local, ssh or slurm. Default: the site's, else local.",
            rich_help_panel=DEVICES_GROUP,
            autocompletion=complete.launchers,
        ),
    ] = None,
    site: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML file that describes the cluster; see run.",
            rich_help_panel=DEVICES_GROUP,
        ),
    ] = None,
    hang_after: HangAfterOption = 1800.0,
    time_limit: TimeLimitOption = None,
    out: OutOption = Path("records"),
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    wide: WideOption = False,
) -> int:
    """Run again what a record describes, then compare with it.

    Question, tune, plan, engine, passes and scope are the record's; data and weights must be the
    same. Exit code 0: valid and not significantly slower; 1: not so; 2: it cannot be the same run.

    \b
    Examples:
      steelyard reproduce records/20261116T041617-….json
      steelyard reproduce records/ --data mmlu/ --weights Llama-2-7b-hf/
    """
    output = OutputOptions(as_json, quiet, wide)
    print_start_line("preparing", output)
    from steelyard.cli.reproduce import read_request, reproduce_record

    base, request = read_request(source)
    request = replace(
        request,
        accelerator=accelerator or request.accelerator,
        launcher=launcher or request.launcher,
        site=site,
        weights=weights,
        data=data,
        tokenizer=tokenizer,
        out=out,
        hang_s=hang_after,
        limit_s=time_limit,
    )
    return reproduce_record(base, request, settings or [], repeat, threshold, output)


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
    settings: EngineSetOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check that an engine computes what engine torch computes.

    Both run every case at size smoke. It compares loss and gradient norm of steps 1 and 2, scores,
    answers, counts, weights and parameters, each with a tolerance; scores also over other rows and
    with the passes reversed; generated tokens with what torch finds likeliest, and with those of
    one request at a time. On a CPU, the CPU time of three sizes must grow with the work. Records of
    this version of the engine say the result. Exit code 0: it conforms; 1: it does not.

    \b
    Examples:
      steelyard conform transformers
      steelyard conform transformers --case llama2-7b-mmlu
    """
    print_start_line("preparing", OutputOptions(as_json))
    from steelyard.cli.conform import compare_with_torch

    return compare_with_torch(engine, cases, accelerator, settings or [], as_json)
