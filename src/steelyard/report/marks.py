"""Show beside names who vouches for them: the mark of an engine that is not part of Steelyard, and
the package that an accelerator, a datasheet peak or a task comes from.

Every page calls `format_engine` in the place of an engine's bare name. An engine without a mark is
part of Steelyard; the table of meanings says so.
"""

from collections.abc import Sequence

from steelyard.metrics.declared_hardware import is_hardware_declared, name_declared_hardware
from steelyard.metrics.vouching import EngineMark, find_provider, find_weakest_mark, list_providers
from steelyard.record.record import Record
from steelyard.report.numbers import format_setting
from steelyard.words import PageWords

# parts that can change a number, in the order in which `list_vouching_notes` names their packages
_NOTED_PARTS = ("framework", "task", "kind", "family", "accelerator", "peak")


def format_engine(records: Record | Sequence[Record], say: PageWords) -> str:
    """Return the name of the engine of these records (that of the first) with its mark, such as
    `acme (not tested)`; the bare name if it is part of Steelyard. Several records have the worst of
    their marks.
    """
    members = [records] if isinstance(records, Record) else records
    return mark_engine(members[0].engine.name, find_weakest_mark(members), say)


def mark_engine(name: str, mark: EngineMark | str, say: PageWords) -> str:
    """Return an engine's name with a mark; the bare name for the mark `ours`."""
    return name if mark == "ours" else say(f"mark.{mark}", name)


def mark_package(text: str, record: Record, part: str, say: PageWords) -> str:
    """Return a text followed by the package that brought a part of the run (a key of
    `Record.providers`), such as `ABC One × 1 (from acme-pack 1.2)`; the text alone if the part is
    Steelyard's own.
    """
    return append_package(text, find_provider(record, part), say)


def append_package(text: str, package: str | None, say: PageWords) -> str:
    """Return a text followed by the package that it is from; the text alone for None, which is
    Steelyard.
    """
    return text if package is None else say("mark.from", text, _name_package(package, say))


def format_declared_device(record: Record, say: PageWords) -> str | None:
    """Return what the user says that a server runs on which was not started here, with the words
    that nobody has seen it; None for all other runs.
    """
    if not is_hardware_declared(record):
        return None
    device = name_declared_hardware(record)
    return say("device.undeclared") if device is None else say("device.declared", device)


def name_devices(record: Record, text: str, say: PageWords) -> str:
    """Return the names of a run's devices, `text`, with the package that the accelerator is from if
    it is not Steelyard's; for a server that was not started here the declared device, marked so:
    the devices in such a record are those of the machine that sent the requests.
    """
    declared = format_declared_device(record, say)
    return mark_package(text, record, "accelerator", say) if declared is None else declared


def mark_task(text: str, record: Record, say: PageWords) -> str:
    """Return the heading of a case followed by the package that its task is from; the heading alone
    if the task is Steelyard's own.
    """
    package = find_provider(record, "task")
    return text if package is None else say("mark.task", text, _name_package(package, say))


def format_peak_mark(record: Record, say: PageWords) -> str:
    """Return which package the datasheet peak is from that a run's MFU is relative to, for the line
    below it; empty if the peak is Steelyard's own.
    """
    package = find_provider(record, "peak")
    return "" if package is None else say("mark.peak", _name_package(package, say))


def _name_package(package: str, say: PageWords) -> str:
    """Return a package's name and version, or words for one that is not named."""
    return package or say("mark.another")


def list_engine_notes(records: Sequence[Record], say: PageWords) -> list[str]:
    """Return one sentence for each engine that has a mark: which package it is from, and what
    `steelyard conform` found.
    """
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record.engine.name, []).append(record)
    out = []
    for name, members in by_name.items():
        mark = find_weakest_mark(members)
        packages = [find_provider(record, "engine") for record in members]
        named = dict.fromkeys(
            _name_package(package, say) for package in packages if package is not None
        )
        found = "" if mark == "ours" else say(f"vouch.{mark}")
        if named:
            out.append(say("vouch.engine", name, say("comma").join(named), found))
        elif found:
            out.append(say("vouch.own_engine", name, found))
    return out


def list_vouching_notes(records: Sequence[Record], say: PageWords) -> list[str]:
    """Return one sentence for each engine that has a mark, then for each other part of these runs
    that another package brought and that can change a number, each once; empty if all is
    Steelyard's own.
    """
    out = list_engine_notes(records, say)
    for part in _NOTED_PARTS:
        for record in records:
            package = find_provider(record, part)
            if package is not None:
                name = _name_part(record, part)
                out.append(say(f"vouch.{part}", name, _name_package(package, say)))
    return list(dict.fromkeys(out))


def _name_part(record: Record, part: str) -> str:
    """Return the name of a part of `_NOTED_PARTS` in a record: that of its engine for the
    framework, which the record does not name.
    """
    hardware, question = record.environment.hardware, record.case.question
    model = question.get("model")
    names = {
        "framework": record.engine.name,
        "task": question.get("task"),
        "kind": question.get("kind"),
        "family": model.get("family") if isinstance(model, dict) else None,
        "accelerator": hardware.accelerator,
        "peak": None if hardware.peak is None else hardware.peak.name,
    }
    return format_setting(names[part])


def format_providers(record: Record, say: PageWords) -> str:
    """Return all parts of a run that other packages brought as `part: package`, joined by commas;
    empty if there are none.
    """
    packages = list_providers(record)
    return ", ".join(f"{part}: {_name_package(name, say)}" for part, name in packages.items())
