"""How profiled time is divided among activities, on hand-made timelines, and how a trace in
Chrome's format is read.
"""

import gzip
import json
from pathlib import Path

import pytest
import torch

from steelyard.engine.profile import Activity, ActivityKind, KernelTotal, divide_device_time
from steelyard.engines.torch.profiler import TorchProfiler, classify_kernel, read_activities


def make_activity(
    name: str,
    kind: ActivityKind,
    begin_s: float,
    end_s: float,
    lane: str = "a",
    size_bytes: int | None = None,
) -> Activity:
    """Return an activity on lane `a` unless another is given."""
    return Activity(name, kind, begin_s, end_s, lane, size_bytes)


def time_by_name(*timeline: Activity) -> dict[str, float]:
    """Divide a timeline and return the seconds of each kernel by name."""
    return {kernel.name: kernel.time_s for kernel in divide_device_time(timeline)}


def test_times_of_sequential_activities_are_added_by_name() -> None:
    assert time_by_name(
        make_activity("mm", "matmul", 0, 2),
        make_activity("add", "other", 3, 4),
        make_activity("mm", "matmul", 4, 5),
    ) == {"mm": 3, "add": 1}


def test_nested_activities_of_a_lane_get_exclusive_time() -> None:
    timeline = (
        make_activity("outer", "other", 0, 10),
        make_activity("mm", "matmul", 2, 5),
        make_activity("inner", "other", 3, 4),
        make_activity("last", "other", 9, 10),
    )
    assert time_by_name(*timeline) == {"outer": 6, "mm": 2, "inner": 1, "last": 1}


@pytest.mark.parametrize(
    ("kind", "other", "spent"),
    [
        ("communication", "matmul", {"moves": 1, "computes": 4}),  # 1 s is exposed, 4 to 5 s
        ("copy", "communication", {"moves": 3, "computes": 2}),
        ("bubble", "communication", {"moves": 1, "computes": 4}),
    ],
)
def test_overlapping_lanes_give_the_time_to_the_kind_of_higher_priority(
    kind: ActivityKind, other: ActivityKind, spent: dict[str, float]
) -> None:
    assert (
        time_by_name(
            make_activity("moves", kind, 2, 5, "b"), make_activity("computes", other, 0, 4, "a")
        )
        == spent
    )


def test_overlap_of_three_streams() -> None:
    timeline = (
        make_activity("nccl", "communication", 0, 10, "c"),
        make_activity("mm", "matmul", 1, 4, "a"),
        make_activity("add", "other", 3, 6, "b"),
        make_activity("mm", "matmul", 8, 9, "a"),
    )
    assert time_by_name(*timeline) == {"mm": 4, "add": 2, "nccl": 4}


def test_calls_and_bytes_are_summed_by_name() -> None:
    timeline = [make_activity("add", "other", i, i + 0.5, size_bytes=8) for i in range(3)] + [
        make_activity("mul", "other", 9, 10),
        make_activity("mul", "other", 10, 11, "a", 4),
    ]
    assert divide_device_time(timeline) == [
        KernelTotal("mul", "other", 2, 2, None),
        KernelTotal("add", "other", 3, 1.5, 24),
    ]


def test_an_empty_timeline_has_no_kernels() -> None:
    assert divide_device_time([]) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        (
            (
                "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_nt_align8>"  # noqa: E501
            ),
            "matmul",
        ),
        ("triton_tem_fused_mm_3", "matmul"),
        ("aten::addmm_", "matmul"),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>",
            "attention",
        ),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80", "attention"),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x64x128",
            "attention",
        ),
        ("_back_keys", "attention"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("ncclDevKernel_SendRecv", "bubble"),
        ("gloo:all_reduce", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("triton_poi_fused_mul_silu_0", "other"),
        ("aten::native_layer_norm", "other"),
    ],
)
def test_kernel_names_are_classified(name: str, kind: str) -> None:
    assert classify_kernel(name) == kind


def trace_event(cat: str, name: str, ts: float, dur: float, **args: object) -> dict:
    """Return a complete event of a Chrome trace on thread 7; times are in microseconds."""
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 7, "args": args}


def test_a_device_trace_yields_kernels_with_the_bytes_of_their_operator() -> None:
    """Only kernels and copies are returned; a kernel's bytes are those of the operator that
    launched it.
    """
    shapes = {
        "Input Dims": [[2, 3], [3, 4], []],
        "Input type": ["c10::BFloat16", "float", "Scalar"],
    }
    trace = {
        "traceEvents": [
            trace_event("cpu_op", "aten::mm", 0, 5, **{"External id": 1}, **shapes),
            trace_event("kernel", "nvjet_x", 10, 4, **{"External id": 1, "stream": 7}),
            trace_event("kernel", "mine", 20, 1, stream=9),
            trace_event("gpu_memcpy", "Memcpy HtoD", 30, 2, stream=7, bytes=64),
            {"ph": "i", "cat": "kernel", "name": "no duration", "ts": 0},
        ]
    }
    kernels = list(read_activities(trace, on_device=True))
    assert [
        (activity.name, activity.kind, activity.lane, activity.size_bytes) for activity in kernels
    ] == [
        ("nvjet_x", "matmul", "stream 7", 2 * 3 * 2 + 3 * 4 * 4),
        ("mine", "other", "stream 9", None),
        ("Memcpy HtoD", "copy", "stream 7", 64),
    ]
    assert (kernels[0].begin_s, kernels[0].end_s) == pytest.approx((1e-5, 1.4e-5))
    assert [activity.name for activity in read_activities(trace, on_device=False)] == ["aten::mm"]


def test_an_input_of_unknown_size_makes_the_bytes_unknown() -> None:
    inputs = {"Input Dims": [[2], []], "Input type": ["float", "GenericList"]}
    [operator] = read_activities(
        {"traceEvents": [trace_event("cpu_op", "aten::cat", 0, 1, **inputs)]}, on_device=False
    )
    assert operator.size_bytes is None


def test_torch_profiler_counts_calls_and_bytes_on_a_cpu(tmp_path: Path) -> None:
    a = torch.ones(64, 64)
    profiler = TorchProfiler(torch.device("cpu"))
    profiler.start()
    for _ in range(3):
        torch.mm(a, a)
    kernels = divide_device_time(profiler.stop(tmp_path / "trace.json.gz"))
    assert [
        (entry.kind, entry.calls, entry.size_bytes) for entry in kernels if entry.name == "aten::mm"
    ] == [("matmul", 3, 3 * 2 * 64 * 64 * 4)]
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert sum(entry.get("name") == "aten::mm" for entry in trace["traceEvents"]) == 3
