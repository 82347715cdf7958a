"""The matmul rate and the margin that a pass is judged by, in each version of the formulas."""

from pathlib import Path
from typing import Any

import pytest

from fixtures import report
from fixtures.golden import golden
from steelyard import words
from steelyard.metrics import metric_table, plausibility, validity
from steelyard.metrics.result import CheckResult
from steelyard.record import record as records
from steelyard.record.record import PassFacts, Record
from steelyard.record.run_facts import CpuLoad, HostFacts, MatmulRate, RankFacts

RESULTS = Path(__file__).resolve().parents[2] / "results"
WALL_S = 40.0


def make_pass_record(
    accelerator: str, ranks: list[RankFacts], formulas: int | None = 4, others: float = 0.0
) -> Record:
    """Return a record of one pass of 40 s of wall and CPU time while other processes use the share
    `others` of the host's four cores.
    """
    base = report.make_record()
    window_values = {"pass": "infer", "rank": 0, "start_s": 5.0, "wall_s": WALL_S, "cpu_s": WALL_S}
    window = PassFacts.model_validate(window_values | {"allocated_bytes": 0, "reserved_bytes": 0})
    device = {"accelerator": accelerator, "peak": None}
    hardware = base.environment.hardware.model_copy(update=device)
    times = [0.0, 50.0]
    load = CpuLoad(t_s=times, allowed=4, own_s=times, busy_s=[(1 + 4 * others) * t for t in times])
    changed: dict[str, Any] = {
        "environment": base.environment.model_copy(update={"hardware": hardware}),
        "passes": [window],
        "ranks": ranks,
        "formulas": formulas,
        "hosts": [HostFacts(name="here", ranks=[0], load=load)],
    }
    return base.model_copy(update=changed)


def get_plausibility_check(record: Record) -> CheckResult:
    """Return the check of the record's plausibility."""
    [result] = plausibility.check_plausible_rates(record, {})
    assert result.check is not None
    assert result.code == "implausible"
    return result.check


def compute_pass_rate(accelerator: str) -> float:
    """Return the FLOP/s of the pass, over CPU time on a CPU and over device time elsewhere."""
    rank = RankFacts(rank=0, matmul_flops_per_s=1e15, matmul_flops_per_cpu_s=1e15)
    [(share, _)] = plausibility._compare_with_limits(make_pass_record(accelerator, [rank]), "infer")
    return share * plausibility.MATMUL_MARGIN * 1e15


RATE = compute_pass_rate("cpu")


def make_timed_rank(share: float, before: list[float], after: list[float]) -> list[RankFacts]:
    """Return one rank whose matmuls reached `share` of the pass's rate on average, and the shares
    `before` and `after` in single timings.
    """
    rates = {
        "before": [RATE * relative for relative in before],
        "after": [RATE * relative for relative in after],
    }
    return [RankFacts(rank=0, matmul_flops_per_cpu_s=RATE * share, matmul_cpu_rates=rates)]


@pytest.mark.parametrize(
    ("before", "after", "ok"),
    [
        ([0.8, 0.8], [0.8], False),  # all of them below 1 / 1.1
        ([0.8, 0.92], [0.8], True),
        ([0.8, 0.8], [0.8, 0.92], True),
        ([0.8], [], False),
    ],
)
def test_the_best_of_several_timings_is_the_limit(
    before: list[float], after: list[float], ok: bool
) -> None:
    ranks = make_timed_rank(0.8, before, after)
    assert get_plausibility_check(make_pass_record("cpu", ranks)).ok is ok
    assert not get_plausibility_check(
        make_pass_record("cpu", ranks, formulas=3)
    ).ok  # formulas 3 know one timing only
    assert not get_plausibility_check(make_pass_record("cpu", ranks, formulas=None)).ok


def test_a_worker_with_one_timing_is_judged_by_it() -> None:
    assert get_plausibility_check(
        make_pass_record("cpu", [RankFacts(rank=0, matmul_flops_per_cpu_s=RATE / 1.05)])
    ).ok
    assert not get_plausibility_check(
        make_pass_record("cpu", [RankFacts(rank=0, matmul_flops_per_cpu_s=RATE / 1.2)])
    ).ok


@pytest.mark.parametrize(("others", "ok"), [(0.09, False), (0.11, True)])
def test_the_margin_on_a_busy_cpu_is_wider(others: float, ok: bool) -> None:
    """Where they took more than 10 % of the cores, which makes a full run `busy`."""
    ranks = make_timed_rank(0.4, [0.41], [0.4])
    assert get_plausibility_check(make_pass_record("cpu", ranks, others=others)).ok is ok
    slower = make_timed_rank(0.3, [0.3], [0.39])  # the pass is above 2.5 times the best of these
    assert not get_plausibility_check(make_pass_record("cpu", slower, others=others)).ok
    assert not get_plausibility_check(make_pass_record("cpu", ranks, formulas=3, others=others)).ok


@pytest.mark.parametrize(("others", "ok"), [(0.7, False), (0.8, True)])
def test_the_margin_of_a_device_on_a_busy_host_is_wider(others: float, ok: bool) -> None:
    """Kernels that a host launches too late take longer, from one event to the next."""
    rate = compute_pass_rate("cuda")
    shape = MatmulRate(name="up", layout="nt", m=1, n=1, k=1, count=1, flops_per_s=rate / 2.4)
    ranks = [RankFacts(rank=0, matmul_flops_per_s=rate / 3, matmuls=[shape])]
    assert get_plausibility_check(make_pass_record("cuda", ranks, others=others)).ok is ok
    assert not get_plausibility_check(make_pass_record("cuda", ranks, formulas=3, others=others)).ok


def test_the_check_names_its_limit() -> None:
    text = words.render_text(
        get_plausibility_check(
            make_pass_record("cpu", make_timed_rank(0.8, [0.8, 0.92], [0.9]))
        ).message
    )
    assert text.endswith(golden("flop-1-1-times-the-fastest"))
    busy = words.render_text(
        get_plausibility_check(
            make_pass_record("cpu", make_timed_rank(0.4, [0.41], [0.4]), others=0.5)
        ).message
    )
    assert busy.endswith(golden("flop-2-5-times-the-fastest"))


PUBLISHED_VERDICTS = {
    "20261116T181648-smollm2-135m-mmlu-full-closed-fp32-transformers-fd558c53": (3, False),
    "20261116T181616-smollm2-135m-mmlu-full-closed-fp32-torch-786a75be": (3, True),
    "20261116T130936-llama2-7b-mmlu-smoke-closed-fp32-torch-135f21b3": (2, True),
    "20261116T041617-llama2-7b-mmlu-smoke-closed-fp32-torch-df8b7f75": (None, True),
}


@pytest.mark.parametrize("name", PUBLISHED_VERDICTS)
def test_published_records_are_judged_as_they_were(name: str) -> None:
    """Each record is judged by its own version of the formulas; the implausible one stays so, with
    its limit.
    """
    [path] = RESULTS.rglob(f"{name}.json")
    record = records.read_record(path)
    checks, reasons, _, _ = validity.judge_record(record, metric_table.derive_metrics(record))
    [stored] = [item for item in record.checks if item.name == "plausible"]
    [derived] = [item for item in checks if item.name == "plausible"]
    assert (record.formulas, derived.ok, derived.ok) == (*PUBLISHED_VERDICTS[name], stored.ok)
    if record.formulas is not None:  # its sentences are worded as today
        assert derived.detail == stored.detail
    assert [item.code for item in reasons] == [item.code for item in record.reasons]
