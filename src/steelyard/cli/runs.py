"""The runs of a command, one after the other, and what is printed of them: a table of runs, of the
points of a sweep, or of engines side by side."""

import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from steelyard import report
from steelyard.case import resolve, sweep
from steelyard.case.request import Request
from steelyard.case.sweep import Axis
from steelyard.cli.out import Output, dump, is_terminal, one_line, paged, say, say_status, tell
from steelyard.cli.progress import Display
from steelyard.errors import EngineError, LostError, RequestError
from steelyard.metrics import engines
from steelyard.record import record, signature
from steelyard.record.record import Record
from steelyard.report import groups
from steelyard.run import launch, parent, reproduce
from steelyard.run.launch import Allocation
from steelyard.run.ready import Ready, ready

QUEUE_S = 10  # between two lines on the wait in a queue


@dataclass(frozen=True)
class Turn:
    """One run in the order of a command: what it runs, the place of its request among those of the
    command, a line that is printed before it, and the record of an earlier run that is taken
    instead, with its path."""

    ready: Ready
    place: int = 0
    heading: str = ""
    there: tuple[Path, Record] | None = None


Made = tuple[Turn, Record]


@dataclass(frozen=True)
class LeftOut:
    """An engine that does not take part, and why."""

    engine: str
    case: str
    reason: str

    def say(self) -> None:
        say(f"left out: {self.engine}: {one_line(self.reason)}")


def run_each(requests: list[Request], output: Output) -> int:
    """Run every request, print the table of runs, and return the exit code: 0 where all are
    valid."""
    # all before the first is run
    turns = [Turn(ready(request), place) for place, request in enumerate(requests)]
    made = carry_out_all(turns, output)

    def show(records: list[Record]) -> None:
        tell(paged(report.table(records), output.wide))
        show_repeats(records, output.wide)

    return _finish(made, len(turns), output, show, lambda records: {})


def run_sweep(requests: list[Request], axes: tuple[Axis, ...], times: int, output: Output) -> int:
    """Run each point `times` times, less the valid records that are there, and print the table of
    points. Return 0 where every point has its valid records."""
    runs = [_ready_at_point(request) for request in requests]  # all of them before the first is run
    _check_different(runs)
    found, warnings = reproduce.find_earlier(requests[0].out, runs)
    for warning in warnings:
        say(f"warning: {one_line(warning)}")
    turns: list[Turn] = []
    for place, (one, there) in enumerate(zip(runs, found, strict=True)):
        heading = f"point {place + 1} of {len(runs)}: {_title(one, runs)}"
        known = [*there[:times], *[None] * (times - len(there))]
        turns += [
            Turn(one, place, "" if number else heading, record)
            for number, record in enumerate(known)
        ]
    made = carry_out_all(turns, output)
    over_devices = any(axis.key in sweep.DEVICES for axis in axes)
    by_point: dict[int, list[Made]] = {}
    for run in made:
        by_point.setdefault(run[0].place, []).append(run)
    repeated = [one for every in by_point.values() if len(every) > 1 for _, one in every]

    def show(records: list[Record]) -> None:
        names = [_point_name(turn.ready) for turn, _ in made]
        tell(paged(report.table(records, points=names), output.wide))
        show_repeats(repeated, output.wide)
        page = report.scaling(records) if over_devices else None
        if page is not None:
            tell("\n" + paged(page, output.wide))
        elif over_devices:
            say("no scaling table: it needs valid records with two device counts")

    def table(records: list[Record]) -> dict[str, Any]:
        keys = {axis.key: [resolve.typed(value) for value in axis.values] for axis in axes}
        points = [_point_table(every) for every in by_point.values()]
        scaling = _tables(groups.scaling(records)) if over_devices else []
        return {
            "repeats": _tables(groups.repeats(repeated)),
            "sweep": {"keys": keys, "points": points, "scaling": scaling},
        }

    return _finish(made, len(turns), output, show, table)


