"""A tiny GLM, samples that differ in every row, and a literal implementation that shares nothing but the parameters."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import Tensor

from steelyard.accelerators.cpu import Device
from steelyard.case import Tune
from steelyard.data import cloze
from steelyard.data.cloze import Cloze, Pack
from steelyard.engines.glm_reference import ReferenceTrainer
from steelyard.engines.glm_train import GlmTrainer
from steelyard.models import glm
from steelyard.plan import Place
from steelyard.precision import TRAIN
from steelyard.question import GlmModel, Question, RecordData, Train
from steelyard.record import Plan

CPU = torch.device("cpu")
SHAPE = GlmModel(family="glm", layers=2, hidden=32, heads=4, ffn=48, vocab=61, positions=24, dropout=0.0)
START, END = 59, 60
TRAINING = Train(
    length=24, batch=4, steps=4, lr=1e-3, min_lr=1e-4, schedule="linear", warmup_steps=1, decay_steps=4,
    beta2=0.999, eps=1e-8, weight_decay=0.1, clip=1.0,
)  # fmt: skip


def samples(count: int = 3) -> list[Cloze]:
    """Contexts of 5 tokens and more, two to four candidates of one to three pieces; the right one is not always the first."""
    out = []
    for i in range(count):
        context = tuple(1 + (7 * i + 3 * j * (i + 1)) % 57 for j in range(5 + 3 * i % 11))
        candidates = tuple(tuple(1 + (11 * i + 5 * c + j) % 57 for j in range(1 + (i + c) % 3)) for c in range(2 + i % 3))
        out.append(Cloze(context, 1 + i % 4, candidates, (i % len(candidates),), (), (), str(i)))
    return out


def packed(division: str, some: list[Cloze] | None = None) -> Pack:
    return cloze.pack(some or samples(), division, START, END)


def build(dtype: torch.dtype = torch.float64, shape: GlmModel = SHAPE) -> glm.Glm:
    """With weights large enough that every one of them matters."""
    model = glm.build(shape, CPU, dtype)
    glm.fill_random(model, 3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.2)
    return model.requires_grad_(True)


def job(precision: str = "fp32", dp: int = 1, rank: int = 0, shape: GlmModel = SHAPE, train: Train = TRAINING, **tune):
    question = Question(
        kind="train", task="record", model=shape, data=RecordData(kind="record"), precision=TRAIN[precision], train=train
    )
    return SimpleNamespace(
        case=SimpleNamespace(question=question, tune=Tune(**({"compile": False} | tune))),
        weights=None,
        device=Device(0),
        plan=Plan(nodes=1, devices=dp, tp=1, pp=1, dp=dp, launcher="local"),
        place=Place(0, 0, rank),
        loading=None,
    )


def trainer(of: SimpleNamespace, kind: type[GlmTrainer] = GlmTrainer) -> GlmTrainer | ReferenceTrainer:
    """Ready, with the weights of `build`."""
    made = kind(of)
    made.prepare(lambda name: nullcontext())
    with torch.no_grad():
        for mine, kept, given in zip(
            made.adam.own, made.adam.kept, build(torch.float64, of.case.question.model).parameters(), strict=True
        ):
            kept.copy_(given)
            mine.copy_(given)
    return made


def literal(weights: dict[str, Tensor], one: Cloze, piece: tuple[int, ...], shape: GlmModel = SHAPE) -> tuple[Tensor, Tensor]:
    """The score of one candidate alone, and the last layer's output at the context: dense, token by token of GLM's paper."""
    n, s = len(one.context), len(piece) + 1
    tokens = torch.tensor([*one.context, START, *piece])
    positions = torch.tensor([*range(n), *[one.mask] * s])
    blocks = torch.tensor([*[0] * n, *range(1, s + 1)])
    below = "transformer."
    x = weights["word_embeddings.weight"][tokens]
    x = (
        x
        + weights[below + "position_embeddings.weight"][positions]
        + weights[below + "block_position_embeddings.weight"][blocks]
    )
    for layer in range(shape.layers):
        own = {k.removeprefix(f"{below}layers.{layer}."): v for k, v in weights.items() if f"layers.{layer}." in k}
        h = norm(x, own["input_layernorm.weight"], own["input_layernorm.bias"])
        qkv = h @ own["attention.query_key_value.weight"].T + own["attention.query_key_value.bias"]
        q, k, v = qkv[:, :32], qkv[:, 32:64], qkv[:, 64:]
        heads = []
        for head in range(shape.heads):
            at = slice(8 * head, 8 * head + 8)
            scores = q[:, at] @ k[:, at].T / math.sqrt(8)
            for i in range(n + s):
                for j in range(n + s):
                    if j >= n and (i < n or j > i):
                        scores[i, j] = -torch.inf
            heads.append(scores.exp() / scores.exp().sum(1, keepdim=True) @ v[:, at])
        x = x + torch.cat(heads, 1) @ own["attention.dense.weight"].T + own["attention.dense.bias"]
        h = norm(x, own["post_attention_layernorm.weight"], own["post_attention_layernorm.bias"])
        u = h @ own["mlp.dense_h_to_4h.weight"].T + own["mlp.dense_h_to_4h.bias"]
        u = u * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
        x = x + u @ own["mlp.dense_4h_to_h.weight"].T + own["mlp.dense_4h_to_h.bias"]
    out = norm(x, weights[below + "final_layernorm.weight"], weights[below + "final_layernorm.bias"])
    logits = out[n:] @ weights["word_embeddings.weight"].T
    told = logits - logits.exp().sum(1, keepdim=True).log()
    return sum(told[i, target] for i, target in enumerate((*piece, END))), x[:n]


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight + bias


def literal_scores(model: glm.Glm, some: list[Cloze]) -> list[list[Tensor]]:
    weights = dict(model.named_parameters())
    return [[literal(weights, one, piece)[0] for piece in one.candidates] for one in some]


def literal_loss(model: glm.Glm, some: list[Cloze]) -> Tensor:
    """The summed cross-entropy over candidates."""
    rows = [torch.stack(row) for row in literal_scores(model, some)]
    return sum(row.exp().sum().log() - row[one.right[0]] for row, one in zip(rows, some, strict=True))


def dense(qkv: Tensor, contexts: list[int], spans: list[int], groups: list[int], keep: Tensor | None = None) -> Tensor:
    """Every span with its context, by a mask written out; `keep` [T, T], or one of
    each head, is what dropout leaves, scaled."""
    n, total = sum(contexts), sum(contexts) + sum(spans)
    owner = [i for i, length in enumerate(contexts) for _ in range(length)]
    span_owner = [i for i, count in enumerate(groups) for _ in range(count)]
    span = [i for i, length in enumerate(spans) for _ in range(length)]
    seen = torch.zeros(total, total, dtype=torch.bool)
    for i in range(total):
        for j in range(total):
            mine = owner[i] if i < n else span_owner[span[i - n]]
            seen[i, j] = owner[j] == mine if j < n else i >= j and span[i - n] == span[j - n] if i >= n else False
    q, k, v = qkv.transpose(0, 2).unbind(1)
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~seen.to(qkv.device), -math.inf).softmax(-1)
    return ((weights if keep is None else weights * keep) @ v).transpose(0, 1)
