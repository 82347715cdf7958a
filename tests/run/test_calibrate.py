"""Tests of the matmul calibration of a device, with a fake clock, so that every rate is exact."""

from collections.abc import Callable
from typing import Any

from steelyard.accelerators.events import HostEvent
from steelyard.plan.matmuls import Matmul
from steelyard.record.run_facts import MatmulRate
from steelyard.run.calibrate import calibrate_matmuls, recalibrate_square_matmul

SQUARE_FLOPS = 1280


class Abacus:
    """A fake device that multiplies at 128 FLOP/s, and at 64 FLOP/s where the result has fewer than
    4 rows.

    It cannot multiply the shape named `unsupported`, and has no square matmul at all if `square` is
    false.
    """

    def __init__(self, cannot: str = "", square: bool = True) -> None:
        self.now, self.used, self.cannot, self.square = 0.0, 0.0, cannot, square
        self.asked: list[Matmul] = []

    def _spend(self, time_s: float) -> None:
        self.now += time_s

    def prepare_square_matmul(self, precision: str) -> tuple[Callable[[], Any], int] | None:
        assert precision == "bf16"
        return (lambda: self._spend(10.0), SQUARE_FLOPS) if self.square else None

    def prepare_matmul(self, precision: str, shape: Matmul) -> tuple[Callable[[], Any], int] | None:
        self.asked.append(shape)
        rate = 64.0 if shape.m < 4 else 128.0
        return (
            None
            if shape.name == self.cannot
            else (lambda: self._spend(shape.flops / rate), shape.flops)
        )

    def event(self) -> "Mark":
        return Mark(self.now)

    def synchronize(self) -> None: ...


