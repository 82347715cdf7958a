"""Why a rate is not higher: a step's time from the datasheet's peak to what was measured, each part with what to try."""

import re

from steelyard.metrics import rates
from steelyard.metrics.waterfall import Row, Waterfall, waterfalls
from steelyard.record.profile import KernelFacts
from steelyard.record.record import Record
from steelyard.report.document import Block, Cell, Column, Heading, Lang, Page, Paragraph, Share, Stack, Table, TableRow
from steelyard.report.numbers import UNKNOWN, counted, formed
from steelyard.report.runs import Run, by_case
from steelyard.words import Words

MOST = 12  # kernels that are shown
WORTH = 0.005  # a part that is smaller is not worth trying anything
MILLI = 1000.0
NAME_CHARS = 80
WHERE = re.compile(r"\b(at|native|c10|std|cuda|binary_internal)::|\(anonymous namespace\)::")


def section(record: Record, say: Words, whole: bool = True) -> list[Block]:
    """Of every profiled rank. Not `whole`: only where a stretch was profiled."""
    if not whole and not record.profile:
        return []
    return [block for one in waterfalls(record) for block in _blocks(record, one, say)]


def page(records: list[Record], lang: Lang) -> Page:
    """What `report --explain` shows: this and nothing else, run by run."""
    say = Words(lang)
    title = say("explain")
    blocks: list[Block] = [Heading(1, title)]
    for case, runs in by_case(records, lang).items():
        blocks.append(Heading(2, " · ".join(case)))
        for run in runs:
            blocks += [Heading(3, _title(run)), *(section(run.record, say) or [Paragraph(say("all.absent"), "muted")])]
    return Page(title, lang, tuple(blocks), say("footer", ", ".join(record.id for record in records)))


def after_run(records: list[Record], lang: Lang = "en") -> Page | None:
    """Return what the command line prints after runs with --explain: the waterfalls without their kernels;
    None where no run was profiled."""
    say = Words(lang)
    blocks: list[Block] = []
    for case, runs in by_case(records, lang).items():
        for run in runs:
            profiled = [one for one in waterfalls(run.record) if one.profile is not None]
            found = [_blocks(run.record, one, say, kernels=False) for one in profiled]
            if found:
                title = " · ".join([*case, run.title])
                blocks += [
                    Paragraph(f"{say('explain')}: {title}", "strong"),
                    *(block for own in found for block in own),
                ]
    return Page("", lang, tuple(blocks)) if blocks else None


def _title(run: Run) -> str:
    return f"{run.title} · {run.record.status}"


def _blocks(record: Record, found: Waterfall, say: Words, kernels: bool = True) -> list[Block]:
    out: list[Block] = [_intro(found, say)]
    if not found.agrees:
        out.append(Paragraph(say("explain.far"), "bad"))
    if found.whole_s > found.measured_s:
        out.append(Paragraph(say("explain.of_stretch")))
    whys = [say.known(f"explain.{row.name}.why", "") for row in found.rows]
    out += [Paragraph(why, "muted") for why in whys if why]
    if found.impossible:
        out.append(Paragraph(say("explain.impossible"), "bad"))
    parts = [Share(say(f"explain.{row.name}"), row.share, formed("percent", row.share)) for row in found.rows if row.share > 0]
    out += [Stack(say("explain"), tuple(parts)), _table(record, found, say)]
    if kernels and found.kernels:
        out.append(_kernels(found, say))
    if found.profile is not None and found.profile.trace is not None:
        out.append(Paragraph(say("explain.trace", found.profile.trace), "muted"))
    return out


def _intro(found: Waterfall, say: Words) -> Paragraph:
    if found.profile is None:
        return Paragraph(say("explain.samples"), "muted")
    share = formed("percent", found.profile.wall_s / found.measured_s)
    return Paragraph(say("explain.of", counted(found.rank), counted(found.steps), share))


def _table(record: Record, found: Waterfall, say: Words) -> Table:
    """One row after the other; the last column but one is the MFU, had the step ended there."""
    known = rates.datasheet_peak(record).value is not None
    rows, at_s = [], 0.0
    ideal_s = next((row.time_s for row in found.rows if row.name == "peak"), 0.0)
    for row in found.rows:
        at_s += row.time_s
        rows.append(_row(row, found.steps, ideal_s / at_s if known and at_s > 0 else None, say))
    name = "explain.stretch" if found.whole_s > found.measured_s else "explain.sum"
    last = (
        say(name),
        formed("number", MILLI * found.whole_s / max(1, found.steps)),
        formed("percent", 1.0),
    )
    mfu = formed("percent", ideal_s / found.whole_s if known else None)
    rows.append(TableRow(tuple(Cell(text, tone="strong") for text in (*last, mfu, "")), "total"))
    heads = (
        Column(say("explain.part")),
        Column(say("explain.time"), "ms", "right"),
        Column(say("explain.share"), align="right"),
        Column(say("explain.mfu"), align="right"),
        Column(say("explain.try")),
    )
    return Table(heads, tuple(rows))


def _row(row: Row, steps: int, mfu: float | None, say: Words) -> TableRow:
    texts = (
        say(f"explain.{row.name}"),
        formed("number", MILLI * row.time_s / max(1, steps)),
        formed("percent", row.share),
        formed("percent", mfu),
        say.known(f"explain.{row.name}.try", "") if row.share > WORTH else "",
    )
    return TableRow(tuple(map(Cell, texts)))


def _kernels(found: Waterfall, say: Words) -> Table:
    heads = (
        Column(say("explain.kernel")),
        Column(say("explain.kind"), priority=2),
        Column(say("explain.calls"), align="right", priority=3),
        Column(say("explain.time"), "ms", "right"),
        Column(say("explain.share"), align="right"),
        Column(say("explain.bandwidth"), "GB/s", "right", priority=3),
        Column(say("explain.bandwidth_share"), align="right", priority=2),
    )
    rows = tuple(_kernel(one, found, say) for one in found.kernels[:MOST])
    return Table(heads, rows, (say("explain.bytes"),))


def plain_name(name: str) -> str:
    """A kernel's name without what C++ puts around it: its result, namespaces, arguments."""
    if name.startswith("void "):
        name = WHERE.sub("", name.removeprefix("void "))
        name = name.partition(">(")[0] + ">" if ">(" in name else name.partition("(")[0]
    return name if len(name) <= NAME_CHARS else name[: NAME_CHARS - 1] + "…"


def _kernel(one: KernelFacts, found: Waterfall, say: Words) -> TableRow:
    steps = max(1, found.steps)
    moved = one.size_bytes / one.time_s if one.size_bytes is not None and one.time_s > 0 else None
    limit = found.bandwidth_bytes_per_s
    if moved is not None and limit and moved > limit:
        moved = None  # it names a table that it reads little of
    texts = (
        plain_name(one.name),
        say.known(f"explain.{one.kind}", one.kind),
        formed("number", one.calls / steps),
        formed("number", MILLI * one.time_s / steps),
        formed("percent", one.time_s / found.whole_s),
        UNKNOWN if moved is None else formed("number", moved / 1e9),
        formed("percent", None if moved is None or not limit else moved / limit),
    )
    return TableRow(tuple(map(Cell, texts)))
