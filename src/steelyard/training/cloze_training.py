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

from steelyard.case.case import TargetGate
from steelyard.data.cloze_samples import ClozeDataset, ClozePack
from steelyard.data.training_rows import RowKey
from steelyard.engine.job import Job
from steelyard.engine.work import Phase, Work
from steelyard.training.glm_trainer import ClozeMicroBatch, send_cloze_batch
from steelyard.training.packing import deal_keys
from steelyard.training.size_buckets import (
    MAX_FILLED_TOKENS,
    ClozeSize,
    FilledPack,
    SizeBucket,
    SizeBuckets,
    combine_sizes,
    fill_pack,
    measure_sample,
)
from steelyard.training.trainer import Trainer


class ClozeBatches:
    """Makes a replica's micro-batches of cloze samples on a torch device (the loop's
    `MicroBatchMaker`): `split_keys`, `pack` (a `FilledPack`), `to_device` (a `ClozeMicroBatch`),
    `count_targets` (samples) and `seed`.

    `padding(pack)` returns how many padding tokens an engine computes for a pack; None: none. With
    `fills_buckets` micro-batches are padded up to a few sizes (`buckets`, a `SizeBuckets`, else
    None), so that recorded graphs can be replayed, unless the largest of the pass has more than
    `MAX_FILLED_TOKENS` tokens. `pick_one_per_bucket` and `pick_largest` return sample keys to warm
    up with, `micro_batches` those of all steps with their sizes.
    """

    def __init__(
        self,
        job: Job,
        padding: Callable[[ClozePack], int] | None = None,
        fills_buckets: bool = False,
    ) -> None:
        """Store the arguments; nothing is measured or padded yet. `padding` and `fills_buckets` are
        described at the class. `sizes` caches the sizes of samples by key.
        """
        self.job, self.padding, self.fills_buckets = job, padding, fills_buckets
        self.rows: ClozeDataset = job.inputs
        self.device: torch.device = job.device.torch_device
        self.sizes: dict[RowKey, ClozeSize] = {}

    def split_keys(self, keys: list[RowKey], size: int | None = None) -> list[list[RowKey]]:
        """Return the sample keys of each micro-batch of this replica, of the global batch `keys`;
        micro-batches without samples are left out, so replicas may have different numbers. `size`
        is the number of samples of a micro-batch; None: at most `tune.micro_batch`, spread evenly.
        """
        key_groups = [
            [key for key in group if key is not None] for group in deal_keys(self.job, keys, size)
        ]
        return [group for group in key_groups if group]

    @cached_property
    def micro_batches(self) -> list[tuple[list[RowKey], ClozeSize]]:
        """Return (sample keys, size) of every micro-batch of this replica in all steps of the run,
        which `job.steps` may cut; sizes are without padding. Computed once, by measuring every
        sample.
        """
        steps = range(self.job.train.steps if self.job.steps is None else self.job.steps)
        return [
            (group, self._measure(group))
            for step in steps
            for group in self.split_keys(self.rows.batch(step))
        ]

    @cached_property
    def buckets(self) -> SizeBuckets | None:
        """Return the buckets (sizes) that this replica's micro-batches are padded to; None if they
        are not padded: `fills_buckets` is off, there are none, or the largest has too many tokens.
        Computed once.
        """
        sizes = [size for _, size in self.micro_batches] if self.fills_buckets else []
        return (
            SizeBuckets(sizes)
            if sizes and max(size.tokens for size in sizes) <= MAX_FILLED_TOKENS
            else None
        )

    def pick_one_per_bucket(self) -> list[list[RowKey]]:
        """Return the sample keys of one micro-batch (the first) for each bucket that occurs in the
        pass, buckets with most tokens first, so that later graphs fit into memory that earlier ones
        allocated. Empty if micro-batches are not padded.
        """
        first_groups: dict[SizeBucket, list[RowKey]] = {}
        if self.buckets is not None:
            for group, size in self.micro_batches:
                first_groups.setdefault(self.buckets.find_bucket(size), group)
        return [
            first_groups[bucket]
            for bucket in sorted(first_groups, key=lambda bucket: -bucket.tokens)
        ]

    def pick_largest(self) -> list[list[RowKey]]:
        """Return the keys of the micro-batch with most tokens in the pass, as a list of one; an
        empty list if this replica has no samples.
        """
        return [
            group
            for group, _ in sorted(
                self.micro_batches, key=lambda micro_batch: -micro_batch[1].tokens
            )[:1]
        ]

    def _measure(self, keys: list[RowKey]) -> ClozeSize:
        """Return the size of these samples together in one micro-batch, without padding. Raises
        ValueError for no samples. Sizes of single samples are cached in `sizes`.
        """
        for key in keys:
            if key not in self.sizes:
                self.sizes[key] = measure_sample(self.rows, key)
        return combine_sizes(self.sizes[key] for key in keys)

    def pack(self, keys: list[RowKey]) -> FilledPack:
        """Return the host arrays of one micro-batch of training samples, padded to its bucket if
        there are buckets. `counts["padded"]` says how many tokens are padding: those filled in, or
        else what `padding` returns.
        """
        pack = self.rows.pack(keys, held_out=False)
        if self.buckets is not None:
            bucket = self.buckets.find_bucket(self._measure(keys))
            return FilledPack(fill_pack(pack, bucket), bucket)
        if self.padding is not None:
            pack.counts["padded"] = self.padding(pack)
        return FilledPack(pack, None)

    def to_device(self, pack: FilledPack) -> ClozeMicroBatch:
        """Copy a packed micro-batch of cloze samples to the job's device, without waiting, and
        return its tensors.
        """
        return send_cloze_batch(pack.pack, self.device, pack.bucket)

    def count_targets(self, pack: FilledPack) -> int:
        """Return the number of samples of a packed micro-batch: the loss of a cloze step is the
        mean over samples.
        """
        return pack.counts["samples"]

    def seed(self, step: int) -> None:
        """Seed torch's random generators, process-wide, for the dropout of a step, from the
        question's seed, the step and the replica, so that replicas drop different elements.
        """
        seed_text = f"{self.job.case.question.seed}:dropout:{step}:{self.job.place.dp}"
        torch.manual_seed(
            int.from_bytes(hashlib.sha256(seed_text.encode()).digest()[:8], "big") >> 1
        )


