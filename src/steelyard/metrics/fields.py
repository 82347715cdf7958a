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
from steelyard.record.facts import Environment
from steelyard.record.record import Record, Scope
from steelyard.schema import canonical

CASE = "case"  # the value of --across that allows any difference of the question
FINGERPRINT = "question.data.fingerprint"
UNREAD = "unknown"  # the fingerprint of a run that ended before it read its data
MOST = 8  # fields that one line names at most

Table = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """A field that differs between two sides, with the distinct values of each side; several if its
    own runs differ. None is unknown.
    """

    name: str
    base: tuple[Any, ...]
    new: tuple[Any, ...]


def question(record: Record) -> Table:
    """Return the fields that a record's key is the hash of, by dotted name, and the subjects and
    rows that its scope names.

    The data fingerprint is left out if the run ended before it read its data.
    """
    out = flat(key.hashed(record.case.question, record.fingerprint), "question.")
    named = record.scope.model_dump(mode="json", include=set(Scope.LATER))
    return {
        name: value for name, value in out.items() if name != FINGERPRINT or value != UNREAD
    } | flat(named, "scope.")


def setting(record: Record) -> Table:
    """Return what a run was made with beside its question, by dotted name: formulas, case limits,
    tune, plan, scope, engine, site, weights, data, environment.
    """
    told = record.model_dump(
        mode="json",
        include={"tune", "plan", "scope", "engine", "site", "weights", "data"},
        by_alias=True,
    )
    # the fingerprint belongs to the question, and so do the subjects and rows that were named
    told["data"].pop("fingerprint", None)
    for name in Scope.LATER:
        told["scope"].pop(name, None)
    told["environment"] = environment(record.environment)
    case = record.case.model_dump(mode="json", include={"name", "size", "gate", "max_interval"})
    return flat({"formulas": record.formulas or 1, "case": case, **told}, "")


def environment(found: Environment) -> Table:
    """Return an environment as a nested dict in which devices are listed as "8x NAME", with their
    UUIDs in a list of their own.
    """
    out = found.model_dump(mode="json")
    devices = out["hardware"].pop("devices")
    out["hardware"]["devices"] = [
        f"{count}x {name}" for name, count in Counter(one["name"] for one in devices).items()
    ]
    out["hardware"]["uuids"] = [one["uuid"] for one in devices if one.get("uuid")]
    return out


def flat(table: Table, prefix: str) -> Table:
    """Return the values of nested dicts by dotted name, each after `prefix`. Lists are values; an
    empty dict gives nothing.
    """
    out: Table = {}
    for name, value in table.items():
        out |= (
            flat(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return out


def differing(base: Sequence[Table], new: Sequence[Table]) -> tuple[Field, ...]:
    """Return the fields whose sets of values are not the same on both sides, in the order in which
    they first occur. A missing field counts as None.
    """
    out = []
    for name in dict.fromkeys(name for one in (*base, *new) for name in one):
        ours, theirs = _values(base, name), _values(new, name)
        if {canonical(one) for one in ours} != {canonical(one) for one in theirs}:
            out.append(Field(name, ours, theirs))
    return tuple(out)


def _values(tables: Iterable[Table], name: str) -> tuple[Any, ...]:
    """Return the distinct values of a field over records, in order; None if a record lacks it."""
    return tuple({canonical(one.get(name)): one.get(name) for one in tables}.values())


def questions(base: Sequence[Record], new: Sequence[Record]) -> tuple[Field, ...]:
    """Return the question fields that differ between two sides. A data fingerprint that a run did
    not come to read is no difference.
    """
    found = differing([question(one) for one in base], [question(one) for one in new])
    unread = any(
        None in values for one in found if one.name == FINGERPRINT for values in (one.base, one.new)
    )
    return tuple(one for one in found if one.name != FINGERPRINT or not unread)


def check_across(across: Sequence[str], records: Sequence[Record]) -> None:
    """Raise RequestError if a name in `across` is neither "case" nor a field, or the beginning of
    one, of these records' questions. The message suggests a similar name.
    """
    known = {CASE, "question", *(name for record in records for name in question(record))}
    known |= {
        ".".join(name.split(".")[:deep]) for name in known for deep in range(1, name.count(".") + 1)
    }
    for one in across:
        if one not in known:
            near = get_close_matches(one[:200], sorted(known), 1)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"allowed: {CASE}, or a field such as question.precision"
            )
            raise RequestError(f"--across {one[:200]!r}: no such field of these questions; {hint}")


def covered(name: str, across: Sequence[str]) -> bool:
    """Return whether `across` allows the field: by its name, by a name that it begins with, or by
    "case".
    """
    return any(one in (CASE, name) or name.startswith(f"{one}.") for one in across)


def line(found: Sequence[Field]) -> str:
    """Format fields on one line as "name: base / new; ...": at most 8, then "and N more"."""
    shown = [f"{one.name}: {_text(one.base)} / {_text(one.new)}" for one in found[:MOST]]
    more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
    return "; ".join([*shown, *more])


def _text(values: tuple[Any, ...]) -> str:
    """Format the values of one side, joined by " or "; None is "none", and more than 64 characters
    are cut.
    """
    told = [
        one if isinstance(one, str) else "none" if one is None else canonical(one) for one in values
    ]
    return " or ".join(one if len(one) <= 64 else f"{one[:64]}…" for one in told)
