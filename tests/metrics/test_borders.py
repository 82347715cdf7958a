"""Tests of the rule on the borders of passes, which the node agent times too, with exact values."""

from typing import Any

import pytest

from fixtures import report
from fixtures.golden import golden
from steelyard import words
from steelyard.metrics import clock_checks
from steelyard.metrics.result import Finding
from steelyard.record.record import PassFacts, Record
from steelyard.record.run_facts import CpuLoad, HostFacts
from steelyard.run import assemble

SEEN = {"seen_start_s": 5.0, "seen_end_s": 15.0, "seen_within_s": 0.02}


def make_record(formulas: int | None = 5, others: float | None = 0.0, **times: Any) -> Record:
    """Return a record of one pass of 10 s from second 5 on, with these times of its window, in
    which other processes took the share `others` of the host (None: unknown).
    """
    window = PassFacts.model_validate(
        {
            "pass_name": "infer",
            "rank": 0,
            "start_s": 5.0,
            "wall_s": 10.0,
            "allocated_bytes": None,
            "reserved_bytes": None,
            **SEEN,
            **times,
        }
    )
    load = None
    if others is not None:
        load = CpuLoad(allowed=1, t_s=[0.0, 100.0], busy_s=[0.0, 100 * others], own_s=[0.0, 0.0])
    host = HostFacts(name="localhost", ranks=[0], **({} if load is None else {"load": load}))
    return report.make_record().model_copy(
        update={"formulas": formulas, "passes": [window], "hosts": [host]}
    )


def sole_verdict(findings: list[Finding]) -> tuple[bool, str]:
    """Return whether the only check of a list passed, and its text."""
    (finding,) = findings
    assert finding.check is not None
    assert (finding.check.name, finding.code) == ("borders_agree", "clock")
    return finding.check.ok, words.render_text(finding.check.message)


@pytest.mark.parametrize(
    ("times", "ok"),
    [
        ({}, True),
        ({"seen_start_s": 5.069}, True),  # 20 ms until the agent looks, and 50 ms
        ({"seen_start_s": 5.071}, False),
        ({"seen_start_s": 4.929}, False),
        ({"seen_end_s": 15.069}, True),
        ({"seen_end_s": 15.071}, False),
        ({"seen_end_s": 14.929}, False),
        ({"seen_end_s": 15.071, "seen_within_s": 0.03}, True),
        ({"wall_s": 5.0}, False),  # a clock at half its speed
        ({"wall_s": 5.0, "start_s": 10.0}, False),  # that is right again after the pass
    ],
)
def test_borders_must_be_where_the_agent_saw_them(times: dict[str, float], ok: bool) -> None:
    assert sole_verdict(clock_checks.check_borders_agree(make_record(**times), {}))[0] is ok


@pytest.mark.parametrize(
    ("others", "late_s", "ok"),
    [
        (0.25, 0.1, False),  # a GPU's host: up to a quarter is quiet
        (0.26, 0.1, True),
        (0.26, 0.51, True),
        (0.26, 0.53, False),
        (None, 0.51, True),
        (None, 0.53, False),
    ],
)
def test_a_host_that_is_not_known_to_be_quiet_has_a_wide_slack(
    others: float | None, late_s: float, ok: bool
) -> None:
    record = make_record(others=others, seen_end_s=15.0 + late_s)
    assert sole_verdict(clock_checks.check_borders_agree(record, {}))[0] is ok


def test_texts_name_the_border_and_both_times() -> None:
    assert sole_verdict(clock_checks.check_borders_agree(make_record(wall_s=5.0), {})) == (
        False,
        golden("the-end-of-infer-on-rank-0"),
    )
    assert sole_verdict(clock_checks.check_borders_agree(make_record(seen_end_s=15.01), {})) == (
        True,
        golden("2-borders-of-passes-agree"),
    )


@pytest.mark.parametrize("formulas", [None, 4])
def test_older_records_are_not_judged(formulas: int | None) -> None:
    assert clock_checks.check_borders_agree(make_record(formulas, wall_s=1.0), {}) == []


def test_borders_that_nobody_saw_are_a_note() -> None:
    unseen = make_record(seen_start_s=None, seen_end_s=None, seen_within_s=None)
    (finding,) = clock_checks.check_borders_agree(unseen, {})
    assert finding.check is None
    assert finding.note is not None
    assert words.render_text(finding.note) == golden("infer-the-node-agent-did-not-see")


def test_unseen_borders_are_left_out_of_the_file() -> None:
    window = make_record(seen_start_s=None, seen_end_s=None, seen_within_s=None).passes[0]
    assert not {name for name in window.model_dump() if name.startswith("seen_")}
    assert {name for name in make_record().passes[0].model_dump() if name.startswith("seen_")} == {
        *SEEN
    }


def test_drift_of_a_host_does_not_move_the_borders_of_a_long_pass() -> None:
    """A host whose clock gains 20 µs in a second: after two hours its times are 0.14 s less on the
    parent's clock, and so is what its agent saw, but not the wall time of the pass.
    """
    load = CpuLoad(allowed=1, t_s=[0.0, 8000.0], busy_s=[0.0, 0.0], own_s=[0.0, 0.0])
    host = HostFacts(name="north", ranks=[0], clock_drift=2e-5, load=load)
    [window] = make_record(seen_end_s=7205.0, wall_s=7200.0).passes
    moved = assemble._to_parent_clock(window, host)
    assert moved.start_s == pytest.approx(5.0 * (1 - 2e-5))
    late = moved.model_copy(update={"seen_end_s": 7205.1})
    for seen, ok in ((moved, True), (late, False)):
        record = make_record().model_copy(update={"passes": [seen], "hosts": [host]})
        assert sole_verdict(clock_checks.check_borders_agree(record, {}))[0] is ok
