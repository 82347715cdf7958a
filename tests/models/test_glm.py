"""GLM's model and attention against a literal, dense implementation of one candidate at a time.

Also: closed against open division, masks, merging of partial attention, and random weights.
"""

import hashlib
import math

import pytest
import torch
from torch import Tensor

from fixtures.glm import (
    CPU,
    SHAPE,
    attend_densely,
    build_random_glm,
    make_samples,
    pack_samples,
    score_all_literally,
    score_literally,
)
from steelyard.data.cloze_samples import ClozeSample
from steelyard.models import glm
from steelyard.models.cloze_attention import (
    AttentionCalls,
    MergedClozeAttention,
    RowOffsets,
    attend_cloze,
    make_cloze_layout,
    merge_softmax_parts,
)
from steelyard.training.glm_trainer import ClozeMicroBatch, compute_scores, send_cloze_batch

pytestmark = pytest.mark.usefixtures("one_thread")
DIVISIONS = ["closed", "open"]
LENGTHS = {
    "closed": ([6, 6, 3, 3], [2, 4, 1, 3], [1, 1, 1, 1]),
    "open": ([6, 3, 9], [2, 4, 1, 3, 2, 5], [2, 3, 1]),
}


def score_micro_batch(model: glm.Glm, micro: ClozeMicroBatch) -> Tensor:
    """Return the scores [samples, candidates] of a micro-batch by padded attention."""
    logits = model(micro.tokens, micro.positions, micro.blocks, micro.layout, "padded")
    return compute_scores(logits.log_softmax(-1).gather(1, micro.targets[:, None])[:, 0], micro)


@pytest.mark.parametrize("division", DIVISIONS)
def test_scores_equal_the_literal_implementation(division: str) -> None:
    model, clozes = build_random_glm(), make_samples(4)
    expected = score_all_literally(model, clozes)
    actual = score_micro_batch(model, send_cloze_batch(pack_samples(division, clozes), CPU))
    assert actual.shape == (4, 4)
    for row, expected_row in zip(actual.tolist(), expected, strict=True):
        assert row[: len(expected_row)] == pytest.approx(
            [float(score.detach()) for score in expected_row], abs=1e-10
        )
        assert row[len(expected_row) :] == [-math.inf] * (4 - len(expected_row))
    flat = [float(score.detach()) for row in expected for score in row]
    # all scores differ, so a mix-up would show
    assert len({round(score, 3) for score in flat}) == len(flat) == 2 + 3 + 4 + 2


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_closed_equals_open(dtype: torch.dtype, most: float) -> None:
    clozes, results = make_samples(4), {}
    for division in DIVISIONS:
        model = build_random_glm(dtype)
        cloze_scores = score_micro_batch(
            model, send_cloze_batch(pack_samples(division, clozes), CPU)
        )
        (torch.logsumexp(cloze_scores, 1) - cloze_scores[:, 0]).sum().backward()
        results[division] = (
            cloze_scores.detach(),
            {name: p.grad for name, p in model.named_parameters()},
        )
    finite = results["closed"][0].isfinite()
    # absolute error; scores are about 20
    assert float((results["closed"][0] - results["open"][0])[finite].abs().max()) <= most
    for name, grad in results["closed"][1].items():
        assert float((grad - results["open"][1][name]).abs().max()) <= most * max(
            1, float(grad.abs().max())
        ), name
        assert float(grad.abs().max()) > 1e-6, name  # every parameter is used


