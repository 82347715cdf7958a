"""The shipped rows of the metric table, in the order in which a page lists them.

`RATES` come before the task's own scores and `OTHERS` after them; `metric_table.py` puts them
together. A row binds a formula's other arguments with `partial`.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter

from steelyard.metrics import energy, rates, stragglers, training_formulas
from steelyard.metrics.metric import Metric
from steelyard.metrics.passes import compute_s, wall_s
from steelyard.tasks.task import Task
from steelyard.words import get_meanings


def _has_pass(pass_name: str) -> Callable[[Task], bool]:
    """Return a predicate that says whether a task's kind of work has a pass of this name."""
    return lambda task: pass_name in task.kind_row.passes


def _has_step_value(value_name: str) -> Callable[[Task], bool]:
    """Return a predicate that says whether steps of a task's kind of work record a value of this
    name, such as "loss".
    """
    return lambda task: value_name in task.kind_row.step_values


def _is_training(task: Task) -> bool:
    """Return whether the task's kind of work is training."""
    return task.kind_row.trains


def _has_padded_rates(task: Task) -> bool:
    """Return whether the task's published rows count padded tokens, so that it has the `*_padded`
    rates.
    """
    return task.padded_rates


def _has_steps_alone(task: Task) -> bool:
    """Return whether all work of a task's kind is counted by steps, not by requests."""
    return not task.kind_row.request_passes


_WALL_TIME, _COMPUTE_TIME = attrgetter("wall_s"), attrgetter("compute_s")  # fields of a RateSpan

RATES = (
    Metric("e2e_time", "s", "lower", rates.e2e_time, *get_meanings("e2e_time"), form="seconds"),
    Metric(
        "p_val_whole",
        rates.work_unit,
        "higher",
        partial(rates.pass_rate, pass_name="val", seconds=wall_s),
        *get_meanings("p_val_whole"),
        published_unit="tokens/s",
        tasks=_has_pass("val"),
    ),
    Metric(
        "p_val_core",
        rates.work_unit,
        "higher",
        partial(rates.pass_rate, pass_name="val", seconds=compute_s),
        *get_meanings("p_val_core"),
        published_unit="tokens/s",
        tasks=_has_pass("val"),
    ),
    Metric(
        "p_infer_whole",
        rates.work_unit,
        "higher",
        partial(rates.pass_rate, pass_name="infer", seconds=wall_s),
        *get_meanings("p_infer_whole"),
        published_unit="tokens/s",
        tasks=_has_pass("infer"),
    ),
    Metric(
        "p_infer_core",
        rates.work_unit,
        "higher",
        partial(rates.pass_rate, pass_name="infer", seconds=compute_s),
        *get_meanings("p_infer_core"),
        published_unit="tokens/s",
        tasks=_has_pass("infer"),
    ),
    Metric(
        "p_infer_whole_padded",
        "tokens/s",
        "higher",
        partial(rates.padded_rate, seconds=wall_s),
        *get_meanings("p_infer_whole_padded"),
        tasks=_has_padded_rates,
    ),
    Metric(
        "p_infer_core_padded",
        "tokens/s",
        "higher",
        partial(rates.padded_rate, seconds=compute_s),
        *get_meanings("p_infer_core_padded"),
        tasks=_has_padded_rates,
    ),
    Metric(
        "p_whole",
        rates.work_unit,
        "higher",
        training_formulas.p_whole,
        *get_meanings("p_whole"),
        tasks=_has_pass("train"),
    ),
    Metric(
        "p_train",
        rates.work_unit,
        "higher",
        training_formulas.p_train,
        *get_meanings("p_train"),
        tasks=_has_pass("train"),
    ),
    Metric(
        "p_core",
        rates.work_unit,
        "higher",
        training_formulas.p_core,
        *get_meanings("p_core"),
        tasks=_has_pass("train"),
    ),
    Metric(
        "tokens_per_device_s",
        "tokens/s/device",
        "higher",
        partial(rates.headline_rate, key="tokens", per_device=True),
        *get_meanings("tokens_per_device_s"),
        shown="token/p/s",
    ),
    Metric(
        "samples_per_s",
        rates.make_item_unit("{}s/s"),
        "higher",
        partial(rates.headline_rate, key="samples"),
        *get_meanings("samples_per_s"),
        published_unit="samples/s",
    ),
    Metric(
        "mfu",
        "",
        "higher",
        partial(rates.mfu, convention="causal", seconds=_WALL_TIME, ceiling=rates.datasheet_peak),
        *get_meanings("mfu"),
        form="percent",
        shown="MFU",
    ),
    Metric(
        "mfu_core",
        "",
        "higher",
        partial(
            rates.mfu, convention="causal", seconds=_COMPUTE_TIME, ceiling=rates.datasheet_peak
        ),
        *get_meanings("mfu_core"),
        form="percent",
    ),
    Metric(
        "mfu_achievable",
        "",
        "higher",
        partial(rates.mfu, convention="causal", seconds=_WALL_TIME, ceiling=rates.matmul_rate),
        *get_meanings("mfu_achievable"),
        form="percent",
    ),
    Metric(
        "mfu_palm",
        "",
        "higher",
        partial(rates.mfu, convention="palm", seconds=_WALL_TIME, ceiling=rates.datasheet_peak),
        *get_meanings("mfu_palm"),
        form="percent",
    ),
    Metric(
        "mfu_nominal",
        "",
        "higher",
        partial(rates.mfu, convention="nominal", seconds=_WALL_TIME, ceiling=rates.datasheet_peak),
        *get_meanings("mfu_nominal"),
        form="percent",
    ),
    Metric("mfu_padded", "", "higher", None, *get_meanings("mfu_padded"), form="percent"),
    Metric(
        "mfu_one_sequence", "", "higher", None, *get_meanings("mfu_one_sequence"), form="percent"
    ),
)

