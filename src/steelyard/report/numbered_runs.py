"""Number the records of a page within their cases, and format what several tables show of a run.

Pages, tables, CSV and JSON take case names, labels, scope, settings and versions of a run from
here.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from steelyard import words
from steelyard.case.case import AUTO
from steelyard.case.resolve import list_changed_keys
from steelyard.metrics import standing, stats
from steelyard.metrics.estimates import Estimate, list_device_names
from steelyard.metrics.metric_table import find_metric as metric_row
from steelyard.metrics.passes import count_devices, find_headline_pass, select_windows
from steelyard.metrics.rates import rank_memory_gib
from steelyard.metrics.ratio import Ratio
from steelyard.metrics.shipped_cases import list_case_differences
from steelyard.metrics.vouching import find_engine_mark, list_providers
from steelyard.plan import degrees
from steelyard.record.record import Record, Value
from steelyard.report.document import UNKNOWN_CELL, Cell, Lang, Tone
from steelyard.report.loads import format_load, has_load, is_load_key
from steelyard.report.marks import format_engine, name_devices
from steelyard.report.numbers import UNKNOWN, format_interval, format_number, format_setting
from steelyard.words import PageWords

CaseName = tuple[str, ...]  # name, size, then texts on how question and case differ from shipped

MAX_SUBJECTS = 3  # subjects that are named; more are counted
STATUS_TONE: dict[str, Tone] = {
    "valid": "good",
    "unproven": "plain",
    "invalid": "bad",
    "failed": "bad",
}


@dataclass(frozen=True)
class NumberedRun:
    """A `record` with its `number` within its case (from 1), made by `group_by_case`. `anchor` is
    the id of its part of the page, to which links point; empty if there is none. `label` is `#3`;
    `format_title(say)` returns label, accelerator, engine, precision, division, load and plan.
    """

    number: int
    record: Record
    anchor: str = ""

    @property
    def label(self) -> str:
        """Return the run's number as pages show it, such as `#3`."""
        return f"#{self.number}"

    def format_title(self, say: PageWords, repeats: Sequence[Record] = ()) -> str:
        """Return the run's title: label, accelerator, engine, precision and division, its load if
        it has one, and the plan if there are several devices, joined by ` · `. The engine has the
        worst mark of this run and its `repeats`.
        """
        case = self.record.case
        plan = self.record.plan
        load_text = f" · {format_load(self.record)}" if has_load(self.record) else ""
        plan_text = f"{load_text} · {plan.config} {plan}" if plan.world > 1 else load_text
        accelerator = format_accelerator(self.record, say)
        engine = format_engine([self.record, *repeats], say)
        return (
            f"{self.label} {accelerator} · {engine} · {case.precision} · {case.division}{plan_text}"
        )


def format_accelerator(record: Record, say: PageWords) -> str:
    """Return the kinds of device and how many the run used, such as `NVIDIA H200 × 8`, and the
    package that the accelerator is from, if it is not Steelyard's; the CPU's name (UNKNOWN if not
    recorded) if it had no device. Of a server that was not started here it is what the user
    declared, marked so.
    """
    kind = ", ".join(list_device_names(record)) or format_setting(record.environment.hardware.cpu)
    return name_devices(record, f"{kind} × {record.plan.world}", say)


def group_by_case(records: list[Record], lang: Lang = "en") -> dict[CaseName, list[NumberedRun]]:
    """Group records by case, size and differences from the shipped case, and number the runs of
    each group from 1.

    Precisions and divisions of a case are in one group. Groups are in the order of their first
    record; each run gets an anchor that is unique on the page.
    """
    out: dict[CaseName, list[NumberedRun]] = {}
    anchors: Counter[str] = Counter()
    for record in records:
        runs = out.setdefault(_case_name(record, lang), [])
        anchor = "run-" + re.sub(r"[^0-9A-Za-z]+", "-", record.id[:8]).strip("-").lower()
        anchors[anchor] += 1
        runs.append(
            NumberedRun(
                len(runs) + 1,
                record,
                anchor if anchors[anchor] == 1 else f"{anchor}-{anchors[anchor]}",
            )
        )
    return out


def _case_name(record: Record, lang: Lang) -> CaseName:
    """Return the name under which a run is grouped: case, size, then every field of the question
    but its load that the command line changed, and texts on what else differs from the shipped
    case.

    Runs that differ from the shipped case so stand apart from those that do not.
    """
    keys = [key for key in list_changed_keys(record.case.origins) if not is_load_key(key)]
    changed_fields = [f"{key}={_format_question_value(record.case.question, key)}" for key in keys]
    return (
        record.case.name,
        record.case.size,
        *changed_fields,
        *(words.render_text(message, lang) for message in list_case_differences(record)),
    )


