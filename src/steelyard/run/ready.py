"""Turn a request into a run that can start: check all that can be known without starting a process.

`check_request` is called by the command (cli/runs.py) once per run and raises RequestError or
EngineError for the first problem. What it returns goes to run/parent.py. What only other hosts know
is checked later, in run/preflight.py.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from steelyard import accelerators
from steelyard.accelerators.row import Accelerator
from steelyard.case.case import Case
from steelyard.case.precision import name_of
from steelyard.case.request import Request
from steelyard.case.resolve import Resolved
from steelyard.data.corpus import IDS
from steelyard.engine import rows as engine_rows
from steelyard.engine.rows import EngineRow
from steelyard.errors import EngineError, RequestError
from steelyard.metrics import verify
from steelyard.plan import degrees, memory
from steelyard.plan.degrees import Plan
from steelyard.record.facts import Restart
from steelyard.record.record import Scope
from steelyard.run import launch, processes, site
from steelyard.run.failure import UNFINISHED
from steelyard.run.launch import Launcher
from steelyard.run.site import Site
from steelyard.sources import table
from steelyard.tasks.task import Task
from steelyard.training import checkpoints
from steelyard.training.checkpoints import Before, CheckpointRun, State

PROGRAM = "run.py"  # a checkout of the program has this file


@dataclass(frozen=True)
class Resume:
    """The checkpoint from which a training run continues, as found through `--resume`."""

    path: Path
    state: State
    record: str | None  # id of the record through which it was found; None: by its folder
    before: list[dict[str, Any]]  # each replica's held-out answers before step 1
    passed_over: list[str]  # names of later checkpoints that are damaged

    def restart(self, out: Path) -> Restart:
        """Return what the record of the continuing run, which is written to folder `out`, states
        about the checkpoint; the path of the checkpoints is relative to `out`.
        """
        return Restart(
            record=self.record,
            checkpoints=os.path.relpath(self.path.parent, out.resolve()),
            step=self.state.step,
            plan=str(self.state.plan),
            passed_over=self.passed_over,
            losses=self.state.losses,
        )


@dataclass(frozen=True)
class Ready:
    """A request that passed all checks, with the rows and settings that were looked up for it:
    engine, accelerator, launcher, site, plan, passes, scope and the checkpoint to resume from.
    """

    request: Request
    engine: EngineRow
    accelerator: Accelerator | None  # None: found on the remote hosts
    plan: Plan
    launcher: Launcher
    passes: tuple[str, ...]
    scope: Scope
    site: Site
    resume: Resume | None

    @property
    def case(self) -> Case:
        """The case of the request, with all values resolved."""
        return self.request.resolved.case

    def with_resolved(self, resolved: Resolved) -> "Ready":
        """Return a copy whose request has another resolved case, such as one with other tune
        values; nothing is checked again.
        """
        return replace(self, request=replace(self.request, resolved=resolved))


def ready(request: Request) -> Ready:
    """Check a request and return it with everything that was looked up for it; start no process.

    Raises RequestError, or its subclass EngineError where another engine could do it, with one line
    for the first problem: site file, launcher, engine, plan, passes, checkpoint, paths, options,
    data, weights, devices, memory. With a launcher that starts agents on other hosts, paths and
    devices are not checked here. Without `--accelerator`, a local run detects one.
    """
    processes.check()
    case, engine = request.resolved.case, engine_rows.row(request.engine)
    where = site.read(site.find(request.site))
    launcher = launch.named(request.launcher or where.launcher or "local")
    _check_engine(case, engine, launcher.remote or request.engine_settings.python is not None)
    _check_checkout(request, engine, launcher)
    plan = degrees.make(case, request.nodes, request.devices, request.sample, launcher.name)
    if not launcher.scheduler:
        launch.hosts(launcher, where, plan.nodes)
    _check_able(request, engine, plan, launcher)
    passes = _passes(request, engine)
    earlier = find_checkpoint(request)
    _check_files(request, launcher)
    _check_part(request)
    if request.data is not None and not launcher.remote:
        # a quick check; the workers read all of it later
        case.question.row.check_data(request.data)
    accelerator = accelerators.named(request.accelerator) if request.accelerator else None
    if not launcher.remote:
        accelerator = accelerator or accelerators.detect()
        _check_devices(case, plan, accelerator)
    return Ready(
        request=request,
        engine=engine,
        accelerator=accelerator,
        plan=plan,
        launcher=launcher,
        passes=passes,
        scope=_scope(request),
        site=where,
        resume=earlier,
    )


def _check_engine(case: Case, engine: EngineRow, elsewhere: bool) -> None:
    """Raise EngineError if the engine cannot run the case's question, division or precision, or,
    unless `in_other_python`, if a package that it needs is not installed here.

    `in_other_python`: workers run in another Python (other hosts, or `engine.python`), whose
    packages the node agent checks.
    """
    question = case.question
    refused = engine.refusal(case)
    if refused is not None:
        raise EngineError(refused)
    allowed = [one for one in case.divisions if one in engine.divisions]
    if question.division not in allowed:
        raise EngineError(
            f"{case.name} has no division {question.division!r} with engine {engine.name}; allowed:"
            f" {', '.join(allowed)}"
        )
    if question.precision.matmul not in engine.precisions:
        raise EngineError(
            f"engine {engine.name} has no matmuls in {question.precision.matmul}; allowed:"
            f" {', '.join(engine.precisions)}"
        )
    named = name_of(question.kind, question.precision.model_dump())
    if question.kind_row.trains and named not in engine.trains_in:
        raise EngineError(
            f"engine {engine.name} does not train in {named}; allowed:"
            f" {', '.join(engine.trains_in)}"
        )
    missing = engine.missing()  # last: nobody should install an engine that cannot run the case
    if missing is not None and not elsewhere:
        raise EngineError(
            f"{missing} is not installed, and engine {engine.name} needs it; pip install"
            f" 'steelyard[{engine.extra}]', then run again"
        )


def _check_checkout(request: Request, engine: EngineRow, launcher: Launcher) -> None:
    """Check `--nodes` and `engine.checkout` against the engine: raise EngineError for several nodes
    on a single-host engine or a missing checkout, RequestError for a checkout that is not needed
    or, on a local run, has no run.py.
    """
    if request.nodes > 1 and not engine.several_hosts:
        raise EngineError(
            f"--nodes {request.nodes}: engine {engine.name} runs on one host; allowed: --nodes 1"
        )
    found = request.engine_settings.checkout
    if not engine.checkout:
        if found is not None:
            raise RequestError(
                f"engine.checkout: engine {engine.name} needs no checkout; leave it out"
            )
        return
    if found is None:
        raise EngineError(
            f"engine {engine.name} runs a checkout of {engine.checkout}; name it: --set"
            " engine.checkout=DIR"
        )
    if not launcher.remote and not (found / PROGRAM).is_file():
        raise RequestError(
            f"engine.checkout {str(found)!r}: no {PROGRAM} in it; name a checkout of"
            f" {engine.checkout}"
        )


def _check_able(request: Request, engine: EngineRow, plan: Plan, launcher: Launcher) -> None:
    """Raise EngineError for a parallel plan, checkpoints or `--explain` that the engine does not
    support, and RequestError for `--trace` with a remote launcher.
    """
    if not engine.divides(plan):
        allowed = "".join(name.upper() for name in engine_rows.DEGREES if name in engine.degrees)
        raise EngineError(
            f"engine {engine.name} holds a whole model on each device; asked: {plan}; allowed:"
            f" --parallel {allowed}"
        )
    given = {
        "--resume": request.resume,
        "tune.checkpoint_every": request.resolved.case.tune.checkpoint_every,
    }
    for name, value in given.items():
        if value is not None and not engine.checkpoints:
            raise EngineError(f"{name}: engine {engine.name} has no checkpoints; leave it out")
    profiled = [row.name for row in engine_rows.frameworks().values() if row.profiler]
    if request.explain and engine.framework not in profiled:
        raise EngineError(
            f"--explain: engine {engine.name} has no profiler; allowed: engines on"
            f" {', '.join(profiled)}"
        )
    if request.trace and launcher.remote:
        raise RequestError(
            "--trace: the trace is left on the host of rank 0; allowed: --launcher local"
        )


def _passes(request: Request, engine: EngineRow) -> tuple[str, ...]:
    """Return the names of the passes to run, in order: those of `--passes`, else the task's default
    passes that the engine has (without the initial ones for a resumed run).

    Raises RequestError if named passes are unknown, repeated, out of order, lack a required pass,
    lack the pass that a bare pass is compared with, or come before the first step of a resumed run;
    EngineError if only this engine lacks a pass.
    """
    row = request.resolved.case.question.row
    kind = row.kind_row
    every = tuple(name for name in kind.passes if engine.passes is None or name in engine.passes)
    if request.passes is None:
        usual = tuple(name for name in row.passes if name in every)
        return (
            tuple(name for name in usual if name not in kind.initial) if request.resume else usual
        )
    passes = request.passes
    for name in passes:
        if name not in every:
            # another engine may have it
            error = EngineError if name in kind.passes else RequestError
            raise error(f"--passes: no pass {name!r}; allowed: {', '.join(every)}")
    if not passes or len(set(passes)) != len(passes):
        raise RequestError(f"--passes: name each pass once, such as {','.join(row.passes)}")
    for bare, measured in kind.bare.items():
        if bare in passes and measured not in passes:
            raise RequestError(
                f"--passes: {bare} is compared with {measured}; name both, such as"
                f" {measured},{bare}"
            )
    lacks = not set(kind.required) <= set(passes)
    if lacks or (kind.ordered and passes != tuple(one for one in every if one in passes)):
        order = ", in this order" if kind.ordered else ""
        required = f"; {', '.join(kind.required)} is required" if kind.required else ""
        raise RequestError(f"--passes: {kind.noun} has {', '.join(kind.passes)}{order}{required}")
    early = [name for name in passes if name in kind.initial]
    if request.resume is not None and early:
        raise RequestError(f"--passes: a resumed run has no pass {early[0]}; leave it out")
    return passes


def find_checkpoint(request: Request) -> Resume | None:
    """Return the last undamaged checkpoint of the run that `--resume` names by its record file or
    its checkpoint folder; None without `--resume`.

    Raises RequestError if the case is no training case, the checkpoint is of another question,
    sample or engine, its losses do not match its step, or no step is left because the target or the
    last step was reached.
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
            f"--resume: {resolved.case.name} is an inference case, which cannot resume; leave"
            " --resume out"
        )
    folder, name = (source, None) if source.is_dir() else _named(source)
    path, state, passed_over = checkpoints.last(folder)
    run, asked = (
        checkpoints.read(folder / checkpoints.RUN, CheckpointRun),
        resolved.case.question.model_dump(mode="json"),
    )
    checkpoints.check_same(run, resolved.case.name, asked, request.sample, request.engine)
    wanted = train.steps if request.steps is None else request.steps
    if state.reached:
        raise RequestError(
            f"--resume: the target was reached after step {state.step}; nothing is left to do"
        )
    if state.step >= wanted:
        raise RequestError(
            f"--resume: {path} is after step {state.step} of {wanted}; nothing is left to do"
        )
    if len(state.losses) != state.step:
        raise RequestError(
            f"{path / checkpoints.STATE}: {len(state.losses)} losses of {state.step} steps"
        )
    before = sorted(folder.glob(checkpoints.BEFORE.format("*")))
    return Resume(
        path, state, name, [checkpoints.read(one, Before).table for one in before], passed_over
    )


