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

from steelyard.data.prompt_batches import PromptBatch
from steelyard.engine.job import Job
from steelyard.errors import RequestError
from steelyard.kernels import jit
from steelyard.models import llama_fp8
from steelyard.models.attention import (
    PackedLayout,
    PrefixCache,
    check_attention_kernel,
    choose_fastest_kernel,
    choose_windowed_kernel,
    make_packed_layout,
)
from steelyard.models.llama import BlockOutput, GateFirstShape, Llama
from steelyard.models.llama_fp8 import Fp8Kernels, Fp8ScoreBlock
from steelyard.models.llama_fused import BlockKernels, FusedBlock, ScoringLinears
from steelyard.models.tensors import DTYPES, get_local_tensor, send_array
from steelyard.scoring.batches import plan_packed_batches
from steelyard.scoring.loop import Scorer, ScoringLoop
from steelyard.weights import llama_weights
from steelyard.weights.llama_builder import build_llama_with_weights

Inputs = tuple[Tensor, Tensor, PackedLayout, slice | None]
Blocks = list[Callable[..., BlockOutput]]


class TorchScore(ScoringLoop):
    """The engine for both kinds of scoring work: the common scoring loop over packed batches with a
    `TorchScorer`.
    """

    def __init__(self, job: Job) -> None:
        batches = plan_packed_batches(job, "torch")
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
        self.kernel = choose_scoring_attention(job)
        self.blocks: Blocks | None = None
        self.compiled: Blocks | None = None
        self.prefix: list[PrefixCache] | None = None

    def load(self) -> dict[str, Any]:
        """Build the model's tensor-parallel shard with its weights and return their source, for the
        record. In fp8, weights are quantized here, and RequestError is raised for sizes that fp8
        cannot divide.
        """
        question, group = self.question, self.job.group
        shape, dtype = (
            llama_weights.get_llama_shape(question.model),
            DTYPES[question.precision.weights],
        )
        if self.device.type == "cpu" and group.share.count == 1:
            # a CPU takes five times as long for SiLU over chunks of eight numbers
            shape = GateFirstShape(**vars(shape))
        arguments = (
            self.device,
            dtype,
            question.seed,
            self.job.weights,
            group.share,
            group.total,
            self.job.report_loading,
        )
        self.model, weights_source = build_llama_with_weights(shape, *arguments)
        if self.fp8:
            llama_fp8.check_fp8_sizes(self.model.shape)
            llama_fp8.convert_to_fp8(self.model)
        if question.division == "open":
            self.prefix = self.model.make_empty_prefix(self.prefix_rows)
        return weights_source

    def use(self, compiled: bool) -> None:
        """Compute with fast blocks from now on (made at the first such call), or with the model's
        plain layers.
        """
        if compiled and self.compiled is None:
            self.compiled = self._make_fast_blocks()
        self.blocks = self.compiled if compiled else None

    def _make_fast_blocks(self) -> Blocks:
        """Return what computes each block fast: fp8 blocks, fused blocks if Triton runs here, else
        compiled layers.
        """
        layers: Any = self.model.layers
        if self.fp8:
            # where none run, fp8 is emulated, and speed means nothing
            fp8_kernels = Fp8Kernels(fast=jit.has_triton(self.device))
            return [Fp8ScoreBlock(block, fp8_kernels) for block in layers]
        if not jit.has_triton(self.device):
            return [torch.compile(block, dynamic=True) for block in layers]
        linears, kernels = ScoringLinears(), BlockKernels(compiled=True)
        return [FusedBlock(block, linears, kernels) for block in layers]

    def to_device(self, batch: PromptBatch) -> Inputs:
        """Copy a packed batch to the device without waiting and return (tokens, positions, layout
        of rows, slice of the tokens whose keys and values are to be cached, or None).
        """
        device = self.device
        gather = None if batch.gather is None else send_array(batch.gather, device)
        rows = make_packed_layout(batch.q_lens, batch.k_lens, device, gather)
        keep = None if batch.keep is None else slice(*batch.keep)
        return send_array(batch.tokens, device), send_array(batch.positions, device), rows, keep

    def hidden(self, inputs: Inputs, pick: Tensor) -> Tensor:
        """Return the last hidden states at the picked tokens; in division open the prefix cache is
        read, and written where the batch says so.
        """
        tokens, positions, rows, keep = inputs
        return self.model.run_layers(
            tokens, positions, rows, self.kernel, self.prefix, keep, self.blocks, pick
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states for this rank's share of the vocabulary."""
        return self.model.compute_logits(hidden)

    def tensors(self) -> list[Tensor]:
        """Return all weight tensors that this rank holds, with the fp8 ones."""
        weights = [get_local_tensor(parameter) for parameter in self.model.parameters()]
        return weights + (llama_fp8.list_fp8_values(self.model) if self.fp8 else [])

    def details(self) -> dict[str, Any]:
        """Return the attention kernel and, in fp8, how fp8 is computed."""
        fp8_details = llama_fp8.describe_fp8(self.device, trains=False) if self.fp8 else {}
        return {"attention": self.kernel, **fp8_details}


def choose_scoring_attention(job: Job) -> str:
    """Return the attention kernel that `tune.attention` names, or the fastest of this device for
    `auto`. Raises RequestError for an unknown kernel, cudnn in division open, and a kernel without
    a window if the model needs one.
    """
    question, tune = job.case.question, job.case.tune
    shares_prefixes = question.division == "open"
    kernel = tune.attention
    if kernel == "auto":
        kernel = choose_fastest_kernel(
            job.device, question.precision.weights, question.model.dim, shares_prefixes
        )
    if shares_prefixes and kernel == "cudnn":
        raise RequestError(
            "tune.attention='cudnn' has no shared prefixes; allowed in division open: auto, packed,"
            " flash, efficient, rows"
        )
    longest = max(map(len, job.inputs.rows), default=0)
    return choose_windowed_kernel(
        check_attention_kernel(kernel, False), question.model.window, longest, tune.attention
    )
