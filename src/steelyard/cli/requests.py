"""Make one `Request` for each run that the command line of `run` asks for: cases x sweep points x
engines.

`cli/run.py` calls `make_requests`; `cli/execute_runs.py` checks and runs the requests.
"""

from dataclasses import replace
from pathlib import Path

from steelyard import accelerators
from steelyard.case import new_case, resolve, sweep
from steelyard.case.case import Case
from steelyard.case.precision import load_presets
from steelyard.case.request import (
    EngineSettings,
    Request,
    split_engine_settings,
    split_settings_by_engine,
)
from steelyard.case.resolve import CaseSource, ResolvedCase
from steelyard.case.sweep import SweepAxis, SweepPoint
from steelyard.cli.get import find_data_path
from steelyard.cli.options import SMOKE, RunOptions
from steelyard.cli.printing import OutputOptions, print_stderr
from steelyard.data import selection
from steelyard.data.tokenizer import has_tokenizer
from steelyard.engine import engine_rows
from steelyard.engine.default_engine import choose_default_engine
from steelyard.errors import RequestError
from steelyard.plan import degrees
from steelyard.run import site as sites

RANDOM_WEIGHTS = "random"
ALL_ENGINES = "all"  # in place of an engine's name: every engine
MAX_REPEATS = 10_000


def make_requests(options: RunOptions) -> tuple[list[Request], tuple[SweepAxis, ...]]:
    """Return a request for every run that the options ask for (cases x points of the sweep x
    engines, in this order of nesting), and the axes of their sweep (empty: no sweep). The case name
    `smoke` stands, innermost, for every shipped case that the engine runs, in each division and
    number of devices, for which this host's devices are looked for. Repeats are not multiplied
    here.

    Cases, site file and the ids of --rows are read, and with --model a case is made; messages about
    these go to stderr. Raise RequestError if options cannot be combined, or name something unknown
    or missing. Named cases are not checked against engines or devices yet.
    """
    weights = None if options.weights in (None, RANDOM_WEIGHTS) else Path(str(options.weights))
    cases: tuple[str | CaseSource, ...] = tuple(options.cases or ())
    if options.model is not None or options.task is not None:
        model_case, options, weights = _make_model_case(options, weights)
        cases = (model_case,)
    if not cases:
        raise RequestError(
            "name a case, or smoke for every case, tiny; or a model's folder with --model and"
            " --task"
        )
    if options.engine == ALL_ENGINES and options.sweeps:
        raise RequestError(
            "--engine all and --sweep cannot be combined; name one engine, or drop --sweep"
        )
    if options.engine == ALL_ENGINES and options.resume is not None:
        raise RequestError(
            "--engine all and --resume cannot be combined; name the engine of the checkpoint"
        )
    engines, settings = split_engines_and_settings(options.engine, options.settings or [])
    axes = sweep.parse_axes(options.sweeps or [], _list_set_keys(options, settings))
    if axes and options.resume is not None:
        raise RequestError("--sweep and --resume cannot be combined; drop one")
    site = find_site_file(options.site, options.output)
    for key, value in (
        ("parallel", options.parallel),
        ("checkpoint_every", options.checkpoint_every),
    ):
        settings += [] if value is None else [f"tune.{key}={value}"]
    devices = options.devices if options.devices is not None else sites.read_site(site).devices
    options = replace(options, settings=settings, devices=devices)
    subjects = None if options.subjects is None else selection.parse_subjects(options.subjects)
    rows = None if options.rows is None else selection.read_ids(options.rows)
    passes = (
        None
        if options.passes is None
        else tuple(
            pass_name.strip() for pass_name in options.passes.split(",") if pass_name.strip()
        )
    )
    requests = [
        Request(
            resolved=resolved,
            engine=engine or choose_default_engine(resolved.case),
            engine_settings=engine_paths,
            accelerator=options.accelerator,
            launcher=options.launcher,
            nodes=sweep.find_count(point, "nodes") or options.nodes,
            devices=device_count,
            passes=passes,
            sample=options.sample,
            steps=options.steps,
            subjects=subjects,
            rows=rows,
            resume=options.resume,
            weights=weights,
            data=find_data_path(options.data, resolved.case),
            tokenizer=options.tokenizer,
            site=site,
            out=options.out,
            hang_s=options.hang_after,
            limit_s=options.time_limit,
            explain=options.explain or options.trace,
            trace=options.trace,
            point=point,
            signing_key=options.sign,
        )
        for case in cases
        for point in sweep.make_grid(axes)
        for engine, engine_paths in engines
        for resolved, device_count in resolve_cases_at(point, case, engine, options)
    ]
    return requests, axes


