"""Execute the runs of a command one after the other, and print the results: a table of runs, of the
points of a sweep, or of engines side by side, the latter two with a verdict at the end.

`cli/run.py` passes in the requests; `run/checked_request.py` checks each, `run/parent.py` runs it
and writes its record.
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
from steelyard.case.sweep import SweepAxis
from steelyard.cli.printing import (
    OutputOptions,
    format_page,
    is_terminal,
    print_json,
    print_run_result,
    print_run_status,
    print_stderr,
    to_one_line,
)
from steelyard.cli.progress import ProgressDisplay
from steelyard.cli.verdicts import print_verdicts, verdict_to_json
from steelyard.errors import EngineError, LostError, RequestError
from steelyard.metrics import engine_groups, standing
from steelyard.metrics.verdict import Contender, Verdict, judge_engines, judge_points
from steelyard.record import record, signature
from steelyard.record.record import Record
from steelyard.report import group_data
from steelyard.report.loads import is_load_key
from steelyard.run import launch, parent, rerun
from steelyard.run.checked_request import CheckedRequest, check_request
from steelyard.run.launch import Allocation

QUEUE_LINE_INTERVAL_S = 10  # seconds between two lines while waiting in a queue


@dataclass(frozen=True)
class QueuedRun:
    """One run in the sequence of a command: `checked` is its request, already checked. Repeats of a
    request share its `request_index`, the position of the request in the command.

    `heading` is a line to print before it, if not empty. `earlier` is the path and record of a
    valid earlier run that is taken instead of running (in a sweep), or None.
    """

    checked: CheckedRequest
    request_index: int = 0
    heading: str = ""
    earlier: tuple[Path, Record] | None = None


RunResult = tuple[QueuedRun, Record]


@dataclass(frozen=True)
class ExcludedEngine:
    """An `engine` that cannot run a `case` (both by name), and the `reason` as text. `print_reason`
    prints it on stderr; it is also part of the JSON of `run --engine all`.
    """

    engine: str
    case: str
    reason: str

    def print_reason(self) -> None:
        """Print `left out:`, this engine's name and the reason as one line on stderr; the case is
        not named.
        """
        print_stderr(f"left out: {self.engine}: {to_one_line(self.reason)}")


def run_each(requests: list[Request], output: OutputOptions) -> int:
    """Check all requests, then run each once, in order, print the table of runs and one for each
    group of repeats on stdout (with --json one document), and return the exit code: 0 if all are
    valid or unproven, otherwise 1, also after an interrupt, which ends the series.

    A record of each run is written. Raise RequestError, before the first run, if a request is
    wrong; later only for what a host or worker finds wrong; LostError if a record cannot be written
    or signed.
    """
    # all are checked before the first is run
    queue = [QueuedRun(check_request(request), index) for index, request in enumerate(requests)]
    results = execute_all(queue, output)

    def print_tables(records: list[Record]) -> None:
        """Print on stdout the table of these runs, and a table for each group of repeats among
        them.
        """
        print_run_result(format_page(report.build_summary_page(records), output.wide))
        print_repeats(records, output.wide)

    return _print_results(results, len(queue), output, print_tables, lambda records: {}, [])


def run_sweep(
    requests: list[Request], axes: tuple[SweepAxis, ...], times: int, output: OutputOptions
) -> int:
    """Run each point of a sweep `times` times, less the valid and unproven records of it that are
    already in the output folder, print the table of points and the verdict on stdout, and return
    the exit code: 0 if every point has its records, otherwise 1, also after an interrupt.

    Raise RequestError, before the first run, if a request is wrong or two points are the same run.
    Damaged records in the folder become warnings on stderr. A sweep over devices or nodes also
    prints a scaling table.
    """
    checked_requests = [
        _check_at_point(request) for request in requests
    ]  # checked before the first runs
    _check_points_differ(checked_requests)
    earlier_by_point, warnings = rerun.find_answering_records(requests[0].out, checked_requests)
    for warning in warnings:
        print_stderr(f"warning: {to_one_line(warning)}")
    queue: list[QueuedRun] = []
    for index, (item, earlier_records) in enumerate(
        zip(checked_requests, earlier_by_point, strict=True)
    ):
        title = _format_point_title(item, checked_requests)
        heading = f"point {index + 1} of {len(checked_requests)}: {title}"
        earlier_or_none = [*earlier_records[:times], *[None] * (times - len(earlier_records))]
        queue += [
            QueuedRun(item, index, "" if number else heading, record)
            for number, record in enumerate(earlier_or_none)
        ]
    results = execute_all(queue, output)
    over_devices = any(axis.key in sweep.PLAN_KEYS for axis in axes)
    by_point: dict[int, list[RunResult]] = {}
    for result in results:
        by_point.setdefault(result[0].request_index, []).append(result)
    verdicts = judge_points([_make_contender(one) for one in by_point.values()])
    repeats = [
        item
        for point_results in by_point.values()
        if len(point_results) > 1
        for _, item in point_results
    ]

    def print_tables(records: list[Record]) -> None:
        """Print on stdout the table of the sweep's points, its repeats, and if devices or nodes are
        swept the scaling table; on stderr that there is none if records do not suffice.
        """
        names = [_format_point_cell(turn.checked) for turn, _ in results]
        page = report.build_summary_page(records, points=names if any(names) else None)
        print_run_result(format_page(page, output.wide))
        print_repeats(repeats, output.wide)
        scaling_page = report.build_scaling_page(records) if over_devices else None
        if scaling_page is not None:
            print_run_result("\n" + format_page(scaling_page, output.wide))
        elif over_devices:
            print_stderr("no scaling table: it needs valid records with two device counts")

    def extra_json(records: list[Record]) -> dict[str, Any]:
        """Return what the JSON of a sweep adds to the records: `repeats`, and under `sweep` its
        keys with their values, points, and scaling (empty unless devices or nodes are swept).
        """
        keys = {axis.key: [resolve.parse_value(value) for value in axis.values] for axis in axes}
        points = [_point_to_json(point_results) for point_results in by_point.values()]
        scaling = _models_to_json(group_data.collect_scaling(records)) if over_devices else []
        return {
            "repeats": _models_to_json(group_data.collect_repeats(repeats)),
            "sweep": {"keys": keys, "points": points, "scaling": scaling},
        }

    return _print_results(results, len(queue), output, print_tables, extra_json, verdicts)


def run_engines(requests: list[Request], times: int, output: OutputOptions) -> int:
    """Run the requests, one per engine and case, `times` times in turn, so that changes on the
    machine affect all engines alike; print the engines side by side and the verdict, and return
    the exit code: 0 if all runs are valid or unproven, otherwise 1, also after an interrupt.

    An engine that cannot run a case is left out with a line on stderr, also if only a host or
    worker finds that. Raise RequestError, before any run, if one of the cases has no engine that
    can run it; and if in the end no run is left.
    """
    checked_requests, excluded = check_engine_requests(requests)
    # an engine may have the same reason for several cases: print it once
    for item in {f"{item.engine}: {item.reason}": item for item in excluded}.values():
        item.print_reason()
    excluded_late: list[ExcludedEngine] = []
    queue = [
        QueuedRun(item, index) for _ in range(times) for index, item in enumerate(checked_requests)
    ]
    results = execute_all(queue, output, excluded_late)
    if not results:
        raise RequestError(_explain_no_engine(excluded_late))

    def print_tables(records: list[Record]) -> None:
        """Print on stdout the engines side by side, the table of runs if not all of them are in
        that, and repeats; on stderr that there is no engine table if fewer than two engines
        finished.
        """
        page = report.build_engines_page(records)
        compared = [
            record
            for group in engine_groups.find_engine_groups(records)
            for record in group.records
        ]
        if page is None or len(compared) < len(records):
            print_run_result(format_page(report.build_summary_page(records), output.wide))
        if page is not None:
            print_run_result(format_page(page, output.wide))
        else:
            print_stderr("no engine table: it needs finished runs of two engines")
        print_repeats(records, output.wide)

    def extra_json(records: list[Record]) -> dict[str, Any]:
        """Return what the JSON of several engines adds to the records: under `engines` the engines
        that were left out, with reasons, and the groups that are compared.
        """
        reasons = [asdict(one) for one in (*excluded, *excluded_late)]
        return {
            "engines": {
                "left_out": reasons,
                "groups": _models_to_json(group_data.collect_engines(records)),
            }
        }

    return _print_results(
        results,
        times * (len(checked_requests) - len(excluded_late)),
        output,
        print_tables,
        extra_json,
        judge_engines(run_record for _, run_record in results),
    )


def execute_all(
    queue: list[QueuedRun], output: OutputOptions, excluded: list[ExcludedEngine] | None = None
) -> list[RunResult]:
    """Execute the runs in order and return each with its record, also those that take an earlier
    record; the last one may be an interrupted run, after which no other starts.

    If only a host or a worker finds a request wrong, RequestError is raised; if a list `excluded`
    is given, the error is printed on stderr and appended to it instead, and later runs of that
    request are skipped. With Slurm, one allocation is held for all runs.
    """
    results: list[RunResult] = []
    dropped: set[int] = set()
    with _allocate_hosts(
        [queued.checked for queued in queue if queued.earlier is None], output
    ) as allocation:
        for number, queued in enumerate(queue, 1):
            if queued.request_index in dropped:
                continue
            if queued.heading and not output.silent:
                print_stderr(queued.heading)
            if queued.earlier is not None:
                if not output.silent:
                    print_stderr(f"already there: {queued.earlier[0]}")
                results.append((queued, queued.earlier[1]))
                continue
            point = queued.checked.request.point
            try:
                with sweep.name_point_in_errors(point):
                    # a point of a sweep has its own heading, so no number is shown
                    position = (1, 1) if point else (number, len(queue))
                    results.append(
                        (queued, execute_run(queued.checked, output, allocation, position))
                    )
            except RequestError as error:
                if excluded is None:
                    raise
                excluded.append(
                    ExcludedEngine(
                        queued.checked.request.engine, queued.checked.case.name, str(error)
                    )
                )
                excluded[-1].print_reason()
                dropped.add(queued.request_index)
                continue
            if is_interrupted(results[-1][1]):
                break
    return results


def execute_run(
    checked: CheckedRequest,
    output: OutputOptions,
    allocation: Allocation | None,
    position: tuple[int, int],
) -> Record:
    """Execute one run with its progress display, print its status on stderr, sign its record if
    requested, and return the record, which is on disk. A run that fails or is invalid is returned,
    not raised.

    `position` is the number of this run and the number of all runs, for the title. Raise
    RequestError if a host or worker finds the request wrong, LostError if the record cannot be
    written or signed.
    """
    number, run_count = position
    title = (
        f"[{number}/{run_count}] {format_run_label(checked.request)}"
        if run_count > 1
        else format_run_label(checked.request)
    )
    with ProgressDisplay(
        Console(stderr=True, quiet=output.silent), title, alone=run_count == 1
    ) as display:
        record_made, path = parent.run_case(
            checked, display.show, allocation, lambda warning: print_stderr(f"warning: {warning}")
        )
    if not output.silent or (record_made.status != "valid" and not output.json):
        print_run_status(record_made, path)
    if checked.request.signing_key is not None:
        signed = _sign_record(path, checked.request.signing_key)
        if not output.silent:
            print_stderr(f"signed: {signed}")
    return record_made


def _sign_record(path: Path, key: Path) -> Path:
    """Sign a record file with a private key (`sign_record`), and return the path of the signature,
    RECORD.sig. Raise LostError if that fails: the record itself is written.
    """
    try:
        return signature.sign_record(path, key)
    except RequestError as error:
        raise LostError(
            f"record {path} is written but not signed: {error}; sign it with steelyard sign"
        ) from error


def format_run_label(request: Request) -> str:
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


def is_interrupted(run_record: Record) -> bool:
    """Return whether the run was interrupted by the user or a signal, from the reasons in its
    record.
    """
    return any(reason.code == "interrupted" for reason in run_record.reasons)


def _allocate_hosts(
    checked_requests: list[CheckedRequest], output: OutputOptions
) -> AbstractContextManager[Allocation | None]:
    """Return a context manager that holds one allocation for all runs, of as many hosts as the
    largest needs, if the launcher of the first asks a scheduler (Slurm) for hosts; otherwise, and
    without runs, one that gives None.

    While it waits in the queue, a line is printed every ten seconds. The wait is in no record.
    """
    if not checked_requests or not checked_requests[0].launcher.scheduler:
        return nullcontext()
    printed: list[int] = []

    def print_wait(seconds: float) -> None:
        """Print the seconds waited so far, at most once in ten seconds, unless output is silent."""
        if not output.silent and int(seconds) // QUEUE_LINE_INTERVAL_S > len(printed) - 1:
            printed.append(int(seconds))
            print_stderr(f"waiting for {nodes} host(s) from Slurm: {int(seconds)} s")

    nodes = max(checked.plan.nodes for checked in checked_requests)
    return launch.hold_allocation(checked_requests[0].site, nodes, print_wait)


def _print_results(
    results: list[RunResult],
    expected_runs: int,
    output: OutputOptions,
    print_tables: Callable[[list[Record]], None],
    extra_json: Callable[[list[Record]], dict[str, Any]],
    verdicts: list[Verdict],
) -> int:
    """Print the results of a command on stdout: with --json one document of all records, their
    repeats and the verdicts, if there are any, to which `extra_json` adds; otherwise what
    `print_tables` prints, a waterfall if the runs were profiled (--explain), and at the end the
    verdicts. `results` must not be empty.

    Return the exit code: 0 if there are `expected_runs` runs and all are valid or unproven, else 1.
    """
    records = [run_record for _, run_record in results]
    if output.json:
        documents = [record.record_to_english_json(run_record) for run_record in records]
        document: dict[str, Any] = {
            "records": documents,
            "repeats": _models_to_json(group_data.collect_repeats(records)),
            **extra_json(records),
        }
        if verdicts:
            document["verdicts"] = [verdict_to_json(verdict) for verdict in verdicts]
        print_json(document, print_run_result)
    else:
        print_tables(records)
        request = results[0][0].checked.request
        if request.explain:
            print_waterfall(records, request.out, output)
        print_verdicts(verdicts, output.wide)
        if not output.silent and is_terminal(sys.stderr):
            print_stderr(f"more: steelyard report {shlex.quote(str(request.out))}")
    return 0 if len(results) == expected_runs and all(map(standing.is_answer_right, records)) else 1


def _models_to_json(models: Any) -> list[dict[str, Any]]:
    """Return pydantic models as JSON data."""
    return [model.model_dump(mode="json") for model in models]


def print_repeats(records: list[Record], wide: bool) -> None:
    """Print on stdout a table for each group of repeats (runs of the same request) in the records;
    nothing if there is none.
    """
    page = report.build_repeats_page(records)
    if page is not None:
        print_run_result("\n" + format_page(page, wide))


def print_waterfall(records: list[Record], out: Path, output: OutputOptions) -> None:
    """Print the waterfall (where the time of a step goes) of every profiled run on stdout, and on
    stderr how to list the kernels of the records in folder `out`; only a line on stderr if no run
    was profiled.
    """
    page = report.build_short_waterfall_page(records)
    if page is None:
        print_stderr("no waterfall: no run reached the profiled steps")
        return
    print_run_result("\n" + format_page(page, output.wide))
    if not output.silent:
        print_stderr(f"by kernel: steelyard report {shlex.quote(str(out))} --explain")


def _check_at_point(request: Request) -> CheckedRequest:
    """Check a request of a sweep and return it checked, ready to run. Raise RequestError, with the
    point in its message, if it is wrong.
    """
    with sweep.name_point_in_errors(request.point):
        return check_request(request)


def _check_points_differ(checked_requests: list[CheckedRequest]) -> None:
    """Raise RequestError if two points of a sweep are the same run, with equal case, plan and
    automatic tunes: their records could not be told apart.
    """
    seen: dict[tuple[str, str, tuple[str, ...]], CheckedRequest] = {}
    for checked in checked_requests:
        auto = checked.request.resolved.auto
        first = seen.setdefault(
            (checked.case.model_dump_json(), checked.plan.model_dump_json(), auto), checked
        )
        if first is not checked:
            raise RequestError(
                f"--sweep: points {_format_point_of(first)} and {_format_point_of(checked)} are"
                " the same run;"
                " name each value once, and use --repeat for more runs of a point"
            )


def _format_point_of(checked: CheckedRequest) -> str:
    """Return the values of a run's point in the sweep as text, such as `devices=2`."""
    return sweep.format_point(checked.request.point)


