"""The hosts of a run and its ranks: who has what, whose clock is off by how much, what each used, and which rank is slow."""

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
from steelyard.record.record import Record
from steelyard.report.document import Block, Cell, Column, Paragraph, Table, TableRow, Tone
from steelyard.report.numbers import UNKNOWN, counted, formed, gib_of_bytes, spelled
from steelyard.words import Words

_HOST_UNITS = {"clock": "s", "mem": "GiB", "energy": "J"}


def hosts(record: Record, say: Words) -> list[Block]:
    """Where there are several."""
    if len(record.hosts) < 2:
        return []
    names = ("name", "ranks", "devices", "cpu", *_HOST_UNITS)
    heads = tuple(
        Column(say(f"hosts.{key}"), words.unit(_HOST_UNITS.get(key, ""), say.lang), "right" if key in _HOST_UNITS else "left")
        for key in names
    )
    return [Table(heads, tuple(TableRow(tuple(map(Cell, _host(record, one)))) for one in record.hosts))]


def _host(record: Record, host: HostFacts) -> tuple[str, ...]:
    kinds = dict.fromkeys(f"{spelled(one.name)} ({gib_of_bytes(one.memory_bytes)})" for one in host.devices)
    return (
        spelled(host.name),
        f"{host.ranks[0]} – {host.ranks[-1]}" if len(host.ranks) > 1 else ", ".join(map(counted, host.ranks)),
        f"{counted(len(host.devices))}x {', '.join(kinds)}",
        spelled(host.cpu),
        _clock(host),
        formed("gib", rates.host_mem(record, host.name)),
        formed("number", energy.energy(record, host.ranks).value),
    )


def _clock(host: HostFacts) -> str:
    """How far its clock is from the parent's, and how well that is known."""
    if host.clock_offset_s is None or host.clock_uncertainty_s is None:
        return UNKNOWN
    return f"{host.clock_offset_s:.6f} ± {host.clock_uncertainty_s:.6f}"


def ranks(record: Record, say: Words) -> list[Block]:
    """Memory and time of every rank in the headline pass, where there is more than one."""
    name = passes.headline(record)
    spans = passes.windows(record, name) if name else []
    if len(spans) < 2:
        return []
    steps = _step_times(record)
    told = {one.rank: one for one in record.ranks}
    timed = ("wall", "step", "slowest") if steps else ("wall",)
    units = {**dict.fromkeys(("mem", "allocated", "reserved"), "GiB"), **dict.fromkeys(timed, "s"), "matmul": "TFLOP/s"}
    if any(one.all_reduce_bytes_per_s is not None for one in record.ranks):
        units["all_reduce"] = "GB/s"
    rows = []
    for span in sorted(spans, key=lambda span: span.rank):
        sizes = (rates.rank_mem(record, span.rank), *(_gib(b) for b in (span.allocated_bytes, span.reserved_bytes)))
        times = (span.wall_s, *steps.get(span.rank, (None, None))) if steps else (span.wall_s,)
        place = _standing(record, plan.place(record.plan, span.rank))
        numbers = (*(formed("gib", size) for size in sizes), *(formed("seconds", time_s) for time_s in times))
        cells = (counted(span.rank), _device(record, told.get(span.rank)), place, *numbers, *_speeds(told.get(span.rank)))
        rows.append(TableRow(tuple(map(Cell, cells[: 3 + len(units)]))))
    names = ("rank", "device", "place", *units)
    heads = tuple(
        Column(say(f"ranks.{key}"), words.unit(units.get(key, ""), say.lang), "right" if key in units else "left")
        for key in names
    )
    return [Table(heads, tuple(rows))]


def _device(record: Record, told: RankFacts | None) -> str:
    if told is None:
        return UNKNOWN
    return f"{told.host} {spelled(told.device)}" if len(record.hosts) > 1 else spelled(told.device)


