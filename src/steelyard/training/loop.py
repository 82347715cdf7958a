"""The training loop of every engine: batches, steps, the evaluation around and between them, and
when to stop.

An engine brings a `Learner`, and says how rows become micro-batches and what an evaluation is. The
loop decides what is computed, never how: the global batch, its order and the normalisation of the
loss are the same for every engine and plan. It needs no framework: tensors are what a learner says
they are, and become numbers by `float`.
"""

import math
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from steelyard.case.question import Train
from steelyard.data.rows import Key
from steelyard.engine.job import Job, Part
from steelyard.engine.work import Phase, Work
from steelyard.errors import RequestError
from steelyard.training import checkpoints
from steelyard.training.checkpoints import Numbers, State

SOON = 32  # steps
LATE = 2  # steps
COUNTS = ("tokens", "samples", "padded", "logits", "pairs", "square")

Tensor = Any  # of the learner's framework
# the micro-batches of a step, and the rows they are made of
Batch = Future[tuple[list[list[Key]], list[Any]]]
Late = Callable[[], float]  # waits for a number that is on its way from the device


class Trained(Protocol):
    """A model, as far as the loop knows one."""

    weights: dict[str, Any]  # where they came from, for the record


class Learner(Protocol):
    """What is trained: a model on its devices, and an optimizer. `training/trainer.py` is torch's."""

    @property
    def model(self) -> Trained: ...

    @property
    def separate(self) -> bool:
        """Whether ranks meet in `total` and `reduce` alone, so that a step has a time of their
        exchange.
        """

    def prepare(self, part: Part) -> None:
        """Build, load, compile."""

    def warm(self, micro: Any) -> None:
        """Run everything but the update once. Weights and gradients stay."""

    def evaluate(self, micro: Any) -> Tensor:
        """What an evaluation reads of a micro-batch: its summed loss, or scores."""

    def total(self, number: int) -> Tensor:
        """A count of this rank, summed over all replicas."""

    def backward(self, micros: list[Any], targets: Tensor) -> Tensor:
        """Forward and backward of a step: gradients of Σ loss / targets. Returns this replica's
        part of that mean loss.
        """

    def reduce(self, loss: Tensor) -> Tensor:
        """Sum gradients over replicas, and the loss of a step."""

    def update(self, lr: float) -> Tensor:
        """Clip, step, zero the gradients. Returns their norm before clipping."""

    def fetch(self, loss: Tensor) -> "float | Late":
        """A loss as a number: at once where nothing is asynchronous, else what waits for its copy,
        which is under way.
        """

    def details(self) -> dict[str, Any]: ...


@runtime_checkable
class Keeps(Protocol):
    """A learner that keeps checkpoints."""

    def numbers(self) -> Numbers:
        """What is kept beside tensors, the same on all ranks."""

    def save(self, folder: Path, state: State) -> None:
        """Write a checkpoint, all ranks together."""

    def load(self, path: Path, numbers: Numbers) -> None:
        """Go on from a checkpoint."""


class Batches(Protocol):
    """How the rows of a task become a replica's micro-batches. What a micro-batch is, is between
    this and the model.
    """

    def groups(self, keys: list[Key], size: int | None = None) -> list[list[Key]]:
        """The keys of each micro-batch of this replica."""

    def pack(self, keys: list[Key]) -> Any:
        """A micro-batch as arrays, with its `counts`. Called from another thread."""

    def to_device(self, pack: Any) -> Any: ...

    def targets(self, pack: Any) -> int:
        """What the loss of a step is the mean over."""

    def seed(self, step: int) -> None:
        """Random numbers of a step, the same for a run that goes on from another."""


class Evaluation(Protocol):
    """What passes `before` and `after` do, and `train` between its steps. The weights do not
    change.
    """

    reached: bool  # a target that ends training

    def due(self, taken: int) -> bool:
        """Whether to evaluate after so many steps."""

    def total(self) -> int:
        """How many `Work` items one evaluation yields."""

    def work(self, name: str, taken: int) -> Iterator[Phase | Work]: ...

    def outputs(self, name: str) -> dict[str, Any]: ...


