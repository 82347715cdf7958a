"""The section of a page that names slow ranks."""

from typing import Any

import pytest

from fixtures.golden import golden
from fixtures.report import COUNTS, make_training_record
from steelyard import report
from steelyard.record.record import Record
from steelyard.report.document import Heading, PageElement, Paragraph, Table, walk_elements
from steelyard.report.host_tables import build_straggler_section
from steelyard.words import PageWords


def make_run(
    *own_times_s: float, step_s: float = 2.0, host: str | None = "fh{}", tokens: int = 100
) -> Record:
    """Return a training record of three equal steps, one rank for each own time in seconds, two
    ranks a host.

    `host` is the pattern of host names; `tokens` are those of each step of every rank but rank 0.
    """
    samples = []
    for rank, time_s in enumerate(own_times_s):
        for step in range(3):
            times = {
                "start_s": step * step_s,
                "end_s": (step + 1) * step_s,
                "host_start_s": 0.0,
                "host_end_s": 0.0,
            }
            phases = {"data": 0.25, "exchange": step_s - time_s, "compute": time_s - 0.25}
            counts = COUNTS | {"tokens": tokens if rank else 100}
            samples.append(
                {
                    "pass": "train",
                    "rank": rank,
                    "step": step,
                    **times,
                    "phases": phases,
                    "counts": counts,
                }
            )
    ranks = [
        {"rank": r, "device": f"cuda:{r % 2}", "host": host and host.format(r // 2)}
        for r in range(len(own_times_s))
    ]
    return make_training_record([[step_s] * 3] * len(own_times_s), samples=samples, ranks=ranks)


def render_section(record: Record, lang: Any = "en") -> tuple[str, Table]:
    """Return the sentence and the table of the section on stragglers."""
    sentence, table = build_straggler_section(record, PageWords(lang))
    assert isinstance(sentence, Paragraph)
    assert isinstance(table, Table)
    return sentence.text, table


def list_cell_texts(table: Table) -> list[list[str]]:
    """Return the texts of the table's cells, by row."""
    return [[cell.text for cell in row.cells] for row in table.rows]


def test_the_slowest_rank_comes_first_and_is_named():
    sentence, table = render_section(make_run(1.25, 1.25, 1.25, 1.75))
    assert sentence == (golden("slowest-rank-3-on-host-fh"))
    heads = [(column.title, column.sub) for column in table.columns]
    assert heads == [
        ("Rank", ""),
        ("Host", ""),
        ("Device", ""),
        ("Own time", "s"),
        ("Waiting", "s"),
        ("Against the median of the others", ""),
        ("Tokens", ""),
    ]
    assert list_cell_texts(table) == [
        ["3", "fh1", "cuda:1", "1.750", "0.2500", "+40.0%", "200"],
        ["0", "fh0", "cuda:0", "1.250", "0.7500", "0.0%", "200"],
        ["1", "fh0", "cuda:1", "1.250", "0.7500", "0.0%", "200"],
        ["2", "fh1", "cuda:0", "1.250", "0.7500", "0.0%", "200"],
    ]
    assert [cell.tone for row in table.rows for cell in row.cells[:1]] == [
        "strong",
        "plain",
        "plain",
        "plain",
    ]
    assert len(table.footnotes) == 1


def test_the_section_in_chinese():
    sentence, table = render_section(make_run(1.25, 1.75), "zh")
    assert sentence == golden("fh-0-1-25-0-1", language="zh")
    heads = ["进程", "主机", "设备", "自身用时", "等待", "与其余中位数之差", "token 数"]
    assert [column.title for column in table.columns] == heads


def test_equal_ranks_name_no_straggler_and_unknown_hosts_have_no_column():
    sentence, table = render_section(make_run(1.25, 1.26, host=None))
    assert sentence == golden("no-rank-is-clearly-slow-slowest")
    assert [column.title for column in table.columns][:3] == ["Rank", "Device", "Own time"]


def test_more_tokens_of_the_slowest_rank_are_named():
    assert render_section(make_run(1.25, 1.75, tokens=150))[0].endswith(
        golden("it-had-1-50-times-the")
    )


def test_of_many_ranks_the_slowest_are_shown():
    sentence, table = render_section(make_run(*[1.25] * 19, 1.75))
    assert "rank 19 on host fh9" in sentence
    assert len(table.rows) == 16
    assert table.footnotes[0] == "The 16 slowest of 20."


def test_unknown_stragglers_have_a_reason():
    [reason] = build_straggler_section(
        make_training_record(((2.0, 1.0, 1.0),) * 2), PageWords("en")
    )
    assert reason == Paragraph(golden("the-engine-does-not-mark-where"), "muted")
    assert build_straggler_section(make_training_record(), PageWords("en")) == []


def list_headings(blocks: tuple[PageElement, ...]) -> list[str]:
    """Return the texts of all headings."""
    return [block.text for block in walk_elements(blocks) if isinstance(block, Heading)]


@pytest.mark.parametrize(("lang", "title"), [("en", "Stragglers"), ("zh", "慢进程")])
def test_a_page_has_the_section_where_there_is_more_than_one_rank(lang: Any, title: str):
    assert title in list_headings(report.build_report_page([make_run(1.25, 1.75)], lang).elements)
    assert title not in list_headings(
        report.build_report_page([make_training_record()], lang).elements
    )
    for format in report.FORMATS:
        text = report.render([make_run(1.25, 1.75)], format, lang)
        assert title in text
        assert "fh0" in text
