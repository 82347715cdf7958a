"""The first sentences and the headlines of a page: they say only what the runs carry. Each names
its scope, its repeats and whether quality was evaluated; smoke runs and unproven rates are in none.
"""

from typing import Any

import pytest

from fixtures.golden import golden
from fixtures.report import A100_ENVIRONMENT, WITHOUT_INTERVAL, make_rated_record, make_record
from steelyard import report
from steelyard.record.record import Record
from steelyard.report.document import Figures, Paragraph, Table, walk_elements

SMOKE: dict[str, Any] = {"case__size": "smoke"}
UNEVALUATED = make_rated_record(1, 1.0).quality.model_dump(mode="json") | {"evaluated": False}
WINDOW: dict[str, Any] = {"scope": {"kind": "window", "steps": 30}, "quality": UNEVALUATED}
A100: dict[str, Any] = {"environment": A100_ENVIRONMENT}
OTHER_ENGINE: dict[str, Any] = {"engine__name": "transformers"}


def make_runs(*rates: float, first: int = 1, **changes: Any) -> list[Record]:
    """Return one run for each rate, in thousands of tokens/s; their numbers begin with `first`."""
    return [
        make_rated_record(number, 1000 * rate, **changes)
        for number, rate in enumerate(rates, first)
    ]


PAGES: dict[str, list[Record]] = {
    "smoke only": [*make_runs(40.0, 41.0, **SMOKE), *make_runs(20.0, first=3, **SMOKE, **A100)],
    "windows only": make_runs(40.0, **WINDOW),
    "single runs": [*make_runs(40.0), *make_runs(42.0, first=2, **OTHER_ENGINE)],
    "repeats": make_runs(40.0, 41.0, 42.0),
    "a faster window": [*make_runs(44.0, **WINDOW), *make_runs(40.0, first=2)],
    "a slower window": [*make_runs(36.0, **WINDOW), *make_runs(40.0, first=2)],
    "two machines, single runs": [*make_runs(40.0), *make_runs(20.0, first=2, **A100)],
    "two machines, repeats": [*make_runs(40.0, 40.4), *make_runs(20.0, 20.2, first=3, **A100)],
    "two machines, close": [*make_runs(40.0, 44.0), *make_runs(39.0, 43.0, first=3, **A100)],
    "two machines, other evidence": [
        *make_runs(40.0, 41.0),
        *make_runs(20.0, first=3, **A100, **WINDOW),
    ],
    "two machines, one unproven": [
        *make_runs(40.0, 41.0),
        *make_runs(20.0, 21.0, first=3, **A100, **WITHOUT_INTERVAL),
    ],
    "unproven only": make_runs(40.0, 41.0, **WITHOUT_INTERVAL),
    "unproven and faster": [
        *make_runs(90.0, **WITHOUT_INTERVAL),
        *make_runs(40.0, first=2, **OTHER_ENGINE),
    ],
    "three unproven repeats": make_runs(40.8, 41.0, 41.2, **WITHOUT_INTERVAL),
    "three unproven repeats apart": make_runs(40.0, 41.0, 42.0, **WITHOUT_INTERVAL),
    "smoke and full": [*make_runs(40.0), *make_runs(90.0, first=2, **SMOKE)],
}


def read_lead(records: list[Record], lang: report.Lang) -> str:
    """Return the paragraph at the head of the page of these records."""
    [text] = [
        block.text
        for block in report.build_report_page(records, lang).elements
        if isinstance(block, Paragraph) and block.tone == "lead"
    ]
    return text


def list_headlines(records: list[Record], lang: report.Lang = "en") -> list[str]:
    """Return the titles over the headline numbers of each run, with the status beside them."""
    blocks = walk_elements(report.build_report_page(records, lang).elements)
    return [f"{block.title}: {block.status}" for block in blocks if isinstance(block, Figures)]


