"""FLOPs of a GLM equal those of torch's own counter exactly, and GLM-large by hand.

Torch counts attention by the kernel that computes it, and "padded" computes squares that a pack
does not have. So the counted model has attention that loops over contexts and spans with plain
matmuls, which are exactly the pack's `square`; all other matmuls are the model's.
"""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fixtures.glm import CPU, SHAPE, build_random_glm, make_samples, pack_samples
from steelyard.data.cloze_samples import ClozePack
from steelyard.models import cloze_attention, glm
from steelyard.models.cloze_attention import ClozeLayout
from steelyard.models.shapes import GlmModel
from steelyard.plan import flops
from steelyard.tasks import kind
from steelyard.training.glm_trainer import send_cloze_batch

pytestmark = pytest.mark.usefixtures("one_thread")
LARGE = GlmModel(
    family="glm",
    layers=24,
    hidden=1024,
    heads=16,
    ffn=4096,
    vocab=30592,
    positions=512,
    nominal_parameters=335e6,
)
MODELS = {
    "base": SHAPE,
    "deep": SHAPE.model_copy(update={"layers": 3, "heads": 2}),
    "wide": SHAPE.model_copy(update={"ffn": 200, "vocab": 65, "layers": 1}),
}


def attend_in_loops(qkv: Tensor, rows: ClozeLayout, dropout: float, merged: object) -> Tensor:
    """Compute attention of each context and each span alone, with products of shapes [c, c], [s, c]
    and [s, s].

    A span attends to its context and causally to itself under one softmax.
    """
    contexts, spans, groups = rows.lengths
    q, k, v = qkv.permute(1, 2, 0, 3)
    context_outputs, span_outputs, start, span, span_start = [], [], 0, 0, rows.context_tokens
    for length, count in zip(contexts, groups, strict=True):
        context_slice = slice(start, start + length)
        context_outputs.append(
            (q[:, context_slice] @ k[:, context_slice].mT / 2).softmax(-1) @ v[:, context_slice]
        )
        for size in spans[span : span + count]:
            span_slice = slice(span_start, span_start + size)
            far, near = (
                q[:, span_slice] @ k[:, context_slice].mT,
                q[:, span_slice] @ k[:, span_slice].mT,
            )
            near = near.masked_fill(torch.ones(size, size).triu(1).bool(), -torch.inf)
            weights = torch.cat((far, near), -1).softmax(-1)
            span_outputs.append(
                weights[..., :length] @ v[:, context_slice]
                + weights[..., length:] @ v[:, span_slice]
            )
            span_start += size
        start, span = start + length, span + count
    return torch.cat((*context_outputs, *span_outputs), 1).transpose(0, 1)


def count_profiled_flops(
    shape: GlmModel, pack: ClozePack, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Return the FLOPs that torch counts for a forward of the pack, and for the backward too if
    `backward`.
    """
    monkeypatch.setitem(cloze_attention.CLOZE_KERNELS, "looped", attend_in_loops)
    model, micro = build_random_glm(torch.float32, shape), send_cloze_batch(pack, CPU)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        logits = model(micro.tokens, micro.positions, micro.blocks, micro.layout, "looped")
        if backward:
            logits.square().sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("division", ["closed", "open"])
def test_counted_equals_the_profiler(name: str, division: str, monkeypatch) -> None:
    model, pack = MODELS[name], pack_samples(division, make_samples(4))
    counted = flops.count_profiled_flops(model, pack.counts)
    assert count_profiled_flops(model, pack, False, monkeypatch) == counted
    assert count_profiled_flops(model, pack, True, monkeypatch) == 3 * counted
    squared = {**pack.counts, "pairs": pack.counts["square"]}
    assert flops.count_flops(model, squared, "causal", kind.TRAIN.forwards) == 3 * counted


def test_counts_of_a_pack_by_hand() -> None:
    """One sample, a context of 5 and spans of 2 and 3."""
    sample_list = make_samples(1)
    assert (
        len(sample_list[0].context),
        [len(piece) + 1 for piece in sample_list[0].candidates],
    ) == (5, [2, 3])
    opened, closed = (
        pack_samples("open", sample_list).counts,
        pack_samples("closed", sample_list).counts,
    )
    assert (opened["tokens"], opened["logits"], opened["square"]) == (10, 5, 25 + 5 * 5 + 4 + 9)
    assert (closed["tokens"], closed["logits"], closed["square"]) == (15, 5, 2 * 25 + 5 * 5 + 4 + 9)
    assert (opened["pairs"], closed["pairs"]) == (25 + 25 + 3 + 6, 50 + 25 + 3 + 6)
    layer = 2 * 15 * (4 * 32 * 32 + 2 * 32 * 48) + 4 * 32 * 84
    assert flops.count_causal_flops(SHAPE, closed) == 2 * layer + 2 * 5 * 61 * 32


@pytest.mark.parametrize("name", MODELS)
def test_parameters_equal_those_of_the_modules(name: str) -> None:
    with torch.device("meta"):
        module = glm.Glm(MODELS[name])
    assert flops.count_model_parameters(MODELS[name]) == sum(p.numel() for p in module.parameters())
    matrices = [p for p in module.transformer.layers.parameters() if p.dim() == 2]
    assert flops.count_layer_parameters(MODELS[name]) == sum(p.numel() for p in matrices)


def test_parameters_and_flops_of_glm_large() -> None:
    """12 · 1024² weights a layer; 9 · 1024 biases and two norms; the word table, two tables of 513
    rows and a last norm.
    """
    assert flops.count_layer_parameters(LARGE) == 24 * 12 * 1024**2 == 301_989_888
    others = 24 * (9 + 4) * 1024 + 2 * 1024 + (30592 + 2 * 513) * 1024
    assert flops.count_model_parameters(LARGE) == 301_989_888 + others == 334_688_256
    counts = {"tokens": 300, "logits": 20, "pairs": 70_000, "square": 70_100}
    assert (
        flops.count_causal_flops(LARGE, counts)
        == 2 * 301_989_888 * 300 + 2 * 31_326_208 * 20 + 4 * 24 * 1024 * 70_000
    )
    assert flops.count_palm_flops(LARGE, counts) == 2 * 334_688_256 * 300 + 4 * 24 * 1024 * 70_100
    assert flops.count_nominal_flops(LARGE, counts) == 670_000_000 * 300
    assert flops.count_flops(LARGE, counts, "nominal", kind.TRAIN.forwards) == 2_010_000_000 * 300


def test_the_published_mfu_of_glm_large() -> None:
    """FlagPerf published 42.4 samples/s on eight A100 as 0.035 of TF32's 156e12, by 6·N·512 FLOPs a
    sample.
    """
    assert round(6 * flops.count_model_parameters(LARGE) * 512 * 42.4 / (8 * 156e12), 3) == 0.035
