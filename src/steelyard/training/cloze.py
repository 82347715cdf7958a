"""Cloze samples in the training loop: the micro-batches of a replica, and the accuracy that is
evaluated during training until a target is reached.

The engines' cloze training (engines/*/train_cloze.py) passes both classes to `TrainingLoop`.
"""

import hashlib
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steelyard.case.case import Target
from steelyard.data.cloze import ClozeRows, Pack
from steelyard.data.rows import Key
from steelyard.engine.job import Job
from steelyard.engine.work import Phase, Work
from steelyard.training.buckets import (
    LARGE,
    Bucket,
    Buckets,
    FilledPack,
    Size,
    fill,
    size_of,
    together,
)
from steelyard.training.glm import ClozeMicroBatch, to_device
from steelyard.training.packing import deal
from steelyard.training.trainer import Trainer


class ClozeBatches:
    """Makes a replica's micro-batches of cloze samples (the loop's `MicroBatchMaker`).

    `padding` returns how many padding tokens an engine computes for a pack; None: none. With
    `fills_buckets` micro-batches are padded up to a few sizes (size_buckets.py), unless the largest
    of the pass has more than `MAX_FILLED_TOKENS` tokens.
    """

    def __init__(
        self, job: Job, padding: Callable[[Pack], int] | None = None, filled: bool = False
    ) -> None:
        self.job, self.padding, self.filled = job, padding, filled
        self.rows: ClozeRows = job.inputs
        self.device: torch.device = job.device.torch_device
        self.sizes: dict[Key, Size] = {}

    def groups(self, keys: list[Key], size: int | None = None) -> list[list[Key]]:
        """Return the sample keys of each micro-batch of this replica; those without samples are
        left out. `size` is the number of samples of a micro-batch; None: from `tune.micro_batch`.
        """
        known = [[key for key in group if key is not None] for group in deal(self.job, keys, size)]
        return [group for group in known if group]

    @cached_property
    def micro_batches(self) -> list[tuple[list[Key], Size]]:
        """Return keys and size of every micro-batch of this replica in the whole pass; computed
        once.
        """
        steps = range(self.job.train.steps if self.job.steps is None else self.job.steps)
        return [
            (group, self._size(group))
            for step in steps
            for group in self.groups(self.rows.batch(step))
        ]

    @cached_property
    def buckets(self) -> Buckets | None:
        """Return the buckets that micro-batches are padded to, or None if they are not padded;
        computed once.
        """
        sizes = [size for _, size in self.micro_batches] if self.filled else []
        return Buckets(sizes) if sizes and max(size.tokens for size in sizes) <= LARGE else None

    def first_of_buckets(self) -> list[list[Key]]:
        """Return the keys of one micro-batch for each bucket of the pass, the one with most tokens
        first, so that later graphs fit into memory that earlier ones allocated. Empty if
        micro-batches are not padded.
        """
        found: dict[Bucket, list[Key]] = {}
        if self.buckets is not None:
            for group, size in self.micro_batches:
                found.setdefault(self.buckets.of(size), group)
        return [found[bucket] for bucket in sorted(found, key=lambda bucket: -bucket.tokens)]

    def largest(self) -> list[list[Key]]:
        """Return the keys of the micro-batch with most tokens in the pass, as a list of one; an
        empty list if this replica has no samples.
        """
        return [
            group for group, _ in sorted(self.micro_batches, key=lambda one: -one[1].tokens)[:1]
        ]

    def _size(self, keys: list[Key]) -> Size:
        """Return the size of these samples in one micro-batch. Sizes of samples are cached."""
        for key in keys:
            if key not in self.sizes:
                self.sizes[key] = size_of(self.rows, key)
        return together(self.sizes[key] for key in keys)

    def pack(self, keys: list[Key]) -> FilledPack:
        """Return the arrays of one micro-batch of training samples, padded to its bucket if there
        are buckets. `counts["padded"]` says how many tokens are padding.
        """
        pack = self.rows.pack(keys, held=False)
        if self.buckets is not None:
            bucket = self.buckets.of(self._size(keys))
            return FilledPack(fill(pack, bucket), bucket)
        if self.padding is not None:
            pack.counts["padded"] = self.padding(pack)
        return FilledPack(pack, None)

    def to_device(self, pack: FilledPack) -> ClozeMicroBatch:
        """Copy a micro-batch to the device."""
        return to_device(pack.pack, self.device, pack.bucket)

    def targets(self, pack: FilledPack) -> int:
        """Return the number of samples: the loss of a step is the mean over samples."""
        return pack.counts["samples"]

    def seed(self, step: int) -> None:
        """Seed torch's random generators for the dropout of a step, from the question's seed, the
        step and the replica, so that replicas drop different elements.
        """
        named = f"{self.job.case.question.seed}:dropout:{step}:{self.job.place.dp}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(named.encode()).digest()[:8], "big") >> 1)


