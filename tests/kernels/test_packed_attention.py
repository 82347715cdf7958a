"""Our own attention kernel: which rows it sees anywhere; what it computes, where there is a device for it."""

import numpy as np
import pytest
import torch

from steelyard.data.rows import IGNORED, Row
from steelyard.engines.torch.train import GRAIN, without_padding
from steelyard.errors import RequestError
from steelyard.kernels import jit, packed_attention
from steelyard.models.attention import KERNELS, attend, layout, steady_layout
from steelyard.training.loop import packed

CPU = torch.device("cpu")
LENGTHS = [700, 13, 1, 900, 386, 48]


def test_of_every_token_the_borders_of_its_row():
    rows = steady_layout([3, 1, 4], 8, CPU)  # with empty rows behind
    begin, end = packed_attention.borders(rows.cu_q, 8)
    assert begin.tolist() == [0, 0, 0, 3, 4, 4, 4, 4]
    assert end.tolist() == [3, 3, 3, 4, 8, 8, 8, 8]


def test_it_is_refused_where_it_cannot_be():
    q = torch.randn(8, 2, 32, dtype=torch.bfloat16)
    assert not packed_attention.serves(CPU, torch.bfloat16, 128)
    with pytest.raises(RequestError, match="needs a GPU with Triton"):
        attend(q, q, q, layout([8], None, CPU), "packed")
    with pytest.raises(RequestError, match="no shared prefixes"):
        rows = layout([4], [8], CPU)
        KERNELS["packed"](q[:4], q, q, rows.cu_q, rows.cu_k, rows.max_q, rows.max_k)


@pytest.mark.skipif(not (torch.cuda.is_available() and jit.HERE), reason="no device with Triton")
@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 4, 128), (4, 2, 64), (2, 1, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_and_gradients(heads, groups, dim, dtype):
    device = torch.device("cuda")
    rows = steady_layout(LENGTHS, 2048, device)
    torch.manual_seed(3)
    given = [torch.randn(sum(LENGTHS), n, dim, device=device, dtype=dtype) for n in (heads, groups, groups)]
    grad = torch.randn(sum(LENGTHS), heads, dim, device=device, dtype=dtype)

    def computed(kernel, kind):
        leaves = [one.to(kind, copy=True).requires_grad_(True) for one in given]
        out = attend(*leaves, rows, kernel)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(kind))]

    for one, exact in zip(computed("packed", dtype), computed("rows", torch.float64), strict=True):
        assert (one.double() - exact).norm() / exact.norm() < 5e-3


def row(lens: tuple[int, ...], padding: int) -> Row:
    real = sum(lens)
    tokens = np.arange(1, real + padding + 1)
    targets = np.where(tokens <= real, tokens + 1, IGNORED)
    return Row(tokens, targets, (*lens, padding) if padding else lens, real, len(lens))


def test_padding_is_left_out_but_for_a_few_tokens_at_the_end():
    rows = [row((100, 50), 50), row((200,), 0), row((10, 20, 30), 140)]
    found, full = packed(without_padding(rows)), packed(rows)
    assert len(found.tokens) == 512 == -(-410 // GRAIN) * GRAIN
    assert found.counts == full.counts | {"padded": 102}
    assert found.lens == [100, 50, 200, 10, 20, 30, 102]
    assert found.targets.tolist() == full.targets.tolist()
    assert found.tokens[found.pick].tolist() == full.tokens[full.pick].tolist()
    assert found.positions[found.pick].tolist() == full.positions[full.pick].tolist()


def test_rows_without_padding_stay_as_they_are():
    rows = [row((128,), 0), row((100, 28), 0)]
    assert without_padding(rows) == rows
