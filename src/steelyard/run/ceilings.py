"""The worker of `steelyard spec`: measure the ceilings of one device, such as matmul rates and
memory bandwidth.

It reads a `CeilingsWorkerSpec`, runs every benchmark row that the framework offers for the device
(engine/bench.py), and writes one rank file. A row is timed in short stretches until the last ones
agree or its time is over. Started by the node agent as `python -m steelyard.run.ceilings_worker
SPEC`; the parent's side is run/ceilings_parent.py.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from steelyard import accelerators
from steelyard.accelerators.events import Clock, Timeline
from steelyard.engine import rows as engine_rows
from steelyard.engine.bench import Budgeted, Ceilings, LacksError, Made, Row
from steelyard.engine.framework import Framework
from steelyard.errors import RequestError
from steelyard.metrics.ceilings import settled
from steelyard.plan.degrees import Plan
from steelyard.record.spec import Bench, Checked, Limits, Stretch
from steelyard.run.clock import now
from steelyard.run.measure import time_calls
from steelyard.run.messages import HostSpec
from steelyard.run.worker import RankProcess, serve
from steelyard.schema import Frozen

# A stretch is short compared with the seconds in which a device warms up and lowers its clock. Five
# in a row that agree within 2 % show that it has settled: at its power limit, a device's clock is
# never steadier than that.
FULL = Limits(stretch_s=0.2, limit_s=4.0, total_s=1200.0, within=0.02, last=5)
QUICK = Limits(stretch_s=0.01, limit_s=0.15, total_s=12.0, within=0.05, last=5)
CALL_SHARE = 0.2  # share of a row's time that one call may take
FIRST_SHARE = 0.1  # share of the matmul rate expected of a kernel before one is timed
MOST_ERROR = 1e30  # a larger error is stored as None, as NaN is
WHY_CHARS = 300

Agree = Callable[[float], float]  # returns the maximum over all ranks

FRAMEWORK = "torch"


def alone(value: float) -> float:
    """Return the value itself: the maximum over all ranks where there is only this one."""
    return value


def hold(
    made: Made,
    device: Timeline,
    limits: Limits,
    clock: Clock,
    origin_s: float,
    agree: Agree = alone,
) -> list[Stretch]:
    """Time an operation in stretches of many calls until the last stretches agree or
    `limits.limit_s` is over, and return all stretches.

    One call to warm up and one to choose the calls per stretch come first, and are not returned.
    `max_over_ranks` returns the maximum of a value over all ranks, so that ranks that compute
    together make the same number of calls, and go on while one of them must. Start times are
    seconds since `origin_s`.
    """
    made.work()
    device.synchronize()
    one_s = agree(_time(made, device, clock, origin_s, 1).time_s)
    calls = max(1, math.ceil(limits.stretch_s / one_s)) if one_s > 0 else 1
    begin, out = clock(), []
    while True:
        out.append(_time(made, device, clock, origin_s, calls))
        over = clock() - begin >= limits.limit_s
        more = len(out) < limits.last or not (over or settled(out, limits)[0])
        if not agree(float(more)):
            return out


def _time(made: Made, device: Timeline, clock: Clock, origin_s: float, calls: int) -> Stretch:
    """Time so many calls by device events and return them as a stretch; its start is in seconds
    since `origin_s` on `clock`.
    """
    start_s = clock() - origin_s
    return Stretch(
        start_s=start_s, time_s=max(0.0, time_calls(made.work, device, calls)), calls=calls
    )


class Holder:
    """Runs benchmark rows one after the other, and remembers the best rate of each kind of row to
    choose the size of the next.

    `limits.total_s` counts from its creation. `max_over_ranks` returns the maximum of a value over
    all ranks.
    """

    def __init__(
        self,
        device: Timeline,
        rank: int,
        limits: Limits,
        clock: Clock,
        origin_s: float,
        agree: Agree = alone,
    ) -> None:
        """Store the settings and take the time from which `limits.total_s` counts."""
        self.device, self.rank, self.limits = device, rank, limits
        self.clock, self.origin_s, self.agree = clock, origin_s, agree
        self._begin = clock()
        self._rates: dict[tuple[str, str | None, str], float] = {}

    def take(self, row: Row) -> Bench:
        """Run one benchmark row: prepare it, check its result, time it, and return the bench for
        the rank file.

        Nothing is raised: if the row is unsupported, the total time is over, or anything fails here
        or on another rank, the bench has no stretches and states the reason. If the result is wrong
        on this rank, `checked` states it instead.
        """
        agree = self.agree if row.together else alone
        if row.lacks is not None:
            return self._bench(row, reason=row.lacks[:WHY_CHARS])
        if agree(float(self.clock() - self._begin > self.limits.total_s)):
            return self._bench(row, reason=f"not tried: {self.limits.total_s:g} s were over")
        key = (row.group, row.precision, row.like)
        made, why = self._made(row, self._rates.get(key) or self._guess(row))
        if agree(float(made is None)) or made is None:
            return self._bench(row, reason=why or "it cannot be had on another rank")
        try:
            bench = self._take(row, made, agree)
        except Exception as error:  # noqa: BLE001  a kernel that a device has not may raise anything; it is the reason
            return self._bench(row, reason=_why(error))
        if bench.stretches and bench.amount is not None and bench.stretches[-1].time_s > 0:
            last = bench.stretches[-1]
            self._rates[key] = max(
                self._rates.get(key, 0.0), bench.amount * last.calls / last.time_s
            )
        return bench

    def _made(self, row: Row, rate: float | None) -> tuple[Made | None, str | None]:
        """Prepare the operation of a row for calls that take at most `CALL_SHARE` of a row's time
        at the expected rate; return it with None, or None with the reason why it cannot be had.
        """
        try:
            return row.make(Budgeted(rate, CALL_SHARE * self.limits.limit_s)), None
        except LacksError as error:
            return None, str(error)[:WHY_CHARS]
        except Exception as error:  # noqa: BLE001  as above
            return None, _why(error)

    def _guess(self, row: Row) -> float | None:
        """Return the expected rate of the first FLOP/s row of its kind: `GUESSED_SHARE` of the best
        matmul rate in the same precision; None if that is unknown or the row is not in FLOP/s.
        """
        known = self._rates.get(("matmul", row.precision, ""))
        return None if known is None or row.unit != "FLOP/s" else FIRST_SHARE * known

    def _take(self, row: Row, made: Made, agree: Agree) -> Bench:
        """Check the result of a prepared operation, then time it, and return the bench.

        If the check fails on any rank, the bench has no stretches. A row in bytes is an amount and
        is not timed.
        """
        told = self._bench(row).model_copy(
            update={"amount": float(made.amount), "detail": dict(made.detail)}
        )
        if made.check is not None:
            error, bound = made.check()
            checked = Checked(error=error if abs(error) < MOST_ERROR else None, bound=bound)
            told = told.model_copy(update={"checked": checked})
            if agree(float(not checked.ok)):
                other = None if not checked.ok else "its result is wrong on another rank"
                return told.model_copy(update={"reason": other})
        if row.unit == "B":
            return told
        stretches = hold(made, self.device, self.limits, self.clock, self.origin_s, agree)
        return told.model_copy(update={"stretches": stretches})

    def _bench(self, row: Row, reason: str | None = None) -> Bench:
        """Return a bench of the row on this rank without amount and times, with an optional reason
        why it has none.
        """
        return Bench(
            group=row.group,
            name=row.name,
            precision=row.precision,
            rank=self.rank,
            unit=row.unit,
            detail={},
            reason=reason,
        )


def _why(error: Exception) -> str:
    """Return the type and the first line of an error, cut to `REASON_CHARS`: some errors list every
    kernel that exists.
    """
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0].strip() if said else ''}".rstrip(": ")[:WHY_CHARS]


class CeilingsSpec(Frozen):
    """What the parent tells all workers of `steelyard spec`."""

    accelerator: str
    plan: Plan
    quick: bool
    limits: Limits


class CeilingsWorkerSpec(Frozen):
    """All that one worker of `steelyard spec` is told: the parent's part and the node agent's."""

    run: CeilingsSpec
    host: HostSpec


def main() -> None:
    """Read the spec file named in the first argument, measure the ceilings as one rank, and exit
    the process.
    """
    spec = CeilingsWorkerSpec.model_validate_json(Path(sys.argv[1]).read_bytes())
    serve(partial(CeilingsWorker, spec), spec.host.folder)


class CeilingsWorker(RankProcess):
    """One rank of `steelyard spec`: its rank file gets a bench for every row."""

    def __init__(self, spec: CeilingsWorkerSpec, rank: int) -> None:
        super().__init__(rank, spec.run.accelerator, spec.host)
        self.spec = spec.run

    def run(self) -> None:
        """Load the framework, join the other ranks and measure all rows; the results are in the
        rank file.
        """
        with self._phase("imports"):
            framework = self._load()
            shown: Ceilings = engine_rows.load_ceilings(FRAMEWORK)(framework)
        rows = list(shown.rows(self.spec.quick))
        with self.budget.part("rows"):
            self._rows(shown, rows, framework)
        framework.barrier()

    def _load(self) -> Framework:
        """Return the framework on this rank's device, joined with the other ranks, and add device
        and versions to the rank file; raise RequestError if the accelerator has no device class for
        it.
        """
        spec = self.spec
        device = accelerators.named(spec.accelerator).devices.get(FRAMEWORK)
        if device is None:
            raise RequestError(
                f"accelerator {spec.accelerator!r} has no device class for {FRAMEWORK}; see"
                " steelyard list"
            )
        framework: Framework = engine_rows.load_framework(FRAMEWORK)(device, self.local_rank, now)
        self._add(
            identity=framework.identity(),
            versions=framework.versions(),
            threads=framework.threads(),
        )
        framework.join(spec.plan, self.rank, self.world, self.host.rendezvous)
        self.framework = framework
        return framework

    def _rows(self, shown: Ceilings, rows: list[Row], framework: Framework) -> None:
        """Measure the rows one after the other, and write the rank file after each, so that a rank
        that is killed leaves what it has.
        """
        holder = Holder(
            framework, self.rank, self.spec.limits, now, self.host.origin_s, shown.agree
        )
        for done, row in enumerate(rows):
            named = " ".join(filter(None, (row.group, row.name, row.precision)))
            self.tell(named, done, len(rows))
            self._add(benches=[*self.file.benches, holder.take(row)])
            shown.release()
            self.write("running", None)


if __name__ == "__main__":
    main()
