"""The head of a page: when and on what was measured, what ran, the best of each case, and what is not valid."""

import re
from collections import Counter

from steelyard import words
from steelyard.metrics import overview
from steelyard.metrics.overview import Against, Row
from steelyard.record.record import Record
from steelyard.report.document import Fact, Facts, Paragraph
from steelyard.report.numbers import UNKNOWN, counted, formed, gib_of_bytes, spelled
from steelyard.report.runs import CaseName, Run, accelerator
from steelyard.report.side_by_side import unit
from steelyard.words import Words

Rows = dict[CaseName, list[Row]]


def summary(cases: dict[CaseName, list[Run]], say: Words) -> Paragraph:
    records = [run.record for runs in cases.values() for run in runs]
    found = {case: overview.rows(run.record for run in runs) for case, runs in cases.items()}
    chosen = _headline(found)
    said = [_ran(records, say), *_best(chosen, say), *_against(chosen, say)]
    said += [*_left_out(found, chosen, say), _not_valid(records, say)]
    return Paragraph(say("gap").join(said), "lead")


def _headline(found: Rows) -> Rows:
    """Cases as they are shipped, of size full; what else there is, where there is nothing of that."""
    shipped: Rows = {case: rows for case, rows in found.items() if len(case) == 2}
    full: Rows = {case: rows for case, rows in shipped.items() if case[1] == "full"}
    return full or shipped or found


def _ran(records: list[Record], say: Words) -> str:
    names = {record.case.name for record in records}
    cases = say("summary.case") if len(names) == 1 else say("summary.cases", counted(len(names)))
    kinds = dict.fromkeys(accelerator(record) for record in records)
    return say("summary.ran", count_runs(len(records), say), cases, say("comma").join(kinds))


def _best(chosen: Rows, say: Words) -> list[str]:
    several = len({row.accelerator for rows in chosen.values() for row in rows}) > 1
    listed, none = [], []
    for case, rows in chosen.items():
        best = overview.best(rows).values()
        if best:
            listed.append(say("summary.of", case[0], say("summary.and").join(_result(row, several, say) for row in best)))
        else:
            none.append(case[0])
    out = [say("summary.best", say("semicolon").join(listed))] if listed else []
    return [*out, *(say("summary.none", name) for name in none)]


def _result(row: Row, several: bool, say: Words) -> str:
    """A rate and how it was reached; on what, where there is more than one kind."""
    case = row.first.case
    rate = say("summary.rate", formed("number", row.rate.value if row.rate else None), words.unit(unit(row), say.lang))
    if row.mfu is not None:
        rate = say("summary.at", rate, formed("percent", row.mfu.value))
    how = [accelerator(row.first)] if several else []
    return say("summary.with", rate, say("comma").join([*how, row.first.engine.name, case.precision, case.division]))


def _against(chosen: Rows, say: Words) -> list[str]:
    """Where there are two accelerators or more."""
    out = []
    for case, rows in chosen.items():
        if len({row.accelerator for row in rows if row.valid}) < 2:
            continue
        found = overview.against(rows)
        out += [_pair(one, case, say) for one in found] or [say("summary.no_pair", case[0])]
    return out


def _pair(one: Against, case: CaseName, say: Words) -> str:
    ends, asked = one.ratio.interval, one.top.first.case
    beside = "" if ends is None else say("summary.interval", " – ".join(formed("number", end) for end in ends))
    where = say("summary.with", case[0], say("comma").join((asked.precision, asked.division)))
    ratio = formed("number", one.ratio.value)
    return say("summary.against", one.top.accelerator, ratio, one.base.accelerator, where, beside)


def _left_out(found: Rows, chosen: Rows, say: Words) -> list[str]:
    rest = [(case, sum(len(row.records) for row in rows)) for case, rows in found.items() if case not in chosen]
    smoke = sum(count for case, count in rest if case[1] == "smoke")
    others = sum(count for case, count in rest if case[1] != "smoke")
    out = [say("summary.smoke", count_runs(smoke, say))] if smoke else []
    return [*out, say("summary.apart", count_runs(others, say))] if others else out


def _not_valid(records: list[Record], say: Words) -> str:
    lacking = [record for record in records if record.status != "valid"]
    if not lacking:
        return say("summary.all_valid")
    why = Counter(record.reasons[0].code if record.reasons else record.status for record in lacking)
    listed = [say("summary.code", counted(count), say.known(f"why.{code}", code)) for code, count in why.most_common()]
    return say("summary.not_valid", count_runs(len(lacking), say), say("comma").join(listed))


_DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)


def measured(records: list[Record], say: Words) -> Paragraph:
    days = sorted({record.created[:10] for record in records if _DAY.match(record.created)}) or [UNKNOWN]
    span = days[0] if len(days) == 1 else say("page.span", days[0], days[-1])
    return Paragraph(say("page.measured", span), "muted")


def machines(records: list[Record], say: Words) -> Facts:
    """One line a machine: accelerators, host, driver, and how many runs it did. A machine's own name is added where known."""
    found: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        found.setdefault(_machine(record, say), []).append(record)
    items = []
    for (name, *rest), members in found.items():
        called = dict.fromkeys(one.site.get("machine") or one.environment.hardware.machine or "" for one in members)
        items.append(Fact(name, " · ".join((*rest, *(one for one in called if one), count_runs(len(members), say)))))
    return Facts(tuple(items))


def _machine(record: Record, say: Words) -> tuple[str, ...]:
    hardware, software = record.environment.hardware, record.environment.software
    every = [device for host in record.hosts for device in host.devices] or hardware.devices
    kinds = Counter(spelled(one.name) for one in every)
    name = ", ".join(f"{kind} × {count}" for kind, count in kinds.items()) or spelled(hardware.accelerator)
    hosts = f"{len(record.hosts)} × " if len(record.hosts) > 1 else ""
    host = [f"{hosts}{spelled(hardware.cpu)}"]
    host += [] if hardware.cpu_cores is None else [say("machine.cores", counted(hardware.cpu_cores))]
    host += [] if hardware.memory_bytes is None else [gib_of_bytes(hardware.memory_bytes)]
    known = [say("comma").join(host), software.os, say("machine.driver", software.driver) if software.driver else ""]
    return name, *(part for part in known if part)


def count_runs(count: int, say: Words) -> str:
    return say("count.run") if count == 1 else say("count.runs", counted(count))
