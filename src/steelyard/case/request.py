"""A run as it was asked for, and what is wrong with it that can be known without starting anything."""

import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from steelyard import engines
from steelyard.case.case import Resolved
from steelyard.errors import RequestError
from steelyard.plan import degrees
from steelyard.record.record import Scope
from steelyard.run import resume
from steelyard.run.resume import Resume

# By kind of question: the passes there are, and those of a run that names none, by task where that is special. What stops
# at a target has just been evaluated when it ends.
PASSES = {"score": ("val", "infer", "bare"), "train": ("before", "train", "after")}
DEFAULT_PASSES = {"score": ("val", "infer"), "train": ("before", "train", "after"), "record": ("before", "train")}
TOKENS = "_ids.npy"  # token files are also named by what they have in common


@dataclass(frozen=True)
class Request:
    """A run as it was asked for."""

    resolved: Resolved
    engine: str = "torch"
    accelerator: str | None = None
    nodes: int = 1
    devices: int = 1
    passes: tuple[str, ...] | None = None
    sample: int | None = None
    steps: int | None = None
    resume: Path | None = None
    weights: Path | None = None
    data: Path | None = None
    tokenizer: Path | None = None
    site: Path | None = None
    out: Path = Path("records")
    hang_s: float = 1800.0
    limit_s: float | None = None


def check(request: Request) -> None:
    """What is wrong with a request and can be known without starting anything."""
    if find_spec("torch") is None:
        raise RequestError("torch is not installed, and runs need it; pip install 'steelyard[torch]', then run again")
    if request.engine not in engines.names():
        raise RequestError(f"no engine {request.engine!r}; known: {', '.join(engines.names())}")
    case = request.resolved.case
    if request.engine not in case.engines and request.engine in engines.ENGINES:
        raise RequestError(f"engine {request.engine!r} does not run {case.name}; allowed: {', '.join(case.engines)}")
    allowed = [one for one in case.divisions if one in engines.DIVISIONS.get(request.engine, case.divisions)]
    if case.question.division not in allowed:
        raise RequestError(
            f"{case.name} has no division {case.question.division!r} with engine {request.engine}; "
            f"allowed: {', '.join(allowed)}"
        )
    layout = degrees.make(case, request.nodes, request.devices, request.sample)
    if not degrees.able(request.engine, layout):
        raise RequestError(
            f"engine {request.engine} holds a whole model on each device; asked: TP{layout.tp}PP{layout.pp}DP{layout.dp}; "
            "allowed: --parallel DP"
        )
    _check_passes(case.question.kind, passes_of(request))
    if request.resume is not None and "before" in passes_of(request):
        raise RequestError("--passes: the loss before the first step is that of the run which began; leave before out")
    going_on(request)
    if case.tune.checkpoint_every is not None and case.question.train is None:
        raise RequestError(f"tune.checkpoint_every: {case.name} scores, and keeps no checkpoints; leave it out")
    if case.tune.checkpoint_every is not None and (request.out / "checkpoints").is_file():
        raise RequestError(
            f"{request.out / 'checkpoints'}: a file, where the folder of checkpoints would be; choose another --out"
        )
    for option, path in (("--weights", request.weights), ("--data", request.data), ("--tokenizer", request.tokenizer)):
        if path is not None and not path.exists() and not path.with_name(f"{path.name}{TOKENS}").exists():
            raise RequestError(f"{option} {str(path)!r} does not exist")
    if case.size == "full" and request.data is None:
        raise RequestError(f"{case.name} at size full needs its data: name their folder with --data, or try --size smoke")
    for option, number in (("--sample", request.sample), ("--steps", request.steps)):
        if number is not None and number < 1:
            raise RequestError(f"{option} {number}: must be at least 1")
    for option, seconds in (("--hang-after", request.hang_s), ("--time-limit", request.limit_s)):
        if seconds is not None and not seconds > 0:
            raise RequestError(f"{option} {seconds:g}: must be more than 0 seconds")


def passes_of(request: Request) -> tuple[str, ...]:
    if request.passes is not None:
        return request.passes
    question = request.resolved.case.question
    every = DEFAULT_PASSES.get(question.task, DEFAULT_PASSES[question.kind])
    return every if request.resume is None else tuple(name for name in every if name != "before")


def _check_passes(kind: str, passes: tuple[str, ...]) -> None:
    for name in passes:
        if name not in PASSES[kind]:
            raise RequestError(f"--passes: no pass {name!r}; allowed: {', '.join(PASSES[kind])}")
    if not passes or len(set(passes)) != len(passes):
        raise RequestError(f"--passes: name each pass once, such as {','.join(DEFAULT_PASSES[kind])}")
    if "bare" in passes and "infer" not in passes:
        raise RequestError("--passes: bare is there to be compared with infer; name both, such as infer,bare")
    if kind == "train" and ("train" not in passes or passes != tuple(one for one in PASSES[kind] if one in passes)):
        raise RequestError("--passes: training has before, train and after, in this order; train cannot be left out")


def scope(request: Request) -> Scope:
    window = request.sample is not None or request.steps is not None
    return Scope(kind="window" if window else "full", sample=request.sample, steps=request.steps)


def site(path: Path | None) -> dict[str, str]:
    """What the operator states about the machine: a small TOML file of strings."""
    if path is None:
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RequestError(f"--site {str(path)!r} cannot be read: {error}") from error
    allowed = ("machine", "network", "note")
    for key, value in table.items():
        if key not in allowed or not isinstance(value, str):
            raise RequestError(f"--site {str(path)!r}: {key!r} is not a known string; allowed: {', '.join(allowed)}")
    return table


def going_on(request: Request) -> Resume | None:
    if request.resume is None:
        return None
    return resume.find(request.resume.resolve(), request.resolved, request.sample, request.steps, request.engine)
