"""The client's own error on the mock server: known delays come back, and the error is measured."""

import time

import psutil
import pytest

from fixtures.serving import IDS, RecordingSink, make_request, open_client, start_mock
from steelyard.engines.http import mock_check
from steelyard.engines.http.mock_check import ClientError, measure_client
from steelyard.engines.http.mock_server import Script, parse_script

pytestmark = pytest.mark.process
TTFT_S, TPOT_S, TOKENS = 0.05, 0.01, 16


def test_every_chunk_of_every_stream_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    collect = mock_check._collect_errors

    def keep(*arguments):
        errors_us = collect(*arguments)
        collected.append(len(errors_us))
        return errors_us

    monkeypatch.setattr(mock_check, "_collect_errors", keep)
    error = measure_client(time.monotonic, 3, is_short=True)
    assert isinstance(error, ClientError)
    assert (error.requests, collected) == (3, [3 * 20])
    assert 0 <= error.median_us <= error.p99_us <= error.max_us
    assert error.to_details() == {
        "mock_requests": 3,
        "mock_error_us": [error.median_us, error.p99_us, error.max_us],
    }


def test_a_mock_server_that_does_not_start_measures_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mock_check, "MODULE", "no_such_module_here")
    assert measure_client(time.monotonic, 1, is_short=True) is None


def test_scripts_are_options() -> None:
    assert parse_script(["--ttft-s", "0.5", "--fault", "cut", "--fault-after", "3"]) == Script(
        ttft_s=0.5, fault="cut", fault_after=3
    )
    assert parse_script([]) == Script()


class StampingSink(RecordingSink):
    """Keeps the time of each chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[int, list[float]] = {}
        self.sent_s: dict[int, float] = {}

    def mark_sent(self, number):
        self.sent_s[number] = time.monotonic()

    def add_chunk(self, number, tokens, ids=()):
        self.times.setdefault(number, []).append(time.monotonic())


@pytest.mark.long
def test_known_delays_are_measured_within_a_millisecond() -> None:
    """Requests start one after the other, so that no burst of others delays a chunk."""
    if psutil.cpu_percent(1.0) > 10.0:
        pytest.skip("needs an idle machine")
    script = ("--ttft-s", str(TTFT_S), "--tpot-s", str(TPOT_S))
    ttfts_s: list[float] = []
    tpots_s: list[float] = []
    with start_mock(*script) as endpoint:
        port = int(endpoint.removesuffix("/v1").rpartition(":")[2])
        with open_client(Script(), port=port) as client:
            sink = StampingSink()
            http_port = client.make_port(sink, time.monotonic, IDS)
            for number in range(40):
                http_port.submit(make_request(number, TOKENS))
                while number not in sink.ends:
                    http_port.wait(None)
                times = sink.times[number]
                ttfts_s.append(times[0] - sink.sent_s[number])
                tpots_s.append((times[-1] - times[0]) / (TOKENS - 1))
            http_port.close()
    assert sorted(ttfts_s)[20] - TTFT_S < 0.001
    assert abs(sorted(tpots_s)[20] - TPOT_S) < 0.001
    error = measure_client(time.monotonic, 4)
    assert error is not None
    assert error.median_us < 1000
    medians = f"{sorted(ttfts_s)[20] - TTFT_S:.6f} s, {sorted(tpots_s)[20] - TPOT_S:.6f} s"
    print(f"TTFT and TPOT beyond the known delays: {medians}; stamps late by {error}")
