"""The verb run."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.options import DivisionOption, Json, PrecisionOption, Settings, SizeOption
from steelyard.cli.out import dump, one_line, say, tell
from steelyard.errors import LostError, RequestError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import Console

    from steelyard.case.case import Case
    from steelyard.case.request import Request
    from steelyard.case.resolve import Resolved
    from steelyard.case.sweep import Point
    from steelyard.record.record import Record
    from steelyard.run.launch import Allocation
    from steelyard.run.ready import Ready

ALL = "all"  # every engine, in the place of one's name
QUEUE_S = 10  # the wait in a queue is said so often


def run(
    cases: Annotated[
        list[str], typer.Argument(metavar="CASE...", help="Cases, your own .toml files, or smoke: every case, tiny.")
    ],
    size: SizeOption = None,
    engine: Annotated[
        str,
        typer.Option(
            help="torch (ours), transformers (what users run today), megatron, paddle, reference (GLM as published), or all: "
            "every one that is installed and can do the case, side by side."
        ),
    ] = "torch",
    accelerator: Annotated[str | None, typer.Option(help="cuda or cpu; default: the first one found.")] = None,
    precision: PrecisionOption = None,
    division: DivisionOption = None,
    nodes: Annotated[int, typer.Option(help="Hosts; more than one needs --launcher ssh or slurm.")] = 1,
    devices: Annotated[
        int | None,
        typer.Option(help="Devices per host; default: the site's, else 1, and for smoke the numbers that each case names."),
    ] = None,
    launcher: Annotated[
        str | None, typer.Option(help="local (this host), ssh, or slurm (an allocation, asked for where there is none).")
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            help="Degrees such as TP2 or TP2DP4; one without a number takes the devices that are left. Default: the case's."
        ),
    ] = None,
    passes: Annotated[
        str | None,
        typer.Option(
            help="Scoring: val (eager), infer (compiled), bare (infer again with nothing measured inside); default: val,infer. "
            "Training: before, train, after (held-out data around the steps); default: all, or until a target."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Stop after so many steps, or each pass after so many batches.")] = None,
    sample: Annotated[
        int | None, typer.Option(help="A seeded sample of so many questions or passages; in training, so many of each batch.")
    ] = None,
    weights: Annotated[
        str, typer.Option(metavar="DIR|random", help="Hugging Face safetensors, Megatron shards, GLM's own layout, or random.")
    ] = "random",
    data: Annotated[Path | None, typer.Option(help="Folder or file of the case's data (full size).")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="tokenizer.json, tokenizer.model, vocab.json with merges.txt, or vocab.txt; default: beside weights or data."
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(help="Training: keep a checkpoint every so many steps, under checkpoints/ in the folder of the records."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RECORD",
            help="Training: go on from the last whole checkpoint of a run, named by its record (or its checkpoint folder); "
            "another --parallel or number of devices is fine.",
        ),
    ] = None,
    settings: Settings = None,
    sweeps: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=A,B,...",
            help="Run once for each value: of any key of --set (a tune key also by its short name), of devices or of nodes; "
            "several make a grid. The same command again runs only points that have no valid record in --out yet.",
        ),
    ] = None,
    site: Annotated[
        Path | None,
        typer.Option(
            help="TOML with what is true of this cluster: launcher, hosts, interface, machine and network. "
            "Default: site.toml here, else in ~/.config/steelyard."
        ),
    ] = None,
    repeat: Annotated[
        int,
        typer.Option(help="Run so many times, in fresh processes; then their mean, the spread between them and its interval."),
    ] = 1,
    explain: Annotated[
        bool, typer.Option("--explain", help="Profile a few steps after the passes, and say where the time goes.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="With --explain: keep the profiler's trace beside the record (Chrome's format).")
    ] = False,
    hang_after: Annotated[float, typer.Option(help="Seconds without a sign of life before workers are ended.")] = 1800.0,
    time_limit: Annotated[float | None, typer.Option(help="Seconds a run may take in all.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("records"),
    sign: Annotated[
        Path | None, typer.Option(metavar="KEY", help="Sign each record with this SSH key; see steelyard sign --help.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Run cases, check the answers, and write a record of each.

    \b
    Examples:
      steelyard run smoke
      steelyard run llama2-7b-mmlu --data mmlu/ --weights Llama-2-7b-hf/
      steelyard run llama2-7b-mmlu --data mmlu/ --weights random --tokenizer tokenizer.model --sample 1404
      steelyard run llama1-7b-openwebtext --data owt/owt --devices 8 --parallel TP2DP4 --checkpoint-every 50
      steelyard run llama1-7b-openwebtext --data owt/owt --devices 8 --parallel PP2DP4 --resume records/2026….json
      steelyard run aquila2-34b-lambada --data lambada/ --weights ckpts/ --tokenizer tokenizer/ --devices 8
      steelyard run llama1-7b-openwebtext --data owt/owt --launcher slurm --nodes 2 --devices 8
      steelyard run llama2-7b-mmlu --data mmlu/ --weights Llama-2-7b-hf/ --repeat 5
      steelyard run llama2-7b-mmlu --data mmlu/ --weights Llama-2-7b-hf/ --engine all --repeat 3
      steelyard run llama1-7b-openwebtext --data owt/owt --steps 20 --sweep devices=1,2,4,8 --sweep micro_batch=1,2,4
    """
    from steelyard.case import sweep
    from steelyard.case.request import Request
    from steelyard.cli.engines import check_all, chosen
    from steelyard.record.signature import try_key
    from steelyard.run import site as sites

    check_all(engine, bool(sweeps), resume is not None)
    engines, settings = chosen(engine, settings or [])
    axes = sweep.axes(sweeps or [], _given(settings, devices, nodes, parallel, checkpoint_every, precision, division))
    if axes and resume is not None:
        raise RequestError("--sweep and --resume: a sweep begins every run anew; leave one of the two out")
    where = sites.find(site)
    if where is not None and site is None:
        say(f"site: {where}")
    devices = devices if devices is not None else sites.read(where).devices
    if parallel is not None:
        settings = [*(settings or []), f"tune.parallel={parallel}"]
    if checkpoint_every is not None:
        settings = [*(settings or []), f"tune.checkpoint_every={checkpoint_every}"]
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
            resume=resume,
            weights=None if weights == "random" else Path(weights),
            data=data,
            tokenizer=tokenizer,
            site=where,
            out=out,
            hang_s=hang_after,
            limit_s=time_limit,
            explain=explain or trace,
            trace=trace,
            point=point,
            sign=sign,
        )
        for name in cases
        for point in sweep.grid(axes)
        for engine_name, of_engine in engines
        for resolved, number in _at(point, name, engine_name, size, precision, division, settings, devices, accelerator)
    ]
    times = at_least_one(repeat)
    if sign is not None:
        try_key(sign)
    if axes:
        from steelyard.cli.sweep import run_sweep

        return run_sweep(requests, axes, times, as_json)
    if engine == ALL:
        from steelyard.cli.engines import run_engines

        return run_engines(requests, times, as_json)
    return _run([request for request in requests for _ in range(times)], as_json)


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


