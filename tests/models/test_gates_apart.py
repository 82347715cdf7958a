"""Gate and up stored as two halves, as on a CPU: the same weights and the same logits as
interleaved.
"""

from dataclasses import asdict

import pytest
import torch

from steelyard.models import llama_init, llama_placements
from steelyard.models.attention import make_packed_layout
from steelyard.models.llama import GateFirstShape, LlamaShape
from steelyard.models.llama_placements import WHOLE

SHAPE = LlamaShape(
    layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=48, vocab=64, positions=32
)
APART = GateFirstShape(**asdict(SHAPE))
LENS = [5, 9, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_have_the_same_weights_and_answers(dtype: torch.dtype) -> None:
    assert (SHAPE.gate_up_chunk, APART.gate_up_chunk) == (8, 48)
    models = []
    for shape in (SHAPE, APART):
        made = llama_init.build_llama(shape, torch.device("cpu"), dtype)
        llama_init.fill_random_llama_weights(made, 3, shape)
        models.append(made)
    name = "layers.1.gate_up.weight"
    weights = [dict(one.named_parameters())[name] for one in models]
    logical = [
        llama_placements.view_logically(name, weight, one.shape, WHOLE).reshape(2, 48, 16)
        for weight, one in zip(weights, models, strict=True)
    ]
    assert not torch.equal(*weights)
    assert torch.equal(*logical)
    tokens = torch.arange(sum(LENS)) * 7 % 64
    positions = torch.cat([torch.arange(n) for n in LENS])
    rows = make_packed_layout(LENS, None, torch.device("cpu"))
    with torch.inference_mode():
        apart, mixed = (
            one(tokens, positions, rows, "rows", torch.arange(sum(LENS)))
            for one in reversed(models)
        )
    torch.testing.assert_close(
        apart,
        mixed,
        rtol=1e-5 if dtype == torch.float32 else 2e-2,
        atol=1e-6 if dtype == torch.float32 else 2e-2,
    )
