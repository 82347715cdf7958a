"""Build the page of `steelyard spec`: the measured ceilings of a machine, one table per group of
benchmarks.

Input are spec records; every number has its interval and its share of the datasheet.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from steelyard import words
from steelyard.metrics import ceilings
from steelyard.plan.ceilings import GROUPS
from steelyard.record.spec import Bench, Ceiling, Limits, SpecRecord
from steelyard.report import derived
from steelyard.report.document import (
    Block,
    Cell,
    ColumnOf,
    Fact,
    Facts,
    Heading,
    Lang,
    Page,
    Paragraph,
    Table,
    table,
)
from steelyard.report.numbers import UNKNOWN, counted, ends, formed, gib_of_bytes, spelled
from steelyard.report.runs import STATUS_TONE
from steelyard.words import Words

SCALES = {"FLOP/s": (1e12, "TFLOP/s"), "B/s": (1e9, "GB/s"), "B": (float(1 << 30), "GiB")}


@dataclass(frozen=True)
class _Line:
    """A benchmark over all ranks: the bench and ceiling of the slowest rank, for which work on all
    devices would wait, the number of ranks, and the value of the fastest (None if no rank has one).
    """

    bench: Bench
    ceiling: Ceiling
    ranks: int
    best: float | None


def page(records: list[SpecRecord], lang: Lang) -> Page:
    """Build the page of one or more spec records; of several, each gets a heading of its own."""
    say = Words(lang)
    title = say("spec.title", ", ".join(dict.fromkeys(_device(record) for record in records)))
    blocks: list[Block] = [Heading(1, title)]
    for record in records:
        if len(records) > 1:
            blocks.append(Heading(2, f"{_device(record)} · {record.created} · {record.id[:8]}"))
        blocks += _record(record, 2 if len(records) == 1 else 3, say)
    return Page(
        title, lang, tuple(blocks), say("footer", ", ".join(record.id for record in records))
    )


def _device(record: SpecRecord) -> str:
    """Return the names of the record's devices, each once; the accelerator's name or UNKNOWN if
    there are none.
    """
    names = dict.fromkeys(device.name for device in record.environment.hardware.devices)
    return ", ".join(names) or record.environment.hardware.accelerator or UNKNOWN


def _record(record: SpecRecord, level: int, say: Words) -> Iterator[Block]:
    """Yield the elements of a spec record: facts, failures, then for each group of benchmarks a
    table, the benchmarks without a number, and a note.
    """
    yield _facts(record, say)
    for reason in record.reasons:
        yield Paragraph(
            say("colon").join((reason.code, derived.failure(reason, say).whole(say))), "bad"
        )
    lines = _lines(record)
    for group in GROUPS:
        shown = [one for one in lines if one.bench.group == group]
        known = [one for one in shown if one.ceiling.value is not None]
        if shown:
            yield Heading(level, say(f"spec.{group}"))
            yield from [_table(known, record.limits, say)] if known else []
            yield from _absent([one for one in shown if one not in known], record.limits, say)
            yield Paragraph(say(f"spec.{group}.note"), "muted")
    yield Paragraph(
        say("spec.note", counted(record.limits.last), formed("percent", record.limits.within)),
        "muted",
    )


def _facts(record: SpecRecord, say: Words) -> Facts:
    """Return the facts of a spec record: status, mode, date, hardware, datasheet, and software."""
    hardware, software, source = (
        record.environment.hardware,
        record.environment.software,
        record.environment.source,
    )
    peak = hardware.peak
    cores = say("hardware.cores", spelled(hardware.cpu), counted(hardware.cpu_cores))
    told = (
        ("status", say(record.status)),
        ("spec.mode", say("spec.quick" if record.quick else "spec.full")),
        ("spec.created", record.created),
        ("hardware.machine", spelled(hardware.machine)),
        ("hardware.accelerator", _device(record)),
        ("hardware.count", counted(record.devices)),
        ("spec.peak", UNKNOWN if peak is None else f"{peak.name}; {peak.source}"),
        ("hardware.cpu", cores),
        ("hardware.memory", gib_of_bytes(hardware.memory_bytes)),
        ("software.os", spelled(software.os)),
        ("software.driver", spelled(software.driver)),
        (
            "software.packages",
            spelled({**software.packages, **software.libraries, **software.collectives}),
        ),
        ("software.source", f"{spelled(source.version)} {spelled(source.revision)}"),
    )
    tones = {"status": STATUS_TONE[record.status]}
    return Facts(tuple(Fact(say(label), text, tones.get(label, "plain")) for label, text in told))


def _lines(record: SpecRecord) -> list[_Line]:
    """Merge the benchmarks of all ranks into one line for each group, name and precision, with the
    numbers of the slowest rank.

    A rank without a number counts as the slowest, so that a result that is wrong on one device is
    no rate of all.
    """
    groups: dict[tuple[str, str, str | None], list[tuple[Bench, Ceiling]]] = {}
    for bench, ceiling in zip(record.benches, record.ceilings, strict=True):
        groups.setdefault((bench.group, bench.name, bench.precision), []).append((bench, ceiling))
    out = []
    for every in groups.values():
        # A rank without a number counts as the slowest: a result that is wrong on one device is no
        # rate of all.
        slowest = min(every, key=lambda one: -1.0 if one[1].value is None else one[1].value)
        known = [ceiling.value for _, ceiling in every if ceiling.value is not None]
        ranks = {bench.rank for bench, _ in every}
        out.append(_Line(*slowest, len(ranks), max(known, default=None)))
    return out


def _absent(lines: list[_Line], limits: Limits, say: Words) -> Iterator[Block]:
    """Yield a list of the benchmarks that have no number, by reason; nothing if there are none."""
    reasons: dict[str, list[str]] = {}
    for one in lines:
        name = " ".join(filter(None, (one.bench.name, one.bench.precision)))
        reasons.setdefault(_remark(one.bench, limits, say) or UNKNOWN, []).append(name)
    if reasons:
        yield Paragraph(say("spec.absent"), "strong")
        yield Facts(
            tuple(Fact(reason, say("comma").join(names)) for reason, names in reasons.items())
        )


def _remark(bench: Bench, limits: Limits, say: Words) -> str:
    """Return why a benchmark has no number or what limits it, such as stretches that do not agree;
    empty if there is nothing to say.
    """
    return words.text(ceilings.remark(bench, limits) or "", say.lang)


def _table(lines: list[_Line], limits: Limits, say: Words) -> Table:
    """Return the table of a group of benchmarks, in units of the first one: TFLOP/s, GB/s or GiB.

    The lines must not be empty. A column for the fastest rank is added if there are several ranks.
    """
    scale, name = SCALES[lines[0].bench.unit]
    unit = words.unit(name, say.lang)

    def detail(one: _Line) -> str:
        """Return the settings of a benchmark, such as its shape; empty for amounts of memory."""
        return spelled(one.bench.detail) if one.bench.detail and one.bench.unit != "B" else ""

    def value(one: _Line) -> Cell:
        """Return the slowest rank's ceiling with its interval below."""
        ceiling = one.ceiling
        return Cell(formed("number", ceiling.value, scale), ends(ceiling.interval, scale=scale))

    fastest = ColumnOf[_Line](
        say("spec.fastest"),
        lambda one: formed("number", one.best, scale),
        unit,
        right=True,
        priority=2,
    )
    columns: tuple[ColumnOf[_Line], ...] = (
        ColumnOf(say("spec.name"), lambda one: one.bench.name),
        ColumnOf(say("precision"), lambda one: one.bench.precision or ""),
        ColumnOf(say("spec.detail"), detail, priority=3),
        ColumnOf(
            say("spec.amount" if name == "GiB" else "spec.value"),
            value,
            unit,
            right=True,
            strong=True,
        ),
        *([fastest] if any(one.ranks > 1 for one in lines) else []),
        ColumnOf(say("spec.share"), lambda one: formed("percent", one.ceiling.share), right=True),
        ColumnOf(
            say("spec.clock"),
            lambda one: formed("number", one.ceiling.sm_clock_mhz),
            "MHz",
            right=True,
            priority=3,
        ),
        ColumnOf(
            say("spec.power"),
            lambda one: formed("number", one.ceiling.power_w),
            "W",
            right=True,
            priority=3,
        ),
        ColumnOf(
            say("spec.off"), lambda one: _error_and_bound(one.bench, say), right=True, priority=3
        ),
        ColumnOf(say("spec.remark"), lambda one: _remark(one.bench, limits, say), priority=2),
    )
    return table(columns, lines)


def _error_and_bound(bench: Bench, say: Words) -> str:
    """Format a benchmark's error against fp64 with its bound, or UNKNOWN if the result was not
    checked.
    """
    if bench.checked is None:
        return UNKNOWN
    return say(
        "spec.of", formed("number", bench.checked.error), formed("number", bench.checked.bound)
    )
