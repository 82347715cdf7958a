"""Compare what an engine computes with what engine torch computes, on cases at size smoke.

The command `conform` (`cli/run.py`) calls `compare_with_torch`. `cli/conform_runs.py` makes the
runs, `metrics/conform_checks.py` compares two records and `metrics/proportion_checks.py` the CPU
time of several; `run/conformity.py` stores the result.
"""

import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from steelyard.case import resolve
from steelyard.case.request import DEFAULT_ENGINE as YARDSTICK
from steelyard.case.request import EngineSettings, split_engine_settings
from steelyard.case.resolve import ResolvedCase
from steelyard.cli import conform_runs
from steelyard.cli.conform_runs import ConformRunner, RunLimits
from steelyard.cli.printing import align_columns, print_json, print_stderr, print_stdout
from steelyard.engine import engine_rows
from steelyard.engine.engine_rows import EngineRow
from steelyard.errors import RequestError
from steelyard.metrics import conform_checks, conform_generation, proportion_checks
from steelyard.metrics.conform_checks import ConformCheck
from steelyard.record.record import Record
from steelyard.run import conformity


def compare_with_torch(
    engine: str, cases: list[str] | None, accelerator: str, settings: list[str], as_json: bool
) -> int:
    """Run cases (None: all that the engine runs) at size smoke with engine torch and with `engine`,
    print the comparison on stdout, and return the exit code: 0 if the engine conforms, otherwise 1.

    The result is stored in the user's cache for later records, unless a run failed, or only some
    cases were run and all agree. Records go to a temporary folder and are deleted. Raise
    RequestError for settings other than engine.KEY, for an unknown engine, engine torch itself, and
    engines that run a program of their own (`checkout`) or ask a server that is not started here;
    KeyboardInterrupt if a run is interrupted.
    """
    row = engine_rows.find_engine(engine)
    engine_paths, others = split_engine_settings(settings)
    if others:
        raise RequestError(
            f"--set {others[0]!r}: conform takes only engine.KEY=VALUE, such as"
            " engine.python=venv/bin/python"
        )
    if engine == YARDSTICK:
        raise RequestError(f"engine {YARDSTICK!r} is the reference; name another engine")
    if row.checkout:
        raise RequestError(
            f"engine {engine!r} has its own weights and rows, so its steps cannot be compared"
        )
    if row.endpoint:
        raise RequestError(
            f"engine {engine!r} asks a server with weights of its own, so its answers cannot be"
            " compared; name the engine that starts such a server"
        )
    chosen = _resolve_cases(row, cases)
    with tempfile.TemporaryDirectory(prefix="steelyard-conform-") as folder:
        yardstick, tested = (
            ConformRunner(name, paths, accelerator, Path(folder))
            for name, paths in ((YARDSTICK, EngineSettings()), (engine, engine_paths))
        )
        comparison = _Comparison(yardstick, tested)
        for item in chosen:
            comparison.compare(item)
        # an engine whose answers are wrong does not conform, however long they took
        if comparison.conforms:
            comparison.compare_times()
    rows, conforms = comparison.rows, comparison.conforms
    identity = conformity.merge_identities(comparison.identities)
    if not comparison.finished:
        print_stderr(
            "result not stored: a run failed, perhaps because of this machine; fix the cause and"
            " run again"
        )
    elif identity is None:
        print_stderr(
            "result not stored: the engine's code changed during the test, or cannot be identified;"
            " run again"
        )
    # some of the cases can show that an engine does not conform, never that it does
    elif cases is None or not conforms:
        names = [item.case.name for item in chosen]
        untested = [f"{row.case}: {row.what}: {row.untested}" for row in rows if row.ok is None]
        path = conformity.write_conformity(row, names, conforms, identity, untested)
        print_stderr(f"result stored: {path}")
    else:
        print_stderr("result not stored: only all cases together can show that an engine conforms")
    if as_json:
        entries = [{**asdict(row), "ok": row.ok} for row in rows]
        print_json(
            {
                "engine": engine,
                "version": conformity.hash_engine(row, identity),
                "conforms": conforms,
                "rows": entries,
            }
        )
    else:
        print_stdout(_format_comparison(engine, rows, conforms))
    return 0 if conforms else 1


