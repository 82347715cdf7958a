"""Turn a request into a run that can start: check all that can be known without starting a process.

`check_request` is called by the command (cli/execute_runs.py) once per run and raises RequestError
or EngineError for the first problem. What it returns goes to run/parent.py. What only other hosts
know is checked later, in run/preflight.py.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from steelyard import accelerators
from steelyard.accelerators.row import Accelerator
from steelyard.case.case import Case
from steelyard.case.precision import load_presets, name_precision
from steelyard.case.request import Request
from steelyard.case.resolve import ResolvedCase
from steelyard.data.corpus import IDS_SUFFIX
from steelyard.engine import engine_rows
from steelyard.engine.engine_rows import EngineRow
from steelyard.errors import EngineError, RequestError
from steelyard.metrics import verify
from steelyard.plan import degrees, memory
from steelyard.plan.degrees import Plan
from steelyard.record.record import Scope
from steelyard.record.run_facts import Restart
from steelyard.run import generation_request, launch, processes, site
from steelyard.run.failure import UNFINISHED
from steelyard.run.launch import Launcher
from steelyard.run.site import Site
from steelyard.sources import catalog
from steelyard.tasks.task import Task
from steelyard.training import checkpoint_folders
from steelyard.training.checkpoint_folders import BeforePassOutputs, CheckpointRun, CheckpointState

CHECKOUT_PROGRAM = "run.py"  # a checkout of the program has this file


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which a training run continues, as `find_checkpoint` found it through
    `--resume`: its folder `path` and its `state` (step, losses, plan). `record_id` is the record
    through which it was found (None: its folder was named), `before_answers` each replica's
    held-out answers before step 1, `passed_over` the names of later checkpoints that are damaged.
    `to_restart` makes what the new record states.
    """

    path: Path
    state: CheckpointState
    record_id: str | None  # id of the record through which it was found; None: by its folder
    before_answers: list[dict[str, Any]]  # each replica's held-out answers before step 1
    passed_over: list[str]  # names of later checkpoints that are damaged

    def to_restart(self, out: Path) -> Restart:
        """Return what the record of the run that continues from this checkpoint states about it
        (`Restart`): step, plan, losses so far, record id and skipped checkpoints. The path of the
        checkpoints' folder is relative to `out`, the folder of the new record.
        """
        return Restart(
            record=self.record_id,
            checkpoints=os.path.relpath(self.path.parent, out.resolve()),
            step=self.state.step,
            plan=str(self.state.plan),
            passed_over=self.passed_over,
            losses=self.state.losses,
        )


@dataclass(frozen=True)
class CheckedRequest:
    """A `request` that passed all checks of `check_request`, with the rows and settings that were
    looked up for it: `engine`, `accelerator` (None: the remote hosts find it), `launcher`, `site`,
    `plan` (hosts, devices and degrees of parallelism), `passes` in the order they run, `scope` (how
    much of the question is run), and `resume`, the checkpoint to continue from (None: none).

    `case` is its resolved case; `with_resolved` makes a copy with other tune values, unchecked.
    """

    request: Request
    engine: EngineRow
    accelerator: Accelerator | None  # None: found on the remote hosts
    plan: Plan
    launcher: Launcher
    passes: tuple[str, ...]
    scope: Scope
    site: Site
    resume: ResumePoint | None

    @property
    def case(self) -> Case:
        """The case of the request, with all values resolved."""
        return self.request.resolved.case

    def with_resolved(self, resolved: ResolvedCase) -> "CheckedRequest":
        """Return a copy whose request has another resolved case, such as one with other tune
        values; nothing is checked again.
        """
        return replace(self, request=replace(self.request, resolved=resolved))


