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
    """A `MicroBatch` of rows of one length: `begins_rows` is true if the segment of every learned
    token begins its row, so that plain causal attention is right and no mask is needed. Made by
    `SegmentedRows.to_device`.
    """

    # every segment from which something is learned begins its row: plain causal attention is right
    begins_rows: bool


class SegmentedRows(RowBatches):
    """A `RowBatches` that makes micro-batches of rows of one length (padded, perhaps several
    segments to a row) that know whether they need a mask: `to_device` returns `RowsMicroBatch`.
    """

    def to_device(self, pack: RowPack) -> RowsMicroBatch:
        """Return a pack of rows copied to the device, without waiting; `begins_rows` of the result
        is true if the segment of every learned token begins its row, so that plain causal attention
        is right.
        """
        begins_row = pack.positions[pack.pick] == pack.pick % self.length
        return RowsMicroBatch(**vars(super().to_device(pack)), begins_rows=bool(begins_row.all()))


class TransformersTrain(TrainingLoop):
    """The engine `transformers` for work `train_rows`: the common training loop with the library's
    Llama, on one device or sharded by FSDP over many, and the held-out loss before and after.
    Raises RequestError for an attention kernel, recomputation or sharding that it cannot do.
    """

    def __init__(self, job: Job) -> None:
        """Choose the attention kernel, FSDP if there are several replicas, and batches of padded
        rows; the model is built by `prepare`. Raises RequestError for what the engine cannot do.
        """
        kernel = choose_transformers_attention(job)
        fsdp = FsdpSharding(job) if job.plan.dp > 1 else None
        placement = SingleDevicePlacement() if fsdp is None else fsdp.placement()
        trainer = Trainer(job, TransformersLlama(job, kernel, fsdp), placement)
        batches = SegmentedRows(job, job.train.length)
        super().__init__(job, trainer, batches, HeldOutLoss(job, trainer, batches))