# Listed after the task's own scores.
OTHERS = (
    Metric(
        "agreement",
        "",
        "higher",
        rates.agreement,
        *get_meanings("agreement"),
        form="percent",
        tasks=_has_pass("val"),
    ),
    Metric(
        "loss",
        "nats",
        "lower",
        training_formulas.loss,
        *get_meanings("loss"),
        tasks=_has_step_value("loss"),
    ),
    Metric(
        "loss_first",
        "nats",
        "",
        training_formulas.loss_first,
        *get_meanings("loss_first"),
        tasks=_has_step_value("loss"),
    ),
    Metric(
        "grad_norm",
        "",
        "",
        training_formulas.grad_norm,
        *get_meanings("grad_norm"),
        tasks=_has_step_value("grad_norm"),
    ),
    Metric("mem", "GiB", "lower", rates.mem, *get_meanings("mem"), form="gib"),
    Metric(
        "mem_reserved",
        "GiB",
        "lower",
        partial(rates.framework_memory, key="reserved_bytes"),
        *get_meanings("mem_reserved"),
        form="gib",
    ),
    Metric(
        "mem_allocated",
        "GiB",
        "lower",
        partial(rates.framework_memory, key="allocated_bytes"),
        *get_meanings("mem_allocated"),
        form="gib",
    ),
    Metric(
        "mem_predicted",
        "GiB",
        "",
        training_formulas.mem_predicted,
        *get_meanings("mem_predicted"),
        form="gib",
        tasks=_is_training,
    ),
    Metric("mem_total", "GiB", "", rates.mem_total, *get_meanings("mem_total"), form="gib"),
    Metric("energy", "J", "lower", energy.energy, *get_meanings("energy")),
    Metric(
        "energy_per_token",
        "J/token",
        "lower",
        partial(energy.energy_per_count, key="tokens"),
        *get_meanings("energy_per_token"),
    ),
    Metric(
        "energy_per_sample",
        rates.make_item_unit("J/{}"),
        "lower",
        partial(energy.energy_per_count, key="samples"),
        *get_meanings("energy_per_sample"),
    ),
    Metric(
        "tokens_per_joule",
        "tokens/J",
        "higher",
        partial(energy.count_per_joule, key="tokens"),
        *get_meanings("tokens_per_joule"),
    ),
    Metric(
        "samples_per_joule",
        rates.make_item_unit("{}s/J"),
        "higher",
        partial(energy.count_per_joule, key="samples"),
        *get_meanings("samples_per_joule"),
    ),
    Metric(
        "flops_causal",
        "FLOP",
        "",
        partial(rates.model_flops, convention="causal"),
        *get_meanings("flops_causal"),
    ),
    Metric(
        "flops_palm",
        "FLOP",
        "",
        partial(rates.model_flops, convention="palm"),
        *get_meanings("flops_palm"),
    ),
    Metric(
        "flops_nominal",
        "FLOP",
        "",
        partial(rates.model_flops, convention="nominal"),
        *get_meanings("flops_nominal"),
    ),
    Metric("matmul_rate", "FLOP/s", "higher", rates.matmul_rate, *get_meanings("matmul_rate")),
    Metric(
        "padded_share",
        "",
        "lower",
        rates.padded_share,
        *get_meanings("padded_share"),
        form="percent",
        tasks=_has_steps_alone,
    ),
    Metric(
        "straggler_share",
        "",
        "lower",
        stragglers.straggler_share,
        *get_meanings("straggler_share"),
        form="percent",
    ),
    Metric(
        "harness_overhead",
        "",
        "lower",
        rates.harness_overhead,
        *get_meanings("harness_overhead"),
        form="percent",
        tasks=_has_pass("bare"),
    ),
)
