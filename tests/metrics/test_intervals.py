"""What counts as the work of a step in the interval of a rate."""

import pytest

from metrics.test_metric_table import GIB, make_mmlu_record, make_rank_file, resolve_small_case
from steelyard.metrics import metric_table as metrics
from steelyard.plan import flops


def test_unequal_attention_work_does_not_widen_the_interval():
    """Steps of equal tokens take as long as their FLOPs require, and the longer prompts come last.
    Formulas 2 counted tokens as the work and so saw a machine that slows down.
    """
    samples, start_s = [], 0.0
    for step, pairs in enumerate([500] * 10 + [5000] * 10):
        counts = {
            "tokens": 100,
            "samples": 2,
            "padded": 0,
            "logits": 2,
            "pairs": pairs,
            "square": 2 * pairs,
        }
        step_s = flops.count_causal_flops(resolve_small_case().case.question.model, counts) / 1e6
        sample = {
            "pass": "infer",
            "rank": 0,
            "step": step,
            "start_s": start_s,
            "end_s": start_s + step_s,
        }
        samples.append(
            sample
            | {
                "host_start_s": 0.0,
                "host_end_s": 0.0,
                "phases": {"compute": step_s},
                "counts": counts,
            }
        )
        start_s += step_s
    windows = [
        {
            "pass": "infer",
            "rank": 0,
            "start_s": 30.0,
            "wall_s": start_s,
            "allocated_bytes": GIB,
            "reserved_bytes": GIB,
        }
    ]
    record = make_mmlu_record(make_rank_file(samples=samples, windows=windows))
    new, old = (
        metrics.derive_metrics(record.model_copy(update={"formulas": number}))[
            "tokens_per_device_s"
        ]
        for number in (3, 2)
    )
    assert new.value == old.value == pytest.approx(2000 / start_s)
    assert new.interval == pytest.approx((new.value, new.value))
    assert old.interval[1] - old.interval[0] > 0.5 * old.value
