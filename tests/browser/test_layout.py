"""At each width, light and dark, in both languages: nothing is cut off, no text is too small,
nothing is loaded.
"""

from collections.abc import Callable

import pytest

from fixtures.browser import FIND_OVERFLOWING, OPEN_ALL_DETAILS, PageView, SavedPage
from steelyard import report

Look = Callable[..., PageView]
Pages = Callable[..., SavedPage]
WIDTHS = (400, 1200, 1600)
SCHEMES = ("light", "dark")

# A table that is wider than its box must be scrollable in it.
CUT_OFF = """() => [...document.querySelectorAll('.table')].filter(one =>
    one.scrollWidth > one.clientWidth + 1 && !['auto', 'scroll'].includes(getComputedStyle(one).overflowX)
).length"""  # noqa: E501
SMALL_TEXT = """() => {
    const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node; (node = walker.nextNode());) {
        const parent = node.parentElement;
        if (!node.data.trim() || ['SCRIPT', 'STYLE'].includes(parent.tagName) || !parent.getClientRects().length) continue;
        const drawn = parent instanceof SVGGraphicsElement ? parent.getScreenCTM().d : 1;
        if (parseFloat(getComputedStyle(parent).fontSize) * drawn < 10) found.push(node.data);
    }
    return found;
}"""  # noqa: E501


@pytest.mark.parametrize("lang", report.LANGS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows_and_nothing_is_loaded(
    look: Look, pages: Pages, width: int, scheme: str, lang: str
) -> None:
    built = pages("h200", lang)
    view = look(built.url, width, scheme)
    for _ in range(2):  # as loaded, then with all details unfolded
        assert view.js("document.documentElement.scrollWidth") <= width
        assert view.js(FIND_OVERFLOWING) == []
        assert view.js(CUT_OFF) == 0
        assert view.js(SMALL_TEXT) == []
        view.js(OPEN_ALL_DETAILS)
    assert view.requests == [built.url]
    assert view.complaints == []


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_fits_or_scrolls_under_its_first_column(
    look: Look, pages: Pages, width: int
) -> None:
    view = look(pages("h200").url, width)
    box = "document.querySelector('.table')"
    inner, outer = view.js(f"{box}.scrollWidth"), view.js(f"{box}.clientWidth")
    if width >= 1200:
        assert inner <= outer
    before = view.js(f"{box}.querySelector('tbody td').getBoundingClientRect().left")
    view.js(f"{box}.scrollLeft = 10000")
    assert view.js(f"{box}.querySelector('tbody td').getBoundingClientRect().left") == before
    shown = view.js(f"[...{box}.querySelectorAll('th')].filter(one => one.offsetWidth).length")
    assert shown == {400: 5, 1200: 10, 1600: 10}[width]
