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
def test_outputs_and_gradients(heads, groups, dim, dtype, window):
    device = torch.device("cuda")
    rows = make_fixed_size_layout(LENGTHS, 2048, device)
    torch.manual_seed(3)
    given = [
        torch.randn(sum(LENGTHS), n, dim, device=device, dtype=dtype)
        for n in (heads, groups, groups)
    ]
    grad = torch.randn(sum(LENGTHS), heads, dim, device=device, dtype=dtype)

    def computed(kernel, kind):
        leaves = [one.to(kind, copy=True).requires_grad_(True) for one in given]
        out = attend_packed_rows(*leaves, rows, kernel, window=window)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(kind))]

    for one, exact in zip(computed("packed", dtype), computed("rows", torch.float64), strict=True):
        assert (one.double() - exact).norm() / exact.norm() < 5e-3


@pytest.mark.parametrize("heads", [(4, 4), (6, 1)])
@pytest.mark.parametrize("window", [None, 100])
def test_rows_with_shared_prefixes(heads, window):
    """Rows are laid out as in scoring: keys of the prefix come before each row's own."""
    device = torch.device("cuda")
    more = [n + extra for n, extra in zip(LENGTHS, (300, 0, 64, 1, 129, 500), strict=True)]
    rows = make_packed_layout(LENGTHS, more, device)
    torch.manual_seed(4)
    q = torch.randn(sum(LENGTHS), heads[0], 128, device=device, dtype=torch.bfloat16)
    k, v = (
        torch.randn(sum(more), heads[1], 128, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    with torch.no_grad():
        one = attend_packed_rows(q, k, v, rows, "packed", window=window)
        exact = attend_packed_rows(q.double(), k.double(), v.double(), rows, "rows", window=window)
    assert (one.double() - exact).norm() / exact.norm() < 5e-3
