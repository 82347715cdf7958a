"""The block that adds its weight gradients itself: the same outputs and gradients as the plain one, in every arrangement."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from steelyard.engines.torch.train import _recomputed
from steelyard.models import llama_fused
from steelyard.models.attention import layout
from steelyard.models.llama import Block, LlamaShape, gated, heads, rotary
from steelyard.models.llama_fused import FusedBlock, Pieces

pytestmark = pytest.mark.usefixtures("one_thread")

BASE = LlamaShape(layers=1, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=160, vocab=131, positions=64)
SHAPES = {"mha": BASE, "gqa": replace(BASE, kv_heads=2), "mqa": replace(BASE, kv_heads=1), "bias": replace(BASE, qkv_bias=True)}
LENGTHS = [7, 1, 19, 12]


def block_of(shape: LlamaShape, dtype: torch.dtype) -> Block:
    torch.manual_seed(3)
    block = Block(shape).to(dtype)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return block


def streams(shape: LlamaShape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    x, delta = (torch.randn(len(positions), shape.hidden, dtype=dtype, requires_grad=True) for _ in range(2))
    return x, delta, *rotary(positions, shape, dtype)


def gradients(run, given: tuple[Tensor, ...], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a fixed sum over both streams, for both inputs and all weights."""
    x, delta, cos, sin = given
    out = run(x, delta, cos, sin, layout(LENGTHS, None, torch.device("cpu")), "rows", None)
    scale = torch.linspace(-1, 1, out[0].numel(), dtype=x.dtype).view_as(out[0])
    (out[0] * scale + out[1] * scale.flip(0)).sum().backward()
    return {"x": x.grad, "delta": delta.grad} | {name: weight.grad for name, weight in weights.items()}


