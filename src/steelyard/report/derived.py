"""What a record says in words, in the language of a page.

A record stores its checks, reasons and notes as codes and values, and an older one as English sentences. All of it follows
from the samples, so a page derives it again and renders it in its own language. What cannot be derived, the failure of a run,
has a sentence for its code, and the stored text stands beside it as it is.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from steelyard import words
from steelyard.metrics import table, validity
from steelyard.metrics.result import Result
from steelyard.metrics.validity import Judgement
from steelyard.record.record import Reason, Record
from steelyard.words import Message, Words

KEPT = 8  # records whose texts are at hand: a page is made of one after the other


@dataclass(frozen=True)
class CheckLine:
    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class ReasonLine:
    """`text` is in the language of the page; `quoted` is what a program or this one said at the time, as it was stored."""

    code: str
    text: str
    quoted: str | None = None

    def whole(self, say: Words) -> str:
        return self.text if self.quoted is None else say("colon").join((self.text, say("quoted", self.quoted)))


def checks(record: Record, say: Words) -> list[CheckLine]:
    found = _of(record)
    if not found.same_checks:
        return [CheckLine(one.name, one.ok, words.text(one.detail, say.lang)) for one in record.checks]
    return [CheckLine(one.name, one.ok, words.text(one.said, say.lang)) for one in found.judged.checks]


def reasons(record: Record, say: Words) -> list[ReasonLine]:
    """Why a run is not valid: of a failed run the failure comes first."""
    first = [failure(one, say) for one in record.reasons[:1]] if record.failure is not None else []
    found = _of(record)
    if not found.same_reasons:
        own = record.reasons[len(first) :]
        return [*first, *(ReasonLine(one.code, words.text(one.text, say.lang)) for one in own)]
    return [*first, *(ReasonLine(code, words.text(said, say.lang)) for code, said in found.judged.reasons)]


def failure(reason: Reason, say: Words) -> ReasonLine:
    """A reason that does not follow from samples: of a run, or of a measurement of a machine."""
    code = f"failure.{reason.code}"
    known = code if code in words.table() else "failure.other"
    return ReasonLine(reason.code, words.text(Message(known), say.lang), words.text(reason.text, say.lang) or None)


def notes(record: Record, say: Words) -> list[str]:
    found = _of(record)
    return [words.text(one, say.lang) for one in (found.judged.notes if found.same_notes else record.notes)]


def metric_note(record: Record, name: str, say: Words) -> str:
    """The note of a metric; empty where there is none."""
    told, found = record.metrics.get(name), _of(record).results.get(name)
    if found is None or (told is not None and (told.value is None) != (found.value is None)):
        return words.text(told.note or "", say.lang) if told is not None else ""
    return words.text(found.note or "", say.lang)


def quality_note(record: Record, say: Words) -> str:
    """Why the quality was not evaluated; empty where it was."""
    judged = _of(record).judged
    if judged.quality.evaluated != record.quality.evaluated:
        return words.text(record.quality.note or "", say.lang)
    return words.text(judged.unevaluated or "", say.lang)


@dataclass(frozen=True)
class _Derived:
    """What follows from a record, and whether what it says does. Of a record that does not verify its own text is shown."""

    judged: Judgement
    results: dict[str, Result]
    same_checks: bool
    same_reasons: bool
    same_notes: bool


@dataclass(frozen=True, eq=False)
class _Same:
    """A record by what it is in memory: two that are equal in a hash need not be the same."""

    record: Record

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.record is self.record

    def __hash__(self) -> int:
        return id(self.record)


def _of(record: Record) -> _Derived:
    return _derived(_Same(record))


@lru_cache(maxsize=KEPT)
def _derived(same: _Same) -> _Derived:
    record = same.record
    results = table.results(record)
    judged = validity.findings(record, table.values(record, results))
    told = [(one.name, one.ok) for one in record.checks]
    again = [(one.name, one.ok) for one in judged.checks]
    own = record.reasons[1:] if record.failure is not None else record.reasons
    notes = [words.stored(one, record.wording) for one in judged.notes]
    return _Derived(
        judged=judged,
        results=results,
        same_checks=not Counter(told) - Counter(again),
        same_reasons=[one.code for one in own] == [code for code, _ in judged.reasons],
        same_notes=words.all_among(record.notes, notes),
    )
