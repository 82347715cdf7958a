"""List the fields in which records differ: in their question, and in what they were run with.

Fields have dotted names, such as `question.precision`. Used by `compare`, `reproduce` and
`history`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from steelyard.case import key
from steelyard.errors import RequestError
from steelyard.record.record import Record, Scope
from steelyard.record.run_facts import Environment
from steelyard.schema import to_canonical_json

ANY_FIELD = "case"  # the value of --across that allows any difference of the question
FINGERPRINT_FIELD = "question.data.fingerprint"
UNREAD_FINGERPRINT = "unknown"  # the fingerprint of a run that ended before it read its data
MEASURED_DETAILS = ("library_stamps", "mock_error_us")  # details of an engine that are no settings
MAX_SHOWN = 8  # fields that one line names at most

FieldValues = dict[str, Any]


@dataclass(frozen=True)
class FieldDifference:
    """A field that differs between two sides of a comparison: its dotted `name`, such as
    question.train.batch, and tuples `base` and `new` of the distinct values in the records of each
    side; several if its own runs differ. None stands for a record without the field.
    """

    name: str
    base: tuple[Any, ...]
    new: tuple[Any, ...]


def list_question_fields(record: Record) -> FieldValues:
    """Return the fields that a record's key is the hash of, by dotted name with prefix `question.`,
    and `scope.subjects` and `scope.rows`, the part of the data that was named.

    `question.data.fingerprint` is left out if the run ended before it read its data.
    """
    hashed_fields = flatten_fields(
        key.make_hash_input(record.case.question, record.fingerprint), "question."
    )
    selection = record.scope.model_dump(mode="json", include=set(Scope.LATER))
    return {
        name: value
        for name, value in hashed_fields.items()
        if name != FINGERPRINT_FIELD or value != UNREAD_FINGERPRINT
    } | flatten_fields(selection, "scope.")


def list_setting_fields(record: Record) -> FieldValues:
    """Return what a run was made with beside its question, by dotted name: formulas version (1 if
    the record names none), the definitions of request samples, name, size, gate and max_interval of
    the case, tune, plan, scope, engine, packages of others, site, weights, data, environment.

    The data's fingerprint and the scope's subjects and rows are left out: they belong to the
    question. So are the details of the engine that it measured (`MEASURED_DETAILS`).
    """
    parts = record.model_dump(
        mode="json",
        include={"tune", "plan", "scope", "engine", "providers", "site", "weights", "data"},
        by_alias=True,
    )
    # the fingerprint belongs to the question, and so do the subjects and rows that were named
    parts["data"].pop("fingerprint", None)
    for name in Scope.LATER:
        parts["scope"].pop(name, None)
    for name in MEASURED_DETAILS:
        parts["engine"]["details"].pop(name, None)
    parts["environment"] = summarize_environment(record.environment)
    case = record.case.model_dump(mode="json", include={"name", "size", "gate", "max_interval"})
    fields = {"formulas": record.formulas or 1, "case": case, **parts}
    if record.requests:  # those of every pass have the same
        fields["definitions"] = record.requests[0].all_definitions
    return flatten_fields(fields, "")


def summarize_environment(facts: Environment) -> FieldValues:
    """Return an environment as a nested dict in which `hardware.devices` is a list of "8x NAME",
    one for each name, and `hardware.uuids` lists the devices' UUIDs that are known.
    """
    nested = facts.model_dump(mode="json")
    devices = nested["hardware"].pop("devices")
    nested["hardware"]["devices"] = [
        f"{count}x {name}" for name, count in Counter(device["name"] for device in devices).items()
    ]
    nested["hardware"]["uuids"] = [device["uuid"] for device in devices if device.get("uuid")]
    return nested


def flatten_fields(nested: FieldValues, prefix: str) -> FieldValues:
    """Return the values of nested dicts as one dict by dotted name, each name after `prefix` (which
    ends with its own dot or is empty). Lists are values; an empty dict gives nothing.
    """
    values: FieldValues = {}
    for name, value in nested.items():
        values |= (
            flatten_fields(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return values


def find_differences(
    base: Sequence[FieldValues], new: Sequence[FieldValues]
) -> tuple[FieldDifference, ...]:
    """Return the fields whose sets of values are not the same on both sides, each side given as one
    dict by dotted name for each record.

    In the order in which fields first occur; a field that a record lacks counts as None. Values are
    compared as JSON.
    """
    differences = []
    for name in dict.fromkeys(name for item in (*base, *new) for name in item):
        base_values, new_values = _distinct_values(base, name), _distinct_values(new, name)
        if {to_canonical_json(item) for item in base_values} != {
            to_canonical_json(item) for item in new_values
        }:
            differences.append(FieldDifference(name, base_values, new_values))
    return tuple(differences)


def _distinct_values(tables: Iterable[FieldValues], field_name: str) -> tuple[Any, ...]:
    """Return the distinct values of a field over records, in order; None if a record lacks it."""
    return tuple(
        {
            to_canonical_json(table.get(field_name)): table.get(field_name) for table in tables
        }.values()
    )


def find_question_differences(
    base: Sequence[Record], new: Sequence[Record]
) -> tuple[FieldDifference, ...]:
    """Return the question fields (`list_question_fields`) whose values differ between the records
    of two sides. The data fingerprint is left out if a run of either side ended before it read its
    data.
    """
    differences = find_differences(
        [list_question_fields(item) for item in base], [list_question_fields(item) for item in new]
    )
    unread = any(
        None in values
        for item in differences
        if item.name == FINGERPRINT_FIELD
        for values in (item.base, item.new)
    )
    return tuple(item for item in differences if item.name != FINGERPRINT_FIELD or not unread)


def check_across(across: Sequence[str], records: Sequence[Record]) -> None:
    """Raise RequestError if a name in `across` (values of `--across`) is none of: "case",
    "question", or a dotted field of these records' questions or its beginning up to a dot. The
    message suggests a similar name if there is one.
    """
    known_names = {
        ANY_FIELD,
        "question",
        *(name for record in records for name in list_question_fields(record)),
    }
    known_names |= {
        ".".join(name.split(".")[:deep])
        for name in known_names
        for deep in range(1, name.count(".") + 1)
    }
    for field_name in across:
        if field_name not in known_names:
            similar = get_close_matches(field_name[:200], sorted(known_names), 1)
            hint = (
                f"did you mean {similar[0]!r}?"
                if similar
                else f"allowed: {ANY_FIELD}, or a field such as question.precision"
            )
            raise RequestError(
                f"--across {field_name[:200]!r}: no such field of these questions; {hint}"
            )


def is_covered(field_name: str, across: Sequence[str]) -> bool:
    """Return whether `across` allows a question field to differ: it holds the field's dotted name,
    a beginning of it that ends before a dot, or "case", which allows all.
    """
    return any(
        allowed_name in (ANY_FIELD, field_name) or field_name.startswith(f"{allowed_name}.")
        for allowed_name in across
    )


def format_differences(differences: Sequence[FieldDifference]) -> str:
    """Return fields on one line as "name: base / new; ...": at most 8, then "and N more"; empty
    text for none.
    """
    shown = [
        f"{difference.name}: {_format_values(difference.base)} / {_format_values(difference.new)}"
        for difference in differences[:MAX_SHOWN]
    ]
    more = [f"and {len(differences) - MAX_SHOWN} more"] if len(differences) > MAX_SHOWN else []
    return "; ".join([*shown, *more])


def _format_values(values: tuple[Any, ...]) -> str:
    """Return the values of one side joined by " or ": texts as they are, None as "none", others as
    JSON; each is cut after 64 characters with "…".
    """
    texts = [
        item if isinstance(item, str) else "none" if item is None else to_canonical_json(item)
        for item in values
    ]
    return " or ".join(item if len(item) <= 64 else f"{item[:64]}…" for item in texts)
