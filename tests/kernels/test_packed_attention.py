"""Our own attention kernel: which rows it sees, and where it is refused. tests/gpu has what it computes."""

import pytest
import torch

from steelyard.errors import RequestError
from steelyard.kernels import packed_attention
from steelyard.models.attention import KERNELS, attend, layout, steady_layout

CPU = torch.device("cpu")


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
    with pytest.raises(RequestError, match="does not support shared prefixes"):
        rows = layout([4], [8], CPU)
        KERNELS["packed"](q[:4], q, q, rows.cu_q, rows.cu_k, rows.max_q, rows.max_k)
