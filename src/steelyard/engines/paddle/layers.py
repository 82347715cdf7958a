"""A Llama in Paddle's own layers: whole on one device, or one pipeline stage with fleet's
tensor-parallel layers.

Tokens are packed: a micro-batch is one long row of tokens whose segments do not see each other.
Parameters have the names that they have in models/llama.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import paddle
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet import meta_parallel
from paddle.nn import functional as F

from steelyard.engines.paddle.paddle_batches import PaddleMicroBatch
from steelyard.engines.paddle.paddle_kernels import PaddleKernels
from steelyard.models.shapes import LlamaModel
from steelyard.plan.degrees import divide_layers

Tensor = Any
IGNORED = -100


class PaddleRMSNorm(nn.Layer):  # type: ignore[misc]
    """RMSNorm over the last dimension by `kernels.rms_norm`: x / rms(x) * weight, with the model's
    `norm_eps`. Its `weight` [hidden] begins as 1; every tensor-parallel rank has all of it.
    """

    def __init__(self, model: LlamaModel, kernels: PaddleKernels) -> None:
        super().__init__()
        self.weight = self.create_parameter(
            [model.hidden], default_initializer=nn.initializer.Constant(1.0)
        )
        self.eps, self.kernels = model.norm_eps, kernels

    def forward(self, x: Tensor) -> Tensor:
        """Return x / rms(x) * weight over the last dimension, of the shape of x."""
        return self.kernels.rms_norm(x, self.weight, self.eps)


def column_parallel_linear(tp: int, inputs: int, outputs: int, bias: bool = False) -> Any:
    """Return a column-parallel linear layer of fleet: each tensor-parallel rank has a part of the
    outputs, which are not gathered. With `tp` 1 it is Paddle's plain one. `inputs` and `outputs`
    are whole sizes; needs initialized fleet if `tp` is above 1.
    """
    if tp == 1:
        return nn.Linear(inputs, outputs, bias_attr=None if bias else False)
    return meta_parallel.ColumnParallelLinear(inputs, outputs, has_bias=bias, gather_output=False)


def row_parallel_linear(tp: int, inputs: int, outputs: int) -> Any:
    """Return a row-parallel linear layer of fleet without bias: each tensor-parallel rank takes its
    part of the inputs, and outputs are summed over the group. With `tp` 1 it is Paddle's plain one.
    `inputs` and `outputs` are whole sizes; needs initialized fleet if `tp` is above 1.
    """
    if tp == 1:
        return nn.Linear(inputs, outputs, bias_attr=False)
    return meta_parallel.RowParallelLinear(inputs, outputs, has_bias=False, input_is_parallel=True)


class PaddleBlock(nn.Layer):  # type: ignore[misc]
    """A Llama transformer block in Paddle: causal attention and SwiGLU FFN, each after an RMSNorm
    and added to the residual stream. Its layers are `attention_norm`, `qkv`, `out`, `ffn_norm`,
    `gate_up` and `down`. With `tp` above 1 its linear layers are fleet's, and a rank has a part of
    the heads and of the FFN. QKV outputs lie by key group: its queries, its key, its value.
    `forward` takes and returns [tokens, hidden].
    """

    def __init__(self, model: LlamaModel, tp: int, kernels: PaddleKernels) -> None:
        """Create the layers with Paddle's own initial values, which are overwritten later. `tp`
        above 1 needs initialized fleet; sizes of `model` are whole ones.
        """
        super().__init__()
        self.dim, self.queries_per_group, self.kernels = (
            model.hidden // model.heads,
            model.heads // model.kv_heads,
            kernels,
        )
        self.attention_norm = PaddleRMSNorm(model, kernels)
        self.qkv = column_parallel_linear(
            tp, model.hidden, (model.heads + 2 * model.kv_heads) * self.dim, model.qkv_bias
        )
        self.out = row_parallel_linear(tp, model.hidden, model.hidden)
        self.ffn_norm = PaddleRMSNorm(model, kernels)
        self.gate_up = column_parallel_linear(tp, model.hidden, 2 * model.ffn)
        self.down = row_parallel_linear(tp, model.ffn, model.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, micro: PaddleMicroBatch) -> Tensor:
        """Return the residual stream [tokens, hidden] after this transformer block; `x` is that
        before it, of the same shape. `cos` and `sin` are those of `rotary_angles`; `micro` says
        which tokens see each other.
        """
        tokens = x.shape[0]
        grouped = self.qkv(self.attention_norm(x)).reshape(
            [tokens, -1, self.queries_per_group + 2, self.dim]
        )
        q = apply_rotary(
            grouped[:, :, : self.queries_per_group].reshape([tokens, -1, self.dim]), cos, sin
        )
        k = apply_rotary(grouped[:, :, self.queries_per_group], cos, sin)
        attended = self.kernels.attend(q, k, grouped[:, :, self.queries_per_group + 1], micro)
        x = x + self.out(attended.reshape([tokens, -1]))
        return x + self.down(F.swiglu(self.gate_up(self.ffn_norm(x))))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [tokens, heads, D] with the rotary embedding applied, in the half-split convention
    of Hugging Face checkpoints: dimension i is rotated with i + D/2. `cos` and `sin` are [tokens,
    1, D/2].
    """
    a, b = x.chunk(2, axis=-1)
    return paddle.concat([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rotary_angles(positions: Tensor, model: LlamaModel, dtype: Any) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of every token's rotary angles, [tokens, 1, D/2] each, computed in fp32 and
    cast to `dtype`. `positions` [tokens] are counted in each segment; only `rope_base` is used, no
    scaling.
    """
    dim = model.hidden // model.heads
    with paddle.amp.auto_cast(False):
        steps = paddle.arange(0, dim, 2, dtype="int64").astype("float32") / dim
        angles = positions.astype("float32").unsqueeze(1) * (1.0 / model.rope_base**steps)
        return angles.cos().unsqueeze(1).astype(dtype), angles.sin().unsqueeze(1).astype(dtype)


class PaddleStage(nn.Layer):  # type: ignore[misc]
    """Pipeline stage `index` of `count` of a Llama; with count 1 the whole model. `embed` is on the
    first stage, `layers` are its blocks by their number in the model, `norm` and `output` (none if
    tied) on the last. `forward` returns the residual stream, on the last stage the micro-batch's
    summed loss.

    The trainer puts the micro-batches of a step into `micros`, and each forward removes the first:
    stages send each other only the residual stream. `level` is Paddle's level of mixed precision
    (`O2`), None without; `recompute`: blocks are computed again in the backward pass;
    `logits_dtype` is that of the last micro-batch's logits, None on stages without logits.
    """

    def __init__(
        self,
        model: LlamaModel,
        index: int,
        count: int,
        tp: int,
        kernels: PaddleKernels,
        recompute: bool,
        level: str | None,
    ) -> None:
        """Create the layers of stage `index` (from 0) of `count`, with Paddle's own initial values,
        which are overwritten later; the class describes the arguments. `tp` above 1 needs
        initialized fleet.
        """
        super().__init__()
        self.model, self.recompute, self.level, self.kernels = model, recompute, level, kernels
        self.first, self.last, self.tied = index == 0, index == count - 1, model.tied
        if self.first:
            make = nn.Embedding if tp == 1 else meta_parallel.VocabParallelEmbedding
            self.embed = make(model.vocab, model.hidden)
        layer_numbers = divide_layers(model.layers, count)[index]
        self.layers = nn.LayerDict({str(i): PaddleBlock(model, tp, kernels) for i in layer_numbers})
        if self.last:
            self.norm = PaddleRMSNorm(model, kernels)
            if not self.tied:
                self.output = column_parallel_linear(tp, model.hidden, model.vocab)
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = (
            _cross_entropy if tp == 1 else meta_parallel.ParallelCrossEntropy(ignore_index=IGNORED)
        )
        self.logits_dtype: str | None = None  # of the last micro-batch; the trainer checks it
        self.micros: list[PaddleMicroBatch] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream [tokens, hidden] after this pipeline stage; on the last stage
        the summed cross-entropy of the micro-batch, in fp32. Removes the first micro-batch from
        `micros`. On the first stage `x` is not read.
        """
        micro = self.micros.pop(0)
        with self._mixed_precision():
            return self._compute(x, micro)

    def _mixed_precision(self) -> AbstractContextManager[Any]:
        """Return Paddle's auto_cast context for a stage's forward pass, or one that does nothing if
        `level` is None. It is put around the model alone: it would also make 16 bit what is
        computed with the loss later.
        """
        if self.level is None:
            return nullcontext()
        context: AbstractContextManager[Any] = paddle.amp.auto_cast(
            level=self.level, dtype=self.kernels.dtype
        )
        return context

    def _compute(self, x: Tensor, micro: PaddleMicroBatch) -> Tensor:
        """Run this stage on a micro-batch: embedding (first stage), its blocks, each recomputed in
        the backward pass if `recompute`, and the loss (last stage). Returns the residual stream
        [tokens, hidden], or on the last stage the summed cross-entropy.
        """
        if self.first:
            x = self.embed(micro.tokens)
        cos, sin = rotary_angles(micro.positions, self.model, x.dtype)
        for block in self.layers.values():
            x = (
                self._run_recomputed(block, x, cos, sin, micro)
                if self.recompute
                else block(x, cos, sin, micro)
            )
        return self._loss(x, micro) if self.last else x

    @staticmethod
    def _run_recomputed(block: PaddleBlock, *inputs: Any) -> Tensor:
        """Run a transformer block on `inputs` and return its output, saving only the inputs: the
        backward pass computes it again. No random state is saved, because nothing is drawn.
        """
        return fleet.utils.recompute(block, *inputs, preserve_rng_state=False)

    def _loss(self, x: Tensor, micro: PaddleMicroBatch) -> Tensor:
        """Return the summed cross-entropy at the picked tokens, computed in fp32; targets that are
        IGNORED count 0. Logits come from the embedding's weights in a tied model. Stores the
        logits' dtype in `logits_dtype`.
        """
        hidden = self.norm(x.index_select(micro.pick))
        logits = (
            paddle.matmul(hidden, self.embed.weight, transpose_y=True)
            if self.tied
            else self.output(hidden)
        )
        self.logits_dtype = logits.dtype.name.lower()
        with paddle.amp.auto_cast(False):
            return self.cross_entropy(logits.astype("float32"), micro.targets.unsqueeze(1)).sum()


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each target in nats, unreduced, from logits [targets, vocab] and
    targets [targets, 1]; 0 where the target is IGNORED.
    """
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
