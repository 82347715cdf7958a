"""The page in a real browser: the comparison is at the top, details can be opened and linked to,
nothing is loaded, strings are escaped.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest

from fixtures.browser import AXE, FIND_OVERFLOWING, OPEN_ALL_DETAILS, PageView, SavedPage
from steelyard import report
from steelyard.report.numbered_runs import group_by_case

Look = Callable[..., PageView]
Pages = Callable[..., SavedPage]
SCHEMES = ("light", "dark")

TOP_OF = "selector => document.querySelector(selector).getBoundingClientRect().top + scrollY"


def test_colours_follow_the_scheme(look: Look, pages: Pages) -> None:
    code = "getComputedStyle(document.body).backgroundColor"
    assert [look(pages("two").url, 1200, scheme).js(code) for scheme in SCHEMES] == [
        "rgb(255, 255, 255)",
        "rgb(20, 23, 26)",
    ]


def test_the_comparison_is_at_the_top(look: Look, pages: Pages) -> None:
    built = pages("h200")
    view = look(built.url)
    order = ["h1", "h1 + p", "dl", "p.lead", "nav", ".bars", ".table"]
    tops = [view.js(TOP_OF, selector) for selector in order]
    assert tops == sorted(tops)
    # below a lead that names scope and repeats of eleven results, and three loads without one
    assert tops[-1] <= 1800
    assert view.js("document.querySelector('dt').textContent") == "NVIDIA H200 × 1"
    assert tops[2] <= 200
    cases, runs = len(group_by_case(built.records)), len(built.records)
    height = view.js("document.documentElement.scrollHeight")
    assert height <= 2500 + 1500 * cases + 75 * runs  # with the charts over loads
    printed = view.page.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) <= 2 + cases + runs


@pytest.mark.parametrize("scripts", [True, False])
def test_links_open_their_target(look: Look, pages: Pages, scripts: bool) -> None:
    built = pages("two")
    view = look(built.url, scripts=scripts)
    body = view.page.locator("#run-00000002")
    assert not body.is_visible()
    view.page.locator(".table a[href='#run-00000002']").first.click()
    body.wait_for(state="visible", timeout=30000)
    assert view.page.url == f"{built.url}#run-00000002"
    second_view = look(f"{built.url}#run-00000004", scripts=scripts)
    second_view.page.locator("#run-00000004").wait_for(state="visible", timeout=30000)
    assert not second_view.page.locator("#run-00000002").is_visible()


@pytest.mark.parametrize("scripts", [True, False])
def test_folding_by_clicking_and_by_keys(look: Look, pages: Pages, scripts: bool) -> None:
    view = look(pages("two").url, scripts=scripts)
    fold = view.page.locator("details:has(#run-00000001)")
    body = view.page.locator("#run-00000001")
    fold.locator("summary").click()
    assert body.is_visible()
    fold.locator("summary").click()
    assert not body.is_visible()
    fold.locator("summary").focus()
    view.page.keyboard.press("Enter")
    assert body.is_visible()


def test_one_button_opens_and_closes_all(look: Look, pages: Pages) -> None:
    view = look(pages("two").url)
    button, states = (
        view.page.locator("#open-all"),
        "[...document.querySelectorAll('details')].map(one => one.open)",
    )
    button.click()
    assert set(view.js(states)) == {True}
    assert button.text_content() == "Collapse all"
    button.click()
    assert set(view.js(states)) == {False}
    assert not look(pages("two").url, scripts=False).page.locator("#open-all").is_visible()


def test_bar_widths_are_proportional_to_values(look: Look, pages: Pages) -> None:
    view = look(pages("two").url)
    widths = view.js(
        "[...document.querySelectorAll('.bars .row')].map(row =>"
        " row.querySelector('rect')?.getBBox().width)"
    )
    fast, torch, other, slow = widths[1:]
    assert torch / fast == pytest.approx(40 / 42, rel=1e-3)
    assert other / fast == pytest.approx(21 / 42, rel=1e-3)
    assert slow / fast == pytest.approx(20 / 42, rel=1e-3)
    colours = view.js(
        "[...document.querySelectorAll('.bars rect')].map(one => getComputedStyle(one).fill)"
    )
    assert len(set(colours)) == 2
    names = view.js(
        "[...document.querySelectorAll('.bars .track svg')].map(one =>"
        " one.querySelector('title').textContent)"
    )
    assert names[0].endswith(
        "Throughput per device: 42,000 tokens/s, 95 % interval 41,000 – 43,000"
    )


@pytest.mark.parametrize("lang", report.LANGS)
def test_hostile_strings_are_escaped(look: Look, pages: Pages, lang: str) -> None:
    built = pages("hostile", lang)
    view = look(built.url, 400)
    view.js(OPEN_ALL_DETAILS)
    view.page.wait_for_timeout(200)
    assert view.complaints == []
    assert view.requests == [built.url]
    assert view.js("document.querySelectorAll('script').length") == 1
    assert view.js("document.querySelectorAll('style').length") == 1
    assert (
        view.js(
            "document.querySelectorAll('img, iframe, [onload], [onerror], [onmouseover],"
            " [style]').length"
        )
        == 0
    )
    assert view.js(
        "[...document.querySelectorAll('a')].every(one => one.getAttribute('href').startsWith('#'))"
    )
    text = view.js("document.body.innerText")
    assert "<script>alert(1)</script>" in text
    assert "<svg onload=alert(3)>" in text
    assert not re.search(
        "[\u200e\u200f\u202a-\u202e\u2066-\u2069]", view.js("document.documentElement.outerHTML")
    )
    assert view.js("document.documentElement.scrollWidth") <= 400
    assert view.js(FIND_OVERFLOWING) == []


def test_the_content_security_policy_blocks_foreign_scripts_and_styles(
    look: Look, pages: Pages
) -> None:
    view = look(pages("two").url)
    view.js(
        """() => { for (const [tag, text] of [['script', 'window.ran = 1'], ['style', 'body { display: none }']]) {
            const one = document.createElement(tag); one.textContent = text; document.body.append(one); } }"""  # noqa: E501
    )
    assert view.js("window.ran") is None
    assert view.js("getComputedStyle(document.body).display") == "block"


@pytest.mark.parametrize(
    ("name", "width", "scheme", "lang"),
    [
        ("made", 1200, "light", "en"),
        ("made", 400, "dark", "zh"),
        ("two", 1200, "dark", "en"),
        ("hostile", 1200, "light", "en"),
    ],
)
def test_axe_finds_nothing_serious(
    look: Look, pages: Pages, name: str, width: int, scheme: str, lang: str
) -> None:
    if not AXE.exists():
        pytest.skip("no axe-core: make browser installs it where npm is at hand")
    view = look(pages(name, lang).url, width, scheme)
    view.js(
        "[...document.querySelectorAll('details')].slice(0,"
        " 4).concat([...document.querySelectorAll('details')].slice(-2)).forEach(one => one.open ="
        " true)"
    )
    view.js(AXE.read_text("utf-8"))
    results: dict[str, Any] = view.js("axe.run(document, {resultTypes: ['violations']})")
    serious = [
        violation
        for violation in results["violations"]
        if violation["impact"] in ("serious", "critical")
    ]
    assert [
        (violation["id"], [node["html"] for node in violation["nodes"]][:3])
        for violation in serious
    ] == []