def _format_question_value(question: Any, key: str) -> str:
    """Return the value at a dotted key such as `question.model.layers` in the question as a string;
    `None` where there is none.
    """
    for part in key.split(".")[1:]:
        question = question.get(part) if isinstance(question, dict) else None
    return str(question)


def format_labels(runs: list[NumberedRun], say: PageWords) -> str:
    """Return the labels of runs with the noun, such as "run #1" or "runs #1, #2"."""
    names = ", ".join(run.label for run in runs)
    return say("run" if len(runs) == 1 else "runs", names)


def format_run_numbers(runs: Iterable[NumberedRun]) -> str:
    """Return the labels of runs in order of their numbers, three or more consecutive ones as their
    first and last: `#1, #2, #5–#9`.
    """
    labels: list[str] = []
    # consecutive numbers are equally far from their positions
    enumerated = enumerate(sorted(run.number for run in runs))
    for _, consecutive in groupby(enumerated, key=lambda item: item[1] - item[0]):
        numbers = [number for _, number in consecutive]
        if len(numbers) > 2:
            labels.append(f"#{numbers[0]}–#{numbers[-1]}")
        else:
            labels += [f"#{number}" for number in numbers]
    return ", ".join(labels)


def select_averaged(records: Sequence[Record]) -> Sequence[Record]:
    """Return those of some repeats whose values a row of means shows (`standing.select_shown`); all
    if none finished.
    """
    return standing.select_shown(records) or records


def average_metric(records: Sequence[Record], name: str) -> Value | None:
    """Return the mean of a metric over the records that have a value for it, without an interval;
    of a single record the metric as it is. A value of None if no record has one, and None if none
    has the metric. All must have it in one unit.
    """
    stored = [record.metrics[name] for record in records if name in record.metrics]
    if len(stored) < 2:
        return stored[0] if stored else None
    mean = stats.mean_of_known([metric.value for metric in stored])
    return Value(value=mean, unit=stored[0].unit)


def format_reason_codes(records: Record | Iterable[Record], say: PageWords) -> str:
    """List the codes of the reasons why one or several records are not valid, each once, joined by
    the language's comma; empty where there are none.
    """
    all_records = [records] if isinstance(records, Record) else records
    distinct = dict.fromkeys(
        code for record in all_records for code in standing.list_reason_codes(record)
    )
    return say("comma").join(distinct)


def format_status(record: Record, say: PageWords) -> str:
    """Return the status of a run by today's rule in the language of the page, and the codes of its
    reasons after a colon.
    """
    status = standing.find_status(record)
    return ": ".join(filter(None, (say(status), format_reason_codes(record, say))))


def find_status_tone(record: Record) -> Tone:
    """Return the tone in which a page shows a run's status by today's rule."""
    return STATUS_TONE[standing.find_status(record)]


def format_scope(record: Record, say: PageWords, brief: bool = False) -> str:
    """Return how much of the question was run: "whole" (stored as `full`, which is also a size), or
    "window" with its sizes (selected rows, sample, subjects, steps), or UNKNOWN in their place. For
    a resumed run, the steps from which it resumed are added.

    More than MAX_SUBJECTS subjects are counted, not named. `brief`: a window is named by its sizes
    alone.
    """
    extent = record.scope
    subjects_code = (
        "window.subjects.many" if len(extent.subjects or ()) > MAX_SUBJECTS else "window.subjects"
    )
    listed = None if extent.subjects is None else say("comma").join(extent.subjects)
    sizes = (
        ("window.rows", extent.selected.row_count),
        ("window.requests" if has_load(record) else "window.sample", extent.sample),
        (subjects_code, len(extent.subjects or ()) if subjects_code.endswith("many") else listed),
        ("window.steps", extent.steps),
    )
    sizes_text = (
        say("comma").join(say(key, str(size)) for key, size in sizes if size is not None) or UNKNOWN
    )
    window_text = sizes_text if brief else say("window", sizes_text)
    scope_text = say("whole") if record.scope.kind == "full" else window_text
    resumed = [say("resumed", str(restart.step)) for restart in record.restarts]
    return say("comma").join([scope_text, *resumed])


def format_unevaluated(record: Record, say: PageWords) -> str:
    """Return the words for a quality to which no gate was applied: "no gate" if the case has none
    and its kind of work checks the answers in a pass of their own, else "not evaluated".
    """
    is_checked = record.case.gate is None and record.task.kind_row.check_passes
    return say("no_gate" if is_checked else "not_evaluated")


