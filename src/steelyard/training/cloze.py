"""A cloze in the training loop: samples of candidates instead of rows, evaluated on the way, until
a target is reached.
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
    """Samples as a replica's micro-batches. `padding` says how many tokens of it are computed,
    where there are any; with `filled` micro-batches are filled up to a few sizes."""

    def __init__(
        self, job: Job, padding: Callable[[Pack], int] | None = None, filled: bool = False
    ) -> None:
        self.job, self.padding, self.filled = job, padding, filled
        self.rows: ClozeRows = job.inputs
        self.device: torch.device = job.device.torch_device
        self.sizes: dict[Key, Size] = {}

    def groups(self, keys: list[Key], size: int | None = None) -> list[list[Key]]:
        known = [[key for key in group if key is not None] for group in deal(self.job, keys, size)]
        return [group for group in known if group]

    @cached_property
    def micro_batches(self) -> list[tuple[list[Key], Size]]:
        """All of this replica in the pass."""
        steps = range(self.job.train.steps if self.job.steps is None else self.job.steps)
        return [
            (group, self._size(group))
            for step in steps
            for group in self.groups(self.rows.batch(step))
        ]

    @cached_property
    def buckets(self) -> Buckets | None:
        """None where micro-batches are not filled up."""
        sizes = [size for _, size in self.micro_batches] if self.filled else []
        return Buckets(sizes) if sizes and max(size.tokens for size in sizes) <= LARGE else None

    def first_of_buckets(self) -> list[list[Key]]:
        """A micro-batch of every bucket of the pass, the largest first: what is recorded later fits
        in memory that it left.
        """
        found: dict[Bucket, list[Key]] = {}
        if self.buckets is not None:
            for group, size in self.micro_batches:
                found.setdefault(self.buckets.of(size), group)
        return [found[bucket] for bucket in sorted(found, key=lambda bucket: -bucket.tokens)]

    def largest(self) -> list[list[Key]]:
        """The micro-batch of most tokens in the pass; none where this replica has nothing to do."""
        return [
            group for group, _ in sorted(self.micro_batches, key=lambda one: -one[1].tokens)[:1]
        ]

    def _size(self, keys: list[Key]) -> Size:
        for key in keys:
            if key not in self.sizes:
                self.sizes[key] = size_of(self.rows, key)
        return together(self.sizes[key] for key in keys)

    def pack(self, keys: list[Key]) -> FilledPack:
        pack = self.rows.pack(keys, held=False)
        if self.buckets is not None:
            bucket = self.buckets.of(self._size(keys))
            return FilledPack(fill(pack, bucket), bucket)
        if self.padding is not None:
            pack.counts["padded"] = self.padding(pack)
        return FilledPack(pack, None)

    def to_device(self, pack: FilledPack) -> ClozeMicroBatch:
        return to_device(pack.pack, self.device, pack.bucket)

    def targets(self, pack: FilledPack) -> int:
        return pack.counts["samples"]

    def seed(self, step: int) -> None:
        """Replicas drop different numbers."""
        named = f"{self.job.case.question.seed}:dropout:{step}:{self.job.place.dp}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(named.encode()).digest()[:8], "big") >> 1)


class Accuracy:
    """Every question's best candidate: before and after training, and whenever another
    `train.evaluate_every` samples are done. All replicas learn the accuracy, and stop at the same
    step."""

    def __init__(self, job: Job, trainer: Trainer) -> None:
        self.job, self.trainer, self.train, gate = job, trainer, job.train, job.case.gate
        self.rows: ClozeRows = job.inputs
        self.device: torch.device = job.device.torch_device
        self.target = gate.reach if isinstance(gate, Target) else None
        self.reached = False
        self.evaluations: dict[str, list[dict[str, Any]]] = {}
        self.batch = len(self.rows.batch(0))

    def due(self, taken: int) -> bool:
        """Whenever so many more samples are done, and where the whole question ends."""
        every = self.train.evaluate_every
        due = every is not None and taken * self.batch // every > (taken - 1) * self.batch // every
        return due or (self.job.steps is None and taken == self.train.steps)

    def total(self) -> int:
        return len(self._held_out())

    def work(self, name: str, taken: int) -> Iterator[Phase | Work]:
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
        hits = sum(one in self.rows.sample(key, held=True).right for key, one in choices)
        share = float(self.trainer.total(hits)) / max(1.0, float(self.trainer.total(len(choices))))
        found = {"step": taken, "samples": taken * self.batch, "choices": choices}
        self.evaluations.setdefault(name, []).append(found)
        self.reached = name == "train" and self.target is not None and share >= self.target

    def _held_out(self) -> list[list[int]]:
        """This replica's questions, in batches of at most `tune.batch_tokens` tokens; as many on
        every replica, some of them empty."""
        replica, replicas = self.job.place.dp, self.job.plan.dp
        keys, room = self.rows.held_out(), self.job.case.tune.batch_tokens
        out: list[list[int]] = [[]]
        left = room
        # dealt in turn; the first of a round is its longest
        for i in range(0, len(keys), replicas):
            size = self.rows.size(keys[i], held=True)
            if left < room and size > left:
                out.append([])
                left = room
            out[-1] += keys[i : i + replicas][replica : replica + 1]
            left -= size
        return out

    def outputs(self, name: str) -> dict[str, Any]:
        return {"evaluations": self.evaluations.get(name, [])}


def _best(scores: Tensor) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """The candidate with the highest score of each sample; -1 where that is no number."""
    highest, best = scores.max(1)
    chosen: np.ndarray[Any, np.dtype[np.int64]] = (
        torch.where(highest.isfinite(), best, -1).cpu().numpy()
    )
    return chosen