def _named(source: Path) -> tuple[Path, str]:
    """Return the folder of a record's checkpoints and the record's id.

    If its run left no finished checkpoint, this is the folder of the run that it had resumed from,
    if that has one. Raises RequestError if the record does not verify, its run reached its target,
    it names no checkpoints, or its unfinished run's folders do not exist.
    """
    found = verify.read(source)
    stopped = None if found.answers is None else found.task.stopped(found.answers)
    if stopped is not None and stopped.why == "target":
        raise RequestError(
            f"--resume: the run of {source} reached its target; nothing is left to do"
        )
    places = [found.checkpoints, *(one.checkpoints for one in reversed(found.restarts))]
    folders = [source.parent / place for place in places if isinstance(place, str)]
    if not folders:
        raise RequestError(
            f"--resume: the run of {source} has no checkpoints; train with --checkpoint-every N to"
            " save some"
        )
    unfinished = any(reason.code == UNFINISHED.code for reason in found.reasons)
    if unfinished and not any(folder.is_dir() for folder in folders):
        raise RequestError(
            f"--resume: {source} names the folder {str(folders[0])!r}, which is not there; if the"
            " record was moved, give that folder itself, else the run did not get to its first"
            " checkpoint: run it again without --resume"
        )
    return next((folder for folder in folders if checkpoints.whole(folder)), folders[0]), found.id


