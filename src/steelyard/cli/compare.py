"""The commands `compare` and `history`, which compare records, and the JSON that they print."""

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli.options import THRESHOLD, Format, Json, Lang, Threshold, To, Wide
from steelyard.cli.out import one_line, say
from steelyard.errors import RequestError

if TYPE_CHECKING:
    from steelyard.metrics.compare import Change, Comparison, Side
    from steelyard.metrics.fields import Field
    from steelyard.metrics.history import History, Indexed, Point, Trend
    from steelyard.metrics.ratio import Ratio
    from steelyard.record.index import Entry


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
    threshold: Threshold = THRESHOLD,
    format_: Format = "text",
    lang: Lang = "en",
    to: To = None,
    wide: Wide = False,
    as_json: Json = False,
) -> int:
    """Compare two runs of one case, with a test of significance.

    It prints the ratio of their rates, the answers, metrics and phases, and what differs between
    the runs. Give folders of repeats (run --repeat 5) for a test between runs. Exit code 0: not
    slower; 1: NEW is significantly slower by more than the threshold, or a side has no valid run;
    2: the questions differ.

    \b
    Examples:
      steelyard compare records/before/ records/after/
      steelyard compare bf16.json fp16.json --across question.precision
    """
    from steelyard import report
    from steelyard.cli.pages import check_format, show
    from steelyard.cli.records import read
    from steelyard.metrics import compare as compared

    check_format(format_, lang)
    ours, theirs = (compared.side(str(place), read([place])) for place in (base, new))
    found = compared.compare(ours, theirs, across or [], threshold)
    page = partial(report.comparison, found, lang)  # type: ignore[arg-type]
    show(page, partial(table, found), format_, lang, to, wide, as_json)
    return 1 if found.regressed else 0


def history(
    places: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of records, or records.")
    ],
    threshold: Threshold = THRESHOLD,
    index_file: Annotated[
        Path | None,
        typer.Option(
            "--index", metavar="FILE", help="The index. Default: a file in your cache folder."
        ),
    ] = None,
    no_index: Annotated[
        bool, typer.Option("--no-index", help="Read every record; keep no index.")
    ] = False,
    format_: Format = "text",
    lang: Lang = "en",
    to: To = None,
    wide: Wide = False,
    as_json: Json = False,
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
    from steelyard.cli.pages import check_format, show
    from steelyard.metrics import history as trends

    check_format(format_, lang)
    if no_index and index_file is not None:
        raise RequestError("--index and --no-index cannot be combined; drop one")
    for place in places:
        if not place.exists():
            raise RequestError(f"{str(place)!r} does not exist; give folders of records")
    found = trends.history(_entries(places, index_file, no_index), threshold)
    page = partial(report.history, found, lang)  # type: ignore[arg-type]
    show(page, partial(_history_table, found), format_, lang, to, wide, as_json)


def table(found: "Comparison") -> dict[str, Any]:
    """Return a comparison as the dict that `compare --json` and `reproduce --json` print."""
    case = (found.base.finished or found.base.records)[0].case
    own, theirs = found.answers
    return {
        "case": {"name": case.name, "key": case.key, "size": case.size},
        "outcome": found.outcome,
        "regressed": found.regressed,
        "threshold": found.threshold,
        "unit": found.unit,
        "ratio": ratio_table(found.ratio),
        "why": None if found.why is None else asdict(found.why),
        "base": _side(found, found.base, 0),
        "new": _side(found, found.new, 1),
        "across": [field(one) for one in found.across],
        "quality": found.quality,
        "answers": {
            "base": None if own is None else asdict(own),
            "new": None if theirs is None else asdict(theirs),
        },
        "metrics": [_change(one) for one in found.metrics],
        "phases": [_change(one) for one in found.phases],
        "tokens_per_step": {"base": found.steps[0], "new": found.steps[1]},
        "differs": [field(one) for one in found.differs],
    }


def _side(found: "Comparison", side: "Side", place: int) -> dict[str, Any]:
    """Return one side of a comparison as JSON data; `index` is 0 for the base and 1 for the new
    side. Rates are None if the side has none.
    """
    rate = found.rates[place]
    return {
        "name": side.name,
        "records": [record.id for record in side.records],
        "valid": len(side.valid),
        "left_out": [
            {"record": one.id, "reasons": [reason.code for reason in one.reasons]}
            for one in side.left_out
        ],
        "rate": None if rate is None else rate.estimate.value,
        "rate_interval": None if rate is None else rate.estimate.interval,
        "interval_from": None if rate is None else rate.source,
    }


