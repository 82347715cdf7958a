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
from steelyard.case.key import LATER_FIELDS, compute_question_key
from steelyard.case.new_case import MADE_FROM
from steelyard.errors import RequestError
from steelyard.models.auto_shape import AutoModel
from steelyard.record.record import Record
from steelyard.words import Message

# question fields that are shown by name beside the case's
NAMED_FIELDS = ("division", "precision", "load")


def list_modified_parts(record: Record) -> list[str]:
    """Return which parts of a record's case differ from the shipped case of its name and size: of
    "question", "data" (its fingerprint), "gate", "max_interval", in this order; or only "size" if
    the shipped case has no such size.

    What the command line changed in the question, division, precision, load, and question fields
    that are newer than the record do not count; what it changed in gate or max_interval does. Empty
    if nothing differs, or no case of that name is shipped.
    """
    case = record.case
    if case.name not in resolve.list_shipped_cases():
        return []
    try:
        question, gate, max_interval = _load_shipped_case(case.name, case.size)
    except RequestError:
        return ["size"]
    expected = _reset_later_fields(
        _apply_command_line(question, case.question, case.origins), case.question
    )[0]
    recorded_gate = (
        None if case.gate is None else _drop_none_values(case.gate.model_dump(mode="json"))
    )
    differs = {
        "question": compute_question_key(expected, record.fingerprint)
        != compute_question_key(case.question, record.fingerprint),
        "data": expected["data"].get("fingerprint") != case.question["data"].get("fingerprint"),
        "gate": recorded_gate != gate,
        "max_interval": case.max_interval != max_interval,
    }
    return [name for name, is_different in differs.items() if is_different]


def list_later_fields(record: Record) -> list[str]:
    """Return the question fields (such as `question.train.x`) that the shipped case has set since
    the record was made, if the questions are otherwise equal but for what the command line changed;
    otherwise empty, as for a name or size that is not shipped.
    """
    case = record.case
    if case.name not in resolve.list_shipped_cases():
        return []
    try:
        question = _load_shipped_case(case.name, case.size)[0]
    except RequestError:
        return []
    expected, fields = _reset_later_fields(
        _apply_command_line(question, case.question, case.origins), case.question
    )
    return (
        fields
        if compute_question_key(expected, record.fingerprint)
        == compute_question_key(case.question, record.fingerprint)
        else []
    )


def list_case_differences(record: Record) -> list[Message]:
    """Return at most two messages on why a record must not stand beside records of the shipped case
    of its name: that parts of it were modified, and that it is older than some question fields;
    empty if it may.
    """
    parts_by_code = (
        ("apart.modified", list_modified_parts(record)),
        ("apart.earlier", list_later_fields(record)),
    )
    return [Message(code, {"parts": tuple(parts)}) for code, parts in parts_by_code if parts]


def _reset_later_fields(
    shipped: dict[str, Any], recorded: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return (a copy of the shipped question in which fields that the record is too old for have
    their default, the dotted names of these fields with prefix `question.`).

    Such a field is one of `case.key.LATER_FIELDS` that the record's question lacks and the shipped
    one sets to another value than the default.
    """
    out = deepcopy(shipped)
    fields = []
    for key_path, default in LATER_FIELDS:
        recorded_table, target = (
            _get_nested(recorded, key_path[:-1]),
            _get_nested(out, key_path[:-1]),
        )
        if (
            key_path[-1] in target
            and key_path[-1] not in recorded_table
            and target[key_path[-1]] != default
        ):
            target[key_path[-1]] = default
            fields.append(".".join(("question", *key_path)))
    return out, fields


def _get_nested(table: dict[str, Any], key_path: tuple[str, ...]) -> dict[str, Any]:
    """Return the dict at a path of keys in nested dicts; a new empty dict if there is none, or a
    value on the way is no dict.
    """
    for part in key_path:
        inner = table.get(part)
        table = inner if isinstance(inner, dict) else {}
    return table


@cache
def _load_shipped_case(
    name: str, size: str
) -> tuple[dict[str, Any], dict[str, Any] | None, float | None]:
    """Return (question as a dict, gate as a dict without None values, max_interval) of a shipped
    case in a size; the last two are None if it has none. Cached for the process, so callers must
    not change it.

    Raises RequestError if the case does not exist or does not have that size.
    """
    case = resolve.resolve_case(name, size).case
    gate = None if case.gate is None else _drop_none_values(case.gate.model_dump(mode="json"))
    return case.question.model_dump(mode="json"), gate, case.max_interval


def _drop_none_values(table: dict[str, Any]) -> dict[str, Any]:
    """Return the dict without values that are None, because a record stores the fields of every
    kind of gate.
    """
    return {name: value for name, value in table.items() if value is not None}


def _apply_command_line(
    shipped: dict[str, Any], recorded: dict[str, Any], origins: dict[str, str]
) -> dict[str, Any]:
    """Return a copy of the shipped question with the record's values where the command line changed
    them, by `origins` (dotted key to where its value came from).

    Values of unknown origin count as changed. Division, precision and load are always the record's,
    since they are shown by name. A key that the record lacks becomes None; one whose parent is
    missing is skipped.
    """
    out = deepcopy(shipped)
    changed = [
        key
        for key, origin in origins.items()
        if origin == "command line" or origin.startswith("unknown:")
    ]
    for key in (
        *NAMED_FIELDS,
        *(key.removeprefix("question.") for key in changed if key.startswith("question.")),
    ):
        *parents, leaf = key.split(".")
        target: Any = out
        source: Any = recorded
        for part in parents:
            target, source = (
                item.get(part) if isinstance(item, dict) else None for item in (target, source)
            )
        if isinstance(target, dict) and isinstance(source, dict):
            target[leaf] = source.get(leaf)
    return out


def make_own_model_notes(record: Record) -> list[Message]:
    """Return the notes of a record on a user's own model: that its case is in no file but was
    generated, and that its FLOPs were counted by running the model (`make_counted_flops_notes`),
    each if it applies; empty for other records.
    """
    is_generated = any(origin.startswith(MADE_FROM) for origin in record.case.origins.values())
    return [
        *([Message("note.own_case")] if is_generated else []),
        *make_counted_flops_notes([record]),
    ]


def make_counted_flops_notes(records: Iterable[Record]) -> list[Message]:
    """Return one note for each model type among the records whose model is an `AutoModel`: its
    FLOPs do not follow from shapes but were counted by running it. In the order in which they come;
    empty if there is none.
    """
    models = [record.question.model for record in records]
    types = dict.fromkeys(model.model_type for model in models if isinstance(model, AutoModel))
    return [Message("note.counted", {"type": name}) for name in types]
