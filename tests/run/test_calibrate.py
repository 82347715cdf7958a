"""Tests of the matmul calibration of a device, with a fake clock, so that every rate is exact."""

from collections.abc import Callable
from typing import Any

from steelyard.accelerators.events import HostEvent
from steelyard.plan.matmuls import Matmul
from steelyard.record.run_facts import MatmulRate
from steelyard.run.calibrate import (
    CalibratedRates,
    calibrate_matmuls,
    recalibrate_square_matmul,
)

SQUARE_FLOPS = 1280


class FakeDevice:
    """A fake device that multiplies at 128 FLOP/s, and at 64 FLOP/s where the result has fewer than
    4 rows.

    It cannot multiply the shape named `unsupported`, and has no square matmul at all if `square` is
    false.
    """

    def __init__(self, unsupported: str = "", square: bool = True) -> None:
        self.now, self.used, self.unsupported, self.square = 0.0, 0.0, unsupported, square
        self.asked: list[Matmul] = []

    def _advance(self, time_s: float) -> None:
        self.now += time_s

    def prepare_square_matmul(self, precision: str) -> tuple[Callable[[], Any], int] | None:
        assert precision == "bf16"
        return (lambda: self._advance(10.0), SQUARE_FLOPS) if self.square else None

    def prepare_matmul(self, precision: str, shape: Matmul) -> tuple[Callable[[], Any], int] | None:
        self.asked.append(shape)
        rate = 64.0 if shape.m < 4 else 128.0
        return (
            None
            if shape.name == self.unsupported
            else (lambda: self._advance(shape.flops / rate), shape.flops)
        )

    def event(self) -> "FakeEvent":
        return FakeEvent(self.now)

    def synchronize(self) -> None: ...


class FakeEvent:
    """A fake device event that holds the time at which it was recorded, in seconds."""

    def __init__(self, time_s: float) -> None:
        self.at_s = time_s

    def elapsed_s(self, later: "FakeEvent") -> float:
        return later.at_s - self.at_s


def two_shapes(smaller: int) -> tuple[Matmul, ...]:
    """Return two matmul shapes, of which the second has few rows; `smaller` is ignored."""
    return (
        Matmul(name="up", m=4, n=2, k=1, count=3),
        Matmul(name="down", layout="tn", m=2, n=1, k=1),
    )


def test_each_matmul_shape_gets_its_own_rate(monkeypatch):
    monkeypatch.setattr("steelyard.run.calibrate.MOST_S", 1e9)
    device = FakeDevice()
    rates = calibrate_matmuls(
        device, "bf16", two_shapes, lambda: device.now, lambda: device.now / 2
    )  # type: ignore[arg-type]
    assert rates.matmul_flops_per_s == 128.0
    assert rates.matmul_flops_per_cpu_s == 256.0  # half of the time is CPU time
    assert rates.matmuls == [
        MatmulRate(name="up", layout="nt", m=4, n=2, k=1, count=3, flops_per_s=128.0),
        MatmulRate(name="down", layout="tn", m=2, n=1, k=1, count=1, flops_per_s=64.0),
    ]