class Accuracy:
    """Evaluates which candidate the model scores highest for every held-out query: before and after
    training, and after every `train.evaluate_every` samples of training.

    The accuracy is summed over all replicas, so that they stop at the same step. `reached` is set
    when pass `train` reaches the gate's target.
    """

    def __init__(self, job: Job, trainer: Trainer) -> None:
        self.job, self.trainer, self.train, gate = job, trainer, job.train, job.case.gate
        self.rows: ClozeRows = job.inputs
        self.device: torch.device = job.device.torch_device
        self.target = gate.reach if isinstance(gate, Target) else None
        self.reached = False
        self.evaluations: dict[str, list[dict[str, Any]]] = {}
        self.batch = len(self.rows.batch(0))

    def due(self, taken: int) -> bool:
        """Return whether to evaluate after so many steps: when another `train.evaluate_every`
        samples have been trained on, and after the last step of a full run.
        """
        every = self.train.evaluate_every
        due = every is not None and taken * self.batch // every > (taken - 1) * self.batch // every
        return due or (self.job.steps is None and taken == self.train.steps)

    def total(self) -> int:
        """Return the number of this replica's held-out batches: one `Work` item each."""
        return len(self._held_out())

    def work(self, name: str, taken: int) -> Iterator[Phase | Work]:
        """Yield the marks of one evaluation, one phase `evaluate` and one `Work` per batch, and
        store its choices for `outputs`. The last batch sums the accuracy over replicas. In pass
        `train` the `Work` has no counts.
        """
        batches, choices = self._held_out(), []
        for number, keys in enumerate(batches):
            yield Phase("evaluate")
            pack = self.rows.pack(keys, held=True) if keys else None
            if pack is not None:
                choices.append((keys, _best(self.trainer.evaluate(to_device(pack, self.device)))))
            if number == len(batches) - 1:
                pairs = (zip(keys, best.tolist(), strict=True) for keys, best in choices)
                self._judge(name, taken, [[key, one] for pair in pairs for key, one in pair])
            counts = pack.counts if pack is not None and name != "train" else {}
            yield Work(counts, rows=keys if counts else None)

    def _judge(self, name: str, taken: int, choices: list[list[int]]) -> None:
        """Append an evaluation to those of a pass, and set `reached` if the accuracy over all
        replicas is at least the target; all replicas must call it. `choices` are pairs of query key
        and chosen candidate.
        """
        hits = sum(one in self.rows.sample(key, held=True).right for key, one in choices)
        share = float(self.trainer.total(hits)) / max(1.0, float(self.trainer.total(len(choices))))
        found = {"step": taken, "samples": taken * self.batch, "choices": choices}
        self.evaluations.setdefault(name, []).append(found)
        self.reached = name == "train" and self.target is not None and share >= self.target

    def _held_out(self) -> list[list[int]]:
        """Divide the held-out queries over replicas, and return this replica's in batches of at
        most `tune.batch_tokens` tokens. All replicas have equally many batches; some may be empty.
        """
        replica, replicas = self.job.place.dp, self.job.plan.dp
        keys, room = self.rows.held_out(), self.job.case.tune.batch_tokens
        out: list[list[int]] = [[]]
        left = room
        # dealt to replicas in turn; keys are sorted, so the first of a round is its longest
        for i in range(0, len(keys), replicas):
            size = self.rows.size(keys[i], held=True)
            if left < room and size > left:
                out.append([])
                left = room
            out[-1] += keys[i : i + replicas][replica : replica + 1]
            left -= size
        return out

    def outputs(self, name: str) -> dict[str, Any]:
        """Return the evaluations of a pass: step, samples trained on so far, and the pairs of query
        key and chosen candidate of this replica.
        """
        return {"evaluations": self.evaluations.get(name, [])}


def _best(scores: Tensor) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return the index of the highest score of each sample, on the host; -1 where the highest is
    not finite. Waits for the device.
    """
    highest, best = scores.max(1)
    chosen: np.ndarray[Any, np.dtype[np.int64]] = (
        torch.where(highest.isfinite(), best, -1).cpu().numpy()
    )
    return chosen
