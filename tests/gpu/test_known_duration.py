"""A kernel that spins for a given time by the device's own timer: the measuring loop and the
profiler report that time.
"""

from collections.abc import Iterator

import pytest

triton = pytest.importorskip("triton", reason="the spinning kernel is Triton's")

import torch  # noqa: E402
from triton.language.extra.cuda import globaltimer  # noqa: E402

from steelyard.accelerators import CUDA  # noqa: E402
from steelyard.engine.profile import divide_device_time  # noqa: E402
from steelyard.engine.work import Phase, Work  # noqa: E402
from steelyard.engines.torch.framework import TorchFramework  # noqa: E402
from steelyard.run.clock import now  # noqa: E402
from steelyard.run.measure import measure  # noqa: E402

pytestmark = pytest.mark.gpu
SPUN_S = (0.05, 0.2, 0.1)  # the first launch takes 0.1 ms
COUNTS = {"tokens": 1, "samples": 1, "logits": 1, "pairs": 1, "square": 1}


@triton.jit
def spin(out, nanoseconds):
    """Spin for so many nanoseconds and store the time that really passed in out[0]. One program."""
    began = globaltimer()
    at = began
    while at - began < nanoseconds:
        at = globaltimer()
    triton.language.store(out, at - began)


@pytest.fixture(scope="module")
def framework() -> TorchFramework:
    """The torch framework on the first GPU, with the kernel compiled."""
    torch_framework = TorchFramework(CUDA.devices["torch"], 0, now)
    list(spinning_steps(torch.empty(len(SPUN_S), dtype=torch.int64, device="cuda")))  # compiles
    torch_framework.synchronize()
    return torch_framework


def spinning_steps(spun: torch.Tensor) -> Iterator[Phase | Work]:
    """Yield steps that spin for the seconds of SPUN_S; step i stores its nanoseconds in spun[i]."""
    for number, seconds in enumerate(SPUN_S):
        yield Phase("compute")
        spin[(1,)](spun[number:], int(seconds * 1e9))
        yield Work(COUNTS)


def test_steps_take_as_long_as_their_kernel(framework: TorchFramework) -> None:
    spun = torch.empty(len(SPUN_S), dtype=torch.int64, device="cuda")
    trace = measure(spinning_steps(spun), framework)
    samples = trace.make_samples("infer")
    truth = [value * 1e-9 for value in spun.tolist()]
    assert truth == pytest.approx(SPUN_S, rel=0.001)
    assert [sample.end_s - sample.start_s for sample in samples] == pytest.approx(truth, rel=0.01)
    assert [sample.phases["compute"] for sample in samples] == pytest.approx(truth, rel=0.01)
    assert trace.wall_s == pytest.approx(sum(truth), rel=0.01)


def test_the_profiler_sees_the_kernel_as_long_as_it_ran(framework: TorchFramework) -> None:
    spun = torch.empty(len(SPUN_S), dtype=torch.int64, device="cuda")
    profiler = framework.profiler()
    framework.synchronize()
    profiler.start()
    list(spinning_steps(spun))
    framework.synchronize()
    activities = profiler.stop(None)
    truth = [value * 1e-9 for value in spun.tolist()]
    assert [
        entry.end_s - entry.begin_s for entry in activities if "spin" in entry.name
    ] == pytest.approx(truth, rel=0.01)
    [kernel] = [entry for entry in divide_device_time(activities) if "spin" in entry.name]
    assert (kernel.calls, kernel.kind) == (3, "other")
    assert kernel.time_s == pytest.approx(sum(truth), rel=0.01)