def format_metric(name: str, value: Value | None) -> str:
    """Format a metric's value without its unit; UNKNOWN for None."""
    return (
        UNKNOWN if value is None else format_number(metric_row(name, value.unit).form, value.value)
    )


def make_estimate_cell(
    value: Estimate | Ratio | None, form: str = "number", tone: Tone = "plain"
) -> Cell:
    """Return a cell with the number in the format `form` and its interval below (nothing if it has
    none); UNKNOWN_CELL for None, whatever the tone.
    """
    return (
        UNKNOWN_CELL
        if value is None
        else Cell(format_number(form, value.value), format_interval(value.interval, form), tone)
    )


def make_ratio_cell(ratio: Ratio | None, say: PageWords, form: str = "number") -> Cell:
    """Return a cell with a ratio in the format `form`, and below it its interval, or that it was
    not tested; UNKNOWN_CELL for None.
    """
    if ratio is None:
        return UNKNOWN_CELL
    interval = format_interval(ratio.interval, form)
    return Cell(format_number(form, ratio.value), interval or say("compare.change.not tested"))


def format_unit(name: str, value: Value | None, lang: Lang = "en") -> str:
    """Return the unit of a metric in the language of the page; empty for None and for percentages,
    whose number has it.
    """
    if value is None or metric_row(name, value.unit).form == "percent":
        return ""
    return words.translate_unit(value.unit, lang)


def format_metric_with_unit(name: str, value: Value | None, lang: Lang = "en") -> str:
    """Format a metric's value with its unit; UNKNOWN, without a unit, if there is no value."""
    text = format_metric(name, value)
    return text if text == UNKNOWN else f"{text} {format_unit(name, value, lang)}".rstrip()


# Packages that can be the framework of an engine; the first that a record lists is taken. Others
# count as dependent software.
FRAMEWORKS = ("torch", "paddlepaddle-gpu", "paddlepaddle", "tensorflow", "jax", "mindspore")


@dataclass(frozen=True)
class PackageVersion:
    """A Python package (`name`) and its `version`; as text `name-version`, such as torch-2.9.0."""

    name: str
    version: str

    def __str__(self) -> str:
        """Return `name-version`, such as torch-2.9.0."""
        return f"{self.name}-{self.version}"


def find_framework_version(record: Record) -> PackageVersion | None:
    """Return the first package of FRAMEWORKS that the record lists, or None."""
    packages = record.environment.software.packages
    return next(
        (PackageVersion(name, packages[name]) for name in FRAMEWORKS if name in packages), None
    )


def find_engine_version(record: Record) -> PackageVersion | None:
    """Return the package that has the engine's name, or else the first by alphabet whose name
    contains it: for engine megatron, megatron-core.

    None if the engine is no package of its own.
    """
    packages, name = record.environment.software.packages, record.engine.name
    matches = (
        [name] if name in packages else sorted(package for package in packages if name in package)
    )
    return PackageVersion(matches[0], packages[matches[0]]) if matches else None


def list_non_default_settings(record: Record) -> dict[str, Any]:
    """Return the settings of the record's tune whose value is not the default, by name, as JSON
    values.
    """
    return record.tune.model_dump(mode="json", exclude_defaults=True)


def list_case_changes(record: Record) -> list[str]:
    """List what makes a record's question or case another than the shipped one of its name: keys
    such as `question.train.batch` that the command line changed, then English texts for a modified
    case or one of an earlier version. Empty if nothing does.
    """
    return [
        *list_changed_keys(record.case.origins),
        *(words.render_text(message) for message in list_case_differences(record)),
    ]


def record_identity(record: Record) -> dict[str, Any]:
    """Return what a record is under the names that CSV and JSON use (as_csv.IDENTITY), from `id` to
    `quality_evaluated`: case, scope (as kind, subjects, rows, sample and steps; of generation load
    and requests), engine and its
    mark, versions, accelerator, plan, weights, packages of others, status, quality metric; None for
    what is unknown.

    `changed` is that of `list_case_changes`, `accelerator` the distinct device names,
    `accelerators` the number of devices, `tune` the settings that are not the default, `reasons`
    distinct codes.
    """
    case, plan, scope = record.case, record.plan, record.scope
    engine, framework = find_engine_version(record), find_framework_version(record)
    return {
        "id": record.id,
        "created": record.created,
        "case": case.name,
        "size": case.size,
        "changed": list_case_changes(record),
        "key": case.key,
        "division": case.division,
        "precision": case.precision,
        "scope": scope.kind,
        "subjects": scope.subjects,
        "rows": scope.rows,
        "sample": scope.sample,
        "steps": scope.steps,
        "load": format_load(record) if has_load(record) else None,
        "requests": scope.requests,
        "engine": record.engine.name,
        "engine_mark": find_engine_mark(record),
        "engine_version": None if engine is None else engine.version,
        "framework": None if framework is None else framework.name,
        "framework_version": None if framework is None else framework.version,
        "accelerator": list_device_names(record),
        "accelerators": count_devices(record),
        "nodes": plan.nodes,
        "plan": str(plan),
        "tune": list_non_default_settings(record),
        "weights": record.weights.source,
        "providers": {
            part: package or "unknown" for part, package in list_providers(record).items()
        },
        "status": standing.find_status(record),
        "reasons": standing.list_reason_codes(record),
        "quality": record.quality.metric,
        "quality_evaluated": record.quality.evaluated,
    }


