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
from steelyard.engines.transformers.score import make_transformers_config
from steelyard.errors import RequestError
from steelyard.models.attention import (
    PackedLayout,
    attend_packed_rows,
    check_attention_kernel,
    choose_windowed_kernel,
)
from steelyard.models.llama_fused import GradientOf
from steelyard.models.tensors import DTYPES, get_compute_dtype
from steelyard.plan.degrees import get_shard_degree
from steelyard.training.fsdp import FsdpPlacement, shard_modules
from steelyard.training.micro_batches import MicroBatch, RowBatches
from steelyard.training.packing import RowPack
from steelyard.training.placement import SingleDevicePlacement, TrainableModel
from steelyard.training.trainer import Trainer
from steelyard.training.training_loop import HeldOutLoss, TrainingLoop
from steelyard.weights import llama_weights
from steelyard.weights.llama_builder import build_llama_with_weights

PACKED_ATTENTION = "steelyard_packed"  # the name of our kernels in the library


@dataclass(frozen=True)
class RowsMicroBatch(MicroBatch):
    """A micro-batch of rows of one length, with whether plain causal attention is right for it."""

    # every segment from which something is learned begins its row: plain causal attention is right
    begins_rows: bool


class SegmentedRows(RowBatches):
    """Rows of one length as micro-batches that know whether they need a mask."""

    def to_device(self, pack: RowPack) -> RowsMicroBatch:
        """Copy a pack to the device; `begins_rows` is true if every learned token's segment begins
        its row.
        """
        begins_row = pack.positions[pack.pick] == pack.pick % self.length
        return RowsMicroBatch(**vars(super().to_device(pack)), begins_rows=bool(begins_row.all()))


class TransformersTrain(TrainingLoop):
    """The engine for work `train_rows`: the common training loop with the library's Llama, on one
    device or sharded by FSDP over many. Raises RequestError for settings that it cannot do.
    """

    def __init__(self, job: Job) -> None:
        kernel = choose_transformers_attention(job)
        fsdp = FsdpSharding(job) if job.plan.dp > 1 else None
        placement = SingleDevicePlacement() if fsdp is None else fsdp.placement()
        trainer = Trainer(job, TransformersLlama(job, kernel, fsdp), placement)
        batches = SegmentedRows(job, job.train.length)
        super().__init__(job, trainer, batches, HeldOutLoss(job, trainer, batches))


def choose_transformers_attention(job: Job) -> str:
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
    check_attention_kernel(kernel, True, "sdpa")
    window = job.case.question.model.window
    return (
        kernel
        if kernel == "sdpa"
        else choose_windowed_kernel(kernel, window, job.train.length, tune.attention)
    )


class FsdpSharding:
    """Shards the layers of the library's model by FSDP over all devices, as its users do. Raises
    RequestError unless `tune.sharding` is set for all replicas. Creates a device mesh, so all ranks
    must construct it.
    """

    def __init__(self, job: Job) -> None:
        tune, precision = job.case.tune, job.case.question.precision
        if not tune.sharding or get_shard_degree(job.case, job.plan.dp) != job.plan.dp:
            raise RequestError(
                "engine transformers divides what it holds among all its devices; add --set"
                " tune.sharding=3 (or 1 or 2), without tune.sharding_degree"
            )
        self.device, self.sharding = job.device, tune.sharding
        self.master_dtype, self.matmul_dtype = (
            DTYPES[precision.weights],
            get_compute_dtype(precision.matmul),
        )
        self.mesh = init_device_mesh(job.device.torch_device.type, (job.plan.dp,))

    def placement(self) -> FsdpPlacement:
        """Return the placement that the trainer uses for FSDP."""
        device: torch.device = self.device.torch_device
        return FsdpPlacement(self.mesh.get_group(), self.sharding, self.matmul_dtype, device)

    def shard(self, model: Any, master: list[Tensor] | None) -> list[nn.Module]:
        """Shard a whole model in place, of which every rank keeps its part, and return the
        outermost modules.

        `master`, if given, are the trainable weights in the stored precision: they replace the
        parameters' data, and FSDP gathers them in the precision of the matmuls. Frees cached device
        memory.
        """
        if master is not None:
            for parameter, weight in zip(
                (p for p in model.parameters() if p.requires_grad), master, strict=True
            ):
                parameter.data = weight
        roots = [model.model, model.lm_head]
        shard_modules(
            [*model.model.layers, *roots],
            self.mesh,
            self.sharding,
            self.matmul_dtype,
            self.master_dtype,
        )
        self.device.release_memory()
        return roots


