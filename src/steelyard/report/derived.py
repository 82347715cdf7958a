"""What a record says in words, in the language of a page.

A record stores its checks, reasons and notes as codes and values, and an older one as English
sentences. All of it follows from the samples, so a page derives it again and renders it in its own
language. What cannot be derived, the failure of a run, has a sentence for its code, and the stored
text stands beside it as it is.
"""

from collections import Counter
from dataclasses import dataclass

from steelyard import words
from steelyard.metrics import table, validity
from steelyard.record.record import Check, Reason, Record
from steelyard.words import Message, Words


@dataclass(frozen=True)
class ReasonLine:
    """`text` is in the language of the page; `quoted` is what a program or this one reported at the
    time, as it was stored."""

    code: str
    text: str
    quoted: str | None = None

    def whole(self, say: Words) -> str:
        return (
            self.text
            if self.quoted is None
            else say("colon").join((self.text, say("quoted", self.quoted)))
        )


def failure(reason: Reason, say: Words) -> ReasonLine:
    """Return a reason that does not follow from samples: of a run, or of a measurement of a
    machine."""
    code = f"failure.{reason.code}"
    known = code if code in words.table() else "failure.other"
    return ReasonLine(
        reason.code, words.text(Message(known), say.lang), words.text(reason.text, say.lang) or None
    )


class DerivedTexts:
    """The texts of a record, derived from its samples. Where its stored ones do not follow from
    them, as in a record that does not verify, those are shown."""

    def __init__(self, record: Record, say: Words) -> None:
        self._record, self._say = record, say
        self._results = table.results(record)
        self._judged = validity.findings(record, table.values(record, self._results))

    def _text(self, message: Message | str | None) -> str:
        return words.text(message or "", self._say.lang)

    def checks(self) -> list[Check]:
        found = [(one.name, one.ok, one.said) for one in self._judged.checks]
        stored = [(one.name, one.ok, one.detail) for one in self._record.checks]
        again = Counter(one[:2] for one in found)
        chosen = stored if Counter(one[:2] for one in stored) - again else found
        return [Check(name=name, ok=ok, detail=self._text(text)) for name, ok, text in chosen]

    def reasons(self) -> list[ReasonLine]:
        """Return why a run is not valid: of a failed run the failure comes first."""
        failed = self._record.failure is not None
        first = [failure(one, self._say) for one in self._record.reasons[:1]] if failed else []
        stored = [(one.code, one.text) for one in self._record.reasons[len(first) :]]
        follow = [code for code, _ in stored] == [code for code, _ in self._judged.reasons]
        found = self._judged.reasons if follow else stored
        return [*first, *(ReasonLine(code, self._text(text)) for code, text in found)]

    def notes(self) -> list[str]:
        record, found = self._record, self._judged.notes
        follow = words.all_among(record.notes, [words.stored(one, record.wording) for one in found])
        return [self._text(one) for one in (found if follow else record.notes)]

    def metric_note(self, name: str) -> str:
        """Return the note of a metric; empty where there is none."""
        stored, found = self._record.metrics.get(name), self._results.get(name)
        follows = found and (stored is None or (found.value is None) == (stored.value is None))
        source = found if follows else stored
        return self._text(source.note) if source is not None else ""

    def quality_note(self) -> str:
        """Return why the quality was not evaluated; empty where it was."""
        stored = self._record.quality
        follow = self._judged.quality.evaluated == stored.evaluated
        return self._text(self._judged.unevaluated if follow else stored.note)
