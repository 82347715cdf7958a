"""The matmuls of a batch: their FLOPs equal the model's exactly, and their shapes are those that
engines multiply.
"""

import pytest

from fixtures.cases import resolve_with_fixed_tune
from steelyard.case import resolve
from steelyard.models import families
from steelyard.models.shapes import GlmModel, LlamaModel
from steelyard.plan import flops, matmuls
from steelyard.plan.matmuls import Matmul
from steelyard.tasks import kind as kinds

LLAMA = LlamaModel(
    family="llama", layers=3, hidden=64, heads=8, kv_heads=2, ffn=96, vocab=256, positions=128
)
GLM = GlmModel(family="glm", layers=2, hidden=32, heads=4, ffn=48, vocab=70, positions=64)


@pytest.mark.parametrize("kind", ["score", "train"])
@pytest.mark.parametrize(("tokens", "logits"), [(1, 0), (7, 7), (1000, 13), (4096, 4096)])
@pytest.mark.parametrize("model", [LLAMA, GLM], ids=["llama", "glm"])
def test_flops_are_those_of_the_model(model, tokens, logits, kind):
    counts = {"tokens": tokens, "logits": logits, "pairs": 0, "square": 0}
    shapes = matmuls.list_model_matmuls(model, tokens, logits, kinds.find_kind(kind).products)
    assert matmuls.count_total_flops(shapes) == kinds.find_kind(
        kind
    ).forwards * flops.count_weight_flops(model, counts)
    assert matmuls.count_total_flops(shapes) == flops.count_flops(
        model, counts, "causal", kinds.find_kind(kind).forwards
    )


@pytest.mark.parametrize("name", resolve.list_shipped_cases())
@pytest.mark.parametrize("size", ["full", "smoke"])
def test_flops_of_every_case_are_those_of_the_model(name, size):
    case = resolve.resolve_case(name, size).case
    tokens, logits = matmuls.count_tokens_and_logits(case)
    counts = {"tokens": tokens, "logits": logits, "pairs": 0, "square": 0}
    assert matmuls.count_total_flops(matmuls.list_case_matmuls(case, 1)) == flops.count_flops(
        case.question.model, counts, "causal", case.question.kind_row.forwards
    )


def test_tensor_parallelism_divides_the_matmuls():
    """A vocabulary of 256 is four times 64, so nothing is padded and each of two devices has half
    of everything.
    """
    whole, half = (
        matmuls.list_model_matmuls(LLAMA, 500, 20, kinds.TRAIN.products, tp) for tp in (1, 2)
    )
    assert matmuls.count_total_flops(whole) == 2 * matmuls.count_total_flops(half)
    assert [
        (matmul.name, matmul.m, matmul.n, matmul.k, matmul.count)
        for matmul in half
        if matmul.layout == "nt"
    ] == [
        ("qkv", 500, 48, 64, 3),
        ("out", 500, 64, 32, 3),
        ("gate+up", 500, 96, 64, 3),
        ("down", 500, 64, 48, 3),
        ("vocabulary", 20, 128, 64, 1),
    ]
    padded = matmuls.list_model_matmuls(
        LLAMA.model_copy(update={"vocab": 130}), 500, 20, kinds.SCORE.products, 2
    )
    # 130 rows of the vocabulary are padded to 2 · 128
    assert (padded[-1].n, matmuls.count_total_flops(padded[-1:])) == (128, 2 * 20 * 128 * 64)


def test_training_has_both_backward_matmuls():
    shapes = matmuls.list_model_matmuls(GLM, 10, 0, kinds.TRAIN.products)
    assert [
        (matmul.layout, matmul.m, matmul.n, matmul.k, matmul.count)
        for matmul in shapes
        if matmul.name == "up"
    ] == [("nt", 10, 48, 32, 2), ("nn", 10, 32, 48, 2), ("tn", 48, 32, 10, 2)]
    assert {
        matmul.layout for matmul in matmuls.list_model_matmuls(GLM, 10, 4, kinds.SCORE.products)
    } == {"nt"}


def test_large_matmuls_are_split_by_rows(monkeypatch):
    monkeypatch.setattr(matmuls, "MAX_NUMBERS", 1000)
    shapes = matmuls.list_model_matmuls(GLM, 26, 0, kinds.SCORE.products)
    # 26 rows are split by 12: 12 · (48 + 32) numbers are at most 1000
    assert [(matmul.m, matmul.count) for matmul in shapes if matmul.name == "up"] == [
        (12, 4),
        (2, 2),
    ]
    assert matmuls.count_total_flops(shapes) == flops.count_weight_flops(
        GLM, {"tokens": 26, "logits": 0}
    )


@pytest.mark.parametrize(
    "name",
    ["llama1-7b-openwebtext", "llama1-13b-openwebtext", "aquila2-7b-alpaca", "llama2-7b-mmlu"],
)
def test_split_rows_keep_their_alignment(name):
    """On one H200 a weight gradient of 8,197 rows ran at a quarter of the rate of one of 8,192."""
    case = resolve.resolve_case(name, "full").case
    model = case.question.model
    whole = {
        layer.outputs for layer in families.find_family(model.family).layer_matrices(model)
    } | {model.vocab}
    odd = {
        matmul.m
        for matmul in matmuls.list_case_matmuls(case, 1)
        if matmul.layout == "tn" and matmul.m % 8 and matmul.m not in whole
    }
    assert odd == set()


@pytest.mark.parametrize(
    ("name", "counts", "expected"),
    [
        ("llama2-7b-mmlu", None, (32768, 8)),
        ("llama2-7b-mmlu", {"tokens": 10_000_000, "logits": 20_000}, (32768, 66)),
        ("llama2-7b-mmlu", {"tokens": 500, "logits": 2}, (500, 2)),
        ("aquila2-34b-lambada", None, (16384, 16384)),
        ("aquila2-34b-lambada", {"tokens": 100_000, "logits": 99_000}, (16384, 16220)),
        ("llama1-7b-openwebtext", None, (4096, 4096)),
        ("aquila2-7b-alpaca", {"tokens": 4000, "logits": 1000, "samples": 9}, (2048, 512)),
        ("glm-large-record", None, (4096, 0)),
        ("glm-large-record", {"tokens": 64_000, "logits": 640, "samples": 64}, (8000, 80)),
        ("llama2-7b-mmlu", {"tokens": 0, "logits": 0}, (32768, 8)),
    ],
)
def test_tokens_and_logits_of_a_batch(name, counts, expected):
    assert matmuls.count_tokens_and_logits(resolve_with_fixed_tune(name).case, counts) == expected


def test_a_smaller_batch():
    case = resolve_with_fixed_tune("llama2-7b-mmlu").case
    assert matmuls.list_case_matmuls(case, 1, None, 4)[0] == Matmul(
        name="qkv", m=8192, n=12288, k=4096, count=32
    )
    assert matmuls.list_case_matmuls(case, 1, None, 1 << 40)[-1] == Matmul(
        name="vocabulary", m=1, n=32000, k=4096
    )
