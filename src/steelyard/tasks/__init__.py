"""Tasks: what is asked of a model, from reading data to scoring answers. One folder and one `Task`
row each.

Other packages add tasks through the entry-point group `steelyard.tasks`; each entry point names a
`Task`.
"""

from steelyard import plugins
from steelyard.errors import RequestError
from steelyard.tasks.alpaca.task import TASK as ALPACA
from steelyard.tasks.lambada.task import TASK as LAMBADA
from steelyard.tasks.mmlu.task import TASK as MMLU
from steelyard.tasks.openwebtext.task import TASK as OPENWEBTEXT
from steelyard.tasks.superglue_record.task import TASK as SUPERGLUE_RECORD
from steelyard.tasks.task import Task

GROUP = "steelyard.tasks"
SHIPPED = [MMLU, LAMBADA, OPENWEBTEXT, ALPACA, SUPERGLUE_RECORD]


def table() -> dict[str, Task]:
    """Return all tasks by name, those of other packages included. Raises RequestError if a
    package's entry point cannot be loaded or a name is taken twice.
    """
    return plugins.table(SHIPPED, GROUP, Task, "task")


def row(name: str) -> Task:
    """Return a task by its name, or by its spelling in questions (`record` for `superglue_record`).
    Raises RequestError if there is none.
    """
    rows = table()
    found = rows.get(name) or next((one for one in rows.values() if one.key == name), None)
    if found is None:
        raise RequestError(f"no task {name!r}; known: {', '.join(rows)}")
    return found
