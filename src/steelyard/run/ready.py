"""From a request to a run that can start: everything that can be known without starting anything,
worked out once.
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

PROGRAM = "run.py"  # what a checkout of a program is known by


@dataclass(frozen=True)
class Resume:
    """The checkpoint that a run continues from."""

    path: Path
    state: State
    record: str | None  # the id of the record that named it
    before: list[dict[str, Any]]  # what each replica found on held-out data before the first step
    passed_over: list[str]  # later checkpoints, which are damaged

    def restart(self, out: Path) -> Restart:
        """Return what the record of the run that continues, which lies in `out`, states of it."""
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
    """A request that can be carried out."""

    request: Request
    engine: EngineRow
    accelerator: Accelerator | None  # None: the hosts will say
    plan: Plan
    launcher: Launcher
    passes: tuple[str, ...]
    scope: Scope
    site: Site
    resume: Resume | None

    @property
    def case(self) -> Case:
        return self.request.resolved.case

    def with_resolved(self, resolved: Resolved) -> "Ready":
        """The same with other tunes."""
        return replace(self, request=replace(self.request, resolved=resolved))


def ready(request: Request) -> Ready:
    """A wrong request raises RequestError: one line, and nothing was started. What other hosts
    have, they say later.
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
        # before anything is started; a worker reads all of it
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
    """`elsewhere`: workers run in another Python than this one, and their agent says what that has."""
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
    missing = engine.missing()  # last: nobody should install what cannot do the case
    if missing is not None and not elsewhere:
        raise EngineError(
            f"{missing} is not installed, and engine {engine.name} needs it; pip install"
            f" 'steelyard[{engine.extra}]', then run again"
        )


def _check_checkout(request: Request, engine: EngineRow, launcher: Launcher) -> None:
    """The folder of a program that the engine starts, and where it can."""
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
    """Raise RequestError for a plan, checkpoints or a profile that the engine or the launcher does
    not have.
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
    """The passes of a run: those that were named, or the task's, as far as the engine has them."""
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
    """Return the last whole checkpoint of the run that `--resume` names by its record or its
    folder, or None without `--resume`. Raise RequestError if it is of another question, or nothing
    is left to do."""
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
    """Return the folder of a record's checkpoints and the record's id; if its run died before its
    first checkpoint, the folder that it continued from."""
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
        # Token files are also named by what they have in common.
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
    # Weights of another model are named as such before anybody asks whether the case's has room.
    if request.weights is not None and not launcher.remote and request.weights.is_dir():
        case.question.check_weights(request.weights)


def _check_part(request: Request) -> None:
    """Raise RequestError for options that select a part of the case's work and are out of range,
    not the task's, or contradict each other."""
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
    if row.kind_row.trains:
        return (
            f"task {row.name} trains on rows in its own order; use --sample N for a part of each"
            " batch, or --steps N"
        )
    allowed = [f"--{name}" for name in row.selects] + ["--sample N"]
    return f"task {row.name} has no such choice; allowed: {', '.join(allowed)}"


def _scope(request: Request) -> Scope:
    part = (request.sample, request.steps, request.subjects, request.rows)
    return Scope(
        kind="full" if all(one is None for one in part) else "window",
        sample=request.sample,
        steps=request.steps,
        subjects=request.subjects,
        rows=request.rows,
    )


def _check_devices(case: Case, plan: Plan, accelerator: Accelerator) -> None:
    """What this host has, before the first of many requests is run."""
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
    sharing = -(-plan.devices // len(found))  # ranks that have one device's memory between them
    size = found[0].memory_bytes
    memory.check_fits(case, plan, size // sharing if size is not None else None)
