"""Runs of a sweep: every point that has no valid record yet, then the table of all points."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from steelyard import report
from steelyard.case import resolve, sweep
from steelyard.case.request import Request
from steelyard.case.sweep import Axis
from steelyard.cli import explained, repeats
from steelyard.cli.out import Output, dump, one_line, paged, say, tell
from steelyard.cli.run import carry_out, hint, hosts, interrupted
from steelyard.errors import RequestError
from steelyard.record import record
from steelyard.report import groups
from steelyard.run import earlier
from steelyard.run.ready import Ready, ready

if TYPE_CHECKING:
    from steelyard.record.record import Record
    from steelyard.run.earlier import Earlier
    from steelyard.run.launch import Allocation


@dataclass(frozen=True)
class Done:
    """A point with its records, those that were there first."""

    ready: Ready
    records: list["Record"]
    there: int

    def valid(self, times: int) -> bool:
        return sum(one.status == "valid" for one in self.records) == times


def run_sweep(requests: list[Request], axes: tuple[Axis, ...], times: int, output: Output) -> int:
    """Each request `times` times, less what is there already. Exit code 0 where every point has its valid records."""
    runs = [_ready(request) for request in requests]  # all of them before the first is run
    _check_different(runs)
    found, warnings = earlier.find(requests[0].out, runs)
    for warning in warnings:
        say(f"warning: {one_line(warning)}")
    done: list[Done] = []
    lacking = [one for one, there in zip(runs, found, strict=True) if len(there) < times]
    with hosts(lacking, output) as allocation:
        for number, (one, there) in enumerate(zip(runs, found, strict=True), 1):
            if not output.silent:
                say(f"point {number} of {len(runs)}: {_title(one, runs)}")
            done.append(_point(one, there[:times], times, output, allocation))
            if done[-1].records and interrupted(done[-1].records[-1]):
                break
    over_devices = any(axis.key in sweep.DEVICES for axis in axes)
    if output.json:
        _dump(done, axes, over_devices)
    else:
        _print(done, over_devices, output.wide)
        if requests[0].explain:
            records = [one for point in done for one in point.records]
            explained.show(records, requests[0].out, output)
        hint(requests[0].out, output)
    return 0 if len(done) == len(runs) and all(point.valid(times) for point in done) else 1


def _ready(request: Request) -> Ready:
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
                f"--sweep: points {_name(first)} and {_name(one)} are the same run; name each value once, and use "
                "--repeat for more runs of a point"
            )


def _point(one: Ready, there: "list[Earlier]", times: int, output: Output, allocation: "Allocation | None") -> Done:
    records = []
    for known in there:
        records.append(known.record)
        if not output.silent:
            say(f"already there: {known.path}")
    while len(records) < times:
        with sweep.named(one.request.point):
            records.append(carry_out(one, output, allocation))
        if interrupted(records[-1]):
            break
    return Done(one, records, len(there))


def _name(one: Ready) -> str:
    return sweep.text(one.request.point)


def _title(one: Ready, runs: list[Ready]) -> str:
    """A point's values, after the case where there are several."""
    named = f"{one.case.name} {one.case.question.division}"
    several = any(named != f"{other.case.name} {other.case.question.division}" for other in runs)
    return f"{named} {_name(one)}" if several else _name(one)


def _print(done: list[Done], over_devices: bool, wide: bool) -> None:
    records = [one for point in done for one in point.records]
    names = [_name(point.ready) for point in done for _ in point.records]
    tell(paged(report.table(records, points=names), wide))
    repeats.show(_repeated(done), wide)
    page = report.scaling(records) if over_devices else None
    if page is not None:
        tell("\n" + paged(page, wide))
    elif over_devices:
        say("no scaling table: it needs valid records with two device counts")


def _repeated(done: list[Done]) -> "list[Record]":
    return [one for point in done if len(point.records) > 1 for one in point.records]


def _dump(done: list[Done], axes: tuple[Axis, ...], over_devices: bool) -> None:
    records = [one for point in done for one in point.records]
    points = [
        {
            "case": point.ready.case.name,
            "division": point.ready.case.question.division,
            "values": {key: resolve.typed(value) for key, value in point.ready.request.point},
            "records": [one.id for one in point.records],
            "already_there": point.there,
        }
        for point in done
    ]
    keys = {axis.key: [resolve.typed(value) for value in axis.values] for axis in axes}
    scaled = [group.model_dump(mode="json") for group in groups.scaling(records)] if over_devices else []
    told = {"keys": keys, "points": points, "scaling": scaled}
    tables = [record.printed(one) for one in records]
    dump({"records": tables, "repeats": repeats.as_json(_repeated(done)), "sweep": told}, tell)
