"""Engine `transformers`, training: LlamaForCausalLM on one device, its layers compiled one by one, fused AdamW.

Rows are [rows, length], and segments of a row are told to the library as its users do: by positions that begin again. Its
SDPA attention then makes a block-causal mask by itself, which keeps out the fastest kernels; so positions are passed only
where a row has a second segment from which something is learned. `tune.attention`: `sdpa` (what auto means here), or one of
our packed kernels by name, called through the library's own AttentionInterface with the arguments it has for flash-attn:
what users get who install that package.

The loss is read at learned tokens alone, as in engine `torch`. The plain call with `labels=` makes fp32 logits of every
token and is slower: a comparison with it would be one of losses, not of models.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from steelyard.case.question import Train
from steelyard.engines.job import Job, Part
from steelyard.engines.torch.model import DTYPES, our_model
from steelyard.engines.torch.train import TorchTrainer, compute_dtype
from steelyard.engines.transformers.score import config
from steelyard.errors import RequestError
from steelyard.models.attention import KERNELS, Layout, attend
from steelyard.training.loop import Loop, Micro, Packed
from steelyard.training.optimizer import Adam
from steelyard.weights import load

PACKED = "steelyard_packed"  # the name of our kernels in the library


@dataclass(frozen=True)
class RowsMicro(Micro):
    alone: bool  # every segment from which something is learned begins its row: plain causal attention is right


class TransformersTrain(Loop):
    def __init__(self, job: Job) -> None:
        super().__init__(job, _trainer(job))

    def _to_device(self, pack: Packed) -> RowsMicro:
        alone = pack.positions[pack.pick] == pack.pick % self.train.length
        return RowsMicro(**vars(super()._to_device(pack)), alone=bool(alone.all()))


def _trainer(job: Job) -> "TransformersTrainer":
    """On one device, or divided by FSDP over many."""
    if job.plan.dp == 1:
        return TransformersTrainer(job)
    from steelyard.engines.transformers.sharded import LaidTransformers

    return LaidTransformers(job)


class TransformersTrainer(TorchTrainer):
    block = "plain"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        if self.tune.recompute == "selective":
            raise RequestError("engine transformers recomputes whole layers; allowed: tune.recompute=none or full")
        self.masked = self.batches = 0

    def _choose_kernel(self) -> str:
        kernel = "sdpa" if self.tune.attention == "auto" else self.tune.attention
        if kernel not in ("sdpa", *KERNELS):
            raise RequestError(f"tune.attention={kernel!r} is not known; allowed: auto, sdpa, {', '.join(sorted(KERNELS))}")
        return kernel

    def prepare(self, part: Part) -> None:
        if self.question.train is None:
            raise ValueError("a question without training")
        with part("weights"):
            self.hf, kept = self._load()
            self.adam = self._optimizer(kept, self.question.train)
            self.job.device.synchronize()
        if self.tune.recompute == "full":
            self.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.tune.compile:
            for module in (*self.hf.model.layers, self.hf.model.norm):
                module.forward = torch.compile(module.forward)  # inside of what recomputes a layer
        self.head: Callable[..., Tensor] = torch.compile(_head, dynamic=True) if self.tune.compile else _head

    def _optimizer(self, kept: list[Tensor] | None, train: Train) -> Adam:
        return Adam([p for p in self.hf.parameters() if p.requires_grad], kept, train, self.question.precision)

    def _load(self) -> tuple[Any, list[Tensor] | None]:
        """The model in the precision it is computed in, and what is learned of it in the one that is kept, where that is
        another. The same weights as every engine: read, checked or made by our own loader, then handed over."""
        precision = self.question.precision
        made = config(self.question.model)
        ours, self.weights = our_model(self.job)
        with torch.device("meta"):
            model: Any = LlamaForCausalLM(made)  # type: ignore[no-untyped-call]
        model.set_attn_implementation("sdpa" if self.kernel == "sdpa" else PACKED)
        model.to(DTYPES[precision.weights]).to_empty(device=self.device).train()
        model.tie_weights()
        load.copy_to_hf(ours, dict(model.named_parameters(remove_duplicate=False)))
        del ours
        self.job.device.release_memory()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith("o_proj.bias"))  # a Llama of ours has none: it stays zero
        kept = [p.detach() for p in model.parameters() if p.requires_grad]
        model.to(DTYPES[compute_dtype(precision)])
        # A computed buffer, in no checkpoint: `to_empty` left it without values, and it is fp32 in every precision.
        model.model.rotary_emb = LlamaRotaryEmbedding(made).to(self.device)
        return model, kept if kept[0].dtype != model.lm_head.weight.dtype else None

    def _names(self) -> list[str]:
        return [name for name, parameter in self.hf.named_parameters() if parameter.requires_grad]

    def warm(self, micro: Micro) -> None:
        """With a mask and without, which are graphs of their own: a border is cut into rows that may have none."""
        if self.kernel == "sdpa" and isinstance(micro, RowsMicro):
            half = max(1, micro.rows.max_q // 2)
            super().warm(replace(micro, positions=micro.positions % half, alone=False))
            super().warm(replace(micro, alone=True))
        else:
            super().warm(micro)
        self.masked = self.batches = 0

    def loss(self, micro: Micro) -> Tensor:
        tokens = micro.tokens.view(-1, micro.rows.max_q)
        hidden = self.hf.model(input_ids=tokens, use_cache=False, **self._segments(micro)).last_hidden_state
        return self.head(self.hf.lm_head, hidden.flatten(0, 1)[micro.pick], micro.targets)

    def _segments(self, micro: Micro) -> dict[str, Any]:
        """What keeps the segments of a row apart."""
        positions = micro.positions.view(-1, micro.rows.max_q)
        if self.kernel != "sdpa":
            rows = micro.rows
            borders = {"cu_seq_lens_q": rows.cu_q, "cu_seq_lens_k": rows.cu_k}
            longest = {"max_length_q": rows.max_q, "max_length_k": rows.max_k}
            return {"position_ids": positions, **borders, **longest, "kernel": self.kernel}
        alone = isinstance(micro, RowsMicro) and micro.alone
        self.batches += 1
        self.masked += not alone
        return {} if alone else {"position_ids": positions}

    def details(self) -> dict[str, Any]:
        """`masked`: batches that a mask was made for, of all that were computed outside of warming up."""
        counts = {"masked": self.masked, "batches": self.batches} if self.kernel == "sdpa" else {}
        return {**super().details(), **counts}


def _head(output: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
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
    **others: Any,
) -> tuple[Tensor, None]:
    """What the library calls, with [rows, heads, length, D]; it wants [rows, length, heads, D]. It makes no mask for names
    that it does not know."""
    q, k, v = (one.transpose(1, 2).flatten(0, 1) for one in (query, key, value))
    out = attend(q, k, v, Layout(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k), kernel)
    return out.view(query.shape[0], -1, *out.shape[1:]), None


AttentionInterface.register(PACKED, _packed_attention)