@pytest.mark.parametrize(
    ("page", "english", "chinese"),
    [
        ("smoke only", golden("lead-smoke-only"), golden("lead-smoke-only", language="zh")),
        ("windows only", golden("lead-windows-only"), golden("lead-windows-only", language="zh")),
        ("single runs", golden("lead-single-runs"), golden("lead-single-runs", language="zh")),
        ("repeats", golden("lead-repeats"), golden("lead-repeats", language="zh")),
        (
            "a faster window",
            golden("lead-a-faster-window"),
            golden("lead-a-faster-window", language="zh"),
        ),
        (
            "a slower window",
            golden("lead-a-slower-window"),
            golden("lead-a-slower-window", language="zh"),
        ),
        (
            "two machines, single runs",
            golden("lead-two-machines-single-runs"),
            golden("lead-two-machines-single-runs", language="zh"),
        ),
        (
            "two machines, repeats",
            golden("lead-two-machines-repeats"),
            golden("lead-two-machines-repeats", language="zh"),
        ),
        (
            "two machines, close",
            golden("lead-two-machines-close"),
            golden("lead-two-machines-close", language="zh"),
        ),
        (
            "two machines, other evidence",
            golden("lead-two-machines-other-evidence"),
            golden("lead-two-machines-other-evidence", language="zh"),
        ),
        (
            "two machines, one unproven",
            golden("lead-two-machines-one-unproven"),
            golden("lead-two-machines-one-unproven", language="zh"),
        ),
        (
            "unproven only",
            golden("lead-unproven-only"),
            golden("lead-unproven-only", language="zh"),
        ),
        (
            "unproven and faster",
            golden("lead-unproven-and-faster"),
            golden("lead-unproven-and-faster", language="zh"),
        ),
        (
            "three unproven repeats",
            golden("lead-three-unproven-repeats"),
            golden("lead-three-unproven-repeats", language="zh"),
        ),
        (
            "three unproven repeats apart",
            golden("lead-three-unproven-repeats-apart"),
            golden("lead-three-unproven-repeats-apart", language="zh"),
        ),
        (
            "smoke and full",
            golden("lead-smoke-and-full"),
            golden("lead-smoke-and-full", language="zh"),
        ),
    ],
)
def test_the_lead_says_what_the_runs_carry(page: str, english: str, chinese: str) -> None:
    assert (read_lead(PAGES[page], "en"), read_lead(PAGES[page], "zh")) == (english, chinese)


def test_every_page_has_its_lead() -> None:
    """The sentences above are those of all pages of the table."""
    [mark] = test_the_lead_says_what_the_runs_carry.pytestmark  # type: ignore[attr-defined]
    assert [row[0] for row in mark.args[1]] == list(PAGES)


@pytest.mark.parametrize("lang", report.LANGS)
def test_smoke_runs_say_nothing_of_hardware(lang: report.Lang) -> None:
    text = read_lead(PAGES["smoke only"], lang)
    assert not any(number in text for number in ("40,", "41,", "20,", "MFU", "2.0"))


def test_a_faster_window_comes_after_the_whole_run_and_is_called_a_window() -> None:
    text = read_lead(PAGES["a faster window"], "en")
    whole, window = text.index("40,000 tokens/s"), text.index("44,000 tokens/s")
    assert whole < window < text.index("window: 30 steps")


def test_an_interval_is_stated_for_repeats_alone() -> None:
    with_interval = {page for page in PAGES if "95 % interval" in read_lead(PAGES[page], "en")}
    assert with_interval == {"two machines, repeats", "two machines, close"}


H200_RUN = "NVIDIA H200 × 1 · torch · bf16 · closed"


