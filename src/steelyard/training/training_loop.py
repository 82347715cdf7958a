"""The training loop of every engine: batches, steps, evaluations before, between and after them,
checkpoints, and when to stop.

An engine supplies a `Learner`, a `MicroBatchMaker` that says how rows become micro-batches, and a
`TrainingEvaluation`. The loop decides what is computed, never how: the global batch, its order and
the normalization of the loss are the same for every engine and plan. It needs no framework: tensors
are what a learner says they are, and become numbers by `float`.
"""

import math
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from steelyard.case.question import Train
from steelyard.data.training_rows import RowKey
from steelyard.engine.job import Job, Part
from steelyard.engine.work import Phase, Work
from steelyard.errors import RequestError
from steelyard.training import checkpoint_folders
from steelyard.training.checkpoint_folders import CheckpointState, OptimizerScalars

WARMED_STEPS = 32  # steps whose sizes of micro-batches are warmed up
WATCH_DELAY_STEPS = 2  # steps after which a loss is checked
COUNT_NAMES = ("tokens", "samples", "padded", "logits", "pairs", "square")

Tensor = Any  # of the learner's framework
# row keys of a step's micro-batches, and the packed micro-batches, made in the background
PackedStep = Future[tuple[list[list[RowKey]], list[Any]]]
PendingLoss = Callable[[], float]  # waits for a loss that is being copied to the host


class TrainedModel(Protocol):
    """What the training loop knows of a learner's model (a protocol): the attribute `weights`, a
    JSON-able dict that says where the weights came from, for the record. The loop reads it, and
    replaces it by the checkpoint's when a run is resumed.
    """

    weights: dict[str, Any]  # where they came from, for the record


class Learner(Protocol):
    """What the training loop trains (a protocol): a model on this rank's device, and an optimizer;
    tensors are of the learner's own framework.

    `prepare(part)` builds the model and loads weights, `warm_up(micro)` compiles kernels without an
    update. In each step all ranks call `sum_over_replicas(number)`, `backward(micros, targets)`
    (this replica's part of the mean loss), `reduce(loss)` (gradients and loss summed over
    replicas), `update(lr)` (the gradients' norm) and `fetch(loss)` (a float, or a function that
    waits for it). `evaluate(micro)` returns a summed loss or scores, `details()` a dict for the
    record. `model` has `weights`, `exchanges_separately` is a bool. `Trainer` (trainer.py) is the
    one of most torch engines.
    """

    @property
    def model(self) -> TrainedModel:
        """Return the learner's model; the loop reads its `weights`, their source, and sets it when
        a run is resumed. Valid after `prepare`.
        """

    @property
    def exchanges_separately(self) -> bool:
        """Return whether ranks exchange data only in `sum_over_replicas` and `reduce`, so that the
        time of their exchange can be measured apart from compute.
        """

    def prepare(self, part: Part) -> None:
        """Build the model, load its weights and compile it. `part(label)` books the time inside it
        under that label.
        """

    def warm_up(self, micro: Any) -> None:
        """Run all of a training step but the update, so that kernels are compiled. Weights do not
        change, and gradients are zero afterwards.
        """

    def evaluate(self, micro: Any) -> Tensor:
        """Return what an evaluation reads of a micro-batch: its summed loss in nats, or scores."""

    def sum_over_replicas(self, number: int) -> Tensor:
        """Return a count of this rank summed over all replicas, as a tensor of one element on the
        device. All ranks call it together.
        """

    def backward(self, micros: list[Any], targets: Tensor) -> Tensor:
        """Run forward and backward of a step's micro-batches: gradients of Σ loss / targets are
        added up, `targets` being those of all replicas. Return this replica's part of that mean
        loss.
        """

    def reduce(self, loss: Tensor) -> Tensor:
        """Sum the gradients over replicas, where `backward` has not, and return the step's loss
        summed likewise: the mean over the targets of all replicas. All ranks call it together.
        """

    def update(self, lr: float) -> Tensor:
        """Clip the gradients to the case's norm, update the weights with this learning rate and
        zero the gradients. Return the gradients' norm before clipping, a tensor on the device or a
        float. All ranks call it together.
        """

    def fetch(self, loss: Tensor) -> "float | PendingLoss":
        """Return a loss as a number if nothing is asynchronous, else start its copy to the host and
        return a function that waits for it.
        """

    def details(self) -> dict[str, Any]:
        """Return what the learner chose by itself (kernels, dtypes, numbers of elements) as a
        JSON-able dict for the record.
        """


