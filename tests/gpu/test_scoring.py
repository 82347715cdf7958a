"""The infer pass on a GPU: a model by fused kernels against the same model by plain modules."""

import pytest
import torch

from steelyard.engines.torch.framework import CompileCacheCounter
from steelyard.kernels import token_loss
from steelyard.models import llama_fp8
from steelyard.models.attention import make_packed_layout
from steelyard.models.llama import Llama, LlamaShape
from steelyard.models.llama_fp8 import Fp8Kernels, Fp8ScoreBlock
from steelyard.models.llama_fused import BlockKernels, FusedBlock, ScoringLinears

pytestmark = pytest.mark.gpu
SHAPE = LlamaShape(
    layers=3, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=704, vocab=1003, positions=512
)
LENGTHS = [77, 1, 200, 130]


@pytest.mark.parametrize("kernel", ["flash", "packed"])
def test_fused_blocks_are_as_near_fp64_as_the_plain_model(kernel: str) -> None:
    device = torch.device("cuda")
    torch.manual_seed(1)
    model = Llama(SHAPE).to(device, torch.bfloat16)
    blocks = [
        FusedBlock(block, ScoringLinears(), BlockKernels(compiled=True)) for block in model.layers
    ]
    tokens = torch.randint(0, SHAPE.vocab, (sum(LENGTHS),), device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in LENGTHS])
    rows, pick = (
        make_packed_layout(LENGTHS, None, device),
        torch.arange(0, len(tokens), 3, device=device),
    )
    with torch.inference_mode():
        actual = model(tokens, positions, rows, kernel, pick, blocks=blocks)
        expected = model(tokens, positions, rows, "flash", pick)
        exact = model.double()(tokens, positions, rows, "rows", pick)
    # at most 1.5 times the plain model's distance from fp64
    allowed = 1.5 * float((expected.double() - exact).norm())
    assert float((actual.double() - exact).norm()) <= allowed


def test_triton_read_logits_equals_the_plain_function() -> None:
    logits = torch.randn(300, 100_008, device="cuda", dtype=torch.bfloat16)[:, :100_003]
    targets = torch.randint(0, 100_003, (300,), device="cuda")
    actual, expected = (
        token_loss.triton_reduce_logits(logits, targets),
        token_loss.reduce_logits(logits, targets),
    )
    torch.testing.assert_close(actual[:3], expected[:3], rtol=1e-5, atol=1e-5)
    best = (actual[3] + targets).long()
    assert torch.equal(logits.gather(1, best[:, None])[:, 0].float(), expected[2])


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_another_number_of_tokens_compiles_nothing(precision: str) -> None:
    """Also for numbers of tokens or logits that 16 divides, on which Triton specializes by
    default.
    """
    device = torch.device("cuda")
    model = Llama(SHAPE).to(device, torch.bfloat16)
    if precision == "fp8":
        llama_fp8.convert_to_fp8(model)
        blocks = [Fp8ScoreBlock(block, Fp8Kernels(True)) for block in model.layers]
    else:
        blocks = [
            FusedBlock(block, ScoringLinears(), BlockKernels(compiled=True))
            for block in model.layers
        ]

    def score(lengths: list[int], picked: int) -> None:
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        tokens = torch.randint(0, SHAPE.vocab, (sum(lengths),), device=device)
        rows, pick = make_packed_layout(lengths, None, device), torch.arange(picked, device=device)
        token_loss.triton_reduce_logits(
            model(tokens, positions, rows, "packed", pick, blocks=blocks), tokens[:picked]
        )

    with torch.inference_mode():
        score(LENGTHS, 77)
        compile_cache = CompileCacheCounter()
        score([77, 1, 200, 138], 77)  # 416 tokens: 26 x 16
        score(LENGTHS, 80)
        score([64, 64], 128)
        assert compile_cache.counts() is None