def _at(
    point: "Point",
    name: str,
    engine: str,
    size: str | None,
    precision: str | None,
    division: str | None,
    settings: list[str] | None,
    devices: int | None,
    accelerator: str | None,
) -> "list[tuple[Resolved, int]]":
    """What a name stands for at a point of a sweep: cases, each with a number of devices."""
    from steelyard.case import sweep

    with sweep.named(point):
        found = _resolve([name], engine, size, precision, division, [*(settings or []), *sweep.settings(point)])
        wanted = sweep.number(point, "devices") or devices
        return [(one, number) for one, smoke in found for number in _numbers(one.case, smoke, engine, wanted, accelerator)]


def at_least_one(repeat: int) -> int:
    if repeat < 1:
        raise RequestError(f"--repeat {repeat}: must be at least 1")
    return repeat


def _resolve(
    cases: list[str],
    engine: str,
    size: str | None,
    precision: str | None,
    division: str | None,
    settings: list[str] | None,
) -> "list[tuple[Resolved, bool]]":
    """What to run, and whether it was asked for as `smoke`: every case that the engine runs at that size, in every
    division that both have."""
    from steelyard import engines
    from steelyard.case import resolve

    out: list[tuple[Resolved, bool]] = []
    for name in cases:
        if name != "smoke":
            out.append((resolve.resolve(name, size, precision, division, settings), False))
            continue
        if size not in (None, "smoke"):
            raise RequestError(f"run smoke --size {size}: smoke is a size; name a case to run it at size {size}")
        row = engines.row(engine)
        for known in resolve.names():
            found = resolve.resolve(known, "smoke", precision, division, settings).case
            if row.refusal(found) is not None:
                continue
            able = [one for one in found.divisions if one in row.divisions]
            for one in [division] if division else able:
                out.append((resolve.resolve(known, "smoke", precision, one, settings), True))
    return out