class _Comparison:
    """The comparison of an engine (`tested`) with engine torch (`yardstick`) as it grows: `compare`
    adds the rows of a case to `rows`, `compare_times` those of timed runs of one case of each work.

    `finished`: no run has failed. `identities` are those of the engine's code in its runs.
    """

    def __init__(self, yardstick: ConformRunner, tested: ConformRunner) -> None:
        """Begin without rows; nothing is run."""
        self._yardstick, self._tested = yardstick, tested
        self.rows: list[ConformCheck] = []
        self.finished = True
        self.identities: list[str | None] = []
        # the first compared case of each work (`score_choices`, `train_rows`, ...)
        self._by_work: dict[str, tuple[ResolvedCase, Record, Record]] = {}

    @property
    def conforms(self) -> bool:
        """Whether no row is wrong; rows that were not tested do not count."""
        return all(row.ok is not False for row in self.rows)

    def compare(self, resolved: ResolvedCase) -> None:
        """Run a case with both engines and add the rows of the comparison; if its passes can change
        their order, run it again with the engine, over other rows first and in the other order, and
        add the rows of the same answers. Generation is compared by `_compare_generation`.
        """
        if resolved.case.question.kind_row.check_passes:
            self._compare_generation(resolved)
            return
        limits = conform_runs.limit_compared(resolved)
        resolved, ours = self._run_yardstick(resolved, limits)
        theirs = self._keep(self._tested.run(resolved, limits))
        self.rows += conform_checks.check_conformity(ours, theirs)
        self._by_work.setdefault(resolved.case.question.task_row.work, (resolved, ours, theirs))
        other_order = conform_runs.plan_other_order(ours)
        if other_order is not None:
            reordered = conform_runs.change_smoke(resolved, ["tune.order=1"])
            again = self._keep(self._tested.run(reordered, other_order))
            self.rows += conform_checks.check_answers_again(ours, again, "after other rows")

    def compare_times(self) -> None:
        """Run the first case of each work that the engine does in three sizes, with a wider model,
        and add the rows on their CPU time. The series ends early, or does not begin, if something
        keeps it from saying anything, such as other processes on the host.
        """
        for resolved, ours, theirs in self._by_work.values():
            settings = conform_runs.list_timed_settings(ours)
            widened = conform_runs.change_smoke(resolved, settings)
            timed: list[Record] = []
            for limits in conform_runs.plan_timed_runs(ours):
                if proportion_checks.find_obstacle(timed[-1:] or [ours, theirs]) is not None:
                    break
                timed.append(self._keep(self._tested.run(widened, limits)))
            self.rows += proportion_checks.check_proportion(timed, [ours, theirs])

    def _compare_generation(self, resolved: ResolvedCase) -> None:
        """Run a case of generation with the engine, with other seeds until its answers differ from
        request to request, and the same requests again one at a time; add the rows on its answers,
        which engine torch has checked in the first run.
        """
        limits = RunLimits(salt=conform_runs.GENERATION_SALT)
        lengths = conform_runs.choose_lengths(self._tested, resolved)
        for seed in conform_runs.WEIGHT_SEEDS:
            seeded = conform_runs.change_smoke(resolved, [f"question.seed={seed}", *lengths])
            answered = self._keep(self._tested.run(seeded, limits))
            is_varied = conform_generation.has_different_answers(answered)
            if answered.status == "failed" or is_varied:
                break
        alone = conform_runs.change_smoke(seeded, [*conform_runs.ONE_AT_A_TIME, *lengths])
        passes = tuple(resolved.case.question.kind_row.headline)
        limits = replace(limits, label="(one request at a time)", passes=passes)
        again = self._keep(self._tested.run(alone, limits))
        self.rows += conform_generation.check_generation(answered, again)

    def _run_yardstick(
        self, resolved: ResolvedCase, limits: RunLimits
    ) -> tuple[ResolvedCase, Record]:
        """Run a case with engine torch, with other seeds of the random weights until the answers
        differ from row to row; return the case with the seed of the last run, and its record.
        """
        for seed in conform_runs.WEIGHT_SEEDS:
            seeded = conform_runs.change_smoke(resolved, [f"question.seed={seed}"])
            record = self._keep(self._yardstick.run(seeded, limits))
            if record.status == "failed" or conform_checks.has_variety(record):
                break
        return seeded, record

    def _keep(self, record: Record) -> Record:
        """Note whether a run failed and, of the tested engine, the identity of its code; return the
        record.
        """
        self.finished &= record.status != "failed"
        if record.engine.name == self._tested.engine:
            self.identities.append(record.engine.identity)
        return record


def _resolve_cases(row: EngineRow, names: list[str] | None) -> list[ResolvedCase]:
    """Return the cases (None: all shipped ones that the engine runs), resolved by
    `conform_runs.resolve_smoke`.

    Raise RequestError if the engine refuses a case that was named, or runs none.
    """
    resolved: list[ResolvedCase] = []
    for name in names or resolve.list_shipped_cases():
        item = conform_runs.resolve_smoke(name)
        refusal = row.refusal(item.case)
        if refusal is not None and names:
            raise RequestError(refusal)
        if refusal is None:
            resolved.append(item)
    if not resolved:
        raise RequestError(f"engine {row.name!r} runs none of the cases; see steelyard list")
    return resolved


def _format_comparison(engine: str, rows: list[ConformCheck], conforms: bool) -> str:
    """Return the comparison as aligned lines: a head, one per case and quantity with both values,
    their difference, what is allowed and the verdict; a line for each quantity that was not tested,
    and a last line that says whether the engine conforms.
    """
    head = ("case", "quantity", YARDSTICK, engine, "difference", "allowed", "")
    cells = [
        head,
        *(
            (
                row.case,
                row.what,
                _format_cell(row.ours),
                _format_cell(row.theirs),
                _format_cell(row.apart),
                _format_cell(row.allowed),
                VERDICTS[row.ok],
            )
            for row in rows
        ),
    ]
    untested = [
        f"not tested: {row.case}: {row.what}: {row.untested}" for row in rows if row.ok is None
    ]
    verdict = f"engine {engine} {'conforms' if conforms else 'does not conform'}"
    return "\n".join([*align_columns(cells), *untested, verdict])


# by `ConformCheck.ok`
VERDICTS = {True: "ok", False: "WRONG", None: "not tested"}


def _format_cell(value: float | str | None) -> str:
    """Format a value for the table: numbers with six digits, `/` for None."""
    return "/" if value is None else value if isinstance(value, str) else f"{value:.6g}"
