"""Build the details of one run for the report page: all that its record says, in the order of a
published page.

Data, model, hardware, software, settings, status, reasons, failure, every metric with its interval,
wall time by part, hosts, ranks, stragglers, waterfall, checks, the task's own tables, and charts.
"""

from collections import Counter
from typing import Any

from steelyard.metrics.runs import metric
from steelyard.metrics.table import in_order
from steelyard.metrics.table import row as metric_row
from steelyard.record.facts import PeakFacts
from steelyard.record.record import Check, Record
from steelyard.report import charts, hosts, waterfall
from steelyard.report.derived import DerivedTexts, ReasonLine
from steelyard.report.document import (
    Block,
    Cell,
    Code,
    Column,
    ColumnOf,
    Fact,
    Facts,
    Heading,
    Paragraph,
    Table,
    TableRow,
    table,
)
from steelyard.report.numbers import UNKNOWN, counted, ends, formed, gib_of_bytes, spelled
from steelyard.report.runs import (
    FRAMEWORKS,
    STATUS_TONE,
    changed,
    parallel,
    scope,
    shown,
    stored_tune,
    unit,
)
from steelyard.words import LANGS, Words

IDS = 40  # selected rows whose ids a page lists


def details(record: Record, level: int, say: Words) -> list[Block]:
    """Return everything that is known of a run as page elements, in the order of a published page;
    sections without content are left out.

    `level` is that of the headings.
    """
    texts, heading = DerivedTexts(record, say), record.task.kind_row.data_heading
    sections: tuple[tuple[str, list[Block]], ...] = (
        (say.known(heading, heading), [_data(record, say)]),
        (say("model"), [_model(record, say)]),
        (say("hardware"), [_hardware(record, say)]),
        (say("software"), [_software(record, say)]),
        (say("setup"), [_setup(record, say)]),
        (say("record"), [_facts(record, texts, say)]),
        (say("reasons"), _reasons(record, texts, say)),
        (say("failure"), _failure(record, say)),
        (say("all"), [_metrics(record, texts, say)]),
        (say("budget"), _budget(record, say)),
        (say("hosts"), hosts.hosts(record, say)),
        (say("ranks"), hosts.ranks(record, say)),
        (say("stragglers"), hosts.straggler_section(record, say)),
        (say("explain"), waterfall.section(record, say, whole=False)),
        (say("checks"), _checks(record, texts, say)),
    )
    out: list[Block] = []
    for title, blocks in sections:
        out += [Heading(level, title), *blocks] if blocks else []
    return [*out, *_breakdowns(record, level, say), *charts.of_run(record, say)]


def _facts(record: Record, texts: DerivedTexts, say: Words) -> Facts:
    """Return the facts of the run itself: status, scope, quality and gate, environment, id, date,
    key, hash, number of restarts, and notes.

    Of selected rows only the first MAX_IDS are listed.
    """
    quality, scope_ = record.quality, record.scope
    value = formed(metric_row(quality.metric).form, quality.value)
    judged = say("quality.yes" if quality.evaluated else "quality.no", quality.metric, value)
    ids = scope_.rows or ()  # the record has all of them
    more = "" if len(ids) <= IDS else f" … ({counted(len(ids))})"
    selected = (
        ("subjects", ", ".join(scope_.subjects or ())),
        ("rows", ", ".join(ids[:IDS]) + more),
    )
    known = (
        ("scope", scope(record, say)),
        *(one for one in selected if one[1]),
        ("quality", say("colon").join(filter(None, (judged, texts.quality_note())))),
        ("gate", spelled({} if quality.gate is None else quality.gate.model_dump(mode="json"))),
        ("environment", _environment(record)),
        ("id", record.id),
        ("created", record.created),
        ("key", record.case.key),
        ("hash", spelled(record.hashes.get("record"))),
        *([("restarts", counted(len(record.restarts)))] if record.restarts else []),
        *(("note", note) for note in texts.notes()),
    )
    status = Fact(say("run.status"), say(record.status), STATUS_TONE[record.status])
    return Facts((status, *(Fact(say(f"run.{key}"), text) for key, text in known)))


