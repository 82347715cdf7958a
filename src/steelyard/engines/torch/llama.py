"""A Llama as engine `torch` trains it under every plan: this rank's pipeline stage and
tensor-parallel shard, its forward pass and its loss.

Blocks are fused (models/llama_fused.py) and run over packed rows. Logits stay in the precision of
the matmuls; the compiled loss reads them as fp32 inside its kernel, so no fp32 copy of them ever
exists. train.py makes a `LlamaStage` and gives it to the trainer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from steelyard.engine.job import Job
from steelyard.engines.torch.exchange import Groups
from steelyard.engines.torch.sharded_weights import local_parameters
from steelyard.engines.torch.shards import Held, Replicas, Unit
from steelyard.engines.torch.tokens import (
    DividedLosses,
    Embed,
    GatherTokens,
    LossCode,
    Pick,
    TokenLinears,
    apply,
)
from steelyard.models import llama_fp8, placements
from steelyard.models.llama import Block, LlamaShape, Streams, rotary
from steelyard.models.llama_fused import (
    Accumulating,
    AddNorm,
    BlockKernels,
    FusedBlock,
    Gradient,
    Linears,
)
from steelyard.models.placements import Shard
from steelyard.models.tensors import DTYPES, compute_dtype
from steelyard.plan.degrees import stage_layers
from steelyard.training.checkpoint_files import part
from steelyard.training.micro_batches import MicroBatch
from steelyard.training.placement import Model
from steelyard.weights import load

# Selective recomputation saves the results of matmuls and attention, and recomputes all else.
KEPT_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._efficient_attention_forward.default,
}


def recomputed(block: Callable[..., Streams], how: str) -> Callable[..., Streams]:
    """Return a function that computes the same as `block` and recomputes its activations in the
    backward pass.

    `mode` is `tune.recompute`: `none` returns the block itself; `full` keeps only its inputs; any
    other value means selective, which also keeps results of matmuls and attention.
    """
    if how == "none":
        return block

    def selective() -> Any:
        """Return the contexts of torch's selective checkpointing with `_save_policy`."""
        return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]

    def run(*arguments: Any) -> Streams:
        """Run the block under torch's non-reentrant checkpoint."""
        if how == "full":
            out: Streams = checkpoint(block, *arguments, use_reentrant=False)
        else:
            out = checkpoint(block, *arguments, use_reentrant=False, context_fn=selective)
        return out

    return run


