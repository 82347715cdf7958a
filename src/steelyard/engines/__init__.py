"""Engines: a case's work in one framework. An engine yields marks and work; it never reads a clock.

The table holds names, so that nothing heavy is imported to list them. Third parties add rows through the entry-point group
`steelyard.engines`: name = "module:Class", called with a `Job`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from steelyard.case.case import Case
from steelyard.errors import RequestError
from steelyard.plan.degrees import Place
from steelyard.record.record import Plan
from steelyard.run.measure import Phase, Work

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

Part = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Keep:
    """Checkpoints: after every so many steps, into a folder."""

    folder: Path
    every: int


@dataclass(frozen=True)
class Job:
    """What an engine is given: the resolved case, its share of the work, and the device."""

    case: Case
    texts: Any  # what the task prepared, such as data.mmlu's Prompts
    weights: Path | None  # None: random
    device: Any  # steelyard.accelerators' worker-side device
    rank: int
    world: int
    plan: Plan
    place: Place  # of this rank in the plan: replica `place.dp` of `plan.dp` computes its own part of the data
    team: Any  # engines.team's: the ranks that hold one model together
    steps: int | None  # at most so many batches a pass
    loading: Callable[[int, int], None] | None = None  # told how far loading is: done, total
    keep: Keep | None = None  # training: where to write checkpoints
    resume: Path | None = None  # training: the checkpoint to go on from


class Engine(Protocol):
    def prepare(self, name: str, part: Part) -> None:
        """Make ready for a pass: build, load, compile, warm up, each in a named part of the budget. Weights do not change."""

    def total(self, name: str) -> int:
        """How many `Work` items the pass will yield."""

    def work(self, name: str) -> Iterator[Phase | Work]:
        """The pass. Every `Work` ends a step; a phase begins with its mark."""

    def outputs(self, name: str) -> dict[str, Any]:
        """What the pass answered, as plain lists."""

    def details(self) -> dict[str, Any]:
        """What the engine chose by itself: kernels, weights' identity, batches."""


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