def check_request(request: Request) -> CheckedRequest:
    """Check a request and return it with everything that was looked up for it; start no worker or
    agent, write nothing.

    Raises RequestError, or its subclass EngineError where another engine could do it, with one line
    for the first problem: /proc or working directory, site file, launcher, engine, plan, hosts,
    passes, checkpoint, paths, options, data, weights, devices, memory. With a launcher that starts
    agents on other hosts, paths, data and devices are not looked at here, and `accelerator` is None
    unless it was named. Otherwise one is detected if none was named.
    """
    processes.check_process_control()
    case, engine = request.resolved.case, engine_rows.find_engine(request.engine)
    run_site = site.read_site(site.find_site_file(request.site))
    launcher = launch.get_launcher(request.launcher or run_site.launcher or "local")
    _check_engine(case, engine, launcher.remote or request.engine_settings.python is not None)
    _check_checkout(request, engine, launcher)
    generation_request.check_engine_settings(request, engine)
    generation_request.check_request_options(request, engine)
    plan = degrees.make_plan(case, request.nodes, request.devices, request.sample, launcher.name)
    if not launcher.scheduler:
        launch.choose_hosts(launcher, run_site, plan.nodes)
    _check_engine_options(request, engine, plan, launcher)
    passes = _select_passes(request, engine)
    resume = find_checkpoint(request)
    _check_paths(request, launcher)
    _check_scope_options(request)
    if request.data is not None and not launcher.remote:
        # a quick check; the workers read all of it later
        case.question.task_row.check_data(request.data)
    accelerator = (
        accelerators.find_accelerator(request.accelerator) if request.accelerator else None
    )
    if not launcher.remote:
        accelerator = accelerator or accelerators.detect_accelerator()
        _check_devices(case, plan, accelerator, is_elsewhere=engine.endpoint)
    return CheckedRequest(
        request=request,
        engine=engine,
        accelerator=accelerator,
        plan=plan,
        launcher=launcher,
        passes=passes,
        scope=_make_scope(request),
        site=run_site,
        resume=resume,
    )


def _check_engine(case: Case, engine: EngineRow, in_other_python: bool) -> None:
    """Raise EngineError if the engine refuses the case, or has not its division, its matmul
    precision or (training) its training precision, or, unless `in_other_python`, if a package that
    it needs is not installed here.

    `in_other_python`: workers run in another Python (other hosts, or `engine.python`), whose
    packages the node agent checks.
    """
    question = case.question
    refusal = engine.refusal(case)
    if refusal is not None:
        raise EngineError(refusal)
    allowed = [division for division in case.divisions if division in engine.divisions]
    if question.division not in allowed:
        raise EngineError(
            f"{case.name} has no division {question.division!r} with engine {engine.name}; allowed:"
            f" {', '.join(allowed)}"
        )
    if question.precision.matmul not in engine.precisions:
        presets = load_presets().get(question.kind, {}).values()
        types = {preset.matmul for preset in presets}
        allowed_types = [name for name in engine.precisions if name in types or not types]
        raise EngineError(
            f"engine {engine.name} does not compute matmuls in {question.precision.matmul};"
            f" allowed: {', '.join(allowed_types)}"
        )
    precision_name = name_precision(question.kind, question.precision.model_dump())
    if question.kind_row.trains and precision_name not in engine.trains_in:
        raise EngineError(
            f"engine {engine.name} does not train in {precision_name}; allowed:"
            f" {', '.join(engine.trains_in)}"
        )
    missing = (
        engine.find_missing_module()
    )  # last: nobody should install an engine that cannot run the case
    if missing is not None and not in_other_python:
        raise EngineError(
            f"{missing} is not installed, and engine {engine.name} needs it; pip install"
            f" 'steelyard[{engine.extra}]', then run again"
        )


def _check_checkout(request: Request, engine: EngineRow, launcher: Launcher) -> None:
    """Check `--nodes` and `engine.checkout`, the folder of the program that some engines start:
    raise EngineError for several nodes on a single-host engine or a missing checkout, RequestError
    for a checkout that the engine does not need or, with a local launcher, that has no run.py.
    """
    if request.nodes > 1 and not engine.several_hosts:
        raise EngineError(
            f"--nodes {request.nodes}: engine {engine.name} runs on one host; allowed: --nodes 1"
        )
    checkout = request.engine_settings.checkout
    if not engine.checkout:
        if checkout is not None:
            raise RequestError(
                f"engine.checkout: engine {engine.name} needs no checkout; leave it out"
            )
        return
    if checkout is None:
        raise EngineError(
            f"engine {engine.name} runs a checkout of {engine.checkout}; name it: --set"
            " engine.checkout=DIR"
        )
    if not launcher.remote and not (checkout / CHECKOUT_PROGRAM).is_file():
        raise RequestError(
            f"engine.checkout {str(checkout)!r} has no {CHECKOUT_PROGRAM}; name a checkout of"
            f" {engine.checkout}"
        )


