"""The worker of `steelyard spec`: measure the ceilings of one device, such as matmul rates and
memory bandwidth.

It reads a `CeilingsWorkerSpec`, runs every benchmark row that the framework offers for the device
(engine/ceiling_rows.py), and writes one rank file. A row is timed in short stretches until the last
ones agree or its time is over. Started by the node agent as `python -m
steelyard.run.ceilings_worker SPEC`; the parent's side is run/ceilings_parent.py.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from steelyard import accelerators
from steelyard.accelerators.events import Clock, Timeline
from steelyard.engine import engine_rows
from steelyard.engine.ceiling_rows import (
    CallBudget,
    CeilingRow,
    FrameworkCeilings,
    PreparedCeiling,
    UnavailableError,
)
from steelyard.engine.framework import Framework
from steelyard.errors import RequestError, clean_error_line
from steelyard.metrics.ceiling_rates import select_settled_stretches
from steelyard.plan.degrees import Plan
from steelyard.record.ceilings_record import BenchLimits, BenchTimings, ErrorCheck, TimedCalls
from steelyard.run.clock import now
from steelyard.run.measure import time_calls
from steelyard.run.messages import HostSpec
from steelyard.run.rank_process import RankProcess, run_rank_process
from steelyard.schema import FrozenModel
from steelyard.words import Message

# A stretch is short compared with the seconds in which a device warms up and lowers its clock. Five
# in a row that agree within 2 % show that it has settled: at its power limit, a device's clock is
# never steadier than that.
FULL_LIMITS = BenchLimits(stretch_s=0.2, limit_s=4.0, total_s=1200.0, within=0.02, last=5)
QUICK_LIMITS = BenchLimits(stretch_s=0.01, limit_s=0.15, total_s=12.0, within=0.05, last=5)
CALL_SHARE = 0.2  # share of a row's time that one call may take
GUESSED_SHARE = 0.1  # share of the matmul rate expected of a kernel before one is timed
MAX_ERROR = 1e30  # a larger error is stored as None, as NaN is
REASON_CHARS = 300

MaxOverRanks = Callable[[float], float]  # returns the maximum over all ranks
# words an exception of a row in a precision (None: it has none)
ErrorExplainer = Callable[[Exception, str | None], Message]

FRAMEWORK = "torch"


def max_of_one_rank(value: float) -> float:
    """Return the value itself: the maximum over all ranks where there is only this one."""
    return value


def explain_as_failed(error: Exception, precision: str | None) -> Message:
    """Return a message that says only that a row failed, whatever the exception was: the default of
    an `ErrorExplainer`.
    """
    return Message("ceiling.failed")


def time_until_settled(
    operation: PreparedCeiling,
    device: Timeline,
    limits: BenchLimits,
    clock: Clock,
    origin_s: float,
    max_over_ranks: MaxOverRanks = max_of_one_rank,
) -> list[TimedCalls]:
    """Time an operation in stretches of equally many calls, enough to fill `limits.stretch_s`,
    until the last `limits.last` stretches agree or `limits.limit_s` is over, and return all
    stretches, at least `limits.last`.

    One call to warm up and one to choose the calls per stretch come first, and are not returned.
    `max_over_ranks` returns the maximum of a value over all ranks, so that ranks that compute
    together make the same number of calls, and go on while one of them must. Start times are
    seconds since `origin_s`.
    """
    operation.call()
    device.synchronize()
    call_s = max_over_ranks(_time_stretch(operation, device, clock, origin_s, 1).time_s)
    calls = max(1, math.ceil(limits.stretch_s / call_s)) if call_s > 0 else 1
    begin, stretches = clock(), []
    while True:
        stretches.append(_time_stretch(operation, device, clock, origin_s, calls))
        time_is_over = clock() - begin >= limits.limit_s
        needs_more = len(stretches) < limits.last or not (
            time_is_over or select_settled_stretches(stretches, limits)[0]
        )
        if not max_over_ranks(float(needs_more)):
            return stretches


def _time_stretch(
    operation: PreparedCeiling, device: Timeline, clock: Clock, origin_s: float, calls: int
) -> TimedCalls:
    """Time so many calls together, by one pair of device events around them, and return them as a
    stretch: `time_s` is their total, not below 0, `start_s` counts from `origin_s` on `clock`.
    """
    start_s = clock() - origin_s
    return TimedCalls(
        start_s=start_s, time_s=max(0.0, time_calls(operation.call, device, calls)), calls=calls
    )


class CeilingBenchmarker:
    """Runs benchmark rows of `steelyard spec` on one rank one after the other: `run_row` returns
    the timings of one, or the reason why there are none. It remembers the best rate of each group,
    precision and kind of row, by which the size of the next is chosen.

    `limits` says how long a row is timed; its `total_s` counts from the creation of this object,
    and later rows are not tried. `max_over_ranks` returns the maximum of a value over all ranks, a
    collective call, and is used for rows that all ranks must run together. `explain_error` words
    the exception of a row.
    """

    def __init__(
        self,
        device: Timeline,
        rank: int,
        limits: BenchLimits,
        clock: Clock,
        origin_s: float,
        max_over_ranks: MaxOverRanks = max_of_one_rank,
        explain_error: ErrorExplainer = explain_as_failed,
    ) -> None:
        """Store the settings of this rank's benchmarker and take the time from which
        `limits.total_s` counts; nothing is run. `origin_s` is the start of the run on `clock`, from
        which start times count.
        """
        self.device, self.rank, self.limits = device, rank, limits
        self.clock, self.origin_s, self.max_over_ranks = clock, origin_s, max_over_ranks
        self.explain_error = explain_error
        self._begin = clock()
        self._rates: dict[tuple[str, str | None, str], float] = {}

    def run_row(self, row: CeilingRow) -> BenchTimings:
        """Run one benchmark row on this rank: prepare it, check its result, time it, and return the
        bench (raw timings) for the rank file. All ranks must call it with rows of `all_ranks`
        together.

        Errors of the row are not raised: if it is unsupported, the total time is over, or anything
        fails here or could not be prepared on another rank, the bench has no stretches and states
        the reason. If the result is wrong on this rank, `checked` states it instead. A timed row
        updates the best rates.
        """
        max_over_ranks = self.max_over_ranks if row.all_ranks else max_of_one_rank
        if row.unavailable is not None:
            return self._make_bench(row, row.unavailable)
        if max_over_ranks(float(self.clock() - self._begin > self.limits.total_s)):
            return self._make_bench(
                row, Message("ceiling.no_time", {"total_s": self.limits.total_s})
            )
        key = (row.group, row.precision, row.kind)
        operation, absent = self._prepare_operation(
            row, self._rates.get(key) or self._guess_rate(row)
        )
        if max_over_ranks(float(operation is None)) or operation is None:
            return absent or self._make_bench(row, Message("ceiling.other_rank"))
        try:
            bench = self._check_and_time(row, operation, max_over_ranks)
        except Exception as error:  # noqa: BLE001  a kernel that a device has not may raise anything; it is the reason
            return self._make_failed_bench(row, error)
        if bench.stretches and bench.amount is not None and bench.stretches[-1].time_s > 0:
            last = bench.stretches[-1]
            self._rates[key] = max(
                self._rates.get(key, 0.0), bench.amount * last.calls / last.time_s
            )
        return bench

    def _prepare_operation(
        self, row: CeilingRow, rate: float | None
    ) -> tuple[PreparedCeiling | None, BenchTimings | None]:
        """Prepare the operation of a row for calls that take at most `CALL_SHARE` of a row's time
        at the expected `rate` (FLOP/s or B/s; None: unknown); return (operation, None), or for any
        error (None, bench that gives the reason).
        """
        try:
            return row.prepare(CallBudget(rate, CALL_SHARE * self.limits.limit_s)), None
        except UnavailableError as error:
            return None, self._make_bench(row, error.reason)
        except Exception as error:  # noqa: BLE001  as above
            return None, self._make_failed_bench(row, error)

    def _guess_rate(self, row: CeilingRow) -> float | None:
        """Return the rate to expect of a row of whose kind none was timed yet: `GUESSED_SHARE` of
        the best rate of plain matmuls (kind "") in the same precision; None if that is unknown or
        the row is not in FLOP/s.
        """
        matmul_rate = self._rates.get(("matmul", row.precision, ""))
        return None if matmul_rate is None or row.unit != "FLOP/s" else GUESSED_SHARE * matmul_rate

    def _check_and_time(
        self, row: CeilingRow, operation: PreparedCeiling, max_over_ranks: MaxOverRanks
    ) -> BenchTimings:
        """Check the result of a prepared operation once, then time it, and return the bench with
        amount, detail, error and stretches.

        If the error is beyond its bound here or, for a row that all ranks run together, on any
        rank, the bench has no stretches; a rank whose own result is right gets a reason. A row in
        bytes is an amount and is not timed. Errors of the operation are raised.
        """
        bench = self._make_bench(row).model_copy(
            update={"amount": float(operation.amount), "detail": dict(operation.detail)}
        )
        if operation.check is not None:
            error, bound = operation.check()
            checked = ErrorCheck(error=error if abs(error) < MAX_ERROR else None, bound=bound)
            bench = bench.model_copy(update={"checked": checked})
            if max_over_ranks(float(not checked.is_within_bound)):
                reason = Message("ceiling.wrong_elsewhere") if checked.is_within_bound else None
                return bench.model_copy(update={"reason": reason})
        if row.unit == "B":
            return bench
        stretches = time_until_settled(
            operation, self.device, self.limits, self.clock, self.origin_s, max_over_ranks
        )
        return bench.model_copy(update={"stretches": stretches})

    def _make_bench(
        self, row: CeilingRow, reason: Message | str | None = None, error_text: str | None = None
    ) -> BenchTimings:
        """Return the bench (raw timings) of a benchmark row on this rank, still without amount,
        detail and stretches; `reason` says why it stays so (None: it is to be timed), a sentence
        cut to `REASON_CHARS`, and `error_text` quotes the exception behind it.
        """
        return BenchTimings(
            group=row.group,
            name=row.name,
            precision=row.precision,
            rank=self.rank,
            unit=row.unit,
            detail={},
            reason=reason[:REASON_CHARS] if isinstance(reason, str) else reason,
            error_text=error_text,
        )

    def _make_failed_bench(self, row: CeilingRow, error: Exception) -> BenchTimings:
        """Return the bench of a row that raised an exception: the reason in our words, and the type
        and first line of the exception as `error_text`. A RequestError is raised by a kernel of
        ours; its text alone says what the kernel needs.
        """
        if isinstance(error, RequestError):
            return self._make_bench(row, Message("ceiling.refused"), clean_error_line(str(error)))
        error_text = clean_error_line(f"{type(error).__name__}: {str(error).strip()}").rstrip(": ")
        return self._make_bench(row, self.explain_error(error, row.precision), error_text)


class CeilingsSpec(FrozenModel):
    """What the parent tells all workers of `steelyard spec`: name of the `accelerator`, `plan` (all
    devices of one host, data parallel), whether only the `quick` rows are measured, and `limits`,
    when a row ends. Created by run/ceilings_parent.py.
    """

    accelerator: str
    plan: Plan
    quick: bool
    limits: BenchLimits


class CeilingsWorkerSpec(FrozenModel):
    """The spec file of the workers of `steelyard spec` on a host: what the parent says (`run`) and
    what the node agent adds (`host`: folder, start time, rendezvous). The rank is not in it: RANK
    has it.
    """

    run: CeilingsSpec
    host: HostSpec


def main() -> None:
    """Read the spec file named in the first argument, measure the ceilings as the rank in RANK, and
    exit the process with the code of `run_rank_process`.
    """
    spec = CeilingsWorkerSpec.model_validate_json(Path(sys.argv[1]).read_bytes())
    run_rank_process(partial(CeilingsWorker, spec), spec.host.folder)


class CeilingsWorker(RankProcess):
    """One rank of `steelyard spec`, created by `main` in the worker's process: `run` measures every
    row that torch offers on its device, one after the other, and adds the timings of each to
    `benches` of the rank file, which is written after each. `spec` is the parent's part of the
    spec.
    """

    def __init__(self, spec: CeilingsWorkerSpec, rank: int) -> None:
        """Begin this rank's rank file, which is not written yet, and store the parent's part of the
        spec; nothing is loaded.
        """
        super().__init__(rank, spec.run.accelerator, spec.host)
        self.spec = spec.run

    def run(self) -> None:
        """Load torch on this rank's device, join the other ranks, measure all rows, and wait for
        the other ranks at the end; the results are in the rank file. Raises RequestError if the
        accelerator has no device class for torch; errors of a row are in its bench.
        """
        with self._time_and_report("imports"):
            framework = self._load_framework()
            ceilings: FrameworkCeilings = engine_rows.load_ceilings(FRAMEWORK)(framework)
        rows = list(ceilings.rows(self.spec.quick))
        with self.budget.part("rows"):
            self._measure_rows(ceilings, rows, framework)
        framework.barrier()

    def _load_framework(self) -> Framework:
        """Load torch on this rank's device, add device, versions and threads to the rank file, join
        the other ranks (a collective call), store the framework as `self.framework` and return it;
        raise RequestError if the accelerator has no device class for torch.
        """
        spec = self.spec
        device = accelerators.find_accelerator(spec.accelerator).devices.get(FRAMEWORK)
        if device is None:
            raise RequestError(
                f"accelerator {spec.accelerator!r} has no device class for {FRAMEWORK}; see"
                " steelyard list"
            )
        framework: Framework = engine_rows.load_framework(FRAMEWORK)(device, self.local_rank, now)
        self._update_rank_file(
            identity=framework.identity(),
            versions=framework.versions(),
            threads=framework.threads(),
        )
        framework.join_ranks(spec.plan, self.rank, self.world_size, self.host.rendezvous)
        self.framework = framework
        return framework

    def _measure_rows(
        self, ceilings: FrameworkCeilings, rows: list[CeilingRow], framework: Framework
    ) -> None:
        """Measure the rows one after the other, release the memory of each, and write the rank file
        with one bench more after each, so that a rank that is killed leaves what it has. Each row
        is reported as progress.
        """
        benchmarker = CeilingBenchmarker(
            framework,
            self.rank,
            self.spec.limits,
            now,
            self.host.origin_s,
            ceilings.all_reduce_max,
            # packages made before there was such a function have none
            getattr(ceilings, "explain_error", explain_as_failed),
        )
        for done, row in enumerate(rows):
            label = " ".join(filter(None, (row.group, row.name, row.precision)))
            self.write_progress(label, done, len(rows))
            self._update_rank_file(benches=[*self.rank_file.benches, benchmarker.run_row(row)])
            ceilings.release_memory()
            self.write_rank_file("running", None)


if __name__ == "__main__":
    main()
