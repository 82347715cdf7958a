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
    """The engine `torch` for both kinds of scoring work: the common scoring loop over packed
    batches with a `TorchScorer`. Raises RequestError if `tune.batching` asks for padded batches, or
    for an attention kernel that cannot be used.
    """

    def __init__(self, job: Job) -> None:
        """Plan this replica's packed batches and choose the attention kernel; the model is loaded
        by `prepare`.
        """
        batches = plan_packed_batches(job, "torch")
        longest = max(map(len, job.inputs.rows), default=0)
        prefix_rows = batches.prefix_rows if job.case.question.division == "open" else None
        super().__init__(job, TorchScorer(job, prefix_rows, longest), batches)


class TorchScorer(Scorer):
    """This package's Llama on one rank, as the scoring loop uses it; a tensor-parallel rank holds a
    shard, and all ranks of the group compute together. `load` builds `model` with its weights,
    `use(compiled)` switches to fast blocks, `to_device`, `hidden` and `logits` (this rank's part of
    the vocabulary) compute a packed batch.

    In division open it caches keys and values of a prefix of up to `prefix_rows` tokens (`prefix`;
    None in division closed). `kernel` is the attention kernel; constructing it raises RequestError
    if that cannot be used.
    """

    compiles = True
    model: Llama

    def __init__(self, job: Job, prefix_rows: int | None, longest: int) -> None:
        """Store the job and choose the attention kernel (RequestError if it cannot be used); the
        model is built by `load`. `prefix_rows` is the length of the longest shared prefix in tokens
        (None: no prefix is cached), `longest` that of the longest text.
        """
        self.job, self.question, self.prefix_rows = job, job.case.question, prefix_rows
        self.device: torch.device = job.device.torch_device
        self.fp8 = self.question.precision.matmul == "fp8"
        self.kernel = choose_scoring_attention(job, prefix_rows is not None, longest)
        self.blocks: Blocks | None = None
        self.compiled: Blocks | None = None
        self.prefix: list[PrefixCache] | None = None

    def load(self) -> dict[str, Any]:
        """Build the scorer's model, this rank's tensor-parallel shard, with its weights, and return
        their source for the record; sets `model` and, in division open, an empty prefix cache.

        In fp8, weights are quantized here. Raises RequestError for a checkpoint that is not of this
        model, and for sizes that are no multiples of 16 in fp8. Without tensor parallelism a CPU
        has gate and up apart instead of in chunks, which is faster.
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
        if self.prefix_rows is not None:
            self.prefix = self.model.make_empty_prefix(self.prefix_rows)
        return weights_source

    def use(self, compiled: bool) -> None:
        """Compute with fast blocks from now on if `compiled` (they are made at the first such call
        and kept), else with the model's plain layers.
        """
        if compiled and self.compiled is None:
            self.compiled = self._make_fast_blocks()
        self.blocks = self.compiled if compiled else None

    def _make_fast_blocks(self) -> Blocks:
        """Return what computes each block fast: fp8 blocks in fp8 (with Triton kernels where they
        run), fused blocks if Triton runs here, else each layer under torch.compile with dynamic
        sizes.
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
        """Copy a packed batch of prompts to the device without waiting and return (tokens,
        positions, layout of rows, slice of the tokens whose keys and values are to be cached, or
        None).
        """
        device = self.device
        gather = None if batch.gather is None else send_array(batch.gather, device)
        rows = make_packed_layout(batch.q_lens, batch.k_lens, device, gather)
        keep = None if batch.keep is None else slice(*batch.keep)
        return send_array(batch.tokens, device), send_array(batch.positions, device), rows, keep

    def hidden(self, inputs: Inputs, pick: Tensor) -> Tensor:
        """Return the residual stream after the last block, before the final norm, at the tokens
        whose indices are in `pick`: [picked, hidden]. In division open the prefix cache is read,
        and written in place where the batch says so. `inputs` are what `to_device` returned.
        """
        tokens, positions, rows, keep = inputs
        return self.model.run_layers(
            tokens, positions, rows, self.kernel, self.prefix, keep, self.blocks, pick
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, after the final norm, for this rank's share of the
        vocabulary.
        """
        return self.model.compute_logits(hidden)

    def tensors(self) -> list[Tensor]:
        """Return all weights of the scorer's model that this rank holds, with the fp8 ones."""
        weights = [get_local_tensor(parameter) for parameter in self.model.parameters()]
        return weights + (llama_fp8.list_fp8_values(self.model) if self.fp8 else [])

    def details(self) -> dict[str, Any]:
        """Return the attention kernel as `attention` and, in fp8, how it is computed as `fp8`, for
        the record.
        """
        fp8_details = llama_fp8.describe_fp8(self.device, trains=False) if self.fp8 else {}
        return {"attention": self.kernel, **fp8_details}


def choose_scoring_attention(job: Job, shares_prefixes: bool, longest: int) -> str:
    """Return the attention kernel that `tune.attention` names, or the fastest of this device for
    `auto` (`rows` if that one has no window, and the longest text, of `longest` tokens, is longer
    than the model's window).

    Raises RequestError for an unknown kernel, cudnn in division open, and a named kernel without a
    window if one is needed.
    """
    question, tune = job.case.question, job.case.tune
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
    return choose_windowed_kernel(
        check_attention_kernel(kernel, False), question.model.window, longest, tune.attention
    )