def _reasons(record: Record, texts: DerivedTexts, say: Words) -> list[Block]:
    """Return a table of the reasons why a run is not valid; empty for a run without reasons."""
    columns: tuple[ColumnOf[ReasonLine], ...] = (
        ColumnOf(say("reasons.code"), lambda one: Cell(one.code, tone="bad")),
        ColumnOf(say("reasons.text"), lambda one: one.whole(say)),
    )
    return [table(columns, texts.reasons())] if record.reasons else []


def _failure(record: Record, say: Words) -> list[Block]:
    """Return which rank of a failed run caused the failure, on which host, its exit code and error,
    then stderr and stack traces; empty for a run that did not fail.
    """
    failure = record.failure
    if failure is None:
        return []
    known = (
        ("rank", failure.rank),
        ("host", failure.host),
        ("exit", failure.exit_code),
        ("error", failure.error),
    )
    out: list[Block] = [
        Facts(tuple(Fact(say(f"failed_run.{key}"), spelled(value)) for key, value in known))
    ]
    if failure.stderr_tail.strip():
        out += [Paragraph(say("failed_run.stderr"), "muted"), Code(failure.stderr_tail)]
    for rank, stack in sorted(failure.stacks.items()):
        out += [Paragraph(say("failed_run.stack", counted(rank)), "muted"), Code(stack)]
    return out


def _metrics(record: Record, texts: DerivedTexts, say: Words) -> Block:
    """Return the table of all metrics of a run with units, intervals and notes, or a sentence if it
    has none.
    """
    if not record.metrics:
        return Paragraph(say("all.absent"), "muted")
    found = record.metrics
    rows = {name: metric_row(name, found[name].unit, record.task) for name in in_order(set(found))}
    columns: tuple[ColumnOf[str], ...] = (
        ColumnOf(say("metrics.name"), lambda name: rows[name].words(say.lang)[0]),
        ColumnOf(say("metrics.index"), lambda name: name),
        ColumnOf(
            say("all.value"), lambda name: Cell(shown(name, found[name]), tone="strong"), right=True
        ),
        ColumnOf(say("all.unit"), lambda name: unit(name, found[name], say.lang)),
        ColumnOf(
            say("all.interval"),
            lambda name: ends(found[name].interval, rows[name].form) or UNKNOWN,
            right=True,
        ),
        ColumnOf(say("all.note"), texts.metric_note),
    )
    return table(columns, list(rows))


def _budget(record: Record, say: Words) -> list[Block]:
    """Return a bar and a table of the named parts of the run's wall time in seconds, the largest
    first, and remarks on the start-up; empty without a positive total.

    The table ends with the sum and with e2e_time, so that a reader sees whether they agree.
    """
    parts = sorted(record.budget.items(), key=lambda part: -part[1])
    total = sum(record.budget.values())
    if not total > 0:
        return []
    e2e = metric(record, "e2e_time")
    totals = [(say("budget.sum"), total), *([] if e2e is None else [("e2e_time", e2e)])]
    columns: tuple[ColumnOf[tuple[str, float]], ...] = (
        ColumnOf(say("budget.part"), lambda part: part[0]),
        ColumnOf(say("budget.time"), lambda part: formed("seconds", part[1]), "s", right=True),
        ColumnOf(say("budget.share"), lambda part: formed("percent", part[1] / total), right=True),
    )
    found = table(columns, parts, last=totals)
    return [charts.budget(parts, total, say), found, *map(Paragraph, _start_up(record, say))]