def _format_point_cell(checked: CheckedRequest) -> str:
    """Return the values of a run's point in the sweep for the table of points, without those of its
    load, which has a column of its own; empty if none are left.
    """
    point = checked.request.point
    return sweep.format_point(tuple(item for item in point if not is_load_key(item[0])))


def _format_point_title(checked: CheckedRequest, all_runs: list[CheckedRequest]) -> str:
    """Return the values of a run's point in the sweep, with case and division before them if the
    sweep has several.
    """
    cases = {f"{other.case.name} {other.case.question.division}" for other in all_runs}
    return (
        f"{checked.case.name} {checked.case.question.division} {_format_point_of(checked)}"
        if len(cases) > 1
        else _format_point_of(checked)
    )


def _make_contender(results: list[RunResult]) -> tuple[str, Contender]:
    """Return a point of a sweep as a contender of the verdict, from its runs (at least one), with a
    text that identifies its question.
    """
    checked = results[0][0].checked
    question = checked.case.question.model_dump_json()
    return question, Contender(_format_point_of(checked), tuple(item for _, item in results))


def _point_to_json(results: list[RunResult]) -> dict[str, Any]:
    """Return a point of a sweep as JSON data, from its runs (at least one): case, division, the
    values of its keys, ids of its records, and how many of them were there before.
    """
    checked = results[0][0].checked
    return {
        "case": checked.case.name,
        "division": checked.case.question.division,
        "values": {key: resolve.parse_value(value) for key, value in checked.request.point},
        "records": [record.id for _, record in results],
        "already_there": sum(turn.earlier is not None for turn, _ in results),
    }


