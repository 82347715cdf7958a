"""The training loop of a cloze: samples of candidates instead of rows, evaluated on the way, until a target is reached."""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steelyard.case.case import Target
from steelyard.data.cloze import ClozeRows, Pack
from steelyard.data.rows import Key
from steelyard.engines.job import Job
from steelyard.engines.reference.glm import ReferenceTrainer
from steelyard.engines.torch.glm import ClozeMicro, GlmTrainer, to_device
from steelyard.engines.work import Phase, Work
from steelyard.training.loop import Loop


class ClozeLoop(Loop):
    """Passes `before` and `after` evaluate; `train` does so whenever another `train.evaluate_every` samples are done."""

    def __init__(self, job: Job, trainer: GlmTrainer) -> None:
        super().__init__(job, trainer)
        self.cloze = trainer
        self.rows: ClozeRows = job.texts
        gate = job.case.gate
        self.reach = gate.reach if isinstance(gate, Target) else None
        self.evaluations: dict[str, list[dict[str, Any]]] = {}
        self.batch = len(self.rows.batch(0))

    def total(self, name: str) -> int:
        return super().total(name) if name == "train" else len(self._evaluated())

    def _aside(self, taken: int) -> int:
        return super()._aside(taken) + (len(self._evaluated()) if self._evaluates(taken) else 0)

    def _between(self, taken: int) -> Iterator[Phase | Work]:
        if self._evaluates(taken):
            yield from self._evaluate("train", taken)
        yield from super()._between(taken)

    def _evaluates(self, taken: int) -> bool:
        """Whenever so many more samples are done, and where the whole question ends."""
        every = self.train.evaluate_every
        due = every is not None and taken * self.batch // every > (taken - 1) * self.batch // every
        return due or (self.job.steps is None and taken == self.steps)

    def _evaluation(self, name: str) -> Iterator[Phase | Work]:
        return self._evaluate(name, self.begin if name == "before" else len(self.curve))

    def _evaluate(self, name: str, taken: int) -> Iterator[Phase | Work]:
        """Every question's best candidate. All replicas learn the accuracy, and stop at the same step."""
        batches, choices = self._evaluated(), []
        for number, keys in enumerate(batches):
            yield Phase("evaluate")
            pack = self.rows.pack(keys, held=True) if keys else None
            if pack is not None:
                choices.append((keys, _best(self.cloze.scores(to_device(pack, self.device)))))
            if number == len(batches) - 1:
                pairs = (zip(keys, best.tolist(), strict=True) for keys, best in choices)
                self._judge(name, taken, [[key, one] for pair in pairs for key, one in pair])
            counts = pack.counts if pack is not None and name != "train" else {}
            yield Work(counts)

    def _judge(self, name: str, taken: int, choices: list[list[int]]) -> None:
        hits = sum(one in self.rows.sample(key, held=True).right for key, one in choices)
        share = float(self.cloze.total(hits)) / max(1.0, float(self.cloze.total(len(choices))))
        found = {"step": taken, "samples": taken * self.batch, "choices": choices}
        self.evaluations.setdefault(name, []).append(found)
        self.reached = name == "train" and self.reach is not None and share >= self.reach

    def _evaluated(self) -> list[list[int]]:
        """This replica's questions, in batches of at most `tune.batch_tokens` tokens; as many on every replica, some of them
        empty."""
        part, parts = self.job.place.dp, self.job.plan.dp
        keys, room = self.rows.held_out(), self.job.case.tune.batch_tokens
        out: list[list[int]] = [[]]
        left = room
        for i in range(0, len(keys), parts):  # dealt in turn; the first of a round is its longest
            size = self.rows.size(keys[i], held=True)
            if left < room and size > left:
                out.append([])
                left = room
            out[-1] += keys[i : i + parts][part : part + 1]
            left -= size
        return out

    def _groups(self, keys: list[Key], size: int | None = None) -> list[list[Key]]:
        known = [[key for key in group if key is not None] for group in super()._groups(keys, size)]
        return [group for group in known if group]

    def _pack(self, keys: list[Key]) -> Pack:
        return self.rows.pack(keys, held=False)

    def _to_device(self, pack: Pack) -> ClozeMicro:
        return to_device(pack, self.device)

    def _targets(self, pack: Pack) -> int:
        return pack.counts["samples"]

    def _seed(self, step: int) -> None:
        """Replicas drop different numbers."""
        named = f"{self.job.case.question.seed}:dropout:{step}:{self.job.place.dp}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(named.encode()).digest()[:8], "big") >> 1)

    def outputs(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {"evaluations": self.evaluations.get(name, [])}
        if name != "train":
            return found
        self.watch.seen(wait=True)
        target = {"step": len(self.curve), "why": "target"} if self.reached else None
        return found | {"stopped": self.watch.found or target}


class TorchCloze(ClozeLoop):
    def __init__(self, job: Job) -> None:
        super().__init__(job, GlmTrainer(job))


class ReferenceCloze(ClozeLoop):
    """The published program's way, whose padding is counted, though never as work."""

    def __init__(self, job: Job) -> None:
        self.reference = ReferenceTrainer(job)
        super().__init__(job, self.reference)

    def _pack(self, keys: list[Key]) -> Pack:
        pack = super()._pack(keys)
        pack.counts["padded"] = self.reference.padded(pack)
        return pack


def _best(scores: Tensor) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """The candidate with the highest score of each sample; -1 where that is no number."""
    highest, best = scores.max(1)
    chosen: np.ndarray[Any, np.dtype[np.int64]] = torch.where(highest.isfinite(), best, -1).cpu().numpy()
    return chosen