def format_stage_memory(record: Record) -> str:
    """Return the peak memory in GiB of the fullest rank of each pipeline stage in the headline
    pass, times the stage's ranks: `46.80*2 + 38.93*2`.

    UNKNOWN for fewer than two ranks, and in the place of a stage's size if no rank of it was
    measured.
    """
    name = find_headline_pass(record)
    by_stage: dict[int, list[float | None]] = {}
    for rank in sorted({window.rank for window in select_windows(record, name)} if name else ()):
        by_stage.setdefault(degrees.find_position(record.plan, rank).pp, []).append(
            rank_memory_gib(record, rank)
        )
    if sum(map(len, by_stage.values())) < 2:
        return UNKNOWN
    return " + ".join(
        f"{_format_largest(sizes)}*{len(sizes)}" for _, sizes in sorted(by_stage.items())
    )


def _format_largest(sizes: list[float | None]) -> str:
    """Return the largest known size with two decimals; UNKNOWN if none is known."""
    measured = [size for size in sizes if size is not None]
    return f"{max(measured):.2f}" if measured else UNKNOWN


def format_changed_settings(record: Record, say: PageWords | None = None) -> str:
    """Return the settings that come from the case or from a user and not from defaults, as
    `key=value` joined by commas; UNKNOWN if there are none.

    A setting that was chosen by `auto` is marked `(auto)`. With `say`, each other one is followed
    by where it came from, in parentheses.
    """
    out = []
    for key, value in list_stored_settings(record).items():
        origin = _setting_origin(key, record.case.origins)
        if origin is not None and origin != "default":
            origin_text = (
                f" ({say.get_or_fallback(f'origin.{origin}', origin)})" if say is not None else ""
            )
            out.append(
                f"{key}={format_setting(value, depth=1)}"
                f"{f' ({AUTO})' if key in record.auto_tunes else origin_text}"
            )
    return ", ".join(out) or UNKNOWN


def format_tuned_settings(record: Record) -> str:
    """Return the settings that are not the case's own, as `key=value` joined by commas: those that
    a user set, those whose value `auto` chose, also if the case asks for `auto`, those of a case
    made in memory (`--model`), and, without another origin, values that differ from today's
    default. A value that was chosen by `auto` is marked `(auto)`.

    Plain values of the case file are left out. Empty if there are none.
    """
    out = []
    for key, value in list_stored_settings(record).items():
        origin = _setting_origin(key, record.case.origins) or "default"
        default = type(record.tune).model_fields[key].get_default(call_default_factory=True)
        if value != default if origin == "default" else not origin.startswith("case"):
            out.append(
                f"{key}={format_setting(value, depth=1)}"
                f"{f' ({AUTO})' if key in record.auto_tunes else ''}"
            )
    return ", ".join(out)


def list_stored_settings(record: Record) -> dict[str, Any]:
    """Return only the settings of the tune that the record stores, by name, as JSON values; an
    older record has fewer.
    """
    return record.tune.model_dump(mode="json", exclude_unset=True)


def _setting_origin(key: str, origins: dict[str, str]) -> str | None:
    """Return where the value of a setting of the tune came from, such as `case` or `command line`;
    for a setting that is a table, where its alphabetically first key did; None if unknown.

    `origins` has the origin of each dotted key, such as `tune.micro_batch`.
    """
    exact = origins.get(f"tune.{key}")
    return exact or next(
        (origin for name, origin in sorted(origins.items()) if name.startswith(f"tune.{key}.")),
        None,
    )


def format_parallel_plan(record: Record) -> str:
    """Return the plan's degrees, and for training the sharding stage if it is not 0, such as
    `TP2PP4DP1 SH1`.
    """
    sharding = record.tune.sharding
    sharding_text = f" SH{sharding}" if record.task.kind_row.trains and sharding else ""
    return f"{record.plan}{sharding_text}"
