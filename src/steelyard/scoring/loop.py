"""The scoring loop of every engine: warm-up, the pass over the batches with its phases, and the
answers.

An engine supplies a `Scorer`: it loads a model, copies a batch to the device and computes hidden
states. The loop decides what is computed and in which order, and reads the answers, which are the
same for every engine. It never waits for the device inside a pass: answers stay there until phase
`score`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from steelyard.engine.job import Job, Part
from steelyard.engine.work import Phase, Work
from steelyard.models.tensors import format_dtypes, send_array
from steelyard.scoring.answers import READERS, AnswerRequest, PassAnswers
from steelyard.scoring.batches import MakeBatch, ScoringBatches


class Scorer(ABC):
    """A model on this rank's device, which an engine supplies to the scoring loop (an abstract
    class). `load()` builds it and returns the weights' source as a dict; `to_device(batch)` copies
    a batch and returns the inputs of `hidden(inputs, pick)`, which returns the hidden states
    [picked tokens, hidden]; `logits(hidden)` those of this rank's part of the vocabulary;
    `tensors()` and `details()` are for the record. `compiles` says whether it has a compiled form
    (default False), which `use(compiled)` switches on and off.
    """

    # whether it has a compiled form, which all passes but `val` use if `tune.compile` is set
    compiles = False

    @abstractmethod
    def load(self) -> dict[str, Any]:
        """Build the model on this rank's device, load its weights and return their source, a
        JSON-able dict for the record. Called once, before the first pass.
        """

    def use(self, compiled: bool) -> None:
        """Compute in the compiled form, or as the model is written, from the next batch on. The
        compiled form is made when it is first used. The loop calls it only if `compiles` is true;
        raises NotImplementedError unless overridden.
        """
        raise NotImplementedError(f"{type(self).__name__} compiles but cannot run what it compiled")

    @abstractmethod
    def to_device(self, batch: Any) -> Any:
        """Copy a batch (a `PromptBatch` if batches are packed, else a `PaddedBatch`) to the device
        without waiting for it, and return the inputs of `hidden`.
        """

    @abstractmethod
    def hidden(self, inputs: Any, pick: Tensor) -> Tensor:
        """Return the last hidden states [picked tokens, hidden] of the inputs that `to_device`
        returned; `pick` are indices of tokens in all rows laid end to end.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [tokens, part of the vocabulary] of hidden states [tokens, hidden]:
        those of this rank's part of the vocabulary, padding columns included.
        """

    @abstractmethod
    def tensors(self) -> Iterable[Tensor]:
        """Return the weights that this rank holds; the record gets their number of elements and
        dtypes.
        """

    def details(self) -> dict[str, Any]:
        """Return what the engine chose by itself, such as the attention kernel, as a JSON-able dict
        for the record; here empty.
        """
        return {}


class ScoringLoop:
    """The engine interface (`Engine`, engine/job.py) for scoring, which engines subclass with a
    `scorer` and planned `batches`: passes of any names, of which `val` is the reference and never
    compiled.

    `prepare` loads the model before the first pass and warms up, `total` and `work` run a pass as
    marks, `outputs(name)` returns its answers as lists by column, `details` is for the record.
    `reader` (an `AnswerReader`) reads the answers of the job's kind of work, `answers` has by pass
    its `PassAnswers`, `weights` is the source of the weights once they are loaded, else empty.
    """

    def __init__(self, job: Job, scorer: Scorer, batches: ScoringBatches) -> None:
        """Store the arguments and make the reader of the job's kind of work (`READERS`; KeyError
        for another kind); nothing is loaded yet.
        """
        self.job, self.scorer, self.batches = job, scorer, batches
        self.device: torch.device = job.device.torch_device
        group, vocab = job.group, job.case.question.model.vocab
        self.reader = READERS[job.work](job.inputs, vocab, group.share, group.gather, self.device)
        self.answers: dict[str, PassAnswers] = {}
        self.weights: dict[str, Any] = {}
        self.loaded = self.compiled = False

    def prepare(self, name: str, part: Part) -> None:
        """Load the model before the first pass, switch it to the form of this pass, compiled or
        not, and compute its warm-up batches. Time is booked as `weights`, and as `compile_NAME`
        when the compiled form is used for the first time, else `warmup_NAME`. Ranks that hold one
        model call it together.
        """
        if not self.loaded:
            with part("weights"):
                self.weights = self.scorer.load()
                self.job.device.synchronize()
            self.loaded = True
        compiled = self._is_compiled(name)
        is_first_compiled = compiled and not self.compiled
        self.compiled |= compiled
        with part(f"{'compile' if is_first_compiled else 'warmup'}_{name}"), torch.inference_mode():
            if self.scorer.compiles:
                self.scorer.use(compiled)
            for make in self.batches.compile_warmup if compiled else self.batches.warmup:
                _, inputs, request = self._prepare_batch(make)
                self._compute_answers(inputs, request, compiled)
            self.job.device.synchronize()

    def _is_compiled(self, name: str) -> bool:
        """Return whether a pass uses the compiled form: `tune.compile` is set, the scorer has one,
        and the pass is not `val`.
        """
        return self.job.case.tune.compile and self.scorer.compiles and name != "val"

    def total(self, name: str) -> int:
        """Return how many `Work` items any scoring pass yields: the number of this replica's
        batches, plus one for phase `score`.
        """
        return len(self.batches.in_pass) + 1

    def work(self, name: str) -> Iterator[Phase | Work]:
        """Run the pass: yield phases `data` and `compute` and one `Work` per batch, then phase
        `score`, which copies the answers to the host, and an empty `Work`. Answers are stored in
        `answers[name]`, replacing earlier ones. Ranks that hold one model run it together.
        """
        answers, compiled = PassAnswers(), self._is_compiled(name)
        self.answers[name] = answers
        with torch.inference_mode():
            for make in self.batches.in_pass:
                yield Phase("data")
                batch, inputs, request = self._prepare_batch(make)
                yield Phase("compute")
                answers.add(batch.items, self._compute_answers(inputs, request, compiled))
                yield Work(
                    {"padded": batch.counts["padded"]}, rows=batch.items, prefixes=batch.prefixes
                )
            yield Phase("score")
            answers.read()
            yield Work({})

    def _prepare_batch(self, make: MakeBatch) -> tuple[Any, Any, AnswerRequest]:
        """Make a batch by calling `make`, and copy it to the device without waiting. Return (batch,
        the model's inputs, where logits are needed).
        """
        batch = make()
        inputs = self.scorer.to_device(batch)
        return (
            batch,
            inputs,
            self.reader.ask(batch.items, batch.pick, partial(send_array, device=self.device)),
        )

    def _compute_answers(self, inputs: Any, request: AnswerRequest, compiled: bool) -> Tensor:
        """Return the answers of a batch on the device, one row per item, as the reader's `answer`
        makes them. `compiled` lets it reduce logits by a fast kernel.
        """
        hidden = self.scorer.hidden(inputs, request.pick)
        return self.reader.answer(self.scorer.logits, hidden, request, compiled)

    def outputs(self, name: str) -> dict[str, Any]:
        """Return the answers of a pass as lists by column name (the reader's `to_lists`). Raises
        KeyError if the pass did not start, RuntimeError if it did not end.
        """
        return self.answers[name].to_lists(self.reader)

    def details(self) -> dict[str, Any]:
        """Return for the record what the scorer chose, `batches`, and `parameters` and `dtypes`,
        number of elements and dtypes of the weights on this rank.
        """
        tensors = list(self.scorer.tensors())
        counts = {
            "parameters": sum(tensor.numel() for tensor in tensors),
            "dtypes": {"parameters": format_dtypes(tensors)},
        }
        return {**self.scorer.details(), "batches": len(self.batches.in_pass), **counts}