def _policy(context: Any, op: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    """Say for torch's selective checkpointing whether the result of `op` is saved: that of the
    operations in `SAVED_OPS` is, all others are recomputed.
    """
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE


class Stage(nn.Module):
    """The parameters of pipeline stage `index` of `count` of a Llama, for one tensor-parallel
    shard: the embedding on the first stage, blocks, norm and output on the last.

    Parameter names are those of models/llama.py, with the block's number in the whole model. It has
    no forward; `LlamaStage` computes with it. A shard of a small vocabulary may have no rows.
    """

    def __init__(self, shape: LlamaShape, index: int, count: int, share: Shard) -> None:
        super().__init__()
        local = placements.local(shape, share)
        self.shape, self.share = shape, share
        self.first, self.last = index == 0, index == count - 1
        begin, end = placements.box("embed.weight", shape, share)[0]
        self.first_token = begin  # of those whose rows of the tables are here
        make: Any = skip_init  # there may be no row
        if self.first:
            self.embed: nn.Embedding = make(nn.Embedding, end - begin, shape.hidden, device="meta")
        self.layers = nn.ModuleDict(
            {str(i): Block(local) for i in stage_layers(shape.layers, count)[index]}
        )
        if self.last:
            self.norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
            self.output: nn.Linear = make(
                nn.Linear, shape.hidden, end - begin, bias=False, device="meta"
            )
        self.tie()

    def tie(self) -> None:
        """Make the output use the embedding's parameter if the shape is tied and both are on this
        stage.
        """
        if self.shape.tied and self.first and self.last:
            self.output.weight = self.embed.weight


class StageLlama(Model):
    """A pipeline stage of one tensor-parallel shard of a Llama, ready to be trained: forward pass
    and loss, with parameters sharded among replicas at level `sharding` (0 to 3, see shards.py).
    """

    def __init__(self, job: Job, kernel: str, groups: Groups, sharding: int) -> None:
        self.job, self.kernel, self.groups, self.sharding = job, kernel, groups, sharding
        precision = job.case.question.precision
        self.kept, self.compute = DTYPES[precision.weights], compute_dtype(precision.matmul)
        self.fp8 = precision.matmul == "fp8"
        self.shape = load.shape_of(job.case.question.model)
        self.share = Shard(groups.tensor.rank, groups.tensor.size)

    def build(self) -> list[Tensor] | None:
        """Make the stage on the device, fill in the weights parameter by parameter, and shard them.

        Returns this rank's shards of the master weights if these have another precision than the
        computation, else None. Sets `weights`, the source of the weights for the record.
        """
        plan, place = self.job.plan, self.job.place
        with torch.device("meta"):
            self.module = Stage(self.shape, place.pp, plan.pp, self.share).train()
        place_in = Shard(self.groups.shards.rank, self.groups.shards.size)
        held: dict[str, Held] = {}
        self.weights, values = local_parameters(
            self.module, self.job, self.shape, self.share, self.kept
        )
        for name, value in values:
            shared = placements.placement(name).split is None
            held[name] = Held(name, value, self._read_in(name), self.sharding, place_in, shared)
            owner, _, leaf = name.rpartition(".")
            setattr(self.module.get_submodule(owner), leaf, held[name].parameter)
        self.module.tie()
        self.replicas = Replicas(self._units(held), self.sharding, self.groups)
        return [one.master for one in self.replicas.held] if self.compute != self.kept else None

    def _read_in(self, name: str) -> torch.dtype:
        """Return the dtype in which a parameter is held for the computation. A matrix of fp8
        training that is not sharded stays in the stored precision: fp8 is made directly from it,
        without a 16-bit copy.
        """
        made = self.fp8 and llama_fp8.is_matrix(name) and self.groups.shards.size == 1
        return self.kept if made else self.compute

    def _units(self, held: dict[str, Held]) -> list[Unit]:
        """Return the exchange units of this stage in the order of the forward pass: embedding, each
        block, norm with output.
        """
        units = [Unit([held["embed.weight"]], again=False)] if self.module.first else []
        for number in self.module.layers:
            units.append(
                Unit([one for name, one in held.items() if name.startswith(f"layers.{number}.")])
            )
        if self.module.last:
            units.append(
                Unit([held[name] for name in ("norm.weight", "output.weight") if name in held])
            )
        return units

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Return (name, this rank's shard) of every parameter; a shard is a range of rows and may
        be empty.
        """
        return [(one.name, one.shard) for one in self.replicas.held]

    def stored(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the optimizer's tensors as parts of the whole model's tensors, for checkpoints.
        Keys of `state` are `kind.parameter-name`.
        """
        boxes = {one.name: self._box(one) for one in self.replicas.held}
        return {key: part(tensor, *boxes[key.partition(".")[2]]) for key, tensor in state.items()}

    def _box(self, held: Held) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of a parameter in the whole model, and the offset in it at which this
        rank's rows begin.
        """
        row = placements.placement(held.name)
        whole = placements.flat_shape(held.name, row.logical_shape(self.shape))
        offset = [0] * len(whole)
        dim = placements.flat_split(held.name)
        if dim is not None:
            offset[dim] = (
                self.module.first_token
                if held.name in placements.VOCABULARY
                else self.share.index * held.size[dim]
            )
        offset[0] += held.begin
        return whole, tuple(offset)

    def compile(self, gradient: Gradient) -> None:
        """Choose what computes the blocks and the loss: fused, fp8 or tensor-parallel matmuls,
        recomputation, compiled kernels. Raises RequestError if fp8 cannot divide the sizes.

        `gradient` is not used: gradients are accumulated in the replicas' buffers, since the
        optimizer has only this rank's shards.
        """
        tune, module = self.job.case.tune, self.module
        self.linears, self.kernels = (
            Accumulating(self.replicas.gradient),
            BlockKernels(tune.compile),
        )
        self.code = LossCode(tune.compile)
        self.blocks = [
            recomputed(block, tune.recompute) for block in self._fused(list(module.layers.values()))
        ]

    def _fused(self, blocks: list[Any]) -> list[Callable[..., Streams]]:
        """Return what computes each block: fp8 blocks, or fused blocks with the matmuls of this
        precision. With tensor parallelism the matmuls also gather and scatter tokens.
        """
        linears: Linears = self.linears
        if self.fp8:
            llama_fp8.check_sizes(blocks[0].shape)
            kernels = llama_fp8.Fp8Kernels(self.job.case.tune.compile)
            code = llama_fp8.Learning(self.replicas.gradient, kernels, kept=self.sharding < 3)
            if self.share.count == 1:
                return [llama_fp8.Fp8Block(block, code) for block in blocks]
            linears = llama_fp8.Fp8Linears(code)
        if self.share.count > 1:
            columns = [
                layer
                for block in blocks
                for name, layer in block.named_children()
                if name in placements.GATHERED
            ]
            linears = TokenLinears(linears, self.groups.tensor, columns)
        return [FusedBlock(block, linears, self.kernels) for block in blocks]

    def forward(self, x: Tensor | None, micro: MicroBatch) -> Tensor:
        """Return the residual stream after this stage, [tokens of this rank, hidden]; on the last
        stage, the summed cross-entropy of the micro-batch. `x` is the residual stream of the stage
        before, None on the first stage.
        """
        x = self._embed(micro) if x is None else x
        cos, sin = rotary(micro.positions, self.shape, x.dtype)
        delta = torch.zeros_like(x)
        skip = int(self.module.first)
        for i, block in enumerate(self.blocks):

            def run(
                x: Tensor, delta: Tensor, block: Callable[..., Streams] = block
            ) -> tuple[Tensor, ...]:
                """Run one block on the residual stream and its pending addend, and return both."""
                return block(x, delta, cos, sin, micro.rows, self.kernel, None)[:2]

            x, delta = self.replicas.around(skip + i, run, x, delta)
        if not self.module.last:
            return x + delta
        [loss] = self.replicas.around(
            skip + len(self.blocks), lambda x, delta: (self._loss(x, delta, micro),), x, delta
        )
        return loss

    def _embed(self, micro: MicroBatch) -> Tensor:
        """Return the embeddings of the micro-batch's tokens; with tensor parallelism, those of this
        rank's part of the tokens.
        """

        def done() -> None:
            """Exchange the embedding's gradient; its backward pass is the last of the stage."""
            self.replicas.finish(0)

        table = self.module.embed.weight
        with self.replicas.weights(0):
            return apply(
                Embed,
                table,
                micro.tokens,
                self.module.first_token,
                self.replicas.gradient,
                self.groups.tensor,
                done,
            )

    def _loss(self, x: Tensor, delta: Tensor, micro: MicroBatch) -> Tensor:
        """Return the summed cross-entropy of the micro-batch's targets, from the residual stream
        and its pending addend. Logits are computed at the picked tokens alone.
        """
        module, tensor = self.module, self.groups.tensor
        normed: Tensor = AddNorm.apply(
            x, delta, module.norm.weight, self.shape.norm_eps, self.kernels
        )[1]  # type: ignore[no-untyped-call]
        if tensor.size > 1:
            normed = apply(GatherTokens, normed, tensor)
        logits = self.linears.linear(apply(Pick, normed, micro.pick), module.output)
        if tensor.size > 1:
            losses = apply(
                DividedLosses, logits, micro.targets, module.first_token, tensor, self.code
            )
        else:
            losses = self.code.losses(logits, micro.targets)
        return losses.sum()

    def loss(self, micro: MicroBatch) -> Tensor:
        """Return the summed cross-entropy of a micro-batch, in nats; only for a pipeline of one
        stage.
        """
        return self.forward(None, micro)

    def details(self) -> dict[str, Any]:
        """Return the attention kernel, the kind of block and, if there are several ranks,
        `exchanged`: units are what ranks hold whole at a time, which the prediction of memory
        reads.
        """
        several = (
            {"exchanged": "units"} if self.job.world > 1 or self.job.case.tune.distributed else {}
        )
        forced = {"distributed": True} if self.job.case.tune.distributed else {}
        made = llama_fp8.details(self.job.device.torch_device) if self.fp8 else {}
        return {"attention": self.kernel, "block": "fused", **several, **forced, **made}
