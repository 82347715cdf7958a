"""Whether a record's case is the shipped one of its name: its question, its gate, its limits and its size.

A key holds the question alone. A case file of one's own may bear a shipped name and ask for less, so all that makes a run valid
is compared.
"""

from copy import deepcopy
from functools import cache
from typing import Any

from steelyard.case import resolve
from steelyard.case.key import key_of
from steelyard.errors import RequestError
from steelyard.record.record import Record

NAMED = ("division", "precision")  # of a question: they have names of their own, beside the case's


def modified(record: Record) -> list[str]:
    """What of the case differs from the shipped case of its name, beside what the command line changed of the question,
    which is told on its own. Nothing, where no case of that name is shipped."""
    case = record.case
    if case.name not in resolve.names():
        return []
    try:
        question, gate, max_interval = _shipped(case.name, case.size)
    except RequestError:
        return ["size"]
    asked = _with_changes(question, case.question, case.origins)
    told = None if case.gate is None else _given(case.gate.model_dump(mode="json"))
    differs = {
        "question": key_of(asked, record.fingerprint) != key_of(case.question, record.fingerprint),
        "data": asked["data"].get("fingerprint") != case.question["data"].get("fingerprint"),
        "gate": told != gate,
        "max_interval": case.max_interval != max_interval,
    }
    return [name for name, other in differs.items() if other]


@cache
def _shipped(name: str, size: str) -> tuple[dict[str, Any], dict[str, Any] | None, float | None]:
    found = resolve.resolve(name, size).case
    gate = None if found.gate is None else _given(found.gate.model_dump(mode="json"))
    return found.question.model_dump(mode="json"), gate, found.max_interval


def _given(table: dict[str, Any]) -> dict[str, Any]:
    """Without what is not said: a record holds the columns of every kind of gate."""
    return {name: value for name, value in table.items() if value is not None}


def _with_changes(shipped: dict[str, Any], told: dict[str, Any], origins: dict[str, str]) -> dict[str, Any]:
    """The shipped question with what the command line changed of it."""
    out = deepcopy(shipped)
    changed = [key for key, origin in origins.items() if origin == "command line" or origin.startswith("unknown:")]
    for key in (*NAMED, *(key.removeprefix("question.") for key in changed if key.startswith("question."))):
        *parents, leaf = key.split(".")
        into: Any = out
        of: Any = told
        for part in parents:
            into, of = (one.get(part) if isinstance(one, dict) else None for one in (into, of))
        if isinstance(into, dict) and isinstance(of, dict):
            into[leaf] = of.get(leaf)
    return out
