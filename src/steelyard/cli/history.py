"""The verb history."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli.compare import ratio_table
from steelyard.cli.options import THRESHOLD, Format, Json, Lang, Threshold, To, Wide
from steelyard.cli.out import dump, one_line, say
from steelyard.errors import RequestError

if TYPE_CHECKING:
    from steelyard.metrics.history import History, Indexed, Point, Trend
    from steelyard.record.index import Entry


def history(
    places: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of records, or records.")],
    threshold: Threshold = THRESHOLD,
    index_file: Annotated[
        Path | None, typer.Option("--index", metavar="FILE", help="The index. Default: a file in your cache folder.")
    ] = None,
    no_index: Annotated[bool, typer.Option("--no-index", help="Read every record; keep no index.")] = False,
    format_: Format = "text",
    lang: Lang = "en",
    to: To = None,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Show how the rate of each case changed over time.

    It names the first bad record of each. It keeps an index of the records, which can be deleted at any time.

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
    if as_json and to is None:
        dump(_table(found))
    else:
        page = report.history(found, lang)  # type: ignore[arg-type]
        show(page, format_, lang, to, wide, as_json)


def _entries(places: list[Path], named: Path | None, no_index: bool) -> "dict[Path, Entry]":
    """Return the entry of every record, by this user's index or the one that was named."""
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
    """Return the index in this user's cache; None, with a warning, where there is no place for one."""
    from steelyard.record import index
    from steelyard.run import environment

    try:
        return environment.private_cache(os.environ, "index") / index.NAME
    except (OSError, RequestError) as error:
        say(f"warning: no index is kept: {one_line(error)}")
        return None


def _table(found: "History") -> dict[str, Any]:
    return {
        "threshold": found.threshold,
        "trends": [_trend(one) for one in found.trends],
        "wrong": [{"path": str(one.path), "why": one.entry.wrong} for one in found.wrong],
    }


def _trend(trend: "Trend") -> dict[str, Any]:
    head, bad = trend.head, trend.bad
    names = ("name", "size", "key", "division", "precision", "engine", "plan", "scope", "devices")
    told = None
    if bad is not None:
        why = {"codes": list(bad.record.entry.codes), "ratio": ratio_table(bad.ratio), "best": bad.best and bad.best.entry.id}
        told = _run(bad.record) | why
    return {
        **head.model_dump(mode="json", include=set(names)),
        "unit": trend.unit,
        "points": [_point(one) for one in trend.points],
        "first_bad": told,
    }


def _point(point: "Point") -> dict[str, Any]:
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
    entry = one.entry
    return {"id": entry.id, "path": str(one.path), "status": entry.status, "rate": entry.rate}
