"""Tests of the bound on matmul rates that were timed in a run: what the device can do at most."""

from typing import Any

import pytest

from fixtures import report
from fixtures.golden import golden
from steelyard import words
from steelyard.metrics import plausibility
from steelyard.metrics.result import Finding
from steelyard.record.record import PassFacts, Record
from steelyard.record.run_facts import (
    CoreBound,
    CpuLoad,
    HostFacts,
    HostState,
    MatmulRate,
    PeakFacts,
    RankFacts,
)

PEAK = PeakFacts(name="chip", flops_per_s={"bf16": 1e12}, source="datasheet")
# 32 FLOP a cycle at 3 GHz are 9.6e10 FLOP/s of a core, and 3.84e11 of the four
CORE = CoreBound(flops_per_cycle={"fp32": 16, "bf16": 32}, clock_hz=3e9)


def make_record(
    accelerator: str = "cuda", formulas: int | None = 5, core: CoreBound | None = CORE, **rank: Any
) -> Record:
    """Return a record in bf16 of one rank with these facts, on a host with four cores."""
    base = report.make_record()
    hardware = base.environment.hardware.model_copy(
        update={"accelerator": accelerator, "peak": PEAK if accelerator == "cuda" else None}
    )
    load = CpuLoad(allowed=4, t_s=[0.0, 99.0], busy_s=[0.0, 0.0], own_s=[0.0, 0.0])
    state = HostState() if core is None else HostState(core_bound=core)
    changes = {
        "environment": base.environment.model_copy(update={"hardware": hardware}),
        "ranks": [RankFacts(rank=0, **rank)],
        "hosts": [HostFacts(name="here", ranks=[0], load=load, state=state)],
        "formulas": formulas,
    }
    assert base.question.precision.matmul == "bf16"
    return base.model_copy(update=changes)


def judge(record: Record) -> list[Finding]:
    """Return what the rule finds in a record."""
    return list(plausibility.check_calibration(record, {}))


def is_calibrated(record: Record) -> bool:
    """Return whether the only finding, the check `calibrated`, passed."""
    (finding,) = judge(record)
    assert finding.check is not None
    assert (finding.check.name, finding.code) == ("calibrated", "implausible")
    return finding.check.ok


def make_shape(rate: float) -> MatmulRate:
    """Return a matmul of the case that was timed at this rate."""
    return MatmulRate(name="up", layout="nt", m=1, n=1, k=1, count=1, flops_per_s=rate)


@pytest.mark.parametrize(
    ("facts", "ok"),
    [
        ({"matmul_flops_per_s": 1.09e12}, True),
        ({"matmul_flops_per_s": 1.11e12}, False),
        ({"matmul_flops_per_s": 1e12, "matmul_flops_per_s_after": 1.11e12}, False),
        ({"matmul_flops_per_s": 1e12, "matmuls": [make_shape(1.09e12)]}, True),
        ({"matmul_flops_per_s": 1e12, "matmuls": [make_shape(1.11e12)]}, False),
        # the CPU time of a process that only launches kernels says nothing
        ({"matmul_flops_per_s": 1e12, "matmul_flops_per_cpu_s": 1e15}, True),
    ],
)
def test_a_device_is_bounded_by_its_datasheet(facts: dict[str, Any], ok: bool) -> None:
    assert is_calibrated(make_record(**facts)) is ok


@pytest.mark.parametrize(
    ("facts", "ok"),
    [
        ({"matmul_flops_per_s": 3.83e11}, True),
        ({"matmul_flops_per_s": 3.85e11}, False),
        ({"matmul_flops_per_s": 1e11, "matmuls": [make_shape(3.85e11)]}, False),
        ({"matmul_flops_per_s": 1e11, "matmul_flops_per_cpu_s": 9.5e10}, True),
        ({"matmul_flops_per_s": 1e11, "matmul_flops_per_cpu_s": 9.7e10}, False),
        (
            {
                "matmul_flops_per_s": 1e11,
                "matmul_flops_per_cpu_s": 9e10,
                "matmul_cpu_rates": {"before": [9e10], "after": [9.7e10]},
            },
            False,
        ),
        # one mean above it, and several short timings that are not
        (
            {
                "matmul_flops_per_s": 1e11,
                "matmul_flops_per_cpu_s": 9.7e10,
                "matmul_cpu_rates": {"before": [9e10]},
            },
            False,
        ),
    ],
)
def test_a_cpu_is_bounded_by_clock_and_vectors(facts: dict[str, Any], ok: bool) -> None:
    assert is_calibrated(make_record("cpu", **facts)) is ok


