"""A Llama as engine `torch` trains it under every plan: this rank's pipeline stage and
tensor-parallel shard, its forward pass and its loss.

Blocks are fused (models/llama_fused.py) and run over packed rows. Logits stay in the precision of
the matmuls; the compiled loss reads them as fp32 inside its kernel, so no fp32 copy of them ever
exists. train.py makes a `LlamaStage` and gives it to the trainer.
"""

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from steelyard.engine.job import Job
from steelyard.engines.torch.collectives import PlanGroups
from steelyard.engines.torch.sequence_parallel import (
    ColumnParallelLosses,
    EmbedTokens,
    GatherTokens,
    LossFunctions,
    PickRows,
    TokenParallelLinears,
    apply_function,
)
from steelyard.engines.torch.sharded_weights import load_shards
from steelyard.engines.torch.shards import (
    ExchangeUnit,
    ReplicaExchange,
    ShardedParameter,
    ShardingLevel,
)
from steelyard.models import llama_fp8, llama_placements
from steelyard.models.llama import BlockOutput, LlamaBlock, LlamaShape, compute_rotary_cos_sin
from steelyard.models.llama_fused import (
    AccumulatingLinears,
    AddNorm,
    BlockKernels,
    BlockLinears,
    FusedBlock,
    GradientOf,
)
from steelyard.models.llama_placements import Shard
from steelyard.models.tensors import DTYPES, get_compute_dtype
from steelyard.plan.degrees import divide_layers
from steelyard.plan.memory import RecomputeMode
from steelyard.training.checkpoint_storage import make_partial_tensor
from steelyard.training.micro_batches import MicroBatch
from steelyard.training.placement import TrainableModel
from steelyard.weights import llama_weights

# Selective recomputation saves the results of matmuls and attention, and recomputes all else.
SAVED_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._efficient_attention_forward.default,
}


def recompute_block(
    block: Callable[..., BlockOutput], mode: RecomputeMode
) -> Callable[..., BlockOutput]:
    """Return a function that computes the same as `block` and recomputes its activations in the
    backward pass.

    `mode` is `tune.recompute`: `none` returns the block itself; `full` saves only its inputs;
    `selective` also saves results of matmuls and attention (`SAVED_OPS`). Raises ValueError for
    another mode.
    """
    if mode not in get_args(RecomputeMode):
        raise ValueError(f"recompute {mode!r}; allowed: {', '.join(get_args(RecomputeMode))}")
    if mode == "none":
        return block

    def selective_contexts() -> Any:
        """Return the contexts of torch's selective checkpointing with `_save_policy`."""
        return create_selective_checkpoint_contexts(_save_policy)  # type: ignore[no-untyped-call]

    def run_checkpointed(*arguments: Any) -> BlockOutput:
        """Run the block under torch's non-reentrant checkpoint, selective unless `mode` is `full`,
        and return its output.
        """
        if mode == "full":
            out: BlockOutput = checkpoint(block, *arguments, use_reentrant=False)
        else:
            out = checkpoint(block, *arguments, use_reentrant=False, context_fn=selective_contexts)
        return out

    return run_checkpointed


