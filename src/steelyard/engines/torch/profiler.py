"""torch's profiler as a source of activities (engine/profile.py): a device's kernels and copies or,
on a CPU, operators.
"""

import gzip
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from steelyard.engine.profile import Activity, ActivityKind

# The first row whose pattern a name holds says its kind; none: other. Names of cuBLAS (nvjet since
# 12.8), CUTLASS, cuDNN, torch's flash and memory-efficient attention, Triton's templates, this
# package's kernels, NCCL and gloo.
PATTERNS: tuple[tuple[ActivityKind, str], ...] = (
    ("bubble", r"(?i)nccl\w*sendrecv|gloo:(send|recv)|c10d::(send|recv_)"),
    ("communication", r"(?i)nccl|gloo:|c10d::|_c10d_functional::"),
    (
        "attention",
        r"(?i)flash|fmha|sdpa|scaled_dot_product|attention|_attend_spans|^_forward$|^_back_(keys|queries)$|^_dot$",
    ),
    (
        "matmul",
        r"(?i)gemm|gemv|nvjet|cublas|cutlass|xmma|triton_tem_fused_(mm|addmm|bmm)|splitk|::_scaled_mm|::_int_mm",
    ),
    (
        "matmul",
        r"^aten::(mm|addmm_?|bmm|baddbmm_?|addbmm_?|dot|mv|addmv)$|mkldnn::_linear|mkl::_mkl_linear|mkldnn_linear",
    ),
    ("copy", r"^Memcpy|^Memset"),
)
KINDS = tuple((kind, re.compile(pattern)) for kind, pattern in PATTERNS)
# categories of a trace that are the device's own
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
TYPE_BYTES = {
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "float": 4,
    "double": 8,
    "long int": 8,
    "int": 4,
    "bool": 1,
    "unsigned char": 1,
}
MAX_TRACE_BYTES = 2 << 30  # of a trace that is read back


def classify_kernel(name: str) -> ActivityKind:
    """Return the kind of a kernel or operator by the first pattern in `PATTERNS` that its name
    matches; `other` if none does.
    """
    return next((kind for kind, pattern in KINDS if pattern.search(name)), "other")


class TorchProfiler:
    """torch's profiler of one rank's device, used once: `start`, then `stop(trace)`. It records CPU
    operators with shapes and, unless the device is a CPU, all other activities that torch supports.

    `stop` returns the activities of the device (on a CPU, operators) and, if `trace` is a path,
    writes the gzipped Chrome trace there; a trace above 2 GiB gives no activities and is not
    written. It uses a temporary folder.
    """

    def __init__(self, device: torch.device) -> None:
        """Create torch's profiler for the device, not started: CPU operators with shapes and,
        unless it is a CPU, all other activities that torch supports.
        """
        self._on_device = device.type != "cpu"
        recorded = [ProfilerActivity.CPU]
        if self._on_device:
            supported: Any = torch.profiler.supported_activities
            recorded += [
                activity for activity in supported() if activity is not ProfilerActivity.CPU
            ]
        self._profile = profile(activities=recorded, record_shapes=True)

    def start(self) -> None:
        """Begin to record."""
        self._profile.start()

    def stop(self, trace: Path | None) -> list[Activity]:
        """End recording and return the activities of the device (of a CPU, its operators); if
        `trace` is a path, also write the gzipped Chrome trace there. A trace of more than 2 GiB
        gives no activities and is not written. A temporary folder is used and deleted.
        """
        self._profile.stop()
        with tempfile.TemporaryDirectory(prefix="steelyard-trace-") as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            if path.stat().st_size > MAX_TRACE_BYTES:
                return []
            raw = path.read_bytes()
        if trace is not None:
            trace.write_bytes(gzip.compress(raw, 6))
        return list(read_activities(json.loads(raw), self._on_device))


def read_activities(trace: Mapping[str, Any], on_device: bool) -> Iterator[Activity]:
    """Yield the activities of a Chrome trace (parsed JSON), in its order. With `on_device` they are
    kernels, copies and memsets, whose lane is their stream; a kernel's bytes are those of the
    inputs of the operator that launched it. Otherwise they are CPU operators, whose lane is their
    thread. Events without a duration are skipped.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    if not on_device:
        yield from map(_cpu_activity, operators)
        return
    sizes = {
        event["args"]["External id"]: _input_bytes(event)
        for event in operators
        if "External id" in event.get("args", {})
    }
    for event in events:
        if event.get("cat") in ON_DEVICE:
            args = event.get("args", {})
            size = (
                args.get("bytes")
                if event["cat"] != "kernel"
                else sizes.get(args.get("External id"))
            )
            yield _make_activity(event, f"stream {args.get('stream')}", size)


def _cpu_activity(event: Mapping[str, Any]) -> Activity:
    """Return a CPU operator's trace event as an activity in the lane of its thread."""
    return _make_activity(event, f"thread {event.get('tid')}", _input_bytes(event))


def _make_activity(event: Mapping[str, Any], lane: str, size_bytes: int | None) -> Activity:
    """Return a trace event as an activity, with the kind that its name says (`classify_kernel`);
    its microseconds become seconds.
    """
    begin_s, name = event["ts"] * 1e-6, str(event["name"])
    return Activity(
        name, classify_kernel(name), begin_s, begin_s + event["dur"] * 1e-6, lane, size_bytes
    )


def _input_bytes(event: Mapping[str, Any]) -> int | None:
    """Return the bytes of all input tensors of an operator's trace event; scalars count nothing.
    None if there are none, or one has an unknown type or is a list of tensors.
    """
    args = event.get("args", {})
    shapes, types = args.get("Input Dims"), args.get("Input type")
    if not shapes or not types:
        return None
    total = 0
    for shape, type_name in zip(shapes, types, strict=False):
        if type_name in TYPE_BYTES and all(isinstance(side, int) for side in shape):
            total += prod(shape) * TYPE_BYTES[type_name]
        elif type_name not in ("Scalar", "", "ScalarList"):
            return None
    return total or None
