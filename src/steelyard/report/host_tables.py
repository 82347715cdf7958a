"""Build the tables of a run's hosts, ranks and stragglers, for the details of a run.

They show which devices and clock offset each host has, memory and time of each rank, and which rank
is slow.
"""

from collections.abc import Callable
from statistics import fmean

from steelyard import words
from steelyard.metrics import energy, passes, rates, stragglers
from steelyard.metrics.passes import count_devices
from steelyard.metrics.result import GIB
from steelyard.metrics.stragglers import RankTime, Stragglers, UnknownStragglers
from steelyard.plan import degrees as plan
from steelyard.record.record import PassFacts, Record
from steelyard.record.run_facts import HostFacts, RankFacts
from steelyard.report.document import ColumnSpec, PageElement, Paragraph, Table, build_table
from steelyard.report.numbers import (
    UNKNOWN,
    format_bytes_in_gib,
    format_count,
    format_number,
    format_setting,
)
from steelyard.words import PageWords


def build_hosts_table(record: Record, say: PageWords) -> list[PageElement]:
    """Return a table of the run's hosts, in a list: name, ranks, devices, CPU, clock offset in s,
    memory in use on its fullest device in GiB, and energy of its ranks in J; empty for a run on one
    host.
    """
    if len(record.hosts) < 2:
        return []

    def format_devices(host: HostFacts) -> str:
        """Return the number of a host's devices, and their names with memory sizes, each kind once,
        such as `8x NVIDIA H200 (139.8 GiB)`.
        """
        kinds = dict.fromkeys(
            f"{format_setting(device.name)} ({format_bytes_in_gib(device.memory_bytes)})"
            for device in host.devices
        )
        return f"{format_count(len(host.devices))}x {', '.join(kinds)}"

    def format_host_ranks(host: HostFacts) -> str:
        """Return the ranks of a host: first and last with a dash if several are consecutive, else
        all of them; empty for none.
        """
        consecutive = list(range(host.ranks[0], host.ranks[-1] + 1)) if host.ranks else []
        if len(host.ranks) > 1 and list(host.ranks) == consecutive:
            return f"{host.ranks[0]} – {host.ranks[-1]}"
        return ", ".join(map(format_count, host.ranks))

    columns: tuple[ColumnSpec[HostFacts], ...] = (
        ColumnSpec(say("hosts.name"), lambda host: format_setting(host.name)),
        ColumnSpec(say("hosts.ranks"), format_host_ranks),
        ColumnSpec(say("hosts.devices"), format_devices),
        ColumnSpec(say("hosts.cpu"), lambda host: format_setting(host.cpu)),
        ColumnSpec(
            say("hosts.clock"), _format_clock, words.translate_unit("s", say.lang), right=True
        ),
        ColumnSpec(
            say("hosts.mem"),
            lambda host: format_number("gib", rates.host_memory_gib(record, host.name)),
            words.translate_unit("GiB", say.lang),
            right=True,
        ),
        ColumnSpec(
            say("hosts.energy"),
            lambda host: format_number("number", energy.energy(record, host.ranks).value),
            words.translate_unit("J", say.lang),
            right=True,
        ),
    )
    return [build_table(columns, record.hosts)]


def _format_clock(host: HostFacts) -> str:
    """Return the offset of the host's clock from the parent's, with its uncertainty, in seconds
    with six decimals, such as `0.000012 ± 0.000030`; UNKNOWN if not measured.
    """
    if host.clock_offset_s is None or host.clock_uncertainty_s is None:
        return UNKNOWN
    return f"{host.clock_offset_s:.6f} ± {host.clock_uncertainty_s:.6f}"