def _check_engine_options(
    request: Request, engine: EngineRow, plan: Plan, launcher: Launcher
) -> None:
    """Raise EngineError for a parallel plan (TP, PP, DP), `--resume`, `tune.checkpoint_every` or
    `--explain` that the engine or its framework does not support, and RequestError for `--trace`
    with a remote launcher.
    """
    if not engine.can_divide(plan):
        has_replicas = request.resolved.case.question.kind_row.replicas
        allowed = "".join(
            name.upper()
            for name in engine_rows.DEGREES
            if name in engine.degrees and (has_replicas or name != "dp")
        )
        raise EngineError(
            f"engine {engine.name} cannot divide a model as {plan}; allowed:"
            f" {f'--parallel {allowed}' if allowed else 'one device'}"
        )
    options = {
        "--resume": request.resume,
        "tune.checkpoint_every": request.resolved.case.tune.checkpoint_every,
    }
    for name, value in options.items():
        if value is not None and not engine.checkpoints:
            raise EngineError(f"{name}: engine {engine.name} writes no checkpoints; leave it out")
    profiled = [row.name for row in engine_rows.load_framework_rows().values() if row.profiler]
    if request.explain and engine.framework not in profiled:
        raise EngineError(
            f"--explain: engine {engine.name} has no profiler; allowed: engines on"
            f" {', '.join(profiled)}"
        )
    if request.trace and launcher.remote:
        raise RequestError(
            "--trace: the trace is written on the host of rank 0; allowed: --launcher local"
        )


def _select_passes(request: Request, engine: EngineRow) -> tuple[str, ...]:
    """Return the names of the passes to run, in order: those of `--passes`, else the task's default
    passes that the engine has (without the initial ones for a resumed run).

    Raises RequestError if named passes are none, unknown, repeated, lack a required pass, are out
    of order (kinds with an order), name a bare pass without the pass that it is compared with, or
    an initial pass, before the first step, for a resumed run; EngineError if only this engine lacks
    a pass.
    """
    row = request.resolved.case.question.task_row
    kind = row.kind_row
    available = tuple(
        name for name in kind.passes if engine.passes is None or name in engine.passes
    )
    if request.passes is None:
        defaults = tuple(name for name in row.passes if name in available)
        return (
            tuple(name for name in defaults if name not in kind.initial)
            if request.resume
            else defaults
        )
    passes = request.passes
    for name in passes:
        if name not in available:
            # another engine may have it
            error = EngineError if name in kind.passes else RequestError
            raise error(f"--passes: no pass {name!r}; allowed: {', '.join(available)}")
    if not passes or len(set(passes)) != len(passes):
        raise RequestError(f"--passes: name each pass once, such as {','.join(row.passes)}")
    for bare, measured in kind.bare.items():
        if bare in passes and measured not in passes:
            raise RequestError(
                f"--passes: {bare} is compared with {measured}; name both, such as"
                f" {measured},{bare}"
            )
    lacks_required = not set(kind.required) <= set(passes)
    if lacks_required or (
        kind.ordered
        and passes != tuple(pass_name for pass_name in available if pass_name in passes)
    ):
        order = ", in this order" if kind.ordered else ""
        required = f"; {', '.join(kind.required)} is required" if kind.required else ""
        raise RequestError(f"--passes: {kind.noun} has {', '.join(kind.passes)}{order}{required}")
    initial = [name for name in passes if name in kind.initial]
    if request.resume is not None and initial:
        raise RequestError(f"--passes: a resumed run has no pass {initial[0]}; leave it out")
    return passes


def find_checkpoint(request: Request) -> ResumePoint | None:
    """Return the last undamaged checkpoint of the run that `--resume` names; None without
    `--resume`. It may be the run's record file, or the folder with run.json and the folders of its
    checkpoints. Only JSON files are read, no tensors.

    Raises RequestError if the case is no training case, there is no usable checkpoint, it is of
    another question, sample or engine, its losses are not one per step, or no step is left because
    the target or the last step (`--steps`, else the case's) was reached.
    """
    if request.resume is None:
        return None
    source, resolved, train = (
        request.resume.resolve(),
        request.resolved,
        request.resolved.case.question.train,
    )
    if train is None:
        raise RequestError(
            f"--resume: {resolved.case.name} is {_name_kind(resolved.case)} case, which cannot"
            " resume; leave --resume out"
        )
    folder, record_id = (source, None) if source.is_dir() else _find_record_checkpoints(source)
    path, state, passed_over = checkpoint_folders.find_last_checkpoint(folder)
    run, question = (
        checkpoint_folders.read_checkpoint_json(
            folder / checkpoint_folders.RUN_FILE, CheckpointRun
        ),
        resolved.case.question.model_dump(mode="json"),
    )
    checkpoint_folders.check_same_question(
        run, resolved.case.name, question, request.sample, request.engine
    )
    total_steps = train.steps if request.steps is None else request.steps
    if state.reached:
        raise RequestError(
            f"--resume: the target was reached after step {state.step}; nothing is left to train"
        )
    if state.step >= total_steps:
        raise RequestError(
            f"--resume: {path} is after step {state.step} of {total_steps}; nothing is left to"
            " train"
        )
    if len(state.losses) != state.step:
        raise RequestError(
            f"{path / checkpoint_folders.STATE_FILE}: {len(state.losses)} losses of {state.step}"
            " steps"
        )
    before_paths = sorted(folder.glob(checkpoint_folders.BEFORE_FILE.format("*")))
    return ResumePoint(
        path,
        state,
        record_id,
        [
            checkpoint_folders.read_checkpoint_json(before_path, BeforePassOutputs).table
            for before_path in before_paths
        ],
        passed_over,
    )


