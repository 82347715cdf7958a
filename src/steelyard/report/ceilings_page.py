"""Build the page of `steelyard spec`: the measured ceilings of a machine, one table per group of
benchmarks.

Input are spec records; every number has its interval and its share of the datasheet. The short
page, on one screen, is made by ceilings_brief.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from steelyard import words
from steelyard.metrics import ceiling_rates
from steelyard.metrics.vouching import UNNAMED_PACKAGE, has_foreign_accelerator, has_foreign_peak
from steelyard.plan.ceiling_shapes import CEILING_GROUPS
from steelyard.record.ceilings_record import BenchLimits, BenchTimings, Ceiling, SpecRecord
from steelyard.report import derived_texts
from steelyard.report.document import (
    Cell,
    ColumnSpec,
    Fact,
    Facts,
    Heading,
    Lang,
    Page,
    PageElement,
    Paragraph,
    Table,
    build_table,
)
from steelyard.report.marks import append_package
from steelyard.report.numbered_runs import STATUS_TONE
from steelyard.report.numbers import (
    UNKNOWN,
    format_bytes_in_gib,
    format_count,
    format_interval,
    format_number,
    format_setting,
)
from steelyard.words import PageWords

SHOWN_UNITS = {"FLOP/s": (1e12, "TFLOP/s"), "B/s": (1e9, "GB/s"), "B": (float(1 << 30), "GiB")}


@dataclass(frozen=True)
class CeilingLine:
    """A benchmark of `steelyard spec` over all ranks: a line of the page, made by `merge_ranks`.

    `bench` (what was run, with timings) and `ceiling` (the rate or size that follows) are those of
    the slowest rank, for which work on all devices would wait; a rank without a value counts as the
    slowest. `ranks` is the number of ranks, `fastest` the highest value of a rank in the
    benchmark's unit (None if no rank has one).
    """

    bench: BenchTimings
    ceiling: Ceiling
    ranks: int
    fastest: float | None


def build_ceilings_page(records: list[SpecRecord], lang: Lang) -> Page:
    """Build the page of one or more spec records (at least one): of each its facts, failures and
    tables of ceilings; of several records, each gets a heading of its own.

    The title names the devices; the footer lists the records' ids.
    """
    say = PageWords(lang)
    title = say(
        "spec.title", ", ".join(dict.fromkeys(format_devices(record) for record in records))
    )
    elements: list[PageElement] = [Heading(1, title)]
    for record in records:
        if len(records) > 1:
            elements.append(
                Heading(2, f"{format_devices(record)} · {record.created} · {record.id[:8]}")
            )
        elements += _record_elements(record, 2 if len(records) == 1 else 3, say)
    return Page(
        title, lang, tuple(elements), say("footer", ", ".join(record.id for record in records))
    )


def format_devices(record: SpecRecord) -> str:
    """Return the names of the record's devices, each once; the accelerator's name or UNKNOWN if
    there are none.
    """
    names = dict.fromkeys(device.name for device in record.environment.hardware.devices)
    return ", ".join(names) or record.environment.hardware.accelerator or UNKNOWN


def find_packages(record: SpecRecord) -> tuple[str | None, str | None]:
    """Return the packages of a spec record's accelerator and datasheet peak: None if they are
    Steelyard's, else UNNAMED_PACKAGE, because a spec record does not name packages.
    """
    hardware = record.environment.hardware
    return (
        UNNAMED_PACKAGE if has_foreign_accelerator(hardware) else None,
        UNNAMED_PACKAGE if has_foreign_peak(hardware) else None,
    )


def _record_elements(record: SpecRecord, level: int, say: PageWords) -> Iterator[PageElement]:
    """Yield the elements of a spec record: facts, a paragraph for each failure, then for each group
    of benchmarks a heading, a table, the benchmarks without a number, and a note; at the end a note
    on when timings count as steady.

    Groups without a benchmark are left out. `level` is that of the groups' headings.
    """
    yield _record_facts(record, say)
    for reason in record.reasons:
        yield Paragraph(
            say("colon").join(
                (reason.code, derived_texts.describe_failure(reason, say).format(say))
            ),
            "bad",
        )
    lines = merge_ranks(record)
    for group in CEILING_GROUPS:
        group_lines = [line for line in lines if line.bench.group == group]
        measured = [line for line in group_lines if line.ceiling.value is not None]
        if group_lines:
            yield Heading(level, say(f"spec.{group}"))
            yield from [_ceilings_table(measured, record.limits, say)] if measured else []
            yield from _absent_elements(
                [line for line in group_lines if line not in measured], record.limits, say
            )
            yield Paragraph(say(f"spec.{group}.note"), "muted")
    yield Paragraph(
        say(
            "spec.note",
            format_count(record.limits.last),
            format_number("percent", record.limits.within),
        ),
        "muted",
    )


def _record_facts(record: SpecRecord, say: PageWords) -> Facts:
    """Return the facts of a spec record as a labelled list: status, mode (quick or full), date,
    machine, accelerator and number of devices, name and source of the datasheet, CPU, memory, OS,
    driver, packages, and Steelyard's version and revision; UNKNOWN for what is not known.
    """
    hardware, software, source = (
        record.environment.hardware,
        record.environment.software,
        record.environment.source,
    )
    peak = hardware.peak
    package, peak_package = find_packages(record)
    peak_text = UNKNOWN if peak is None else f"{peak.name}; {peak.source}"
    cores = say("hardware.cores", format_setting(hardware.cpu), format_count(hardware.cpu_cores))
    labelled = (
        ("status", say(record.status)),
        ("spec.mode", say("spec.quick" if record.quick else "spec.full")),
        ("spec.created", record.created),
        ("hardware.machine", format_setting(hardware.machine)),
        ("hardware.accelerator", append_package(format_devices(record), package, say)),
        ("hardware.count", format_count(record.devices)),
        ("spec.peak", append_package(peak_text, peak_package, say)),
        ("hardware.cpu", cores),
        ("hardware.memory", format_bytes_in_gib(hardware.memory_bytes)),
        ("software.os", format_setting(software.os)),
        ("software.driver", format_setting(software.driver)),
        (
            "software.packages",
            format_setting({**software.packages, **software.libraries, **software.collectives}),
        ),
        ("software.source", f"{format_setting(source.version)} {format_setting(source.revision)}"),
    )
    tones = {"status": STATUS_TONE[record.status]}
    return Facts(
        tuple(Fact(say(label), text, tones.get(label, "plain")) for label, text in labelled)
    )


def merge_ranks(record: SpecRecord) -> list[CeilingLine]:
    """Merge the benchmarks of all ranks into one line for each group, name and precision, in the
    order of the record, with the numbers of the slowest rank.

    A rank without a number counts as the slowest, so that a result that is wrong on one device is
    no rate of all.
    """
    groups: dict[tuple[str, str, str | None], list[tuple[BenchTimings, Ceiling]]] = {}
    for bench, ceiling in zip(record.benches, record.ceilings, strict=True):
        groups.setdefault((bench.group, bench.name, bench.precision), []).append((bench, ceiling))
    out = []
    for ranks_of_bench in groups.values():
        # A rank without a number counts as the slowest: a result that is wrong on one device is no
        # rate of all.
        slowest = min(
            ranks_of_bench, key=lambda pair: -1.0 if pair[1].value is None else pair[1].value
        )
        values = [ceiling.value for _, ceiling in ranks_of_bench if ceiling.value is not None]
        ranks = {bench.rank for bench, _ in ranks_of_bench}
        out.append(CeilingLine(*slowest, len(ranks), max(values, default=None)))
    return out


def _absent_elements(
    lines: list[CeilingLine], limits: BenchLimits, say: PageWords
) -> Iterator[PageElement]:
    """Yield a title and a list of the benchmarks that have no number: one fact per reason (its
    label), with the names and precisions of the benchmarks and the text of the exception behind it,
    if there was one; nothing if there are no lines.
    """
    names_by_reason: dict[tuple[str, str | None], list[str]] = {}
    for line in lines:
        name = " ".join(filter(None, (line.bench.name, line.bench.precision)))
        reason = _format_remark(line.bench, limits, say) or UNKNOWN
        error_text = ceiling_rates.find_error_text(line.bench)
        names_by_reason.setdefault((reason, error_text), []).append(name)
    facts = []
    for (reason, error_text), names in names_by_reason.items():
        text = say("comma").join(names)
        quoted = None if error_text is None else say("quoted", error_text)
        facts.append(Fact(reason, text if quoted is None else say("colon").join((text, quoted))))
    if facts:
        yield Paragraph(say("spec.absent"), "strong")
        yield Facts(tuple(facts))


def _format_remark(bench: BenchTimings, limits: BenchLimits, say: PageWords) -> str:
    """Return the remark on a benchmark in the language of the page: why it has no number, how an
    amount of memory was found, or that its rate did not become steady within `limits`; empty if
    there is nothing to say.
    """
    return words.render_text(ceiling_rates.make_ceiling_note(bench, limits) or "", say.lang)


def _ceilings_table(lines: list[CeilingLine], limits: BenchLimits, say: PageWords) -> Table:
    """Return the table of a group of benchmarks, one row per line (at least one), all in the unit
    of the first one: TFLOP/s, GB/s or GiB.

    Columns: name, precision, detail, value of the slowest rank with its interval, share of the
    datasheet, clock, power, error against fp64, remark; and the fastest rank's value if there are
    several ranks.
    """
    scale, name = SHOWN_UNITS[lines[0].bench.unit]
    unit = words.translate_unit(name, say.lang)

    def format_detail(line: CeilingLine) -> str:
        """Return the settings of a benchmark, such as its shape; empty for amounts of memory."""
        return (
            format_setting(line.bench.detail)
            if line.bench.detail and line.bench.unit != "B"
            else ""
        )

    def value_cell(line: CeilingLine) -> Cell:
        """Return the slowest rank's ceiling with its interval below."""
        ceiling = line.ceiling
        return Cell(
            format_number("number", ceiling.value, scale),
            format_interval(ceiling.interval, scale=scale),
        )

    fastest_column = ColumnSpec[CeilingLine](
        say("spec.fastest"),
        lambda line: format_number("number", line.fastest, scale),
        unit,
        right=True,
        priority=2,
    )
    columns: tuple[ColumnSpec[CeilingLine], ...] = (
        ColumnSpec(say("spec.name"), lambda line: line.bench.name),
        ColumnSpec(say("precision"), lambda line: line.bench.precision or ""),
        ColumnSpec(say("spec.detail"), format_detail, priority=3),
        ColumnSpec(
            say("spec.amount" if name == "GiB" else "spec.value"),
            value_cell,
            unit,
            right=True,
            strong=True,
        ),
        *([fastest_column] if any(line.ranks > 1 for line in lines) else []),
        ColumnSpec(
            say("spec.share"), lambda line: format_number("percent", line.ceiling.share), right=True
        ),
        ColumnSpec(
            say("spec.clock"),
            lambda line: format_number("number", line.ceiling.sm_clock_mhz),
            "MHz",
            right=True,
            priority=3,
        ),
        ColumnSpec(
            say("spec.power"),
            lambda line: format_number("number", line.ceiling.power_w),
            "W",
            right=True,
            priority=3,
        ),
        ColumnSpec(
            say("spec.off"), lambda line: _error_and_bound(line.bench, say), right=True, priority=3
        ),
        ColumnSpec(
            say("spec.remark"), lambda line: _format_remark(line.bench, limits, say), priority=2
        ),
    )
    return build_table(columns, lines)


def _error_and_bound(bench: BenchTimings, say: PageWords) -> str:
    """Format the error of a benchmark's result against fp64 (largest difference over the root mean
    square), with the allowed bound in parentheses; UNKNOWN if the result was not checked, and in
    the place of an error that is not finite.
    """
    if bench.checked is None:
        return UNKNOWN
    return say(
        "spec.of",
        format_number("number", bench.checked.error),
        format_number("number", bench.checked.bound),
    )