def test_a_batch_too_large_for_the_time_is_halved():
    device = FakeDevice()
    divisors: list[int] = []

    def shrunk_shapes(smaller: int) -> tuple[Matmul, ...]:
        divisors.append(smaller)
        return (Matmul(name="up", m=max(1, 64 // smaller), n=1, k=1),)

    (matmul,) = calibrate_matmuls(device, "bf16", shrunk_shapes, lambda: device.now).matmuls  # type: ignore[arg-type]
    # Seven calls of 2·8 FLOPs at 128 FLOP/s take 0.875 s, which is within the time limit; seven of
    # 2·16 FLOPs would take 1.75 s.
    assert (divisors, matmul.m) == ([1, 2, 4, 8], 8)


def test_batch_is_never_shrunk_below_one_token():
    device = FakeDevice()
    (matmul,) = calibrate_matmuls(
        device, "bf16", lambda smaller: (Matmul(name="up", m=1, n=100, k=1),), lambda: device.now
    ).matmuls  # type: ignore[arg-type]
    assert (matmul.m, matmul.flops_per_s) == (1, 64.0)


def test_no_shape_rates_when_one_shape_is_unsupported():
    device = FakeDevice(unsupported="down")
    rates = calibrate_matmuls(device, "bf16", two_shapes, lambda: device.now, lambda: 0.0)  # type: ignore[arg-type]
    assert rates == CalibratedRates(matmul_flops_per_s=128.0)
    assert [shape.name for shape in device.asked] == ["up", "down"]


def test_framework_without_matmul_is_not_calibrated():
    device = FakeDevice(square=False)
    assert calibrate_matmuls(device, "bf16", two_shapes, lambda: device.now) == CalibratedRates()  # type: ignore[arg-type]
    assert device.asked == []
    assert recalibrate_square_matmul(device, "bf16", 128.0) == CalibratedRates()  # type: ignore[arg-type]


class FakeCpuDevice(FakeDevice):
    """A fake CPU device on which a call of the square matmul takes `call_s` seconds.

    `slowdowns` maps the number of a call to the factor by which it uses more CPU time, as beside
    another process on the same core.
    """

    def __init__(self, slowdowns: dict[int, float], call_s: float = 0.01) -> None:
        super().__init__()
        self.slowdowns, self.call_s, self.calls = slowdowns, call_s, 0

    def prepare_square_matmul(self, precision: str) -> tuple[Callable[[], Any], int] | None:
        return self._multiply, SQUARE_FLOPS

    def _multiply(self) -> None:
        self._advance(self.call_s)
        self.used += self.call_s * self.slowdowns.get(self.calls, 1.0)
        self.calls += 1

    def event(self) -> HostEvent:  # type: ignore[override]
        return HostEvent(lambda: self.now)


def calibrate_before_pass(device: Any) -> CalibratedRates:
    """Return the rates of the calibration before a pass, without any shapes of a case."""
    return calibrate_matmuls(
        device, "bf16", lambda smaller: (), lambda: device.now, lambda: device.used
    )


def calibrate_after_pass(device: Any, rate: float) -> list[float]:
    """Return the rates of the calibration after a pass in FLOP/s, rounded to six decimals."""
    rates = recalibrate_square_matmul(device, "bf16", rate, lambda: device.now, lambda: device.used)
    return [round(rate_of_timing, 6) for rate_of_timing in rates.matmul_cpu_rates]


def test_cpu_rate_is_timed_in_several_parts_before_the_pass() -> None:
    """One call, three warmup calls and 39 calls in 0.3 s are timed as eight parts of 3 or 6 calls.

    All calls but three are slowed down: the mean does not show the rate of a quiet host, but one of
    the parts does.
    """
    device = FakeCpuDevice(
        {call: 2.0 for call in range(43) if call not in (22, 23, 24)}, call_s=1 / 128
    )
    rates = calibrate_before_pass(device)
    assert device.calls == 43
    assert rates.matmul_cpu_rates == [81_920.0] * 4 + [163_840.0] + [81_920.0] * 3
    assert rates.matmul_flops_per_cpu_s == 163_840.0 * 42 / 81
    assert rates.matmul_flops_per_s == 163_840.0


def test_slow_calls_are_timed_in_groups_of_three() -> None:
    device = FakeCpuDevice({}, call_s=1.0)
    assert calibrate_before_pass(device).matmul_cpu_rates == [1280.0, 1280.0]
    assert device.calls == 7


def test_device_with_its_own_clock_has_no_cpu_time_rates() -> None:
    device = FakeDevice()
    assert calibrate_before_pass(device).matmul_cpu_rates == []
    rates = recalibrate_square_matmul(device, "bf16", 128.0, lambda: device.now)  # type: ignore[arg-type]
    assert rates == CalibratedRates(matmul_flops_per_s=128.0)


def test_timings_after_the_pass_take_some_tens_of_milliseconds() -> None:
    """A warmup call and three timed calls take 0.04 s; three more would not end within 0.05 s."""
    device = FakeCpuDevice({0: 5.0})
    assert calibrate_after_pass(device, 128_000.0) == [128_000.0]
    assert device.calls == 4
    fast_device = FakeCpuDevice({1: 2.0, 2: 2.0, 3: 2.0}, call_s=0.001)
    # 49 calls: one to warm up, then 16 timings of three calls, which are joined to eight rates.
    assert calibrate_after_pass(fast_device, 1_280_000.0) == [853_333.333333, *[1_280_000.0] * 7]
    assert fast_device.calls == 49


def test_a_slow_device_multiplies_once_after_the_pass() -> None:
    device = FakeCpuDevice({}, call_s=2.0)
    assert calibrate_after_pass(device, 640.0) == [640.0]
    assert device.calls == 1
