"""The comparison table of a case: a row for runs that were asked the same, the best first, then the published rows."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from steelyard import words
from steelyard.metrics import overview, rates
from steelyard.metrics.overview import Row
from steelyard.metrics.runs import Estimate
from steelyard.metrics.table import row as metric_row
from steelyard.report.document import Align, Cell, Column, Link, Priority, Table, TableRow, Tone
from steelyard.report.numbers import UNKNOWN, counted, formed, real, spelled
from steelyard.report.results import PublishedRow, published
from steelyard.report.runs import STATUS_TONE, Run, accelerator, scope
from steelyard.report.setting import parallel, tuned
from steelyard.words import Words

_ORDER = ("valid", "invalid", "failed")
_CONFIG = re.compile(r"(\d+)x ([^,(]+?)(?: \([^)]*\))?(?:, (.*))?$", re.S)  # 8x NVIDIA A100 (1x8), the rest
# The convention of a published MFU that can stand beside ours, and the word for it.
MFU_CONVENTIONS = {"mfu": "published", "mfu_palm": "palm", "mfu_nominal": "nominal"}


@dataclass(frozen=True)
class Side:
    """Runs that were asked the same, with their numbers."""

    row: Row
    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        return accelerator(self.row.first)

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(Link(run.label, run.anchor) for run in self.runs)

    @property
    def labels(self) -> str:
        return ", ".join(run.label for run in self.runs)


def sides(runs: list[Run]) -> list[Side]:
    """Closed before open, valid before others, the fastest first."""
    found = overview.rows(run.record for run in runs)
    out = [Side(row, tuple(run for run in runs if any(run.record is one for one in row.records))) for row in found]

    def place(side: Side) -> tuple[bool, str, int, float]:
        division, rate = side.row.first.case.division, side.row.rate
        return division != "closed", division, _ORDER.index(side.row.status), -(rate.value if rate else 0.0)

    return sorted(out, key=place)


def unit(row: Row) -> str:
    """Of its rate."""
    return rates.work_unit(row.first)


@dataclass(frozen=True)
class _Column:
    name: str
    cell: Callable[[Side, "_Context"], Cell]
    published: Callable[[PublishedRow, "_Context"], Cell]
    right: bool = False
    priority: Priority = 1


@dataclass(frozen=True)
class _Context:
    """What cells of one table have in common. `unit` is that of most rates; a row with another says so."""

    say: Words
    unit: str
    metric: str
    in_samples: bool
    judged: bool  # whether the quality of any row is
    formulas: int  # the latest version of them


def table(runs: list[Run], say: Words) -> Table:
    found, references = sides(runs), published(runs)
    units = Counter(unit(side.row) for side in found)
    latest = max(side.row.first.formulas or 1 for side in found)
    judged = any(map(_judged, found))
    task = runs[0].record.task
    at = _Context(say, units.most_common(1)[0][0], found[0].row.metric, task.rates_in_samples, judged, latest)
    rows = [TableRow(tuple(column.cell(side, at) for column in COLUMNS)) for side in found]
    rows += [TableRow(tuple(column.published(one, at) for column in COLUMNS), "published") for one in references]
    return Table(tuple(_head(column, at) for column in COLUMNS), tuple(rows), tuple(_notes(runs, references, say)), pinned=True)


def _head(column: _Column, at: _Context) -> Column:
    say = at.say
    subs = {
        "engine": say("side.plan"),
        "precision": say("side.division"),
        "tune": say("side.scope"),
        "rate": words.unit(at.unit, say.lang),
    }
    subs |= {"mem": "GiB", "energy": words.unit("J/token", say.lang), "quality": "" if at.judged else say("not_evaluated")}
    title = metric_row(at.metric).index if column.name == "quality" else say(f"side.{column.name}")
    align: Align = "right" if column.right else "left"
    return Column(title, subs.get(column.name, ""), align, column.name == "rate", column.priority)


def _notes(runs: list[Run], references: list[PublishedRow], say: Words) -> list[str]:
    out = [say("side.note")]
    if references:
        several = len(references) > 1
        out.append(say("side.published", str(len(references))) if several else say("side.published.one"))
        size = runs[0].record.case.size
        if size != "full":
            out.append(say("published.size", size))
    return out


def _tuned(side: Side, at: _Context) -> Cell:
    """What was changed, and how much of the question was run."""
    text, extent = tuned(side.row.first), scope(side.row.first, at.say)
    return Cell(text, extent) if text else Cell(at.say("side.default"), extent, "muted")


def _status(side: Side, at: _Context) -> Cell:
    row, say = side.row, at.say
    lacking = [record for record in row.records if record.status != "valid"]
    codes = dict.fromkeys(reason.code for record in lacking for reason in record.reasons)
    said = [say("side.partly", counted(row.valid), counted(len(row.records)))] if lacking and row.valid else []
    said += [say("comma").join(codes)] if codes else []
    formulas = row.first.formulas or 1
    said += [say("side.formulas", str(formulas))] if formulas < at.formulas else []
    return Cell(say(row.status), say("comma").join(said), STATUS_TONE[row.status])


def _rate(side: Side, at: _Context) -> Cell:
    cell = estimate("number", side.row.rate, "strong" if side.row.valid else "muted")
    if cell.text == UNKNOWN or unit(side.row) == at.unit:
        return cell
    return Cell(f"{cell.text} {words.unit(unit(side.row), at.say.lang)}", cell.sub, cell.tone)


def estimate(form: str, one: Estimate | None, tone: Tone = "plain") -> Cell:
    if one is None:
        return Cell(UNKNOWN)
    ends = "" if one.interval is None else " – ".join(formed(form, end) for end in one.interval)
    return Cell(formed(form, one.value), ends, tone)


def _quality(side: Side, at: _Context) -> Cell:
    row = side.row
    value = row.first.metrics.get(row.metric)
    text = formed(metric_row(row.metric, "" if value is None else value.unit).form, row.quality)
    return Cell(text, at.say("not_evaluated") if at.judged and text != UNKNOWN and not _judged(side) else "")


def _judged(side: Side) -> bool:
    row = side.row
    return all(record.quality.evaluated for record in row.records) and row.metric == row.first.quality.metric


def place(row: PublishedRow) -> tuple[str, int | None, str]:
    """The accelerator of a published row, how many of them, and what else its configuration says."""
    found = _CONFIG.match(spelled(row.row.config))
    return (found[2], int(found[1][:9]), found[3] or "") if found else (spelled(row.row.config), None, "")


def published_rate(row: PublishedRow, in_samples: bool) -> tuple[float, str] | None:
    """Work of one device a second, and its unit: stated so, or that of the whole pass or training over its devices."""
    stated = real(row.values.get("tokens_per_device_s"))
    if stated is not None:
        return stated, "tokens/s"
    devices = place(row)[1]
    whole = next((real(row.values[name]) for name in ("p_infer_whole", "p_train", "p_whole") if name in row.values), None)
    if whole is None or not devices:
        return None
    return whole / devices, "samples/s" if in_samples else "tokens/s"


def _published_name(row: PublishedRow, at: _Context) -> Cell:
    name, count, _ = place(row)
    return Cell(name if count is None else f"{name} × {count}", at.say("published", str(row.number)))


def _published_precision(row: PublishedRow, at: _Context) -> Cell:
    label, ran = spelled(row.row.published_as), spelled(row.row.ran_as)
    return Cell(label, "" if label == ran else at.say("published.ran", ran))


def _published_rate(row: PublishedRow, at: _Context) -> Cell:
    found = published_rate(row, at.in_samples)
    if found is None:
        padded = row.values.get("tokens_per_device_s_padded")
        return Cell(UNKNOWN) if padded is None else _number(padded, at.say("instead.tokens_per_device_s_padded"))
    value, its = found
    return Cell(formed("number", value), "" if its == at.unit else its)


def _number(value: float | str, beside: str) -> Cell:
    return Cell(formed("number", value) if real(value) is not None else spelled(value), beside)


def _published_mfu(row: PublishedRow, at: _Context) -> Cell:
    for name in ("mfu", "mfu_nominal", "mfu_palm", "mfu_padded", "mfu_one_sequence"):
        if real(row.values.get(name)) is not None:
            return Cell(formed("percent", row.values[name]), at.say.known(f"instead.{name}", ""))
    return Cell(UNKNOWN)


def _published_value(name: str) -> Callable[[PublishedRow, _Context], Cell]:
    def cell(row: PublishedRow, at: _Context) -> Cell:
        metric = name or at.metric
        value = row.values.get(metric)
        return Cell(spelled(value) if real(value) is None else formed(metric_row(metric).form, value))

    return cell


def _empty(row: PublishedRow, at: _Context) -> Cell:
    return Cell("")


COLUMNS = (
    _Column("accelerator", lambda side, at: Cell(side.name, side.labels, links=side.links), _published_name),
    _Column("engine", lambda side, at: _engine(side), lambda row, at: Cell(place(row)[2])),
    _Column("precision", lambda side, at: _precision(side), _published_precision, priority=2),
    _Column("tune", _tuned, _empty, priority=3),
    _Column("rate", _rate, _published_rate, right=True),
    _Column("mfu", lambda side, at: Cell(formed("percent", _value(side.row.mfu))), _published_mfu, right=True),
    _Column("quality", _quality, _published_value(""), right=True, priority=2),
    _Column("mem", lambda side, at: Cell(formed("gib", side.row.mem)), _published_value("mem"), right=True, priority=2),
    _Column("energy", lambda side, at: _energy(side), _published_value("energy_per_token"), right=True, priority=2),
    _Column("status", _status, _empty),
)


def _engine(side: Side) -> Cell:
    return Cell(side.row.first.engine.name, parallel(side.row.first))


def _precision(side: Side) -> Cell:
    return Cell(side.row.first.case.precision, side.row.first.case.division)


def _energy(side: Side) -> Cell:
    return Cell(formed("number", _value(side.row.energy)))


def _value(one: Estimate | None) -> float | None:
    return None if one is None else one.value
