"""Engine `torch`, generation: continuous batching over a paged cache of keys and values, with
prompts computed in chunks between steps that decode.

The model is computed by generator.py, what each step computes is planned by scheduler.py, and the
port that the loop of requests drives is in step_port.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from steelyard.data.prompts import PromptRequests
from steelyard.engine.generation import RequestSink
from steelyard.engine.job import Job, Part
from steelyard.engines.torch.generate.generator import CacheShape, Generator
from steelyard.engines.torch.generate.scheduler import Scheduler
from steelyard.engines.torch.generate.step_port import NoSink, StepMessages, StepPort
from steelyard.engines.torch.score import TorchScorer
from steelyard.models.tensors import format_dtypes

BLOCK_TOKENS = 64  # of the cache
CACHE_SHARE = 0.9  # of the free memory of a device
MAX_BLOCKS = 1 << 20
WARMUP_TOKENS = 4  # output of a warm-up request, at most


class TorchGenerate:
    """The engine `torch` for generation (a `GenerationEngine`): its own Llama with a paged cache.
    `prepare` loads the model, allocates the cache and sends warm-up requests, `open_port` runs a
    pass, `close` frees the device.
    """

    def __init__(self, job: Job) -> None:
        """Store the job and choose the attention kernel; the model is loaded by `prepare`. Raises
        RequestError for a kernel that cannot be used.
        """
        self.job = job
        self.inputs: PromptRequests = job.inputs
        self._messages = StepMessages(job.group, job.device.torch_device)
        self._scorer: TorchScorer | None = TorchScorer(job, None, job.inputs.find_most_tokens())
        self._generator: Generator | None = None
        self._weights: dict[str, Any] = {}
        self._details: dict[str, Any] = {}

    @property
    def weights(self) -> dict[str, Any]:
        """Return the source of the weights for the record; empty before `prepare`."""
        return self._weights

    def prepare(self, name: str, part: Part) -> None:
        """Load the model and allocate the cache before the first pass, and run `tune.warmup` rounds
        of warm-up requests.
        """
        if self._generator is None:
            with part("weights"):
                self._load()
            with part("cache"):
                self._generator = self._make_generator()
                self.job.device.synchronize()
        with part(f"warmup_{name}"):
            for round_number in range(self.job.case.tune.warmup):
                self._warm_up(round_number)
            self.job.device.synchronize()

    def _load(self) -> None:
        """Load the model, and note the source, number and types of its weights."""
        scorer = self._get_scorer()
        self._weights = scorer.load()
        scorer.use(self.job.case.tune.compile and self.job.device.triton)
        parameters = list(scorer.tensors())
        self._details = {
            "parameters": sum(tensor.numel() for tensor in parameters),
            "dtypes": {"parameters": format_dtypes(parameters)},
            **scorer.details(),
        }
        self.job.device.synchronize()

    def _make_generator(self) -> Generator:
        """Return the generator with a cache of the size that the tune asks for."""
        scorer, group = self._get_scorer(), self.job.group
        shape = self._choose_cache()
        self._details |= {"kv_blocks": shape.blocks, "kv_block_tokens": shape.block_tokens}
        blocks: Any = scorer.blocks
        vocab = self.job.case.question.model.vocab
        return Generator(
            scorer.model, blocks, scorer.kernel, shape, vocab, group.share, group.gather
        )

    def _choose_cache(self) -> CacheShape:
        """Return the size of the cache: `tune.kv_blocks`, or as many as the largest number of
        sequences can fill, on a device at most what is free beside the model.
        """
        tune, longest = self.job.case.tune, self.inputs.find_most_tokens()
        load = self.job.case.question.load
        slots = tune.max_sequences
        if load is not None and (load.concurrency or load.max_concurrency):
            slots = min(slots, load.concurrency or load.max_concurrency or slots)
        blocks = tune.kv_blocks or min(
            slots * -(-longest // BLOCK_TOKENS), self._count_free_blocks()
        )
        return CacheShape(blocks, BLOCK_TOKENS, slots, longest)

    def _count_free_blocks(self) -> int:
        """Return how many blocks fit into the device's free memory, of which a share is left to a
        step's activations; on a CPU, which has no memory of its own, `MAX_BLOCKS`.
        """
        model, device = self._get_scorer().model, self.job.device.torch_device
        if device.type == "cpu":
            return MAX_BLOCKS
        self.job.device.release_memory()
        free_bytes, _ = torch.get_device_module(device).mem_get_info(device)
        shape, size = model.shape, model.embed.weight.element_size()
        block_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * BLOCK_TOKENS * size
        return max(1, int(free_bytes * CACHE_SHARE) // block_bytes)

    def _get_scorer(self) -> TorchScorer:
        """Return the model's holder. Raises RuntimeError after `close`."""
        if self._scorer is None:
            raise RuntimeError("the engine was closed")
        return self._scorer

    def _make_scheduler(self, shape: CacheShape) -> Scheduler:
        """Return a scheduler with an empty cache of that size."""
        tune = self.job.case.tune
        return Scheduler(
            shape.blocks, shape.block_tokens, shape.slots, tune.batch_tokens, tune.kv_admission
        )

    def _warm_up(self, round_number: int) -> None:
        """Compute a round of warm-up requests, one for each slot."""
        port = self._make_port(NoSink())
        slots = self._get_generator().shape.slots
        for slot in range(slots):
            request = self.inputs.make_warmup(round_number * slots + slot)
            port.add(request, min(request.output_tokens, WARMUP_TOKENS))
        port.run_out()
        port.close()

    def _get_generator(self) -> Generator:
        """Return the generator. Raises RuntimeError before `prepare`."""
        if self._generator is None:
            raise RuntimeError("no cache before prepare")
        return self._generator

    @contextmanager
    def open_port(self, name: str, sink: RequestSink, clock: Any) -> Iterator[StepPort]:
        """Open the port of a pass for its `sink`; closing it ends the pass of the other ranks of
        the tensor-parallel group. Raises RuntimeError before `prepare`.
        """
        port = self._make_port(sink, clock)
        try:
            yield port
        finally:
            port.close()
        self._messages.end()
        self._details["preemptions"] = port.preemptions

    def follow(self, name: str, sink: RequestSink) -> None:
        """Compute the steps of a pass that the first rank of the tensor-parallel group plans, until
        that closes its port, and report the same tokens to a `sink` of this rank.
        """
        port = self._make_port(sink)
        port.follow(self.inputs)
        port.close()
        self._details["preemptions"] = port.preemptions

    def _make_port(self, sink: RequestSink, clock: Callable[[], float] | None = None) -> StepPort:
        """Return a port with an empty cache. Raises RuntimeError before `prepare`."""
        generator = self._get_generator()
        tokenizer, exact = self.inputs.source.tokenizer, self.inputs.lengths == "exact"
        end = None if tokenizer is None or exact else tokenizer.end
        scheduler = self._make_scheduler(generator.shape)
        return StepPort(generator, scheduler, sink, self._messages, clock, end)

    def close(self) -> None:
        """Free the model and the cache."""
        self._scorer = self._generator = None
        self.job.device.release_memory()

    def details(self) -> dict[str, Any]:
        """Return the types of the weights, the attention kernel, the blocks of the cache, and how
        often a sequence gave up its blocks (`preemptions`).
        """
        return {"scheduling": "continuous", **self._details}
