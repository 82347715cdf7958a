"""Engine `torch`, scoring: packed prompts through models/llama.py, with logits only where an answer
is read.

The val pass runs the layers as they are written. Other passes run them with a Triton kernel for
everything between matmuls or, where the device runs no Triton, compiled: one graph for all layers
and batch sizes. The loop is scoring/loop.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from steelyard.data.batches import Batch
from steelyard.engine.job import Job
from steelyard.errors import RequestError
from steelyard.kernels import jit
from steelyard.models import llama_fp8
from steelyard.models.attention import Layout, Prefix, fastest, known, layout, with_window
from steelyard.models.llama import GatesApart, Llama, Streams
from steelyard.models.llama_fp8 import Fp8Kernels, Fp8ScoreBlock
from steelyard.models.llama_fused import BlockKernels, FusedBlock, Scoring
from steelyard.models.tensors import DTYPES, local, send
from steelyard.scoring.batches import packed
from steelyard.scoring.loop import Scorer, ScoringLoop
from steelyard.weights import load
from steelyard.weights.model import build

Inputs = tuple[Tensor, Tensor, Layout, slice | None]
Blocks = list[Callable[..., Streams]]


class TorchScore(ScoringLoop):
    """The engine for both kinds of scoring work: the common scoring loop over packed batches with a
    `TorchScorer`.
    """

    def __init__(self, job: Job) -> None:
        batches = packed(job, "torch")
        super().__init__(job, TorchScorer(job, batches.prefix_rows), batches)


class TorchScorer(Scorer):
    """This package's Llama on one rank, as the scoring loop uses it. In division open it caches
    keys and values of a prefix of up to `prefix_rows` tokens.
    """

    compiles = True
    model: Llama

    def __init__(self, job: Job, prefix_rows: int) -> None:
        self.job, self.question, self.prefix_rows = job, job.case.question, prefix_rows
        self.device: torch.device = job.device.torch_device
        self.fp8 = self.question.precision.matmul == "fp8"
        self.kernel = choose_kernel(job)
        self.blocks: Blocks | None = None
        self.compiled: Blocks | None = None
        self.prefix: list[Prefix] | None = None

    def load(self) -> dict[str, Any]:
        """Build the model's tensor-parallel shard with its weights and return their source, for the
        record. In fp8, weights are quantized here, and RequestError is raised for sizes that fp8
        cannot divide.
        """
        question, group = self.question, self.job.group
        shape, dtype = load.shape_of(question.model), DTYPES[question.precision.weights]
        if self.device.type == "cpu" and group.share.count == 1:
            # a CPU takes five times as long for SiLU over chunks of eight numbers
            shape = GatesApart(**vars(shape))
        given = (
            self.device,
            dtype,
            question.seed,
            self.job.weights,
            group.share,
            group.total,
            self.job.loading,
        )
        self.model, source = build(shape, *given)
        if self.fp8:
            llama_fp8.check_sizes(self.model.shape)
            llama_fp8.keep_fp8(self.model)
        if question.division == "open":
            self.prefix = self.model.empty_prefix(self.prefix_rows)
        return source

    def use(self, compiled: bool) -> None:
        """Compute with fast blocks from now on (made at the first such call), or with the model's
        plain layers.
        """
        if compiled and self.compiled is None:
            self.compiled = self._fast_blocks()
        self.blocks = self.compiled if compiled else None

    def _fast_blocks(self) -> Blocks:
        """Return what computes each block fast: fp8 blocks, fused blocks if Triton runs here, else
        compiled layers.
        """
        layers: Any = self.model.layers
        if self.fp8:
            # where none run, fp8 is emulated, and speed means nothing
            made = Fp8Kernels(fast=jit.serve(self.device))
            return [Fp8ScoreBlock(block, made) for block in layers]
        if not jit.serve(self.device):
            return [torch.compile(block, dynamic=True) for block in layers]
        linears, kernels = Scoring(), BlockKernels(compiled=True)
        return [FusedBlock(block, linears, kernels) for block in layers]

    def to_device(self, batch: Batch) -> Inputs:
        """Copy a packed batch to the device without waiting and return (tokens, positions, layout
        of rows, slice of the tokens whose keys and values are to be cached, or None).
        """
        to = self.device
        gather = None if batch.gather is None else send(batch.gather, to)
        rows = layout(batch.q_lens, batch.k_lens, to, gather)
        keep = None if batch.keep is None else slice(*batch.keep)
        return send(batch.tokens, to), send(batch.positions, to), rows, keep

    def hidden(self, inputs: Inputs, pick: Tensor) -> Tensor:
        """Return the last hidden states at the picked tokens; in division open the prefix cache is
        read, and written where the batch says so.
        """
        tokens, positions, rows, keep = inputs
        return self.model.hidden(
            tokens, positions, rows, self.kernel, self.prefix, keep, self.blocks, pick
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states for this rank's share of the vocabulary."""
        return self.model.logits(hidden)

    def tensors(self) -> list[Tensor]:
        """Return all weight tensors that this rank holds, with the fp8 ones."""
        held = [local(one) for one in self.model.parameters()]
        return held + (llama_fp8.kept(self.model) if self.fp8 else [])

    def details(self) -> dict[str, Any]:
        """Return the attention kernel and, in fp8, how fp8 is computed."""
        how = llama_fp8.details(self.device, learns=False) if self.fp8 else {}
        return {"attention": self.kernel, **how}


def choose_kernel(job: Job) -> str:
    """Return the attention kernel that `tune.attention` names, or the fastest of this device for
    `auto`. Raises RequestError for an unknown kernel, cudnn in division open, and a kernel without
    a window if the model needs one.
    """
    question, tune = job.case.question, job.case.tune
    shared = question.division == "open"
    kernel = tune.attention
    if kernel == "auto":
        kernel = fastest(job.device, question.precision.weights, question.model.dim, shared)
    if shared and kernel == "cudnn":
        raise RequestError(
            "tune.attention='cudnn' has no shared prefixes; allowed in division open: auto, packed,"
            " flash, efficient, rows"
        )
    longest = max(map(len, job.inputs.rows), default=0)
    return with_window(known(kernel, False), question.model.window, longest, tune.attention)
