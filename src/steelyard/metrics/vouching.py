"""Say who vouches for a record: whether its engine is this package's own, was tested by `steelyard
conform`, or neither, and which other packages brought a part of the run.

Records state these packages in `providers`. Older ones do not: there a part is another package's if
its name is no shipped one, because no package has ever been able to take the name of a shipped row.
"""

from collections.abc import Callable, Sequence
from typing import Final, Literal, get_args

from steelyard import tasks
from steelyard.accelerators import SHIPPED_ACCELERATORS
from steelyard.accelerators.peaks import load_shipped_peaks
from steelyard.engine.engine_rows import SHIPPED_ENGINES
from steelyard.record.record import Record
from steelyard.record.run_facts import Hardware

# From best to worst: part of this package; found by `steelyard conform` to compute what engine
# torch does; not tested; tested, and found not to.
EngineMark = Literal["ours", "tested", "untested", "nonconforming"]
MARKS: Final[tuple[EngineMark, ...]] = get_args(EngineMark)
UNNAMED_PACKAGE: Final = ""  # of older records: another package, but which is not known


def find_engine_mark(record: Record) -> EngineMark:
    """Return the mark of a record's engine. Another package's engine is `tested` only if the record
    says that this version conforms; an engine that was found not to is `nonconforming`, whoever
    made it.
    """
    if record.engine.conforms is False:
        return "nonconforming"
    if find_provider(record, "engine") is None:
        return "ours"
    return "tested" if record.engine.conforms else "untested"


def find_weakest_mark(records: Sequence[Record]) -> EngineMark:
    """Return the worst mark (`MARKS`) of the engine in these records, of which there must be one:
    several runs that are shown as one result are vouched for no better than the worst of them.
    """
    return max((find_engine_mark(record) for record in records), key=MARKS.index)


def find_provider(record: Record, part: str) -> str | None:
    """Return the package, with its version, that brought a part of a run (a key of
    `Record.providers`); `UNNAMED_PACKAGE` if it is another package's by its name alone; None if the
    part is this package's own.
    """
    stated = record.providers.get(part)
    if stated is None and part in _IS_FOREIGN and _IS_FOREIGN[part](record):
        return UNNAMED_PACKAGE
    return stated


def list_providers(record: Record) -> dict[str, str]:
    """Return the packages of all parts of a run that are not this package's own, by part, as
    `find_provider` names them.
    """
    parts = dict.fromkeys((*_IS_FOREIGN, *record.providers))
    found = {part: find_provider(record, part) for part in parts}
    return {part: package for part, package in found.items() if package is not None}


def _has_foreign_task(record: Record) -> bool:
    """Return whether the record's task has neither name nor spelling of a shipped one."""
    shipped = {name for task in tasks.SHIPPED_TASKS for name in (task.name, task.key)}
    return record.case.question.get("task") not in shipped


def has_foreign_accelerator(hardware: Hardware) -> bool:
    """Return whether the recorded hardware names an accelerator that is no shipped one."""
    name = hardware.accelerator
    return name is not None and name not in {row.name for row in SHIPPED_ACCELERATORS}


def has_foreign_peak(hardware: Hardware) -> bool:
    """Return whether the recorded datasheet peak comes with another package's accelerator: its name
    is not in peaks.toml. Shipped accelerators never had other peaks than those.
    """
    return (
        hardware.peak is not None
        and has_foreign_accelerator(hardware)
        and hardware.peak.name not in {row.name for row in load_shipped_peaks()}
    )


# whether a part of a record is another package's, by its name; for records that do not say
_IS_FOREIGN: dict[str, Callable[[Record], bool]] = {
    "engine": lambda record: record.engine.name not in {row.name for row in SHIPPED_ENGINES},
    "task": _has_foreign_task,
    "accelerator": lambda record: has_foreign_accelerator(record.environment.hardware),
    "peak": lambda record: has_foreign_peak(record.environment.hardware),
}
