"""All values of a case: one row a run, published rows, MFU by convention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from steelyard import words
from steelyard.case.resolve import changed_question
from steelyard.metrics import shipped
from steelyard.metrics.shipped import apart
from steelyard.metrics.spans import devices
from steelyard.metrics.table import row as metric_row
from steelyard.record.record import Published, Record
from steelyard.report.columns import Field, layout
from steelyard.report.document import Cell, Column, Table, TableRow, Tone
from steelyard.report.numbers import UNKNOWN, formed, real, spelled
from steelyard.report.runs import Run, scope, shown, stages, unit
from steelyard.report.setting import changed, parallel
from steelyard.words import Words

_SETTINGS: dict[str, Callable[[Record], str]] = {
    "precision": lambda record: record.case.precision,
    "division": lambda record: record.case.division,
    "config": lambda record: record.plan.config,
    "parallel": parallel,
    "fix_hp": changed,
    "mem_stages": stages,
}
_CONVENTIONS = ("mfu", "mfu_core", "mfu_achievable", "mfu_palm", "mfu_nominal")


@dataclass(frozen=True)
class PublishedRow:
    """A published row of the case, with its footnote's number."""

    number: int
    row: Published

    @property
    def values(self) -> dict[str, float | str]:
        return self.row.values


def published(runs: list[Run]) -> list[PublishedRow]:
    """The reference rows of all runs of a case, each once."""
    # Rows answer the question of the case as it is shipped.
    same = [run.record.case for run in runs if not changed_question(run.record.case.origins) and not apart(run.record)]
    rows = {row.model_dump_json(): row for case in same for row in case.reference}
    return [PublishedRow(number, row) for number, row in enumerate(rows.values(), 1)]


def fields(runs: list[Run], references: list[PublishedRow]) -> list[Field]:
    """The columns of this case; optional ones only where a row has something in them."""
    known = {name for run in runs for name, value in run.record.metrics.items() if value.value is not None}
    present = known | {name for row in references for name in row.values}
    if any(run.record.case.division != "closed" for run in runs):
        present.add("division")
    if any(devices(run.record) > 1 for run in runs):
        present |= {"config", "parallel", "mem_stages"}
    fields = layout(runs[0].record.task.kind_row).fields
    return [f for f in fields if not f.optional or present & {f.name, *f.metrics, *f.instead}]


def values(runs: list[Run], accelerators: dict[int, str], say: Words) -> Table:
    """One row a run, then the published rows. `accelerators` is empty where there is only one."""
    references = published(runs)
    chosen = fields(runs, references)
    units = {field.name: _common_unit(field, runs, say) for field in chosen}
    rows = [TableRow(tuple(_cell(field, run, units[field.name], accelerators, say) for field in chosen)) for run in runs]
    rows += [TableRow(tuple(_published_cell(f, row, units[f.name], say) for f in chosen), "published") for row in references]
    notes = [say("stars"), *(_footnote(row, say) for row in references)]
    size = runs[0].record.case.size
    if references and size != "full":
        notes.append(say("published.size", size))
    notes += [words.text(one, say.lang) for one in shipped.counted_types(run.record for run in runs)]
    return Table(tuple(_column(field, units[field.name], say) for field in chosen), tuple(rows), tuple(notes))


def _column(field: Field, common: str | None, say: Words) -> Column:
    title = say(field.title) if field.title else metric_row(field.name).index
    star = "*" if field.strong else ""
    return Column(star + title, common or "", "right" if field.metrics else "left", field.strong)


def _common_unit(field: Field, runs: list[Run], say: Words) -> str | None:
    """The unit for the head of a column, if all runs agree; otherwise each cell carries its own."""
    name = field.metrics[0] if field.metrics else ""
    units = {unit(name, run.record.metrics[name], say.lang) for run in runs if name in run.record.metrics}
    if not units:
        return words.unit(metric_row(name).base_unit, say.lang) or None
    return units.pop() if len(units) == 1 else None


def _cell(field: Field, run: Run, common: str | None, accelerators: dict[int, str], say: Words) -> Cell:
    record = run.record
    if field.name == "tool":
        said = [say(record.status), scope(record, say), accelerators.get(run.number, "")]
        tone: Tone = "plain" if record.status == "valid" else "bad"
        return Cell(f"{run.label} {record.engine.name}", say("comma").join(part for part in said if part), tone)
    if not field.metrics:
        return Cell(_SETTINGS[field.name](record))
    texts = [shown(name, record.metrics.get(name)) for name in field.metrics]
    text = UNKNOWN if set(texts) == {UNKNOWN} else "/".join("-" if t == UNKNOWN else t for t in texts)
    unevaluated = record.quality.metric in field.metrics and not record.quality.evaluated and text != UNKNOWN
    own = unit(field.metrics[0], record.metrics.get(field.metrics[0]), say.lang) if common is None and text != UNKNOWN else ""
    return Cell(text, say("not_evaluated") if unevaluated else own, "strong" if field.strong else "plain")


def _published_cell(field: Field, row: PublishedRow, common: str | None, say: Words) -> Cell:
    if field.name == "tool":
        return Cell(say("published", str(row.number)))
    if field.name == "precision":
        label, ran = spelled(row.row.published_as), spelled(row.row.ran_as)
        return Cell(label, "" if label == ran else say("published.ran", ran))
    found = [_published_number(name, row.values.get(name)) for name in field.metrics]
    if found and found[0] != UNKNOWN:
        base = words.unit(metric_row(field.metrics[0]).base_unit, say.lang)
        return Cell("/".join("-" if text == UNKNOWN else text for text in found), "" if base == (common or "") else base)
    for name in field.instead:
        if name in row.values:
            return Cell(_published_number(name, row.values[name]), say(f"instead.{name}"))
    return Cell(UNKNOWN if field.metrics else spelled(row.values.get(field.name)))


def _published_number(name: str, value: Any) -> str:
    return spelled(value) if real(value) is None else formed(metric_row(name).form, value)


def _footnote(row: PublishedRow, say: Words) -> str:
    published = row.row
    parts = [
        say("published.note", spelled(published.config)),
        say("published.source", words.case_text(spelled(published.source), say.lang)),
        say("published.as", spelled(published.published_as), spelled(published.ran_as)),
        words.case_text(published.note or "", say.lang),
    ]
    return f"[{row.number}] " + say("gap").join(part for part in parts if part)


def conventions(runs: list[Run], say: Words) -> Table | None:
    """MFU in every convention side by side; none where no row has any."""
    references = [row for row in published(runs) if set(row.values) & set(_CONVENTIONS)]
    named = {name for run in runs for name in run.record.metrics} | {name for row in references for name in row.values}
    if not named & set(_CONVENTIONS):
        return None
    rows = []
    for run in runs:
        cells = [shown(name, run.record.metrics.get(name)) for name in _CONVENTIONS]
        rows.append(TableRow((Cell(run.title), Cell(cells[0], tone="strong"), *(Cell(text) for text in cells[1:]))))
    for row in references:
        found = (Cell(_published_number(name, row.values.get(name))) for name in _CONVENTIONS)
        rows.append(TableRow((Cell(say("published", str(row.number))), *found), "published"))
    heads = (
        Column(f"{'*' if name == 'mfu' else ''}{name}", say(f"mfu.{name}"), "right", name == "mfu") for name in _CONVENTIONS
    )
    return Table((Column(say("mfu.run")), *heads), tuple(rows))
