"""Build the tables of a run's hosts, ranks and stragglers, for the details of a run.

They show which devices and clock offset each host has, memory and time of each rank, and which rank
is slow.
"""

from collections.abc import Callable
from statistics import fmean

from steelyard import words
from steelyard.metrics import energy, rates, stragglers
from steelyard.metrics import spans as passes
from steelyard.metrics.result import GIB
from steelyard.metrics.spans import devices
from steelyard.metrics.stragglers import RankTime, Stragglers, Unknown
from steelyard.plan import degrees as plan
from steelyard.record.facts import HostFacts, RankFacts
from steelyard.record.record import Record, Window
from steelyard.report.document import Block, ColumnOf, Paragraph, Table, table
from steelyard.report.numbers import UNKNOWN, counted, formed, gib_of_bytes, spelled
from steelyard.words import Words


def hosts(record: Record, say: Words) -> list[Block]:
    """Return a table of hosts with ranks, devices, CPU, clock offset in s, memory in use on its
    fullest device in GiB, and energy in J; empty for a run on one host.
    """
    if len(record.hosts) < 2:
        return []

    def named(host: HostFacts) -> str:
        """Return the number of devices, and their names with memory sizes, each once."""
        kinds = dict.fromkeys(
            f"{spelled(one.name)} ({gib_of_bytes(one.memory_bytes)})" for one in host.devices
        )
        return f"{counted(len(host.devices))}x {', '.join(kinds)}"

    def ranks(host: HostFacts) -> str:
        """Return the ranks of a host: first and last if there are several, which are taken to be
        consecutive.
        """
        if len(host.ranks) > 1:
            return f"{host.ranks[0]} – {host.ranks[-1]}"
        return ", ".join(map(counted, host.ranks))

    columns: tuple[ColumnOf[HostFacts], ...] = (
        ColumnOf(say("hosts.name"), lambda host: spelled(host.name)),
        ColumnOf(say("hosts.ranks"), ranks),
        ColumnOf(say("hosts.devices"), named),
        ColumnOf(say("hosts.cpu"), lambda host: spelled(host.cpu)),
        ColumnOf(say("hosts.clock"), _clock, words.unit("s", say.lang), right=True),
        ColumnOf(
            say("hosts.mem"),
            lambda host: formed("gib", rates.host_mem(record, host.name)),
            words.unit("GiB", say.lang),
            right=True,
        ),
        ColumnOf(
            say("hosts.energy"),
            lambda host: formed("number", energy.energy(record, host.ranks).value),
            words.unit("J", say.lang),
            right=True,
        ),
    )
    return [table(columns, record.hosts)]


def _clock(host: HostFacts) -> str:
    """Return the offset of the host's clock from the parent's, with its uncertainty, in seconds;
    UNKNOWN if not measured.
    """
    if host.clock_offset_s is None or host.clock_uncertainty_s is None:
        return UNKNOWN
    return f"{host.clock_offset_s:.6f} ± {host.clock_uncertainty_s:.6f}"


def ranks(record: Record, say: Words) -> list[Block]:
    """Return a table of memory, wall time, step times and measured matmul and all-reduce rates of
    every rank in the headline pass; empty for fewer than two ranks.
    """
    name = passes.headline(record)
    spans = passes.windows(record, name) if name else []
    if len(spans) < 2:
        return []
    steps = _step_times(record)
    facts = {one.rank: one for one in record.ranks}

    def number(key: str, unit: str, cell: Callable[[Window], str]) -> ColumnOf[Window]:
        """Return a right-aligned column titled by the text `ranks.KEY`, with its unit."""
        return ColumnOf(say(f"ranks.{key}"), cell, words.unit(unit, say.lang), right=True)

    def speed(span: Window, name: str, scale: float) -> str:
        """Return a rate that the rank measured at its start (a field of its facts) divided by
        `scale`; UNKNOWN for None and 0.
        """
        return formed("number", getattr(facts.get(span.rank), name, None) or None, scale)

    columns: list[ColumnOf[Window]] = [
        ColumnOf(say("ranks.rank"), lambda span: counted(span.rank)),
        ColumnOf(say("ranks.device"), lambda span: _device(record, facts.get(span.rank))),
        ColumnOf(
            say("ranks.place"), lambda span: _standing(record, plan.place(record.plan, span.rank))
        ),
        number("mem", "GiB", lambda span: formed("gib", rates.rank_mem(record, span.rank))),
        number("allocated", "GiB", lambda span: formed("gib", span.allocated_bytes, GIB)),
        number("reserved", "GiB", lambda span: formed("gib", span.reserved_bytes, GIB)),
        number("wall", "s", lambda span: formed("seconds", span.wall_s)),
    ]
    if steps:
        unknown = (None, None)
        columns += [
            number("step", "s", lambda span: formed("seconds", steps.get(span.rank, unknown)[0])),
            number(
                "slowest", "s", lambda span: formed("seconds", steps.get(span.rank, unknown)[1])
            ),
        ]
    columns += [number("matmul", "TFLOP/s", lambda span: speed(span, "matmul_flops_per_s", 1e12))]
    if any(one.all_reduce_bytes_per_s is not None for one in record.ranks):
        reduced = "all_reduce_bytes_per_s"
        columns += [number("all_reduce", "GB/s", lambda span: speed(span, reduced, 1e9))]
    return [table(columns, sorted(spans, key=lambda span: span.rank))]


