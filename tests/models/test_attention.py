"""Which attention kernels may be chosen, and what a sliding window means."""

import pytest
import torch

from steelyard.errors import RequestError
from steelyard.models.attention import (
    ATTENTION_KERNELS,
    WINDOW_KERNELS,
    attend_packed_rows,
    check_attention_kernel,
    choose_windowed_kernel,
    make_packed_layout,
)


@pytest.mark.parametrize("kernel", sorted(ATTENTION_KERNELS))
def test_scoring_accepts_every_kernel(kernel: str) -> None:
    assert check_attention_kernel(kernel, False) == kernel


@pytest.mark.parametrize(
    ("kernel", "others", "says"),
    [
        (
            "cudnn",
            (),
            (
                "tune.attention='cudnn' has wrong gradients for rows of different lengths; "
                "allowed: auto, efficient, flash, packed, rows"
            ),
        ),
        (
            "sdpa",
            (),
            "tune.attention='sdpa' is not known; allowed: auto, efficient, flash, packed, rows",
        ),
        (
            "psychic",
            ("sdpa",),
            (
                "tune.attention='psychic' is not known; allowed: auto, sdpa, efficient, flash,"
                " packed, rows"
            ),
        ),
    ],
)
def test_training_refuses_unknown_kernels_and_those_with_wrong_gradients(
    kernel: str, others: tuple[str, ...], says: str
) -> None:
    with pytest.raises(RequestError) as caught:
        check_attention_kernel(kernel, True, *others)
    assert str(caught.value) == says


def test_an_engine_may_add_kernels() -> None:
    assert check_attention_kernel("sdpa", True, "sdpa") == "sdpa"


def test_a_window_no_shorter_than_the_longest_row_is_ignored() -> None:
    for kernel in ATTENTION_KERNELS:
        assert choose_windowed_kernel(kernel, 4096, 4096, kernel) == kernel
        assert choose_windowed_kernel(kernel, None, 10**6, "auto") == kernel


@pytest.mark.parametrize("kernel", sorted(ATTENTION_KERNELS))
def test_kernels_without_a_window_are_refused_or_replaced(kernel: str) -> None:
    """Where a window is needed they are refused, and `auto` takes the plain kernel instead."""
    if kernel in WINDOW_KERNELS:
        assert (
            choose_windowed_kernel(kernel, 4096, 4097, "auto")
            == choose_windowed_kernel(kernel, 4096, 4097, kernel)
            == kernel
        )
        return
    assert choose_windowed_kernel(kernel, 4096, 4097, "auto") == "rows"
    with pytest.raises(RequestError) as caught:
        choose_windowed_kernel(kernel, 4096, 4097, kernel)
    assert (
        str(caught.value)
        == f"tune.attention={kernel!r} supports no window, and the model's window of 4096"
        " tokens is shorter than rows of 4097 tokens; allowed: auto, flash, packed, rows"
    )
    q = torch.randn(3, 1, 2)
    with pytest.raises(ValueError, match="supports no window"):
        attend_packed_rows(
            q, q, q, make_packed_layout([3], None, torch.device("cpu")), kernel, window=2
        )


@pytest.mark.parametrize("window", [1, 4, 9, 10])
def test_a_query_sees_its_window_and_nothing_else(window: int) -> None:
    """Changing a visible key's value changes the output, changing another does not; also in rows
    with a shared prefix.
    """
    device, query_lengths, key_lengths = torch.device("cpu"), [6, 2], [9, 7]
    torch.manual_seed(1)
    q, k, v = torch.randn(8, 2, 4), torch.randn(16, 1, 4), torch.randn(16, 1, 4)
    rows = make_packed_layout(query_lengths, key_lengths, device)
    out = attend_packed_rows(q, k, v, rows, "rows", window=window)
    for query, (first, last) in enumerate([*((0, 3 + i) for i in range(6)), (9, 14), (9, 15)]):
        begin = max(first, last - window + 1)
        for key in range(16):
            changed = v.clone()
            changed[key] += 5.0
            moved = not torch.allclose(
                attend_packed_rows(q, k, changed, rows, "rows", window=window)[query],
                out[query],
                atol=1e-6,
            )
            assert moved == (begin <= key <= last)
