"""The commands `compare` and `history`, which compare records, and the JSON that they print."""

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli.options import (
    DEFAULT_THRESHOLD,
    FormatOption,
    JsonOption,
    LangOption,
    ThresholdOption,
    ToOption,
    WideOption,
)
from steelyard.cli.printing import print_stderr, to_one_line
from steelyard.errors import RequestError

if TYPE_CHECKING:
    from steelyard.metrics.rate_history import IndexedRecord, RateHistory, Trend, TrendPoint
    from steelyard.metrics.ratio import Ratio
    from steelyard.metrics.record_fields import FieldDifference
    from steelyard.metrics.side_comparison import Comparison, ComparisonSide, ValueChange
    from steelyard.record.index import RecordSummary


def compare(
    base: Annotated[
        Path, typer.Argument(metavar="BASE", help="A record, or a folder of repeats (--repeat).")
    ],
    new: Annotated[
        Path,
        typer.Argument(
            metavar="NEW", help="A record, or a folder of repeats, of the same question."
        ),
    ],
    across: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD",
            help=(
                "A field of the question that may differ, such as question.precision. case: any"
                " field may."
            ),
        ),
    ] = None,
    threshold: ThresholdOption = DEFAULT_THRESHOLD,
    format_: FormatOption = "text",
    lang: LangOption = "en",
    to: ToOption = None,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> int:
    """Compare two runs of one case, with a test of significance.

    It prints the ratio of their rates, the answers, metrics and phases, and what differs between
    the runs. Give folders of repeats (run --repeat 5) for a test between runs. Exit code 0: not
    slower; 1: NEW is significantly slower by more than the threshold, or all runs of a side are
    invalid or failed; 2: the questions differ.

    \b
    Examples:
      steelyard compare records/before/ records/after/
      steelyard compare bf16.json fp16.json --across question.precision
    """
    from steelyard import report
    from steelyard.cli.page_output import check_format, show_page
    from steelyard.cli.records import read_run_records
    from steelyard.metrics import side_comparison as compared

    check_format(format_, lang)
    base_side, new_side = (
        compared.make_side(str(path), read_run_records([path])) for path in (base, new)
    )
    comparison = compared.compare_sides(base_side, new_side, across or [], threshold)
    page = partial(report.build_comparison_page, comparison, lang)  # type: ignore[arg-type]
    show_page(page, partial(comparison_to_json, comparison), format_, lang, to, wide, as_json)
    return 1 if comparison.has_regressed else 0


