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

INTERLEAVED_SHAPE = LlamaShape(
    layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=48, vocab=64, positions=32
)
HALVES_SHAPE = GateFirstShape(**asdict(INTERLEAVED_SHAPE))
LENGTHS = [5, 9, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_and_up_as_halves_give_the_same_weights_and_logits(dtype: torch.dtype) -> None:
    assert (INTERLEAVED_SHAPE.gate_up_chunk, HALVES_SHAPE.gate_up_chunk) == (8, 48)
    models = []
    for shape in (INTERLEAVED_SHAPE, HALVES_SHAPE):
        built = llama_init.build_llama(shape, torch.device("cpu"), dtype)
        llama_init.fill_random_llama_weights(built, 3, shape)
        models.append(built)
    name = "layers.1.gate_up.weight"
    weights = [dict(model.named_parameters())[name] for model in models]
    logical = [
        llama_placements.view_logically(name, weight, model.shape, WHOLE).reshape(2, 48, 16)
        for weight, model in zip(weights, models, strict=True)
    ]
    assert not torch.equal(*weights)
    assert torch.equal(*logical)
    tokens = torch.arange(sum(LENGTHS)) * 7 % 64
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    rows = make_packed_layout(LENGTHS, None, torch.device("cpu"))
    with torch.inference_mode():
        halves, interleaved = (
            model(tokens, positions, rows, "rows", torch.arange(sum(LENGTHS)))
            for model in reversed(models)
        )
    torch.testing.assert_close(
        halves,
        interleaved,
        rtol=1e-5 if dtype == torch.float32 else 2e-2,
        atol=1e-6 if dtype == torch.float32 else 2e-2,
    )