def _make_model_case(
    options: RunOptions, given_weights: Path | None
) -> tuple[CaseSource, RunOptions, Path | None]:
    """Make the case for --model and --task, and print its name and what it assumes on stderr,
    unless output is silent.

    Return it with options in which the tokenizer is filled in, and the weights to load: the model's
    folder if --weights is not given, the size is not smoke and the task loads weights, otherwise
    `given_weights`. Raise RequestError if one of the two options is missing, a case is named too,
    or no case can be made.
    """
    model, task, weights = options.model, options.task, options.weights
    if model is None:
        raise RequestError(f"--task {task}: only with --model DIR; a case has its task")
    if options.cases:
        raise RequestError(
            f"--model and {options.cases[0]!r}: the case of a model is made from its folder; drop"
            " one of them"
        )
    if task is None:
        raise RequestError(f"--model needs --task: {', '.join(sorted(new_case.find_templates()))}")
    from steelyard.cli.model_case import make_case_to_run

    smoke = options.size == SMOKE
    load_weights = weights is None and not smoke
    tokenizer = options.tokenizer
    if tokenizer is None and weights == RANDOM_WEIGHTS and not smoke and has_tokenizer([model]):
        tokenizer = model
    model_case = make_case_to_run(
        model, task, load_weights, None if smoke else options.data, tokenizer, given_weights
    )
    if not options.output.silent:
        print_stderr(f"case {model_case.name}, made in memory as steelyard case new makes it")
        for assumption in model_case.assumed:
            print_stderr(f"  assumed: {assumption}")
    return (
        model_case.source,
        replace(options, tokenizer=tokenizer),
        model if load_weights and not model_case.starts_random else given_weights,
    )


def split_engines_and_settings(
    engine: str | None, settings: list[str]
) -> tuple[list[tuple[str | None, EngineSettings]], list[str]]:
    """Return the engines that --engine names (all of them for `all`; None: the default of each
    case), each as a pair with its own settings, and the values of --set that are not about engines.

    Raise RequestError for an engine setting that is not allowed; for `all`, one that does not name
    its engine. The name of a single engine is not checked.
    """
    if engine != ALL_ENGINES:
        engine_paths, others = split_engine_settings(settings)
        return [(engine, engine_paths)], others
    names = [*engine_rows.load_engine_rows()]
    paths_by_engine, others = split_settings_by_engine(settings, names)
    return [(name, paths_by_engine.get(name, EngineSettings())) for name in names], others


def _list_set_keys(options: RunOptions, settings: list[str]) -> dict[str, str]:
    """Return the dotted keys that the command line sets, each with the option that sets it, such as
    `--devices 2`; to refuse a sweep of the same key. `settings` are texts of --set; --nodes 1
    counts as not given.
    """
    options_by_key = (
        ("devices", "--devices", options.devices),
        ("nodes", "--nodes", None if options.nodes == 1 else options.nodes),
        ("tune.parallel", "--parallel", options.parallel),
        ("tune.checkpoint_every", "--checkpoint-every", options.checkpoint_every),
        ("question.precision", "--precision", options.precision),
        ("question.division", "--division", options.division),
    )
    by_set = {setting.partition("=")[0]: f"--set {setting}" for setting in settings}
    return by_set | {
        key: f"{option} {value}" for key, option, value in options_by_key if value is not None
    }


def check_repeat(repeat: int) -> int:
    """Return the number of repeats unchanged; raise RequestError unless it is 1 to 10,000."""
    if not 1 <= repeat <= MAX_REPEATS:
        raise RequestError(f"--repeat {repeat}: must be 1 to {MAX_REPEATS:,}")
    return repeat


def resolve_cases_at(
    point: SweepPoint, name: str | CaseSource, engine: str | None, options: RunOptions
) -> list[tuple[ResolvedCase, int]]:
    """Resolve a case at a point of a sweep: return pairs of the resolved case and its number of
    devices per host. It is one pair, with the point's number of devices, else the options', else 1;
    but for the name `smoke` one for every shipped case that the engine (None: the default of the
    case) runs at size smoke, each division, and each device count that the case lists and this host
    has (or the given one).

    Raise RequestError, with the point in its message, if the case cannot be resolved.
    """
    with sweep.name_point_in_errors(point):
        settings = [*(options.settings or []), *sweep.format_settings(point)]
        devices = sweep.find_count(point, "devices") or options.devices
        if name != SMOKE:
            resolved = resolve.resolve_case(
                name, options.size, options.precision, options.division, settings
            )
            return [(resolved, 1 if devices is None else devices)]
        options = replace(options, settings=settings, devices=devices)
        return [
            (resolved, device_count)
            for resolved in _resolve_smoke_cases(engine, options)
            for device_count in _list_device_counts(
                resolved.case, engine or choose_default_engine(resolved.case), options
            )
        ]


