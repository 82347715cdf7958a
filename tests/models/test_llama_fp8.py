"""fp8: scaled numbers, matmuls, and a transformer block that trains with them, against wider
arithmetic.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from steelyard.engines.torch.llama_stage import recompute_block
from steelyard.errors import RequestError
from steelyard.kernels import fp8
from steelyard.kernels.fp8 import Fp8Matrix
from steelyard.models import llama_fp8
from steelyard.models.attention import make_packed_layout
from steelyard.models.llama import Llama, LlamaBlock, LlamaShape
from steelyard.models.llama import compute_rotary_cos_sin as angles
from steelyard.models.llama_fp8 import Fp8Kernels, Fp8ScoreBlock, Fp8TrainBlock, Fp8Training

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = LlamaShape(
    layers=2,
    hidden=128,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ffn=352,
    vocab=128,
    positions=64,
    qkv_bias=True,
)
LENGTHS = [7, 1, 19, 13]  # 40 tokens, which 16 does not divide
CPU = torch.device("cpu")


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Return the norm of the error as a fraction of the exact tensor's norm."""
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize(("dtype", "largest", "bits"), [(fp8.E4M3, 448, 3), (fp8.E5M2, 57344, 2)])
def test_scaled_rows_round_to_within_half_a_step(dtype, largest, bits):
    """The largest number of a row becomes the largest of the dtype; all others are within half a
    step of their binade, or half the smallest step.
    """
    x = torch.randn(50, 96) * torch.logspace(-20, 8, 50)[:, None]
    scaled = fp8.quantize_rows(x, dtype)
    row_maxima = x.abs().amax(1, keepdim=True)
    assert torch.equal(scaled.values.float().abs().amax(1), torch.full((50,), float(largest)))
    step = x.abs() * 2.0 ** -(bits + 1) * (1 + 1e-5) + row_maxima / largest * torch.finfo(
        dtype
    ).smallest_normal * 2.0 ** -(bits + 1)
    assert ((scaled.to_fp32() - x).abs() <= step).all()


def test_rows_of_zeros_stay_zeros():
    scaled = fp8.quantize_rows(torch.zeros(3, 16))
    assert torch.equal(scaled.to_fp32(), torch.zeros(3, 16))
    assert torch.isfinite(scaled.scale).all()


def test_rows_with_inf_or_nan_become_nan():
    x = torch.ones(2, 16)
    x[0, 3], x[1, 5] = torch.inf, torch.nan
    restored = fp8.quantize_rows(x).to_fp32()
    assert restored[0].isnan().any()
    assert restored[1].isnan().any()


def test_scaled_columns_equal_scaled_rows_of_the_transpose():
    x = torch.randn(21, 48)
    by_column, by_row = fp8.quantize_columns(x), fp8.quantize_rows(x.t())
    assert by_column.values.shape == (48, 32)
    assert torch.equal(by_column.values.float()[:, :21], by_row.values.float())
    assert not by_column.values.float()[:, 21:].any()
    assert torch.equal(by_column.scale, by_row.scale)


@pytest.mark.parametrize("tokens", [32, 21])  # a multiple of 16 needs no padding, which would copy
def test_operands_are_row_major_for_every_input_layout(tokens: int):
    """cuBLASLt multiplies a row-major by a column-major matrix and refuses every other pair."""
    for scaled in (
        fp8.quantize_columns(torch.randn(tokens, 48)),
        fp8.quantize_rows(torch.randn(48, tokens).t()),
    ):
        assert scaled.values.is_contiguous()
        assert scaled.scale.is_contiguous()