def _name_kind(case: Case) -> str:
    """Return the noun of a case's kind of work with its article, such as `an inference`."""
    noun = case.question.kind_row.noun
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _find_record_checkpoints(record_path: Path) -> tuple[Path, str]:
    """Return the path of the folder with a record's checkpoints (the stored path joined to the
    record's own folder), and the record's id.

    The first folder with a finished checkpoint is taken: the run's own, then those of the runs that
    it had resumed from, latest first; if none has one, the first that the record names. Raises
    RequestError if the record does not verify, its run reached its target, it names no folder, or,
    for an `unfinished` record, none of the folders exists.
    """
    record = verify.read_verified_record(record_path)
    early_end = None if record.answers is None else record.task.stopped(record.answers)
    if early_end is not None and early_end.why == "target":
        raise RequestError(
            f"--resume: the run of {record_path} reached its target; nothing is left to train"
        )
    relative_folders = [
        record.checkpoints,
        *(restart.checkpoints for restart in reversed(record.restarts)),
    ]
    folders = [
        record_path.parent / relative_folder
        for relative_folder in relative_folders
        if isinstance(relative_folder, str)
    ]
    if not folders:
        raise RequestError(
            f"--resume: the run of {record_path} has no checkpoints; train with --checkpoint-every"
            " N to"
            " save some"
        )
    unfinished = any(reason.code == UNFINISHED.code for reason in record.reasons)
    if unfinished and not any(folder.is_dir() for folder in folders):
        raise RequestError(
            f"--resume: {record_path} names the folder {str(folders[0])!r}, which does not exist;"
            " if the record was moved, give that folder itself, else the run ended before its first"
            " checkpoint: run it again without --resume"
        )
    return next(
        (folder for folder in folders if checkpoint_folders.list_finished_checkpoints(folder)),
        folders[0],
    ), record.id


def _check_paths(request: Request, launcher: Launcher) -> None:
    """Raise RequestError if `--weights`, `--data` or `--tokenizer` does not exist or is neither
    file nor folder, a folder of weights is of another model, data are missing at size full,
    checkpoints are asked for of an inference case, or OUT/checkpoints is a file.

    For a remote launcher the paths of the three options are not looked at; the rest is. Token files
    may also be named by their common prefix.
    """
    case = request.resolved.case
    saves_checkpoints = case.tune.checkpoint_every is not None
    if saves_checkpoints and case.question.train is None:
        raise RequestError(
            f"tune.checkpoint_every: {case.name} is {_name_kind(case)} case without checkpoints;"
            " leave it out"
        )
    if saves_checkpoints and (request.out / "checkpoints").is_file():
        raise RequestError(
            f"{request.out / 'checkpoints'} is a file, not a folder for checkpoints; choose another"
            " --out"
        )
    for option, path in (
        ("--weights", request.weights),
        ("--data", request.data),
        ("--tokenizer", request.tokenizer),
    ):
        # Token files may also be named by their common prefix.
        if (
            path is not None
            and not launcher.remote
            and not path.exists()
            and not path.with_name(f"{path.name}{IDS_SUFFIX}").exists()
        ):
            raise RequestError(f"{option} {str(path)!r} does not exist; check the path")
        if (
            path is not None
            and not launcher.remote
            and path.exists()
            and not (path.is_file() or path.is_dir())
        ):
            raise RequestError(
                f"{option} {str(path)!r} is neither a regular file nor a folder; check the path"
            )
    task = case.question.task_row
    if request.data is not None and not task.needs_data(case.question.data):
        raise RequestError(
            f"--data: {case.name} makes its data itself; leave it out, or ask for others, as"
            f" steelyard show {case.name} lists below question.data"
        )
    if case.size == "full" and request.data is None and task.needs_data(case.question.data):
        source = catalog.find_task_source(task.name)
        get = f" (or auto, after steelyard data get {source.name})" if source is not None else ""
        raise RequestError(
            f"{case.name} at size full needs its data: give their folder with --data{get}, or try"
            " --size smoke"
        )
    # Weights of another model are refused before the memory check, which would mislead.
    if request.weights is not None and not launcher.remote and request.weights.is_dir():
        case.question.check_weights(request.weights)


