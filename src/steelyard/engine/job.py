"""What an engine is given, and the interface that it implements."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from steelyard.case.case import Case
from steelyard.case.question import Train
from steelyard.engine.work import Phase, Work
from steelyard.plan.degrees import Place, Plan

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
    work: str  # which kind: a key of rows.WORKS
    inputs: Any  # what the task prepared for that kind of work
    weights: Path | None  # None: random
    device: Any  # the accelerator's device class of the framework
    rank: int
    world: int
    plan: Plan
    # of this rank in the plan: replica `place.dp` of `plan.dp` computes its own part of the data
    place: Place
    group: Any  # what the framework's `join` returned: the ranks that hold one model together
    steps: int | None  # at most so many batches a pass
    loading: Callable[[int, int], None] | None = None  # told how far loading is: done, total
    keep: Keep | None = None  # training: where to write checkpoints
    resume: Path | None = None  # training: the checkpoint to go on from
    folder: Path | None = None  # private to the run, and gone with it
    checkout: Path | None = None  # of the program that the engine starts, where it is one

    @property
    def train(self) -> Train:
        """Return the settings of a training; a case that trains nothing raises ValueError."""
        if self.case.question.train is None:
            raise ValueError("a question without training")
        return self.case.question.train


class Engine(Protocol):
    @property
    def weights(self) -> Mapping[str, Any]:
        """Where the weights came from, known after `prepare`: `source`, and what tells them from
        others.
        """

    def prepare(self, name: str, part: Part) -> None:
        """Make ready for a pass: build, load, compile, warm up, each in a named part of the budget.
        Weights do not change.
        """

    def total(self, name: str) -> int:
        """How many `Work` items the pass will yield."""

    def work(self, name: str) -> Iterator[Phase | Work]:
        """The pass. Every `Work` ends a step; a phase begins with its mark."""

    def outputs(self, name: str) -> dict[str, Any]:
        """What the pass answered, as plain lists."""

    def details(self) -> dict[str, Any]:
        """What the engine chose by itself: kernels, batches."""