@pytest.mark.parametrize("division", DIVISIONS)
def test_a_candidate_changes_no_other_score(division: str) -> None:
    model, clozes = build_random_glm(), make_samples(4)
    last = clozes[2].candidates[-1]
    changed_cloze = ClozeSample(
        **{
            **vars(clozes[2]),
            "candidates": (*clozes[2].candidates[:-1], (*last[:-1], last[-1] + 1)),
        }
    )
    before, after = (
        send_cloze_batch(pack_samples(division, batch), CPU)
        for batch in (clozes, [*clozes[:2], changed_cloze, clozes[3]])
    )
    moved = (score_micro_batch(model, before) - score_micro_batch(model, after)).abs() > 1e-9
    assert moved.nonzero().tolist() == [[2, len(clozes[2].candidates) - 1]]
    with torch.no_grad():
        streams = [
            sum(
                model.run_layers(
                    model.embed(m.tokens, m.positions, m.blocks), m.layout, "padded", 0.0
                )
            )
            for m in (before, after)
        ]
    moved = (streams[0] - streams[1]).abs().amax(1) > 1e-12
    changed = (before.tokens != after.tokens).nonzero().tolist()
    # only the changed token moves: it is the last of its span, and no other token sees it
    assert moved.nonzero().tolist() == changed
    n = len(clozes[0].context)
    alone = score_literally(dict(model.named_parameters()), clozes[0], clozes[0].candidates[0])[1]
    assert torch.allclose(streams[0][:n], alone, atol=1e-10)


def test_a_token_of_a_span_sees_the_tokens_before_it() -> None:
    model, clozes = build_random_glm(), make_samples(4)
    first = ClozeSample(**{**vars(clozes[1]), "candidates": (clozes[1].candidates[0], (2, 3, 4))})
    changed = ClozeSample(**{**vars(clozes[1]), "candidates": (clozes[1].candidates[0], (7, 3, 4))})
    first_micro, changed_micro = (
        send_cloze_batch(pack_samples("open", [cloze]), CPU) for cloze in (first, changed)
    )
    logits = [
        model(m.tokens, m.positions, m.blocks, m.layout, "padded")
        for m in (first_micro, changed_micro)
    ]
    moved = (logits[0] - logits[1]).abs().amax(1) > 1e-9
    first_span_tokens = len(clozes[1].candidates[0]) + 1
    assert moved.tolist() == [False] * first_span_tokens + [False, True, True, True]


def random_qkv(division: str) -> Tensor:
    """Return random queries, keys and values [tokens, 3, heads, dim] in float64."""
    contexts, spans, _ = LENGTHS[division]
    generator = torch.Generator().manual_seed(1)
    return torch.randn(
        sum(contexts) + sum(spans),
        3,
        2,
        8,
        dtype=torch.float64,
        generator=generator,
        requires_grad=True,
    )


