"""Build the pages and sections of `--explain`: the time of a step from the datasheet's peak to what
was measured, each part with what to try.

Input are the waterfalls that metrics/ derives from a record's profile or samples.
"""

import re
from collections.abc import Iterable
from itertools import accumulate

from steelyard.metrics import rates
from steelyard.metrics.waterfall import Waterfall, waterfalls
from steelyard.record.profile import KernelFacts
from steelyard.record.record import Record
from steelyard.report.document import (
    Block,
    ColumnOf,
    Heading,
    Lang,
    Page,
    Paragraph,
    Share,
    Stack,
    Table,
    table,
)
from steelyard.report.numbers import counted, formed
from steelyard.report.runs import by_case
from steelyard.words import Words

MOST = 12  # rows of the table of kernels
WORTH = 0.005  # for smaller parts the table does not say what to try
MILLI = 1000.0
NAME_CHARS = 80
WHERE = re.compile(r"\b(at|native|c10|std|cuda|binary_internal)::|\(anonymous namespace\)::")


def section(record: Record, say: Words, whole: bool = True) -> list[Block]:
    """Return the elements of the waterfall of every profiled rank, or of one from the samples if
    the run was not profiled; empty if nothing was measured.

    Without `include_unprofiled` a run that was not profiled gives an empty list.
    """
    if not whole and not record.profile:
        return []
    return [block for one in waterfalls(record) for block in _blocks(record, one, say)]


def page(records: list[Record], lang: Lang) -> Page:
    """Build the page of `report --explain`: only the waterfalls of each run, by case."""
    say = Words(lang)
    title = say("explain")
    blocks: list[Block] = [Heading(1, title)]
    for case, runs in by_case(records, lang).items():
        blocks.append(Heading(2, " · ".join(case)))
        for run in runs:
            blocks.append(Heading(3, f"{run.title} · {run.record.status}"))
            blocks += section(run.record, say) or [Paragraph(say("all.absent"), "muted")]
    return Page(
        title, lang, tuple(blocks), say("footer", ", ".join(record.id for record in records))
    )


def after_run(records: list[Record], lang: Lang = "en") -> Page | None:
    """Build what the command line prints after runs with --explain: the waterfalls without their
    tables of kernels; None where no run was profiled.
    """
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


def _blocks(record: Record, found: Waterfall, say: Words, kernels: bool = True) -> list[Block]:
    """Return the elements of a waterfall: remarks on how far it can be trusted, a bar, the table of
    parts, the table of kernels if `kernels`, and the path of the trace.
    """
    out: list[Block] = [Paragraph(say("explain.samples"), "muted")]
    if found.profile is not None:
        share = formed("percent", found.profile.wall_s / found.measured_s)
        out = [Paragraph(say("explain.of", counted(found.rank), counted(found.steps), share))]
    if not found.agrees:
        out.append(Paragraph(say("explain.far"), "bad"))
    if found.whole_s > found.measured_s:
        out.append(Paragraph(say("explain.of_stretch")))
    whys = [say.known(f"explain.{row.name}.why", "") for row in found.rows]
    out += [Paragraph(why, "muted") for why in whys if why]
    if found.impossible:
        out.append(Paragraph(say("explain.impossible"), "bad"))
    parts = [
        Share(say(f"explain.{row.name}"), row.share, formed("percent", row.share))
        for row in found.rows
        if row.share > 0
    ]
    out += [Stack(say("explain"), tuple(parts)), _table(record, found, say)]
    if kernels and found.kernels:
        out.append(kernel_table(found.kernels[:MOST], found, say))
    if found.profile is not None and found.profile.trace is not None:
        out.append(Paragraph(say("explain.trace", found.profile.trace), "muted"))
    return out