class Mark:
    """A fake device event that holds the time at which it was recorded, in seconds."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def elapsed_s(self, later: "Mark") -> float:
        return later.at_s - self.at_s


def shapes(smaller: int) -> tuple[Matmul, ...]:
    """Return two matmul shapes, of which the second has few rows; `smaller` is ignored."""
    return (
        Matmul(name="up", m=4, n=2, k=1, count=3),
        Matmul(name="down", layout="tn", m=2, n=1, k=1),
    )


def test_each_shape_has_its_rate(monkeypatch):
    monkeypatch.setattr("steelyard.run.calibrate.MOST_S", 1e9)
    device = Abacus()
    told = calibrate_matmuls(device, "bf16", shapes, lambda: device.now, lambda: device.now / 2)  # type: ignore[arg-type]
    assert told["matmul_flops_per_s"] == 128.0
    assert told["matmul_flops_per_cpu_s"] == 256.0  # half of the time is CPU time
    assert told["matmuls"] == [
        MatmulRate(name="up", layout="nt", m=4, n=2, k=1, count=3, flops_per_s=128.0),
        MatmulRate(name="down", layout="tn", m=2, n=1, k=1, count=1, flops_per_s=64.0),
    ]


def test_a_batch_too_large_for_the_time_is_halved():
    device = Abacus()
    asked: list[int] = []

    def of(smaller: int) -> tuple[Matmul, ...]:
        asked.append(smaller)
        return (Matmul(name="up", m=max(1, 64 // smaller), n=1, k=1),)

    (one,) = calibrate_matmuls(device, "bf16", of, lambda: device.now)["matmuls"]  # type: ignore[arg-type]
    # Seven calls of 2·8 FLOPs at 128 FLOP/s take 0.875 s, which is within the time limit; seven of
    # 2·16 FLOPs would take 1.75 s.
    assert (asked, one.m) == ([1, 2, 4, 8], 8)


def test_one_token_is_the_least():
    device = Abacus()
    (one,) = calibrate_matmuls(
        device, "bf16", lambda smaller: (Matmul(name="up", m=1, n=100, k=1),), lambda: device.now
    )["matmuls"]  # type: ignore[arg-type]
    assert (one.m, one.flops_per_s) == (1, 64.0)


def test_a_part_of_the_shapes_is_no_rate():
    device = Abacus(cannot="down")
    told = calibrate_matmuls(device, "bf16", shapes, lambda: device.now, lambda: 0.0)  # type: ignore[arg-type]
    assert told == {"matmul_flops_per_s": 128.0, "matmuls": []}
    assert [one.name for one in device.asked] == ["up", "down"]


def test_a_framework_that_multiplies_nothing_is_asked_for_no_shape():
    device = Abacus(square=False)
    assert calibrate_matmuls(device, "bf16", shapes, lambda: device.now) == {}  # type: ignore[arg-type]
    assert device.asked == []


class Cores(Abacus):
    """A fake CPU device on which a call of the square matmul takes `call_s` seconds.

    `slowdowns` maps the number of a call to the factor by which it uses more CPU time, as beside
    another process on the same core.
    """

    def __init__(self, slow: dict[int, float], call_s: float = 0.01) -> None:
        super().__init__()
        self.slow, self.call_s, self.calls = slow, call_s, 0

    def prepare_square_matmul(self, precision: str) -> tuple[Callable[[], Any], int] | None:
        return self._multiply, SQUARE_FLOPS

    def _multiply(self) -> None:
        self._spend(self.call_s)
        self.used += self.call_s * self.slow.get(self.calls, 1.0)
        self.calls += 1

    def event(self) -> HostEvent:  # type: ignore[override]
        return HostEvent(lambda: self.now)


def before(device: Any) -> dict[str, Any]:
    """Return the facts of the calibration before a pass, without any shapes of a case."""
    return calibrate_matmuls(
        device, "bf16", lambda smaller: (), lambda: device.now, lambda: device.used
    )


def after(device: Any, rate: float) -> list[float]:
    """Return the rates of the calibration after a pass in FLOP/s, rounded to six decimals."""
    told = recalibrate_square_matmul(device, "bf16", rate, lambda: device.now, lambda: device.used)
    return [round(one, 6) for one in told]


def test_cpu_time_is_read_several_times_before_the_pass() -> None:
    """One call, three warmup calls and 39 calls in 0.3 s are timed as eight parts of 3 or 6 calls.

    All calls but three are slowed down: the mean does not show the rate of a quiet host, but one of
    the parts does.
    """
    cores = Cores({call: 2.0 for call in range(43) if call not in (22, 23, 24)}, call_s=1 / 128)
    told = before(cores)
    assert cores.calls == 43
    assert told["matmul_cpu_rates"] == {"before": [81_920.0] * 4 + [163_840.0] + [81_920.0] * 3}
    assert told["matmul_flops_per_cpu_s"] == 163_840.0 * 42 / 81
    assert told["matmul_flops_per_s"] == 163_840.0


def test_few_calls_are_one_timing_each_three() -> None:
    cores = Cores({}, call_s=1.0)
    assert before(cores)["matmul_cpu_rates"] == {"before": [1280.0, 1280.0]}
    assert cores.calls == 7


def test_a_device_with_its_own_clock_has_no_rates_of_cpu_time() -> None:
    device = Abacus()
    assert "matmul_cpu_rates" not in before(device)
    assert after(device, 128.0) == []


def test_timings_after_the_pass_take_some_tens_of_milliseconds() -> None:
    """A warmup call and three timed calls take 0.04 s; three more would not end within 0.05 s."""
    cores = Cores({0: 5.0})
    assert after(cores, 128_000.0) == [128_000.0]
    assert cores.calls == 4
    quick = Cores({1: 2.0, 2: 2.0, 3: 2.0}, call_s=0.001)
    # 49 calls: one to warm up, then 16 timings of three calls, which are joined to eight rates.
    assert after(quick, 1_280_000.0) == [853_333.333333, *[1_280_000.0] * 7]
    assert quick.calls == 49


def test_a_slow_device_multiplies_once_after_the_pass() -> None:
    cores = Cores({}, call_s=2.0)
    assert after(cores, 640.0) == [640.0]
    assert cores.calls == 1
