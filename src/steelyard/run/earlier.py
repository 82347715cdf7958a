"""Records of earlier runs that already answer a request."""

from dataclasses import dataclass
from pathlib import Path

from steelyard.errors import RequestError
from steelyard.metrics import verify
from steelyard.record import record, sealed
from steelyard.record.record import GateFacts, Nothing, Record
from steelyard.run.ready import Ready

MADE = "made"  # the source of data that a task makes itself


@dataclass(frozen=True)
class Earlier:
    path: Path
    record: Record


def find(folder: Path, wanted: list[Ready]) -> tuple[list[list[Earlier]], list[str]]:
    """For each request its valid records in a folder, oldest first, and a line on every file that is no sound record."""
    out: list[list[Earlier]] = [[] for _ in wanted]
    warnings = []
    for path in sorted(folder.glob("*.json")):
        if sealed.kind(path) != "run":
            continue
        try:
            found = record.read(path)
            place = next((i for i, one in enumerate(wanted) if answers(found, one)), None)
            if place is not None:
                out[place].append(Earlier(path, verify.read(path)))  # a number in a table has to follow from its samples
        except RequestError as error:
            warnings.append(f"{error}; it is not counted as a run")
    return [sorted(of, key=lambda one: one.record.created) for of in out], warnings


def answers(found: Record, ready: Ready) -> bool:
    """Whether a record is a valid run of this request. It names neither the folder of data nor that of weights, so of those
    only the kind is compared: made or read, random or trained."""
    case, request = ready.case, ready.request
    gate = None if case.gate is None else GateFacts(**case.gate.model_dump(mode="json"))
    asked = (case.name, case.size, gate, case.max_interval)
    made = not isinstance(found.data, Nothing) and found.data.source == MADE
    return (
        found.status == "valid"
        and not found.restarts
        and (found.case.name, found.case.size, found.case.gate, found.case.max_interval) == asked
        and found.question == case.question
        and found.auto == request.resolved.auto
        and found.tune == case.tune.model_copy(update={name: getattr(found.tune, name) for name in found.auto})
        and (found.plan, found.scope) == (ready.plan, ready.scope)
        and {window.pass_name for window in found.passes} == set(ready.passes)
        and found.engine.name == ready.engine.name
        and (ready.accelerator is None or ready.accelerator.name == found.environment.hardware.accelerator)
        and (made, found.weights.trained) == (request.data is None, request.weights is not None)
    )
