"""Derive the texts of a record (checks, reasons, notes) again, in the language of the page.

A record stores them as codes and values, an older one as English sentences. All of them follow from
the samples, so a page computes and renders them itself. What does not follow, the failure of a run,
has a sentence for its code, and the stored text is quoted behind it.
"""

from collections import Counter
from dataclasses import dataclass

from steelyard import words
from steelyard.metrics import table, validity
from steelyard.record.record import Check, Reason, Record
from steelyard.words import Message, Words


@dataclass(frozen=True)
class ReasonLine:
    """A reason why a run is not valid. `text` is in the language of the page; `quoted` is an error
    text as it was stored when the run failed, or None.
    """

    code: str
    text: str
    quoted: str | None = None

    def whole(self, say: Words) -> str:
        """Return the text, followed by the quoted error text if there is one."""
        return (
            self.text
            if self.quoted is None
            else say("colon").join((self.text, say("quoted", self.quoted)))
        )


def failure(reason: Reason, say: Words) -> ReasonLine:
    """Return the line for a reason that does not follow from samples: why a run, or a measurement
    of ceilings, failed.

    A code without a sentence of its own gets a general one; the stored text is quoted.
    """
    code = f"failure.{reason.code}"
    known = code if code in words.table() else "failure.other"
    return ReasonLine(
        reason.code, words.text(Message(known), say.lang), words.text(reason.text, say.lang) or None
    )


class DerivedTexts:
    """The checks, reasons and notes of a record as texts, derived again from its samples when it is
    created.

    Where the stored ones do not agree with the derived ones, as in a record that does not verify,
    the stored ones are shown.
    """

    def __init__(self, record: Record, say: Words) -> None:
        """Compute the record's metrics and findings again, from which all texts are derived."""
        self._record, self._say = record, say
        self._results = table.results(record)
        self._judged = validity.findings(record, table.values(record, self._results))

    def _text(self, message: Message | str | None) -> str:
        """Return a message or a stored sentence in the language of the page; an empty string for
        None.
        """
        return words.text(message or "", self._say.lang)

    def checks(self) -> list[Check]:
        """Return the checks with translated details: the derived ones, or the stored ones if one of
        those (name and result) is not among the derived.
        """
        found = [(one.name, one.ok, one.said) for one in self._judged.checks]
        stored = [(one.name, one.ok, one.detail) for one in self._record.checks]
        again = Counter(one[:2] for one in found)
        chosen = stored if Counter(one[:2] for one in stored) - again else found
        return [Check(name=name, ok=ok, detail=self._text(text)) for name, ok, text in chosen]

    def reasons(self) -> list[ReasonLine]:
        """Return why a run is not valid, the failure of a failed run first; an empty list for a
        valid run.

        Stored reasons are shown if their codes are not the derived ones.
        """
        failed = self._record.failure is not None
        first = [failure(one, self._say) for one in self._record.reasons[:1]] if failed else []
        stored = [(one.code, one.text) for one in self._record.reasons[len(first) :]]
        follow = [code for code, _ in stored] == [code for code, _ in self._judged.reasons]
        found = self._judged.reasons if follow else stored
        return [*first, *(ReasonLine(code, self._text(text)) for code, text in found)]

    def notes(self) -> list[str]:
        """Return the notes as texts: the derived ones, or the stored ones if one of those does not
        follow from the samples.
        """
        record, found = self._record, self._judged.notes
        follow = words.all_among(record.notes, [words.stored(one, record.wording) for one in found])
        return [self._text(one) for one in (found if follow else record.notes)]

    def metric_note(self, name: str) -> str:
        """Return the note of a metric; empty where there is none. The stored note is used if only
        one of the stored and the derived value is known.
        """
        stored, found = self._record.metrics.get(name), self._results.get(name)
        follows = found and (stored is None or (found.value is None) == (stored.value is None))
        source = found if follows else stored
        return self._text(source.note) if source is not None else ""

    def quality_note(self) -> str:
        """Return why the quality was not evaluated; empty where it was."""
        stored = self._record.quality
        follow = self._judged.quality.evaluated == stored.evaluated
        return self._text(self._judged.unevaluated if follow else stored.note)
