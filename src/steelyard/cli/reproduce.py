"""Run again what a record describes, and compare the new runs with it: the work of the command
`reproduce`.
"""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from steelyard import report
from steelyard.case.request import Request, split_engine_settings
from steelyard.cli.compare import comparison_to_json, field_to_json
from steelyard.cli.execute_runs import QueuedRun, execute_all
from steelyard.cli.get import find_data_path
from steelyard.cli.printing import (
    OutputOptions,
    format_page,
    print_json,
    print_run_result,
    print_stderr,
    to_one_line,
)
from steelyard.cli.records import read_run_records
from steelyard.cli.requests import check_repeat, find_site_file
from steelyard.errors import RequestError
from steelyard.metrics import record_fields, side_comparison, standing
from steelyard.metrics.record_fields import FieldDifference
from steelyard.metrics.side_comparison import ComparisonSide
from steelyard.record import record
from steelyard.record.record import Record
from steelyard.run import rerun as again
from steelyard.run.checked_request import CheckedRequest, check_request


def read_request(source: Path) -> tuple[ComparisonSide, Request]:
    """Read a record, or a folder of its repeats; return it as the base side of a comparison, with
    the request that would run its first finished record (else its first) again.

    Raise RequestError if a record does not verify, they are not repeats of one run, or it cannot be
    run again.
    """
    base = side_comparison.make_side(str(source), read_run_records([source]))
    return base, again.make_request((base.finished or base.records)[0])


def reproduce_record(
    base: ComparisonSide,
    request: Request,
    settings: list[str],
    repeat: int,
    threshold: float,
    output: OutputOptions,
) -> int:
    """Run `request`, which describes the record of side `base`, `repeat` times; print the
    comparison on stdout and return the exit code: 0 if all runs are valid and not significantly
    slower by more than `threshold` (a share), otherwise 1.

    The new records are written to the request's folder. Raise RequestError if it cannot be the same
    run: settings other than engine.KEY, other data, weights or plan. What differs on this host is
    printed on stderr before.
    """
    record_found = (base.finished or base.records)[0]
    engine_paths, others = split_engine_settings(settings)
    if others:
        raise RequestError(
            f"--set {others[0]!r}: reproduce takes only engine.KEY=VALUE; all else is the record's"
        )
    data = find_data_path(request.data, request.resolved.case)
    request = replace(
        request, site=find_site_file(request.site, output), data=data, engine_settings=engine_paths
    )
    again.check_sources(record_found, request)
    checked = check_request(request)
    recorded_plan, new_plan = record_found.plan, checked.plan
    if (recorded_plan.tp, recorded_plan.pp, recorded_plan.dp) != (
        new_plan.tp,
        new_plan.pp,
        new_plan.dp,
    ):
        raise RequestError(
            f"record {record_found.id} ran as {recorded_plan}; here its tune gives {new_plan}; use"
            " the same number of"
            " devices"
        )
    _check_same_weights(record_found, checked)
    differences = again.find_host_differences(record_found, checked)
    if not output.silent:
        _print_differences(record_found, differences)
    new_records = [
        new_record
        for _, new_record in execute_all([QueuedRun(checked)] * check_repeat(repeat), output)
    ]
    return _print_comparison(base, new_records, differences, threshold, output, repeat)


def _check_same_weights(base_record: Record, checked: CheckedRequest) -> None:
    """Raise RequestError if the request's folder of weights on this host cannot be read, or has
    other headers than the record tells. They are read by a subprocess (`weights inspect`), because
    the reader imports torch. Nothing is checked without a local folder or without torch.
    """
    folder = checked.request.weights
    if folder is None or not folder.is_dir() or find_spec("torch") is None:
        return
    command = [sys.executable, "-P", "-m", "steelyard", "weights", "inspect", str(folder), "--json"]
    inspection = subprocess.run(command, capture_output=True, text=True, check=False)
    if inspection.returncode:
        raise RequestError(
            inspection.stderr.strip().removeprefix("error: ")
            or f"--weights {str(folder)!r} cannot be read"
        )
    again.check_weights(base_record, json.loads(inspection.stdout)["header_sha256"])


def _print_differences(base_record: Record, differences: tuple[FieldDifference, ...]) -> None:
    """Print on stderr, before a rerun, how the record's case differs from the shipped one, and the
    fields in which this host differs from the record, one line each (record / here), after their
    number or `nothing known is different here`.
    """
    for remark in again.describe_case_differences(base_record):
        print_stderr(to_one_line(remark))
    print_stderr(
        f"different here: {len(differences)} field(s) (record / here)"
        if differences
        else "nothing known is different here"
    )
    for difference in differences:
        print_stderr(f"  {to_one_line(record_fields.format_differences([difference]))}")


def _print_comparison(
    base: ComparisonSide,
    new_records: list[Record],
    differences: tuple[FieldDifference, ...],
    threshold: float,
    output: OutputOptions,
    times: int,
) -> int:
    """Print the comparison of the new records with the base on stdout, as text or JSON, and return
    the exit code: 0 if there are `times` records, all valid, and they are not significantly slower;
    otherwise 1.

    Raise RequestError if a run read other data or weights than the record. `differences` are those
    between the record and this host, for --json.
    """
    base_record = (base.finished or base.records)[0]
    other_sources = [
        difference
        for new_record in new_records
        for difference in again.find_rerun_differences(base_record, new_record)
    ]
    if other_sources:
        ids = ", ".join(new_record.id[:8] for new_record in new_records)
        raise RequestError(
            f"not the same run: {record_fields.format_differences(other_sources)}; the new run is"
            f" stored as record {ids}"
        )
    comparison = side_comparison.compare_sides(
        base, side_comparison.make_side("reproduced", new_records), [], threshold
    )
    if output.json:
        document: dict[str, Any] = {
            "records": [record.record_to_english_json(new_record) for new_record in new_records],
            "here": [field_to_json(difference) for difference in differences],
        }
        print_json(
            document
            | {
                "remarks": again.describe_case_differences(base_record),
                "comparison": comparison_to_json(comparison),
            },
            print_run_result,
        )
    else:
        print_run_result(format_page(report.build_comparison_page(comparison), output.wide))
    all_right = len(new_records) == times and all(map(standing.is_answer_right, new_records))
    return 0 if all_right and not comparison.has_regressed else 1