def run_engines(requests: list[Request], times: int, output: Output) -> int:
    """Run every engine once, then every engine again, `times` times, so that what changes on the
    machine meanwhile meets all alike, and print them side by side. Return 0 where all runs are
    valid; an engine that cannot do the case is no error while one can."""
    runs, left_out = able(requests)
    # several cases may have one reason
    for one in {f"{one.engine}: {one.reason}": one for one in left_out}.values():
        one.say()
    late: list[LeftOut] = []
    turns = [Turn(one, place) for _ in range(times) for place, one in enumerate(runs)]
    made = carry_out_all(turns, output, late)
    if not made:
        raise RequestError(_no_engine(late))

    def show(records: list[Record]) -> None:
        page = report.engines(records)
        compared = [record for group in engines.groups(records) for record in group.records]
        if page is None or len(compared) < len(records):
            tell(paged(report.table(records), output.wide))
        if page is not None:
            tell(paged(page, output.wide))
        else:
            say("no engine table: it needs finished runs of two engines")
        show_repeats(records, output.wide)

    def table(records: list[Record]) -> dict[str, Any]:
        reasons = [asdict(one) for one in (*left_out, *late)]
        return {"engines": {"left_out": reasons, "groups": _tables(groups.engines(records))}}

    return _finish(made, times * (len(runs) - len(late)), output, show, table)


def carry_out_all(
    turns: list[Turn], output: Output, left_out: list[LeftOut] | None = None
) -> list[Made]:
    """Carry out the turns in order and return each with its record; an interrupted run is the last.
    What only a host or a worker finds wrong with a request raises RequestError, or is printed and
    added to `left_out`, and no other turn of that request is run."""
    made: list[Made] = []
    dropped: set[int] = set()
    with _hosts([turn.ready for turn in turns if turn.there is None], output) as allocation:
        for number, turn in enumerate(turns, 1):
            if turn.place in dropped:
                continue
            if turn.heading and not output.silent:
                say(turn.heading)
            if turn.there is not None:
                if not output.silent:
                    say(f"already there: {turn.there[0]}")
                made.append((turn, turn.there[1]))
                continue
            point = turn.ready.request.point
            try:
                with sweep.named(point):
                    # a point has a heading of its own
                    place = (1, 1) if point else (number, len(turns))
                    made.append((turn, carry_out(turn.ready, output, allocation, place)))
            except RequestError as error:
                if left_out is None:
                    raise
                left_out.append(
                    LeftOut(turn.ready.request.engine, turn.ready.case.name, str(error))
                )
                left_out[-1].say()
                dropped.add(turn.place)
                continue
            if interrupted(made[-1][1]):
                break
    return made


def carry_out(
    one: Ready, output: Output, allocation: Allocation | None, place: tuple[int, int]
) -> Record:
    """Carry out one run, with what a user sees of it, and return its record; `place` is its number
    of how many."""
    number, runs = place
    title = f"[{number}/{runs}] {label(one.request)}" if runs > 1 else label(one.request)
    with Display(Console(stderr=True, quiet=output.silent), title, alone=runs == 1) as display:
        made, path = parent.run_case(
            one, display.show, allocation, lambda warning: say(f"warning: {warning}")
        )
    if not output.silent or (made.status != "valid" and not output.json):
        say_status(made, path)
    if one.request.sign is not None:
        signed = _sign(path, one.request.sign)
        if not output.silent:
            say(f"signed: {signed}")
    return made


def _sign(path: Path, key: Path) -> Path:
    try:
        return signature.sign(path, key)
    except RequestError as error:
        raise LostError(
            f"record {path} is written but not signed: {error}; sign it with steelyard sign"
        ) from error


def label(request: Request) -> str:
    question = request.resolved.case.question
    text = (
        f"{request.resolved.case.name} {question.division} {question.precision.name}"
        f" {request.engine}"
    )
    return (
        text
        if request.devices == request.nodes == 1
        else f"{text} {request.nodes}x{request.devices}"
    )


def interrupted(made: Record) -> bool:
    return any(reason.code == "interrupted" for reason in made.reasons)


def _hosts(runs: list[Ready], output: Output) -> AbstractContextManager[Allocation | None]:
    """Return one allocation for all runs of a command, where their launcher asks a scheduler for
    hosts. The wait is shown, and is in no record."""
    if not runs or not runs[0].launcher.scheduler:
        return nullcontext()
    shown: list[int] = []

    def waiting(seconds: float) -> None:
        if not output.silent and int(seconds) // QUEUE_S > len(shown) - 1:
            shown.append(int(seconds))
            say(f"waiting for {nodes} host(s) from Slurm: {int(seconds)} s")

    nodes = max(one.plan.nodes for one in runs)
    return launch.allocated(runs[0].site, nodes, waiting)


