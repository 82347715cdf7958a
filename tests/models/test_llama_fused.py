"""The block that accumulates its own weight gradients: outputs and gradients equal those of the
plain block.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from steelyard.engines.torch.llama_stage import recompute_block
from steelyard.kernels import add_norm, rotary, swiglu
from steelyard.models import llama_fused
from steelyard.models.attention import make_packed_layout
from steelyard.models.llama import LlamaBlock, LlamaShape, split_qkv
from steelyard.models.llama import compute_rotary_cos_sin as angles
from steelyard.models.llama_fused import (
    AccumulatingLinears,
    BlockKernels,
    FusedBlock,
    ScoringLinears,
)

pytestmark = pytest.mark.usefixtures("one_thread")

BASE = LlamaShape(
    layers=1, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=160, vocab=131, positions=64
)
SHAPES = {
    "mha": BASE,
    "gqa": replace(BASE, kv_heads=2),
    "mqa": replace(BASE, kv_heads=1),
    "bias": replace(BASE, qkv_bias=True),
    "norms": replace(BASE, kv_heads=2, qk_norm=True, head_dim=24),
    "window": replace(BASE, kv_heads=2, window=5),
}
LENGTHS = [7, 1, 19, 12]


def make_block(shape: LlamaShape, dtype: torch.dtype) -> LlamaBlock:
    """Return a transformer block with seeded random weights."""
    torch.manual_seed(3)
    block = LlamaBlock(shape).to(dtype)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return block


def random_streams(shape: LlamaShape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the inputs of a block: residual stream, delta, and cosines and sines of the
    positions.
    """
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    x, delta = (
        torch.randn(len(positions), shape.hidden, dtype=dtype, requires_grad=True) for _ in range(2)
    )
    return x, delta, *angles(positions, shape, dtype)


def gradients(block, inputs: tuple[Tensor, ...], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run a block forward and backward; return the gradients of both streams and of the given
    weights, for a fixed weighted sum of both outputs.
    """
    x, delta, cos, sin = inputs
    out = block(
        x, delta, cos, sin, make_packed_layout(LENGTHS, None, torch.device("cpu")), "rows", None
    )
    scale = torch.linspace(-1, 1, out[0].numel(), dtype=x.dtype).view_as(out[0])
    (out[0] * scale + out[1] * scale.flip(0)).sum().backward()
    return {"x": x.grad, "delta": delta.grad} | {
        name: weight.grad for name, weight in weights.items()
    }


def fused_and_plain_gradients(
    shape: LlamaShape, dtype: torch.dtype, recompute: str, compiled: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of the fused block and those of the plain block, for equal weights and
    inputs.

    Asserts that autograd computes only gradients of vectors, and that the buffer of each matrix is
    requested once.
    """
    plain_block, fused_weights = make_block(shape, dtype), make_block(shape, dtype)
    inputs = random_streams(shape, dtype)
    expected = gradients(plain_block, inputs, dict(plain_block.named_parameters()))
    sums = {id(p): torch.zeros_like(p) for p in fused_weights.parameters()}
    copied_inputs = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs)
    requested: list[int] = []

    def gradient(parameter: Tensor) -> Tensor:
        requested.append(id(parameter))
        return sums[id(parameter)]

    run = recompute_block(
        FusedBlock(fused_weights, AccumulatingLinears(gradient), BlockKernels(compiled)), recompute
    )
    fused_gradients = gradients(run, copied_inputs, {})
    for name, parameter in fused_weights.named_parameters():
        by_autograd = parameter.grad is not None
        fused_gradients[name] = parameter.grad if by_autograd else sums[id(parameter)]
        assert by_autograd == (parameter.dim() == 1), name
        # the buffer is requested once, by backward
        assert requested.count(id(parameter)) == int(not by_autograd), name
    return fused_gradients, expected


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_equal_those_of_the_plain_block(name, recompute):
    actual, expected = fused_and_plain_gradients(SHAPES[name], torch.float64, recompute, False)
    assert actual.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(actual[key], gradient, rtol=1e-10, atol=1e-10, msg=key)