def _numbers(case: "Case", smoke: bool, engine: str, devices: int | None, accelerator: str | None) -> list[int]:
    """The number of devices that was asked for, else 1; for `smoke` those of the case that can be had here, with this
    engine, and 1 in any case."""
    from steelyard import accelerators, engines
    from steelyard.plan import degrees

    if devices is not None or not smoke or max(case.devices) == 1:
        return [1 if devices is None else devices]
    row = accelerators.named(accelerator) if accelerator else accelerators.detect()
    most = row.most(row.find())
    divides = engines.row(engine)
    able = [n for n in case.devices if n <= most and divides.divides(degrees.make(case, 1, n))]
    return able or [1]


def _label(request: "Request") -> str:
    question = request.resolved.case.question
    label = f"{request.resolved.case.name} {question.division} {question.precision.name} {request.engine}"
    return label if request.devices == request.nodes == 1 else f"{label} {request.nodes}x{request.devices}"


def _run(requests: "list[Request]", as_json: bool) -> int:
    from rich.console import Console

    from steelyard import report
    from steelyard.cli import repeats
    from steelyard.record import record
    from steelyard.run.ready import ready

    runs = [ready(request) for request in requests]  # all of them before the first is run
    console = Console(stderr=True, quiet=as_json)
    done = []
    with hosts(runs) as allocation:
        for one in runs:
            made = carry_out(one, console, allocation)
            done.append(made)
            if interrupted(made):
                break
    if as_json:
        dump({"records": [record.to_table(made) for made in done], "repeats": repeats.as_json(done)}, tell)
    else:
        tell(report.text(report.table(done)))
        repeats.show(done)
    return 0 if len(done) == len(runs) and all(made.status == "valid" for made in done) else 1


def hosts(runs: "list[Ready]") -> "AbstractContextManager[Allocation | None]":
    """One allocation for all runs of a command, where their launcher asks a scheduler for hosts. The wait is shown, and is in
    no record."""
    from steelyard.run import scheduler

    if not runs or not runs[0].launcher.scheduler:
        return nullcontext()
    shown: list[int] = []

    def waiting(seconds: float) -> None:
        if int(seconds) // QUEUE_S > len(shown) - 1:
            shown.append(int(seconds))
            say(f"waiting for {nodes} host(s) of Slurm: {int(seconds)} s")

    nodes = max(one.plan.nodes for one in runs)
    return scheduler.allocated(runs[0].site, nodes, waiting)


def carry_out(one: "Ready", console: "Console", allocation: "Allocation | None") -> "Record":
    """One run, with what a user sees of it. A quiet console is that of --json."""
    from steelyard.cli.progress import Display
    from steelyard.run.parent import run_case

    with Display(console, _label(one.request)) as display:
        made, path = run_case(one, display.show, allocation, lambda warning: say(f"warning: {warning}"))
    if not console.quiet:
        say(f"{made.status}: {path}")
        for reason in made.reasons:
            say(f"  {one_line(f'{reason.code}: {reason.text}')}")
    if one.request.sign is not None:
        signed = _sign(path, one.request.sign)
        if not console.quiet:
            say(f"signed: {signed}")
    return made


def _sign(path: Path, key: Path) -> Path:
    from steelyard.record import signature

    try:
        return signature.sign(path, key)
    except RequestError as error:
        raise LostError(f"the record is written, {path}, and not signed: {error}; see steelyard sign") from error


def interrupted(made: "Record") -> bool:
    return any(reason.code == "interrupted" for reason in made.reasons)
