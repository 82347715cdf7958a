"""The page of a sweep over loads in a real browser: every point and label is drawn where its
numbers say, at every width, and nothing is cut off.
"""

from collections.abc import Callable

import pytest

from fixtures.browser import AXE, FIND_OVERFLOWING, OPEN_ALL_DETAILS, PageView, SavedPage
from steelyard import report

Look = Callable[..., PageView]
Pages = Callable[..., SavedPage]

# (label, x and y as shares of the drawing) of every labelled point of the first chart
POINTS = """() => {
    const area = document.querySelector('.points .area'), box = area.getBoundingClientRect();
    return [...area.querySelectorAll('text')].map(text => {
        const dot = text.previousElementSibling.getBoundingClientRect();
        return [text.textContent, (dot.left + dot.width / 2 - box.left) / box.width,
            (dot.top + dot.height / 2 - box.top) / box.height];
    });
}"""
# labels of the first chart that cover each other, or reach beyond the window
COVERED = """() => {
    const boxes = [...document.querySelectorAll('.points .area')].flatMap(area =>
        [...area.querySelectorAll('text')].map(one => [one, one.getBoundingClientRect()]));
    const found = boxes.filter(([, box]) => box.left < 0 || box.right > innerWidth).map(([one]) => one.textContent);
    for (const [one, a] of boxes) for (const [other, b] of boxes)
        if (one !== other && one.closest('svg') === other.closest('svg') && a.left < b.right - 1 && b.left < a.right - 1
            && a.top < b.bottom - 3 && b.top < a.bottom - 3) found.push(one.textContent + other.textContent);
    return found;
}"""  # noqa: E501
HOLLOW = """() => [...document.querySelectorAll('.points .area')].map(area =>
    [...area.querySelectorAll('.dot.hollow')].length)"""


@pytest.mark.parametrize("lang", report.LANGS)
@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1200, "dark"), (1600, "light")])
def test_charts_of_loads_fit(look: Look, pages: Pages, width: int, scheme: str, lang: str) -> None:
    built = pages("loads", lang)
    view = look(built.url, width, scheme)
    assert view.js("document.querySelectorAll('.points').length") == 3
    assert view.js("document.documentElement.scrollWidth") <= width
    assert view.js(FIND_OVERFLOWING) == []
    assert view.js(COVERED) == []
    view.js(OPEN_ALL_DETAILS)
    assert view.js("document.documentElement.scrollWidth") <= width
    assert view.js(FIND_OVERFLOWING) == []
    assert view.requests == [built.url]
    assert view.complaints == []


@pytest.mark.parametrize("width", [400, 1200])
def test_points_are_where_their_numbers_are(look: Look, pages: Pages, width: int) -> None:
    points = look(pages("loads").url, width).js(POINTS)
    assert len(points) == 11
    _, x, y = next(point for point in points if point[0] == "offline")
    # the axes end 12 % beyond the highest values: 195 tokens/s of a user, 6,669 of the device
    assert x == pytest.approx(30.0 / (195.0 * 1.12), abs=0.005)
    assert y == pytest.approx(1 - 6000.0 / (6669.0 * 1.12), abs=0.005)


def test_points_that_do_not_count_are_hollow(look: Look, pages: Pages) -> None:
    view = look(pages("loads").url)
    # two runs: one point each in the first chart, one for each percentile in the others
    assert view.js(HOLLOW) == [2, 4, 4]
    fills = view.js(
        "[...document.querySelectorAll('.points .area .dot')].map(one =>"
        " [one.classList.contains('hollow'), getComputedStyle(one).fill])"
    )
    assert {fill for is_hollow, fill in fills if is_hollow} == {"rgb(255, 255, 255)"}
    assert "rgb(255, 255, 255)" not in {fill for is_hollow, fill in fills if not is_hollow}
    titles = view.js(
        "[...document.querySelectorAll('.points .area .dot.hollow title')].map(one =>"
        " one.textContent)"
    )
    assert titles[0].endswith("(unproven)")
    assert titles[1].endswith("(invalid)")


@pytest.mark.parametrize("lang", report.LANGS)
def test_axe_finds_nothing_serious_in_charts_of_loads(look: Look, pages: Pages, lang: str) -> None:
    if not AXE.exists():
        pytest.skip("no axe-core: make browser installs it where npm is at hand")
    view = look(pages("loads", lang).url)
    view.js(AXE.read_text("utf-8"))
    results = view.js("axe.run(document, {resultTypes: ['violations']})")
    serious = [
        violation["id"]
        for violation in results["violations"]
        if violation["impact"] in ("serious", "critical")
    ]
    assert serious == []
