"""Torch's ceilings of `steelyard spec` on a CPU: correct kernels pass their check, wrong ones fail
it.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fixtures.golden import golden
from steelyard.engine.ceiling_rows import CallBudget, UnavailableError
from steelyard.engines.torch import attention_ceilings, device_ceilings
from steelyard.engines.torch.device_ceilings import (
    MATMULS,
    TorchCeilings,
    _fit_to_budget,
    check_matmul,
)
from steelyard.engines.torch.framework import TorchFramework
from steelyard.errors import names_exception
from steelyard.models import attention
from steelyard.plan.ceiling_shapes import ERROR_BOUNDS, AttentionShape
from steelyard.plan.matmuls import Matmul
from steelyard.words import Message, render_text

CPU = torch.device("cpu")
HEADS = AttentionShape("case", 4, 2, 16, 256, 2)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def shown() -> TorchCeilings:
    """Torch's ceilings for one CPU device."""
    return TorchCeilings(
        TorchFramework("steelyard.accelerators.cpu_torch:CpuTorchDevice", 0, lambda: 0.0)
    )


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "fp16", "bf16"])
def test_a_correct_matmul_passes_its_check(precision: str, layout: str):
    torch.manual_seed(0)
    benchmark = MATMULS[precision](Matmul(name="x", layout=layout, m=40, n=48, k=64), CPU)
    error, bound = check_matmul(benchmark, precision)
    assert benchmark.call().shape == (40, 48)
    assert 0 <= error <= bound == ERROR_BOUNDS[precision]
    # The reference is an fp64 product too: whether its last bits differ depends on the CPU's
    # kernels.
    assert error > 0 or precision == "fp64"


def test_int8_matmul_is_exact_where_the_cpu_adds_exactly():
    """A CPU without int8 dot-product instructions saturates sums of two products; such a result
    must fail the check.
    """
    random = torch.Generator().manual_seed(0)
    left, right = (
        torch.randint(-128, 128, size, dtype=torch.int8, generator=random)
        for size in ((32, 64), (64, 64))
    )
    exact = torch.equal(torch._int_mm(left, right).long(), left.long() @ right.long())
    error, bound = check_matmul(MATMULS["int8"](Matmul(name="x", m=32, n=64, k=64), CPU), "int8")
    assert bound == 0.0
    assert (error == 0.0) is exact


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (39, 47)])
def test_a_wrong_matmul_fails_its_check(row: int, column: int, precision: str):
    """One number in a corner of the result is wrong by a tenth of the result's root mean square."""
    torch.manual_seed(0)
    benchmark = MATMULS[precision](Matmul(name="x", m=40, n=48, k=64), CPU)
    correct_work = benchmark.call

    def wrong() -> torch.Tensor:
        out = correct_work().clone()
        out[row, column] += 0.8
        return out

    error, bound = check_matmul(replace(benchmark, call=wrong), precision)
    assert error > bound
    assert error == pytest.approx(0.1, rel=0.3)


@pytest.mark.parametrize("backward", [False, True])
def test_attention_without_a_causal_mask_fails_its_check(
    backward: bool, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    error, bound = attention_ceilings._check_attention(CPU, HEADS, "rows", backward)
    assert 0 < error <= bound

    def unmasked(q, k, v, rows, window=None):
        """Every token sees its whole row."""
        group = q.shape[1] // k.shape[1]
        scores = (
            torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
        )
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))

    monkeypatch.setitem(attention.ATTENTION_KERNELS, "rows", unmasked)
    error, bound = attention_ceilings._check_attention(CPU, HEADS, "rows", backward)
    assert error > bound


def test_attention_shrinks_to_its_time_budget():
    """One row of 256 tokens is the smallest size, however long it takes."""
    for max_flops, rows, tokens in ((None, 2, 256), (1e18, 2, 256), (1.0, 1, 256)):
        budget = CallBudget(max_flops, 1.0)
        benchmark = attention_ceilings._prepare_attention(CPU, HEADS, "rows", False, budget)
        assert (benchmark.detail["rows"], benchmark.detail["tokens"]) == (rows, tokens)
        assert benchmark.amount == 4 * 4 * 16 * rows * 256 * 257 // 2


