"""Bus factors and matmul and attention shapes that `steelyard spec` measures."""

import pytest

from steelyard.case import resolve
from steelyard.plan import ceiling_shapes, flops, matmuls


@pytest.mark.parametrize(
    ("name", "world", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 2, 0.5),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(name, world, factor):
    assert ceiling_shapes.get_bus_factor(name, world) == factor


def test_every_case_has_its_shapes():
    shapes = ceiling_shapes.list_shipped_matmuls(quick=False)
    assert {item.case for item in shapes} == set(resolve.list_shipped_cases())
    names = [(item.case, item.matmul.name, item.matmul.layout) for item in shapes]
    assert len(names) == len(set(names))
    mmlu = {item.matmul.name: item.matmul for item in shapes if item.case == "llama2-7b-mmlu"}
    first = next(
        item
        for item in matmuls.list_case_matmuls(resolve.resolve_case("llama2-7b-mmlu").case, 1)
        if item.name == "qkv"
    )
    assert (mmlu["qkv"], mmlu["qkv"].n, mmlu["qkv"].k) == (first, 12288, 4096)


def test_quick_measures_forward_matmuls_only():
    quick, full = (
        ceiling_shapes.list_shipped_matmuls(quick=True),
        ceiling_shapes.list_shipped_matmuls(quick=False),
    )
    assert quick == [shape for shape in full if shape.matmul.layout == "nt"]
    assert len(quick) < len(full)


def test_heads_are_those_of_the_cases():
    full = {
        (heads.heads, heads.kv_heads, heads.dim, heads.length)
        for heads in ceiling_shapes.list_shipped_attention(quick=False)
    }
    assert full == {
        (32, 32, 128, 2048),
        (32, 8, 128, 2048),
        (40, 40, 128, 2048),
        (48, 8, 128, 2048),
        (16, 16, 64, 512),
    }
    assert {heads.dim for heads in ceiling_shapes.list_shipped_attention(quick=True)} == {64, 128}
    assert len(ceiling_shapes.list_shipped_attention(quick=True)) == 2


def test_flops_of_attention_are_causal():
    """As `flops.causal` counts them: 4·hidden FLOPs a pair of one layer."""
    heads = next(
        heads for heads in ceiling_shapes.list_shipped_attention(quick=False) if heads.heads == 40
    )
    pairs = 3 * (100 * 101 // 2)
    model = resolve.resolve_case("llama1-13b-openwebtext").case.question.model.model_copy(
        update={"layers": 1}
    )
    attention = flops.count_causal_flops(
        model, {"tokens": 0, "logits": 0, "pairs": pairs, "square": 0}
    )
    assert heads.count_flops(3, 100) == attention == 4 * 5120 * pairs
    assert ceiling_shapes.BACKWARD_FACTOR == 2