def _device(record: Record, told: RankFacts | None) -> str:
    """Return the device of a rank, after its host if the run has several; UNKNOWN without facts of
    the rank.
    """
    if told is None:
        return UNKNOWN
    return f"{told.host} {spelled(told.device)}" if len(record.hosts) > 1 else spelled(told.device)


def _step_times(record: Record) -> dict[int, tuple[float, float]]:
    """Return mean and longest step in seconds of every rank in the steady window.

    Empty for kinds of work without a steady window, because their batches differ by design, and
    where no steady window was found.
    """
    found = passes.span(record) if record.task.kind_row.steady else None
    times = (
        {r: [s.end_s - s.start_s for s in steps] for r, steps in found.steps.items()}
        if found
        else {}
    )
    return {rank: (fmean(each), max(each)) for rank, each in times.items()}


def _standing(record: Record, at: plan.Place) -> str:
    """Return the rank's position in each parallel degree above 1, counted from 1, such as `TP 2 of
    4, PP 1 of 2`; empty for one device.
    """
    degrees = (
        ("TP", at.tp, record.plan.tp),
        ("PP", at.pp, record.plan.pp),
        ("DP", at.dp, record.plan.dp),
    )
    return ", ".join(
        f"{name} {index + 1} of {count}" for name, index, count in degrees if count > 1
    )


MOST = 16  # rows of the straggler table


def straggler_section(record: Record, say: Words) -> list[Block]:
    """Return a sentence and a table on the slowest rank, or a sentence why it is not known; empty
    for a run on one device.
    """
    if devices(record) < 2:
        return []
    found = stragglers.find(record)
    if isinstance(found, Unknown):
        return [Paragraph(words.text(found.reason, say.lang), "muted")]
    return [
        Paragraph(_sentence(found, say), "strong" if found.slow else "plain"),
        _table(found, say),
    ]


def _sentence(found: Stragglers, say: Words) -> str:
    """Return a sentence that names the slowest rank or replica and the share of a step (or pass) it
    costs, and whether it has more tokens than the others.
    """
    one = found.slowest
    who = (
        say("stragglers.rank", _ranks(one))
        if one.host is None
        else say("stragglers.host", _ranks(one), one.host)
    )
    of = say("stragglers.pass" if found.basis == "pass" else "stragglers.step")
    cost = formed("percent", found.share)
    if not found.slow:
        return say("stragglers.even", who, cost, of)
    said = [
        say(
            "stragglers.slow",
            who,
            cost,
            of,
            formed("number", one.own_s),
            formed("number", one.others_s),
        )
    ]
    if found.more_work is not None:
        said.append(say("stragglers.work", f"{found.more_work:.2f}"))
    return say("gap").join(said)


def _table(found: Stragglers, say: Words) -> Table:
    """Return a table of the own time and waiting time in s of at most MAX_RANKS rows, slowest
    first; a straggler is bold.
    """
    seconds = words.unit("s", say.lang)
    columns: tuple[ColumnOf[RankTime], ...] = (
        ColumnOf(say("ranks.rank"), _ranks, optional=True),
        ColumnOf(say("stragglers.at"), lambda row: spelled(row.host), optional=True),
        ColumnOf(say("ranks.device"), lambda row: spelled(row.device), optional=True),
        ColumnOf(
            say("stragglers.own"),
            lambda row: formed("number", row.own_s),
            seconds,
            right=True,
            optional=True,
        ),
        ColumnOf(
            say("stragglers.wait"),
            lambda row: formed("number", row.wait_s),
            seconds,
            right=True,
            optional=True,
        ),
        ColumnOf(
            say("stragglers.median"), lambda row: _signed(row.relative), right=True, optional=True
        ),
        ColumnOf(
            say("stragglers.tokens"), lambda row: counted(row.tokens), right=True, optional=True
        ),
    )
    notes = (
        [say("stragglers.most", counted(MOST), counted(len(found.rows)))]
        if len(found.rows) > MOST
        else []
    )
    notes.append(say(f"stragglers.own.{found.basis}"))
    slowest = found.rows[0] if found.slow else None
    rows = found.rows[:MOST]
    return table(columns, rows, notes, tone=lambda row: "strong" if row is slowest else "plain")


def _ranks(row: RankTime) -> str:
    """Return the rank, or first and last rank of a replica."""
    first, last = row.ranks[0], row.ranks[-1]
    return counted(first) if first == last else f"{counted(first)}–{counted(last)}"


def _signed(value: float | None) -> str:
    """Format a share as a percentage with `+` if it is above 0; UNKNOWN for None."""
    text = formed("percent", value)
    return f"+{text}" if value is not None and value > 0 and text != UNKNOWN else text
