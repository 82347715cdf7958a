"""Execute the runs of a command one after the other, and print the results: a table of runs, of the
points of a sweep, or of engines side by side.

`cli/run.py` passes in the requests; `run/ready.py` checks each, `run/parent.py` runs it and writes
its record.
"""

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

QUEUE_S = 10  # seconds between two lines while waiting in a queue


@dataclass(frozen=True)
class Turn:
    """One run in the sequence of a command, already checked. Repeats of a request share its
    `request_index`.

    `heading` is a line to print before it, if not empty. `earlier` is the path and record of a
    valid earlier run that is taken instead of running, or None.
    """

    ready: Ready
    place: int = 0
    heading: str = ""
    there: tuple[Path, Record] | None = None


Made = tuple[Turn, Record]


@dataclass(frozen=True)
class LeftOut:
    """An engine that cannot run a case, and why. Printed, and part of the JSON of `run --engine
    all`.
    """

    engine: str
    case: str
    reason: str

    def say(self) -> None:
        """Print the engine and the reason on stderr."""
        say(f"left out: {self.engine}: {one_line(self.reason)}")


def run_each(requests: list[Request], output: Output) -> int:
    """Check all requests, then run each once, print the table of runs, and return the exit code: 0
    if all are valid, otherwise 1.

    A record of each run is written. Raise RequestError, before the first run, if a request is
    wrong.
    """
    # all are checked before the first is run
    turns = [Turn(ready(request), place) for place, request in enumerate(requests)]
    made = carry_out_all(turns, output)

    def show(records: list[Record]) -> None:
        """Print the table of runs, and one of each group of repeats."""
        tell(paged(report.table(records), output.wide))
        show_repeats(records, output.wide)

    return _finish(made, len(turns), output, show, lambda records: {})


def run_sweep(requests: list[Request], axes: tuple[Axis, ...], times: int, output: Output) -> int:
    """Run each point of a sweep `times` times, less the valid records of it that are already in the
    output folder, print the table of points, and return the exit code: 0 if every point has its
    valid records, otherwise 1.

    Raise RequestError, before the first run, if a request is wrong or two points are the same run.
    A sweep over devices or nodes also prints a scaling table.
    """
    runs = [_ready_at_point(request) for request in requests]  # checked before the first runs
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
        """Print the table of points, the repeats, and if devices are swept the scaling."""
        names = [_point_name(turn.ready) for turn, _ in made]
        tell(paged(report.table(records, points=names), output.wide))
        show_repeats(repeated, output.wide)
        page = report.scaling(records) if over_devices else None
        if page is not None:
            tell("\n" + paged(page, output.wide))
        elif over_devices:
            say("no scaling table: it needs valid records with two device counts")

    def table(records: list[Record]) -> dict[str, Any]:
        """Return what the JSON of a sweep adds to the records: repeats, and the keys, points and
        scaling of the sweep.
        """
        keys = {axis.key: [resolve.typed(value) for value in axis.values] for axis in axes}
        points = [_point_table(every) for every in by_point.values()]
        scaling = _tables(groups.scaling(records)) if over_devices else []
        return {
            "repeats": _tables(groups.repeats(repeated)),
            "sweep": {"keys": keys, "points": points, "scaling": scaling},
        }

    return _finish(made, len(turns), output, show, table)


def run_engines(requests: list[Request], times: int, output: Output) -> int:
    """Run the requests, one per engine and case, `times` times in turn, so that changes on the
    machine affect all engines alike; print the engines side by side and return the exit code: 0 if
    all runs are valid, otherwise 1.

    An engine that cannot run a case is left out with a line on stderr. Raise RequestError if no
    engine can run a case.
    """
    runs, left_out = able(requests)
    # an engine may have the same reason for several cases: print it once
    for one in {f"{one.engine}: {one.reason}": one for one in left_out}.values():
        one.say()
    late: list[LeftOut] = []
    turns = [Turn(one, place) for _ in range(times) for place, one in enumerate(runs)]
    made = carry_out_all(turns, output, late)
    if not made:
        raise RequestError(_no_engine(late))

    def show(records: list[Record]) -> None:
        """Print engines side by side, the table of runs if not all are in it, and repeats."""
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
        """Return what the JSON of several engines adds to the records: groups, and the engines that
        were left out.
        """
        reasons = [asdict(one) for one in (*left_out, *late)]
        return {"engines": {"left_out": reasons, "groups": _tables(groups.engines(records))}}

    return _finish(made, times * (len(runs) - len(late)), output, show, table)


