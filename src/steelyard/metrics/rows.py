"""The shipped rows of the metric table, in the order in which a page lists them.

`RATES` come before the task's own scores and `OTHERS` after them; `metric_table.py` puts them
together. A row binds a formula's other arguments with `partial`.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter

from steelyard.metrics import energy, rates, stragglers, training
from steelyard.metrics.metric import Metric
from steelyard.metrics.spans import compute_s, wall_s
from steelyard.tasks.task import Task
from steelyard.words import meaning


def _with_pass(name: str) -> Callable[[Task], bool]:
    """Return a predicate that says whether a task's kind of work has a pass of this name."""
    return lambda task: name in task.kind_row.passes


def _with_step_value(name: str) -> Callable[[Task], bool]:
    """Return a predicate that says whether steps of a task's kind of work record a value of this
    name, such as "loss".
    """
    return lambda task: name in task.kind_row.step_values


def _trains(task: Task) -> bool:
    """Return whether the task's kind of work is training."""
    return task.kind_row.trains


def _padded_rates(task: Task) -> bool:
    """Return whether the task's published rows count padded tokens, so that it has the `*_padded`
    rates.
    """
    return task.padded_rates


_WALL, _COMPUTE = attrgetter("wall_s"), attrgetter("compute_s")  # fields of a RateSpan

RATES = (
    Metric("e2e_time", "s", "lower", rates.e2e, *meaning("e2e_time"), form="seconds"),
    Metric(
        "p_val_whole",
        rates.work_unit,
        "higher",
        partial(rates.pass_rate, name="val", seconds=wall_s),
        *meaning("p_val_whole"),
        published_unit="tokens/s",
        tasks=_with_pass("val"),
    ),
    Metric(
        "p_val_core",
        rates.work_unit,
        "higher",
        partial(rates.pass_rate, name="val", seconds=compute_s),
        *meaning("p_val_core"),
        published_unit="tokens/s",
        tasks=_with_pass("val"),
    ),
    Metric(
        "p_infer_whole",
        rates.work_unit,
        "higher",
        partial(rates.pass_rate, name="infer", seconds=wall_s),
        *meaning("p_infer_whole"),
        published_unit="tokens/s",
        tasks=_with_pass("infer"),
    ),
    Metric(
        "p_infer_core",
        rates.work_unit,
        "higher",
        partial(rates.pass_rate, name="infer", seconds=compute_s),
        *meaning("p_infer_core"),
        published_unit="tokens/s",
        tasks=_with_pass("infer"),
    ),
    Metric(
        "p_infer_whole_padded",
        "tokens/s",
        "higher",
        partial(rates.padded_rate, seconds=wall_s),
        *meaning("p_infer_whole_padded"),
        tasks=_padded_rates,
    ),
    Metric(
        "p_infer_core_padded",
        "tokens/s",
        "higher",
        partial(rates.padded_rate, seconds=compute_s),
        *meaning("p_infer_core_padded"),
        tasks=_padded_rates,
    ),
    Metric(
        "p_whole",
        rates.work_unit,
        "higher",
        training.p_whole,
        *meaning("p_whole"),
        tasks=_with_pass("train"),
    ),
    Metric(
        "p_train",
        rates.work_unit,
        "higher",
        training.p_train,
        *meaning("p_train"),
        tasks=_with_pass("train"),
    ),
    Metric(
        "p_core",
        rates.work_unit,
        "higher",
        training.p_core,
        *meaning("p_core"),
        tasks=_with_pass("train"),
    ),
    Metric(
        "tokens_per_device_s",
        "tokens/s/device",
        "higher",
        partial(rates.per_second, key="tokens", per_device=True),
        *meaning("tokens_per_device_s"),
        shown="token/p/s",
    ),
    Metric(
        "samples_per_s",
        rates.per_item("{}s/s"),
        "higher",
        partial(rates.per_second, key="samples"),
        *meaning("samples_per_s"),
        published_unit="samples/s",
    ),
    Metric(
        "mfu",
        "",
        "higher",
        partial(rates.mfu, convention="causal", seconds=_WALL, ceiling=rates.datasheet_peak),
        *meaning("mfu"),
        form="percent",
        shown="MFU",
    ),
    Metric(
        "mfu_core",
        "",
        "higher",
        partial(rates.mfu, convention="causal", seconds=_COMPUTE, ceiling=rates.datasheet_peak),
        *meaning("mfu_core"),
        form="percent",
    ),
    Metric(
        "mfu_achievable",
        "",
        "higher",
        partial(rates.mfu, convention="causal", seconds=_WALL, ceiling=rates.achievable),
        *meaning("mfu_achievable"),
        form="percent",
    ),
    Metric(
        "mfu_palm",
        "",
        "higher",
        partial(rates.mfu, convention="palm", seconds=_WALL, ceiling=rates.datasheet_peak),
        *meaning("mfu_palm"),
        form="percent",
    ),
    Metric(
        "mfu_nominal",
        "",
        "higher",
        partial(rates.mfu, convention="nominal", seconds=_WALL, ceiling=rates.datasheet_peak),
        *meaning("mfu_nominal"),
        form="percent",
    ),
    Metric("mfu_padded", "", "higher", None, *meaning("mfu_padded"), form="percent"),
    Metric("mfu_one_sequence", "", "higher", None, *meaning("mfu_one_sequence"), form="percent"),
)

