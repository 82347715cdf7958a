"""Make one `Request` for each run that the command line of `run` asks for: cases x sweep points x
engines.

`cli/run.py` calls `make_requests`; `cli/execute_runs.py` checks and runs the requests.
"""

from dataclasses import replace
from pathlib import Path

from steelyard import accelerators
from steelyard.case import new, resolve, sweep
from steelyard.case.case import Case
from steelyard.case.request import (
    DEFAULT_ENGINE,
    EngineSettings,
    Request,
    engine_settings,
    settings_by_engine,
)
from steelyard.case.resolve import Resolved, Source
from steelyard.case.sweep import Axis, Point
from steelyard.cli.get import data_of
from steelyard.cli.options import SMOKE, RunOptions
from steelyard.cli.out import Output, say
from steelyard.data import selection
from steelyard.data.tokenizer import present
from steelyard.engine import rows as engine_rows
from steelyard.errors import RequestError
from steelyard.plan import degrees
from steelyard.run import site as sites

RANDOM = "random"
ALL = "all"  # in place of an engine's name: every engine
MOST_REPEATS = 10_000


def read(options: RunOptions) -> tuple[list[Request], tuple[Axis, ...]]:
    """Return a request for every run that the options ask for, and the axes of their sweep. Repeats
    are not multiplied here.

    Cases and site file are read, and with --model a case is made. Raise RequestError if options
    cannot be combined, or name something unknown or missing.
    """
    weights = None if options.weights in (None, RANDOM) else Path(str(options.weights))
    cases: tuple[str | Source, ...] = tuple(options.cases or ())
    if options.model is not None or options.task is not None:
        made, options, weights = _case_of_model(options, weights)
        cases = (made,)
    if not cases:
        raise RequestError(
            "name a case, or smoke for every case, tiny; or a model's folder with --model and"
            " --task"
        )
    if options.engine == ALL and options.sweeps:
        raise RequestError(
            "--engine all and --sweep cannot be combined; name one engine, or drop --sweep"
        )
    if options.engine == ALL and options.resume is not None:
        raise RequestError(
            "--engine all and --resume cannot be combined; name the engine of the checkpoint"
        )
    engines, settings = engines_and_settings(
        options.engine or DEFAULT_ENGINE, options.settings or []
    )
    axes = sweep.axes(options.sweeps or [], _set_by(options, settings))
    if axes and options.resume is not None:
        raise RequestError("--sweep and --resume cannot be combined; drop one")
    site = site_file(options.site, options.output)
    for key, value in (
        ("parallel", options.parallel),
        ("checkpoint_every", options.checkpoint_every),
    ):
        settings += [] if value is None else [f"tune.{key}={value}"]
    devices = options.devices if options.devices is not None else sites.read(site).devices
    options = replace(options, settings=settings, devices=devices)
    subjects = None if options.subjects is None else selection.names(options.subjects)
    rows = None if options.rows is None else selection.read(options.rows)
    passes = (
        None
        if options.passes is None
        else tuple(one.strip() for one in options.passes.split(",") if one.strip())
    )
    requests = [
        Request(
            resolved=resolved,
            engine=engine,
            engine_settings=of_engine,
            accelerator=options.accelerator,
            launcher=options.launcher,
            nodes=sweep.number(point, "nodes") or options.nodes,
            devices=number,
            passes=passes,
            sample=options.sample,
            steps=options.steps,
            subjects=subjects,
            rows=rows,
            resume=options.resume,
            weights=weights,
            data=data_of(options.data, resolved.case),
            tokenizer=options.tokenizer,
            site=site,
            out=options.out,
            hang_s=options.hang_after,
            limit_s=options.time_limit,
            explain=options.explain or options.trace,
            trace=options.trace,
            point=point,
            sign=options.sign,
        )
        for case in cases
        for point in sweep.grid(axes)
        for engine, of_engine in engines
        for resolved, number in cases_at(point, case, engine, options)
    ]
    return requests, axes


def _case_of_model(
    options: RunOptions, given: Path | None
) -> tuple[Source, RunOptions, Path | None]:
    """Make the case for --model and --task, and print what it assumes on stderr.

    Return it with options in which engine and tokenizer are filled in from the folder, and the
    weights to load: the model's folder if --weights is not given and the task loads weights,
    otherwise `given_weights`. Raise RequestError if one of the two options is missing, a case is
    named too, or no case can be made.
    """
    model, task, weights = options.model, options.task, options.weights
    if model is None:
        raise RequestError(f"--task {task}: only with --model DIR; a case has its task")
    if options.cases:
        raise RequestError(
            f"--model and {options.cases[0]!r}: a model's case is made of its folder; drop one of"
            " them"
        )
    if task is None:
        raise RequestError(f"--model needs --task: {', '.join(sorted(new.templates()))}")
    from steelyard.cli.own import AUTO, case_to_run

    smoke = options.size == SMOKE
    loads = weights is None and not smoke
    tokenizer = options.tokenizer
    if tokenizer is None and weights == RANDOM and not smoke and present([model]):
        tokenizer = model
    made = case_to_run(model, task, loads, None if smoke else options.data, tokenizer, given)
    if not options.output.silent:
        say(f"case {made.name}, made in memory as steelyard case new makes it")
        for one in made.assumed:
            say(f"  assumed: {one}")
    only = made.source.table["question"]["model"]["family"] == AUTO
    options = replace(
        options, engine=options.engine or ("transformers" if only else None), tokenizer=tokenizer
    )
    return made.source, options, model if loads and not made.random else given


