"""What stands behind a run's row: every metric with its interval, where the time went, checks, reasons, failure."""

from typing import Any

from steelyard.metrics.table import in_order
from steelyard.metrics.table import row as metric_row
from steelyard.record.record import Quality, Record
from steelyard.report import charts, derived, hosts, waterfall
from steelyard.report.document import Block, Cell, Code, Column, Fact, Facts, Heading, Paragraph, Table, TableRow, Tone
from steelyard.report.numbers import UNKNOWN, counted, formed, spelled
from steelyard.report.runs import STATUS_TONE, Run, scope, shown, unit
from steelyard.words import LANGS, Words

IDS = 40  # that a page shows of a scope's


def details(run: Run, environment: str, level: int, say: Words) -> list[Block]:
    record = run.record
    out: list[Block] = [Heading(level, say("record")), _facts(record, environment, say)]
    sections: tuple[tuple[str, list[Block]], ...] = (
        ("reasons", _reasons(record, say)),
        ("failure", _failure(record, say)),
        ("all", [_metrics(record, say)]),
        ("budget", _budget(record, say)),
        ("hosts", hosts.hosts(record, say)),
        ("ranks", hosts.ranks(record, say)),
        ("stragglers", hosts.straggler_section(record, say)),
        ("explain", waterfall.section(record, say, whole=False)),
        ("checks", _checks(record, say)),
    )
    for key, blocks in sections:
        if blocks:
            out += [Heading(level, say(key)), *blocks]
    return [*out, *_breakdowns(record, level, say), *charts.all_of(record, say)]


def _facts(record: Record, environment: str, say: Words) -> Facts:
    quality = record.quality
    value = formed(metric_row(quality.metric).form, quality.value)
    judged = say("quality.yes" if quality.evaluated else "quality.no", quality.metric, value)
    items = [
        Fact(say("run.status"), say(record.status), STATUS_TONE[record.status]),
        Fact(say("run.scope"), scope(record, say)),
        *_named(record, say),
        Fact(say("run.quality"), say("colon").join(filter(None, (judged, derived.quality_note(record, say))))),
        Fact(say("run.gate"), spelled(_gate(quality))),
        Fact(say("run.environment"), environment),
        Fact(say("run.id"), record.id),
        Fact(say("run.created"), record.created),
        Fact(say("run.key"), record.case.key),
        Fact(say("run.hash"), spelled(record.hashes.get("record"))),
    ]
    if record.restarts:
        items.append(Fact(say("run.restarts"), counted(len(record.restarts))))
    return Facts((*items, *(Fact(say("run.note"), note) for note in derived.notes(record, say))))


def _named(record: Record, say: Words) -> list[Fact]:
    """What was named of the data. A record has all ids; a page as many as can be read."""
    ids = record.scope.rows or ()
    more = "" if len(ids) <= IDS else f" … ({counted(len(ids))})"
    named = (("subjects", ", ".join(record.scope.subjects or ())), ("rows", ", ".join(ids[:IDS]) + more))
    return [Fact(say(f"run.{key}"), text) for key, text in named if text]


def _gate(quality: Quality) -> dict[str, Any]:
    return {} if quality.gate is None else quality.gate.model_dump(mode="json")


def _reasons(record: Record, say: Words) -> list[Block]:
    if not record.reasons:
        return []
    rows = tuple(TableRow((Cell(one.code, tone="bad"), Cell(one.whole(say)))) for one in derived.reasons(record, say))
    return [Table((Column(say("reasons.code")), Column(say("reasons.text"))), rows)]


def _failure(record: Record, say: Words) -> list[Block]:
    failure = record.failure
    if failure is None:
        return []
    known = (("rank", failure.rank), ("host", failure.host), ("exit", failure.exit_code), ("error", failure.error))
    out: list[Block] = [Facts(tuple(Fact(say(f"failed_run.{key}"), spelled(value)) for key, value in known))]
    if failure.stderr_tail.strip():
        out += [Paragraph(say("failed_run.stderr"), "muted"), Code(failure.stderr_tail)]
    for rank, stack in sorted(failure.stacks.items()):
        out += [Paragraph(say("failed_run.stack", counted(rank)), "muted"), Code(stack)]
    return out


