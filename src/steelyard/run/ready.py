"""From a request to a run that can start: everything that can be known without starting anything, worked out once."""

from dataclasses import dataclass, replace

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
from steelyard.plan import degrees, memory
from steelyard.plan.degrees import Plan
from steelyard.record.record import Scope
from steelyard.run import launch, processes, resume, site
from steelyard.run.launch import Launcher
from steelyard.run.resume import Resume
from steelyard.run.site import Site
from steelyard.sources import table
from steelyard.tasks.task import Task

PROGRAM = "run.py"  # what a checkout of a program is known by


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
    """A wrong request raises RequestError: one line, and nothing was started. What other hosts have, they say later."""
    processes.check()
    case, engine = request.resolved.case, engine_rows.row(request.engine)
    where = site.read(site.find(request.site))
    launcher = launch.named(request.launcher or where.launcher or "local")
    _check_engine(case, engine, launcher.remote or request.engine_settings.python is not None)
    _check_checkout(request, engine, launcher)
    plan = degrees.make(case, request.nodes, request.devices, request.sample, launcher.name)
    if not launcher.scheduler:
        launch.hosts(launcher, where, plan.nodes)
    _check_degrees(engine, plan)
    _check_checkpoints(request, engine)
    _check_explain(request, engine, launcher)
    passes = _passes(request, engine)
    earlier = _resume(request)
    _check_files(request, launcher)
    _check_numbers(request)
    _check_selection(request)
    _check_data(request, launcher)
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
            f"{case.name} has no division {question.division!r} with engine {engine.name}; allowed: {', '.join(allowed)}"
        )
    if question.precision.matmul not in engine.precisions:
        raise EngineError(
            f"engine {engine.name} has no matmuls in {question.precision.matmul}; allowed: {', '.join(engine.precisions)}"
        )
    named = name_of(question.kind, question.precision.model_dump())
    if question.kind_row.trains and named not in engine.trains_in:
        raise EngineError(f"engine {engine.name} does not train in {named}; allowed: {', '.join(engine.trains_in)}")
    missing = engine.missing()  # last: nobody should install what cannot do the case
    if missing is not None and not elsewhere:
        raise EngineError(
            f"{missing} is not installed, and engine {engine.name} needs it; pip install 'steelyard[{engine.extra}]', "
            "then run again"
        )


def _check_checkout(request: Request, engine: EngineRow, launcher: Launcher) -> None:
    """The folder of a program that the engine starts, and where it can."""
    if request.nodes > 1 and not engine.several_hosts:
        raise EngineError(f"--nodes {request.nodes}: engine {engine.name} runs on one host; allowed: --nodes 1")
    found = request.engine_settings.checkout
    if not engine.checkout:
        if found is not None:
            raise RequestError(f"engine.checkout: engine {engine.name} needs no checkout; leave it out")
        return
    if found is None:
        raise EngineError(f"engine {engine.name} runs a checkout of {engine.checkout}; name it: --set engine.checkout=DIR")
    if not launcher.remote and not (found / PROGRAM).is_file():
        raise RequestError(f"engine.checkout {str(found)!r}: no {PROGRAM} in it; name a checkout of {engine.checkout}")


def _check_degrees(engine: EngineRow, plan: Plan) -> None:
    if not engine.divides(plan):
        allowed = "".join(name.upper() for name in engine_rows.DEGREES if name in engine.degrees)
        raise EngineError(
            f"engine {engine.name} holds a whole model on each device; asked: {plan}; allowed: --parallel {allowed}"
        )


def _check_checkpoints(request: Request, engine: EngineRow) -> None:
    """Said before anything is written."""
    if engine.checkpoints:
        return
    given = {"--resume": request.resume, "tune.checkpoint_every": request.resolved.case.tune.checkpoint_every}
    for name, value in given.items():
        if value is not None:
            raise EngineError(f"{name}: engine {engine.name} has no checkpoints; leave it out")


def _check_explain(request: Request, engine: EngineRow, launcher: Launcher) -> None:
    profiled = [row.name for row in engine_rows.frameworks().values() if row.profiler]
    if request.explain and engine.framework not in profiled:
        raise EngineError(f"--explain: engine {engine.name} has no profiler; allowed: engines on {', '.join(profiled)}")
    if request.trace and launcher.remote:
        raise RequestError("--trace: the trace is left on the host of rank 0; allowed: --launcher local")