class ClozeAccuracy:
    """Evaluates which candidate the model scores highest for every held-out query (the loop's
    `TrainingEvaluation`): once in passes `before` and `after`, and in `train` after every
    `train.evaluate_every` samples (None: not) and after the last step if the run is not cut short
    by `job.steps`.

    Held-out queries are divided over replicas; hits are summed over all, so that they stop at the
    same step. `target` is the accuracy that ends training (0 to 1; None without a target gate),
    `reached` whether the last evaluation was in pass `train` and reached it. `evaluations` has by
    pass a list of dicts: `step`, `samples` trained on and this replica's `choices`.
    """

    def __init__(self, job: Job, trainer: Trainer) -> None:
        """Store the job and the trainer that computes scores. `target` is the `reach` of the case's
        gate if that is a target gate, else None; `batch_samples` is the size of the first global
        batch. Raises ValueError if the case does not train.
        """
        self.job, self.trainer, self.train, gate = job, trainer, job.train, job.case.gate
        self.rows: ClozeDataset = job.inputs
        self.device: torch.device = job.device.torch_device
        self.target = gate.reach if isinstance(gate, TargetGate) else None
        self.reached = False
        self.evaluations: dict[str, list[dict[str, Any]]] = {}
        self.batch_samples = len(self.rows.batch(0))

    def is_due(self, steps_taken: int) -> bool:
        """Return whether pass `train` evaluates after so many steps: when these have passed another
        multiple of `train.evaluate_every` samples, and after the last step of a run that is not cut
        by `job.steps`. Without `evaluate_every` only the latter.
        """
        interval = self.train.evaluate_every
        due = (
            interval is not None
            and steps_taken * self.batch_samples // interval
            > (steps_taken - 1) * self.batch_samples // interval
        )
        return due or (self.job.steps is None and steps_taken == self.train.steps)

    def count_work_items(self) -> int:
        """Return the number of this replica's held-out batches, equal on all replicas: an
        evaluation yields one `Work` for each.
        """
        return len(self._divide_held_out())

    def work(self, name: str, steps_taken: int) -> Iterator[Phase | Work]:
        """Run one evaluation of pass `name`: yield a phase `evaluate` and a `Work` per batch, and
        append its choices to `evaluations`. The last batch sums hits over replicas, which all run
        it together, and sets `reached`. In pass `train`, and for an empty batch, the `Work` has no
        counts and no rows.
        """
        batches, choices = self._divide_held_out(), []
        for number, keys in enumerate(batches):
            yield Phase("evaluate")
            pack = self.rows.pack(keys, held_out=True) if keys else None
            if pack is not None:
                choices.append(
                    (
                        keys,
                        _pick_best_candidates(
                            self.trainer.evaluate(send_cloze_batch(pack, self.device))
                        ),
                    )
                )
            if number == len(batches) - 1:
                pairs = (zip(keys, best.tolist(), strict=True) for keys, best in choices)
                self._record_evaluation(
                    name,
                    steps_taken,
                    [[key, candidate] for pair in pairs for key, candidate in pair],
                )
            counts = pack.counts if pack is not None and name != "train" else {}
            yield Work(counts, rows=keys if counts else None)

    def _record_evaluation(self, name: str, steps_taken: int, choices: list[list[int]]) -> None:
        """Append an evaluation to those of pass `name`, and set `reached` to whether this is pass
        `train` and the accuracy over all replicas is at least the target (False without one); all
        replicas must call it together. `choices` are this replica's pairs of query key and chosen
        candidate, -1 for none.
        """
        hits = sum(
            candidate in self.rows.sample(key, held_out=True).right for key, candidate in choices
        )
        accuracy = float(self.trainer.sum_over_replicas(hits)) / max(
            1.0, float(self.trainer.sum_over_replicas(len(choices)))
        )
        evaluation = {
            "step": steps_taken,
            "samples": steps_taken * self.batch_samples,
            "choices": choices,
        }
        self.evaluations.setdefault(name, []).append(evaluation)
        self.reached = name == "train" and self.target is not None and accuracy >= self.target

    def _divide_held_out(self) -> list[list[int]]:
        """Return this replica's held-out query keys in batches. Keys, longest first, are dealt to
        replicas in turn; a batch ends when the longest of the next round does not fit into
        `tune.batch_tokens` (a longer one is alone). All replicas have equally many batches, at
        least one; the last may be empty.
        """
        replica, replicas = self.job.place.dp, self.job.plan.dp
        keys, max_tokens = self.rows.held_out(), self.job.case.tune.batch_tokens
        out: list[list[int]] = [[]]
        free_tokens = max_tokens
        # dealt to replicas in turn; keys are sorted, so the first of a round is its longest
        for i in range(0, len(keys), replicas):
            size = self.rows.count_tokens(keys[i], held_out=True)
            if free_tokens < max_tokens and size > free_tokens:
                out.append([])
                free_tokens = max_tokens
            out[-1] += keys[i : i + replicas][replica : replica + 1]
            free_tokens -= size
        return out

    def outputs(self, name: str) -> dict[str, Any]:
        """Return `evaluations`, a list with those of pass `name`: `step`, `samples` trained on so
        far, and `choices`, pairs of query key and chosen candidate of this replica (-1: no finite
        score).
        """
        return {"evaluations": self.evaluations.get(name, [])}


def _pick_best_candidates(scores: Tensor) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return the index of the highest score of each sample, int64 on the host, from scores
    [samples, candidates]; -1 where the highest is not finite. Waits for the device.
    """
    highest, best = scores.max(1)
    chosen: np.ndarray[Any, np.dtype[np.int64]] = (
        torch.where(highest.isfinite(), best, -1).cpu().numpy()
    )
    return chosen