def check_engine_requests(
    requests: list[Request],
) -> tuple[list[CheckedRequest], list[ExcludedEngine]]:
    """Check requests of several engines; return the checked ones, which can start, and the engines
    that cannot run their case, with the reason.

    Raise RequestError if one of the cases has no engine that can run it, or if a request is wrong
    whatever the engine (any RequestError but EngineError).
    """
    checked_requests: list[CheckedRequest] = []
    excluded: list[ExcludedEngine] = []
    for request in requests:
        try:
            checked_requests.append(check_request(request))
        except EngineError as error:
            excluded.append(ExcludedEngine(request.engine, request.resolved.case.name, str(error)))
    without_engine = [
        entry for entry in excluded if entry.case not in {run.case.name for run in checked_requests}
    ]
    if without_engine or not checked_requests:
        raise RequestError(_explain_no_engine(without_engine))
    return checked_requests, excluded


def _explain_no_engine(excluded: list[ExcludedEngine]) -> str:
    """Return the message for a case that no engine can run: the reasons of each engine for the
    first case in `excluded`, the engines left out; a general one if that is empty.
    """
    if not excluded:
        return "--engine all: no engine runs any of the cases; see steelyard list"
    of_first_case = [entry for entry in excluded if entry.case == excluded[0].case]
    return f"{of_first_case[0].case}: no engine can do it: " + "; ".join(
        f"{entry.engine}: {entry.reason}" for entry in of_first_case
    )
