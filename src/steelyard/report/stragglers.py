"""Stragglers of a run: each rank's own time, and in a sentence the slowest and what it costs."""

from collections.abc import Callable

from steelyard import words
from steelyard.metrics import stragglers
from steelyard.metrics.spans import devices
from steelyard.metrics.stragglers import RankTime, Stragglers, Unknown
from steelyard.record.record import Record
from steelyard.report.document import Block, Cell, Column, Paragraph, Table, TableRow, Tone
from steelyard.report.numbers import UNKNOWN, counted, formed, spelled
from steelyard.words import Words

MOST = 16  # rows

_Shown = Callable[[RankTime], str]
# Heading, unit, and what a row says: left-aligned where the unit is None. A column stands where a row has something to say.
_COLUMNS: tuple[tuple[str, str | None, _Shown], ...] = (
    ("ranks.rank", None, lambda row: _ranks(row)),
    ("stragglers.at", None, lambda row: spelled(row.host)),
    ("ranks.device", None, lambda row: spelled(row.device)),
    ("stragglers.own", "s", lambda row: formed("number", row.own_s)),
    ("stragglers.wait", "s", lambda row: formed("number", row.wait_s)),
    ("stragglers.median", "", lambda row: _signed(row.relative)),
    ("stragglers.tokens", "", lambda row: counted(row.tokens)),
)


def section(record: Record, say: Words) -> list[Block]:
    """Of a run of several ranks; why it is not known, where it is not."""
    if devices(record) < 2:
        return []
    found = stragglers.find(record)
    if isinstance(found, Unknown):
        return [Paragraph(words.text(found.reason, say.lang), "muted")]
    return [Paragraph(_sentence(found, say), "strong" if found.slow else "plain"), _table(found, say)]


def _sentence(found: Stragglers, say: Words) -> str:
    one = found.slowest
    who = say("stragglers.rank", _ranks(one)) if one.host is None else say("stragglers.host", _ranks(one), one.host)
    of = say("stragglers.pass" if found.basis == "pass" else "stragglers.step")
    cost = formed("percent", found.share)
    if not found.slow:
        return say("stragglers.even", who, cost, of)
    said = [say("stragglers.slow", who, cost, of, formed("number", one.own_s), formed("number", one.others_s))]
    if found.more_work is not None:
        said.append(say("stragglers.work", f"{found.more_work:.2f}"))
    return say("gap").join(said)


def _table(found: Stragglers, say: Words) -> Table:
    shown = found.rows[:MOST]
    columns = [one for one in _COLUMNS if any(one[2](row) != UNKNOWN for row in shown)]
    heads = tuple(
        Column(say(key), words.unit(unit or "", say.lang), "left" if unit is None else "right") for key, unit, _ in columns
    )
    rows = []
    for place, row in enumerate(shown):
        tone: Tone = "strong" if place == 0 and found.slow else "plain"
        rows.append(TableRow(tuple(Cell(text(row), tone=tone) for _, _, text in columns)))
    notes = [say("stragglers.most", counted(MOST), counted(len(found.rows)))] if len(found.rows) > MOST else []
    return Table(heads, tuple(rows), (*notes, say(f"stragglers.own.{found.basis}")))


def _ranks(row: RankTime) -> str:
    first, last = row.ranks[0], row.ranks[-1]
    return counted(first) if first == last else f"{counted(first)}–{counted(last)}"


def _signed(value: float | None) -> str:
    text = formed("percent", value)
    return f"+{text}" if value is not None and value > 0 and text != UNKNOWN else text
