"""fp8 on a GPU: matmuls, and blocks that score and train, against their emulation on a CPU."""

import pytest
import torch
from torch import Tensor

from steelyard.kernels import fp8
from steelyard.models import llama_fp8
from steelyard.models.attention import make_packed_layout
from steelyard.models.llama import Llama, LlamaShape, compute_rotary_cos_sin
from steelyard.models.llama_fp8 import Fp8Kernels, Fp8ScoreBlock, Fp8TrainBlock, Fp8Training

pytestmark = pytest.mark.gpu
SHAPE = LlamaShape(
    layers=2, hidden=512, heads=8, kv_heads=4, head_dim=64, ffn=1376, vocab=1008, positions=512
)
LENGTHS = [77, 1, 200, 131]  # 409 tokens
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Return the norm of the error as a fraction of the exact tensor's norm."""
    a, b = actual.double().cpu(), exact.double().cpu()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    ("rows", "columns", "inner"),
    [(409, 512, 4096), (17, 48, 64), (32768, 4096, 11008), (4096, 11008, 24576)],
)
@pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2])
def test_a_matmul_equals_fp64_of_the_same_fp8_numbers(
    rows: int, columns: int, inner: int, dtype: torch.dtype
) -> None:
    """The bound allows rounding to bf16 and the device's sums, which have fewer bits the longer
    they are (error 0.0043 over 24,576 terms).
    """
    a = fp8.quantize_rows_fast(torch.randn(rows, inner, device=CUDA, dtype=torch.bfloat16), dtype)
    b = fp8.quantize_rows_fast(torch.randn(columns, inner, device=CUDA, dtype=torch.bfloat16))
    actual = fp8.multiply_fp8(a, b)
    sampled_rows = torch.linspace(0, rows - 1, min(rows, 64), device=CUDA).long()
    exact = a.to_fp32()[sampled_rows].double() @ b.to_fp32().double().t()
    assert relative_error(actual[sampled_rows], exact) <= 0.005


@pytest.mark.parametrize("tokens", [409, 2048, 16])
def test_a_matmul_over_tokens_is_near_fp64(tokens: int) -> None:
    grad, x = (
        torch.randn(tokens, width, device=CUDA, dtype=torch.bfloat16) for width in (1376, 512)
    )
    actual = fp8.multiply_fp8(
        fp8.quantize_columns_fast(grad, llama_fp8.GRADIENT_DTYPE), fp8.quantize_columns_fast(x)
    )
    assert relative_error(actual, grad.double().t() @ x.double()) <= 0.05


def make_model(device: torch.device) -> Llama:
    """Return a seeded bf16 Llama on the device."""
    torch.manual_seed(2)
    return Llama(SHAPE).to(torch.bfloat16).to(device)


def make_inputs(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return seeded tokens and their positions."""
    torch.manual_seed(3)
    tokens = torch.randint(0, SHAPE.vocab, (sum(LENGTHS),))
    return tokens.to(device), torch.cat([torch.arange(n) for n in LENGTHS]).to(device)


@pytest.mark.parametrize("kernel", ["flash", "packed"])
def test_scoring_is_near_the_cpu_emulation(kernel: str) -> None:
    """The GPU is as far from bf16 as the emulation is, and nearer to the emulation: roundings to
    fp8 may fall on the other side where those to bf16 do, whose steps are 1/32 of e4m3's.
    """
    results = {}
    for device, attention_kernel in ((CPU, "rows"), (CUDA, kernel)):
        model, (tokens, positions) = make_model(device), make_inputs(device)
        arguments = (
            tokens,
            positions,
            make_packed_layout(LENGTHS, None, device),
            attention_kernel,
            torch.arange(len(tokens), device=device),
        )
        with torch.inference_mode():
            bf16_logits = model(*arguments)
            llama_fp8.convert_to_fp8(model)
            blocks = [Fp8ScoreBlock(block, Fp8Kernels(device == CUDA)) for block in model.layers]
            results[device] = model(*arguments, blocks=blocks), bf16_logits
    emulated, cpu_bf16_logits = results[CPU]
    gpu_logits, bf16_logits = results[CUDA]
    assert relative_error(gpu_logits, bf16_logits) == pytest.approx(
        relative_error(emulated, cpu_bf16_logits), rel=0.1
    )
    assert relative_error(gpu_logits, emulated) <= 0.75 * relative_error(emulated, cpu_bf16_logits)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_gradients_are_near_the_cpu_emulation(
    kind: str, kept: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_fp8, "WEIGHT_GRADIENT", kind)
    results = {}
    for device, attention_kernel in ((CPU, "rows"), (CUDA, "packed")):
        block = make_model(device).layers[0]
        for name in llama_fp8.FP8_MATRICES:
            weight = getattr(block, name).weight
            weight.data = weight.data.to(kept)
        sums = {id(p): torch.zeros_like(p) for p in block.parameters()}
        run = Fp8TrainBlock(
            block, Fp8Training(lambda p, sums=sums: sums[id(p)], Fp8Kernels(device == CUDA))
        )
        _, positions = make_inputs(device)
        torch.manual_seed(4)
        x, delta, one, other = (
            torch.randn(len(positions), SHAPE.hidden).to(torch.bfloat16).to(device)
            for _ in range(4)
        )
        x.requires_grad_()
        out = run(
            x,
            delta,
            *compute_rotary_cos_sin(positions, SHAPE, x.dtype),
            make_packed_layout(LENGTHS, None, device),
            attention_kernel,
            None,
        )
        (out[0] * one + out[1] * other).sum().backward()
        results[device] = {"x": x.grad, "out": out[1].detach(), "norm": block.ffn_norm.weight.grad}
        results[device] |= {
            name: sums[id(getattr(block, name).weight)] for name in llama_fp8.FP8_MATRICES
        }
    distances = {
        name: relative_error(results[CUDA][name], one) for name, one in results[CPU].items()
    }
    assert max(distances.values()) <= 0.06, distances
