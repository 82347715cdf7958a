"""Whether a record's case is the shipped one of its name: its question, its gate, its limits and
its size.

A key holds the question alone. A case file of one's own may bear a shipped name and ask for less,
so all that makes a run valid is compared. A record may also be older than a field of the question
that the shipped case has set since: then its question is the shipped case's of before, which is
said in words of its own.
"""

from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from typing import Any

from steelyard.case import resolve
from steelyard.case.key import LATER, key_of
from steelyard.case.new import MADE
from steelyard.errors import RequestError
from steelyard.models.auto_shape import AutoModel
from steelyard.record.record import Record
from steelyard.words import Message

NAMED = ("division", "precision")  # of a question: they have names of their own, beside the case's


def modified(record: Record) -> list[str]:
    """What of the case differs from the shipped case of its name, beside what the command line
    changed of the question and what is later than the record, which are told on their own. Nothing,
    where no case of that name is shipped."""
    case = record.case
    if case.name not in resolve.names():
        return []
    try:
        question, gate, max_interval = _shipped(case.name, case.size)
    except RequestError:
        return ["size"]
    asked = _before(_with_changes(question, case.question, case.origins), case.question)[0]
    told = None if case.gate is None else _given(case.gate.model_dump(mode="json"))
    differs = {
        "question": key_of(asked, record.fingerprint) != key_of(case.question, record.fingerprint),
        "data": asked["data"].get("fingerprint") != case.question["data"].get("fingerprint"),
        "gate": told != gate,
        "max_interval": case.max_interval != max_interval,
    }
    return [name for name, other in differs.items() if other]


def later(record: Record) -> list[str]:
    """The fields of the question that the shipped case has set since the record was made, where
    they are all that differs.
    """
    case = record.case
    if case.name not in resolve.names():
        return []
    try:
        question = _shipped(case.name, case.size)[0]
    except RequestError:
        return []
    asked, fields = _before(_with_changes(question, case.question, case.origins), case.question)
    return (
        fields
        if key_of(asked, record.fingerprint) == key_of(case.question, record.fingerprint)
        else []
    )


def apart(record: Record) -> list[Message]:
    """Why a record does not stand beside records of the shipped case; nothing where it does."""
    named = (("apart.modified", modified(record)), ("apart.earlier", later(record)))
    return [Message(code, {"parts": tuple(parts)}) for code, parts in named if parts]


def _before(shipped: dict[str, Any], told: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The shipped question as it was when a record's was asked, and the fields that it has set
    since: of those that came later, the ones that the record does not have."""
    out = deepcopy(shipped)
    fields = []
    for place, default in LATER:
        inner, into = _inside(told, place[:-1]), _inside(out, place[:-1])
        if place[-1] in into and place[-1] not in inner and into[place[-1]] != default:
            into[place[-1]] = default
            fields.append(".".join(("question", *place)))
    return out, fields


def _inside(table: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    """The table at a place in a table; an empty one where there is none."""
    for part in place:
        found = table.get(part)
        table = found if isinstance(found, dict) else {}
    return table


@cache
def _shipped(name: str, size: str) -> tuple[dict[str, Any], dict[str, Any] | None, float | None]:
    found = resolve.resolve(name, size).case
    gate = None if found.gate is None else _given(found.gate.model_dump(mode="json"))
    return found.question.model_dump(mode="json"), gate, found.max_interval


def _given(table: dict[str, Any]) -> dict[str, Any]:
    """Without what is not said: a record holds the columns of every kind of gate."""
    return {name: value for name, value in table.items() if value is not None}


def _with_changes(
    shipped: dict[str, Any], told: dict[str, Any], origins: dict[str, str]
) -> dict[str, Any]:
    """The shipped question with what the command line changed of it."""
    out = deepcopy(shipped)
    changed = [
        key
        for key, origin in origins.items()
        if origin == "command line" or origin.startswith("unknown:")
    ]
    for key in (
        *NAMED,
        *(key.removeprefix("question.") for key in changed if key.startswith("question.")),
    ):
        *parents, leaf = key.split(".")
        into: Any = out
        of: Any = told
        for part in parents:
            into, of = (one.get(part) if isinstance(one, dict) else None for one in (into, of))
        if isinstance(into, dict) and isinstance(of, dict):
            into[leaf] = of.get(leaf)
    return out


def own_notes(record: Record) -> list[Message]:
    """Return what a record says of a model of one's own: that its case is in no file, and who
    counted its FLOPs."""
    made = any(origin.startswith(MADE) for origin in record.case.origins.values())
    return [*([Message("note.own_case")] if made else []), *counted_types([record])]


def counted_types(records: Iterable[Record]) -> list[Message]:
    """Return a note for each model type among records whose FLOPs do not follow from shapes."""
    models = [record.question.model for record in records]
    types = dict.fromkeys(model.model_type for model in models if isinstance(model, AutoModel))
    return [Message("note.counted", {"type": name}) for name in types]