@runtime_checkable
class CheckpointingLearner(Protocol):
    """What a learner has beside `Learner` if it can write and load checkpoints (a protocol that the
    loop tests for with isinstance); all ranks call each of these together. `read_scalars()` returns
    the optimizer's `OptimizerScalars`, `save(folder, state)` writes `step-N` below `folder`,
    `load(path, scalars)` fills model and optimizer from the checkpoint folder `path`.
    """

    def read_scalars(self) -> OptimizerScalars:
        """Return what the optimizer stores beside tensors: its number of updates and, in fp16, the
        loss scale with its growth counter; the same on all ranks.
        """

    def save(self, folder: Path, state: CheckpointState) -> None:
        """Write this learner's tensors and `state` as the checkpoint `step-N` (N is `state.step`)
        into `folder`, the run's folder of checkpoints; all ranks call it together.
        """

    def load(self, path: Path, scalars: OptimizerScalars) -> None:
        """Load all tensors of the checkpoint folder `path` (a `step-N`) into model and optimizer,
        and continue from them and these scalars; all ranks call it together.
        """


class MicroBatchMaker(Protocol):
    """Makes a replica's micro-batches from the keys of a task's rows or samples (a protocol); what
    a micro-batch is, is between this and the model.

    `split_keys(keys, size)` returns the keys of each of this replica's micro-batches of a global
    batch, `pack(keys)` makes host arrays with a dict `counts` (called in another thread),
    `to_device(pack)` copies them, `count_targets(pack)` returns the number that the loss is a mean
    over (target tokens, or samples of a cloze), and `seed(step)` seeds random numbers.
    `RowBatches`, `PaddleBatches` and `ClozeBatches` implement it.
    """

    def split_keys(self, keys: list[RowKey], size: int | None = None) -> list[list[RowKey]]:
        """Return the row keys of each micro-batch of this replica; a key None stands for padding.
        `size` is the number of rows of a micro-batch; None: from `tune.micro_batch`.
        """

    def pack(self, keys: list[RowKey]) -> Any:
        """Return the rows of one micro-batch as arrays on the host, an object with a dict `counts`
        (`COUNT_NAMES`). `keys` are one list of `split_keys`. The loop calls it from another thread.
        """

    def to_device(self, pack: Any) -> Any:
        """Return a packed micro-batch as tensors on this rank's device, as the learner's model
        takes it.
        """

    def count_targets(self, pack: Any) -> int:
        """Return how many targets a packed micro-batch has, over which the loss of a step is the
        mean: target tokens, or samples of a cloze.
        """

    def seed(self, step: int) -> None:
        """Seed the random numbers of a step, which depend on the step only, so that a resumed run
        draws the same ones.
        """


class TrainingEvaluation(Protocol):
    """What passes `before` and `after` do, and pass `train` between its steps (a protocol); it does
    not change the weights. `HeldOutLoss` and `ClozeAccuracy` implement it.

    `is_due(steps_taken)` says whether `train` evaluates now, `count_work_items()` how many `Work`
    items one evaluation yields, `work(name, steps_taken)` runs one and yields `Phase` and `Work`
    marks, `outputs(name)` returns a pass's results as a JSON-able dict. `name` is that of the pass,
    `steps_taken` the number of steps trained so far. `reached` is true once the target that ends
    training was reached.
    """

    reached: bool  # the target that ends training was reached

    def is_due(self, steps_taken: int) -> bool:
        """Return whether pass `train` evaluates after `steps_taken` steps."""

    def count_work_items(self) -> int:
        """Return how many `Work` items one evaluation yields."""

    def work(self, name: str, steps_taken: int) -> Iterator[Phase | Work]:
        """Run one evaluation in pass `name`, of the weights as they are, as a generator of marks:
        `Phase` where a phase begins, `Work` where a batch ends. May set `reached`; results are kept
        for `outputs`.
        """

    def outputs(self, name: str) -> dict[str, Any]:
        """Return what the evaluations of pass `name` found on this replica, as a JSON-able dict."""


def compute_learning_rate(train: Train, step: int) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up from lr / warmup_steps to
    lr, then cosine or (any other `schedule`) linear decay to `min_lr` at step `decay_steps`,
    constant after that.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    span = max(1, train.decay_steps - train.warmup_steps)
    progress = min(1.0, (step - train.warmup_steps) / span)
    remaining_share = (
        (1 + math.cos(math.pi * progress)) / 2 if train.schedule == "cosine" else 1 - progress
    )
    return train.min_lr + (train.lr - train.min_lr) * remaining_share