class TransformersLlama(TrainableModel):
    """The library's Llama as the trainer uses it; `fsdp` shards it, None on one device. `masked`
    counts micro-batches that needed a mask, of `batches`.
    """

    def __init__(self, job: Job, kernel: str, fsdp: FsdpSharding | None) -> None:
        self.job, self.kernel, self.fsdp = job, kernel, fsdp
        self.masked = self.batches = 0

    def build(self) -> list[Tensor] | None:
        """Build the model in the precision of the matmuls with the same weights as every engine's,
        and shard it if there are several devices.

        Returns the trainable weights in the stored precision if that is another, else None;
        sharded, None, for the shards are themselves in the stored precision. The output
        projection's bias, which our Llama does not have, stays zero and is not trained.
        """
        job, question = self.job, self.job.case.question
        precision, device, library_config = (
            question.precision,
            job.device.torch_device,
            make_transformers_config(question.model),
        )
        shape, dtype = llama_weights.get_llama_shape(question.model), DTYPES[precision.weights]
        ours, self.weights = build_llama_with_weights(
            shape, device, dtype, question.seed, job.weights, progress=job.report_loading
        )
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(library_config)  # type: ignore[no-untyped-call]
        model.set_attn_implementation("sdpa" if self.kernel == "sdpa" else PACKED_ATTENTION)
        model.to(dtype).to_empty(device=device).train()
        model.tie_weights()
        llama_weights.copy_to_hf_model(ours, dict(model.named_parameters(remove_duplicate=False)))
        del ours
        job.device.release_memory()
        for name, parameter in model.named_parameters():
            # a Llama of ours has none: it stays zero
            parameter.requires_grad_(not name.endswith("o_proj.bias"))
        master = [p.detach() for p in model.parameters() if p.requires_grad]
        model.to(get_compute_dtype(precision.matmul))
        # A computed buffer, in no checkpoint: `to_empty` left it without values, and it is fp32 in
        # every precision.
        model.model.rotary_emb = type(model.model.rotary_emb)(config=library_config).to(device)
        self.module = model
        has_master = master[0].dtype != model.lm_head.weight.dtype
        if self.fsdp is None:
            return master if has_master else None
        self.fsdp_roots = self.fsdp.shard(model, master if has_master else None)
        return None

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) of all parameters that are trained."""
        return [
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        ]

    def compile(self, gradient: GradientOf) -> None:
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
            torch.compile(_loss_of_hidden, dynamic=True) if tune.compile else _loss_of_hidden
        )

    def list_variants(self, micro: MicroBatch) -> Iterator[MicroBatch]:
        """Yield the micro-batch with and without a mask, which are two graphs to compile: half of a
        row's length makes a second segment. Other kernels have one form. Resets the counts of
        masked batches afterwards.
        """
        if self.kernel == "sdpa" and isinstance(micro, RowsMicroBatch):
            half = max(1, micro.layout.max_q // 2)
            yield replace(micro, positions=micro.positions % half, begins_rows=False)
            yield replace(micro, begins_rows=True)
        else:
            yield micro
        self.masked = self.batches = 0

    def loss(self, micro: MicroBatch) -> Tensor:
        """Return a micro-batch's summed cross-entropy, in nats, at the learned tokens alone."""
        tokens = micro.tokens.view(-1, micro.layout.max_q)
        hidden = self.module.model(
            input_ids=tokens, use_cache=False, **self._segment_arguments(micro)
        ).last_hidden_state
        return self.head(self.module.lm_head, hidden.flatten(0, 1)[micro.pick], micro.targets)

    def _segment_arguments(self, micro: MicroBatch) -> dict[str, Any]:
        """Return the model arguments that keep the segments of a row apart: positions, or
        cumulative lengths for a packed kernel; none if plain causal attention is right. Counts
        batches and masked ones with SDPA.
        """
        positions = micro.positions.view(-1, micro.layout.max_q)
        if self.kernel != "sdpa":
            rows = micro.layout
            cumulative = {"cu_seq_lens_q": rows.cu_q, "cu_seq_lens_k": rows.cu_k}
            longest = {"max_length_q": rows.max_q, "max_length_k": rows.max_k}
            return {"position_ids": positions, **cumulative, **longest, "kernel": self.kernel}
        begins_rows = isinstance(micro, RowsMicroBatch) and micro.begins_rows
        self.batches += 1
        self.masked += not begins_rows
        return {} if begins_rows else {"position_ids": positions}

    def details(self) -> dict[str, Any]:
        """Return attention kernel, kind of block, sharding and, with SDPA, how many batches outside
        warm-up needed a mask (`masked` of `batches`).
        """
        counts = {"masked": self.masked, "batches": self.batches} if self.kernel == "sdpa" else {}
        sharding = {} if self.fsdp is None else {"sharding": self.fsdp.sharding}
        return {"attention": self.kernel, "block": "plain", **counts, **sharding}


def _loss_of_hidden(output: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
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
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention by one of this package's packed kernels; called by the library through its
    AttentionInterface. Takes [rows, heads, length, D] and returns [rows, length, heads, D] and no
    weights. The library makes no mask for names that it does not know.
    """
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    rows = PackedLayout(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    out = attend_packed_rows(q, k, v, rows, kernel, window=sliding_window)
    return out.view(query.shape[0], -1, *out.shape[1:]), None


AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
