"""What a machine can do, as a page: one table a group, every number with its interval and its share of the datasheet."""

from collections.abc import Iterator
from dataclasses import dataclass

from steelyard import words
from steelyard.metrics import ceilings
from steelyard.plan.ceilings import GROUPS
from steelyard.record.spec import Bench, Ceiling, Limits, SpecRecord
from steelyard.report import derived
from steelyard.report.document import Block, Cell, Column, Fact, Facts, Heading, Lang, Page, Paragraph, Table, TableRow
from steelyard.report.numbers import UNKNOWN, counted, formed, gib_of_bytes, spelled
from steelyard.report.runs import STATUS_TONE
from steelyard.words import Words

SCALES = {"FLOP/s": (1e12, "TFLOP/s"), "B/s": (1e9, "GB/s"), "B": (float(1 << 30), "GiB")}


@dataclass(frozen=True)
class _Line:
    """One row on all ranks: the slowest of them is what work over all devices waits for."""

    bench: Bench
    ceiling: Ceiling
    ranks: int
    best: float | None


def page(records: list[SpecRecord], lang: Lang) -> Page:
    say = Words(lang)
    title = say("spec.title", ", ".join(dict.fromkeys(_device(record) for record in records)))
    blocks: list[Block] = [Heading(1, title)]
    for record in records:
        if len(records) > 1:
            blocks.append(Heading(2, f"{_device(record)} · {record.created} · {record.id[:8]}"))
        blocks += _record(record, 2 if len(records) == 1 else 3, say)
    return Page(title, lang, tuple(blocks), say("footer", ", ".join(record.id for record in records)))


def _device(record: SpecRecord) -> str:
    names = dict.fromkeys(device.name for device in record.environment.hardware.devices)
    return ", ".join(names) or record.environment.hardware.accelerator or UNKNOWN


def _record(record: SpecRecord, level: int, say: Words) -> Iterator[Block]:
    yield _facts(record, say)
    for reason in record.reasons:
        yield Paragraph(say("colon").join((reason.code, derived.failure(reason, say).whole(say))), "bad")
    lines = _lines(record)
    for group in GROUPS:
        shown = [one for one in lines if one.bench.group == group]
        if shown:
            yield Heading(level, say(f"spec.{group}"))
            yield from _group([one for one in shown if one.ceiling.value is not None], record.limits, say)
            yield from _absent([one for one in shown if one.ceiling.value is None], record.limits, say)
            yield Paragraph(say(f"spec.{group}.note"), "muted")
    yield Paragraph(say("spec.note", counted(record.limits.last), formed("percent", record.limits.within)), "muted")


def _facts(record: SpecRecord, say: Words) -> Facts:
    hardware, software, source = record.environment.hardware, record.environment.software, record.environment.source
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
        ("software.packages", spelled({**software.packages, **software.libraries, **software.collectives})),
        ("software.source", f"{spelled(source.version)} {spelled(source.revision)}"),
    )
    tones = {"status": STATUS_TONE[record.status]}
    return Facts(tuple(Fact(say(label), text, tones.get(label, "plain")) for label, text in told))


def _lines(record: SpecRecord) -> list[_Line]:
    groups: dict[tuple[str, str, str | None], list[tuple[Bench, Ceiling]]] = {}
    for bench, ceiling in zip(record.benches, record.ceilings, strict=True):
        groups.setdefault((bench.group, bench.name, bench.precision), []).append((bench, ceiling))
    return [_line(every) for every in groups.values()]


def _line(every: list[tuple[Bench, Ceiling]]) -> _Line:
    """One that has no number is the slowest: what is not right on one device is no rate of all."""
    slowest = min(every, key=lambda one: -1.0 if one[1].value is None else one[1].value)
    known = [ceiling.value for _, ceiling in every if ceiling.value is not None]
    return _Line(*slowest, len({bench.rank for bench, _ in every}), max(known, default=None))


def _absent(lines: list[_Line], limits: Limits, say: Words) -> Iterator[Block]:
    """What there is no number of, by reason."""
    reasons: dict[str, list[str]] = {}
    for one in lines:
        name = " ".join(filter(None, (one.bench.name, one.bench.precision)))
        reasons.setdefault(_remark(one.bench, limits, say) or UNKNOWN, []).append(name)
    if reasons:
        yield Paragraph(say("spec.absent"), "strong")
        yield Facts(tuple(Fact(reason, say("comma").join(names)) for reason, names in reasons.items()))


def _remark(bench: Bench, limits: Limits, say: Words) -> str:
    found = ceilings.remark(bench, limits)
    return words.text(found or "", say.lang)


def _group(lines: list[_Line], limits: Limits, say: Words) -> Iterator[Block]:
    if lines:
        yield _table(lines, limits, say)


def _table(lines: list[_Line], limits: Limits, say: Words) -> Table:
    scale, name = SCALES[lines[0].bench.unit]
    unit = words.unit(name, say.lang)
    several = any(one.ranks > 1 for one in lines)
    heads = [Column(say("spec.name")), Column(say("precision")), Column(say("spec.detail"), priority=3)]
    heads += [Column(say("spec.amount" if name == "GiB" else "spec.value"), unit, "right", strong=True)]
    heads += [Column(say("spec.fastest"), unit, "right", priority=2)] if several else []
    heads += [Column(say("spec.share"), "", "right"), Column(say("spec.clock"), "MHz", "right", priority=3)]
    heads += [Column(say("spec.power"), "W", "right", priority=3), Column(say("spec.off"), "", "right", priority=3)]
    heads += [Column(say("spec.remark"), priority=2)]
    return Table(tuple(heads), tuple(_row(one, scale, several, limits, say) for one in lines))


def _row(one: _Line, scale: float, several: bool, limits: Limits, say: Words) -> TableRow:
    bench, ceiling = one.bench, one.ceiling
    ends = "" if ceiling.interval is None else " – ".join(formed("number", end / scale) for end in ceiling.interval)
    detail = spelled(bench.detail) if bench.detail and bench.unit != "B" else ""
    cells = [Cell(bench.name), Cell(bench.precision or ""), Cell(detail)]
    cells += [Cell(_scaled(ceiling.value, scale), ends)]
    cells += [Cell(_scaled(one.best, scale))] if several else []
    cells += [Cell(formed("percent", ceiling.share)), Cell(formed("number", ceiling.sm_clock_mhz))]
    cells += [Cell(formed("number", ceiling.power_w)), Cell(_off(bench, say)), Cell(_remark(bench, limits, say))]
    return TableRow(tuple(cells))


def _scaled(value: float | None, scale: float) -> str:
    return formed("number", None if value is None else value / scale)


def _off(bench: Bench, say: Words) -> str:
    """How far from fp64, of what is allowed."""
    if bench.checked is None:
        return UNKNOWN
    return say("spec.of", formed("number", bench.checked.error), formed("number", bench.checked.bound))