def test_a_precision_that_is_not_listed_has_the_widest_bound() -> None:
    fp16 = CoreBound(flops_per_cycle={"fp32": 16, "fp16": 64}, clock_hz=3e9)
    assert fp16.count_flops_per_s("bf16") == 192e9
    assert fp16.count_flops_per_s("fp32") == 48e9
    assert is_calibrated(make_record("cpu", core=fp16, matmul_flops_per_cpu_s=1.91e11))


def test_texts_name_rate_and_bound() -> None:
    (finding,) = judge(make_record("cpu", matmul_flops_per_cpu_s=1e12))
    assert finding.check is not None
    assert words.render_text(finding.check.message) == golden("rank-0-matmuls-were-timed-at-1")
    (finding,) = judge(make_record("cpu", matmul_flops_per_s=3e11))
    assert finding.check is not None
    assert words.render_text(finding.check.message) == golden("rank-0-matmuls-were-timed-at-up")


@pytest.mark.parametrize(
    "record",
    [
        make_record("cpu", formulas=4, matmul_flops_per_s=1e20),
        make_record("cpu", formulas=None, matmul_flops_per_s=1e20),
        make_record("cpu", core=None, matmul_flops_per_s=1e20),
        make_record("cpu"),
        make_record("cuda"),
    ],
)
def test_what_has_no_bound_is_not_judged(record: Record) -> None:
    assert judge(record) == []


def test_matmuls_that_were_not_timed_are_notes() -> None:
    problems = {"before": "no memory", "after": "killed", "elsewhere": "ignored"}
    findings = judge(make_record(calibration={"matmuls": "process", "problems": problems}))
    assert [words.render_text(finding.note) for finding in findings if finding.note] == [
        golden("rank-0-matmuls-could-not-be"),
        golden("rank-0-matmuls-could-not-be-again"),
    ]
    assert [finding.check for finding in findings] == [None, None]


def find_limit(record: Record) -> float:
    """Return the limit in FLOP/s that the timed matmuls of a record set for its pass, without the
    margin of 1.1.
    """
    fields = {"pass": "infer", "rank": 0, "start_s": 5.0, "wall_s": 40.0, "cpu_s": 40.0}
    window = PassFacts.model_validate(fields | {"allocated_bytes": 0, "reserved_bytes": 0})
    record = record.model_copy(update={"passes": [window]})
    *_, (_, limit, _) = plausibility._list_rate_limits(record, "infer")
    assert limit is not None
    return limit / plausibility.MATMUL_MARGIN


def test_a_rate_above_its_bound_does_not_raise_the_limit_of_passes() -> None:
    assert find_limit(make_record(matmul_flops_per_s=5e11)) == pytest.approx(5e11)
    assert find_limit(make_record(matmul_flops_per_s=5e13)) == pytest.approx(1.1e12)
    assert find_limit(make_record("cpu", matmul_flops_per_cpu_s=5e10)) == pytest.approx(5e10)
    assert find_limit(make_record("cpu", matmul_flops_per_cpu_s=5e13)) == pytest.approx(9.6e10)
    older = make_record("cpu", formulas=4, matmul_flops_per_cpu_s=5e13)
    assert find_limit(older) == pytest.approx(5e13)


def test_the_matmul_after_the_passes_counts_for_the_limit() -> None:
    facts = {"matmul_flops_per_s": 5e11, "matmul_flops_per_s_after": 6e11}
    assert find_limit(make_record(**facts)) == pytest.approx(6e11)
    assert find_limit(make_record(formulas=4, **facts)) == pytest.approx(5e11)
