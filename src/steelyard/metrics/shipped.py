"""Compare a record's case with the shipped case of its name: question, gate, limits and size.

A key holds only the question. A user's case file may bear a shipped name and ask for less, so all
that makes a run valid is compared. A record may also be older than a question field that the
shipped case has set since; that is reported apart. Pages keep such records apart, and records get
notes.
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

NAMED = ("division", "precision")  # question fields that are shown by name beside the case's


def modified(record: Record) -> list[str]:
    """Return which parts of a record's case differ from the shipped case of its name: of
    "question", "data", "gate", "max_interval", or only "size" if the shipped case has no such size.

    What the command line changed in the question, and fields that are newer than the record, do not
    count. Empty if nothing differs, or no case of that name is shipped.
    """
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
    """Return the question fields (dotted names) that the shipped case has set since the record was
    made, if nothing else differs; otherwise empty.
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
    """Return messages on why a record must not stand beside records of the shipped case (modified,
    or earlier); empty if it may.
    """
    named = (("apart.modified", modified(record)), ("apart.earlier", later(record)))
    return [Message(code, {"parts": tuple(parts)}) for code, parts in named if parts]


def _before(shipped: dict[str, Any], told: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the shipped question without the fields that it got after the record was made, and
    their dotted names.

    Such a field is one of `case.key.LATER` that the record's question lacks; it is set back to its
    default in a copy.
    """
    out = deepcopy(shipped)
    fields = []
    for place, default in LATER:
        inner, into = _inside(told, place[:-1]), _inside(out, place[:-1])
        if place[-1] in into and place[-1] not in inner and into[place[-1]] != default:
            into[place[-1]] = default
            fields.append(".".join(("question", *place)))
    return out, fields


def _inside(table: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    """Return the nested dict at a path of keys; an empty dict if there is none."""
    for part in place:
        found = table.get(part)
        table = found if isinstance(found, dict) else {}
    return table


@cache
def _shipped(name: str, size: str) -> tuple[dict[str, Any], dict[str, Any] | None, float | None]:
    """Return question, gate (None if there is none) and max_interval of a shipped case in a size;
    cached for the process.

    Raises RequestError if the case does not have that size.
    """
    found = resolve.resolve(name, size).case
    gate = None if found.gate is None else _given(found.gate.model_dump(mode="json"))
    return found.question.model_dump(mode="json"), gate, found.max_interval


def _given(table: dict[str, Any]) -> dict[str, Any]:
    """Return the dict without values that are None, because a record stores the fields of every
    kind of gate.
    """
    return {name: value for name, value in table.items() if value is not None}


def _with_changes(
    shipped: dict[str, Any], told: dict[str, Any], origins: dict[str, str]
) -> dict[str, Any]:
    """Return a copy of the shipped question with the record's values where the command line changed
    them.

    Values of unknown origin count as changed. Division and precision are always the record's, since
    they are shown by name.
    """
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
    """Return the notes of a record on a user's own model: that its case is in no file, and that its
    FLOPs were counted by running the model; empty for other records.
    """
    made = any(origin.startswith(MADE) for origin in record.case.origins.values())
    return [*([Message("note.own_case")] if made else []), *counted_types([record])]


def counted_types(records: Iterable[Record]) -> list[Message]:
    """Return one note for each model type among the records whose FLOPs do not follow from shapes
    but were counted by running the model.
    """
    models = [record.question.model for record in records]
    types = dict.fromkeys(model.model_type for model in models if isinstance(model, AutoModel))
    return [Message("note.counted", {"type": name}) for name in types]