def _start_up(record: Record, say: Words) -> list[str]:
    """Return sentences about the first rank's start: hits and misses of the compiler's cache, and
    the parts that ran in parallel with others.
    """
    first = record.ranks[0] if record.ranks else None
    cache, beside = (None, None) if first is None else (first.compile_cache, first.beside)
    out = (
        []
        if cache is None
        else [say("budget.cache", counted(cache.get("hits", 0)), counted(cache.get("misses", 0)))]
    )
    listed = ", ".join(
        f"{name} {formed('seconds', time_s)} s" for name, time_s in (beside or {}).items()
    )
    return [*out, say("budget.beside", listed)] if listed else out


def _breakdowns(record: Record, level: int, say: Words) -> list[Block]:
    """Return the tables of answers that the task defines, such as accuracy by subject, each under a
    heading; a sentence where no share in a table is above 0.

    Empty if the record has no answers.
    """
    answers, lang = record.answers, LANGS.index(say.lang)
    out: list[Block] = []
    for one in record.task.breakdowns(answers) if answers is not None else []:
        if not any(isinstance(value, float) and value for row in one.rows for value in row):
            absent = say("breakdown.empty", one.title[lang], counted(len(one.rows)))
            out.append(Paragraph(absent, "muted"))
            continue
        values = zip(*one.rows, strict=True)
        numeric = [not any(isinstance(value, str) for value in column) for column in values]
        heads = zip(one.columns, numeric, strict=True)
        columns = (Column(text[lang], align="right" if right else "left") for text, right in heads)
        rows = tuple(TableRow(tuple(Cell(_spelled(value)) for value in row)) for row in one.rows)
        out += [Heading(level, one.title[lang]), Table(tuple(columns), rows)]
    return out


def _spelled(value: str | int | float | None) -> str:
    """Format text as it is, an integer as a count, a float as a percentage, None as UNKNOWN."""
    if isinstance(value, str):
        return value
    return counted(value) if isinstance(value, int) else formed("percent", value)


def _checks(record: Record, texts: DerivedTexts, say: Words) -> list[Block]:
    """Return a table of checks with result and detail; empty for a record without checks."""
    columns: tuple[ColumnOf[Check], ...] = (
        ColumnOf(say("checks.name"), lambda one: one.name),
        ColumnOf(
            say("checks.ok"),
            lambda one: Cell(say("ok"), tone="good") if one.ok else Cell(say("not_ok"), tone="bad"),
        ),
        ColumnOf(say("checks.detail"), lambda one: str(one.detail)),
    )
    return [table(columns, texts.checks())] if record.checks else []


_WEIGHTS = ("source", "header_sha256")


def _rows(table: dict[str, Any], known: tuple[str, ...], prefix: str, say: Words) -> list[Fact]:
    """Return a fact for each of the `known` keys (UNKNOWN if missing), then for every other key of
    the dict in alphabetical order.

    Labels are the texts with the code `prefix.key`, or the bare key where there is no text.
    """
    rest = sorted(set(table) - set(known))
    return [
        Fact(say.known(f"{prefix}.{key}", key), counted(table.get(key))) for key in (*known, *rest)
    ]


def _data(record: Record, say: Words) -> Facts:
    """Return the data that the question asks for, then the facts of the data that was read."""
    asked = Fact(say("data.asked"), spelled(record.case.question["data"]))
    known = record.task.kind_row.data_facts
    return Facts((asked, *_rows(record.data.model_dump(), known, "data", say)))


def _model(record: Record, say: Words) -> Facts:
    """Return model, precision and training settings of the question, then the facts of the weights
    that were loaded.
    """
    question = record.case.question
    known = {name: question.get(name) for name in ("model", "precision", "train")}
    asked = (Fact(say(f"model.{name}"), spelled(value)) for name, value in known.items() if value)
    return Facts((*asked, *_rows(record.weights.model_dump(), _WEIGHTS, "model", say)))


