"""Engine `transformers`, training: the library's class of the model's type, its layers compiled one
by one, fused AdamW.

Rows are [rows, length], and segments of a row are told to the library as its users do: by positions
that begin again. Its SDPA attention then makes a block-causal mask by itself, which keeps out the
fastest kernels; so positions are passed only where a row has a second segment from which something
is learned. `tune.attention`: `sdpa` (what auto means here), or one of our packed kernels by name,
called through the library's own AttentionInterface with the arguments it has for flash-attn: what
users get who install that package.

The loss is read at learned tokens alone, as in engine `torch`. The plain call with `labels=` makes
fp32 logits of every token and is slower: a comparison with it would be one of losses, not of
models.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from transformers import AttentionInterface, AutoModelForCausalLM

from steelyard.engine.job import Job
from steelyard.engines.transformers.score import config
from steelyard.errors import RequestError
from steelyard.models.attention import Layout, attend, known, with_window
from steelyard.models.llama_fused import Gradient
from steelyard.models.tensors import DTYPES, compute_dtype
from steelyard.plan.degrees import shard_degree
from steelyard.training.loop import HeldOutLoss, Loop
from steelyard.training.micro_batches import MicroBatch, RowBatches
from steelyard.training.packing import Packed
from steelyard.training.placement import Model, SingleDevice
from steelyard.training.sharded import Sharded, shard
from steelyard.training.trainer import Trainer
from steelyard.weights import load
from steelyard.weights.model import build

PACKED = "steelyard_packed"  # the name of our kernels in the library


@dataclass(frozen=True)
class RowsMicroBatch(MicroBatch):
    """A micro-batch of rows of one length, with whether plain causal attention is right for it."""

    # every segment from which something is learned begins its row: plain causal attention is right
    alone: bool


class SegmentedRows(RowBatches):
    """Rows of one length as micro-batches that know whether they need a mask."""

    def to_device(self, pack: Packed) -> RowsMicroBatch:
        """Copy a pack to the device; `begins_rows` is true if every learned token's segment begins
        its row.
        """
        alone = pack.positions[pack.pick] == pack.pick % self.length
        return RowsMicroBatch(**vars(super().to_device(pack)), alone=bool(alone.all()))


class TransformersTrain(Loop):
    """The engine for work `train_rows`: the common training loop with the library's Llama, on one
    device or sharded by FSDP over many. Raises RequestError for settings that it cannot do.
    """

    def __init__(self, job: Job) -> None:
        kernel = choose_kernel(job)
        layers = ShardedLayers(job) if job.plan.dp > 1 else None
        placement = SingleDevice() if layers is None else layers.placement()
        trainer = Trainer(job, TransformersLlama(job, kernel, layers), placement)
        batches = SegmentedRows(job, job.train.length)
        super().__init__(job, trainer, batches, HeldOutLoss(job, trainer, batches))


def choose_kernel(job: Job) -> str:
    """Return `sdpa` for `auto`, else the attention kernel that `tune.attention` names. Raises
    RequestError if it is unknown, has wrong gradients or no window that the model needs, and for
    selective recomputation.
    """
    tune = job.case.tune
    kernel = "sdpa" if tune.attention == "auto" else tune.attention
    if tune.recompute == "selective":
        raise RequestError(
            "engine transformers recomputes whole layers; allowed: tune.recompute=none or full"
        )
    known(kernel, True, "sdpa")
    window = job.case.question.model.window
    return (
        kernel
        if kernel == "sdpa"
        else with_window(kernel, window, job.train.length, tune.attention)
    )


class ShardedLayers:
    """Shards the layers of the library's model by FSDP over all devices, as its users do. Raises
    RequestError unless `tune.sharding` is set for all replicas. Creates a device mesh, so all ranks
    must construct it.
    """

    def __init__(self, job: Job) -> None:
        tune, precision = job.case.tune, job.case.question.precision
        if not tune.sharding or shard_degree(job.case, job.plan.dp) != job.plan.dp:
            raise RequestError(
                "engine transformers divides what it holds among all its devices; add --set"
                " tune.sharding=3 (or 1 or 2), without tune.sharding_degree"
            )
        self.device, self.sharding = job.device, tune.sharding
        self.kept, self.compute = DTYPES[precision.weights], compute_dtype(precision.matmul)
        self.mesh = init_device_mesh(job.device.torch_device.type, (job.plan.dp,))

    def placement(self) -> Sharded:
        """Return the placement that the trainer uses for FSDP."""
        device: torch.device = self.device.torch_device
        return Sharded(self.mesh.get_group(), self.sharding, self.compute, device)

    def shard(self, model: Any, master: list[Tensor] | None) -> list[nn.Module]:
        """Shard a whole model in place, of which every rank keeps its part, and return the
        outermost modules.

        `master`, if given, are the trainable weights in the stored precision: they replace the
        parameters' data, and FSDP gathers them in the precision of the matmuls. Frees cached device
        memory.
        """
        if master is not None:
            for parameter, one in zip(
                (p for p in model.parameters() if p.requires_grad), master, strict=True
            ):
                parameter.data = one
        roots = [model.model, model.lm_head]
        shard([*model.model.layers, *roots], self.mesh, self.sharding, self.compute, self.kept)
        self.device.release_memory()
        return roots


class TransformersLlama(Model):
    """The library's Llama as the trainer uses it; `fsdp` shards it, None on one device. `masked`
    counts micro-batches that needed a mask, of `batches`.
    """

    def __init__(self, job: Job, kernel: str, layers: ShardedLayers | None) -> None:
        self.job, self.kernel, self.layers = job, kernel, layers
        self.masked = self.batches = 0

    def build(self) -> list[Tensor] | None:
        """Build the model in the precision of the matmuls with the same weights as every engine's,
        and shard it if there are several devices.

        Returns the trainable weights in the stored precision if that is another, else None;
        sharded, None, for the shards are themselves in the stored precision. The output
        projection's bias, which our Llama does not have, stays zero and is not trained.
        """
        job, question = self.job, self.job.case.question
        precision, device, made = (
            question.precision,
            job.device.torch_device,
            config(question.model),
        )
        shape, dtype = load.shape_of(question.model), DTYPES[precision.weights]
        ours, self.weights = build(
            shape, device, dtype, question.seed, job.weights, progress=job.loading
        )
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(made)  # type: ignore[no-untyped-call]
        model.set_attn_implementation("sdpa" if self.kernel == "sdpa" else PACKED)
        model.to(dtype).to_empty(device=device).train()
        model.tie_weights()
        load.copy_to_hf(ours, dict(model.named_parameters(remove_duplicate=False)))
        del ours
        job.device.release_memory()
        for name, parameter in model.named_parameters():
            # a Llama of ours has none: it stays zero
            parameter.requires_grad_(not name.endswith("o_proj.bias"))
        master = [p.detach() for p in model.parameters() if p.requires_grad]
        model.to(compute_dtype(precision.matmul))
        # A computed buffer, in no checkpoint: `to_empty` left it without values, and it is fp32 in
        # every precision.
        model.model.rotary_emb = type(model.model.rotary_emb)(config=made).to(device)
        self.module = model
        has_master = master[0].dtype != model.lm_head.weight.dtype
        if self.layers is None:
            return master if has_master else None
        self.roots = self.layers.shard(model, master if has_master else None)
        return None

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) of all parameters that are trained."""
        return [
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        ]

    def compile(self, gradient: Gradient) -> None:
        """Turn on full recomputation and compile the layers, the last norm and the loss, as the
        tune says. `gradient` is not used: autograd accumulates.
        """
        tune = self.job.case.tune
        if tune.recompute == "full":
            self.module.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        if tune.compile:
            for module in (*self.module.model.layers, self.module.model.norm):
                module.forward = torch.compile(module.forward)  # inside of what recomputes a layer
        self.head: Callable[..., Tensor] = (
            torch.compile(_head, dynamic=True) if tune.compile else _head
        )

    def variants(self, micro: MicroBatch) -> Iterator[MicroBatch]:
        """Yield the micro-batch with and without a mask, which are two graphs to compile: half of a
        row's length makes a second segment. Other kernels have one form. Resets the counts of
        masked batches afterwards.
        """
        if self.kernel == "sdpa" and isinstance(micro, RowsMicroBatch):
            half = max(1, micro.rows.max_q // 2)
            yield replace(micro, positions=micro.positions % half, alone=False)
            yield replace(micro, alone=True)
        else:
            yield micro
        self.masked = self.batches = 0

    def loss(self, micro: MicroBatch) -> Tensor:
        """Return a micro-batch's summed cross-entropy, in nats, at the learned tokens alone."""
        tokens = micro.tokens.view(-1, micro.rows.max_q)
        hidden = self.module.model(
            input_ids=tokens, use_cache=False, **self._segments(micro)
        ).last_hidden_state
        return self.head(self.module.lm_head, hidden.flatten(0, 1)[micro.pick], micro.targets)

    def _segments(self, micro: MicroBatch) -> dict[str, Any]:
        """Return the model arguments that keep the segments of a row apart: positions, or
        cumulative lengths for a packed kernel; none if plain causal attention is right. Counts
        batches and masked ones with SDPA.
        """
        positions = micro.positions.view(-1, micro.rows.max_q)
        if self.kernel != "sdpa":
            rows = micro.rows
            borders = {"cu_seq_lens_q": rows.cu_q, "cu_seq_lens_k": rows.cu_k}
            longest = {"max_length_q": rows.max_q, "max_length_k": rows.max_k}
            return {"position_ids": positions, **borders, **longest, "kernel": self.kernel}
        alone = isinstance(micro, RowsMicroBatch) and micro.alone
        self.batches += 1
        self.masked += not alone
        return {} if alone else {"position_ids": positions}

    def details(self) -> dict[str, Any]:
        """Return attention kernel, kind of block, sharding and, with SDPA, how many batches outside
        warm-up needed a mask (`masked` of `batches`).
        """
        counts = {"masked": self.masked, "batches": self.batches} if self.kernel == "sdpa" else {}
        sharding = {} if self.layers is None else {"sharding": self.layers.sharding}
        return {"attention": self.kernel, "block": "plain", **counts, **sharding}


def _head(output: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy, in fp32 at least, of the output layer's logits for hidden
    states [targets, hidden].
    """
    logits = output(hidden)
    wide = logits.float() if logits.dtype.itemsize < torch.float32.itemsize else logits
    return F.cross_entropy(wide, targets, reduction="sum")


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    kernel: str,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention by one of this package's packed kernels; called by the library through its
    AttentionInterface. Takes [rows, heads, length, D] and returns [rows, length, heads, D] and no
    weights. The library makes no mask for names that it does not know.
    """
    q, k, v = (one.transpose(1, 2).flatten(0, 1) for one in (query, key, value))
    rows = Layout(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    out = attend(q, k, v, rows, kernel, window=sliding_window)
    return out.view(query.shape[0], -1, *out.shape[1:]), None


AttentionInterface.register(PACKED, _packed_attention)