def engines_and_settings(
    engine: str, settings: list[str]
) -> tuple[list[tuple[str, EngineSettings]], list[str]]:
    """Return the engines that --engine names (all of them for `all`), each with its own settings,
    and the values of --set that are not about engines.

    Raise RequestError for an engine setting that is not allowed. The name of a single engine is not
    checked.
    """
    if engine != ALL:
        of_engine, others = engine_settings(settings)
        return [(engine, of_engine)], others
    names = [*engine_rows.table()]
    by_name, others = settings_by_engine(settings, names)
    return [(name, by_name.get(name, EngineSettings())) for name in names], others


def _set_by(options: RunOptions, settings: list[str]) -> dict[str, str]:
    """Return the keys that the command line sets, each with the option that sets it, such as
    `--devices 2`; to refuse a sweep of the same key.
    """
    given = (
        ("devices", "--devices", options.devices),
        ("nodes", "--nodes", None if options.nodes == 1 else options.nodes),
        ("tune.parallel", "--parallel", options.parallel),
        ("tune.checkpoint_every", "--checkpoint-every", options.checkpoint_every),
        ("question.precision", "--precision", options.precision),
        ("question.division", "--division", options.division),
    )
    set_ = {setting.partition("=")[0]: f"--set {setting}" for setting in settings}
    return set_ | {key: f"{option} {value}" for key, option, value in given if value is not None}


def checked_repeat(repeat: int) -> int:
    """Return the number of repeats unchanged; raise RequestError unless it is 1 to 10,000."""
    if not 1 <= repeat <= MOST_REPEATS:
        raise RequestError(f"--repeat {repeat}: must be 1 to {MOST_REPEATS:,}")
    return repeat


def cases_at(
    point: Point, name: str | Source, engine: str, options: RunOptions
) -> list[tuple[Resolved, int]]:
    """Resolve a case at a point of a sweep: return it with its number of devices per host. The name
    `smoke` gives every case that the engine runs at size smoke, once per device count.

    Raise RequestError, with the point in its message, if the case cannot be resolved.
    """
    with sweep.named(point):
        settings = [*(options.settings or []), *sweep.settings(point)]
        devices = sweep.number(point, "devices") or options.devices
        if name != SMOKE:
            one = resolve.resolve(name, options.size, options.precision, options.division, settings)
            return [(one, 1 if devices is None else devices)]
        return [
            (one, number)
            for one in _smoke(engine, replace(options, settings=settings))
            for number in (
                [devices]
                if devices is not None
                else _device_counts(one.case, engine, options.accelerator)
            )
        ]


def _smoke(engine: str, options: RunOptions) -> list[Resolved]:
    """Return every shipped case that the engine runs at size smoke, once for each division that
    both have, or for the one in the options. Raise RequestError if the options name another size.
    """
    if options.size not in (None, SMOKE):
        size = options.size
        raise RequestError(
            f"smoke --size {size}: smoke runs every case at size smoke; name a case to use --size"
            f" {size}"
        )
    row = engine_rows.row(engine)
    out: list[Resolved] = []
    for name in resolve.names():
        case = resolve.resolve(
            name, SMOKE, options.precision, options.division, options.settings
        ).case
        if row.refusal(case) is None:
            divisions = [one for one in case.divisions if one in row.divisions]
            for division in [options.division] if options.division else divisions:
                out.append(
                    resolve.resolve(name, SMOKE, options.precision, division, options.settings)
                )
    return out


def _device_counts(case: Case, engine: str, accelerator: str | None) -> list[int]:
    """Return the device counts that the case lists for smoke runs, as far as this host has the
    devices and the engine can divide the case over them; `[1]` if none is left.
    """
    if max(case.devices) == 1:
        return [1]
    row = accelerators.named(accelerator) if accelerator else accelerators.detect()
    most = row.most(row.find())
    divides = engine_rows.row(engine).divides
    return [n for n in case.devices if n <= most and divides(degrees.make(case, 1, n))] or [1]


def site_file(named: Path | None, output: Output) -> Path | None:
    """Return the site file to use, the named one or the user's own, or None. Print on stderr which
    one is used without being named, and a warning about one in the working directory that is not
    used.
    """
    path = sites.find(named)
    if path is not None and named is None and not output.silent:
        say(f"site: {path}")
    left_out = sites.unused(path)
    if left_out is not None:
        say(f"warning: {left_out} in this folder is not used; to use it: --site {left_out}")
    return path
