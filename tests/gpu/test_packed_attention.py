"""Our own attention kernel against the plain one in float64."""

import pytest
import torch

from steelyard.kernels import jit
from steelyard.models.attention import attend, steady_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and jit.HERE), reason="no device with Triton"),
]
LENGTHS = [700, 13, 1, 900, 386, 48]


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
