"""What each metric means, once for the whole page: those that are compared, and folded all others that a run has."""

from steelyard.metrics.result import work_name
from steelyard.metrics.table import in_order
from steelyard.metrics.table import row as metric_row
from steelyard.report.document import Block, Cell, Column, Fold, Heading, Table, TableRow
from steelyard.report.numbers import UNKNOWN
from steelyard.report.runs import CaseName, Run
from steelyard.tasks.task import Task
from steelyard.words import Words

# Settings that are compared, and the phrase that heads their column.
_SETTINGS = {"precision": "side.precision", "division": "side.division", "parallel": "side.plan", "fix_hp": "side.tune"}
_RATES = {"tokens": "tokens_per_device_s", "samples": "samples_per_s"}


def meanings(cases: dict[CaseName, list[Run]], level: int, say: Words) -> list[Block]:
    runs = [run for every in cases.values() for run in every]
    tasks: dict[str, Task] = {}
    for run in runs:
        for name in run.record.metrics:
            tasks.setdefault(name, run.record.task)
    compared = {_RATES[work_name(run.record)] for run in runs} | {run.record.quality.metric for run in runs}
    compared |= {"mfu", "mem", "energy_per_token"}
    known = [name for name in in_order(set(tasks)) if name in compared]
    rest = [name for name in in_order(set(tasks)) if name not in compared]
    settings = [(*say.meaning(f"setting.{name}"), say(head)) for name, head in _SETTINGS.items()]
    out: list[Block] = [_table([*settings, *(_words(name, tasks[name], say) for name in known)], say)]
    if rest:
        folded = _table([_words(name, tasks[name], say) for name in rest], say)
        out.append(Fold(Heading(level, say("page.meanings.rest")), "", "plain", (folded,)))
    return out


def _words(name: str, task: Task, say: Words) -> tuple[str, str, str]:
    metric = metric_row(name, task=task)
    return *metric.words(say.lang), metric.index


def _table(rows: list[tuple[str, str, str]], say: Words) -> Table:
    heads = tuple(Column(say(f"metrics.{key}")) for key in ("name", "index", "meaning"))
    return Table(heads, tuple(TableRow((Cell(title), Cell(index), Cell(text or UNKNOWN))) for title, text, index in rows))
