"""Say below a table why times of requests, such as a 99th percentile, are unknown: one note for
metrics and runs that have the same reason.
"""

from collections.abc import Sequence

from steelyard import words
from steelyard.record.record import Record
from steelyard.report.columns import load_table_layout
from steelyard.report.numbers import format_count
from steelyard.words import Message, PageWords

MAX_NOTES = 4
TOO_FEW = "percentile.few"  # the code of the note of a percentile without enough requests


def list_unknown_time_notes(records: Sequence[Record], say: PageWords) -> list[str]:
    """Return why times that short tables show are unknown in some of these runs: one note for each
    reason, with the metrics that it is of, at most MAX_NOTES.

    Windows with different numbers of requests, too few for a percentile, are one note.
    """
    messages: dict[tuple[str, str], list[Message | str]] = {}
    for record in records:
        fields = load_table_layout(record.task.kind_row).shared
        for name in (name for field in fields if field.times for name in field.metrics):
            value = record.metrics.get(name)
            if value is not None and value.value is None and value.note is not None:
                note = value.note
                code = note.code if isinstance(note, Message) else note
                messages.setdefault((name, code), []).append(note)
    names_by_reason: dict[str, list[str]] = {}
    for (name, _), notes in messages.items():
        names_by_reason.setdefault(_render_together(notes, say), []).append(name)
    return [
        say("load.unknown", say("comma").join(names), reason)
        for reason, names in list(names_by_reason.items())[:MAX_NOTES]
    ]


def _render_together(notes: Sequence[Message | str], say: PageWords) -> str:
    """Return notes of one code as one sentence: of windows with too few requests, how many are
    needed and how many the windows have; else the first of them.
    """
    first = notes[0]
    if isinstance(first, Message) and first.code == TOO_FEW:
        values = [note.values for note in notes if isinstance(note, Message)]
        least, counts = ({number[key] for number in values} for key in ("least", "count"))
        if len(least) == 1 and len(counts) > 1:
            numbers = sorted(count for count in counts if isinstance(count, int))
            return say("load.few", *map(format_count, (*least, numbers[0], numbers[-1])))
    return words.render_text(first, say.lang)
