"""The head of a page: when was measured, and on what."""

import re
from collections import Counter

from steelyard.record.record import Record
from steelyard.report.document import Fact, Facts, Paragraph
from steelyard.report.numbers import UNKNOWN, counted, gib_of_bytes, spelled
from steelyard.words import Words

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
        items.append(Fact(name, " · ".join((*rest, *(one for one in called if one), runs(len(members), say)))))
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


def runs(count: int, say: Words) -> str:
    return say("count.run") if count == 1 else say("count.runs", counted(count))