def _speeds(told: RankFacts | None) -> tuple[str, str]:
    """Of matmuls in TFLOP/s, of a small all-reduce in GB/s."""
    matmul, all_reduce = (told.matmul_flops_per_s, told.all_reduce_bytes_per_s) if told else (None, None)
    return formed("number", matmul / 1e12 if matmul else None), formed("number", all_reduce / 1e9 if all_reduce else None)


def _step_times(record: Record) -> dict[int, tuple[float, float]]:
    """Mean and slowest step of every rank in the steady window of training; batches of scoring differ by design."""
    found = passes.span(record) if record.task.kind_row.steady else None
    times = {r: [s.end_s - s.start_s for s in steps] for r, steps in found.steps.items()} if found else {}
    return {rank: (fmean(each), max(each)) for rank, each in times.items()}


def _standing(record: Record, at: plan.Place) -> str:
    """A rank's place in each degree that divides anything, counted from 1."""
    degrees = (("TP", at.tp, record.plan.tp), ("PP", at.pp, record.plan.pp), ("DP", at.dp, record.plan.dp))
    return ", ".join(f"{name} {index + 1} of {count}" for name, index, count in degrees if count > 1)


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB


MOST = 16  # rows

_Shown = Callable[[RankTime], str]
# Heading, unit, and what a row says: left-aligned where the unit is None. A column stands where a row has something to say.
_COLUMNS: tuple[tuple[str, str | None, _Shown], ...] = (
    ("ranks.rank", None, lambda row: _ranks(row)),
    ("stragglers.at", None, lambda row: spelled(row.host)),
    ("ranks.device", None, lambda row: spelled(row.device)),
    ("stragglers.own", "s", lambda row: formed("number", row.own_s)),
    ("stragglers.wait", "s", lambda row: formed("number", row.wait_s)),
    ("stragglers.median", "", lambda row: _signed(row.relative)),
    ("stragglers.tokens", "", lambda row: counted(row.tokens)),
)


def straggler_section(record: Record, say: Words) -> list[Block]:
    """Of a run of several ranks; why it is not known, where it is not."""
    if devices(record) < 2:
        return []
    found = stragglers.find(record)
    if isinstance(found, Unknown):
        return [Paragraph(words.text(found.reason, say.lang), "muted")]
    return [Paragraph(_sentence(found, say), "strong" if found.slow else "plain"), _table(found, say)]


def _sentence(found: Stragglers, say: Words) -> str:
    one = found.slowest
    who = say("stragglers.rank", _ranks(one)) if one.host is None else say("stragglers.host", _ranks(one), one.host)
    of = say("stragglers.pass" if found.basis == "pass" else "stragglers.step")
    cost = formed("percent", found.share)
    if not found.slow:
        return say("stragglers.even", who, cost, of)
    said = [say("stragglers.slow", who, cost, of, formed("number", one.own_s), formed("number", one.others_s))]
    if found.more_work is not None:
        said.append(say("stragglers.work", f"{found.more_work:.2f}"))
    return say("gap").join(said)


def _table(found: Stragglers, say: Words) -> Table:
    shown = found.rows[:MOST]
    columns = [one for one in _COLUMNS if any(one[2](row) != UNKNOWN for row in shown)]
    heads = tuple(
        Column(say(key), words.unit(unit or "", say.lang), "left" if unit is None else "right") for key, unit, _ in columns
    )
    rows = []
    for place, row in enumerate(shown):
        tone: Tone = "strong" if place == 0 and found.slow else "plain"
        rows.append(TableRow(tuple(Cell(text(row), tone=tone) for _, _, text in columns)))
    notes = [say("stragglers.most", counted(MOST), counted(len(found.rows)))] if len(found.rows) > MOST else []
    return Table(heads, tuple(rows), (*notes, say(f"stragglers.own.{found.basis}")))


def _ranks(row: RankTime) -> str:
    first, last = row.ranks[0], row.ranks[-1]
    return counted(first) if first == last else f"{counted(first)}–{counted(last)}"


def _signed(value: float | None) -> str:
    text = formed("percent", value)
    return f"+{text}" if value is not None and value > 0 and text != UNKNOWN else text
