"""Repeated runs as one result: the table after the runs, and the same as JSON."""

from typing import TYPE_CHECKING, Any

from steelyard.cli.out import paged, tell

if TYPE_CHECKING:
    from steelyard.record.record import Record


def show(records: "list[Record]", wide: bool) -> None:
    """A table of each group of repeats; nothing where there is none."""
    from steelyard import report

    page = report.repeats(records)
    if page is not None:
        tell("\n" + paged(page, wide))


def as_json(records: "list[Record]") -> list[dict[str, Any]]:
    from steelyard.report import groups

    return [one.model_dump(mode="json") for one in groups.repeats(records)]