def _passes(request: Request, engine: EngineRow) -> tuple[str, ...]:
    """The passes of a run: those that were named, or the task's, as far as the engine has them."""
    row = request.resolved.case.question.row
    kind = row.kind_row
    every = tuple(name for name in kind.passes if engine.passes is None or name in engine.passes)
    if request.passes is None:
        usual = tuple(name for name in row.passes if name in every)
        return tuple(name for name in usual if name not in kind.initial) if request.resume else usual
    passes = request.passes
    for name in passes:
        if name not in every:
            error = EngineError if name in kind.passes else RequestError  # another engine may have it
            raise error(f"--passes: no pass {name!r}; allowed: {', '.join(every)}")
    if not passes or len(set(passes)) != len(passes):
        raise RequestError(f"--passes: name each pass once, such as {','.join(row.passes)}")
    for bare, measured in kind.bare.items():
        if bare in passes and measured not in passes:
            raise RequestError(f"--passes: {bare} is compared with {measured}; name both, such as {measured},{bare}")
    lacks = not set(kind.required) <= set(passes)
    if lacks or (kind.ordered and passes != tuple(one for one in every if one in passes)):
        order = ", in this order" if kind.ordered else ""
        required = f"; {', '.join(kind.required)} is required" if kind.required else ""
        raise RequestError(f"--passes: {kind.noun} has {', '.join(kind.passes)}{order}{required}")
    early = [name for name in passes if name in kind.initial]
    if request.resume is not None and early:
        raise RequestError(f"--passes: a resumed run has no pass {early[0]}; leave it out")
    return passes


def _resume(request: Request) -> Resume | None:
    if request.resume is None:
        return None
    return resume.find(request.resume.resolve(), request.resolved, request.sample, request.steps, request.engine)


def _check_files(request: Request, launcher: Launcher) -> None:
    case = request.resolved.case
    keeps = case.tune.checkpoint_every is not None
    if keeps and case.question.train is None:
        raise RequestError(f"tune.checkpoint_every: {case.name} is an inference case without checkpoints; leave it out")
    if keeps and (request.out / "checkpoints").is_file():
        raise RequestError(f"{request.out / 'checkpoints'} is a file, not a folder for checkpoints; choose another --out")
    for option, path in (("--weights", request.weights), ("--data", request.data), ("--tokenizer", request.tokenizer)):
        # Token files are also named by what they have in common.
        if path is not None and not launcher.remote and not path.exists() and not path.with_name(f"{path.name}{IDS}").exists():
            raise RequestError(f"{option} {str(path)!r} does not exist; check the path")
        if path is not None and not launcher.remote and path.exists() and not (path.is_file() or path.is_dir()):
            raise RequestError(f"{option} {str(path)!r} is neither a regular file nor a folder; check the path")
    if case.size == "full" and request.data is None:
        source = table.of_task(case.question.row.name)
        get = f" (or auto, after steelyard data get {source.name})" if source is not None else ""
        raise RequestError(f"{case.name} at size full needs its data: give their folder with --data{get}, or try --size smoke")
    # Weights of another model are named as such before anybody asks whether the case's has room.
    if request.weights is not None and not launcher.remote and request.weights.is_dir():
        case.question.check_weights(request.weights)


def _check_data(request: Request, launcher: Launcher) -> None:
    """Files that are not the task's data are refused before anything is started; a worker reads all
    of them."""
    if request.data is not None and not launcher.remote:
        request.resolved.case.question.row.check_data(request.data)


def _check_numbers(request: Request) -> None:
    for option, number in (("--sample", request.sample), ("--steps", request.steps)):
        if number is not None and number < 1:
            raise RequestError(f"{option} {number}: must be at least 1")
    for option, seconds in (("--hang-after", request.hang_s), ("--time-limit", request.limit_s)):
        if seconds is not None and not seconds > 0:
            raise RequestError(f"{option} {seconds:g}: must be more than 0 seconds")


def _check_selection(request: Request) -> None:
    """What is named of the data, and whether the options that name it make sense together."""
    row = request.resolved.case.question.row
    given = {"--subjects": request.subjects, "--rows": request.rows}
    for option, value in given.items():
        if value is not None and option.removeprefix("--") not in row.selects:
            raise RequestError(f"{option}: {_not_selected(option, row)}")
    if request.rows is not None and request.subjects is not None:
        raise RequestError("--rows and --subjects: the rows say which questions are asked; leave --subjects out")
    if request.rows is not None and request.sample is not None:
        raise RequestError("--rows and --sample: the rows say which questions are asked; leave --sample out")


def _not_selected(option: str, row: Task) -> str:
    if row.kind_row.trains:
        return f"task {row.name} trains on rows in its own order; use --sample N for a part of each batch, or --steps N"
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
        raise RequestError(f"no {accelerator.name} device was found here; see steelyard list, or try --accelerator cpu")
    most = accelerator.most(found)
    if plan.devices > most:
        here = f"{len(found)} {accelerator.name} device(s) here"
        if accelerator.divisible:
            here = f"ranks share the {accelerator.name} of this host"
        raise RequestError(f"--devices {plan.devices}: {here}; allowed: 1 to {most}")
    sharing = -(-plan.devices // len(found))  # ranks that have one device's memory between them
    size = found[0].memory_bytes
    memory.check_fits(case, plan, size // sharing if size is not None else None)
