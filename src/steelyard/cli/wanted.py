"""Resolve the names on a command line: cases, `smoke` for every case that an engine runs at that size, and site files."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.cli.out import Output, say
from steelyard.errors import RequestError

if TYPE_CHECKING:
    from steelyard.case.case import Case
    from steelyard.case.resolve import Resolved, Source
    from steelyard.case.sweep import Point

SMOKE = "smoke"
RANDOM = "random"
ENGINE = "torch"


@dataclass(frozen=True)
class What:
    """What a command line asks to run: cases by name or as text, and what follows from a model's folder."""

    cases: "tuple[str | Source, ...]"
    engine: str
    weights: Path | None
    tokenizer: Path | None
    said: tuple[str, ...] = ()


def what(
    cases: list[str] | None,
    model: Path | None,
    task: str | None,
    engine: str | None,
    weights: str | None,
    size: str | None,
    data: Path | None = None,
    tokenizer: Path | None = None,
) -> What:
    """Cases that are named, or the one of a model's folder and a task."""
    given = None if weights in (None, RANDOM) else Path(str(weights))
    if model is None:
        if task is not None:
            raise RequestError(f"--task {task}: only with --model DIR; a case has its task")
        if not cases:
            raise RequestError("name a case, or smoke for every case, tiny; or a model's folder with --model and --task")
        return What(tuple(cases), engine or ENGINE, given, tokenizer)
    if cases:
        raise RequestError(f"--model and {cases[0]!r}: a model's case is made of its folder; drop one of them")
    if task is None:
        raise RequestError("--model needs --task: mmlu, lambada, openwebtext or alpaca")
    from steelyard.cli.own import AUTO, case_to_run
    from steelyard.data.tokenizer import present

    loads = weights is None and size != SMOKE
    if tokenizer is None and weights == RANDOM and size != SMOKE and present([model]):
        tokenizer = model
    made = case_to_run(model, task, loads, None if size == SMOKE else data, tokenizer, given)
    only = made.source.table["question"]["model"]["family"] == AUTO
    folder = model if loads and not made.random else given
    said = (f"case {made.name}, made in memory as steelyard case new makes it", *(f"  assumed: {one}" for one in made.assumed))
    engine = engine or ("transformers" if only else ENGINE)
    return What((made.source,), engine, folder, tokenizer, said)


def at(
    point: "Point",
    name: "str | Source",
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
        found = resolved(name, engine, size, precision, division, [*(settings or []), *sweep.settings(point)])
        wanted = sweep.number(point, "devices") or devices
        return [(one, number) for one, smoke in found for number in numbers(one.case, smoke, engine, wanted, accelerator)]


def resolved(
    name: "str | Source",
    engine: str,
    size: str | None,
    precision: str | None,
    division: str | None,
    settings: list[str] | None,
) -> "list[tuple[Resolved, bool]]":
    """What to run, and whether it was asked for as `smoke`: every case that the engine runs at that size, in every
    division that both have."""
    from steelyard.case import resolve
    from steelyard.engine import rows as engine_rows

    if name != SMOKE:
        return [(resolve.resolve(name, size, precision, division, settings), False)]
    if size not in (None, SMOKE):
        raise RequestError(f"smoke --size {size}: smoke runs every case at size smoke; name a case to use --size {size}")
    row = engine_rows.row(engine)
    out: list[tuple[Resolved, bool]] = []
    for known in resolve.names():
        found = resolve.resolve(known, SMOKE, precision, division, settings).case
        if row.refusal(found) is not None:
            continue
        able = [one for one in found.divisions if one in row.divisions]
        for one in [division] if division else able:
            out.append((resolve.resolve(known, SMOKE, precision, one, settings), True))
    return out


def numbers(case: "Case", smoke: bool, engine: str, devices: int | None, accelerator: str | None) -> list[int]:
    """The number of devices that was asked for, else 1; for `smoke` those of the case that can be had here, with this
    engine, and 1 in any case."""
    from steelyard import accelerators
    from steelyard.engine import rows as engine_rows
    from steelyard.plan import degrees

    if devices is not None or not smoke or max(case.devices) == 1:
        return [1 if devices is None else devices]
    row = accelerators.named(accelerator) if accelerator else accelerators.detect()
    most = row.most(row.find())
    divides = engine_rows.row(engine)
    able = [n for n in case.devices if n <= most and divides.divides(degrees.make(case, 1, n))]
    return able or [1]


def site_file(named: Path | None, output: Output) -> Path | None:
    """Return the site file to use, and say which one is used unasked and which one is left out."""
    from steelyard.run import site

    path = site.find(named)
    if path is not None and named is None and not output.silent:
        say(f"site: {path}")
    left_out = site.unused(path)
    if left_out is not None:
        say(f"warning: {left_out} in this folder is not used; to use it: --site {left_out}")
    return path