def carry_out_all(
    turns: list[Turn], output: Output, left_out: list[LeftOut] | None = None
) -> list[Made]:
    """Execute the runs in order and return each with its record; the last one may be an interrupted
    run, after which no other starts.

    If only a host or a worker finds a request wrong, RequestError is raised; if a list `left_out`
    is given, the error is printed and appended to it instead, and later runs of that request are
    skipped. With Slurm, one allocation is held for all runs.
    """
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
                    # a point of a sweep has its own heading, so no number is shown
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
    """Execute one run with its progress display, print its status, sign its record if requested,
    and return the record, which is on disk.

    `position` is the number of this run and the number of all runs, for the title. Raise
    RequestError if a host or worker finds the request wrong, LostError if the record cannot be
    signed.
    """
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
    """Sign a record and return the path of the signature. Raise LostError if that fails: the record
    itself is written.
    """
    try:
        return signature.sign(path, key)
    except RequestError as error:
        raise LostError(
            f"record {path} is written but not signed: {error}; sign it with steelyard sign"
        ) from error


def label(request: Request) -> str:
    """Return the title of a run: case, division, precision, engine and, if more than one device,
    `NODESxDEVICES`.
    """
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
    """Return whether the run was interrupted by the user or a signal, from the reasons in its
    record.
    """
    return any(reason.code == "interrupted" for reason in made.reasons)


def _hosts(runs: list[Ready], output: Output) -> AbstractContextManager[Allocation | None]:
    """Return a context manager that holds one allocation of hosts for all runs, if their launcher
    asks a scheduler (Slurm) for hosts; otherwise one that gives None.

    While it waits in the queue, a line is printed every ten seconds. The wait is in no record.
    """
    if not runs or not runs[0].launcher.scheduler:
        return nullcontext()
    shown: list[int] = []

    def waiting(seconds: float) -> None:
        """Print the seconds waited so far, at most once in ten seconds, unless output is silent."""
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
    """Print the results: with --json one document of all records, to which `extra_json` adds;
    otherwise what `print_tables` prints, and a waterfall if the runs were profiled.

    Return the exit code: 0 if there are `expected_runs` runs and all are valid, otherwise 1.
    """
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
    """Return pydantic models as JSON data."""
    return [one.model_dump(mode="json") for one in models]


def show_repeats(records: list[Record], wide: bool) -> None:
    """Print a table for each group of repeats in the records; nothing if there is none."""
    page = report.repeats(records)
    if page is not None:
        tell("\n" + paged(page, wide))


def show_waterfall(records: list[Record], out: Path, output: Output) -> None:
    """Print the waterfall of every profiled run on stdout, and on stderr how to list the kernels of
    records in folder `out`; only a line on stderr if no run was profiled.
    """
    page = report.explain_runs(records)
    if page is None:
        say("no waterfall: no run got to the steps that are profiled")
        return
    tell("\n" + paged(page, output.wide))
    if not output.silent:
        say(f"by kernel: steelyard report {shlex.quote(str(out))} --explain")


def _ready_at_point(request: Request) -> Ready:
    """Check a request of a sweep and return it checked, ready to run. Raise RequestError, with the
    point in its message, if it is wrong.
    """
    with sweep.named(request.point):
        return ready(request)


def _check_different(runs: list[Ready]) -> None:
    """Raise RequestError if two points of a sweep are the same run: their records could not be told
    apart.
    """
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
    """Return the values of a run's point in the sweep as text, such as `devices=2`."""
    return sweep.text(one.request.point)


def _title(one: Ready, runs: list[Ready]) -> str:
    """Return the values of a run's point in the sweep, with case and division before them if the
    sweep has several.
    """
    cases = {f"{each.case.name} {each.case.question.division}" for each in runs}
    return (
        f"{one.case.name} {one.case.question.division} {_point_name(one)}"
        if len(cases) > 1
        else _point_name(one)
    )


def _point_table(made: list[Made]) -> dict[str, Any]:
    """Return a point of a sweep as JSON data, from its runs: case, values, ids of its records, and
    how many of them were there before.
    """
    ready = made[0][0].ready
    return {
        "case": ready.case.name,
        "division": ready.case.question.division,
        "values": {key: resolve.typed(value) for key, value in ready.request.point},
        "records": [record.id for _, record in made],
        "already_there": sum(turn.there is not None for turn, _ in made),
    }


def able(requests: list[Request]) -> tuple[list[Ready], list[LeftOut]]:
    """Check requests of several engines; return the runs that can start, and the engines that
    cannot run their case, with the reason.

    Raise RequestError if no engine can run one of the cases, or if a request is wrong whatever the
    engine.
    """
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
    """Return the message for a case that no engine can run: the reason of each engine. `excluded`
    are the engines left out; empty if no engine runs any case.
    """
    if not lost:
        return "--engine all: no engine runs any of the cases; see steelyard list"
    ours = [one for one in lost if one.case == lost[0].case]
    return f"{ours[0].case}: no engine can do it: " + "; ".join(
        f"{one.engine}: {one.reason}" for one in ours
    )
