"""Repeated runs as one result: the table after the runs, and the same as JSON."""

from typing import TYPE_CHECKING, Any

from steelyard.cli.out import paged, tell

if TYPE_CHECKING:
    from steelyard.metrics.repeats import Repeats, Spread
    from steelyard.record.record import Record


def show(records: "list[Record]", wide: bool) -> None:
    """A table of each group of repeats; nothing where there is none."""
    from steelyard import report

    page = report.repeats(records)
    if page is not None:
        tell("\n" + paged(page, wide))


def as_json(records: "list[Record]") -> list[dict[str, Any]]:
    from steelyard.metrics import repeats

    return [_group(group) for group in repeats.groups(records)]


def _group(group: "Repeats") -> dict[str, Any]:
    first = group.records[0]
    case, plan = first.case, first.plan
    asked = {"case": case.name, "size": case.size, "key": case.key, "division": case.division, "precision": case.precision}
    places = {"engine": first.engine.name, "config": plan.config, "plan": str(plan), "scope": first.scope.model_dump()}
    lost = [
        {"id": one.id, "status": one.status, "reasons": list(dict.fromkeys(reason.code for reason in one.reasons))}
        for one in group.not_valid
    ]
    told = {"records": [one.id for one in group.valid], "not_valid": lost, "interval_only": group.interval_only}
    return asked | places | told | {"metrics": {one.name: _spread(one) for one in group.metrics}}


def _spread(one: "Spread") -> dict[str, Any]:
    return {
        "unit": one.unit,
        "runs": one.runs,
        "mean": one.mean.value,
        "interval": one.mean.interval,
        "interval_from": one.source,
        "deviation": one.deviation,
        "lowest": one.lowest,
        "highest": one.highest,
    }
