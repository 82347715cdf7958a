"""What a record says in words, in the language of a page.

A record holds its checks, reasons and notes in English. All of it follows from the samples, so a page derives it again and
renders it in its own language. What cannot be derived, the failure of a run, has a sentence for its code, and the stored text
stands beside it as it is.
"""

from dataclasses import dataclass
from functools import lru_cache

from steelyard import words
from steelyard.metrics import table, validity
from steelyard.metrics.validity import Judgement
from steelyard.record.record import Reason, Record
from steelyard.report.words import Words
from steelyard.words import Message

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
    return [CheckLine(one.name, one.ok, words.text(one.said, say.lang)) for one in _of(record).judged.checks]


def reasons(record: Record, say: Words) -> list[ReasonLine]:
    """Why a run is not valid: of a failed run the failure comes first."""
    first = [failure(one, say) for one in record.reasons[:1]] if record.failure is not None else []
    return [*first, *(ReasonLine(code, words.text(said, say.lang)) for code, said in _of(record).judged.reasons)]


def failure(reason: Reason, say: Words) -> ReasonLine:
    """A reason that does not follow from samples: of a run, or of a measurement of a machine."""
    code = f"failure.{reason.code}"
    known = code if code in words.table() else "failure.other"
    return ReasonLine(reason.code, words.text(Message(known), say.lang), reason.text or None)


def notes(record: Record, say: Words) -> list[str]:
    return [words.text(one, say.lang) for one in _of(record).judged.notes]


def metric_note(record: Record, name: str, say: Words) -> str:
    """The note of a metric; empty where there is none. Of a metric that is not known here, what the record says."""
    found = _of(record).notes
    if name not in found:
        told = record.metrics.get(name)
        return (told.note or "") if told is not None else ""
    note = found[name]
    return "" if note is None else words.text(note, say.lang)


def quality_note(record: Record, say: Words) -> str:
    """Why the quality was not evaluated; empty where it was."""
    note = _of(record).judged.unevaluated
    return "" if note is None else words.text(note, say.lang)


@dataclass(frozen=True)
class _Derived:
    judged: Judgement
    notes: dict[str, Message | None]  # of metrics


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
    notes = {name: found.note for name, found in table.results(same.record).items()}
    return _Derived(validity.findings(same.record, table.derive(same.record)), notes)
