"""Validity rule on the interval of a run's rate: it must be as narrow as the case asks, and a rate
without one is not proven.

`validity.py` applies it to a record.
"""

from steelyard.metrics import passes, request_window, standing, stats
from steelyard.metrics.result import Finding, make_check, make_failed_check, make_note
from steelyard.record.record import Record, Value
from steelyard.words import Message, MessageValues

# Under a load prompts and outputs arrive in other proportions in each slice, so that the rate of
# both together is less certain than the one that results are compared by.
LOAD_RATE_METRIC = "output_tokens_per_s"


def check_interval(record: Record, metrics: dict[str, Value]) -> list[Finding]:
    """Validity rule: return one check `interval` (reason `interval`) that the whole width of the 95
    % interval of metric `tokens_per_device_s`, or of `output_tokens_per_s` under a load, as a share
    of its value, is at most the case's `max_interval`.

    Without an interval the check fails, with reason `few_steps` (the run is unproven) if the span
    has too few steps for one, else with reason `interval`. Records of formulas before version 5
    have a note in place of the first. A pass of requests without a window is unproven too. Empty
    for size smoke, else without a value, and, if there is an interval, without a limit.
    """
    has_load = record.task.kind_row.has_load
    name = LOAD_RATE_METRIC if has_load else standing.RATE_METRIC
    limit, value = record.case.max_interval, metrics.get(name)
    judges_few_steps = (record.formulas or 1) >= standing.FIRST_VERSION_WITH_UNPROVEN
    if record.case.size == "smoke" or value is None:
        return []
    if value.value is None:
        return _explain_missing_window(record)
    if value.interval is None and (judges_few_steps or limit is not None):
        return _explain_missing_interval(record, judges_few_steps)
    if value.interval is None or limit is None:
        return []
    width = (value.interval[1] - value.interval[0]) / value.value
    message_values: MessageValues = {"width": width, "limit": limit}
    return [make_check("interval", width <= limit, "interval", "check.interval", message_values)]


def _explain_missing_interval(record: Record, judges_few_steps: bool) -> list[Finding]:
    """Return the finding on a rate without an interval: that its span has too few steps with
    tokens, as a failed check `interval` with reason `few_steps` if `judges_few_steps`, else as a
    note; or, with enough of them, a failed check with reason `interval`. Nothing on too few steps
    of a run that failed.
    """
    rate_span = passes.find_rate_span(record)
    if rate_span is not None and rate_span.slices is not None:
        return _explain_few_slices(record, rate_span.slices.count)
    step_counts = {} if rate_span is None else rate_span.steps
    working = [
        step for steps in step_counts.values() for step in steps if step.counts.get("tokens")
    ]
    if not judges_few_steps:
        if len(working) < stats.MIN_STEPS * passes.count_devices(record):
            return [make_note(Message("note.few_batches"))]
        return [make_failed_check("interval", "interval", "check.interval_open", {})]
    slowest = [] if rate_span is None else step_counts.get(rate_span.slowest_rank, [])
    count = sum(1 for step in slowest if step.counts.get("tokens"))
    if count >= stats.MIN_STEPS:
        return [make_failed_check("interval", "interval", "check.interval_open", {})]
    if record.failure is not None:
        return []
    least = stats.MIN_STEPS_FOR_STEADY_INTERVAL if record.task.kind_row.steady else stats.MIN_STEPS
    return [
        make_failed_check(
            "interval", standing.UNPROVEN_CODE, "check.few_steps", {"count": count, "least": least}
        )
    ]


def _explain_missing_window(record: Record) -> list[Finding]:
    """Return a failed check `interval` with reason `few_steps` if a pass of requests ended without
    a window, because it has too few requests for one; else nothing. Nothing on a run that failed,
    or one that is long enough, which the rule `steady_window` judges.
    """
    pass_name, load = passes.find_headline_pass(record), record.question.load
    if pass_name not in record.task.kind_row.request_passes or record.failure is not None:
        return []
    samples = request_window.find_headline_requests(record)
    if samples and load and request_window.is_long_enough(samples.table, load):
        return []
    least = request_window.count_least_requests(load) if load else 0
    values: MessageValues = {"least": least}
    return [make_failed_check("interval", standing.UNPROVEN_CODE, "check.no_window", values)]


def _explain_few_slices(record: Record, count: int) -> list[Finding]:
    """Return the finding on a rate of requests without an interval: that its window has too few
    turns of the load, as a failed check `interval` with reason `few_steps`; or, with enough of
    them, one with reason `interval`. Nothing on a run that failed.
    """
    if count >= stats.MIN_STEPS:
        return [make_failed_check("interval", "interval", "check.interval_open", {})]
    if record.failure is not None:
        return []
    load = record.question.load
    values: MessageValues = {"count": count, "least": stats.MIN_STEPS}
    unproven = standing.UNPROVEN_CODE
    if load and load.mode == "offline":
        return [make_failed_check("interval", unproven, "check.no_steady_part", values)]
    return [make_failed_check("interval", unproven, "check.few_turns", values)]