@pytest.mark.parametrize(
    ("page", "headlines"),
    [
        ("windows only", [f"#1 {H200_RUN} · window: 30 steps · single run: valid"]),
        ("repeats", [f"#{n} {H200_RUN} · whole · one of 3 repeats: valid" for n in (1, 2, 3)]),
        (
            "a faster window",
            [
                f"#1 {H200_RUN} · window: 30 steps · single run: valid",
                f"#2 {H200_RUN} · whole · single run: valid",
            ],
        ),
        (
            "two machines, single runs",
            [
                f"#1 {H200_RUN} · whole · single run: valid",
                f"#2 {H200_RUN.replace('H200', 'A100')} · whole · single run: valid",
            ],
        ),
        (
            "unproven only",
            [f"#{n} {H200_RUN} · whole · one of 2 repeats: unproven: few_steps" for n in (1, 2)],
        ),
        (
            "three unproven repeats",
            [f"#{n} {H200_RUN} · whole · one of 3 repeats: unproven: few_steps" for n in (1, 2, 3)],
        ),
    ],
)
def test_every_headline_names_its_scope_and_repeats(page: str, headlines: list[str]) -> None:
    assert list_headlines(PAGES[page]) == headlines


def test_headlines_in_chinese() -> None:
    assert list_headlines(PAGES["windows only"], "zh") == [
        f"#1 {H200_RUN} · 窗口：30 步 · 单次运行: 有效"
    ]
    assert list_headlines(PAGES["unproven only"], "zh") == [
        f"#{n} {H200_RUN} · 全部 · 2 次重复之一: 未证实: few_steps" for n in (1, 2)
    ]


@pytest.mark.parametrize(
    ("quality", "said"), [({}, ""), ({"quality": UNEVALUATED}, "not evaluated")]
)
def test_a_headline_says_whether_quality_was_evaluated(quality: dict[str, Any], said: str) -> None:
    page = report.build_report_page([make_record(**quality)], "en")
    [figures] = [block for block in walk_elements(page.elements) if isinstance(block, Figures)]
    assert [(item.value, item.unit) for item in figures.items if item.label == "acc"] == [
        ("45.8%", said)
    ]


def list_status_cells(records: list[Record]) -> list[tuple[str, str, str]]:
    """Return accelerator and runs, rate, and status of each row of the comparison table, each with
    the text below it.
    """
    page = report.build_report_page(records, "en")
    table = next(block for block in page.elements if isinstance(block, Table))
    texts = [[f"{cell.text} {cell.sub}".strip() for cell in row.cells] for row in table.rows]
    return [(row[0], row[4], row[-1]) for row in texts if "published" not in row[0]]


def test_rows_of_a_table_are_in_the_order_of_what_they_prove() -> None:
    """Valid rows first, the whole question before a window of it, and unproven ones last, however
    fast they are.
    """
    records = [
        *make_runs(90.0, **WITHOUT_INTERVAL),
        *make_runs(44.0, first=2, **WINDOW),
        *make_runs(40.0, first=3, **OTHER_ENGINE),
    ]
    assert list_status_cells(records) == [
        ("NVIDIA H200 × 1 #3", "40,000 39,600 – 40,400", "valid"),
        ("NVIDIA H200 × 1 #2", "44,000 43,560 – 44,440", "valid"),
        ("NVIDIA H200 × 1 #1", "90,000", "unproven few_steps"),
    ]


def test_rows_say_what_proves_them() -> None:
    short = make_runs(40.8, 41.0, 41.2, **WITHOUT_INTERVAL)
    invalid = {"status": "invalid", "reasons": [{"code": "clock", "text": "x"}]}
    assert list_status_cells(short[:2])[0][1:] == ("40,900", "unproven few_steps")
    assert list_status_cells(short)[0][1:] == (
        "41,000 40,503 – 41,497",
        "valid proven by 3 repeats",
    )
    assert list_status_cells([*short, *make_runs(1.0, first=4, **invalid)])[0][2] == (
        "valid proven by 3 repeats, 3 of 4 count, clock"
    )
    assert list_status_cells([short[0], *make_runs(40.0, first=2)])[0][1:] == (
        "40,000 39,600 – 40,400",
        "valid 1 of 2 count, few_steps",
    )