def _change(one: "Change") -> dict[str, Any]:
    """Return a metric or phase of both sides, with the ratio of the two, as JSON data."""
    told = {"name": one.name, "unit": one.unit, "base": one.base, "new": one.new}
    return told | {"ratio": ratio_table(one.ratio), "direction": one.direction or None}


def ratio_table(one: "Ratio | None") -> dict[str, Any] | None:
    """Return a ratio of two rates with its interval and verdict as JSON data; None for None."""
    if one is None:
        return None
    return {
        "value": one.value,
        "interval": one.interval,
        "interval_from": one.source,
        "verdict": one.verdict,
    }


def field(one: "Field") -> dict[str, Any]:
    """Return a field that differs between two sides as JSON data, with the list of values on each
    side.
    """
    return {"field": one.name, "base": list(one.base), "new": list(one.new)}


def _entries(places: list[Path], named: Path | None, no_index: bool) -> "dict[Path, Entry]":
    """Return the index entry of every run record in these files and folders, by path.

    The index is `index_file`, or if None the one in the user's cache; it is read and updated,
    unless `no_index`. Spec records are left out with a line on stderr, and warnings are printed
    there. Raise RequestError if there is no run record.
    """
    from steelyard.cli.records import only_runs, paths
    from steelyard.metrics.history import summary
    from steelyard.record import index
    from steelyard.run import environment

    every = [path for place in places for path in paths([place])]
    runs = only_runs(list(dict.fromkeys(every)))
    file = None if no_index else _own_index() if named is None else index.named(named)
    found, warnings = index.entries(runs, file, environment.package_hash(), summary)
    for warning in warnings:
        say(f"warning: {one_line(warning)}")
    return found


def _own_index() -> Path | None:
    """Return the path of the index in the user's cache folder, which is created. Print a warning
    and return None if that folder cannot be used.
    """
    from steelyard.record import index
    from steelyard.run import environment

    try:
        return environment.private_cache(os.environ, "index") / index.NAME
    except (OSError, RequestError) as error:
        say(f"warning: no index is kept: {one_line(error)}")
        return None


def _history_table(found: "History") -> dict[str, Any]:
    """Return a history as the dict that `history --json` prints: its trends, and the files that are
    not sound records.
    """
    return {
        "threshold": found.threshold,
        "trends": [_trend(one) for one in found.trends],
        "wrong": [{"path": str(one.path), "why": one.entry.wrong} for one in found.wrong],
    }


def _trend(trend: "Trend") -> dict[str, Any]:
    """Return a trend (the runs of one case and setup over time) as JSON data, with its first bad
    record or None.
    """
    head, bad = trend.head, trend.bad
    names = ("name", "size", "key", "division", "precision", "engine", "plan", "scope", "devices")
    told = None
    if bad is not None:
        why = {
            "codes": list(bad.record.entry.codes),
            "ratio": ratio_table(bad.ratio),
            "best": bad.best and bad.best.entry.id,
        }
        told = _run(bad.record) | why
    return {
        **head.model_dump(mode="json", include=set(names)),
        "unit": trend.unit,
        "points": [_point(one) for one in trend.points],
        "first_bad": told,
    }


def _point(point: "Point") -> dict[str, Any]:
    """Return a point of a trend (a run, or repeats of it) as JSON data; its rate is None if no run
    has one.
    """
    entry = point.runs[0].entry
    return {
        "created": entry.created,
        "revision": entry.revision,
        "dirty": entry.dirty,
        "rate": None if point.rate is None else point.rate.value,
        "rate_interval": None if point.rate is None else point.rate.interval,
        "interval_from": point.source,
        "to_first": ratio_table(point.to_first),
        "to_before": ratio_table(point.to_before),
        "records": [_run(one) for one in point.runs],
    }


def _run(one: "Indexed") -> dict[str, Any]:
    """Return id, path, status and rate of an indexed record as JSON data."""
    entry = one.entry
    return {"id": entry.id, "path": str(one.path), "status": entry.status, "rate": entry.rate}
