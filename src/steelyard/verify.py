"""Verification: a record says what its raw samples say, byte for byte and number for number."""

from pathlib import Path

from steelyard import metrics, record, validity
from steelyard.record import Record


def verify(path: Path) -> list[str]:
    """What is wrong with a record; nothing, where it is sound."""
    found = record.read(path)
    return record.integrity(path, found) + _recompute(found)


def _recompute(found: Record) -> list[str]:
    wrong = []
    values = metrics.derive(found)
    for name in sorted(values.keys() | found.metrics.keys()):
        if name not in found.metrics:
            wrong.append(f"metric {name} is missing; recomputed: {values[name].value}")
        elif name not in values:
            wrong.append(f"metric {name} is not one that can be derived")
        elif found.metrics[name] != values[name]:
            wrong.append(f"metric {name} is {found.metrics[name].value}; recomputed from the samples: {values[name].value}")
    checks, reasons, _, quality = validity.judge(found, values)
    if found.checks != checks or found.quality != quality:
        wrong.append("the checks or the quality are not those that follow from the samples")
    if found.failure is None:
        status = "invalid" if reasons else "valid"
        if found.status != status:
            wrong.append(f"the status is {found.status}; it follows from the samples that it is {status}")
    return wrong
