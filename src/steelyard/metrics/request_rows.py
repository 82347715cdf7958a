"""The rows of the metric table that only kinds of work with requests have (`Kind.request_passes`):
rates, latencies, and what prefill and decoding cost.
"""

from collections.abc import Callable
from functools import partial

from steelyard.metrics import phase_formulas, request_formulas
from steelyard.metrics.metric import Metric
from steelyard.metrics.percentiles import PERCENTILES
from steelyard.metrics.rates import MetricFormula
from steelyard.tasks.task import Better, NumberForm, Task
from steelyard.words import get_meanings


def _has_requests(task: Task) -> bool:
    """Return whether a load of requests is driven in a pass of the task's kind of work."""
    return bool(task.kind_row.request_passes)


def _make_row(
    name: str,
    unit: str,
    better: Better,
    formula: MetricFormula,
    form: NumberForm = "number",
    shown: str | None = None,
) -> Metric:
    """Return the row of a metric that only requests have; its texts are those of its name."""
    en, zh = get_meanings(name)
    return Metric(name, unit, better, formula, en, zh, form, shown, tasks=_has_requests)


def _make_percentiles(name: str, formula: Callable[..., MetricFormula]) -> tuple[Metric, ...]:
    """Return the rows of the percentiles of a time, such as `ttft_p50`; `formula(percentile)`
    returns the formula of one.
    """
    return tuple(
        _make_row(f"{name}_p{percentile}", "s", "lower", formula(percentile), "seconds")
        for percentile in PERCENTILES
    )


def _make_latencies(name: request_formulas.LatencyName) -> tuple[Metric, ...]:
    """Return the rows of the percentiles of a latency."""
    return _make_percentiles(
        name,
        lambda percentile: partial(
            request_formulas.latency_percentile, name=name, percentile=percentile
        ),
    )


def _make_mean(name: request_formulas.LatencyName) -> Metric:
    """Return the row of the mean of a latency."""
    formula = partial(request_formulas.latency_mean, name=name)
    return _make_row(f"{name}_mean", "s", "lower", formula, "seconds")


REQUEST_ROWS = (
    _make_row(
        "output_tokens_per_s",
        "tokens/s",
        "higher",
        partial(request_formulas.request_rate, key="output_tokens"),
    ),
    _make_row(
        "tokens_per_s", "tokens/s", "higher", partial(request_formulas.request_rate, key="tokens")
    ),
    _make_mean("ttft"),
    *_make_latencies("ttft"),
    *_make_latencies("ttft_sent"),
    _make_mean("tpot"),
    *_make_latencies("tpot"),
    *_make_percentiles(
        "chunk_gap",
        lambda percentile: partial(request_formulas.chunk_gap_percentile, percentile=percentile),
    ),
    *_make_latencies("e2e"),
    *_make_latencies("queue_delay"),
    _make_row("interactivity", "tokens/s", "higher", request_formulas.interactivity),
    _make_row("goodput", "requests/s", "higher", request_formulas.goodput),
    _make_row("mfu_prefill", "", "higher", phase_formulas.mfu_prefill, "percent"),
    _make_row("mbu", "", "higher", phase_formulas.mbu, "percent", "MBU"),
    _make_row(
        "energy_per_output_token", "J/token", "lower", request_formulas.energy_per_output_token
    ),
    _make_row(
        "energy_prefill_per_token", "J/token", "lower", phase_formulas.energy_prefill_per_token
    ),
    _make_row(
        "energy_decode_per_token", "J/token", "lower", phase_formulas.energy_decode_per_token
    ),
    _make_row("window_requests", "", "", request_formulas.count_window_requests),
    _make_row(
        "ramp_time", "s", "", partial(request_formulas.window_time, part="ramp_s"), "seconds"
    ),
    _make_row(
        "drain_time", "s", "", partial(request_formulas.window_time, part="drain_s"), "seconds"
    ),
)
