"""Derive the texts of a record (checks, reasons, notes) again, in the language of the page.

A record stores them as codes and values, an older one as English sentences. All of them follow from
the samples, so a page computes and renders them itself. What does not follow, the failure of a run,
has a sentence for its code, and the stored text is quoted behind it.
"""

from collections import Counter
from dataclasses import dataclass

from steelyard import words
from steelyard.metrics import metric_table, validity
from steelyard.record.record import Check, Reason, Record
from steelyard.words import Message, PageWords


@dataclass(frozen=True)
class ReasonLine:
    """A reason why a run is not valid: its `code`, its sentence (`text`) in the language of the
    page, and `quoted`, an error text as it was stored when the run failed, or None. `format(say)`
    returns the sentence, followed by the quoted text.
    """

    code: str
    text: str
    quoted: str | None = None

    def format(self, say: PageWords) -> str:
        """Return this reason's sentence, followed by a colon and the quoted error text if there is
        one.
        """
        return (
            self.text
            if self.quoted is None
            else say("colon").join((self.text, say("quoted", self.quoted)))
        )


def describe_failure(reason: Reason, say: PageWords) -> ReasonLine:
    """Return the line for a reason that does not follow from samples: why a run, or a measurement
    of ceilings, failed.

    The sentence is that of text `failure.CODE`, or a general one if there is none; the stored text
    is quoted (None if it is empty). Texts of installed packages are loaded: RequestError if that
    fails.
    """
    code = f"failure.{reason.code}"
    text_code = code if code in words.load_texts() else "failure.other"
    return ReasonLine(
        reason.code,
        words.render_text(Message(text_code), say.lang),
        words.render_text(reason.text, say.lang) or None,
    )


class DerivedTexts:
    """The checks, reasons and notes of a record as texts in the language of the page, derived again
    from its samples when it is created.

    `list_checks` returns `Check`s, `list_reasons` a `ReasonLine` for each reason (none for a valid
    run), `list_notes` texts; `metric_note(name)` and `quality_note` return a text, or an empty one.
    Where the stored ones do not agree with the derived ones, as in a record that does not verify,
    the stored ones are returned.
    """

    def __init__(self, record: Record, say: PageWords) -> None:
        """Compute the record's metrics and judgement (checks, reasons, notes, quality) again, from
        which all texts are derived; the record is not changed.
        """
        self._record, self._say = record, say
        self._results = metric_table.compute_results(record)
        self._judgement = validity.judge_as_messages(
            record, metric_table.make_record_values(record, self._results)
        )

    def _text(self, message: Message | str | None) -> str:
        """Return a message or a stored sentence in the language of the page; an empty string for
        None.
        """
        return words.render_text(message or "", self._say.lang)

    def list_checks(self) -> list[Check]:
        """Return the record's checks with details in the language of the page: the derived ones, or
        all of the stored ones if one of those (name and result) is not among the derived.
        """
        derived = [(check.name, check.ok, check.message) for check in self._judgement.checks]
        stored = [(check.name, check.ok, check.detail) for check in self._record.checks]
        derived_counts = Counter(check[:2] for check in derived)
        chosen = stored if Counter(check[:2] for check in stored) - derived_counts else derived
        return [Check(name=name, ok=ok, detail=self._text(text)) for name, ok, text in chosen]

    def list_reasons(self) -> list[ReasonLine]:
        """Return why the record's run is not valid; an empty list for a valid run.

        The first stored reason of a failed run is its failure, and is never derived. The others are
        derived; if the stored codes are not the same in the same order, the stored ones are shown.
        """
        failed = self._record.failure is not None
        failures = (
            [describe_failure(reason, self._say) for reason in self._record.reasons[:1]]
            if failed
            else []
        )
        stored = [(reason.code, reason.text) for reason in self._record.reasons[len(failures) :]]
        agrees = [code for code, _ in stored] == [code for code, _ in self._judgement.reasons]
        chosen = self._judgement.reasons if agrees else stored
        return [*failures, *(ReasonLine(code, self._text(text)) for code, text in chosen)]

    def list_notes(self) -> list[str]:
        """Return the record's notes as texts: the derived ones, or all of the stored ones if one of
        those does not follow from the samples.
        """
        record, derived = self._record, self._judgement.notes
        agrees = words.are_all_among(
            record.notes, [words.to_stored_form(note, record.wording) for note in derived]
        )
        return [self._text(note) for note in (derived if agrees else record.notes)]

    def metric_note(self, name: str) -> str:
        """Return the note of one of the record's metrics; empty where there is none.

        It is the derived one, or the stored one if the metric is not derived, or if only one of the
        stored and the derived value is known.
        """
        stored, derived = self._record.metrics.get(name), self._results.get(name)
        agrees = derived and (stored is None or (derived.value is None) == (stored.value is None))
        source = derived if agrees else stored
        return self._text(source.note) if source is not None else ""

    def quality_note(self) -> str:
        """Return why the quality of the record's run was not evaluated; empty where it was. The
        stored note is used if stored and derived result disagree on that.
        """
        stored = self._record.quality
        agrees = self._judgement.quality.evaluated == stored.evaluated
        return self._text(self._judgement.unevaluated if agrees else stored.note)
