"""Our own attention kernel: which keys a query sees, and where the kernel is refused. tests/gpu
tests what it computes.
"""

import pytest
import torch

from steelyard.errors import RequestError
from steelyard.kernels import packed_attention
from steelyard.models.attention import (
    ATTENTION_KERNELS,
    attend_packed_rows,
    make_fixed_size_layout,
    make_packed_layout,
)

CPU = torch.device("cpu")


def test_visible_ranges_of_tokens_in_packed_rows():
    rows = make_fixed_size_layout([3, 1, 4], 8, CPU)  # padded by empty rows
    ranges = rows.visible_ranges(8, None)
    assert ranges.first_key.tolist() == [0, 0, 0, 3, 4, 4, 4, 4]
    assert ranges.keys_end.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert ranges.queries_end.tolist() == [3, 3, 3, 4, 8, 8, 8, 8]
    assert rows.visible_ranges(8, None) is ranges  # cached for all layers


def test_a_query_behind_a_shared_prefix_sees_it_and_its_own_past():
    ranges = make_packed_layout([2, 1], [5, 3], CPU).visible_ranges(3, None)
    assert ranges.first_key.tolist() == [0, 0, 5]
    assert ranges.keys_end.tolist() == [4, 5, 8]


def test_with_a_window_a_query_sees_the_last_keys_alone():
    ranges = make_packed_layout([5, 2], None, CPU).visible_ranges(7, 3)
    assert ranges.first_key.tolist() == [0, 0, 0, 1, 2, 5, 5]
    assert ranges.keys_end.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert ranges.queries_end.tolist() == [3, 4, 5, 5, 5, 7, 7]
    ranges = make_packed_layout([2, 1], [5, 3], CPU).visible_ranges(3, 2)
    assert ranges.first_key.tolist() == [2, 3, 6]
    assert ranges.keys_end.tolist() == [4, 5, 8]


def test_the_kernel_is_refused_on_a_cpu():
    q = torch.randn(8, 2, 32, dtype=torch.bfloat16)
    assert not packed_attention.is_supported(CPU, torch.bfloat16, 128)
    with pytest.raises(RequestError, match="needs a GPU with Triton"):
        attend_packed_rows(q, q, q, make_packed_layout([8], None, CPU), "packed")


def test_gradients_of_rows_with_shared_prefixes_are_refused(monkeypatch):
    monkeypatch.setattr(packed_attention, "is_supported", lambda *args: True)
    q = torch.randn(8, 2, 32, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RequestError, match="computes no gradients of rows with shared prefixes"):
        ATTENTION_KERNELS["packed"](q[:4], q, q, make_packed_layout([4], [8], CPU))