def _metrics(record: Record, say: Words) -> Block:
    if not record.metrics:
        return Paragraph(say("all.absent"), "muted")
    rows = []
    for name in in_order(set(record.metrics)):
        value, row = record.metrics[name], metric_row(name, record.metrics[name].unit, record.task)
        interval = UNKNOWN if value.interval is None else " – ".join(formed(row.form, end) for end in value.interval)
        note = derived.metric_note(record, name, say)
        texts = (row.words(say.lang)[0], name, shown(name, value), unit(name, value, say.lang), interval, note)
        rows.append(TableRow(tuple(Cell(text, tone="strong" if place == 2 else "plain") for place, text in enumerate(texts))))
    heads = (
        Column(say("metrics.name")),
        Column(say("metrics.index")),
        Column(say("all.value"), align="right"),
        Column(say("all.unit")),
        Column(say("all.interval"), align="right"),
        Column(say("all.note")),
    )
    return Table(heads, tuple(rows))


def _budget(record: Record, say: Words) -> list[Block]:
    """Largest part first. The sum and e2e_time are printed both, so that a reader sees whether they agree."""
    parts = sorted(record.budget.items(), key=lambda part: -part[1])
    total = sum(record.budget.values())
    if not total > 0:
        return []
    rows = [_budget_row(name, time_s, time_s / total) for name, time_s in parts]
    rows.append(_budget_row(say("budget.sum"), total, 1.0, "strong"))
    e2e = record.metrics.get("e2e_time")
    if e2e is not None and e2e.value is not None:
        rows.append(_budget_row("e2e_time", e2e.value, e2e.value / total, "strong"))
    heads = (
        Column(say("budget.part")),
        Column(say("budget.time"), "s", "right"),
        Column(say("budget.share"), align="right"),
    )
    said = [Paragraph(one) for one in _start_up(record, say)]
    return [charts.budget(parts, total, say), Table(heads, tuple(rows)), *said]


def _start_up(record: Record, say: Words) -> list[str]:
    """What explains the time of a start: compilers that had to work, and what ran beside other parts."""
    first = record.ranks[0] if record.ranks else None
    cache, beside = (None, None) if first is None else (first.compile_cache, first.beside)
    out = [] if cache is None else [say("budget.cache", counted(cache.get("hits", 0)), counted(cache.get("misses", 0)))]
    listed = ", ".join(f"{name} {formed('seconds', time_s)} s" for name, time_s in (beside or {}).items())
    return [*out, say("budget.beside", listed)] if listed else out


def _budget_row(name: str, time_s: float, share: float, tone: Tone = "plain") -> TableRow:
    texts = (name, formed("seconds", time_s), formed("percent", share))
    return TableRow(tuple(Cell(text, tone=tone) for text in texts), "measured" if tone == "plain" else "total")


def _breakdowns(record: Record, level: int, say: Words) -> list[Block]:
    """The task's own tables of its outputs."""
    answers, place = record.answers, LANGS.index(say.lang)
    out: list[Block] = []
    for one in record.task.breakdowns(answers) if answers is not None else []:
        if not any(isinstance(value, float) and value for row in one.rows for value in row):
            out.append(Paragraph(say("breakdown.empty", one.title[place], counted(len(one.rows))), "muted"))
            continue
        names = [words[place] for words in one.columns]
        numeric = [all(not isinstance(row[i], str) for row in one.rows) for i in range(len(names))]
        heads = tuple(Column(name, align="right" if right else "left") for name, right in zip(names, numeric, strict=True))
        rows = tuple(TableRow(tuple(Cell(_spelled(value)) for value in row)) for row in one.rows)
        out += [Heading(level, one.title[place]), Table(heads, rows)]
    return out


def _spelled(value: str | int | float | None) -> str:
    """Text as it is, a count, or a share."""
    if isinstance(value, str):
        return value
    return counted(value) if isinstance(value, int) else formed("percent", value)


def _checks(record: Record, say: Words) -> list[Block]:
    if not record.checks:
        return []
    rows = []
    for check in derived.checks(record, say):
        verdict = Cell(say("ok"), tone="good") if check.ok else Cell(say("not_ok"), tone="bad")
        rows.append(TableRow((Cell(check.name), verdict, Cell(check.detail))))
    return [Table(tuple(Column(say(f"checks.{key}")) for key in ("name", "ok", "detail")), tuple(rows))]
