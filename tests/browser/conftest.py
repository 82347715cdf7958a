"""A browser and the pages that tests open in it. Tests are skipped with the reason where there is
no browser.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fixtures.browser import ARGUMENTS, CHROMIUM, ROOT, Made, View
from fixtures.report import everything, failed, hostile, make, two_accelerators
from steelyard import report
from steelyard.record import record as records
from steelyard.record.record import Record


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Start one headless Chromium for the session; skip where Playwright or Chromium is missing."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: make browser installs it"
    )
    if not CHROMIUM.exists():
        pytest.skip(f"no {CHROMIUM}: make browser installs it where root and apt-get are at hand")
    with sync_api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def look(browser: Any) -> Iterator[Callable[..., View]]:
    """Return a function that opens a page and records its requests and complaints; close its
    contexts after the test.
    """
    contexts = []

    def opened(url: str, width: int = 1200, scheme: str = "light", scripts: bool = True) -> View:
        """Open a page offline, with a viewport of `width` pixels and the color scheme, and return
        its view.
        """
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            java_script_enabled=scripts,
            offline=True,
        )
        contexts.append(context)
        view = View(context.new_page())
        view.page.on("request", lambda request: view.requests.append(request.url))
        view.page.on("console", lambda message: view.complaints.append(message.text))
        view.page.on("pageerror", lambda error: view.complaints.append(str(error)))
        view.page.on(
            "dialog",
            lambda dialog: (view.complaints.append(f"dialog {dialog.message}"), dialog.dismiss()),
        )
        view.page.goto(url)
        return view

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Made]:
    """Return a function that gives the HTML page of a set of records in a language, each rendered
    once a session.
    """
    folder = tmp_path_factory.mktemp("pages")
    read: dict[str, list[Record]] = {}
    sources: dict[str, Callable[[], list[Record]]] = {
        "h200": lambda: [
            records.read_record(path) for path in sorted((ROOT / "results" / "h200").glob("*.json"))
        ],
        "made": lambda: [*everything(), make(id="4d" * 16, case__size="smoke")],
        "two": two_accelerators,
        "hostile": lambda: [hostile(), make(), failed()],
    }

    def made(name: str, lang: str = "en") -> Made:
        """Render the page of the named records unless it is there, and return it with its records."""
        if name not in read:
            read[name] = sources[name]()
        path = folder / f"{name}-{lang}.html"
        if not path.exists():
            path.write_text(report.render(read[name], "html", lang), encoding="utf-8")
        return Made(path, read[name])

    return made
