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


def test_of_every_token_the_borders_of_its_row():
    rows = make_fixed_size_layout([3, 1, 4], 8, CPU)  # padded by empty rows
    of = rows.visible_ranges(8, None)
    assert of.first_key.tolist() == [0, 0, 0, 3, 4, 4, 4, 4]
    assert of.keys_end.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert of.queries_end.tolist() == [3, 3, 3, 4, 8, 8, 8, 8]
    assert rows.visible_ranges(8, None) is of  # cached for all layers


def test_a_query_behind_a_shared_prefix_sees_it_and_its_own_past():
    of = make_packed_layout([2, 1], [5, 3], CPU).visible_ranges(3, None)
    assert of.first_key.tolist() == [0, 0, 5]
    assert of.keys_end.tolist() == [4, 5, 8]


def test_with_a_window_a_query_sees_the_last_keys_alone():
    of = make_packed_layout([5, 2], None, CPU).visible_ranges(7, 3)
    assert of.first_key.tolist() == [0, 0, 0, 1, 2, 5, 5]
    assert of.keys_end.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert of.queries_end.tolist() == [3, 4, 5, 5, 5, 7, 7]
    of = make_packed_layout([2, 1], [5, 3], CPU).visible_ranges(3, 2)
    assert of.first_key.tolist() == [2, 3, 6]
    assert of.keys_end.tolist() == [4, 5, 8]


def test_it_is_refused_where_it_cannot_be():
    q = torch.randn(8, 2, 32, dtype=torch.bfloat16)
    assert not packed_attention.is_supported(CPU, torch.bfloat16, 128)
    with pytest.raises(RequestError, match="needs a GPU with Triton"):
        attend_packed_rows(q, q, q, make_packed_layout([8], None, CPU), "packed")


def test_it_learns_nothing_from_shared_prefixes(monkeypatch):
    monkeypatch.setattr(packed_attention, "is_supported", lambda *of: True)
    q = torch.randn(8, 2, 32, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RequestError, match="learns nothing from rows with shared prefixes"):
        ATTENTION_KERNELS["packed"](q[:4], q, q, make_packed_layout([4], [8], CPU))