def _resolve_smoke_cases(engine: str | None, options: RunOptions) -> list[ResolvedCase]:
    """Return every shipped case that the engine (None: the default of the case) runs, resolved at
    size smoke, once for each division that case and engine both have, or for the one in the
    options. Cases of generation are left out if the options are none for them. Raise RequestError
    if the options name another size, or something that another case does not have.
    """
    if options.size not in (None, SMOKE):
        size = options.size
        raise RequestError(
            f"smoke --size {size}: smoke runs every case at size smoke; name a case to use --size"
            f" {size}"
        )
    resolved: list[ResolvedCase] = []
    for name in resolve.list_shipped_cases():
        if not _suits_load(resolve.resolve_case(name, SMOKE).case, engine, options):
            continue
        case = resolve.resolve_case(
            name, SMOKE, options.precision, options.division, options.settings
        ).case
        row = engine_rows.find_engine(engine or choose_default_engine(case))
        if row.refusal(case) is None:
            divisions = [
                case_division for case_division in case.divisions if case_division in row.divisions
            ]
            for division in [options.division] if options.division else divisions:
                resolved.append(
                    resolve.resolve_case(name, SMOKE, options.precision, division, options.settings)
                )
    return resolved


def _suits_load(case: Case, engine: str | None, options: RunOptions) -> bool:
    """Return whether a case of a kind with a load (generation) has a run with these options: not
    with --steps, --explain or --trace, nor in a precision or division that the engine (None: the
    default of the case) does not have. True for other kinds, which have them, or refuse them.
    """
    kind = case.question.kind_row
    if not kind.has_load:
        return True
    row = engine_rows.find_engine(engine or choose_default_engine(case))
    preset = load_presets()[kind.name].get(options.precision or case.question.precision.name)
    is_computed = preset is not None and preset.matmul in row.precisions
    is_divided = options.division is None or options.division in row.divisions
    is_limited = options.steps is not None or options.explain or options.trace
    return is_computed and is_divided and not is_limited


def _list_device_counts(case: Case, engine: str, options: RunOptions) -> list[int]:
    """Return the numbers of devices per host on which a smoke run of the case is made: the one in
    the options, none if the case has no replicas and the engine cannot divide it over so many;
    otherwise those that the case lists, as far as this host has the devices (of the accelerator in
    the options, or of the one that is detected) and the engine can divide the case over them, `[1]`
    if none is left.
    """
    if options.devices is not None:
        world = options.nodes * options.devices
        is_divided = case.question.kind_row.replicas or _can_divide(case, engine, world)
        return [options.devices] if is_divided else []
    if max(case.devices) == 1:
        return [1]
    row = (
        accelerators.find_accelerator(options.accelerator)
        if options.accelerator
        else accelerators.detect_accelerator()
    )
    max_devices = row.count_workers(row.find())
    return [n for n in case.devices if n <= max_devices and _can_divide(case, engine, n)] or [1]


def _can_divide(case: Case, engine: str, devices: int) -> bool:
    """Return whether the engine can divide the case's work over so many devices. Raise RequestError
    if the degrees of its tune do not fit them, unless the case cannot have replicas.
    """
    try:
        return engine_rows.find_engine(engine).can_divide(degrees.make_plan(case, 1, devices))
    except RequestError:
        if case.question.kind_row.replicas:
            raise
        return False


def find_site_file(given_file: Path | None, output: OutputOptions) -> Path | None:
    """Return the site file to use, the named one (unchecked) or the user's own, or None. Print on
    stderr which one is used without being named (unless output is silent), and a warning about one
    in the working directory that is not used. Raise RequestError if the user's own may not be used.
    """
    path = sites.find_site_file(given_file)
    if path is not None and given_file is None and not output.silent:
        print_stderr(f"site: {path}")
    unused = sites.find_unused_site_file(path)
    if unused is not None:
        print_stderr(f"warning: {unused} in this folder is not used; to use it: --site {unused}")
    return path