def _check_files(request: Request, launcher: Launcher) -> None:
    """Raise RequestError if `--weights`, `--data` or `--tokenizer` name nothing usable, data are
    missing at size full, checkpoints cannot be kept, or weights in a folder are not of the case's
    model.

    Paths are not looked at for a remote launcher. Token files may also be named by their common
    prefix.
    """
    case = request.resolved.case
    keeps = case.tune.checkpoint_every is not None
    if keeps and case.question.train is None:
        raise RequestError(
            f"tune.checkpoint_every: {case.name} is an inference case without checkpoints; leave"
            " it out"
        )
    if keeps and (request.out / "checkpoints").is_file():
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
            and not path.with_name(f"{path.name}{IDS}").exists()
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
    if case.size == "full" and request.data is None:
        source = table.of_task(case.question.row.name)
        get = f" (or auto, after steelyard data get {source.name})" if source is not None else ""
        raise RequestError(
            f"{case.name} at size full needs its data: give their folder with --data{get}, or try"
            " --size smoke"
        )
    # Weights of another model are refused before the memory check, which would mislead.
    if request.weights is not None and not launcher.remote and request.weights.is_dir():
        case.question.check_weights(request.weights)


def _check_part(request: Request) -> None:
    """Raise RequestError if `--sample`, `--steps`, `--hang-after` or `--time-limit` are out of
    range, the task does not support `--subjects` or `--rows`, or `--rows` is combined with
    `--subjects` or `--sample`.
    """
    for option, number in (("--sample", request.sample), ("--steps", request.steps)):
        if number is not None and number < 1:
            raise RequestError(f"{option} {number}: must be at least 1")
    for option, seconds in (("--hang-after", request.hang_s), ("--time-limit", request.limit_s)):
        if seconds is not None and not seconds > 0:
            raise RequestError(f"{option} {seconds:g}: must be more than 0 seconds")
    row = request.resolved.case.question.row
    for option, value in (("--subjects", request.subjects), ("--rows", request.rows)):
        if value is not None and option.removeprefix("--") not in row.selects:
            raise RequestError(f"{option}: {_not_selected(option, row)}")
    for option, other in (("--subjects", request.subjects), ("--sample", request.sample)):
        if request.rows is not None and other is not None:
            raise RequestError(
                f"--rows and {option}: the rows say which questions are asked; leave {option} out"
            )


