"""The verb run."""

import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli import complete, terminal
from steelyard.cli.options import (
    MAIN,
    OUTPUT,
    PLACE,
    QUESTION,
    AcceleratorOption,
    Cases,
    DataOption,
    DivisionOption,
    EngineOption,
    HangAfter,
    Json,
    ModelFolder,
    Out,
    Passes,
    PrecisionOption,
    Quiet,
    Rows,
    SampleSize,
    Settings,
    Steps,
    Subjects,
    TaskOption,
    TimeLimit,
    Weights,
    Wide,
)
from steelyard.cli.out import Output, begin, dump, one_line, paged, say, tell
from steelyard.errors import LostError, RequestError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from steelyard.case.request import Request
    from steelyard.record.record import Record
    from steelyard.run.launch import Allocation
    from steelyard.run.ready import Ready

ALL = "all"  # every engine, in the place of one's name
MOST_REPEATS = 10_000
QUEUE_S = 10  # the wait in a queue is said so often


# Groups of options, beside those that several verbs share; what most runs need comes first.
SEVERAL = "Several runs"
TRAINING = "Training"
DETAIL = "Detail"


def run(
    cases: Cases = None,
    data: DataOption = None,
    weights: Weights = None,
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            metavar="SIZE",
            help="full (default) or smoke: tiny, seconds on a CPU, no download.",
            rich_help_panel=MAIN,
            autocompletion=complete.sizes,
        ),
    ] = None,
    engine: EngineOption = None,
    devices: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Devices per host. Default: the site's, else 1; smoke: what each case names.",
            rich_help_panel=MAIN,
        ),
    ] = None,
    model: ModelFolder = None,
    task: TaskOption = None,
    precision: PrecisionOption = None,
    division: DivisionOption = None,
    settings: Settings = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="tokenizer.json, tokenizer.model, vocab.json with merges.txt, or vocab.txt. Default: beside weights or data.",
            rich_help_panel=QUESTION,
        ),
    ] = None,
    passes: Passes = None,
    steps: Steps = None,
    sample: SampleSize = None,
    subjects: Subjects = None,
    rows: Rows = None,
    hang_after: HangAfter = 1800.0,
    time_limit: TimeLimit = None,
    accelerator: AcceleratorOption = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            metavar="DEGREES",
            help="Such as TP2DP4. A degree without a number takes the devices that are left. Default: the case's.",
            rich_help_panel=PLACE,
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option(metavar="N", help="Hosts. Several need --launcher ssh or slurm.", rich_help_panel=PLACE)
    ] = 1,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="local (this host), ssh, or slurm (uses the allocation, or asks for one). Default: the site's, else local.",
            rich_help_panel=PLACE,
            autocompletion=complete.launchers,
        ),
    ] = None,
    site: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML file that describes the cluster: launcher, hosts, interface, machine, network. "
            "Default: ~/.config/steelyard/site.toml, if it is there.",
            rich_help_panel=PLACE,
        ),
    ] = None,
    repeat: Annotated[
        int,
        typer.Option(
            metavar="N", help="Run N times in fresh processes; print the mean and its interval.", rich_help_panel=SEVERAL
        ),
    ] = 1,
    sweeps: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=A,B,...",
            help="Run once for each value of a --set key (tune keys also by short name), devices or nodes. Several sweeps make "
            "a grid. Points with a valid record in --out are not run again.",
            rich_help_panel=SEVERAL,
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Save a checkpoint every N steps, under checkpoints/ in --out.", rich_help_panel=TRAINING
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RECORD",
            help="Continue from the last complete checkpoint of a run: its record, or its checkpoint folder. "
            "--parallel and --devices may differ.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Profile a few steps after the run: where the time goes.", rich_help_panel=DETAIL)
    ] = False,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="With --explain: keep the trace (Chrome format) beside the record.", rich_help_panel=DETAIL
        ),
    ] = False,
    out: Out = Path("records"),
    as_json: Json = False,
    quiet: Quiet = False,
    wide: Wide = False,
    sign: Annotated[
        Path | None,
        typer.Option(metavar="KEY", help="Sign each record with this SSH key; see steelyard sign -h.", rich_help_panel=OUTPUT),
    ] = None,
) -> int:
    """Run cases, check the answers, and write a record of each.

    Start with smoke. A real run needs --data, and usually --weights. Exit code 0: all valid; 1: a run is invalid or
    failed; 2: the request is wrong.

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
    output = Output(as_json, quiet, wide)
    begin("preparing", output)
    from steelyard.case import sweep
    from steelyard.case.request import Request
    from steelyard.cli.engines import check_all, chosen
    from steelyard.cli.get import data_of
    from steelyard.cli.wanted import at, site_file, what
    from steelyard.data import selection
    from steelyard.record.signature import try_key
    from steelyard.run import site as sites

    asked = what(cases, model, task, engine, weights, size, data, tokenizer)
    engine = asked.engine
    if not output.silent:
        for line in asked.said:
            say(line)
    check_all(engine, bool(sweeps), resume is not None)
    engines, settings = chosen(engine, settings or [])
    axes = sweep.axes(sweeps or [], _given(settings, devices, nodes, parallel, checkpoint_every, precision, division))
    if axes and resume is not None:
        raise RequestError("--sweep and --resume cannot be combined; drop one")
    where = site_file(site, output)
    devices = devices if devices is not None else sites.read(where).devices
    if parallel is not None:
        settings = [*(settings or []), f"tune.parallel={parallel}"]
    if checkpoint_every is not None:
        settings = [*(settings or []), f"tune.checkpoint_every={checkpoint_every}"]
    named = None if subjects is None else selection.names(subjects)
    ids = None if rows is None else selection.read(rows)
    requests = [
        Request(
            resolved=resolved,
            engine=engine_name,
            engine_settings=of_engine,
            accelerator=accelerator,
            launcher=launcher,
            nodes=sweep.number(point, "nodes") or nodes,
            devices=number,
            passes=None if passes is None else tuple(name.strip() for name in passes.split(",") if name.strip()),
            sample=sample,
            steps=steps,
            subjects=named,
            rows=ids,
            resume=resume,
            weights=asked.weights,
            data=data_of(data, resolved.case),
            tokenizer=asked.tokenizer,
            site=where,
            out=out,
            hang_s=hang_after,
            limit_s=time_limit,
            explain=explain or trace,
            trace=trace,
            point=point,
            sign=sign,
        )
        for name in asked.cases
        for point in sweep.grid(axes)
        for engine_name, of_engine in engines
        for resolved, number in at(point, name, engine_name, size, precision, division, settings, devices, accelerator)
    ]
    times = checked_repeat(repeat)
    if sign is not None:
        try_key(sign)
    if axes:
        from steelyard.cli.sweep import run_sweep

        return run_sweep(requests, axes, times, output)
    if engine == ALL:
        from steelyard.cli.engines import run_engines

        return run_engines(requests, times, output)
    return _run([request for request in requests for _ in range(times)], output)


def _given(
    settings: list[str] | None,
    devices: int | None,
    nodes: int,
    parallel: str | None,
    checkpoint_every: int | None,
    precision: str | None,
    division: str | None,
) -> dict[str, str]:
    """The keys that the command line sets, each with the words that do."""
    options = (
        ("devices", "--devices", devices),
        ("nodes", "--nodes", None if nodes == 1 else nodes),
        ("tune.parallel", "--parallel", parallel),
        ("tune.checkpoint_every", "--checkpoint-every", checkpoint_every),
        ("question.precision", "--precision", precision),
        ("question.division", "--division", division),
    )
    set_ = {setting.partition("=")[0]: f"--set {setting}" for setting in settings or []}
    return set_ | {key: f"{option} {value}" for key, option, value in options if value is not None}


def checked_repeat(repeat: int) -> int:
    if not 1 <= repeat <= MOST_REPEATS:
        raise RequestError(f"--repeat {repeat}: must be 1 to {MOST_REPEATS:,}")
    return repeat


def _label(request: "Request") -> str:
    question = request.resolved.case.question
    label = f"{request.resolved.case.name} {question.division} {question.precision.name} {request.engine}"
    return label if request.devices == request.nodes == 1 else f"{label} {request.nodes}x{request.devices}"


def _run(requests: "list[Request]", output: Output) -> int:
    from steelyard import report
    from steelyard.cli import explained, repeats
    from steelyard.record import record
    from steelyard.run.ready import ready

    runs = [ready(request) for request in requests]  # all of them before the first is run
    done = []
    with hosts(runs, output) as allocation:
        for number, one in enumerate(runs, 1):
            made = carry_out(one, output, allocation, (number, len(runs)))
            done.append(made)
            if interrupted(made):
                break
    if output.json:
        dump({"records": [record.printed(made) for made in done], "repeats": repeats.as_json(done)}, tell)
    else:
        tell(paged(report.table(done), output.wide))
        repeats.show(done, output.wide)
        if requests[0].explain:
            explained.show(done, requests[0].out, output)
        hint(requests[0].out, output)
    return 0 if len(done) == len(runs) and all(made.status == "valid" for made in done) else 1


def hint(out: Path, output: Output) -> None:
    """What a newcomer does next, who looks at a terminal."""
    if not output.silent and terminal.is_terminal(sys.stderr):
        say(f"more: steelyard report {shlex.quote(str(out))}")


def hosts(runs: "list[Ready]", output: Output) -> "AbstractContextManager[Allocation | None]":
    """One allocation for all runs of a command, where their launcher asks a scheduler for hosts. The wait is shown, and is in
    no record."""
    from steelyard.run import scheduler

    if not runs or not runs[0].launcher.scheduler:
        return nullcontext()
    shown: list[int] = []

    def waiting(seconds: float) -> None:
        if not output.silent and int(seconds) // QUEUE_S > len(shown) - 1:
            shown.append(int(seconds))
            say(f"waiting for {nodes} host(s) from Slurm: {int(seconds)} s")

    nodes = max(one.plan.nodes for one in runs)
    return scheduler.allocated(runs[0].site, nodes, waiting)


def carry_out(one: "Ready", output: Output, allocation: "Allocation | None", place: tuple[int, int] = (1, 1)) -> "Record":
    """One run, with what a user sees of it; `place` is its number of how many."""
    from rich.console import Console

    from steelyard import words
    from steelyard.cli.progress import Display
    from steelyard.run.parent import run_case

    number, runs = place
    title = f"[{number}/{runs}] {_label(one.request)}" if runs > 1 else _label(one.request)
    with Display(Console(stderr=True, quiet=output.silent), title, alone=runs == 1) as display:
        made, path = run_case(one, display.show, allocation, lambda warning: say(f"warning: {warning}"))
    if not output.silent or (made.status != "valid" and not output.json):
        say(f"{made.status}: {path}")
        for reason in made.reasons:
            say(f"  {one_line(f'{reason.code}: {words.text(reason.text)}')}")
    if one.request.sign is not None:
        signed = _sign(path, one.request.sign)
        if not output.silent:
            say(f"signed: {signed}")
    return made


def _sign(path: Path, key: Path) -> Path:
    from steelyard.record import signature

    try:
        return signature.sign(path, key)
    except RequestError as error:
        raise LostError(f"record {path} is written but not signed: {error}; sign it with steelyard sign") from error


def interrupted(made: "Record") -> bool:
    return any(reason.code == "interrupted" for reason in made.reasons)