def rate(train: Train, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    span = max(1, train.decay_steps - train.warmup_steps)
    done = min(1.0, (step - train.warmup_steps) / span)
    left = (1 + math.cos(math.pi * done)) / 2 if train.schedule == "cosine" else 1 - done
    return train.min_lr + (train.lr - train.min_lr) * left


class LossWatch:
    """Losses a few steps late, so that nothing waits for the device; the first that is not finite
    or too high is kept. Late by a fixed number of steps: every rank sees the same and stops at the
    same."""

    def __init__(self, bound: float | None) -> None:
        self.bound = bound
        self.found: dict[str, Any] | None = None
        self._open: list[tuple[int, Late]] = []

    def add(self, step: int, loss: float | Late) -> None:
        if callable(loss):
            self._open.append((step, loss))
        else:
            self._look(step, loss)

    def seen(self, wait: bool = False) -> bool:
        """Whether a loss was found that ends the run."""
        while self._open and (wait or len(self._open) > LATE):
            step, late = self._open.pop(0)
            self._look(step, late())
        return self.found is not None

    def _look(self, step: int, loss: float) -> None:
        finite = math.isfinite(loss)
        if self.found is None and (not finite or (self.bound is not None and loss > self.bound)):
            self.found = {
                "step": step,
                "why": "bound" if finite else "nan",
                "value": loss if finite else None,
            }


class HeldOutLoss:
    """The loss of held-out rows, before and after training alone."""

    reached = False

    def __init__(self, job: Job, trainer: Learner, batches: Batches) -> None:
        self.texts, self.trainer, self.batches = job.inputs, trainer, batches
        self.losses: dict[str, tuple[Tensor, int]] = {}

    def due(self, taken: int) -> bool:
        return False

    def total(self) -> int:
        return len(self._held_out()) + 1

    def _held_out(self) -> list[list[Key]]:
        """Held-out rows in micro-batches of the size of the first step's, which is known to a
        compiler.
        """
        groups = self.batches.groups
        return groups(self.texts.held_out(), len(groups(self.texts.batch(0))[0]))

    def work(self, name: str, taken: int) -> Iterator[Phase | Work]:
        nll: Tensor = 0.0
        count = 0
        for keys in self._held_out():
            yield Phase("data")
            pack = self.batches.pack(keys)
            micro = self.batches.to_device(pack)
            yield Phase("evaluate")
            nll = self.trainer.evaluate(micro).double() + nll
            count += self.batches.targets(pack)
            yield Work(pack.counts, rows=_known([keys]))
        yield Phase("score")
        self.losses[name] = (nll, count)
        yield Work({})

    def outputs(self, name: str) -> dict[str, Any]:
        if name == "train":
            return {}
        nll, count = self.losses[name]
        value = float(nll)
        return {"nll": value if math.isfinite(value) else None, "targets": count}


class Loop:
    """An engine that trains: passes `before`, `train` and `after`."""

    def __init__(
        self, job: Job, trainer: Learner, batches: Batches, evaluation: Evaluation
    ) -> None:
        self.job, self.trainer, self.train = job, trainer, job.train
        self.batches, self.evaluation = batches, evaluation
        self.steps = job.steps if job.steps is not None else self.train.steps
        self.watch = LossWatch(self.train.bound)
        self.begin = 0  # steps that an earlier run has taken
        self.curve: list[Tensor] = []  # the loss of every step
        self.ready = False
        self.executor = ThreadPoolExecutor(1, "rows")

    def prepare(self, name: str, part: Part) -> None:
        if self.ready:
            return
        self.trainer.prepare(part)
        with part("compile_train" if self.job.case.tune.compile else "warmup_train"):
            for keys in self._sizes():
                self.trainer.warm(self.batches.to_device(self.batches.pack(keys)))
            self.job.device.synchronize()
        if self.job.resume is not None:
            with part("resume"):
                self._resume(self.job.resume)
        self.ready = True

    def _resume(self, path: Path) -> None:
        state = checkpoints.read(path / checkpoints.STATE, State)
        model = self.trainer.model
        if self.job.weights is not None and model.weights != state.weights:
            raise RequestError(
                "--resume: the checkpoint began with other weights; give the same, or leave"
                " --weights out"
            )
        model.weights = state.weights
        self._keeper().load(path, state.numbers)
        self.begin, self.curve = state.step, [*state.losses]

    def _save(self, step: int, folder: Path) -> None:
        """Everything after so many steps, as it is once the device has finished them."""
        losses = [_float(loss) for loss in self.curve]
        self.curve = [*losses]
        state = State(
            step=step,
            losses=losses,
            numbers=self._keeper().numbers(),
            plan=self.job.plan,
            weights=self.trainer.model.weights,
            reached=self.evaluation.reached,
        )
        self._keeper().save(folder, state)

    def _keeper(self) -> Keeps:
        """Runs that ask for checkpoints of an engine that has none are refused before they start."""
        if not isinstance(self.trainer, Keeps):
            raise TypeError(f"{type(self.trainer).__name__} keeps no checkpoints")
        return self.trainer

    def _sizes(self) -> list[list[Key]]:
        """A micro-batch of every size that comes soon: a compiler meets them here, not in a pass."""
        found: dict[int, list[Key]] = {}
        for step in range(min(self.steps, SOON)):
            for first in self._groups(step)[:1]:  # a replica may have nothing to do in a step
                found.setdefault(len(first), first)
        return list(found.values())

    def _groups(self, step: int) -> list[list[Key]]:
        return self.batches.groups(self.job.inputs.batch(step))

    def total(self, name: str) -> int:
        if name != "train":
            return self.evaluation.total()
        return (
            self.steps
            - self.begin
            + sum(self._aside(taken) for taken in range(self.begin + 1, self.steps + 1))
        )

    def _aside(self, taken: int) -> int:
        """How many `Work` items `_between` yields."""
        return int(self._keeps(taken)) + (
            self.evaluation.total() if self.evaluation.due(taken) else 0
        )

    def work(self, name: str) -> Iterator[Phase | Work]:
        if name == "train":
            return self._training()
        return self.evaluation.work(name, self.begin if name == "before" else len(self.curve))

    def _training(self) -> Iterator[Phase | Work]:
        coming = self._prefetch(self.begin)
        for step in range(self.begin, self.steps):
            coming, loss, work = yield from self._step(step, coming, step + 1)
            self.watch.add(step, self.trainer.fetch(loss))
            self.curve.append(loss)
            yield work
            if self.watch.seen():
                return
            yield from self._between(step + 1)
            if self.evaluation.reached:
                return

    def again(self, name: str) -> Iterator[Phase | Work]:
        """More steps, without end: nothing is watched, evaluated or kept. Passes that evaluate
        begin anew by themselves.
        """
        return self._more() if name == "train" else self.work(name)

    def _more(self) -> Iterator[Phase | Work]:
        coming = self._prefetch(self.begin)
        for step, following in pairwise(cycle(range(self.begin, max(self.steps, self.begin + 1)))):
            coming, _, work = yield from self._step(step, coming, following)
            yield work

    def _step(
        self, step: int, batch: Batch, following: int
    ) -> Generator[Phase, None, tuple[Batch, Tensor, Work]]:
        """Train one step on a batch that has been fetched. Return the batch of the following step,
        which is being fetched meanwhile, the loss of this step, and its `Work`."""
        yield Phase("data")
        groups, packs = batch.result()
        coming = self._prefetch(following)
        micros = [self.batches.to_device(one) for one in packs]
        loss = yield from self._learn(step, micros, sum(map(self.batches.targets, packs)))
        lr = rate(self.train, step)
        norm = self.trainer.update(lr)
        return (
            coming,
            loss,
            Work(_summed(packs), {"loss": loss, "grad_norm": norm, "lr": lr}, _known(groups)),
        )

    def _learn(self, step: int, micros: list[Any], targets: int) -> Generator[Phase, None, Tensor]:
        """Forward and backward of a step, with marks where ranks wait for one another. Phase `data`
        ends before they first do, so it is each rank's own under every plan; waiting for another's
        data is `meet`, which is no compute time."""
        separate = self.trainer.separate
        if self.job.world > 1:
            yield Phase("meet")
        total = self.trainer.total(targets)
        yield Phase("compute")
        self.batches.seed(step)
        loss = self.trainer.backward(micros, total)
        if separate:
            yield Phase("exchange")
        loss = self.trainer.reduce(loss)
        if separate:
            yield Phase("compute")
        return loss

    def _between(self, taken: int) -> Iterator[Phase | Work]:
        """What is done after so many steps that trains nothing."""
        if self.evaluation.due(taken):
            yield from self.evaluation.work("train", taken)
        if self._keeps(taken) and self.job.keep is not None:
            yield Phase("checkpoint")
            self._save(taken, self.job.keep.folder)
            yield Work({})

    def _keeps(self, taken: int) -> bool:
        return self.job.keep is not None and taken % self.job.keep.every == 0

    def _prefetch(self, step: int) -> Batch:
        return self.executor.submit(self._batch, step if step < self.steps else self.steps - 1)

    def _batch(self, step: int) -> tuple[list[list[Key]], list[Any]]:
        """This replica's micro-batches of a step, and the rows they are made of."""
        groups = self._groups(step)
        return groups, [self.batches.pack(group) for group in groups]

    def outputs(self, name: str) -> dict[str, Any]:
        found = self.evaluation.outputs(name)
        if name != "train":
            return found
        self.watch.seen(wait=True)
        target = {"step": len(self.curve), "why": "target"} if self.evaluation.reached else None
        return found | {"stopped": self.watch.found or target}

    @property
    def weights(self) -> dict[str, Any]:
        return self.trainer.model.weights

    def details(self) -> dict[str, Any]:
        met = (
            {"exchange": "separate" if self.trainer.separate else "inside"}
            if self.job.world > 1
            else {}
        )
        return {**self.trainer.details(), "micro_batches": len(self._groups(0)), **met}


def _float(loss: Tensor) -> float | None:
    """JSON has no number for what is not finite."""
    value = math.nan if loss is None else float(loss)
    return value if math.isfinite(value) else None


def _known(groups: list[list[Key]]) -> list[Key]:
    """Their rows, without what fills up the last."""
    return [key for group in groups for key in group if key is not None]


def _summed(packs: list[Any]) -> dict[str, int]:
    """The counts of a step; a replica may have nothing to do in one."""
    return {key: sum(pack.counts[key] for pack in packs) for key in COUNTS}
