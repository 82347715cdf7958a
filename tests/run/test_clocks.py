"""Tests of the offset and drift of a host's clock, estimated from pings with exact times."""

import pytest

from steelyard.record.run_facts import HostFacts
from steelyard.run.clock import PINGS, HostClock, PingReading


def clock(*readings: tuple[float, float, float]) -> HostClock:
    """Return a host clock with these pings, each as time sent, time received and remote time in
    seconds.
    """
    made = HostClock()
    for sent_s, heard_s, there_s in readings:
        made.add(PingReading(sent_s, heard_s, there_s))
    return made


def test_the_surest_reading_counts() -> None:
    made = clock((10.0, 10.5, 15.5), (11.0, 11.25, 16.125), (12.0, 13.0, 17.9))
    assert (made.offset_s, made.uncertainty_s) == (5.0, 0.125)


def test_a_clock_that_may_be_ours_is_ours() -> None:
    made = clock((10.0, 10.5, 10.125), (11.0, 11.25, 11.25))
    assert made.is_same_clock
    assert (made.offset_s, made.uncertainty_s, made.estimate_drift()) == (0.0, 0.125, 0.0)


def test_without_readings() -> None:
    made = clock()
    assert (made.offset_s, made.uncertainty_s, made.estimate_drift()) == (0.0, None, 0.0)


def test_drift_is_told_where_it_is_more_than_the_readings_leave_open() -> None:
    early = [(float(i), i + 0.25, i + 5.125) for i in range(PINGS)]
    late = [(1000.0 + i, 1000.25 + i, 1006.125 + i) for i in range(PINGS)]
    assert clock(*early, *late).estimate_drift() == pytest.approx(1.0 / 1000.0, rel=1e-12)
    near = [(1000.0 + i, 1000.25 + i, 1005.25 + i) for i in range(PINGS)]
    assert clock(*early, *near).estimate_drift() == 0.0


def test_times_of_a_host_on_the_parents_clock() -> None:
    host = HostFacts(name="north", ranks=[0], clock_drift=0.5)
    assert host.to_parent_clock(8.0) == 4.0
    assert HostFacts(name="north", ranks=[0]).to_parent_clock(8.0) == 8.0
