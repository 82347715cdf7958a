"""Engines: a case's work in one framework. An engine yields marks and work; it never reads a clock.

The table holds names, so that nothing heavy is imported to list them. Third parties add rows through the entry-point group
`steelyard.engines`: name = "module:Class", called with a `Job`.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points

from steelyard.engines.job import Engine, Job
from steelyard.errors import RequestError

# By kind of question, or by task where that is another kind of work. Those of third parties are one class for all, which
# refuses what it does not know.
ENGINES = {
    "torch": {
        "score": "steelyard.engines.torch.score:TorchScore",
        "train": "steelyard.engines.torch.train:TorchTrain",
        "record": "steelyard.training.cloze:TorchCloze",
    },
    "reference": {"record": "steelyard.training.cloze:ReferenceCloze"},
    "transformers": {
        "score": "steelyard.engines.transformers.score:TransformersScore",
        "train": "steelyard.engines.transformers.train:TransformersTrain",
    },
}

# What an engine cannot do, known without importing it; one that is not here says so itself.
DIVISIONS = {"transformers": ("closed",), "reference": ("closed",)}


def names() -> list[str]:
    return sorted({*ENGINES, *_others()})


def load(name: str, kind: str, task: str = "") -> Callable[[Job], Engine]:
    """What makes the engine of a name for a kind of question, or for its task where that has one of its own."""
    rows = ENGINES.get(name, {})
    where = rows.get(task, rows.get(kind)) if rows else _others().get(name)
    if where is None:
        raise RequestError(f"no engine {name!r} for kind {kind!r}; known: {', '.join(names())}")
    module, _, attribute = where.partition(":")
    try:
        engine: Callable[[Job], Engine] = getattr(import_module(module), attribute)
    except ImportError as error:
        what = error.name or str(error)
        raise RequestError(f"engine {name!r} needs {what}; pip install 'steelyard[{name}]'") from error
    return engine


def _others() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group="steelyard.engines")}