class LossWatch:
    """Watches the losses of training steps for one that ends the run: not finite, or above `bound`
    (None: no bound). `add(step, loss)` takes a loss, `has_bad_loss()` returns whether one was bad.
    `stop` is None, or a dict about the first bad one: `step` (from 0), `why` ("nan" or "bound") and
    `value` (None if not finite).

    Losses still being copied from the device are checked two steps late, so that the host does not
    wait, and equally late on all ranks, so that all stop at the same step.
    """

    def __init__(self, bound: float | None) -> None:
        self.bound = bound
        self.stop: dict[str, Any] | None = None
        self._pending: list[tuple[int, PendingLoss]] = []

    def add(self, step: int, loss: float | PendingLoss) -> None:
        """Take the loss of a step: a number is checked at once, a function that waits for a loss
        later, by `has_bad_loss`.
        """
        if callable(loss):
            self._pending.append((step, loss))
        else:
            self._check_loss(step, loss)

    def has_bad_loss(self, wait: bool = False) -> bool:
        """Check pending losses, oldest first, until only the last two are left, or all of them with
        `wait`, waiting for their copies. Return whether any loss so far was bad; `stop` then holds
        step, `why` ("bound" or "nan") and value (None if not finite) of the first.
        """
        while self._pending and (wait or len(self._pending) > WATCH_DELAY_STEPS):
            step, pending_loss = self._pending.pop(0)
            self._check_loss(step, pending_loss())
        return self.stop is not None

    def _check_loss(self, step: int, loss: float) -> None:
        """Set `stop` to a dict of step, why and value if this loss is not finite ("nan") or above
        the bound ("bound") and `stop` is still None.
        """
        finite = math.isfinite(loss)
        if self.stop is None and (not finite or (self.bound is not None and loss > self.bound)):
            self.stop = {
                "step": step,
                "why": "bound" if finite else "nan",
                "value": loss if finite else None,
            }


class HeldOutLoss:
    """The evaluation of tasks with training rows (a `TrainingEvaluation`): the summed loss of this
    replica's held-out rows, in passes `before` and `after` only. `outputs(name)` returns `nll`, in
    nats, and `targets`. It ends no training: `reached` is always False, and `is_due` too. `losses`
    has by pass the summed loss, still on the device, and the number of target tokens.
    """

    reached = False

    def __init__(self, job: Job, trainer: Learner, batches: MicroBatchMaker) -> None:
        self.texts, self.trainer, self.batches = job.inputs, trainer, batches
        self.losses: dict[str, tuple[Tensor, int]] = {}

    def is_due(self, steps_taken: int) -> bool:
        """Return False: the held-out loss is not evaluated during pass `train`."""
        return False

    def count_work_items(self) -> int:
        """Return how many `Work` items one evaluation of the held-out loss yields: this replica's
        number of held-out micro-batches, plus one for phase `score`.
        """
        return len(self._split_held_out()) + 1

    def _split_held_out(self) -> list[list[RowKey]]:
        """Return the row keys of this replica's held-out micro-batches, None for padding. They have
        the size of the first step's micro-batches, for which kernels are already compiled.
        """
        split_keys = self.batches.split_keys
        return split_keys(self.texts.held_out(), len(split_keys(self.texts.batch(0))[0]))

    def work(self, name: str, steps_taken: int) -> Iterator[Phase | Work]:
        """Evaluate the held-out rows: yield phases `data` and `evaluate` and one `Work` per
        micro-batch, then phase `score` and an empty `Work`. The loss, summed in fp64, stays on the
        device until `outputs`. `steps_taken` is not used.
        """
        nll: Tensor = 0.0
        count = 0
        for keys in self._split_held_out():
            yield Phase("data")
            pack = self.batches.pack(keys)
            micro = self.batches.to_device(pack)
            yield Phase("evaluate")
            nll = self.trainer.evaluate(micro).double() + nll
            count += self.batches.count_targets(pack)
            yield Work(pack.counts, rows=_list_row_keys([keys]))
        yield Phase("score")
        self.losses[name] = (nll, count)
        yield Work({})

    def outputs(self, name: str) -> dict[str, Any]:
        """Return `nll`, the summed loss of this replica in nats (None if not finite), and
        `targets`, over how many tokens; an empty dict for pass `train`. Waits for the device.
        Raises KeyError if the pass did not end.
        """
        if name == "train":
            return {}
        nll, count = self.losses[name]
        value = float(nll)
        return {"nll": value if math.isfinite(value) else None, "targets": count}


