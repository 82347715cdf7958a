"""Build the pages and sections of `--explain`: the time of a step from the datasheet's peak to what
was measured, each part with what to try.

Input are the waterfalls that metrics/ derives from a record's profile or samples.
"""

import re
from collections.abc import Iterable
from itertools import accumulate

from steelyard.metrics import rates, standing
from steelyard.metrics.time_waterfall import Waterfall, make_waterfalls
from steelyard.record.profile_facts import KernelFacts
from steelyard.record.record import Record
from steelyard.report.document import (
    BarPart,
    ColumnSpec,
    Heading,
    Lang,
    Page,
    PageElement,
    Paragraph,
    StackedBar,
    Table,
    build_table,
)
from steelyard.report.marks import mark_task
from steelyard.report.numbered_runs import group_by_case
from steelyard.report.numbers import format_count, format_number
from steelyard.words import PageWords

MAX_KERNELS = 12  # rows of the table of kernels
MIN_SHARE = 0.005  # for smaller parts the table does not say what to try
MS_PER_S = 1000.0
NAME_CHARS = 80
NAMESPACES = re.compile(r"\b(at|native|c10|std|cuda|binary_internal)::|\(anonymous namespace\)::")


def build_waterfall_section(
    record: Record, say: PageWords, include_unprofiled: bool = True
) -> list[PageElement]:
    """Return the elements of the waterfall of every profiled rank, or of one from the samples if
    the run was not profiled; empty if nothing was measured.

    Without `include_unprofiled` a run that was not profiled gives an empty list.
    """
    if not include_unprofiled and not record.profile:
        return []
    return [
        element
        for waterfall in make_waterfalls(record)
        for element in _waterfall_elements(record, waterfall, say)
    ]


def build_waterfall_page(records: list[Record], lang: Lang) -> Page:
    """Build the page of `report --explain`: only the waterfalls of each run, by case, and a
    sentence for a run without any; the footer lists all ids.
    """
    say = PageWords(lang)
    title = say("explain")
    elements: list[PageElement] = [Heading(1, title)]
    for case, runs in group_by_case(records, lang).items():
        elements.append(Heading(2, mark_task(" · ".join(case), runs[0].record, say)))
        for run in runs:
            status = standing.find_status(run.record)
            elements.append(Heading(3, f"{run.format_title(say)} · {status}"))
            elements += build_waterfall_section(run.record, say) or [
                Paragraph(say("all.absent"), "muted")
            ]
    return Page(
        title, lang, tuple(elements), say("footer", ", ".join(record.id for record in records))
    )


def build_short_waterfall_page(records: list[Record], lang: Lang = "en") -> Page | None:
    """Build what the command line prints after runs with --explain: for each profiled run a title
    line and its waterfalls without their tables of kernels, without a page title; None where no run
    was profiled.
    """
    say = PageWords(lang)
    elements: list[PageElement] = []
    for case, runs in group_by_case(records, lang).items():
        for run in runs:
            profiled = [
                waterfall
                for waterfall in make_waterfalls(run.record)
                if waterfall.profile is not None
            ]
            elements_by_rank = [
                _waterfall_elements(run.record, waterfall, say, kernels=False)
                for waterfall in profiled
            ]
            if elements_by_rank:
                title = " · ".join([*case, run.format_title(say)])
                elements += [
                    Paragraph(f"{say('explain')}: {title}", "strong"),
                    *(
                        element
                        for waterfall_elements in elements_by_rank
                        for element in waterfall_elements
                    ),
                ]
    return Page("", lang, tuple(elements)) if elements else None


def _waterfall_elements(
    record: Record, waterfall: Waterfall, say: PageWords, kernels: bool = True
) -> list[PageElement]:
    """Return the elements of a waterfall (one rank's time): what it covers and how far it can be
    trusted, a bar of the parts above 0, the table of parts, the table of the first MAX_KERNELS
    kernels that are neither matmul nor attention (if `kernels` and profiled), and the path of the
    trace if there is one.
    """
    source = "explain.requests" if record.task.kind_row.has_load else "explain.samples"
    out: list[PageElement] = [Paragraph(say(source), "muted")]
    if waterfall.profile is not None:
        share = format_number("percent", waterfall.profile.wall_s / waterfall.measured_s)
        out = [
            Paragraph(
                say(
                    "explain.of", format_count(waterfall.rank), format_count(waterfall.steps), share
                )
            )
        ]
    if not waterfall.is_close:
        out.append(Paragraph(say("explain.far"), "bad"))
    if waterfall.whole_s > waterfall.measured_s:
        out.append(Paragraph(say("explain.of_stretch")))
    explanations = [say.get_or_fallback(f"explain.{row.name}.why", "") for row in waterfall.rows]
    out += [Paragraph(explanation, "muted") for explanation in explanations if explanation]
    if waterfall.is_impossible:
        out.append(Paragraph(say("explain.impossible"), "bad"))
    parts = [
        BarPart(say(f"explain.{row.name}"), row.share, format_number("percent", row.share))
        for row in waterfall.rows
        if row.share > 0
    ]
    out += [StackedBar(say("explain"), tuple(parts)), _waterfall_table(record, waterfall, say)]
    if kernels and waterfall.kernels:
        out.append(build_kernel_table(waterfall.kernels[:MAX_KERNELS], waterfall, say))
    if waterfall.profile is not None and waterfall.profile.trace is not None:
        out.append(Paragraph(say("explain.trace", waterfall.profile.trace), "muted"))
    return out


