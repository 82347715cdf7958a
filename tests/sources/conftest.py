"""Provide an HTTP server on loopback and download tools whose sleeps and progress are recorded
instead of waited for or shown.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from fixtures.web import Server, serve_pages
from steelyard.sources.download import DownloadTools, TransferMeter
from steelyard.sources.http import HttpClient


@dataclass
class DownloadLog:
    """What a download reported: its lines, the seconds it would have slept, and (done, total) bytes
    of its progress.
    """

    lines: list[str] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)
    watched: list[tuple[int, int]] = field(default_factory=list)

    def tools(self, timeout_s: float = 10.0) -> DownloadTools:
        """Return download tools that record into this log."""
        meter = TransferMeter(lambda done, total: self.watched.append((done, total)))
        return DownloadTools(HttpClient(timeout_s), self.slept.append, self.lines.append, meter)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove proxies from the environment, so that none stands between a test and its server."""
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
    """Yield a running HTTP server whose pages a test sets."""
    with serve_pages() as test_server:
        yield test_server


@pytest.fixture
def told() -> DownloadLog:
    """Return an empty log."""
    return DownloadLog()