def _save_policy(context: Any, op: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    """Say for torch's selective checkpointing whether the result of `op` is saved: that of the
    operations in `SAVED_OPS` is, all others are recomputed.
    """
    return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


class LlamaStageParameters(nn.Module):
    """The parameters of pipeline stage `index` of `count` of a Llama, for one tensor-parallel
    shard, without values: `embed` on the first stage, `layers` (blocks by number), `norm` and
    `output` on the last.

    Parameter names are those of models/llama.py, with the block's number in the whole model. It has
    no forward; `LlamaStage` computes with it. `first_token` is the first token of this shard's part
    of the vocabulary, which may have no rows.
    """

    def __init__(self, shape: LlamaShape, index: int, count: int, shard: Shard) -> None:
        """Create the modules of stage `index` of `count`: `embed` only on the first, `norm` and
        `output` only on the last; tie the output if the shape says so. Call it under
        `torch.device("meta")`, so that nothing is allocated.
        """
        super().__init__()
        local = llama_placements.make_shard_shape(shape, shard)
        self.shape, self.shard = shape, shard
        self.first, self.last = index == 0, index == count - 1
        begin, end = llama_placements.find_shard_box("embed.weight", shape, shard)[0]
        self.first_token = begin  # of those whose rows of the tables are here
        make_uninitialized: Any = skip_init  # there may be no row
        if self.first:
            self.embed: nn.Embedding = make_uninitialized(
                nn.Embedding, end - begin, shape.hidden, device="meta"
            )
        self.layers = nn.ModuleDict(
            {str(i): LlamaBlock(local) for i in divide_layers(shape.layers, count)[index]}
        )
        if self.last:
            self.norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
            self.output: nn.Linear = make_uninitialized(
                nn.Linear, shape.hidden, end - begin, bias=False, device="meta"
            )
        self.tie()

    def tie(self) -> None:
        """Make the stage's output use the embedding's parameter if the shape is tied and both are
        on this stage; otherwise do nothing.
        """
        if self.shape.tied and self.first and self.last:
            self.output.weight = self.embed.weight


class LlamaStage(TrainableModel):
    """The model that the trainer of engine `torch` trains: this rank's pipeline stage of one
    tensor-parallel shard of a Llama, with parameters sharded among replicas at level `sharding` (0
    to 3, see shards.py).

    `build` makes `module` (`LlamaStageParameters`) and `exchange` (`ReplicaExchange`) with the
    weights, `compile` chooses what computes, `forward` runs the stage, and on the last stage
    returns the micro-batch's summed cross-entropy in nats; `loss` is that of a pipeline of one
    stage. `as_model_parts` is for checkpoints. `kernel` is the name of the attention kernel.
    """

    def __init__(self, job: Job, kernel: str, groups: PlanGroups, sharding: ShardingLevel) -> None:
        """Store the settings of this rank's stage: attention `kernel`, process groups, level of
        `sharding`, dtypes and shape from the case. Nothing is allocated before `build`.
        """
        self.job, self.kernel, self.groups, self.sharding = job, kernel, groups, sharding
        precision = job.case.question.precision
        self.master_dtype, self.matmul_dtype = (
            DTYPES[precision.weights],
            get_compute_dtype(precision.matmul),
        )
        self.fp8 = precision.matmul == "fp8"
        self.shape = llama_weights.get_llama_shape(job.case.question.model)
        self.shard = Shard(groups.tensor.rank, groups.tensor.size)

    def build(self) -> list[Tensor] | None:
        """Make this rank's stage on the device, fill in the weights parameter by parameter, and
        shard them. Sets `module`, `exchange` and `weights`, the source of the weights for the
        record.

        Returns this rank's shards of the master weights if these have another precision than the
        computation, else None. Raises RequestError if the checkpoint is not of this model.
        """
        plan, place = self.job.plan, self.job.place
        with torch.device("meta"):
            self.module = LlamaStageParameters(self.shape, place.pp, plan.pp, self.shard).train()
        shard = Shard(self.groups.shards.rank, self.groups.shards.size)
        sharded: dict[str, ShardedParameter] = {}
        self.weights, values = load_shards(
            self.module, self.job, self.shape, self.shard, self.master_dtype
        )
        for name, value in values:
            shared = llama_placements.find_placement(name).split is None
            sharded[name] = ShardedParameter(
                name, value, self._held_dtype(name), self.sharding, shard, shared
            )
            owner, _, leaf = name.rpartition(".")
            setattr(self.module.get_submodule(owner), leaf, sharded[name].parameter)
        self.module.tie()
        self.exchange = ReplicaExchange(self._make_units(sharded), self.sharding, self.groups)
        return (
            [parameter.master for parameter in self.exchange.parameters]
            if self.matmul_dtype != self.master_dtype
            else None
        )

    def _held_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a parameter of the stage is held for the computation: that of
        the matmuls, except that a matrix of fp8 training stays in the stored precision if replicas
        do not shard it: fp8 is made directly from it, without a 16-bit copy.
        """
        becomes_fp8 = self.fp8 and llama_fp8.is_fp8_matrix(name) and self.groups.shards.size == 1
        return self.master_dtype if becomes_fp8 else self.matmul_dtype

    def _make_units(self, parameters: dict[str, ShardedParameter]) -> list[ExchangeUnit]:
        """Return the exchange units of this stage in the order of the forward pass: the embedding
        on the first stage, each block, norm with output on the last. `parameters` are by name; an
        output tied to the embedding is in that unit only.
        """
        units = (
            [ExchangeUnit([parameters["embed.weight"]], backward_reads=False)]
            if self.module.first
            else []
        )
        for number in self.module.layers:
            units.append(
                ExchangeUnit(
                    [
                        parameter
                        for name, parameter in parameters.items()
                        if name.startswith(f"layers.{number}.")
                    ]
                )
            )
        if self.module.last:
            units.append(
                ExchangeUnit(
                    [
                        parameters[name]
                        for name in ("norm.weight", "output.weight")
                        if name in parameters
                    ]
                )
            )
        return units

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Return (name, this rank's shard) of every parameter of the stage; a shard is a range of
        rows, in the dtype that the stage holds them in, and may be empty.
        """
        return [(parameter.name, parameter.shard) for parameter in self.exchange.parameters]

    def as_model_parts(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the optimizer's tensors of this stage under the same keys as `PartialTensor`s,
        which know shape and offset in the whole model's tensor and share memory with them, for
        checkpoints. Keys of `state` are `kind.parameter-name`.
        """
        boxes = {
            parameter.name: self._shape_and_offset(parameter)
            for parameter in self.exchange.parameters
        }
        return {
            key: make_partial_tensor(tensor, *boxes[key.partition(".")[2]])
            for key, tensor in state.items()
        }

    def _shape_and_offset(
        self, parameter: ShardedParameter
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of a parameter of the stage in the whole model, and the offset in each
        dimension at which this rank's rows begin (tensor-parallel part, and shard of rows in it).
        """
        row = llama_placements.find_placement(parameter.name)
        whole_shape = llama_placements.flatten_logical_shape(
            parameter.name, row.logical_shape(self.shape)
        )
        offset = [0] * len(whole_shape)
        dim = llama_placements.find_flat_split(parameter.name)
        if dim is not None:
            offset[dim] = (
                self.module.first_token
                if parameter.name in llama_placements.VOCABULARY_PARAMETERS
                else self.shard.index * parameter.size[dim]
            )
        offset[0] += parameter.begin
        return whole_shape, tuple(offset)

    def compile(self, gradient: GradientOf) -> None:
        """Choose what computes the stage's blocks and its loss: fused, fp8 or tensor-parallel
        matmuls, recomputation, compiled kernels (`tune.compile`); sets `blocks`. Raises
        RequestError if sizes are no multiples of 16 in fp8.

        `gradient` is not used: gradients are accumulated in the replicas' buffers
        (`exchange.gradient`), since the optimizer has only this rank's shards.
        """
        tune, module = self.job.case.tune, self.module
        self.linears, self.kernels = (
            AccumulatingLinears(self.exchange.gradient),
            BlockKernels(tune.compile),
        )
        self.loss_functions = LossFunctions(tune.compile)
        self.blocks = [
            recompute_block(block, tune.recompute)
            for block in self._make_fused_blocks(list(module.layers.values()))
        ]

    def _make_fused_blocks(self, blocks: list[Any]) -> list[Callable[..., BlockOutput]]:
        """Return what computes each block of the stage: fp8 blocks (fp8 without tensor
        parallelism), else fused blocks with the matmuls of this precision. With tensor parallelism
        the matmuls also gather and scatter tokens. Raises RequestError if sizes are no multiples of
        16 in fp8.
        """
        linears: BlockLinears = self.linears
        if self.fp8:
            llama_fp8.check_fp8_sizes(blocks[0].shape)
            kernels = llama_fp8.Fp8Kernels(self.job.case.tune.compile)
            fp8_matmuls = llama_fp8.Fp8Training(
                self.exchange.gradient, kernels, cached=self.sharding < 3
            )
            if self.shard.count == 1:
                return [llama_fp8.Fp8TrainBlock(block, fp8_matmuls) for block in blocks]
            linears = llama_fp8.Fp8Linears(fp8_matmuls)
        if self.shard.count > 1:
            columns = [
                layer
                for block in blocks
                for name, layer in block.named_children()
                if name in llama_placements.GATHERED_MODULES
            ]
            linears = TokenParallelLinears(linears, self.groups.tensor, columns)
        return [FusedBlock(block, linears, self.kernels) for block in blocks]

    def forward(self, x: Tensor | None, micro: MicroBatch) -> Tensor:
        """Return the residual stream after this stage, [tokens of this rank, hidden]; on the last
        stage, the micro-batch's summed cross-entropy in nats, a scalar. `x` is the residual stream
        of the stage before, None on the first stage, which embeds the tokens. Tensor-parallel ranks
        and, at sharding 3, replicas exchange data in it.
        """
        x = self._embed(micro) if x is None else x
        cos, sin = compute_rotary_cos_sin(micro.positions, self.shape, x.dtype)
        delta = torch.zeros_like(x)
        first_block_unit = int(self.module.first)
        for i, block in enumerate(self.blocks):

            def run_block(
                x: Tensor, delta: Tensor, block: Callable[..., BlockOutput] = block
            ) -> tuple[Tensor, ...]:
                """Run one block on the residual stream and its pending addend, and return both,
                [tokens of this rank, hidden] each.
                """
                return block(x, delta, cos, sin, micro.layout, self.kernel, None)[:2]

            x, delta = self.exchange.run_unit(first_block_unit + i, run_block, x, delta)
        if not self.module.last:
            return x + delta
        [loss] = self.exchange.run_unit(
            first_block_unit + len(self.blocks),
            lambda x, delta: (self._loss(x, delta, micro),),
            x,
            delta,
        )
        return loss

    def _embed(self, micro: MicroBatch) -> Tensor:
        """Return the embeddings of the micro-batch's tokens, [tokens, hidden]; with tensor
        parallelism, those of this rank's part of the tokens. Their backward pass exchanges the
        table's gradient with replicas.
        """

        def finish_embedding() -> None:
            """Exchange the embedding's gradient; its backward pass is the last of the stage."""
            self.exchange.finish_backward(0)

        table = self.module.embed.weight
        with self.exchange.gathered_weights(0):
            return apply_function(
                EmbedTokens,
                table,
                micro.tokens,
                self.module.first_token,
                self.exchange.gradient,
                self.groups.tensor,
                finish_embedding,
            )

    def _loss(self, x: Tensor, delta: Tensor, micro: MicroBatch) -> Tensor:
        """Return the summed cross-entropy in nats of the micro-batch's targets, from the residual
        stream and its pending addend `delta`, after the last norm. Logits are computed at
        `micro.pick` alone; with tensor parallelism each rank computes its columns of them, and all
        get the loss.
        """
        module, tensor = self.module, self.groups.tensor
        normed: Tensor = AddNorm.apply(
            x, delta, module.norm.weight, self.shape.norm_eps, self.kernels
        )[1]  # type: ignore[no-untyped-call]
        if tensor.size > 1:
            normed = apply_function(GatherTokens, normed, tensor)
        logits = self.linears.linear(apply_function(PickRows, normed, micro.pick), module.output)
        if tensor.size > 1:
            losses = apply_function(
                ColumnParallelLosses,
                logits,
                micro.targets,
                module.first_token,
                tensor,
                self.loss_functions,
            )
        else:
            losses = self.loss_functions.losses(logits, micro.targets)
        return losses.sum()

    def loss(self, micro: MicroBatch) -> Tensor:
        """Return the summed cross-entropy of a micro-batch, in nats, with an autograd graph; only
        for a pipeline of one stage.
        """
        return self.forward(None, micro)

    def details(self) -> dict[str, Any]:
        """Return, for the record, `attention` (kernel), `block` (`fused`), in fp8 how it is
        computed, and with several ranks or `tune.distributed` also `exchanged`: `units` are what
        ranks hold whole at a time, which the prediction of memory reads. `distributed` is true if
        the tune sets it.
        """
        exchanged = (
            {"exchanged": "units"} if self.job.world > 1 or self.job.case.tune.distributed else {}
        )
        forced = {"distributed": True} if self.job.case.tune.distributed else {}
        fp8_details = llama_fp8.describe_fp8(self.job.device.torch_device) if self.fp8 else {}
        return {"attention": self.kernel, "block": "fused", **exchanged, **forced, **fp8_details}
