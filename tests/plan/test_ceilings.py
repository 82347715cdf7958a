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
    found = ceiling_shapes.list_shipped_matmuls(quick=False)
    assert {one.case for one in found} == set(resolve.list_shipped_cases())
    names = [(one.case, one.matmul.name, one.matmul.layout) for one in found]
    assert len(names) == len(set(names))
    mmlu = {one.matmul.name: one.matmul for one in found if one.case == "llama2-7b-mmlu"}
    first = next(
        one
        for one in matmuls.list_case_matmuls(resolve.resolve_case("llama2-7b-mmlu").case, 1)
        if one.name == "qkv"
    )
    assert (mmlu["qkv"], mmlu["qkv"].n, mmlu["qkv"].k) == (first, 12288, 4096)


def test_quick_has_forwards_alone():
    quick, full = (
        ceiling_shapes.list_shipped_matmuls(quick=True),
        ceiling_shapes.list_shipped_matmuls(quick=False),
    )
    assert quick == [one for one in full if one.matmul.layout == "nt"]
    assert len(quick) < len(full)


def test_heads_are_those_of_the_cases():
    full = {
        (one.heads, one.kv_heads, one.dim, one.length)
        for one in ceiling_shapes.list_shipped_attention(quick=False)
    }
    assert full == {(32, 32, 128, 2048), (40, 40, 128, 2048), (48, 8, 128, 2048), (16, 16, 64, 512)}
    assert {one.dim for one in ceiling_shapes.list_shipped_attention(quick=True)} == {64, 128}
    assert len(ceiling_shapes.list_shipped_attention(quick=True)) == 2


def test_flops_of_attention_are_causal():
    """As `flops.causal` counts them: 4·hidden FLOPs a pair of one layer."""
    one = next(one for one in ceiling_shapes.list_shipped_attention(quick=False) if one.heads == 40)
    pairs = 3 * (100 * 101 // 2)
    model = resolve.resolve_case("llama1-13b-openwebtext").case.question.model.model_copy(
        update={"layers": 1}
    )
    attention = flops.count_causal_flops(
        model, {"tokens": 0, "logits": 0, "pairs": pairs, "square": 0}
    )
    assert one.count_flops(3, 100) == attention == 4 * 5120 * pairs
    assert ceiling_shapes.BACKWARD_FACTOR == 2
