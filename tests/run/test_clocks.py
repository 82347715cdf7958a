"""Tests of the offset and drift of a host's clock, estimated from pings with exact times."""

import pytest

from steelyard.record.run_facts import HostFacts
from steelyard.run.clock import PINGS, HostClock, PingReading


def make_clock(*readings: tuple[float, float, float]) -> HostClock:
    """Return a host clock with these pings, each as time sent, time received and remote time in
    seconds.
    """
    host_clock = HostClock()
    for sent_s, received_s, remote_s in readings:
        host_clock.add(PingReading(sent_s, received_s, remote_s))
    return host_clock


def test_offset_comes_from_the_ping_with_the_shortest_round_trip() -> None:
    host_clock = make_clock((10.0, 10.5, 15.5), (11.0, 11.25, 16.125), (12.0, 13.0, 17.9))
    assert (host_clock.offset_s, host_clock.uncertainty_s) == (5.0, 0.125)


def test_clock_within_uncertainty_of_the_parents_counts_as_the_same() -> None:
    host_clock = make_clock((10.0, 10.5, 10.125), (11.0, 11.25, 11.25))
    assert host_clock.is_same_clock
    assert (host_clock.offset_s, host_clock.uncertainty_s, host_clock.estimate_drift()) == (
        0.0,
        0.125,
        0.0,
    )


def test_clock_without_pings_has_offset_zero() -> None:
    host_clock = make_clock()
    assert (host_clock.offset_s, host_clock.uncertainty_s, host_clock.estimate_drift()) == (
        0.0,
        None,
        0.0,
    )


def test_drift_is_reported_only_above_the_uncertainty_of_the_pings() -> None:
    early = [(float(i), i + 0.25, i + 5.125) for i in range(PINGS)]
    late = [(1000.0 + i, 1000.25 + i, 1006.125 + i) for i in range(PINGS)]
    assert make_clock(*early, *late).estimate_drift() == pytest.approx(1.0 / 1000.0, rel=1e-12)
    near = [(1000.0 + i, 1000.25 + i, 1005.25 + i) for i in range(PINGS)]
    assert make_clock(*early, *near).estimate_drift() == 0.0


def test_host_times_are_converted_to_the_parents_clock() -> None:
    host = HostFacts(name="north", ranks=[0], clock_drift=0.5)
    assert host.to_parent_clock(8.0) == 4.0
    assert HostFacts(name="north", ranks=[0]).to_parent_clock(8.0) == 8.0
