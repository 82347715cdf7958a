"""Verification: a record says what its raw samples say, byte for byte and number for number."""

from pathlib import Path

from steelyard import metrics, record, validity
from steelyard.record import Record, Value


def verify(path: Path) -> list[str]:
    """What is wrong with a record; nothing, where it is sound."""
    found = record.read(path)
    return record.integrity(path, found) + _recompute(found)


def _recompute(found: Record) -> list[str]:
    wrong = []
    values = metrics.derive(found)
    for name, told in found.metrics.items():  # a record may be older than a metric, and a note may be reworded
        if name not in values:
            wrong.append(f"metric {name} is not one that can be derived")
        elif _numbers(told) != _numbers(values[name]):
            wrong.append(f"metric {name} is {_numbers(told)}; recomputed from the samples: {_numbers(values[name])}")
    checks, reasons, _, quality = validity.judge(found, values)
    again = {check.name: check.ok for check in checks}
    wrong += [
        f"check {check.name} does not follow from the samples" for check in found.checks if again.get(check.name) != check.ok
    ]
    if (found.quality.value, found.quality.evaluated) != (quality.value, quality.evaluated):
        wrong.append(f"the quality is {found.quality.value}; recomputed: {quality.value}, evaluated: {quality.evaluated}")
    if found.failure is None:
        status = "invalid" if reasons else "valid"
        if found.status != status:
            wrong.append(f"the status is {found.status}; it follows from the samples that it is {status}")
    return wrong


def _numbers(value: Value) -> tuple[float | None, str, tuple[float, float] | None]:
    return value.value, value.unit, value.interval
