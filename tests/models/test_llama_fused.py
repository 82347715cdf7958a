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


def block_of(shape: LlamaShape, dtype: torch.dtype) -> LlamaBlock:
    """Return a transformer block with seeded random weights."""
    torch.manual_seed(3)
    block = LlamaBlock(shape).to(dtype)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return block


def streams(shape: LlamaShape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the inputs of a block: residual stream, delta, and cosines and sines of the positions."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    x, delta = (
        torch.randn(len(positions), shape.hidden, dtype=dtype, requires_grad=True) for _ in range(2)
    )
    return x, delta, *angles(positions, shape, dtype)


def gradients(run, given: tuple[Tensor, ...], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run a block forward and backward; return the gradients of both streams and of the given
    weights, for a fixed weighted sum of both outputs.
    """
    x, delta, cos, sin = given
    out = run(
        x, delta, cos, sin, make_packed_layout(LENGTHS, None, torch.device("cpu")), "rows", None
    )
    scale = torch.linspace(-1, 1, out[0].numel(), dtype=x.dtype).view_as(out[0])
    (out[0] * scale + out[1] * scale.flip(0)).sum().backward()
    return {"x": x.grad, "delta": delta.grad} | {
        name: weight.grad for name, weight in weights.items()
    }


def both(
    shape: LlamaShape, dtype: torch.dtype, recompute: str, compiled: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of the fused block and those of the plain block, for equal weights and
    inputs.

    Asserts that autograd computes only gradients of vectors, and that the buffer of each matrix is
    requested once.
    """
    plain, own = block_of(shape, dtype), block_of(shape, dtype)
    given = streams(shape, dtype)
    expected = gradients(plain, given, dict(plain.named_parameters()))
    kept = {id(p): torch.zeros_like(p) for p in own.parameters()}
    again = tuple(one.detach().requires_grad_(one.requires_grad) for one in given)
    asked: list[int] = []

    def gradient(parameter: Tensor) -> Tensor:
        asked.append(id(parameter))
        return kept[id(parameter)]

    run = recompute_block(
        FusedBlock(own, AccumulatingLinears(gradient), BlockKernels(compiled)), recompute
    )
    found = gradients(run, again, {})
    for name, parameter in own.named_parameters():
        by_autograd = parameter.grad is not None
        found[name] = parameter.grad if by_autograd else kept[id(parameter)]
        assert by_autograd == (parameter.dim() == 1), name
        # the buffer is requested once, by backward
        assert asked.count(id(parameter)) == int(not by_autograd), name
    return found, expected


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_those_of_the_plain_block(name, recompute):
    found, expected = both(SHAPES[name], torch.float64, recompute, False)
    assert found.keys() == expected.keys()
    for key, one in expected.items():
        torch.testing.assert_close(found[key], one, rtol=1e-10, atol=1e-10, msg=key)


@pytest.mark.full
@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "recompute"), [("gqa", "none"), ("gqa", "selective"), ("norms", "none")]
)
def test_compiled_pieces_do_not_change_them(name, recompute):
    found, expected = both(SHAPES[name], torch.float32, recompute, compiled=True)
    for key, one in expected.items():
        torch.testing.assert_close(found[key], one, rtol=1e-4, atol=1e-4, msg=key)


def test_sums_are_added_to_in_their_own_precision():
    kept = torch.full((3, 2), 256.0)
    grad, x = (
        torch.ones(4, 3, dtype=torch.bfloat16),
        torch.full((4, 2), 2**-4, dtype=torch.bfloat16),
    )
    llama_fused.add_product(kept, grad, x)
    assert torch.equal(kept, torch.full((3, 2), 256.25))  # bf16 has no number between 256 and 258


def test_less_is_kept_than_by_the_plain_block():
    """It saves neither the input of `down` nor queries and keys a second time."""
    shape, dtype = BASE, torch.bfloat16
    block = block_of(shape, dtype)
    x, delta, cos, sin = streams(shape, dtype)
    aside = {one.untyped_storage().data_ptr() for one in (*block.parameters(), cos, sin)}
    widths: dict[int, int] = {}

    def note(one: Tensor) -> Tensor:
        if one.untyped_storage().data_ptr() not in aside and one.dtype == dtype:
            widths[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes() // (
                dtype.itemsize * len(x)
            )
        return one

    run = FusedBlock(block, AccumulatingLinears(torch.zeros_like), BlockKernels(False))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda one: one):
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


def test_the_written_gradients_are_those_of_autograd():
    qkv, gate_up = (
        torch.randn(9, width, dtype=torch.float64, requires_grad=True) for width in (8 * 16, 96)
    )
    shape = SHAPES["gqa"]
    cos, sin = angles(torch.arange(9), shape, torch.float64)
    out = split_qkv(qkv, cos, sin, shape)
    for one, plain in zip(rotary.split_rotated_heads(qkv, cos, sin, 2), out, strict=True):
        assert torch.equal(one, plain)
    grads = [torch.randn_like(one) for one in out]
    [expected] = torch.autograd.grad(out, qkv, grads)
    torch.testing.assert_close(rotary.split_rotated_heads_backward(*grads, cos, sin), expected)
    x, delta = (torch.randn(9, 24, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(24, dtype=torch.float64, requires_grad=True)
    total, normed, scale = add_norm.add_norm(x, delta, weight, 1e-5)
    torch.testing.assert_close(normed, F.rms_norm(x + delta, (24,), weight, 1e-5))
    more, grad = torch.randn_like(total), torch.randn_like(normed)
    found = add_norm.add_norm_backward(total, scale, weight, more, grad)
    expected = torch.autograd.grad((total, normed), (x, weight), (more, grad))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    wide = swiglu.swiglu_interleaved(gate_up, 8)
    grad = torch.randn_like(wide)
    back, again = swiglu.swiglu_interleaved_backward(gate_up, grad, 8)
    torch.testing.assert_close(back, torch.autograd.grad(wide, gate_up, grad)[0])
    torch.testing.assert_close(again, wide)


@pytest.mark.parametrize("name", SHAPES)
def test_scoring_answers_as_the_plain_block(name):
    """Hooks of modules run too; tensor-parallel groups sum by them."""
    block, given = block_of(SHAPES[name], torch.float64), streams(SHAPES[name], torch.float64)
    for module in (block.out, block.down):
        module.register_forward_hook(lambda module, inputs, out: 2 * out)
    rows = make_packed_layout(LENGTHS, None, torch.device("cpu"))
    with torch.inference_mode():
        found = FusedBlock(block, ScoringLinears(), BlockKernels(False))(*given, rows, "rows", None)
        expected = block(*given, rows, "rows", None)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