def _finish(
    made: list[Made],
    wanted: int,
    output: Output,
    show: Callable[[list[Record]], None],
    table: Callable[[list[Record]], dict[str, Any]],
) -> int:
    """Print what was made, by `show` for a reader, or as one document with what `table` adds to it.
    Return 0 where as many runs as were wanted are valid, otherwise 1."""
    records = [one for _, one in made]
    if output.json:
        tables = [record.printed(one) for one in records]
        dump(
            {"records": tables, "repeats": _tables(groups.repeats(records))} | table(records), tell
        )
    else:
        show(records)
        request = made[0][0].ready.request
        if request.explain:
            show_waterfall(records, request.out, output)
        if not output.silent and is_terminal(sys.stderr):
            say(f"more: steelyard report {shlex.quote(str(request.out))}")
    return 0 if len(made) == wanted and all(one.status == "valid" for one in records) else 1


def _tables(models: Any) -> list[dict[str, Any]]:
    return [one.model_dump(mode="json") for one in models]


def show_repeats(records: list[Record], wide: bool) -> None:
    """Print a table of each group of repeats; nothing where there is none."""
    page = report.repeats(records)
    if page is not None:
        tell("\n" + paged(page, wide))


def show_waterfall(records: list[Record], out: Path, output: Output) -> None:
    """Print the waterfall of every run that was profiled, and a line on stderr that says how to
    list the kernels."""
    page = report.explain_runs(records)
    if page is None:
        say("no waterfall: no run got to the steps that are profiled")
        return
    tell("\n" + paged(page, output.wide))
    if not output.silent:
        say(f"by kernel: steelyard report {shlex.quote(str(out))} --explain")


def _ready_at_point(request: Request) -> Ready:
    with sweep.named(request.point):
        return ready(request)


def _check_different(runs: list[Ready]) -> None:
    """Two points that are the same run could not be told apart in the folder of records."""
    seen: dict[tuple[str, str, tuple[str, ...]], Ready] = {}
    for one in runs:
        auto = one.request.resolved.auto
        first = seen.setdefault((one.case.model_dump_json(), one.plan.model_dump_json(), auto), one)
        if first is not one:
            raise RequestError(
                f"--sweep: points {_point_name(first)} and {_point_name(one)} are the same run;"
                " name each value once, and use --repeat for more runs of a point"
            )


def _point_name(one: Ready) -> str:
    return sweep.text(one.request.point)


def _title(one: Ready, runs: list[Ready]) -> str:
    """Return a point's values, after the case where there are several."""
    cases = {f"{each.case.name} {each.case.question.division}" for each in runs}
    return (
        f"{one.case.name} {one.case.question.division} {_point_name(one)}"
        if len(cases) > 1
        else _point_name(one)
    )


def _point_table(made: list[Made]) -> dict[str, Any]:
    ready = made[0][0].ready
    return {
        "case": ready.case.name,
        "division": ready.case.question.division,
        "values": {key: resolve.typed(value) for key, value in ready.request.point},
        "records": [record.id for _, record in made],
        "already_there": sum(turn.there is not None for turn, _ in made),
    }


def able(requests: list[Request]) -> tuple[list[Ready], list[LeftOut]]:
    """Return the runs that can start, and why others cannot. RequestError where no engine can do a
    case, and for what is wrong whatever the engine."""
    runs: list[Ready] = []
    left_out: list[LeftOut] = []
    for request in requests:
        try:
            runs.append(ready(request))
        except EngineError as error:
            left_out.append(LeftOut(request.engine, request.resolved.case.name, str(error)))
    lost = [one for one in left_out if one.case not in {run.case.name for run in runs}]
    if lost or not runs:
        raise RequestError(_no_engine(lost))
    return runs, left_out


def _no_engine(lost: list[LeftOut]) -> str:
    """Say what is wrong where no engine is left for a case."""
    if not lost:
        return "--engine all: no engine runs any of the cases; see steelyard list"
    ours = [one for one in lost if one.case == lost[0].case]
    return f"{ours[0].case}: no engine can do it: " + "; ".join(
        f"{one.engine}: {one.reason}" for one in ours
    )