def choose_transformers_attention(job: Job) -> str:
    """Return `sdpa` for `auto`, else the attention kernel that `tune.attention` names. Raises
    RequestError if it is unknown, has wrong gradients (`cudnn`) or lacks a window that the model
    needs (`sdpa` has windows), and for selective recomputation.
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
    """Shards the layers of the library's model by FSDP over all devices, as its users do: `shard`
    divides a model in place and returns its outermost sharded modules, `placement` makes what the
    trainer uses. `mesh` is the device mesh over all replicas.

    Constructing it raises RequestError unless `tune.sharding` is set, for all replicas together,
    and creates that mesh, so all ranks must.
    """

    def __init__(self, job: Job) -> None:
        """Check the tune, and create a device mesh over all replicas (all ranks together). Raises
        RequestError without `tune.sharding`, or if `tune.sharding_degree` is less than all
        replicas.
        """
        tune, precision = job.case.tune, job.case.question.precision
        if not tune.sharding or get_shard_degree(job.case, job.plan.dp) != job.plan.dp:
            raise RequestError(
                "engine transformers divides the model among all its devices; add --set"
                " tune.sharding=3 (or 1 or 2), without tune.sharding_degree"
            )
        self.device, self.sharding = job.device, tune.sharding
        self.master_dtype, self.matmul_dtype = (
            DTYPES[precision.weights],
            get_compute_dtype(precision.matmul),
        )
        self.mesh = init_device_mesh(job.device.torch_device.type, (job.plan.dp,))

    def placement(self) -> FsdpPlacement:
        """Return a new placement for the trainer: FSDP over all replicas of this run."""
        device: torch.device = self.device.torch_device
        return FsdpPlacement(self.mesh.get_group(), self.sharding, self.matmul_dtype, device)

    def shard(self, model: Any, master: list[Tensor] | None) -> list[nn.Module]:
        """Shard a whole model in place by FSDP, each layer by itself, so that every rank keeps its
        part, and return the outermost sharded modules: `model.model` and `model.lm_head`. All ranks
        must call it.

        `master`, if given, are the trainable weights in the stored precision, in order: they
        replace the parameters' data, and FSDP gathers them in the precision of the matmuls. Frees
        cached device memory.
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
    """The library's Llama as the trainer uses it (a `TrainableModel`): `build` makes `module` with
    its weights, `compile` sets up recomputation and compilation, `loss` returns a micro-batch's
    summed cross-entropy in nats.

    `kernel` is `sdpa` or one of this package's packed attention kernels; `fsdp` shards the model,
    None on one device. `masked` counts the micro-batches, of `batches`, for which SDPA needed a
    mask; both stay 0 with other kernels.
    """

    def __init__(self, job: Job, kernel: str, fsdp: FsdpSharding | None) -> None:
        """Store the settings, with no batches counted; the model is made by `build`."""
        self.job, self.kernel, self.fsdp = job, kernel, fsdp
        self.masked = self.batches = 0

    def build(self) -> list[Tensor] | None:
        """Build the library's model in the precision of the matmuls with the same weights as every
        engine's, and shard it if there are several devices. Sets `module`, `weights` (their source)
        and, sharded, `fsdp_roots`. Raises RequestError if the checkpoint is not of this model.

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
        """Return (name, parameter) of all parameters of the library's model that are trained;
        sharded, FSDP's.
        """
        return [
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        ]

    def compile(self, gradient: GradientOf) -> None:
        """Turn on recomputation of whole layers (`tune.recompute=full`) and, with `tune.compile`,
        compile the layers, the last norm and the loss of this model; sets `head`, which computes
        the loss. `gradient` is not used: autograd accumulates.
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
        """Yield a micro-batch in all forms that run different code of this model, to compile them
        before a pass: with SDPA one that needs a mask (positions begin again at half a row's
        length) and one that needs none; with other kernels itself. Resets `masked` and `batches`
        when it is exhausted.
        """
        if self.kernel == "sdpa" and isinstance(micro, RowsMicroBatch):
            half = max(1, micro.layout.max_q // 2)
            yield replace(micro, positions=micro.positions % half, begins_rows=False)
            yield replace(micro, begins_rows=True)
        else:
            yield micro
        self.masked = self.batches = 0

    def loss(self, micro: MicroBatch) -> Tensor:
        """Return a micro-batch's summed cross-entropy, in nats, with an autograd graph. Logits are
        computed at the learned tokens alone (`micro.pick`). Counts the micro-batch with SDPA.
        """
        tokens = micro.tokens.view(-1, micro.layout.max_q)
        hidden = self.module.model(
            input_ids=tokens, use_cache=False, **self._segment_arguments(micro)
        ).last_hidden_state
        return self.head(self.module.lm_head, hidden.flatten(0, 1)[micro.pick], micro.targets)

    def _segment_arguments(self, micro: MicroBatch) -> dict[str, Any]:
        """Return the arguments by which the library's model keeps the segments of a row apart: with
        SDPA `position_ids`, from which it makes a mask, or none if plain causal attention is right;
        for a packed kernel positions, cumulative and longest lengths, and `kernel`. With SDPA it
        counts `batches` and `masked`.
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
        """Return, for the record, `attention` (kernel), `block` (`plain`), with FSDP `sharding`
        and, with SDPA, how many batches outside warm-up needed a mask (`masked` of `batches`).
        """
        counts = {"masked": self.masked, "batches": self.batches} if self.kernel == "sdpa" else {}
        sharding = {} if self.fsdp is None else {"sharding": self.fsdp.sharding}
        return {"attention": self.kernel, "block": "plain", **counts, **sharding}


def _loss_of_hidden(output: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy in nats, computed in fp32 at least, of the output layer's
    logits for hidden states [targets, hidden]; `targets` [targets] are the right tokens.
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
    """Compute causal attention, with the model's sliding window if it has one, by this package's
    packed kernel of name `kernel`; called by the library through its AttentionInterface. Takes
    [rows, heads, length, D] and returns ([rows, length, heads, D], None for weights).

    Segments are given by cumulative lengths over all rows end to end; `attention_mask` is ignored,
    for the library makes none for names that it does not know.
    """
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    rows = PackedLayout(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    out = attend_packed_rows(q, k, v, rows, kernel, window=sliding_window)
    return out.view(query.shape[0], -1, *out.shape[1:]), None


AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
