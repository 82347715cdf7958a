"""A browser and the pages that tests open in it. Tests are skipped with the reason where there is
no browser.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fixtures.browser import CHROMIUM, CHROMIUM_ARGUMENTS, ROOT, PageView, SavedPage
from fixtures.load_records import make_generation_record, make_two_sweeps
from fixtures.report import (
    make_failed_record,
    make_hostile_record,
    make_record,
    make_records_of_all_statuses,
    make_records_of_two_accelerators,
)
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
        chromium = play.chromium.launch(executable_path=str(CHROMIUM), args=CHROMIUM_ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def look(browser: Any) -> Iterator[Callable[..., PageView]]:
    """Return a function that opens a page and records its requests and complaints; close its
    contexts after the test.
    """
    contexts = []

    def open_page(
        url: str, width: int = 1200, scheme: str = "light", scripts: bool = True
    ) -> PageView:
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
        view = PageView(context.new_page())
        view.page.on("request", lambda request: view.requests.append(request.url))
        view.page.on("console", lambda message: view.complaints.append(message.text))
        view.page.on("pageerror", lambda error: view.complaints.append(str(error)))
        view.page.on(
            "dialog",
            lambda dialog: (view.complaints.append(f"dialog {dialog.message}"), dialog.dismiss()),
        )
        view.page.goto(url)
        return view

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], SavedPage]:
    """Return a function that gives the HTML page of a set of records in a language, each rendered
    once a session.
    """
    folder = tmp_path_factory.mktemp("pages")
    records_by_name: dict[str, list[Record]] = {}
    sources: dict[str, Callable[[], list[Record]]] = {
        "h200": lambda: [
            records.read_record(path) for path in sorted((ROOT / "results" / "h200").glob("*.json"))
        ],
        "made": lambda: [
            *make_records_of_all_statuses(),
            make_record(id="4d" * 16, case__size="smoke"),
        ],
        "two": make_records_of_two_accelerators,
        "loads": lambda: [
            *make_two_sweeps(),
            make_generation_record(("offline", 6000.0, 30.0, 5.0, 0.0333), 31),
        ],
        "hostile": lambda: [make_hostile_record(), make_record(), make_failed_record()],
    }

    def build_page(name: str, lang: str = "en") -> SavedPage:
        """Render the page of the named records unless it is there, and return it with its
        records.
        """
        if name not in records_by_name:
            records_by_name[name] = sources[name]()
        path = folder / f"{name}-{lang}.html"
        if not path.exists():
            path.write_text(report.render(records_by_name[name], "html", lang), encoding="utf-8")
        return SavedPage(path, records_by_name[name])

    return build_page