def output_and_gradient(attention, qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Return an attention's output, and the gradient of a fixed weighted sum of it."""
    out = attention(qkv)
    weight = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()
    (grad,) = torch.autograd.grad((out * weight).sum(), qkv)
    return out, grad


@pytest.mark.parametrize("division", DIVISIONS)
def test_padded_attention_equals_dense_attention(division: str) -> None:
    qkv, rows = random_qkv(division), make_cloze_layout(*LENGTHS[division], CPU)
    dense_results = output_and_gradient(lambda x: attend_densely(x, *LENGTHS[division]), qkv)
    for actual, expected in zip(
        output_and_gradient(lambda x: attend_cloze(x, rows, "padded", 0.0), qkv),
        dense_results,
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


class PlainFlashCalls:
    """A plain replacement of flash attention's forward and backward, with a fixed dropout mask.

    `keep` [T, T] scales each probability; None drops nothing. `offsets` gives, call by call, where
    rows of q and k start in the pack.
    """

    def __init__(self, keep: Tensor | None, n: int) -> None:
        self.keep, self.offsets = keep, [(0, 0), (n, 0), (n, n)]
        self.calls = 0

    def blocks(self) -> AttentionCalls:
        """Return forward and backward as the model takes them."""
        return AttentionCalls(self.forward, self.backward)

    def rows(self, queries: RowOffsets, keys: RowOffsets):
        """Return the slices of queries and keys of each row."""
        q, k = queries.cu_lengths.tolist(), keys.cu_lengths.tolist()
        return [(slice(q[i], q[i + 1]), slice(k[i], k[i + 1])) for i in range(len(q) - 1)]

    def probabilities(self, q, k, lse, rows, causal, state):
        """Return a row's probabilities, its part of the dropout mask and the log-sum-exp, computed
        if `lse` is None.
        """
        scores = q[rows[0]].transpose(0, 1) @ k[rows[1]].permute(1, 2, 0) / math.sqrt(q.shape[-1])
        if causal:
            scores = scores.masked_fill(
                torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -math.inf
            )
        lse = scores.logsumexp(-1) if lse is None else lse[:, rows[0]]
        keep = 1.0
        if self.keep is not None:
            a, b = (
                (part.start + offset, part.stop + offset)
                for part, offset in zip(rows, state, strict=True)
            )
            keep = self.keep[a[0] : a[1], b[0] : b[1]]
        return (scores - lse[..., None]).exp(), keep, lse

    def forward(self, q, k, v, queries, keys, dropout, causal):
        """Return the output, the log-sum-exp and this call's offsets as the state for backward."""
        out, lse = (
            torch.full_like(q, torch.nan).contiguous(),
            torch.full((q.shape[1], q.shape[0]), torch.nan, dtype=q.dtype),
        )
        state = self.offsets[self.calls]
        self.calls += 1
        for rows in self.rows(queries, keys):
            p, keep, lse[:, rows[0]] = self.probabilities(q, k, None, rows, causal, state)
            out[rows[0]] = ((p * keep) @ v[rows[1]].transpose(0, 1)).transpose(0, 1)
        return out, lse, state

    def backward(self, grad, q, k, v, out, lse, state, queries, keys, dropout, causal):
        """Return the gradients of q, k and v."""
        assert out.is_contiguous()
        assert lse.is_contiguous()
        dq, dk, dv = (torch.full_like(t, torch.nan) for t in (q, k, v))
        for rows in self.rows(queries, keys):
            p, keep, _ = self.probabilities(q, k, lse, rows, causal, state)
            do, o = grad[rows[0]].transpose(0, 1), out[rows[0]].transpose(0, 1)
            dv[rows[1]] = ((p * keep).transpose(1, 2) @ do).transpose(0, 1)
            dp = do @ v[rows[1]].permute(1, 2, 0) * keep
            ds = p * (dp - (do * o).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
            dq[rows[0]] = (ds @ k[rows[1]].transpose(0, 1)).transpose(0, 1)
            dk[rows[1]] = (ds.transpose(1, 2) @ q[rows[0]].transpose(0, 1)).transpose(0, 1)
        return dq, dk, dv


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("division", DIVISIONS)
def test_merged_partial_attention_equals_dense_attention(division: str, dropped: bool) -> None:
    """Values and gradients, with flash attention written out plainly; with dropout, a fixed quarter
    is dropped.
    """
    qkv, rows = random_qkv(division), make_cloze_layout(*LENGTHS[division], CPU)
    total = len(qkv)
    keep = (
        (torch.arange(total * total).view(total, total) % 7 > 1).double() / 0.75
        if dropped
        else None
    )
    dense_results = output_and_gradient(lambda x: attend_densely(x, *LENGTHS[division], keep), qkv)
    flash_calls = PlainFlashCalls(keep, rows.context_tokens)
    merged_results = output_and_gradient(
        lambda x: MergedClozeAttention.apply(
            x, rows, 0.25, flash_calls.blocks(), merge_softmax_parts
        ),
        qkv,
    )
    for actual, expected in zip(merged_results, dense_results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


def test_padded_attention_applies_dropout() -> None:
    qkv, rows = random_qkv("open"), make_cloze_layout(*LENGTHS["open"], CPU)
    without_dropout, dropped = (attend_cloze(qkv, rows, "padded", rate) for rate in (0.0, 0.5))
    assert not torch.allclose(without_dropout, dropped)


def test_a_layout_has_cumulative_and_longest_lengths() -> None:
    rows = make_cloze_layout(*LENGTHS["open"], CPU)
    assert rows.contexts.cu_lengths.tolist() == [0, 6, 9, 18]
    assert rows.groups.cu_lengths.tolist() == [0, 6, 12, 17]
    assert rows.spans.cu_lengths.tolist() == [0, 2, 6, 7, 10, 12, 17]
    assert [
        rows.contexts.max_length,
        rows.groups.max_length,
        rows.spans.max_length,
        rows.context_tokens,
    ] == [9, 6, 5, 18]
    assert rows.contexts.cu_lengths.dtype == torch.int32
    with pytest.raises(ValueError, match="contexts, groups and spans do not match"):
        make_cloze_layout([3], [1, 1], [1], CPU)


def test_dropout_is_on_embeddings_and_outputs() -> None:
    model = build_random_glm()
    micro = send_cloze_batch(pack_samples("open"), CPU)
    ids = micro.tokens, micro.positions, micro.blocks
    with torch.no_grad():
        still = model(*ids, micro.layout, "padded")
        assert torch.equal(still, model(*ids, micro.layout, "padded", 0.0))
        assert not torch.allclose(still, model(*ids, micro.layout, "padded", 0.1), atol=1e-3)
        x = glm.dropout_add_norm(
            torch.zeros(4000, 32), torch.ones(4000, 32), torch.nn.LayerNorm(32), 0.1
        )[0]
    assert x.unique().tolist() == pytest.approx([0.0, 1 / 0.9])
    assert float(x.mean()) == pytest.approx(1, abs=0.01)


def test_names_and_sizes_are_those_of_the_checkpoints() -> None:
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in glm.Glm(SHAPE).named_parameters()}
    layer = {
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
        "attention.query_key_value": (96, 32),
        "attention.dense": (32, 32),
        "mlp.dense_h_to_4h": (48, 32),
        "mlp.dense_4h_to_h": (32, 48),
    }
    expected = {
        "word_embeddings.weight": (61, 32),
        "transformer.position_embeddings.weight": (25, 32),
    }
    expected |= {"transformer.block_position_embeddings.weight": (25, 32)}
    expected |= {f"transformer.final_layernorm.{kind}": (32,) for kind in ("weight", "bias")}
    for i in range(2):
        expected |= {
            f"transformer.layers.{i}.{name}.weight": shape for name, shape in layer.items()
        }
        expected |= {
            f"transformer.layers.{i}.{name}.bias": shape[:1] for name, shape in layer.items()
        }
    assert shapes == expected


def test_random_weights_depend_on_seed_and_name() -> None:
    first_model, same_seed_model, other_seed_model = (
        glm.build_glm(SHAPE, CPU, torch.float32) for _ in range(3)
    )
    for model, seed in ((first_model, 1), (same_seed_model, 1), (other_seed_model, 2)):
        glm.fill_random_glm_weights(model, seed)
    first = dict(first_model.named_parameters())
    assert all(torch.equal(p, first[name]) for name, p in same_seed_model.named_parameters())
    assert not torch.equal(
        other_seed_model.word_embeddings.weight, first_model.word_embeddings.weight
    )
    matrices = [p.flatten() for p in first.values() if p.dim() == 2]
    assert len({float(p[0]) for p in matrices}) == len(matrices)
    assert all(
        bool((p == (0 if name.endswith("bias") else 1)).all())
        for name, p in first.items()
        if p.dim() == 1
    )


@pytest.mark.parametrize(("layers", "deviation"), [(2, 0.01), (8, 0.005)])
def test_output_projections_start_smaller_in_deeper_models(layers: int, deviation: float) -> None:
    """Their deviation is std / sqrt(2 layers), as in GLM's own program; all other matrices have
    std.
    """
    shape = SHAPE.model_copy(update={"layers": layers})
    model = glm.build_glm(shape, CPU, torch.float32)
    glm.fill_random_glm_weights(model, 1)
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    ends = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")
    outputs, other_matrices = (
        [p.flatten() for name, p in matrices.items() if name.endswith(ends) == scaled]
        for scaled in (True, False)
    )
    assert len(outputs) == 2 * layers
    assert float(torch.cat(outputs).std()) == pytest.approx(deviation, rel=0.03)
    assert float(torch.cat(other_matrices).std()) == pytest.approx(0.02, rel=0.03)


def test_random_weights_are_drawn_from_the_hash_of_seed_and_name() -> None:
    """A scaled parameter is the same draw with another deviation."""
    model = glm.build_glm(SHAPE, CPU, torch.float32)
    glm.fill_random_glm_weights(model, 1)
    name = "transformer.layers.1.mlp.dense_4h_to_h.weight"
    digest = hashlib.sha256(f"1:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    drawn = torch.empty(32, 48).normal_(0.0, 1.0, generator=generator)
    torch.testing.assert_close(
        dict(model.named_parameters())[name], drawn * 0.01, rtol=1e-6, atol=0
    )