def test_a_matmul_shrinks_to_its_time_budget_or_is_refused():
    shape = Matmul(name="x", m=1000, n=10, k=10)
    assert _fit_to_budget(shape, CallBudget(None, 1.0), shrinks=True) == shape
    assert _fit_to_budget(shape, CallBudget(200_000.0, 1.0), shrinks=True) == shape
    assert _fit_to_budget(shape, CallBudget(199_999.0, 1.0), shrinks=True).m == 500
    assert _fit_to_budget(shape, CallBudget(2 * 64 * 100.0, 1.0), shrinks=True).m == 64
    with pytest.raises(
        UnavailableError,
        match="not run: one call even with 64 rows would take more than 1 s here",
    ):
        _fit_to_budget(shape, CallBudget(2 * 63 * 100.0, 1.0), shrinks=True)
    with pytest.raises(UnavailableError, match="not run: one call would take more than 1 s here"):
        _fit_to_budget(shape, CallBudget(199_999.0, 1.0), shrinks=False)


def test_rows_that_a_cpu_lacks_give_the_reason(shown: TorchCeilings):
    rows = list(shown.rows(quick=True))
    lacking = {row.name: row.unavailable for row in rows if row.unavailable is not None}
    assert lacking["square 512"] == "a CPU has no TF32"
    assert lacking["host to device, pinned"] == golden("cpu-memory-is-the-host-nothing")
    assert lacking["all_reduce 1 MiB"] == Message("ceiling.one_device")
    assert render_text(Message("ceiling.one_device")) == golden("one-device-has-nobody-to-exchange")
    assert len({(row.group, row.name, row.precision) for row in rows}) == len(rows)
    assert len(rows) < len(list(shown.rows(quick=False)))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"), "memory"),
        (NotImplementedError("anything"), "unsupported_precision"),
        (RuntimeError('"addmm_impl" not implemented for Half'), "unsupported_precision"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED"), "unsupported_precision"),
        (RuntimeError("CUDA error: no kernel image is available"), "unsupported_precision"),
        (RuntimeError("No available kernel. Aborting execution."), "unsupported_precision"),
        (AssertionError("Torch not compiled with CUDA enabled"), "unsupported_precision"),
        (dist.DistBackendError("NCCL error in: ProcessGroup.cpp:12, remote"), "exchange"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "device_error"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "device_error"),
        (ValueError("shapes differ"), "failed"),
    ],
)
def test_an_exception_of_torch_is_worded(error: Exception, code: str, shown: TorchCeilings):
    message = shown.explain_error(error, "fp8")
    assert message.code == f"ceiling.{code}"
    assert not names_exception(render_text(message))


def test_an_operation_that_torch_lacks_names_the_precision(shown: TorchCeilings):
    error = NotImplementedError("Could not run 'aten::x'")
    assert render_text(shown.explain_error(error, "fp8")) == (
        "torch cannot compute this in fp8 on this device"
    )
    assert render_text(shown.explain_error(error, None)) == (
        "torch cannot compute this on this device"
    )


def test_memory_rows_are_checked(shown: TorchCeilings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_ceilings, "QUICK_BYTES", 1 << 20)
    benchmarks = {
        row.name: row.prepare(CallBudget(None, 1.0))
        for row in shown.rows(quick=True)
        if row.group == "memory"
    }
    assert {name: benchmark.amount for name, benchmark in benchmarks.items()} == {
        "read": 1 << 20,
        "write": 1 << 20,
        "copy": 2 << 20,
    }
    for benchmark in benchmarks.values():
        benchmark.call()
        error, bound = benchmark.check()
        assert error <= bound


def test_memory_capacity_is_reported(shown: TorchCeilings):
    (row,) = [row for row in shown.rows(quick=True) if row.group == "capacity"]
    benchmark = row.prepare(CallBudget(None, 1.0))
    assert (benchmark.amount > 0, str(benchmark.detail["how"]).startswith("not measured: ")) == (
        True,
        True,
    )