def _not_selected(option: str, row: Task) -> str:
    """Return the message on why a task does not take `--subjects` or `--rows`, with the options
    that it does take.
    """
    if row.kind_row.trains:
        return (
            f"task {row.name} trains on rows in its own order; use --sample N for a part of each"
            " batch, or --steps N"
        )
    allowed = [f"--{name}" for name in row.selects] + ["--sample N"]
    return f"task {row.name} has no such choice; allowed: {', '.join(allowed)}"


def _scope(request: Request) -> Scope:
    """Return the scope of the request: kind `full` without any of `--sample`, `--steps`,
    `--subjects` and `--rows`, else `window`.
    """
    part = (request.sample, request.steps, request.subjects, request.rows)
    return Scope(
        kind="full" if all(one is None for one in part) else "window",
        sample=request.sample,
        steps=request.steps,
        subjects=request.subjects,
        rows=request.rows,
    )


def _check_devices(case: Case, plan: Plan, accelerator: Accelerator) -> None:
    """Raise RequestError if this host has no device of the accelerator, fewer than the plan needs,
    or if the case certainly does not fit a device's memory.
    """
    found = accelerator.find()
    if not found:
        raise RequestError(
            f"no {accelerator.name} device was found here; see steelyard list, or try"
            " --accelerator cpu"
        )
    most = accelerator.most(found)
    if plan.devices > most:
        here = f"{len(found)} {accelerator.name} device(s) here"
        if accelerator.divisible:
            here = f"ranks share the {accelerator.name} of this host"
        raise RequestError(f"--devices {plan.devices}: {here}; allowed: 1 to {most}")
    sharing = -(-plan.devices // len(found))  # ranks that share a device's memory
    size = found[0].memory_bytes
    memory.check_fits(case, plan, size // sharing if size is not None else None)
