"""What a worker imports before it scores; imports are most of its start-up time."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from steelyard.models.tensors import skip_initialization

PRINT_LOADED = "print(json.dumps(sorted(m for m in {names} if m in sys.modules)))"
HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "sympy",
    "transformers",
)
ENGINE = (
    "from steelyard.engine import engine_rows; engine_rows.load_engine('torch', 'score_choices');"
    " engine_rows.load_framework('torch')"
)
BUILD = """
import torch
from steelyard.models import llama_init
from steelyard.models.llama import LlamaShape
shape = LlamaShape(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=12, vocab=32, positions=16)
llama_init.fill_random_llama_weights(llama_init.build_llama(shape, torch.device("cpu"), torch.float32), 0, shape)
"""  # noqa: E501


def heavy_modules_after(code: str) -> list[str]:
    """Run code in a new interpreter and return which of the heavy modules it imported."""
    program = f"import json, sys\n{code}\n{PRINT_LOADED.format(names=repr(HEAVY))}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    modules: list[str] = json.loads(done.stdout)
    return modules


@pytest.mark.process
@pytest.mark.parametrize("code", [ENGINE, f"{ENGINE}\n{BUILD}"], ids=["engine", "weights"])
def test_scoring_loads_neither_a_compiler_nor_distributed_tensors(code: str) -> None:
    assert heavy_modules_after(code) == []


@pytest.mark.process
def test_the_check_detects_heavy_modules() -> None:
    assert "torch.distributed.tensor" in heavy_modules_after("import torch.distributed.tensor")
    assert "torch._dynamo" in heavy_modules_after(
        'import torch\ntorch.empty(2, device="meta").normal_()'
    )


def test_modules_without_values_have_their_device_and_dtype() -> None:
    before = torch.get_default_dtype()
    with skip_initialization(torch.device("meta"), torch.bfloat16):
        linear = nn.Linear(2, 3)
    assert (linear.weight.device.type, linear.weight.dtype, linear.bias.dtype) == (
        "meta",
        torch.bfloat16,
        torch.bfloat16,
    )
    with pytest.raises(ZeroDivisionError), skip_initialization(torch.device("cpu"), torch.float16):
        raise ZeroDivisionError
    assert torch.get_default_dtype() == before
    assert nn.Linear(2, 3).weight.abs().sum() > 0
