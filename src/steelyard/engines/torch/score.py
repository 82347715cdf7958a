"""Engine `torch`, scoring: packed prompts through models/llama.py, logits only where an answer is read.

The val pass runs the layers as they are written. The infer pass runs them with a kernel for all that stands between matmuls,
or, where the device runs no such kernels, compiled: one graph for all layers and batch sizes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from steelyard.data.batches import Batch, closed_batch, equal_bins, open_batch, open_bins, prefixes
from steelyard.engine.job import Job, Part
from steelyard.engine.work import Phase, Work
from steelyard.errors import RequestError
from steelyard.kernels import jit, packed_attention
from steelyard.models import llama_fp8
from steelyard.models.answers import READERS, Answers, Picked
from steelyard.models.attention import Layout, Prefix, known, layout, with_window
from steelyard.models.llama import GatesApart, Llama, Streams
from steelyard.models.llama_fp8 import Fp8Kernels, Fp8ScoreBlock
from steelyard.models.llama_fused import BlockKernels, FusedBlock, Scoring
from steelyard.models.tensors import DTYPES, dtype_names, local, send
from steelyard.weights import load
from steelyard.weights.model import build

Inputs = tuple[Tensor, Tensor, Layout, Picked]


class TorchScore:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.question = job.case.question
        self.fp8 = self.question.precision.matmul == "fp8"
        self.tune = job.case.tune
        if self.tune.batching not in ("auto", "packed"):
            raise RequestError(f"engine torch packs sequences; tune.batching={self.tune.batching!r} is for engine transformers")
        self.kernel = self._choose_kernel()
        self.device: torch.device = job.device.torch_device
        make = READERS[job.work]
        self.reader = make(job.inputs, self.question.model.vocab, job.group.share, job.group.gather, self.device)
        self.cache_rows = 0
        self.batches = self._plan()
        self.answers: dict[str, Answers] = {}
        self.model: Llama | None = None
        self.blocks: list[Callable[..., Streams]] | None = None
        self.compiled: list[Callable[..., Streams]] = []
        self.prefix: list[Prefix] | None = None
        self.weights: dict[str, Any] = {}

    def _choose_kernel(self) -> str:
        shared = self.question.division == "open"
        kernel = self.tune.attention
        if kernel == "auto":
            kernel = self._fastest(shared)
        if shared and kernel == "cudnn":
            raise RequestError(
                "tune.attention='cudnn' has no shared prefixes; allowed in division open: auto, packed, flash, efficient, rows"
            )
        longest = max(map(len, self.job.inputs.rows), default=0)
        return with_window(known(kernel, False), self.question.model.window, longest, self.tune.attention)

    def _fastest(self, shared: bool) -> str:
        dtype, device, model = self.question.precision.weights, self.job.device, self.question.model
        kernel: str = device.attention(dtype, shared)
        ours = packed_attention.serves(device.torch_device, DTYPES[dtype], model.dim)
        return "packed" if kernel == "flash" and ours else kernel

    def _plan(self) -> list[Callable[[], Batch]]:
        """What to compute, batch by batch; the arrays themselves are made inside the pass."""
        rows, budget = self.job.inputs.rows, self.tune.batch_tokens
        part, parts = self.job.place.dp, self.job.plan.dp
        if self.question.division == "closed":
            bins = equal_bins([len(row) for row in rows], budget, self.tune.order, parts)
            mine = bins[part::parts]
            return [partial(closed_batch, rows, items) for items in mine[: self.job.steps]]
        shared = prefixes(rows, self.job.inputs.groups)
        self.cache_rows = max(shared, default=0)
        pieces = open_bins(rows, self.job.inputs.groups, budget, self.tune.order, parts)[part]
        following = [*pieces[1:], None]  # one too many on a rank that got nothing
        pairs = list(zip(pieces, following, strict=False))[: self.job.steps]
        return [partial(open_batch, rows, one, after, shared, self.cache_rows) for one, after in pairs]

    def prepare(self, name: str, part: Part) -> None:
        if self.model is None:
            with part("weights"):
                self.model, self.weights = self._load()
                if self.question.division == "open":
                    self.prefix = self.model.empty_prefix(self.cache_rows)
                self.job.device.synchronize()
        compiled = self.tune.compile and name != "val"  # which is the reference
        new = compiled and not self.compiled
        with part(f"{'compile' if new else 'warmup'}_{name}"), torch.inference_mode():
            if new:
                self.compiled = self._fast(self.model)
            self.blocks = self.compiled if compiled else None
            for batch in self.batches[: max(self.tune.warmup, int(compiled))]:
                self._answer(*self._to_device(batch()))
            self.job.device.synchronize()

    def _fast(self, model: Llama) -> list[Callable[..., Streams]]:
        if self.fp8:
            made = Fp8Kernels(fast=jit.serve(self.device))  # where none run, fp8 is emulated, and speed means nothing
            return [Fp8ScoreBlock(block, made) for block in model.layers]  # type: ignore[arg-type]
        if not jit.serve(self.device):
            return [torch.compile(block, dynamic=True) for block in model.layers]
        linears, kernels = Scoring(), BlockKernels(compiled=True)
        return [FusedBlock(block, linears, kernels) for block in model.layers]  # type: ignore[arg-type]

    def _load(self) -> tuple[Llama, dict[str, Any]]:
        question, group = self.question, self.job.group
        shape, dtype = load.shape_of(question.model), DTYPES[question.precision.weights]
        if self.device.type == "cpu" and group.share.count == 1:
            shape = GatesApart(**vars(shape))  # SiLU over blocks of eight numbers takes it five times as long
        given = (self.device, dtype, question.seed, self.job.weights, group.share, group.total, self.job.loading)
        model, source = build(shape, *given)
        if self.fp8:
            llama_fp8.check_sizes(model.shape)
            llama_fp8.keep_fp8(model)
        return model, source

    def total(self, name: str) -> int:
        return len(self.batches) + 1

    def work(self, name: str) -> Iterator[Phase | Work]:
        answers = self.answers[name] = Answers()
        with torch.inference_mode():
            for make in self.batches:
                yield Phase("data")
                batch, inputs = self._to_device(make())
                yield Phase("compute")
                answers.add(batch.items, self._answer(batch, inputs))
                yield Work(rows=batch.items, prefixes=batch.prefixes)
            yield Phase("score")
            answers.read()
            yield Work({})

    def _to_device(self, batch: Batch) -> tuple[Batch, Inputs]:
        to = self.device
        gather = None if batch.gather is None else send(batch.gather, to)
        rows = layout(batch.q_lens, batch.k_lens, to, gather)
        asked = self.reader.ask(batch.items, batch.pick, partial(send, device=to))
        return batch, (send(batch.tokens, to), send(batch.positions, to), rows, asked)

    def _answer(self, batch: Batch, inputs: Inputs) -> Tensor:
        if self.model is None:
            raise RuntimeError("work before prepare")
        tokens, positions, rows, asked = inputs
        keep = None if batch.keep is None else slice(*batch.keep)
        hidden = self.model.hidden(tokens, positions, rows, self.kernel, self.prefix, keep, self.blocks, asked.pick)
        return self.reader.answer(self.model.logits, hidden, asked, self.blocks is not None)

    def outputs(self, name: str) -> dict[str, Any]:
        return self.answers[name].table(self.reader)

    def details(self) -> dict[str, Any]:
        held = [] if self.model is None else [local(one) for one in self.model.parameters()]
        held += llama_fp8.kept(self.model) if self.fp8 and self.model is not None else []
        counts = {"parameters": sum(one.numel() for one in held), "dtypes": {"parameters": dtype_names(held)}}
        how = llama_fp8.details(self.device, learns=False) if self.fp8 else {}
        return {"attention": self.kernel, "batches": len(self.batches), **counts, **how}