def test_a_matmul_equals_fp64_of_the_same_fp8_numbers():
    """The bound allows the rounding of the result to bf16 and of sums to fp32."""
    a, b = (
        fp8.quantize_rows(torch.randn(33, 512)),
        fp8.quantize_rows(torch.randn(48, 512) * torch.logspace(-3, 3, 48)[:, None]),
    )
    exact = (a.values.double() * a.scale.double()) @ (b.values.double() * b.scale.double()).t()
    actual = fp8.multiply_fp8(a, b)
    assert actual.dtype == torch.bfloat16
    size = exact.norm(dim=0) / len(exact) ** 0.5  # of each column, which has its own scale
    assert ((actual.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5 * size).all()


def test_a_matmul_is_near_that_of_the_unscaled_operands():
    """Two operands with three bits of mantissa: an error of 2.6 % each by the root mean square, 3.8
    % together.
    """
    x, y = torch.randn(64, 1024), torch.randn(80, 1024)
    assert (
        0.03
        < relative_error(
            fp8.multiply_fp8(fp8.quantize_rows(x), fp8.quantize_rows(y)),
            x.double() @ y.double().t(),
        )
        < 0.042
    )


def make_block(shape: LlamaShape) -> LlamaBlock:
    """Return a transformer block with seeded random weights."""
    torch.manual_seed(3)
    block = LlamaBlock(shape)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            parameter.normal_(
                1.0 if "norm" in name else 0.0, 0.1 if parameter.dim() == 1 else shape.hidden**-0.5
            )
    return block


def random_streams(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the inputs of a block: residual stream, delta, and cosines and sines of the
    positions.
    """
    torch.manual_seed(5)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    x, delta = (
        torch.randn(len(positions), SHAPE.hidden).to(dtype).requires_grad_() for _ in range(2)
    )
    return x, delta, *angles(positions, SHAPE, dtype)


def gradients(block, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Run a block forward and backward; return its second output and the gradients of both
    streams.
    """
    out = block(*inputs, make_packed_layout(LENGTHS, None, CPU), "rows", None)
    torch.manual_seed(7)
    (out[0] * torch.randn_like(out[0]) + out[1] * torch.randn_like(out[1])).sum().backward()
    return {"x": inputs[0].grad, "delta": inputs[1].grad, "out": out[1].detach()}


def fp8_gradients(
    monkeypatch, kind: str, recompute: str = "none", matrix_dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return the output and all gradients of an fp8 block; its matrices have `matrix_dtype`,
    everything else is bf16.

    `kind` is the precision of matmuls for weight gradients.
    """
    monkeypatch.setattr(llama_fp8, "WEIGHT_GRADIENT", kind)
    block = make_block(SHAPE)
    for name, parameter in block.named_parameters():
        matrix = parameter.dim() > 1
        parameter.data = parameter.data.to(matrix_dtype if matrix else torch.bfloat16)
        assert matrix == (name.split(".")[0] in llama_fp8.FP8_MATRICES and name.endswith("weight"))
    sums = {id(p): torch.zeros_like(p, dtype=torch.float32) for p in block.parameters()}
    code = Fp8Training(lambda p: sums[id(p)], Fp8Kernels(False))
    results = gradients(
        recompute_block(Fp8TrainBlock(block, code), recompute), random_streams(torch.bfloat16)
    )
    for name, parameter in block.named_parameters():
        assert (parameter.grad is None) == (parameter.dim() > 1)
        results[name] = sums[id(parameter)] if parameter.grad is None else parameter.grad
    return results


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True, "window": 5}], ids=["plain", "varied"])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_gradients_are_near_those_of_fp32(monkeypatch, kind, changes):
    """Distances are relative to the norm of each gradient. In bf16 alone they are 0.007 to
    0.011.
    """
    monkeypatch.setitem(globals(), "SHAPE", replace(SHAPE, **changes))
    fp32_block = make_block(SHAPE)
    expected = gradients(fp32_block, random_streams(torch.float32)) | {
        name: p.grad for name, p in fp32_block.named_parameters()
    }
    actual = fp8_gradients(monkeypatch, kind)
    distances = {
        name: relative_error(actual[name], gradient) for name, gradient in expected.items()
    }
    qk_norm_distances = {
        name: distances.pop(name)
        for name in ("q_norm.weight", "k_norm.weight")
        if name in distances
    }
    assert max(distances.values()) <= 0.1, distances
    assert max(qk_norm_distances.values(), default=0) <= 0.13, qk_norm_distances  # they cancel
    assert distances["out"] <= 0.08
    # matmuls really ran in fp8: in bf16 these distances are below 0.011
    assert min(distances["down.weight"], distances["gate_up.weight"], distances["x"]) >= 0.03


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_does_not_change_gradients(monkeypatch, kind, recompute):
    actual, expected = fp8_gradients(monkeypatch, kind, recompute), fp8_gradients(monkeypatch, kind)
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name


def test_cached_fp8_copies_are_remade_when_the_weight_changes():
    copied_weights = []

    def make(weight: Tensor) -> Fp8Matrix:
        copied_weights.append(weight.clone())
        return fp8.quantize_rows(weight)

    copies, weight = (
        llama_fp8.Fp8WeightCache(make, cached=True),
        torch.nn.Parameter(torch.ones(16, 16)),
    )
    first = copies.get_copy(weight)
    assert copies.get_copy(weight) is first
    with torch.no_grad():
        weight.mul_(3)
    assert torch.equal(copies.get_copy(weight).to_fp32(), torch.full((16, 16), 3.0))
    assert len(copied_weights) == 2


def test_uncached_fp8_copies_are_made_at_every_use():
    weight_dtypes = []

    def make(weight: Tensor) -> Fp8Matrix:
        weight_dtypes.append(weight.dtype)
        return fp8.quantize_rows(weight)

    copies, weight = (
        llama_fp8.Fp8WeightCache(make, cached=False),
        torch.nn.Parameter(torch.ones(16, 16)),
    )
    assert copies.get_copy(weight) is not copies.get_copy(weight)
    assert weight_dtypes == [torch.bfloat16, torch.bfloat16]  # whatever the weight's dtype
    assert not copies.copies


@pytest.mark.parametrize(
    "changes",
    [{"qkv_bias": False}, {}, {"qk_norm": True, "window": 5}],
    ids=["plain", "bias", "varied"],
)
def test_fp8_score_blocks_answer_as_the_plain_modules(changes):
    """Hooks of modules run in both."""
    torch.manual_seed(1)
    model = Llama(replace(SHAPE, **changes)).to(torch.bfloat16)
    for block in model.layers:
        block.down.register_forward_hook(lambda module, inputs, out: 2 * out)
    llama_fp8.convert_to_fp8(model)
    tokens = torch.randint(0, SHAPE.vocab, (sum(LENGTHS),))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    rows, pick = make_packed_layout(LENGTHS, None, CPU), torch.arange(0, len(tokens), 3)
    with torch.inference_mode():
        blocks = [Fp8ScoreBlock(block, Fp8Kernels(False)) for block in model.layers]
        actual = model(tokens, positions, rows, "rows", pick, blocks=blocks)
        expected = model(tokens, positions, rows, "rows", pick)
    assert relative_error(actual, expected) <= 0.005  # plain norm and SwiGLU round twice
    stored_numbers = sum(tensor.numel() for tensor in llama_fp8.list_fp8_values(model))
    assert stored_numbers == 2 * (128 * 256 + 128 * 128 + 128 * 704 + 352 * 128)
    assert not any(
        name.startswith("layers") and p.dim() > 1 for name, p in model.named_parameters()
    )


def test_sizes_that_16_does_not_divide_are_refused():
    llama_fp8.check_fp8_sizes(SHAPE)
    with pytest.raises(
        RequestError,
        match="fp8 needs sizes that are multiples of 16, and ffn is 168 on each device",
    ):
        llama_fp8.check_fp8_sizes(replace(SHAPE, ffn=168))
