"""Every attention kernel on a GPU, forward and backward, against the plain kernel in float64."""

import pytest
import torch

from steelyard.models.attention import (
    ATTENTION_KERNELS,
    FORWARD_ONLY_KERNELS,
    WINDOW_KERNELS,
    attend_packed_rows,
    make_packed_layout,
)

pytestmark = pytest.mark.gpu
LENGTHS = [5, 128, 1, 61, 33]


@pytest.mark.parametrize("kernel", sorted(ATTENTION_KERNELS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("window", [None, 1, 30])
def test_forward_and_backward_equal_the_plain_kernel(
    kernel: str, dtype: torch.dtype, groups: int, window: int | None
) -> None:
    if window is not None and kernel not in WINDOW_KERNELS:
        pytest.skip(f"{kernel} supports no window")
    if dtype == torch.float32 and kernel not in ("rows", "efficient"):
        pytest.skip(f"{kernel} knows 16 bits alone")
    device = torch.device("cuda")
    torch.manual_seed(0)
    shapes = [(sum(LENGTHS), heads, 64) for heads in (4, 4 // groups, 4 // groups, 4)]
    *inputs, output_gradient = (
        torch.randn(shape, device=device, dtype=torch.float64) for shape in shapes
    )
    rows = make_packed_layout(LENGTHS, None, device)

    def run_kernel(kernel_name: str, compute_dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [
            tensor.to(dtype).to(compute_dtype).requires_grad_(learns) for tensor in inputs
        ]  # rounded alike
        out = attend_packed_rows(leaves[0], leaves[1], leaves[2], rows, kernel_name, window=window)
        if not learns:
            return [out.double()]
        return [
            tensor.double()
            for tensor in (
                out.detach(),
                *torch.autograd.grad(out, leaves, output_gradient.to(dtype).to(compute_dtype)),
            )
        ]

    learns = kernel not in FORWARD_ONLY_KERNELS
    allowed = 1e-5 if dtype == torch.float32 else 0.02
    for actual, expected in zip(
        run_kernel(kernel, dtype), run_kernel("rows", torch.float64), strict=True
    ):
        # With a window of one key, gradients of queries and keys are zero but for rounding, so
        # errors are relative to the output gradient.
        assert (
            float(
                (actual - expected).norm() / torch.maximum(expected.norm(), output_gradient.norm())
            )
            <= allowed
        )
