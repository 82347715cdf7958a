"""Our own attention kernel against the plain kernel in float64."""

import pytest
import torch

from steelyard.kernels import jit
from steelyard.models.attention import (
    attend_packed_rows,
    make_fixed_size_layout,
    make_packed_layout,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and jit.TRITON_INSTALLED), reason="no device with Triton"
    ),
]
LENGTHS = [700, 13, 1, 900, 386, 48]


@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 4, 128), (4, 2, 64), (2, 1, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 2, 65, 300])
def test_outputs_and_gradients_are_near_fp64(heads, groups, dim, dtype, window):
    device = torch.device("cuda")
    rows = make_fixed_size_layout(LENGTHS, 2048, device)
    torch.manual_seed(3)
    inputs = [
        torch.randn(sum(LENGTHS), n, dim, device=device, dtype=dtype)
        for n in (heads, groups, groups)
    ]
    grad = torch.randn(sum(LENGTHS), heads, dim, device=device, dtype=dtype)

    def run_kernel(kernel, kind):
        leaves = [tensor.to(kind, copy=True).requires_grad_(True) for tensor in inputs]
        out = attend_packed_rows(*leaves, rows, kernel, window=window)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(kind))]

    for actual, exact in zip(
        run_kernel("packed", dtype), run_kernel("rows", torch.float64), strict=True
    ):
        assert (actual.double() - exact).norm() / exact.norm() < 5e-3


@pytest.mark.parametrize("heads", [(4, 4), (6, 1)])
@pytest.mark.parametrize("window", [None, 100])
def test_rows_with_shared_prefixes_are_near_fp64(heads, window):
    """Rows are laid out as in scoring: keys of the prefix come before each row's own."""
    device = torch.device("cuda")
    key_lengths = [n + extra for n, extra in zip(LENGTHS, (300, 0, 64, 1, 129, 500), strict=True)]
    rows = make_packed_layout(LENGTHS, key_lengths, device)
    torch.manual_seed(4)
    q = torch.randn(sum(LENGTHS), heads[0], 128, device=device, dtype=torch.bfloat16)
    k, v = (
        torch.randn(sum(key_lengths), heads[1], 128, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    with torch.no_grad():
        actual = attend_packed_rows(q, k, v, rows, "packed", window=window)
        exact = attend_packed_rows(q.double(), k.double(), v.double(), rows, "rows", window=window)
    assert (actual.double() - exact).norm() / exact.norm() < 5e-3