def both(shape: LlamaShape, dtype: torch.dtype, recompute: str, compiled: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of the plain block, and of the fused one on a second micro-batch as well: sums are added to."""
    plain, own = block_of(shape, dtype), block_of(shape, dtype)
    given = streams(shape, dtype)
    expected = gradients(plain, given, dict(plain.named_parameters()))
    kept = {id(p): torch.zeros_like(p) for p in own.parameters()}
    again = tuple(one.detach().requires_grad_(one.requires_grad) for one in given)
    run = _recomputed(FusedBlock(own, lambda p: kept[id(p)], Pieces(compiled)), recompute)
    found = gradients(run, again, {})
    for name, parameter in own.named_parameters():
        by_autograd = parameter.grad is not None
        found[name] = parameter.grad if by_autograd else kept[id(parameter)]
        assert by_autograd == (parameter.dim() == 1), name
    return found, expected


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_those_of_the_plain_block(name, recompute):
    found, expected = both(SHAPES[name], torch.float64, recompute, compiled=False)
    assert found.keys() == expected.keys()
    for key, one in expected.items():
        torch.testing.assert_close(found[key], one, rtol=1e-10, atol=1e-10, msg=key)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_compiled_pieces_do_not_change_them(recompute):
    found, expected = both(SHAPES["gqa"], torch.float32, recompute, compiled=True)
    for key, one in expected.items():
        torch.testing.assert_close(found[key], one, rtol=1e-4, atol=1e-4, msg=key)


def test_sums_are_added_to_in_their_own_precision():
    kept = torch.full((3, 2), 256.0)
    grad, x = torch.ones(4, 3, dtype=torch.bfloat16), torch.full((4, 2), 2**-4, dtype=torch.bfloat16)
    llama_fused.add_product(kept, grad, x)
    assert torch.equal(kept, torch.full((3, 2), 256.25))  # bf16 has no number between 256 and 258


def test_less_is_kept_than_by_the_plain_block():
    """Neither the input of down, nor queries and keys twice."""
    shape, dtype = BASE, torch.bfloat16
    block = block_of(shape, dtype)
    kept = {id(p): torch.zeros_like(p) for p in block.parameters()}
    x, delta, cos, sin = streams(shape, dtype)
    aside = {one.untyped_storage().data_ptr() for one in (*block.parameters(), cos, sin)}
    widths: dict[int, int] = {}

    def note(one: Tensor) -> Tensor:
        if one.untyped_storage().data_ptr() not in aside and one.dtype == dtype:
            widths[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes() // (dtype.itemsize * len(x))
        return one

    run = FusedBlock(block, lambda p: kept[id(p)], Pieces(False))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda one: one):
        run(x, delta, cos, sin, layout([len(x)], None, torch.device("cpu")), "rows", None)
    assert shape.ffn not in widths.values()
    assert 2 * shape.ffn in widths.values()
    assert 3 * shape.hidden not in widths.values()  # the output of qkv


def test_the_written_gradients_are_those_of_autograd():
    qkv, gate_up = (torch.randn(9, width, dtype=torch.float64, requires_grad=True) for width in (8 * 16, 96))
    shape = SHAPES["gqa"]
    cos, sin = rotary(torch.arange(9), shape, torch.float64)
    out = heads(qkv, cos, sin, shape)
    for one, plain in zip(llama_fused.split(qkv, cos, sin, 2), out, strict=True):
        assert torch.equal(one, plain)
    grads = [torch.randn_like(one) for one in out]
    [expected] = torch.autograd.grad(out, qkv, grads)
    torch.testing.assert_close(llama_fused.join(*grads, cos, sin), expected)
    x, delta = (torch.randn(9, 24, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(24, dtype=torch.float64, requires_grad=True)
    total, normed, scale = llama_fused.add_norm(x, delta, weight, 1e-5)
    torch.testing.assert_close(normed, F.rms_norm(x + delta, (24,), weight, 1e-5))
    more, grad = torch.randn_like(total), torch.randn_like(normed)
    found = llama_fused.add_norm_backward(total, scale, weight, more, grad)
    expected = torch.autograd.grad((total, normed), (x, weight), (more, grad))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    wide = gated(gate_up, 8)
    grad = torch.randn_like(wide)
    back, again = llama_fused.gated_backward(gate_up, grad, 8)
    torch.testing.assert_close(back, torch.autograd.grad(wide, gate_up, grad)[0])
    torch.testing.assert_close(again, wide)


KERNELS = """
import torch
from steelyard.kernels import llama as kernels
from steelyard.models import llama_fused as fused

def near(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)

on_device = torch.cuda.is_available()
torch.set_default_device("cuda" if on_device else "cpu")
torch.manual_seed(5)
for queries, groups, dim in ((1, 4, 16), (3, 2, 12), (2, 19, 128)):
    cos, sin = torch.randn(2, 5, 1, dim // 2)
    wide = cos.double(), sin.double()
    qkv = torch.randn(5, groups * (queries + 2) * dim)
    out = fused.split(qkv.double(), *wide, queries)
    near(kernels.split(qkv, cos, sin, queries), out)
    grads = [torch.randn(one.shape) for one in out]
    near([kernels.join(*grads, cos, sin)], [fused.join(*(one.double() for one in grads), *wide)])
for block in (8, 4, 2, 1):
    gate_up, grad = torch.randn(7, 2 * block * 37), torch.randn(7, block * 37)
    near([kernels.gated(gate_up, block)], [fused.gated(gate_up.double(), block)])
    near(kernels.gated_backward(gate_up, grad, block), fused.gated_backward(gate_up.double(), grad.double(), block))
x, delta, more, grad = torch.randn(4, 9, 24)
weight = torch.randn(24)
expected = fused.add_norm(x.double(), delta.double(), weight.double(), 1e-5)
found = kernels.add_norm(x, delta, weight, 1e-5)
near(found, expected)
back = fused.add_norm_backward(expected[0], expected[2], weight.double(), more.double(), grad.double())
kernels.PARTS = 4  # fewer than there are tokens
if on_device:  # the interpreter has no loops from a program's number on with every numpy
    near(kernels.add_norm_backward(found[0], found[2], weight, more, grad), back)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="the kernels' language is not installed")
def test_kernels_on_a_device_or_by_their_interpreter():
    env = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    subprocess.run([sys.executable, "-c", KERNELS], env=env, check=True)
