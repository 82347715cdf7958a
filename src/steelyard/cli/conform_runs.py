"""The runs that `steelyard conform` makes: cases at size smoke, the same over other rows and in
another order, and a series in three sizes whose CPU time is compared.

`cli/conform.py` decides which are made and compares their records.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from steelyard.case import resolve
from steelyard.case.request import DEFAULT_ENGINE as YARDSTICK
from steelyard.case.request import EngineSettings, Request
from steelyard.case.resolve import ResolvedCase
from steelyard.cli.execute_runs import is_interrupted
from steelyard.cli.printing import print_stderr
from steelyard.engine import engine_rows
from steelyard.metrics import passes, plausibility
from steelyard.plan import flops
from steelyard.record.record import Record
from steelyard.run.checked_request import check_request
from steelyard.run.parent import run_case

TRAINING_STEPS = 2
# Of the random weights, the first one for which answers differ from row to row: tiny models often
# answer every question alike.
WEIGHT_SEEDS = range(8)
# Steps in the three sizes of the timed runs of training; scoring has a quarter, a half and all of
# the rows. Small and large ones are repeated, so that a fit has an interval, and alternate, so that
# a host that becomes slower does not look like a line.
TIMED_STEPS = (2, 8, 4, 8, 2)
TIMED_SHARES = (1 / 4, 1, 1 / 2, 1, 1 / 4)
REPEATED_SHARE = 1 / 2  # of the rows, computed in two passes: as much work as all rows in one
# Seconds that the largest size takes at the rate of a matmul. A start of a worker varies by about a
# tenth of a second of CPU time.
LARGEST_S = 1.5
MAX_FACTOR = 64  # by which a model of size smoke is widened
# Of generation: the salt of all runs, so that they send the same prompts; and the load of the run
# that must answer as the others do, one request at a time.
GENERATION_SALT = "c0" * 16
ONE_AT_A_TIME = ("load.mode=concurrency", "load.concurrency=1")


@dataclass(frozen=True)
class RunLimits:
    """How much of a case one run computes, and in which order: `passes` (None: all of the task),
    `sample` rows and `steps` (None: all), and `rehearsed_rows`, ids that the worker computes before
    (None: none); `salt` is that of the prompts of generation (None: one drawn for the run). `label`
    is shown behind case and engine while it runs.
    """

    label: str = ""
    passes: tuple[str, ...] | None = None
    sample: int | None = None
    steps: int | None = None
    rehearsed_rows: tuple[str, ...] | None = None
    salt: str | None = None


@dataclass(frozen=True)
class ConformRunner:
    """Runs cases with one engine on one device: `run` starts one and returns its record. `settings`
    are those of `--set engine.KEY`, `folder` gets the records.
    """

    engine: str
    settings: EngineSettings
    accelerator: str
    folder: Path

    def run(self, resolved: ResolvedCase, limits: RunLimits) -> Record:
        """Run a case once and return its record, also of a failed run. Print case, engine and label
        on stderr before, and raise KeyboardInterrupt if the run was interrupted, RequestError if it
        is refused.
        """
        print_stderr(" ".join([resolved.case.name, self.engine, *limits.label.split()]))
        request = Request(
            resolved=resolved,
            engine=self.engine,
            engine_settings=self.settings,
            accelerator=self.accelerator,
            passes=limits.passes,
            sample=limits.sample,
            steps=limits.steps,
            rehearsed_rows=limits.rehearsed_rows,
            salt=limits.salt,
            out=self.folder,
            identify=self.engine != YARDSTICK,
        )
        record = run_case(check_request(request), warn=_print_warning)[0]
        if is_interrupted(record):
            raise KeyboardInterrupt
        return record


def _print_warning(text: str) -> None:
    """Print a warning of a run on stderr."""
    print_stderr(f"warning: {text}")


def resolve_smoke(name: str, settings: list[str] | None = None) -> ResolvedCase:
    """Return a case resolved at size smoke in division closed with further settings (`key=value`),
    and with dropout 0 where the model has any: engines draw random numbers in different orders.
    """
    case = resolve.resolve_case(name, "smoke", None, "closed").case
    without_dropout = [
        f"question.model.{key}=0" for key in ("dropout",) if hasattr(case.question.model, key)
    ]
    return resolve.resolve_case(
        name, "smoke", None, "closed", [*without_dropout, *(settings or [])]
    )


def change_smoke(resolved: ResolvedCase, settings: list[str]) -> ResolvedCase:
    """Return a case of `resolve_smoke` with further settings, the seed of its question kept."""
    seed = f"question.seed={resolved.case.question.seed}"
    return resolve_smoke(resolved.case.name, [seed, *settings])


def choose_lengths(runner: ConformRunner, resolved: ResolvedCase) -> list[str]:
    """Return the settings with which an engine can answer a case of generation: natural lengths if
    it cannot ignore the end of a text, else none.
    """
    row = engine_rows.find_engine(runner.engine)
    natural = ["question.data.lengths=natural"]
    for settings in ([], natural):
        case = change_smoke(resolved, settings).case
        if row.explain_missing_setting(case, runner.settings) is None:
            return settings
    return []


def limit_compared(resolved: ResolvedCase) -> RunLimits:
    """Return the limits of the run that is compared with engine torch: two steps of training, or
    all rows of scoring.
    """
    trains = resolved.case.question.kind_row.trains
    return RunLimits(steps=TRAINING_STEPS if trains else None)


def plan_other_order(compared: Record) -> RunLimits | None:
    """Return the limits of a run that must give the answers of `compared` again: its passes in
    reverse order, after the worker has computed the second half of the rows with another engine
    object. None for a kind of work whose passes have a fixed order, or where rows cannot be named.

    The rows of the second half have other positions there than in the run, so that answers kept by
    position are wrong.
    """
    task, rows = compared.task, getattr(compared.data, "rows", 0)
    if task.kind_row.ordered or "rows" not in task.selects or rows < 2:
        return None
    return RunLimits(
        label="(other rows before, passes reversed)",
        passes=tuple(reversed(_list_passes(compared))),
        rehearsed_rows=(f"{rows // 2}-{rows - 1}",),
    )


def plan_timed_runs(compared: Record) -> list[RunLimits]:
    """Return the limits of the runs whose CPU time is compared, in three sizes of work. In scoring
    each pass is run alone, and the passes together, in both orders, on half of the rows: as much
    work as all rows once, with every row computed twice.
    """
    names, headline = _list_passes(compared), passes.find_headline_pass(compared)
    if headline is None:
        return []
    if headline in compared.task.kind_row.stepped:
        limits = [RunLimits(passes=(headline,), steps=steps) for steps in TIMED_STEPS]
    else:
        rows = getattr(compared.data, "rows", 0)
        first, last = names[0], names[-1]
        alternating = (last, first, last, last, first)
        limits = [
            RunLimits(passes=(name,), sample=max(1, int(share * rows)))
            for name, share in zip(alternating, TIMED_SHARES, strict=True)
        ]
        if first != last:
            half = max(1, int(REPEATED_SHARE * rows))
            limits[2:2] = [RunLimits(passes=(first, last), sample=half)]
            limits.append(RunLimits(passes=(last, first), sample=half))
    return [
        replace(limit, label=f"(timed run {number} of {len(limits)})")
        for number, limit in enumerate(limits, 1)
    ]


def list_timed_settings(compared: Record) -> list[str]:
    """Return the settings of the timed runs of a case: no warm-up, which is work that a run with
    two passes does twice, and a model that is so much wider that the largest run takes `LARGEST_S`
    seconds at the rate of the matmuls of the compared run. On a CPU the work of size smoke is too
    small to be seen from outside.

    A model without the dimensions `hidden` and `ffn` is left as it is.
    """
    model = compared.question.model
    rates = [
        rate
        for rank in compared.ranks
        for rate in plausibility.list_cpu_rates(rank, has_several=True)
    ]
    widths: dict[str, int] = {}
    if rates and {"hidden", "ffn"} <= set(type(model).model_fields):
        needed = LARGEST_S * max(rates)
        for factor in range(1, MAX_FACTOR + 1):
            widths = {"hidden": factor * model.hidden, "ffn": factor * model.ffn}
            if _count_largest_work(compared, model.model_copy(update=widths)) >= needed:
                break
    return ["tune.warmup=0", *(f"question.model.{key}={width}" for key, width in widths.items())]


def _count_largest_work(compared: Record, model: flops.ModelShape) -> float:
    """Return the model FLOPs of the largest timed run, if it had this model: those of the headline
    pass of the compared run, for training with as many more steps.
    """
    headline = passes.find_headline_pass(compared)
    if headline is None:
        return 0.0
    kind = compared.task.kind_row
    work = flops.count_flops(
        model, passes.sum_counts(compared, headline), "causal", kind.forwards_in_pass(headline)
    )
    times = max(TIMED_STEPS) / TRAINING_STEPS if headline in kind.stepped else 1.0
    return times * (work or 0)


def _list_passes(record: Record) -> tuple[str, ...]:
    """Return the names of a record's passes in the order in which they ran."""
    return tuple(dict.fromkeys(window.pass_name for window in record.passes))
