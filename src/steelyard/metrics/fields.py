"""In which fields records differ: of their question, and of what they were run with."""

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

CASE = "case"  # of --across: whatever the question is
FINGERPRINT = "question.data.fingerprint"
UNREAD = "unknown"  # the fingerprint of a run that did not come to read its data
MOST = 8  # fields that one line names

Table = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """A field that differs, with the values of each side; several where its own runs differ. None
    is not known.
    """

    name: str
    base: tuple[Any, ...]
    new: tuple[Any, ...]


def question(record: Record) -> Table:
    """The fields that make the key of a record, by dotted name, and what was named of its data:
    whoever names other questions asks something else."""
    out = flat(key.hashed(record.case.question, record.fingerprint), "question.")
    named = record.scope.model_dump(mode="json", include=set(Scope.LATER))
    return {
        name: value for name, value in out.items() if name != FINGERPRINT or value != UNREAD
    } | flat(named, "scope.")


def setting(record: Record) -> Table:
    """What a run was made with, beside its question: tune, plan, scope, engine, machine, software,
    weights, data.
    """
    told = record.model_dump(
        mode="json",
        include={"tune", "plan", "scope", "engine", "site", "weights", "data"},
        by_alias=True,
    )
    # stands in the question, and so does what was named of the data
    told["data"].pop("fingerprint", None)
    for name in Scope.LATER:
        told["scope"].pop(name, None)
    told["environment"] = environment(record.environment)
    case = record.case.model_dump(mode="json", include={"name", "size", "gate", "max_interval"})
    return flat({"formulas": record.formulas or 1, "case": case, **told}, "")


def environment(found: Environment) -> Table:
    """An environment with its devices by kind and number, as readers count them."""
    out = found.model_dump(mode="json")
    devices = out["hardware"].pop("devices")
    out["hardware"]["devices"] = [
        f"{count}x {name}" for name, count in Counter(one["name"] for one in devices).items()
    ]
    out["hardware"]["uuids"] = [one["uuid"] for one in devices if one.get("uuid")]
    return out


def flat(table: Table, prefix: str) -> Table:
    """Values by dotted name. Lists are values; an empty table has none."""
    out: Table = {}
    for name, value in table.items():
        out |= (
            flat(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return out


def differing(base: Sequence[Table], new: Sequence[Table]) -> tuple[Field, ...]:
    """The fields whose values are not the same on both sides, in the order in which they are told."""
    out = []
    for name in dict.fromkeys(name for one in (*base, *new) for name in one):
        ours, theirs = _values(base, name), _values(new, name)
        if {canonical(one) for one in ours} != {canonical(one) for one in theirs}:
            out.append(Field(name, ours, theirs))
    return tuple(out)


def _values(tables: Iterable[Table], name: str) -> tuple[Any, ...]:
    """The values of a field, each once."""
    return tuple({canonical(one.get(name)): one.get(name) for one in tables}.values())


def questions(base: Sequence[Record], new: Sequence[Record]) -> tuple[Field, ...]:
    """Where two sides ask something else. What a failed run did not come to read is no difference."""
    found = differing([question(one) for one in base], [question(one) for one in new])
    unread = any(
        None in values for one in found if one.name == FINGERPRINT for values in (one.base, one.new)
    )
    return tuple(one for one in found if one.name != FINGERPRINT or not unread)


def check_across(across: Sequence[str], records: Sequence[Record]) -> None:
    """Refuse a field that no question has: it would allow nothing, and be a mistake."""
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
    return any(one in (CASE, name) or name.startswith(f"{one}.") for one in across)


def line(found: Sequence[Field]) -> str:
    """Fields with their values on one line."""
    shown = [f"{one.name}: {_text(one.base)} / {_text(one.new)}" for one in found[:MOST]]
    more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
    return "; ".join([*shown, *more])


def _text(values: tuple[Any, ...]) -> str:
    told = [
        one if isinstance(one, str) else "none" if one is None else canonical(one) for one in values
    ]
    return " or ".join(one if len(one) <= 64 else f"{one[:64]}…" for one in told)