def build_ranks_table(record: Record, say: PageWords) -> list[PageElement]:
    """Return a table, in a list, with a row per rank of the headline pass, by rank: device,
    position in the plan, memory in GiB (in use, allocated, reserved), wall time, and the matmul
    rate measured at its start; empty for fewer than two ranks.

    Mean and longest step are added for work with a steady window, the all-reduce rate if a rank
    measured it.
    """
    pass_name = passes.find_headline_pass(record)
    rank_windows = passes.select_windows(record, pass_name) if pass_name else []
    if len(rank_windows) < 2:
        return []
    steps = _step_times_s(record)
    facts = {rank_facts.rank: rank_facts for rank_facts in record.ranks}

    def make_number_column(
        key: str, unit: str, cell: Callable[[PassFacts], str]
    ) -> ColumnSpec[PassFacts]:
        """Return a right-aligned column titled by the text `ranks.KEY`, with its unit."""
        return ColumnSpec(
            say(f"ranks.{key}"), cell, words.translate_unit(unit, say.lang), right=True
        )

    def format_speed(window: PassFacts, field: str, scale: float) -> str:
        """Return a rate that the rank measured at its start (a field of its facts) divided by
        `scale`; UNKNOWN for None and 0.
        """
        return format_number("number", getattr(facts.get(window.rank), field, None) or None, scale)

    columns: list[ColumnSpec[PassFacts]] = [
        ColumnSpec(say("ranks.rank"), lambda window: format_count(window.rank)),
        ColumnSpec(
            say("ranks.device"), lambda window: _format_device(record, facts.get(window.rank))
        ),
        ColumnSpec(
            say("ranks.place"),
            lambda window: _format_position(record, plan.find_position(record.plan, window.rank)),
        ),
        make_number_column(
            "mem",
            "GiB",
            lambda window: format_number("gib", rates.rank_memory_gib(record, window.rank)),
        ),
        make_number_column(
            "allocated", "GiB", lambda window: format_number("gib", window.allocated_bytes, GIB)
        ),
        make_number_column(
            "reserved", "GiB", lambda window: format_number("gib", window.reserved_bytes, GIB)
        ),
        make_number_column("wall", "s", lambda window: format_number("seconds", window.wall_s)),
    ]
    if steps:
        unknown = (None, None)
        columns += [
            make_number_column(
                "step",
                "s",
                lambda window: format_number("seconds", steps.get(window.rank, unknown)[0]),
            ),
            make_number_column(
                "slowest",
                "s",
                lambda window: format_number("seconds", steps.get(window.rank, unknown)[1]),
            ),
        ]
    columns += [
        make_number_column(
            "matmul", "TFLOP/s", lambda window: format_speed(window, "matmul_flops_per_s", 1e12)
        )
    ]
    if any(rank_facts.all_reduce_bytes_per_s is not None for rank_facts in record.ranks):
        field_name = "all_reduce_bytes_per_s"
        columns += [
            make_number_column(
                "all_reduce", "GB/s", lambda window: format_speed(window, field_name, 1e9)
            )
        ]
    return [build_table(columns, sorted(rank_windows, key=lambda window: window.rank))]


def _format_device(record: Record, facts: RankFacts | None) -> str:
    """Return the device of a rank, after its host if the run has several; UNKNOWN without facts of
    the rank.
    """
    if facts is None:
        return UNKNOWN
    return (
        f"{facts.host} {format_setting(facts.device)}"
        if len(record.hosts) > 1
        else format_setting(facts.device)
    )


def _step_times_s(record: Record) -> dict[int, tuple[float, float]]:
    """Return (mean, longest) step in seconds in the steady window, by rank.

    Empty for kinds of work without a steady window, because their batches differ by design, and
    where no steady window was found.
    """
    steady = passes.find_rate_span(record) if record.task.kind_row.steady else None
    times = (
        {
            rank_id: [step.end_s - step.start_s for step in steps]
            for rank_id, steps in steady.steps.items()
        }
        if steady
        else {}
    )
    return {rank: (fmean(rank_times), max(rank_times)) for rank, rank_times in times.items()}


def _format_position(record: Record, position: plan.RankPosition) -> str:
    """Return the rank's position in each parallel degree above 1, counted from 1, such as `TP 2 of
    4, PP 1 of 2`; empty for one device.
    """
    positions = (
        ("TP", position.tp, record.plan.tp),
        ("PP", position.pp, record.plan.pp),
        ("DP", position.dp, record.plan.dp),
    )
    return ", ".join(
        f"{name} {index + 1} of {count}" for name, index, count in positions if count > 1
    )


MAX_RANKS = 16  # rows of the straggler table


