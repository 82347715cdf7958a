"""Tasks: what is asked of a model, from reading data to scoring answers. One folder and one `Task`
row each.

Other packages add tasks through the entry-point group `steelyard.tasks`; each entry point names a
`Task`.
"""

from steelyard import plugins
from steelyard.errors import RequestError
from steelyard.tasks.alpaca.task import TASK as ALPACA
from steelyard.tasks.generate.task import TASK as GENERATE
from steelyard.tasks.lambada.task import TASK as LAMBADA
from steelyard.tasks.mmlu.task import TASK as MMLU
from steelyard.tasks.openwebtext.task import TASK as OPENWEBTEXT
from steelyard.tasks.superglue_record.task import TASK as SUPERGLUE_RECORD
from steelyard.tasks.task import Task

ENTRY_POINT_GROUP = "steelyard.tasks"
SHIPPED_TASKS = [MMLU, LAMBADA, OPENWEBTEXT, ALPACA, SUPERGLUE_RECORD, GENERATE]


def load_tasks() -> dict[str, Task]:
    """Return all tasks by name, those of other packages included. Raises RequestError if a
    package's entry point cannot be loaded, or a name, or a spelling in questions, is taken twice.
    """
    tasks = plugins.load_rows_by_name(SHIPPED_TASKS, ENTRY_POINT_GROUP, Task, "task")
    # `find_task` takes either, so no task may have another's spelling as its name
    plugins.check_unique_names(
        (name for task in tasks.values() for name in {task.name, task.key}), "task"
    )
    return tasks


def find_task(name: str) -> Task:
    """Return a task by its name, or by its spelling in questions (`record` for `superglue_record`).
    Raises RequestError, which lists the names, if there is none, and what `load_tasks` raises.
    """
    tasks = load_tasks()
    task = tasks.get(name) or next(
        (candidate for candidate in tasks.values() if candidate.key == name), None
    )
    if task is None:
        raise RequestError(f"no task {name!r}; known: {', '.join(tasks)}")
    return task