# Listed after the task's own scores.
OTHERS = (
    Metric(
        "agreement",
        "",
        "higher",
        rates.agreement,
        *meaning("agreement"),
        form="percent",
        tasks=_with_pass("val"),
    ),
    Metric(
        "loss", "nats", "lower", training.loss, *meaning("loss"), tasks=_with_step_value("loss")
    ),
    Metric(
        "loss_first",
        "nats",
        "",
        training.loss_first,
        *meaning("loss_first"),
        tasks=_with_step_value("loss"),
    ),
    Metric(
        "grad_norm",
        "",
        "",
        training.grad_norm,
        *meaning("grad_norm"),
        tasks=_with_step_value("grad_norm"),
    ),
    Metric("mem", "GiB", "lower", rates.mem, *meaning("mem"), form="gib"),
    Metric(
        "mem_reserved",
        "GiB",
        "lower",
        partial(rates.framework, key="reserved_bytes"),
        *meaning("mem_reserved"),
        form="gib",
    ),
    Metric(
        "mem_allocated",
        "GiB",
        "lower",
        partial(rates.framework, key="allocated_bytes"),
        *meaning("mem_allocated"),
        form="gib",
    ),
    Metric(
        "mem_predicted",
        "GiB",
        "",
        training.mem_predicted,
        *meaning("mem_predicted"),
        form="gib",
        tasks=_trains,
    ),
    Metric("mem_total", "GiB", "", rates.mem_total, *meaning("mem_total"), form="gib"),
    Metric("energy", "J", "lower", energy.energy, *meaning("energy")),
    Metric(
        "energy_per_token",
        "J/token",
        "lower",
        partial(energy.energy_per, key="tokens"),
        *meaning("energy_per_token"),
    ),
    Metric(
        "energy_per_sample",
        rates.per_item("J/{}"),
        "lower",
        partial(energy.energy_per, key="samples"),
        *meaning("energy_per_sample"),
    ),
    Metric(
        "tokens_per_joule",
        "tokens/J",
        "higher",
        partial(energy.per_joule, key="tokens"),
        *meaning("tokens_per_joule"),
    ),
    Metric(
        "samples_per_joule",
        rates.per_item("{}s/J"),
        "higher",
        partial(energy.per_joule, key="samples"),
        *meaning("samples_per_joule"),
    ),
    Metric(
        "flops_causal",
        "FLOP",
        "",
        partial(rates.model_flops, convention="causal"),
        *meaning("flops_causal"),
    ),
    Metric(
        "flops_palm",
        "FLOP",
        "",
        partial(rates.model_flops, convention="palm"),
        *meaning("flops_palm"),
    ),
    Metric(
        "flops_nominal",
        "FLOP",
        "",
        partial(rates.model_flops, convention="nominal"),
        *meaning("flops_nominal"),
    ),
    Metric("matmul_rate", "FLOP/s", "higher", rates.achievable, *meaning("matmul_rate")),
    Metric(
        "padded_share", "", "lower", rates.padded_share, *meaning("padded_share"), form="percent"
    ),
    Metric(
        "straggler_share",
        "",
        "lower",
        stragglers.share,
        *meaning("straggler_share"),
        form="percent",
    ),
    Metric(
        "harness_overhead",
        "",
        "lower",
        rates.overhead,
        *meaning("harness_overhead"),
        form="percent",
        tasks=_with_pass("bare"),
    ),
)
