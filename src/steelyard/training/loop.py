"""The training loop of every engine: rows to micro-batches, steps, the loss before and after, and when to stop.

An engine brings a `Trainer`: a model that gives the summed loss of a micro-batch, and an update. The loop decides what is
computed, never how: the global batch, its order and the normalisation of the loss are the same for every engine and plan.
"""

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from steelyard.case.question import Train
from steelyard.data.rows import IGNORED, Key, Row
from steelyard.engines.job import Job, Part
from steelyard.engines.torch.model import send
from steelyard.engines.work import Phase, Work
from steelyard.errors import RequestError
from steelyard.models.attention import Layout, steady_layout
from steelyard.training import checkpoint_files, checkpoints
from steelyard.training.checkpoints import Numbers, State

SOON = 32  # steps
LATE = 2  # steps
COUNTS = ("tokens", "samples", "padded", "logits", "pairs", "square")


@dataclass(frozen=True)
class Packed:
    """Rows of a micro-batch as arrays, laid end to end."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    positions: np.ndarray[Any, np.dtype[np.int64]]
    lens: list[int]
    pick: np.ndarray[Any, np.dtype[np.int64]]  # tokens from which something is learned
    targets: np.ndarray[Any, np.dtype[np.int64]]
    counts: dict[str, int]


@dataclass(frozen=True)
class Micro:
    """A micro-batch on the device."""

    tokens: Tensor
    positions: Tensor
    rows: Layout
    pick: Tensor
    targets: Tensor


class Trainer(Protocol):
    """What a micro-batch is, is between a trainer and its loop."""

    weights: dict[str, Any]  # where they came from, for the record

    def prepare(self, part: Part) -> None:
        """Build, load, compile."""

    def warm(self, micro: Any) -> None:
        """Run everything but the update once, so that nothing is compiled inside a pass. Weights and gradients stay."""

    def loss(self, micro: Any) -> Tensor:
        """The summed cross-entropy of a micro-batch, in nats."""

    def learn(self, micros: list[Any], targets: Tensor) -> Tensor:
        """Forward and backward of a step: gradients of Σ loss / targets. Returns that mean loss over all replicas."""

    def update(self, lr: float) -> Tensor:
        """Clip, step, forget the gradients. Returns their norm before clipping."""

    def state(self) -> dict[str, Tensor]:
        """What this rank keeps from step to step, by name: to be saved, or to be filled before `restore`."""

    def numbers(self) -> Numbers:
        """The same of what is no tensor, and the same on all ranks."""

    def restore(self, numbers: Numbers) -> None:
        """Go on from what `state` was filled with, and these numbers."""

    def total(self, number: int) -> Tensor:
        """A count of this rank, summed over all replicas, on the device."""

    def details(self) -> dict[str, Any]: ...


def packed(rows: list[Row]) -> Packed:
    targets = np.concatenate([row.targets for row in rows])
    pick = np.flatnonzero(targets != IGNORED)
    lens = [n for row in rows for n in row.lens]
    real = [n for row in rows for n in _real(row)]
    return Packed(
        tokens=np.concatenate([row.tokens for row in rows]),
        positions=np.concatenate([np.arange(n, dtype=np.int64) for n in lens]),
        lens=lens,
        pick=pick,
        targets=targets[pick],
        counts={
            "tokens": sum(real),
            "samples": sum(row.samples for row in rows),
            "padded": sum(lens) - sum(real),
            "logits": len(pick),
            "pairs": sum(n * (n + 1) // 2 for n in real),
            "square": sum(n * n for n in real),
        },
    )


def _real(row: Row) -> tuple[int, ...]:
    """The segments of a row that are no padding."""
    return row.lens if row.real == len(row.tokens) else row.lens[:-1]


def empty_row(length: int) -> Row:
    """Padding alone: what fills a micro-batch that has too few rows."""
    return Row(np.zeros(length, dtype=np.int64), np.full(length, IGNORED, dtype=np.int64), (length,), 0, 0)


def rate(train: Train, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    span = max(1, train.decay_steps - train.warmup_steps)
    done = min(1.0, (step - train.warmup_steps) / span)
    left = (1 + math.cos(math.pi * done)) / 2 if train.schedule == "cosine" else 1 - done
    return train.min_lr + (train.lr - train.min_lr) * left


class Watch:
    """Losses a few steps late, so that nothing waits for the device; the first that is not finite or too high is kept. Late by
    a fixed number of steps: every rank sees the same and stops at the same."""

    def __init__(self, bound: float | None) -> None:
        self.bound = bound
        self.found: dict[str, Any] | None = None
        self._open: list[tuple[int, Tensor, Any]] = []

    def add(self, step: int, loss: Tensor) -> None:
        if loss.device.type == "cpu":
            self._look(step, float(loss))
            return
        host = torch.empty((), dtype=loss.dtype, pin_memory=True)
        host.copy_(loss, non_blocking=True)
        event = torch.Event(loss.device)
        event.record()
        self._open.append((step, host, event))

    def seen(self, wait: bool = False) -> bool:
        """Whether a loss was found that ends the run."""
        while self._open and (wait or len(self._open) > LATE):
            step, host, event = self._open.pop(0)
            event.synchronize()
            self._look(step, float(host))
        return self.found is not None

    def _look(self, step: int, loss: float) -> None:
        finite = math.isfinite(loss)
        if self.found is None and (not finite or (self.bound is not None and loss > self.bound)):
            self.found = {"step": step, "why": "bound" if finite else "nan", "value": loss if finite else None}


class Loop:
    """An engine that trains: passes `before`, `train` and `after`."""

    def __init__(self, job: Job, trainer: Trainer) -> None:
        question = job.case.question
        if question.train is None:
            raise ValueError("a question without training")
        self.job, self.trainer, self.train = job, trainer, question.train
        self.steps = job.steps if job.steps is not None else self.train.steps
        self.micro = job.case.tune.micro_batch
        self.device: torch.device = job.device.torch_device
        self.watch = Watch(self.train.bound)
        self.losses: dict[str, tuple[Tensor, int]] = {}
        self.begin = 0  # steps that an earlier run has taken
        self.curve: list[Tensor | float | None] = []  # the loss of every step
        self.reached = False  # a target that ends training
        self.ready = False
        self.executor = ThreadPoolExecutor(1, "rows")

    def prepare(self, name: str, part: Part) -> None:
        if self.ready:
            return
        self.trainer.prepare(part)
        with part("compile_train" if self.job.case.tune.compile else "warmup_train"):
            for keys in self._sizes():
                self.trainer.warm(self._to_device(self._pack(keys)))
            self.job.device.synchronize()
        if self.job.resume is not None:
            with part("resume"):
                self._resume(self.job.resume)
        self.ready = True

    def _resume(self, path: Path) -> None:
        state = checkpoints.read(path / checkpoints.STATE, State)
        if self.job.weights is not None and self.trainer.weights != state.weights:
            raise RequestError("--resume: the checkpoint began with other weights; give the same, or leave --weights out")
        self.trainer.weights = state.weights
        checkpoint_files.load(path, self.trainer.state())
        self.trainer.restore(state.numbers)
        self.begin, self.curve = state.step, [*state.losses]

    def _save(self, step: int, folder: Path) -> None:
        """Everything after so many steps, as it is once the device has finished them."""
        losses = [_float(loss) for loss in self.curve]
        self.curve = [*losses]
        tensors = self.trainer.state()  # makes what `numbers` reads
        state = State(
            step=step,
            losses=losses,
            numbers=self.trainer.numbers(),
            plan=self.job.plan,
            weights=self.trainer.weights,
            reached=self.reached,
        )
        checkpoint_files.save(folder, state, tensors, self.job.rank)

    def _sizes(self) -> list[list[Key]]:
        """A micro-batch of every size that comes soon: a compiler meets them here, not in a pass."""
        found: dict[int, list[Key]] = {}
        for step in range(min(self.steps, SOON)):
            for first in self._groups(self.job.texts.batch(step))[:1]:  # a replica may have nothing to do in a step
                found.setdefault(len(first), first)
        return list(found.values())

    def _held_out(self) -> list[list[Key]]:
        """Held-out rows in micro-batches of the size of the first step's, which is known to a compiler."""
        return self._groups(self.job.texts.held_out(), len(self._groups(self.job.texts.batch(0))[0]))

    def total(self, name: str) -> int:
        if name != "train":
            return len(self._held_out()) + 1
        return self.steps - self.begin + sum(self._aside(taken) for taken in range(self.begin + 1, self.steps + 1))

    def _aside(self, taken: int) -> int:
        """How many `Work` items `_between` yields."""
        return int(self._keeps(taken))

    def work(self, name: str) -> Iterator[Phase | Work]:
        return self._training() if name == "train" else self._evaluation(name)

    def _training(self) -> Iterator[Phase | Work]:
        coming = self._prefetch(self.begin)
        for step in range(self.begin, self.steps):
            yield Phase("data")
            packs = coming.result()
            coming = self._prefetch(step + 1)
            micros = [self._to_device(one) for one in packs]
            targets = self.trainer.total(sum(map(self._targets, packs)))
            yield Phase("compute")
            self._seed(step)
            loss = self.trainer.learn(micros, targets)
            lr = rate(self.train, step)
            norm = self.trainer.update(lr)
            self.watch.add(step, loss)
            self.curve.append(loss)
            yield Work(_summed(packs), {"loss": loss, "grad_norm": norm, "lr": lr})
            if self.watch.seen():
                return
            yield from self._between(step + 1)
            if self.reached:
                return

    def _between(self, taken: int) -> Iterator[Phase | Work]:
        """What is done after so many steps that trains nothing."""
        if self._keeps(taken) and self.job.keep is not None:
            yield Phase("checkpoint")
            self._save(taken, self.job.keep.folder)
            yield Work({})

    def _keeps(self, taken: int) -> bool:
        return self.job.keep is not None and taken % self.job.keep.every == 0

    def _targets(self, pack: Any) -> int:
        """What the loss of a step is the mean over."""
        return len(pack.pick)

    def _seed(self, step: int) -> None:
        """Random numbers of a step, the same for a run that goes on from another. Nothing here is dropped at random."""

    def _evaluation(self, name: str) -> Iterator[Phase | Work]:
        """The loss of held-out rows; the trainer's weights do not change."""
        nll = torch.zeros((), dtype=torch.float64, device=self.device)
        count = 0
        with torch.no_grad():
            for keys in self._held_out():
                yield Phase("data")
                pack = self._pack(keys)
                micro = self._to_device(pack)
                yield Phase("evaluate")
                nll += self.trainer.loss(micro).double()
                count += len(pack.pick)
                yield Work(pack.counts)
        yield Phase("score")
        self.losses[name] = (nll, count)
        yield Work({})

    def _prefetch(self, step: int) -> "Future[list[Any]]":
        return self.executor.submit(self._batch, step if step < self.steps else self.steps - 1)

    def _batch(self, step: int) -> list[Any]:
        """This replica's micro-batches of a step."""
        return [self._pack(group) for group in self._groups(self.job.texts.batch(step))]

    def _groups(self, keys: list[Key], size: int | None = None) -> list[list[Key]]:
        """Keys dealt to replicas in turn: the fewest micro-batches of at most the asked size, all of one size, and as many on
        each replica; or micro-batches of a given size. What is missing at the end is None."""
        part, parts = self.job.place.dp, self.job.plan.dp
        count = -(-len(keys) // (parts * (size or self.micro)))
        size = size or -(-len(keys) // (parts * count))
        full = [*keys, *[None] * (size * count * parts - len(keys))]
        own = full[part::parts]
        return [own[i : i + size] for i in range(0, size * count, size)]

    def _pack(self, keys: list[Key]) -> Any:
        return packed([empty_row(self.train.length) if key is None else self.job.texts.row(key) for key in keys])

    def _to_device(self, pack: Any) -> Any:
        to = self.device
        rows = steady_layout(pack.lens, self.train.length, to)
        return Micro(send(pack.tokens, to), send(pack.positions, to), rows, send(pack.pick, to), send(pack.targets, to))

    def outputs(self, name: str) -> dict[str, Any]:
        if name == "train":
            self.watch.seen(wait=True)
            return {"stopped": self.watch.found}
        nll, count = self.losses[name]
        value = float(nll)
        return {"nll": value if math.isfinite(value) else None, "targets": count}

    def details(self) -> dict[str, Any]:
        micros = len(self._groups(self.job.texts.batch(0)))
        return {**self.trainer.details(), "micro_batches": micros}


def _float(loss: Tensor | float | None) -> float | None:
    """JSON has no number for what is not finite."""
    value = math.nan if loss is None else float(loss)
    return value if math.isfinite(value) else None


def _summed(packs: list[Any]) -> dict[str, int]:
    """The counts of a step; a replica may have nothing to do in one."""
    return {key: sum(pack.counts[key] for pack in packs) for key in COUNTS}