class TrainingLoop:
    """The engine interface (`Engine`, engine/job.py) for training, which engines subclass with a
    learner (`trainer`), a maker of micro-batches (`batches`) and an `evaluation`: passes `before`,
    `train` and `after`.

    `prepare` builds, warms up and resumes, `total` and `work` run a pass as marks, `continue_pass`
    yields more steps for profiling, `outputs` returns a pass's results, `details` and `weights` are
    for the record. `steps` is the number of steps at the end of training, `first_step` how many of
    them the resumed checkpoint has (else 0), `losses` the loss of every step so far, those before
    the checkpoint included. One thread packs the rows of the next step in the background.
    """

    def __init__(
        self, job: Job, trainer: Learner, batches: MicroBatchMaker, evaluation: TrainingEvaluation
    ) -> None:
        """Set up the loop; builds and loads nothing. Starts a thread pool of one thread, which
        packs the rows of the next step. Raises ValueError if the case does not train.
        """
        self.job, self.trainer, self.train = job, trainer, job.train
        self.batches, self.evaluation = batches, evaluation
        self.steps = job.steps if job.steps is not None else self.train.steps
        self.watch = LossWatch(self.train.bound)
        self.first_step = 0  # number of steps that the resumed checkpoint has taken
        self.losses: list[Tensor] = []  # the loss of every step
        self.is_prepared = False
        self.executor = ThreadPoolExecutor(1, "rows")

    def prepare(self, name: str, part: Part) -> None:
        """Build, compile and warm up the learner, and load the checkpoint `job.resume` if there is
        one. Time is booked as the learner's parts, `compile_train` or `warmup_train`, and `resume`.
        Runs before the first pass only; later calls do nothing. Raises RequestError if weights or
        checkpoint do not fit.
        """
        if self.is_prepared:
            return
        self.trainer.prepare(part)
        with part("compile_train" if self.job.case.tune.compile else "warmup_train"):
            for keys in self._pick_keys_of_each_size():
                self.trainer.warm_up(self.batches.to_device(self.batches.pack(keys)))
            self.job.device.synchronize()
        if self.job.resume is not None:
            with part("resume"):
                self._resume(self.job.resume)
        self.is_prepared = True

    def _resume(self, path: Path) -> None:
        """Continue from the checkpoint folder `path` (a `step-N`): read `state.json`, load the
        tensors into the learner, and set `first_step`, `losses` and the model's source of weights
        from it; all ranks call it together. Raises RequestError if it cannot be read, does not
        match the model, or the case was given `--weights` that are not those that the checkpoint's
        run began with.
        """
        state = checkpoint_folders.read_checkpoint_json(
            path / checkpoint_folders.STATE_FILE, CheckpointState
        )
        model = self.trainer.model
        if self.job.weights is not None and model.weights != state.weights:
            raise RequestError(
                "--resume: the checkpoint's run started from other weights; give the same, or leave"
                " --weights out"
            )
        model.weights = state.weights
        self._get_checkpointing_learner().load(path, state.numbers)
        self.first_step, self.losses = state.step, [*state.losses]

    def _save(self, step: int, folder: Path) -> None:
        """Write a checkpoint of everything after `step` steps into `folder`; all ranks call it
        together. Waits for the device. Losses become floats, also in `self.losses`, and None if not
        finite. Raises OSError if it cannot be written, TypeError if the learner writes none.
        """
        losses = [_to_finite_float(loss) for loss in self.losses]
        self.losses = [*losses]
        state = CheckpointState(
            step=step,
            losses=losses,
            numbers=self._get_checkpointing_learner().read_scalars(),
            plan=self.job.plan,
            weights=self.trainer.model.weights,
            reached=self.evaluation.reached,
        )
        self._get_checkpointing_learner().save(folder, state)

    def _get_checkpointing_learner(self) -> CheckpointingLearner:
        """Return the loop's learner (`trainer`) as one that writes checkpoints. Raises TypeError if
        it cannot, which is a defect: such runs are refused before they start.
        """
        if not isinstance(self.trainer, CheckpointingLearner):
            raise TypeError(f"{type(self.trainer).__name__} cannot write checkpoints")
        return self.trainer

    def _pick_keys_of_each_size(self) -> list[list[RowKey]]:
        """Return the row keys of one micro-batch for each size (number of rows) that the first
        micro-batch of a step has in the first 32 steps, so that kernels are compiled for all of
        them before a pass.
        """
        keys_by_size: dict[int, list[RowKey]] = {}
        for step in range(min(self.steps, WARMED_STEPS)):
            for first in self._split_step(step)[:1]:  # a replica may have no micro-batch
                keys_by_size.setdefault(len(first), first)
        return list(keys_by_size.values())

    def _split_step(self, step: int) -> list[list[RowKey]]:
        """Return the row keys of each micro-batch of this replica in a step."""
        return self.batches.split_keys(self.job.inputs.batch(step))

    def total(self, name: str) -> int:
        """Return how many `Work` items the pass `name` will yield if it does not stop early: for
        `train` the steps left after the resumed checkpoint, with the evaluations and checkpoints
        between them; for any other pass those of one evaluation.
        """
        if name != "train":
            return self.evaluation.count_work_items()
        return (
            self.steps
            - self.first_step
            + sum(
                self._count_between_steps(steps_taken)
                for steps_taken in range(self.first_step + 1, self.steps + 1)
            )
        )

    def _count_between_steps(self, steps_taken: int) -> int:
        """Return how many `Work` items come after so many steps, before the next: one for a
        checkpoint and those of an evaluation, if due.
        """
        return int(self._is_checkpoint_due(steps_taken)) + (
            self.evaluation.count_work_items() if self.evaluation.is_due(steps_taken) else 0
        )

    def work(self, name: str) -> Iterator[Phase | Work]:
        """Return the generator of marks (`Phase` and `Work`) of a pass: the steps of `train`; for
        any other name one evaluation, of the weights as they are.
        """
        if name == "train":
            return self._run_training()
        return self.evaluation.work(name, self.first_step if name == "before" else len(self.losses))

    def _run_training(self) -> Iterator[Phase | Work]:
        """Run pass `train`: yield phases and one `Work` per step, with those of evaluations and
        checkpoints between. Appends to `losses`. Ends early after a loss that is not finite or
        above the bound, which is noticed a few steps late, or when the evaluation's target is
        reached.
        """
        next_batch = self._prefetch(self.first_step)
        for step in range(self.first_step, self.steps):
            next_batch, loss, work = yield from self._run_step(step, next_batch, step + 1)
            self.watch.add(step, self.trainer.fetch(loss))
            self.losses.append(loss)
            yield work
            if self.watch.has_bad_loss():
                return
            yield from self._run_between_steps(step + 1)
            if self.evaluation.reached:
                return

    def continue_pass(self, name: str) -> Iterator[Phase | Work]:
        """Return a generator of more steps like those of the pass, for profiling. In pass `train`
        it has no end: nothing is watched, evaluated or saved, but weights change. Other passes run
        once more.
        """
        return self._repeat_steps() if name == "train" else self.work(name)

    def _repeat_steps(self) -> Iterator[Phase | Work]:
        """Yield the marks of training on the batches of this run's steps, over and over, without
        end. Weights change; losses are not kept.
        """
        next_batch = self._prefetch(self.first_step)
        for step, following in pairwise(
            cycle(range(self.first_step, max(self.steps, self.first_step + 1)))
        ):
            next_batch, _, work = yield from self._run_step(step, next_batch, following)
            yield work

    def _run_step(
        self, step: int, batch: PackedStep, following: int
    ) -> Generator[Phase, None, tuple[PackedStep, Tensor, Work]]:
        """Train step `step` on `batch`, its rows as they are being packed in the background, and
        start to pack those of step `following`. Yields the phases and returns (the batch of
        `following`, the loss, the step's `Work`). The loss is the mean over the targets of all
        replicas, a tensor on the device; the `Work` has this replica's counts and row keys, and the
        values loss, grad_norm (a tensor, or a float of some engines) and lr (a float). All ranks
        run it together.
        """
        yield Phase("data")
        groups, packs = batch.result()
        next_batch = self._prefetch(following)
        micros = [self.batches.to_device(pack) for pack in packs]
        loss = yield from self._compute_gradients(
            step, micros, sum(map(self.batches.count_targets, packs))
        )
        lr = compute_learning_rate(self.train, step)
        norm = self.trainer.update(lr)
        return (
            next_batch,
            loss,
            Work(
                _sum_counts(packs),
                {"loss": loss, "grad_norm": norm, "lr": lr},
                _list_row_keys(groups),
            ),
        )

    def _compute_gradients(
        self, step: int, micros: list[Any], targets: int
    ) -> Generator[Phase, None, Tensor]:
        """Run forward and backward of a step and sum gradients over replicas; return the step's
        loss, the mean over the targets of all replicas. `targets` is the number of this replica's
        targets; they are summed over replicas here.

        Yields the phases: `meet` with several ranks, in which they wait for each other's data, so
        that phase `data` is each rank's own and waiting is no compute time; then `compute`; and
        `exchange` around `reduce` if the learner exchanges separately. All ranks run it together.
        """
        exchanges_separately = self.trainer.exchanges_separately
        if self.job.world > 1:
            yield Phase("meet")
        total = self.trainer.sum_over_replicas(targets)
        yield Phase("compute")
        self.batches.seed(step)
        loss = self.trainer.backward(micros, total)
        if exchanges_separately:
            yield Phase("exchange")
        loss = self.trainer.reduce(loss)
        if exchanges_separately:
            yield Phase("compute")
        return loss

    def _run_between_steps(self, steps_taken: int) -> Iterator[Phase | Work]:
        """Evaluate, then write a checkpoint, each if it is due after so many steps; yields their
        marks, an empty `Work` for the checkpoint.
        """
        if self.evaluation.is_due(steps_taken):
            yield from self.evaluation.work("train", steps_taken)
        if self._is_checkpoint_due(steps_taken) and self.job.checkpoint_schedule is not None:
            yield Phase("checkpoint")
            self._save(steps_taken, self.job.checkpoint_schedule.folder)
            yield Work({})

    def _is_checkpoint_due(self, steps_taken: int) -> bool:
        """Return whether a checkpoint is due after so many steps: every `every_steps`, if the job
        has a schedule.
        """
        return (
            self.job.checkpoint_schedule is not None
            and steps_taken % self.job.checkpoint_schedule.every_steps == 0
        )

    def _prefetch(self, step: int) -> PackedStep:
        """Start to pack this replica's batch of a step in the background thread, and return its
        future; for a step beyond the last, the batch of the last step.
        """
        return self.executor.submit(self._pack_step, step if step < self.steps else self.steps - 1)

    def _pack_step(self, step: int) -> tuple[list[list[RowKey]], list[Any]]:
        """Return (row keys of each of this replica's micro-batches of a step, the packed
        micro-batches). Runs in the background thread.
        """
        groups = self._split_step(step)
        return groups, [self.batches.pack(group) for group in groups]

    def outputs(self, name: str) -> dict[str, Any]:
        """Return the outputs of the evaluation in the pass. For pass `train` also `stopped`: None,
        or a dict that says why training ended early: `why` "nan" or "bound" with `step` (from 0)
        and `value` of the first bad loss (also one of the last steps, which ended nothing), or
        "target" with `step`, the number of steps taken. Waits for all pending losses then.
        """
        outputs_of_evaluation = self.evaluation.outputs(name)
        if name != "train":
            return outputs_of_evaluation
        self.watch.has_bad_loss(wait=True)
        target = {"step": len(self.losses), "why": "target"} if self.evaluation.reached else None
        return outputs_of_evaluation | {"stopped": self.watch.stop or target}

    @property
    def weights(self) -> dict[str, Any]:
        """Return the source of the learner's initial weights as a JSON-able dict, for the record;
        that of the checkpoint's run if this one resumed. Valid after `prepare`.
        """
        return self.trainer.model.weights

    def details(self) -> dict[str, Any]:
        """Return for the record the learner's details, `micro_batches`, this replica's number in
        the first step, and, with several ranks, `exchange`: "separate" if they exchange data apart
        from compute, else "inside".
        """
        exchange = (
            {"exchange": "separate" if self.trainer.exchanges_separately else "inside"}
            if self.job.world > 1
            else {}
        )
        return {**self.trainer.details(), "micro_batches": len(self._split_step(0)), **exchange}


def _to_finite_float(loss: Tensor) -> float | None:
    """Return a loss as a float; None if it is None or not finite, for which JSON has no number.
    Waits for the device.
    """
    value = math.nan if loss is None else float(loss)
    return value if math.isfinite(value) else None


def _list_row_keys(groups: list[list[RowKey]]) -> list[RowKey]:
    """Return the row keys of all micro-batches, without the padding keys None."""
    return [key for group in groups for key in group if key is not None]


def _sum_counts(packs: list[Any]) -> dict[str, int]:
    """Return the counts of all packs of a step, added up by name (`COUNT_NAMES`: tokens, samples,
    padded, logits, pairs, square); zeros without packs.
    """
    return {key: sum(pack.counts[key] for pack in packs) for key in COUNT_NAMES}