def _table(record: Record, found: Waterfall, say: Words) -> Table:
    """Return the table of parts: ms per step, share, the MFU if the step ended after this part
    (UNKNOWN without a datasheet peak), and what to try for parts above MIN_SHARE.

    The last row is the sum.
    """
    known = rates.datasheet_peak(record).value is not None
    ideal_s = next((row.time_s for row in found.rows if row.name == "peak"), 0.0)
    ended_s = accumulate(row.time_s for row in found.rows)
    ended = zip(found.rows, ended_s, strict=True)
    parts = [(row.name, row.time_s, row.share, at_s) for row, at_s in ended]
    total = (
        "stretch" if found.whole_s > found.measured_s else "sum",
        found.whole_s,
        1.0,
        found.whole_s,
    )
    columns: tuple[ColumnOf[tuple[str, float, float, float]], ...] = (
        ColumnOf(say("explain.part"), lambda part: say(f"explain.{part[0]}")),
        ColumnOf(say("explain.time"), lambda part: _per_step_ms(part[1], found), "ms", right=True),
        ColumnOf(say("explain.share"), lambda part: formed("percent", part[2]), right=True),
        ColumnOf(
            say("explain.mfu"),
            lambda part: formed("percent", ideal_s / part[3] if known and part[3] > 0 else None),
            right=True,
        ),
        ColumnOf(
            say("explain.try"),
            lambda part: say.known(f"explain.{part[0]}.try", "") if part[2] > WORTH else "",
        ),
    )
    return table(columns, parts, last=[total])


def _per_step_ms(time_s: float, found: Waterfall) -> str:
    """Format a time over all steps of a waterfall as ms per step, without the unit."""
    return formed("number", MILLI * time_s / max(1, found.steps))


def kernel_table(kernels: Iterable[KernelFacts], found: Waterfall, say: Words) -> Table:
    """Build a table of kernels: calls and ms per step, share of the time, and memory bandwidth in
    GB/s and as a share of the device's.
    """
    limit = found.bandwidth_bytes_per_s

    def bytes_per_s(one: KernelFacts) -> float | None:
        """Return the bytes of the kernel's tensors over its time; None if unknown, or above the
        device's bandwidth, because the kernel then reads only a part of a large tensor.
        """
        moved = (
            one.size_bytes / one.time_s if one.size_bytes is not None and one.time_s > 0 else None
        )
        # A rate above the device's bandwidth: the kernel reads only a part of a large tensor.
        return None if moved is not None and limit and moved > limit else moved

    def bandwidth(one: KernelFacts, unit: float | None) -> float | None:
        """Return the kernel's bytes per second divided by `unit`; None if either is unknown or
        `unit` is 0.
        """
        moved = bytes_per_s(one)
        return None if moved is None or not unit else moved / unit

    columns: tuple[ColumnOf[KernelFacts], ...] = (
        ColumnOf(say("explain.kernel"), lambda one: plain_name(one.name)),
        ColumnOf(
            say("explain.kind"), lambda one: say.known(f"explain.{one.kind}", one.kind), priority=2
        ),
        ColumnOf(
            say("explain.calls"),
            lambda one: formed("number", one.calls / max(1, found.steps)),
            right=True,
            priority=3,
        ),
        ColumnOf(
            say("explain.time"), lambda one: _per_step_ms(one.time_s, found), "ms", right=True
        ),
        ColumnOf(
            say("explain.share"),
            lambda one: formed("percent", one.time_s / found.whole_s),
            right=True,
        ),
        ColumnOf(
            say("explain.bandwidth"),
            lambda one: formed("number", bandwidth(one, 1e9)),
            "GB/s",
            right=True,
            priority=3,
        ),
        ColumnOf(
            say("explain.bandwidth_share"),
            lambda one: formed("percent", bandwidth(one, limit)),
            right=True,
            priority=2,
        ),
    )
    return table(columns, kernels, [say("explain.bytes")])


def plain_name(name: str) -> str:
    """Return a kernel's name without C++ return type, namespaces and arguments, cut to NAME_CHARS
    characters.

    Only names that begin with `void ` are taken for C++.
    """
    if name.startswith("void "):
        name = WHERE.sub("", name.removeprefix("void "))
        name = name.partition(">(")[0] + ">" if ">(" in name else name.partition("(")[0]
    return name if len(name) <= NAME_CHARS else name[: NAME_CHARS - 1] + "…"
