"""The job that an engine is given, and the interface that an engine implements.

A worker (run/worker.py) builds one `Job`, constructs the engine with it, and runs its passes inside
the measured loop.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from steelyard.case.case import Case
from steelyard.case.question import Train
from steelyard.case.request import EngineSettings
from steelyard.engine.work import Phase, Work
from steelyard.plan.degrees import Plan, RankPosition

Part = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class CheckpointSchedule:
    """When and where training writes checkpoints: after every `every_steps` steps, as folders
    `step-N` in `folder`, the run's folder of checkpoints. `Job.checkpoint_schedule` is None if none
    are written.
    """

    folder: Path
    every_steps: int


@dataclass(frozen=True)
class Job:
    """All that an engine is given on one rank; made by the worker (run/worker.py). `case` is
    resolved, `work` the kind of work (a key of `WORKS`), `inputs` what the task prepared for it.
    `weights` is the path of the checkpoint to load (None: random). `device` is the accelerator's
    device object of the framework, `group` what its `join_ranks` returned. `rank` of `world` stands
    at `place` (indices tp, pp, dp) of `plan`; replica `place.dp` computes its part of the data.

    `steps`: most batches or steps of a pass (None: all). `report_loading(done, total)`: to be
    called while weights load (None: not). Training: `checkpoint_schedule` (None: write none),
    `resume`, the checkpoint folder to go on from (None: from the start). `folder`: private to the
    run and deleted with it. `checkout`: folder of the program that the engine starts. `settings`:
    those of `--set engine.KEY=VALUE`. `engine` and `accelerator` are the names of their rows.
    `train` returns the training settings.
    """

    case: Case
    work: str  # which kind: a key of engine_rows.WORKS
    inputs: Any  # what the task prepared for that kind of work
    weights: Path | None  # None: random
    device: Any  # the accelerator's device class of the framework
    rank: int
    world: int
    plan: Plan
    # this rank's indices in the plan: replica `place.dp` of `plan.dp` computes its part of the data
    place: RankPosition
    group: Any  # of the framework's `join_ranks`: the ranks that hold one model
    steps: int | None  # most batches or steps of a pass; None: all
    report_loading: Callable[[int, int], None] | None = None  # called with (done, total)
    checkpoint_schedule: CheckpointSchedule | None = None  # training: where to write checkpoints
    resume: Path | None = None  # training: the checkpoint to go on from
    folder: Path | None = None  # private to the run, and deleted with it
    checkout: Path | None = None  # folder of the program that the engine starts, if any
    settings: EngineSettings = field(default_factory=EngineSettings)  # of --set engine.KEY=VALUE
    engine: str = ""  # name of the engine's row
    accelerator: str = ""  # name of the accelerator's row

    @property
    def train(self) -> Train:
        """Return the training settings of this job's case; raise ValueError if the case does not
        train.
        """
        if self.case.question.train is None:
            raise ValueError("this case does not train")
        return self.case.question.train


class Engine(Protocol):
    """What runs one kind of work in one framework, on one rank (a protocol); constructed with a
    `Job`, and never reads a clock. The argument `name` of its methods is that of a pass: `val`,
    `infer` or `bare` of scoring, `before`, `train` or `after` of training.

    Before each pass `prepare(name, part)` loads, compiles and warms up; `total(name)` is the number
    of `Work` items to come; `work(name)` runs the pass as a generator of `Phase` and `Work` marks;
    `outputs(name)` returns what it computed as a JSON-able dict. `weights` (their source) and
    `details()` (the engine's own choices) are dicts for the record.
    """

    @property
    def weights(self) -> Mapping[str, Any]:
        """Return where the weights came from, for the record: `source` (random, huggingface, ...)
        and what identifies them, such as a seed or a hash. Valid after `prepare`.
        """

    def prepare(self, name: str, part: Part) -> None:
        """Make this engine ready for a pass; called before each. Build the model, load weights,
        compile and warm up, as far as earlier passes have not. Weights must not change.

        `part(label)` is a context manager that books the time inside it under that label in the
        run's time budget; each of these steps runs inside one.
        """

    def total(self, name: str) -> int:
        """Return how many `Work` items the pass `name` will yield on this rank if it does not stop
        early, for progress.
        """

    def work(self, name: str) -> Iterator[Phase | Work]:
        """Run the pass as a generator of marks: a `Phase` where a phase begins, a `Work` where a
        step ends. The caller takes a time at each mark.
        """

    def outputs(self, name: str) -> dict[str, Any]:
        """Return what the finished pass `name` computed, as JSON-able lists and dicts, for the task
        to check: answers of scoring, losses or accuracies of training. Asked only of the first rank
        of each replica (tp and pp 0), and not of bare passes.
        """

    def details(self) -> dict[str, Any]:
        """Return what the engine chose or found by itself, as a JSON-able dict for the record:
        kernels, number of batches, types of tensors. Called after all passes.
        """
