"""The verb compare."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli.options import THRESHOLD, Format, Json, Lang, Threshold, To, Wide
from steelyard.cli.out import dump

if TYPE_CHECKING:
    from steelyard.metrics.compare import Change, Comparison, Side
    from steelyard.metrics.fields import Field
    from steelyard.metrics.ratio import Ratio


def compare(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="A record, or a folder of repeats (--repeat).")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="A record, or a folder of repeats, of the same question.")],
    across: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD",
            help="A field of the question that may differ, such as question.precision. case: any field may.",
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

    It prints the ratio of their rates, the answers, metrics and phases, and what differs between the runs. Give folders
    of repeats (run --repeat 5) for a test between runs. Exit code 0: not slower; 1: NEW is significantly slower by more
    than the threshold, or a side has no valid run; 2: the questions differ.

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
    if as_json and to is None:
        dump(table(found))
    else:
        page = report.comparison(found, lang)  # type: ignore[arg-type]
        show(page, format_, lang, to, wide, as_json)
    return 1 if found.regressed else 0


def table(found: "Comparison") -> dict[str, Any]:
    """A comparison as JSON."""
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
        "answers": {"base": None if own is None else asdict(own), "new": None if theirs is None else asdict(theirs)},
        "metrics": [_change(one) for one in found.metrics],
        "phases": [_change(one) for one in found.phases],
        "tokens_per_step": {"base": found.steps[0], "new": found.steps[1]},
        "differs": [field(one) for one in found.differs],
    }


def _side(found: "Comparison", side: "Side", place: int) -> dict[str, Any]:
    rate = found.rates[place]
    return {
        "name": side.name,
        "records": [record.id for record in side.records],
        "valid": len(side.valid),
        "left_out": [{"record": one.id, "reasons": [reason.code for reason in one.reasons]} for one in side.left_out],
        "rate": None if rate is None else rate.estimate.value,
        "rate_interval": None if rate is None else rate.estimate.interval,
        "interval_from": None if rate is None else rate.source,
    }


def _change(one: "Change") -> dict[str, Any]:
    told = {"name": one.name, "unit": one.unit, "base": one.base, "new": one.new}
    return told | {"ratio": ratio_table(one.ratio), "direction": one.direction or None}


def ratio_table(one: "Ratio | None") -> dict[str, Any] | None:
    if one is None:
        return None
    return {"value": one.value, "interval": one.interval, "interval_from": one.source, "verdict": one.verdict}


def field(one: "Field") -> dict[str, Any]:
    return {"field": one.name, "base": list(one.base), "new": list(one.new)}