def _environment(record: Record) -> str:
    """Return the devices of a run with their number, such as `8x NVIDIA H200`, or the CPU if it has
    none.
    """
    hardware = record.environment.hardware
    kinds = Counter(spelled(device.name) for device in hardware.devices)
    return ", ".join(f"{count}x {name}" for name, count in kinds.items()) or spelled(hardware.cpu)


def _hardware(record: Record, say: Words) -> Facts:
    """Return the facts of machine, accelerators, datasheet peak, CPU, memory and network, then
    everything else that the site file states.
    """
    hardware, site = record.environment.hardware, record.site
    kinds = dict.fromkeys(
        f"{spelled(d.name)} ({gib_of_bytes(d.memory_bytes)})" for d in hardware.devices
    )
    cpu, cores = spelled(hardware.cpu), hardware.cpu_cores
    known = (
        ("machine", site.get("machine") or spelled(hardware.machine)),
        ("accelerator", ", ".join(kinds) or spelled(hardware.accelerator)),
        ("count", counted(len(hardware.devices)) if hardware.devices else UNKNOWN),
        ("peak", _peak(hardware.peak)),
        ("cpu", cpu if cores is None else say("hardware.cores", cpu, counted(cores))),
        ("memory", gib_of_bytes(hardware.memory_bytes)),
        ("network", spelled(site.get("network"))),
    )
    shown_above = ("machine", "network", "file", "file_sha256")
    stated = [Fact(key, site[key]) for key in sorted(site) if key not in shown_above]
    if "file" in site:
        stated.append(
            Fact(
                say("hardware.site"), f"{site['file']}, SHA-256 {site.get('file_sha256', '')[:12]}"
            )
        )
    return Facts((*(Fact(say(f"hardware.{key}"), text) for key, text in known), *stated))


def _peak(peak: PeakFacts | None) -> str:
    """Return the datasheet's name, its peak rates in TFLOP/s by precision, and its source; UNKNOWN
    if there is none.
    """
    if peak is None:
        return UNKNOWN
    listed = ", ".join(f"{name} {spelled(rate / 1e12)}" for name, rate in peak.flops_per_s.items())
    return f"{spelled(peak.name)}: {listed} TFLOP/s ({spelled(peak.source)})" if listed else UNKNOWN


def _software(record: Record, say: Words) -> Facts:
    """Return the facts of OS, kernel, driver, container, framework, other packages, and Steelyard's
    own version and revision.
    """
    software, source = record.environment.software, record.environment.source
    packages, cleanness = software.packages, "source.dirty" if source.dirty else "source.clean"
    framework = next((name for name in FRAMEWORKS if name in packages), None)
    versions = {**software.libraries, "python": software.python}
    dependent = {name: version for name, version in versions.items() if version}
    dependent |= {name: version for name, version in sorted(packages.items()) if name != framework}
    listed = ", ".join(f"{name} {spelled(version)}" for name, version in dependent.items())
    known = (
        *(
            (key, spelled(getattr(software, key)))
            for key in ("os", "kernel", "driver", "container")
        ),
        ("framework", f"{framework} {spelled(packages[framework])}" if framework else UNKNOWN),
        ("packages", listed or UNKNOWN),
        ("source", say(cleanness, spelled(source.version), spelled(source.revision))),
    )
    return Facts(tuple(Fact(say(f"software.{key}"), text) for key, text in known))


def _setup(record: Record, say: Words) -> Facts:
    """Return the facts of the engine, the settings that were changed and all settings, and the
    parallel plan.
    """
    heading, details = record.task.kind_row.tool_heading, record.engine.details.model_dump()
    tool = f"{record.engine.name} ({spelled(details)})" if details else record.engine.name
    plan = say("plan.text", parallel(record), record.plan.config, record.plan.launcher)
    known = (
        (say.known(heading, heading), tool),
        (say("tune.set"), changed(record, say)),
        (say("tune.all"), spelled(stored_tune(record))),
        (say("plan"), plan),
    )
    return Facts(tuple(Fact(label, text) for label, text in known))