def _waterfall_table(record: Record, waterfall: Waterfall, say: PageWords) -> Table:
    """Return the table of parts, in the order of the waterfall: ms per step, share of the whole,
    the MFU if the step ended after this part (UNKNOWN without a datasheet peak), and what to try
    for parts above MIN_SHARE.

    The last row is the whole time: of the measured steps, or of the profiled ones if they were
    slower.
    """
    peak_known = rates.datasheet_peak(record).value is not None
    ideal_s = next((row.time_s for row in waterfall.rows if row.name == "peak"), 0.0)
    ends_s = accumulate(row.time_s for row in waterfall.rows)
    rows_and_ends = zip(waterfall.rows, ends_s, strict=True)
    parts = [(row.name, row.time_s, row.share, end_s) for row, end_s in rows_and_ends]
    total = (
        "stretch" if waterfall.whole_s > waterfall.measured_s else "sum",
        waterfall.whole_s,
        1.0,
        waterfall.whole_s,
    )
    columns: tuple[ColumnSpec[tuple[str, float, float, float]], ...] = (
        ColumnSpec(say("explain.part"), lambda part: say(f"explain.{part[0]}")),
        ColumnSpec(
            say("explain.time"),
            lambda part: _format_ms_per_step(part[1], waterfall),
            "ms",
            right=True,
        ),
        ColumnSpec(
            say("explain.share"), lambda part: format_number("percent", part[2]), right=True
        ),
        ColumnSpec(
            say("explain.mfu"),
            lambda part: format_number(
                "percent", ideal_s / part[3] if peak_known and part[3] > 0 else None
            ),
            right=True,
        ),
        ColumnSpec(
            say("explain.try"),
            lambda part: (
                say.get_or_fallback(f"explain.{part[0]}.try", "") if part[2] > MIN_SHARE else ""
            ),
        ),
    )
    return build_table(columns, parts, last_rows=[total])


def _format_ms_per_step(time_s: float, waterfall: Waterfall) -> str:
    """Format a time over all steps of a waterfall as ms per step, without the unit."""
    return format_number("number", MS_PER_S * time_s / max(1, waterfall.steps))


def build_kernel_table(
    kernels: Iterable[KernelFacts], waterfall: Waterfall, say: PageWords
) -> Table:
    """Build a table of kernels in the order given: kind, calls and ms per step, share of the
    waterfall's time, and memory bandwidth in GB/s and as a share of the datasheet's; UNKNOWN where
    not known. A footnote says how bytes are counted.
    """
    device_bytes_per_s = waterfall.bandwidth_bytes_per_s

    def kernel_bytes_per_s(kernel: KernelFacts) -> float | None:
        """Return the bytes of the kernel's tensors over its time; None if unknown, or above the
        device's bandwidth, because the kernel then reads only a part of a large tensor.
        """
        moved = (
            kernel.size_bytes / kernel.time_s
            if kernel.size_bytes is not None and kernel.time_s > 0
            else None
        )
        # A rate above the device's bandwidth: the kernel reads only a part of a large tensor.
        return (
            None
            if moved is not None and device_bytes_per_s and moved > device_bytes_per_s
            else moved
        )

    def scale_bandwidth(kernel: KernelFacts, unit: float | None) -> float | None:
        """Return the kernel's bytes per second divided by `unit`; None if either is unknown or
        `unit` is 0.
        """
        moved = kernel_bytes_per_s(kernel)
        return None if moved is None or not unit else moved / unit

    columns: tuple[ColumnSpec[KernelFacts], ...] = (
        ColumnSpec(say("explain.kernel"), lambda kernel: shorten_kernel_name(kernel.name)),
        ColumnSpec(
            say("explain.kind"),
            lambda kernel: say.get_or_fallback(f"explain.{kernel.kind}", kernel.kind),
            priority=2,
        ),
        ColumnSpec(
            say("explain.calls"),
            lambda kernel: format_number("number", kernel.calls / max(1, waterfall.steps)),
            right=True,
            priority=3,
        ),
        ColumnSpec(
            say("explain.time"),
            lambda kernel: _format_ms_per_step(kernel.time_s, waterfall),
            "ms",
            right=True,
        ),
        ColumnSpec(
            say("explain.share"),
            lambda kernel: format_number("percent", kernel.time_s / waterfall.whole_s),
            right=True,
        ),
        ColumnSpec(
            say("explain.bandwidth"),
            lambda kernel: format_number("number", scale_bandwidth(kernel, 1e9)),
            "GB/s",
            right=True,
            priority=3,
        ),
        ColumnSpec(
            say("explain.bandwidth_share"),
            lambda kernel: format_number("percent", scale_bandwidth(kernel, device_bytes_per_s)),
            right=True,
            priority=2,
        ),
    )
    return build_table(columns, kernels, [say("explain.bytes")])


def shorten_kernel_name(name: str) -> str:
    """Return a kernel's name without C++ return type, namespaces and arguments, cut to NAME_CHARS
    characters.

    Only names that begin with `void ` are taken for C++.
    """
    if name.startswith("void "):
        name = NAMESPACES.sub("", name.removeprefix("void "))
        name = name.partition(">(")[0] + ">" if ">(" in name else name.partition("(")[0]
    return name if len(name) <= NAME_CHARS else name[: NAME_CHARS - 1] + "…"