@pytest.mark.full
@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "recompute"), [("gqa", "none"), ("gqa", "selective"), ("norms", "none")]
)
def test_compiled_kernels_give_the_same_gradients(name, recompute):
    actual, expected = fused_and_plain_gradients(
        SHAPES[name], torch.float32, recompute, compiled=True
    )
    for key, gradient in expected.items():
        torch.testing.assert_close(actual[key], gradient, rtol=1e-4, atol=1e-4, msg=key)


def test_bf16_weight_gradients_accumulate_in_fp32():
    total = torch.full((3, 2), 256.0)
    grad, x = (
        torch.ones(4, 3, dtype=torch.bfloat16),
        torch.full((4, 2), 2**-4, dtype=torch.bfloat16),
    )
    llama_fused.add_product(total, grad, x)
    assert torch.equal(total, torch.full((3, 2), 256.25))  # bf16 has no number between 256 and 258


def test_the_fused_block_saves_fewer_tensors_for_backward():
    """It saves neither the input of `down` nor queries and keys a second time."""
    shape, dtype = BASE, torch.bfloat16
    block = make_block(shape, dtype)
    x, delta, cos, sin = random_streams(shape, dtype)
    excluded = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), cos, sin)}
    widths: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in excluded and tensor.dtype == dtype:
            widths[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // (
                dtype.itemsize * len(x)
            )
        return tensor

    run = FusedBlock(block, AccumulatingLinears(torch.zeros_like), BlockKernels(False))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run(
            x,
            delta,
            cos,
            sin,
            make_packed_layout([len(x)], None, torch.device("cpu")),
            "rows",
            None,
        )
    assert shape.ffn not in widths.values()
    assert 2 * shape.ffn in widths.values()
    assert 3 * shape.hidden not in widths.values()  # the output of qkv is not saved


def test_handwritten_gradients_equal_autograd():
    qkv, gate_up = (
        torch.randn(9, width, dtype=torch.float64, requires_grad=True) for width in (8 * 16, 96)
    )
    shape = SHAPES["gqa"]
    cos, sin = angles(torch.arange(9), shape, torch.float64)
    out = split_qkv(qkv, cos, sin, shape)
    for tensor, plain_tensor in zip(rotary.split_rotated_heads(qkv, cos, sin, 2), out, strict=True):
        assert torch.equal(tensor, plain_tensor)
    grads = [torch.randn_like(tensor) for tensor in out]
    [expected] = torch.autograd.grad(out, qkv, grads)
    torch.testing.assert_close(rotary.split_rotated_heads_backward(*grads, cos, sin), expected)
    x, delta = (torch.randn(9, 24, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(24, dtype=torch.float64, requires_grad=True)
    total, normed, scale = add_norm.add_norm(x, delta, weight, 1e-5)
    torch.testing.assert_close(normed, F.rms_norm(x + delta, (24,), weight, 1e-5))
    total_grad, grad = torch.randn_like(total), torch.randn_like(normed)
    actual = add_norm.add_norm_backward(total, scale, weight, total_grad, grad)
    expected = torch.autograd.grad((total, normed), (x, weight), (total_grad, grad))
    for tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor, expected_tensor)
    activation = swiglu.swiglu_interleaved(gate_up, 8)
    grad = torch.randn_like(activation)
    back, recomputed_activation = swiglu.swiglu_interleaved_backward(gate_up, grad, 8)
    torch.testing.assert_close(back, torch.autograd.grad(activation, gate_up, grad)[0])
    torch.testing.assert_close(recomputed_activation, activation)


@pytest.mark.parametrize("name", SHAPES)
def test_scoring_answers_as_the_plain_block(name):
    """Hooks of modules run too; tensor-parallel groups sum by them."""
    block, streams_in = (
        make_block(SHAPES[name], torch.float64),
        random_streams(SHAPES[name], torch.float64),
    )
    for module in (block.out, block.down):
        module.register_forward_hook(lambda module, inputs, out: 2 * out)
    rows = make_packed_layout(LENGTHS, None, torch.device("cpu"))
    with torch.inference_mode():
        actual = FusedBlock(block, ScoringLinears(), BlockKernels(False))(
            *streams_in, rows, "rows", None
        )
        expected = block(*streams_in, rows, "rows", None)
    for stream, expected_stream in zip(actual, expected, strict=True):
        torch.testing.assert_close(stream, expected_stream, rtol=1e-12, atol=1e-12)