def build_straggler_section(record: Record, say: PageWords) -> list[PageElement]:
    """Return a sentence (strong if there is a straggler) and a table on the slowest rank or
    replica, or a sentence why it is not known; empty for a run on one device.
    """
    if count_devices(record) < 2:
        return []
    result = stragglers.find_stragglers(record)
    if isinstance(result, UnknownStragglers):
        return [Paragraph(words.render_text(result.reason, say.lang), "muted")]
    return [
        Paragraph(_straggler_sentence(result, say), "strong" if result.is_slow else "plain"),
        _straggler_table(result, say),
    ]


def _straggler_sentence(result: Stragglers, say: PageWords) -> str:
    """Return a sentence that names the slowest rank or replica and the share of a step (or pass)
    that it costs.

    If it counts as slow, its own time and that of the others in s follow, and how many times their
    tokens it has, if it has more; else the sentence says that no rank is clearly slow.
    """
    slowest = result.slowest
    rank_text = (
        say("stragglers.rank", _format_ranks(slowest))
        if slowest.host is None
        else say("stragglers.host", _format_ranks(slowest), slowest.host)
    )
    basis_text = say("stragglers.pass" if result.basis == "pass" else "stragglers.step")
    cost = format_number("percent", result.share)
    if not result.is_slow:
        return say("stragglers.even", rank_text, cost, basis_text)
    sentences = [
        say(
            "stragglers.slow",
            rank_text,
            cost,
            basis_text,
            format_number("number", slowest.own_s),
            format_number("number", slowest.others_s),
        )
    ]
    if result.more_work is not None:
        sentences.append(say("stragglers.work", f"{result.more_work:.2f}"))
    return say("gap").join(sentences)


def _straggler_table(result: Stragglers, say: PageWords) -> Table:
    """Return a table of rank (or first and last rank of a replica), host, device, own and waiting
    time in s, difference from the median of the others in signed percent, and tokens, of at most
    MAX_RANKS ranks or replicas, slowest first; the first row is bold if it is a straggler
    (`is_slow`).

    Columns without any value are left out. Footnotes say how many rows there are if not all are
    shown, and what own time means.
    """
    seconds = words.translate_unit("s", say.lang)
    columns: tuple[ColumnSpec[RankTime], ...] = (
        ColumnSpec(say("ranks.rank"), _format_ranks, optional=True),
        ColumnSpec(say("stragglers.at"), lambda row: format_setting(row.host), optional=True),
        ColumnSpec(say("ranks.device"), lambda row: format_setting(row.device), optional=True),
        ColumnSpec(
            say("stragglers.own"),
            lambda row: format_number("number", row.own_s),
            seconds,
            right=True,
            optional=True,
        ),
        ColumnSpec(
            say("stragglers.wait"),
            lambda row: format_number("number", row.wait_s),
            seconds,
            right=True,
            optional=True,
        ),
        ColumnSpec(
            say("stragglers.median"),
            lambda row: _format_signed_percent(row.relative),
            right=True,
            optional=True,
        ),
        ColumnSpec(
            say("stragglers.tokens"),
            lambda row: format_count(row.tokens),
            right=True,
            optional=True,
        ),
    )
    notes = (
        [say("stragglers.most", format_count(MAX_RANKS), format_count(len(result.rows)))]
        if len(result.rows) > MAX_RANKS
        else []
    )
    notes.append(say(f"stragglers.own.{result.basis}"))
    slowest = result.rows[0] if result.is_slow else None
    rows = result.rows[:MAX_RANKS]
    return build_table(
        columns, rows, notes, row_tone=lambda row: "strong" if row is slowest else "plain"
    )


def _format_ranks(row: RankTime) -> str:
    """Return the rank, or first and last rank of a replica."""
    first, last = row.ranks[0], row.ranks[-1]
    return format_count(first) if first == last else f"{format_count(first)}–{format_count(last)}"


def _format_signed_percent(value: float | None) -> str:
    """Format a share as a percentage with `+` if it is above 0; UNKNOWN for None."""
    text = format_number("percent", value)
    return f"+{text}" if value is not None and value > 0 and text != UNKNOWN else text
