"""A server on loopback, and the tools of a download with a clock that does not wait."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from fixtures.web import Server, serving
from steelyard.sources.download import DownloadTools, TransferMeter
from steelyard.sources.http import HttpClient


@dataclass
class Told:
    """What a download says, how long it would have slept, and how far it said it was."""

    lines: list[str] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)
    watched: list[tuple[int, int]] = field(default_factory=list)

    def tools(self, timeout_s: float = 10.0) -> DownloadTools:
        meter = TransferMeter(lambda done, total: self.watched.append((done, total)))
        return DownloadTools(HttpClient(timeout_s), self.slept.append, self.lines.append, meter)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy of this machine stands between a test and its server."""
    for name in (
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as one:
        yield one


@pytest.fixture
def told() -> Told:
    return Told()
