"""What a device multiplies at, under an injected clock: every rate is exact."""

from collections.abc import Callable
from typing import Any

from steelyard.plan.matmuls import Matmul
from steelyard.record.facts import MatmulRate
from steelyard.run.calibrate import calibrate

SQUARE_FLOPS = 1280


class Abacus:
    """Multiplies at 128 FLOP/s, and at 64 where the result has few rows."""

    def __init__(self, cannot: str = "", square: bool = True) -> None:
        self.now, self.cannot, self.square = 0.0, cannot, square
        self.asked: list[Matmul] = []

    def _spend(self, time_s: float) -> None:
        self.now += time_s

    def matmul(self, precision: str) -> tuple[Callable[[], Any], int] | None:
        assert precision == "bf16"
        return (lambda: self._spend(10.0), SQUARE_FLOPS) if self.square else None

    def product(self, precision: str, shape: Matmul) -> tuple[Callable[[], Any], int] | None:
        self.asked.append(shape)
        rate = 64.0 if shape.m < 4 else 128.0
        return None if shape.name == self.cannot else (lambda: self._spend(shape.flops / rate), shape.flops)

    def event(self) -> "Mark":
        return Mark(self.now)

    def synchronize(self) -> None: ...


class Mark:
    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def elapsed_s(self, later: "Mark") -> float:
        return later.at_s - self.at_s


def shapes(smaller: int) -> tuple[Matmul, ...]:
    return (Matmul(name="up", m=4, n=2, k=1, count=3), Matmul(name="down", layout="tn", m=2, n=1, k=1))


def test_each_shape_has_its_rate(monkeypatch):
    monkeypatch.setattr("steelyard.run.calibrate.MOST_S", 1e9)
    device = Abacus()
    told = calibrate(device, "bf16", shapes, lambda: device.now, lambda: device.now / 2)  # type: ignore[arg-type]
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

    (one,) = calibrate(device, "bf16", of, lambda: device.now)["matmuls"]  # type: ignore[arg-type]
    assert (asked, one.m) == ([1, 2, 4, 8], 8)  # seven calls of 2·8 FLOPs at 128 FLOP/s take 0.875 s; of 2·16, 1.75 s


def test_one_token_is_the_least():
    device = Abacus()
    (one,) = calibrate(device, "bf16", lambda smaller: (Matmul(name="up", m=1, n=100, k=1),), lambda: device.now)["matmuls"]  # type: ignore[arg-type]
    assert (one.m, one.flops_per_s) == (1, 64.0)


def test_a_part_of_the_shapes_is_no_rate():
    device = Abacus(cannot="down")
    told = calibrate(device, "bf16", shapes, lambda: device.now, lambda: 0.0)  # type: ignore[arg-type]
    assert told == {"matmul_flops_per_s": 128.0, "matmuls": []}
    assert [one.name for one in device.asked] == ["up", "down"]


def test_a_framework_that_multiplies_nothing_is_asked_for_no_shape():
    device = Abacus(square=False)
    assert calibrate(device, "bf16", shapes, lambda: device.now) == {}  # type: ignore[arg-type]
    assert device.asked == []