def _check_scope_options(request: Request) -> None:
    """Raise RequestError if `--sample` or `--steps` is below 1, `--hang-after` or `--time-limit`
    not above 0 seconds, the task does not support `--subjects` or `--rows`, or `--rows` is combined
    with `--subjects` or `--sample`.
    """
    for option, number in (("--sample", request.sample), ("--steps", request.steps)):
        if number is not None and number < 1:
            raise RequestError(f"{option} {number}: must be at least 1")
    for option, seconds in (("--hang-after", request.hang_s), ("--time-limit", request.limit_s)):
        if seconds is not None and not seconds > 0:
            raise RequestError(f"{option} {seconds:g}: must be more than 0 seconds")
    task = request.resolved.case.question.task_row
    for option, value in (("--subjects", request.subjects), ("--rows", request.rows)):
        if value is not None and option.removeprefix("--") not in task.selects:
            raise RequestError(f"{option}: {_explain_unselectable(option, task)}")
    for option, other in (("--subjects", request.subjects), ("--sample", request.sample)):
        if request.rows is not None and other is not None:
            raise RequestError(
                f"--rows and {option}: the rows say which questions are asked; leave {option} out"
            )


def _explain_unselectable(option: str, task: Task) -> str:
    """Return the end of the error message on why a task does not take `--subjects` or `--rows`,
    with what to use instead. `option` is not used.
    """
    if task.kind_row.trains:
        return (
            f"task {task.name} trains on rows in its own order; use --sample N for a part of each"
            " batch, or --steps N"
        )
    allowed = [f"--{name}" for name in task.selects] + ["--sample N"]
    return f"task {task.name} has no such choice; allowed: {', '.join(allowed)}"


def _make_scope(request: Request) -> Scope:
    """Return the scope of the request: kind `full` without any of `--sample`, `--steps`,
    `--subjects` and `--rows`, else `window`. Of generation also how many requests are sent at
    least, and for how long: as the case or its load says, or `--sample` alone.
    """
    restrictions = (request.sample, request.steps, request.subjects, request.rows)
    case, load = request.resolved.case, request.resolved.case.question.load
    requests = None
    if load is not None:
        requests = request.sample or case.requests or load.count_default_requests(case.min_time_s)
    return Scope(
        kind="full" if all(value is None for value in restrictions) else "window",
        sample=request.sample,
        steps=request.steps,
        subjects=request.subjects,
        rows=request.rows,
        requests=requests,
        min_time_s=case.min_time_s if request.sample is None else None,
    )


def _check_devices(
    case: Case, plan: Plan, accelerator: Accelerator, is_elsewhere: bool = False
) -> None:
    """Raise RequestError if this host has no device of the accelerator, the plan needs more ranks
    than its devices can serve, or the case certainly does not fit the first device's memory,
    divided among the ranks that share it; `is_elsewhere`: the model is at a server of the user's.
    """
    devices = accelerator.find()
    if not devices:
        raise RequestError(
            f"no {accelerator.name} device was found here; see steelyard list, or try"
            " --accelerator cpu"
        )
    max_ranks = accelerator.count_workers(devices)
    if plan.devices > max_ranks:
        available = f"{len(devices)} {accelerator.name} device(s) here"
        if accelerator.divisible:
            available = f"ranks share the {accelerator.name} of this host"
        raise RequestError(f"--devices {plan.devices}: {available}; allowed: 1 to {max_ranks}")
    ranks_per_device = -(-plan.devices // len(devices))  # ranks that share a device's memory
    size = None if is_elsewhere else devices[0].memory_bytes
    memory.check_memory(case, plan, size // ranks_per_device if size is not None else None)