def history(
    places: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of records, or records.")
    ],
    threshold: ThresholdOption = DEFAULT_THRESHOLD,
    index_file: Annotated[
        Path | None,
        typer.Option(
            "--index", metavar="FILE", help="The index. Default: a file in your cache folder."
        ),
    ] = None,
    no_index: Annotated[
        bool, typer.Option("--no-index", help="Read every record; use no index and save none.")
    ] = False,
    format_: FormatOption = "text",
    lang: LangOption = "en",
    to: ToOption = None,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show how the rate of each case changed over time.

    It names the first bad record of each. It keeps an index of the records, which can be deleted at
    any time.

    \b
    Examples:
      steelyard history records/
      steelyard history records/ --format html --to history.html
    """
    from steelyard import report
    from steelyard.cli.page_output import check_format, show_page
    from steelyard.metrics import rate_history as trends

    check_format(format_, lang)
    if no_index and index_file is not None:
        raise RequestError("--index and --no-index cannot be combined; drop one")
    for path in places:
        if not path.exists():
            raise RequestError(f"{str(path)!r} does not exist; give folders of records")
    history_found = trends.build_history(_index_records(places, index_file, no_index), threshold)
    page = partial(report.build_history_page, history_found, lang)  # type: ignore[arg-type]
    show_page(page, partial(_history_to_json, history_found), format_, lang, to, wide, as_json)


def comparison_to_json(comparison: "Comparison") -> dict[str, Any]:
    """Return a comparison of two sides as the dict that `compare --json` and `reproduce --json`
    print: `case` (the base's), `outcome`, `looks_equal` (pages show the rates as equal),
    `regressed`, `threshold`, `ratio` of the rates in `unit` and `why` there is none, `base` and
    `new`, `answers`, `metrics`, `phases` and `tokens_per_step` of both. `across` are question
    fields that differ, `differs` other settings.
    """
    from steelyard.report.comparison_page import rates_look_equal

    case = (comparison.base.finished or comparison.base.records)[0].case
    base_answers, new_answers = comparison.answers
    return {
        "case": {"name": case.name, "key": case.key, "size": case.size},
        "outcome": comparison.outcome,
        "looks_equal": rates_look_equal(comparison),
        "regressed": comparison.has_regressed,
        "threshold": comparison.threshold,
        "unit": comparison.unit,
        "ratio": ratio_to_json(comparison.ratio),
        "why": None if comparison.why is None else asdict(comparison.why),
        "base": _side_to_json(comparison, comparison.base, 0),
        "new": _side_to_json(comparison, comparison.new, 1),
        "across": [field_to_json(item) for item in comparison.question_differences],
        "quality": comparison.quality_metric,
        "answers": {
            "base": None if base_answers is None else asdict(base_answers),
            "new": None if new_answers is None else asdict(new_answers),
        },
        "metrics": [_change_to_json(item) for item in comparison.metrics],
        "phases": [_change_to_json(item) for item in comparison.phases],
        "tokens_per_step": {
            "base": comparison.tokens_per_step[0],
            "new": comparison.tokens_per_step[1],
        },
        "differs": [field_to_json(item) for item in comparison.setting_differences],
    }


def _side_to_json(comparison: "Comparison", side: "ComparisonSide", index: int) -> dict[str, Any]:
    """Return one side of a comparison as JSON data: name, ids of its records, number of those that
    count, those left out with their reason codes, and its rate with interval. `index` is 0 for the
    base and 1 for the new side. Rates are None if the side has none.
    """
    from steelyard.metrics import standing

    rate = comparison.rates[index]
    return {
        "name": side.name,
        "records": [record.id for record in side.records],
        "valid": len(side.counted),
        "left_out": [
            {
                "record": excluded_record.id,
                "reasons": standing.list_reason_codes(excluded_record),
            }
            for excluded_record in side.not_counted
        ],
        "rate": None if rate is None else rate.estimate.value,
        "rate_interval": None if rate is None else rate.estimate.interval,
        "interval_from": None if rate is None else rate.source,
    }


def _change_to_json(change: "ValueChange") -> dict[str, Any]:
    """Return a metric or phase as JSON data: its unit, the values of both sides, their ratio,
    `outcome` (what may be said of the change; None if a side has no value), `direction` (that, if
    it is better or worse, else None), and `looks_equal`, whether pages show the same digits on both
    sides.
    """
    from steelyard.report.comparison_page import looks_equal

    entry = {"name": change.name, "unit": change.unit, "base": change.base, "new": change.new}
    return entry | {
        "ratio": ratio_to_json(change.ratio),
        "outcome": change.outcome,
        "direction": change.outcome if change.outcome in ("better", "worse") else None,
        "looks_equal": looks_equal(change),
    }


def ratio_to_json(ratio: "Ratio | None") -> dict[str, Any] | None:
    """Return a ratio of two rates as JSON data: `value`, `interval`, `interval_from` (what the
    interval was computed from) and `verdict`; None for None.
    """
    if ratio is None:
        return None
    return {
        "value": ratio.value,
        "interval": ratio.interval,
        "interval_from": None if ratio.interval is None else "runs",
        "verdict": ratio.verdict,
    }


def field_to_json(difference: "FieldDifference") -> dict[str, Any]:
    """Return a field that differs between two sides as JSON data, with the list of values on each
    side.
    """
    return {"field": difference.name, "base": list(difference.base), "new": list(difference.new)}


def _index_records(
    paths_given: list[Path], index_file: Path | None, no_index: bool
) -> "dict[Path, RecordSummary]":
    """Return the summary of every run record in these files and folders, by path, each once.

    Summaries are taken from the index `index_file`, or if None the one in the user's cache; it is
    read and updated, unless `no_index`. Spec records are left out with a line on stderr, and
    warnings are printed there. Raise RequestError if one of the paths has no record, there is no
    run record, or `index_file` is no index.
    """
    from steelyard.cli.records import drop_spec_records, find_record_paths
    from steelyard.metrics.rate_history import summarize_record
    from steelyard.record import index
    from steelyard.run import environment

    record_paths = [path for path_given in paths_given for path in find_record_paths([path_given])]
    runs = drop_spec_records(list(dict.fromkeys(record_paths)))
    index_path = (
        None
        if no_index
        else _find_user_index()
        if index_file is None
        else index.check_index_path(index_file)
    )
    entries, warnings = index.summarize_records(
        runs, index_path, environment.hash_package(), summarize_record
    )
    for warning in warnings:
        print_stderr(f"warning: {to_one_line(warning)}")
    return entries


def _find_user_index() -> Path | None:
    """Return the path of the index of record summaries that `history` uses (record/index.py):
    steelyard/index/records.json in the user's cache folder, where folders are created if needed;
    the file need not exist. Print a warning on stderr and return None if that folder cannot be
    made, or is a link, another user's or writable by others.
    """
    from steelyard.record import index
    from steelyard.run import environment

    try:
        return environment.make_private_cache(os.environ, "index") / index.INDEX_NAME
    except (OSError, RequestError) as error:
        print_stderr(f"warning: the index was not saved: {to_one_line(error)}")
        return None


def _history_to_json(history: "RateHistory") -> dict[str, Any]:
    """Return a history as the dict that `history --json` prints: `threshold` (a slowdown below this
    share does not count), `trends`, and under `wrong` path and reason (`why`) of the files that are
    not sound records.
    """
    return {
        "threshold": history.threshold,
        "trends": [_trend_to_json(item) for item in history.trends],
        "wrong": [
            {"path": str(item.path), "why": item.entry.wrong} for item in history.not_verified
        ],
    }


def _trend_to_json(trend: "Trend") -> dict[str, Any]:
    """Return a trend (the runs of one case and setup over time) as JSON data: what its runs have in
    common, its points, and its first bad record with reason codes, ratio and the id of the best
    record before, or None.
    """
    head, bad = trend.first_entry, trend.first_bad
    names = ("name", "size", "key", "division", "precision", "engine", "plan", "scope", "devices")
    first_bad = None
    if bad is not None:
        why = {
            "codes": list(bad.record.entry.codes),
            "ratio": ratio_to_json(bad.ratio),
            "best": bad.best and bad.best.entry.id,
        }
        first_bad = _run_to_json(bad.record) | why
    return {
        **head.model_dump(mode="json", include=set(names)),
        "engine_mark": trend.engine_mark,
        "unit": trend.unit,
        "points": [_point_to_json(point) for point in trend.points],
        "first_bad": first_bad,
    }


def _point_to_json(point: "TrendPoint") -> dict[str, Any]:
    """Return a point of a trend (a run, or repeats of it) as JSON data: when, revision, rate with
    interval, its ratios to the trend's first point and to the one before, and its records. The rate
    is None if no run has one.
    """
    entry = point.runs[0].entry
    return {
        "created": entry.created,
        "revision": entry.revision,
        "dirty": entry.dirty,
        "rate": None if point.rate is None else point.rate.value,
        "rate_interval": None if point.rate is None else point.rate.interval,
        "interval_from": point.source,
        "to_first": ratio_to_json(point.to_first),
        "to_before": ratio_to_json(point.to_previous),
        "records": [_run_to_json(run) for run in point.runs],
    }


def _run_to_json(run: "IndexedRecord") -> dict[str, Any]:
    """Return id, path, status and rate of an indexed record as JSON data."""
    entry = run.entry
    return {"id": entry.id, "path": str(run.path), "status": entry.status, "rate": entry.rate}
