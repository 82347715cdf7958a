"""Runs on a terminal: the table after a run, one screen for each case, and which columns fit."""

import pytest

from fixtures.golden import golden
from fixtures.report import make_failed_record, make_record, make_records_of_all_statuses
from steelyard import report
from steelyard.report.as_text import fit_columns
from steelyard.report.document import (
    Cell,
    Code,
    Heading,
    Page,
    Paragraph,
    Priority,
    Table,
    TableColumn,
    TableRow,
)
from steelyard.report.plain_text import display_width, pad_to_width

AFTER_RUNS = """\
size full · torch

case            precision  status                         rate    MFU     acc
--------------  ---------  ----------------  -----------------  -----  ------
llama2-7b-mmlu  bf16       valid               45,903 tokens/s  62.1%   45.8%
llama2-7b-mmlu  bf16       valid             59.38 questions/s      /  45.8%*
open
llama2-7b-mmlu  fp16       invalid: quality    45,903 tokens/s  62.1%   45.8%
llama2-7b-mmlu  fp32       failed: oom                       /      /       /
* quality is reported, not checked
Not shown: scope, p_infer_whole, p_infer_core, mem, e2e_time. --wide shows all
columns.
"""

ONE_SCREEN = """\
llama2-7b-mmlu · full
---------------------

NVIDIA H200 · torch · plan 1x1

run  precision  status                         rate    MFU     acc  J/token
---  ---------  ----------------  -----------------  -----  ------  -------
#1   bf16       valid               45,903 tokens/s  62.1%   45.8%  0.01458
#2   bf16 open  valid             59.38 questions/s      /  45.8%*        /
#3   fp16       invalid: quality    45,903 tokens/s  62.1%   45.8%  0.01458
#4   fp32       failed: oom                       /      /       /        /
* quality is reported, not checked
Not shown: scope. --wide shows all columns.

rate: all devices together. ±: half of its 95 % interval. /: unknown, --full
says why.

More: --full prints every detail, --explain where the time goes, --format html
--to page.html writes a page.
"""


def test_the_table_after_runs_fits_80_columns() -> None:
    assert (
        report.render_text(report.build_summary_page(make_records_of_all_statuses()), 80)
        == AFTER_RUNS
    )


def test_a_case_fits_one_screen() -> None:
    text = report.render_text(report.build_brief_page(make_records_of_all_statuses()), 80)
    assert text == ONE_SCREEN
    assert len(text.splitlines()) <= 24


def test_wide_shows_every_column() -> None:
    [head, *_] = [
        line
        for line in report.render_text(
            report.build_summary_page(make_records_of_all_statuses())
        ).splitlines()
        if line.startswith("case")
    ]
    names = [
        "case",
        "precision",
        "scope",
        "status",
        "rate",
        "MFU",
        "acc",
        "p_infer_whole",
        "p_infer_core",
        "mem",
        "e2e_time",
    ]
    assert head.split() == names
    assert "window: 1404 samples" in report.render_text(
        report.build_summary_page(make_records_of_all_statuses())
    )
    assert "Not shown" not in report.render_text(
        report.build_summary_page(make_records_of_all_statuses())
    )


def test_what_all_runs_share_is_above_the_table() -> None:
    lines = report.render_text(
        report.build_summary_page([make_record(), make_record()]), 120
    ).splitlines()
    assert lines[0] == "llama2-7b-mmlu · size full · closed · torch · bf16"
    assert lines[2].split() == [
        "status",
        "rate",
        "MFU",
        "acc",
        "p_infer_whole",
        "p_infer_core",
        "mem",
        "e2e_time",
    ]
    assert lines[5:7] == [lines[5]] * 2
    assert lines[5].split()[:4] == ["valid", "45,903", "62.1%", "45.8%"]


def test_a_column_without_values_is_dropped_with_a_reason() -> None:
    metrics = {
        "tokens_per_device_s": {
            "value": 1000.0,
            "unit": "tokens/s/device",
            "interval": [980.0, 1020.0],
        }
    }
    metrics["mfu"] = {"value": None, "unit": "", "note": "no row"}
    text = report.render_text(report.build_brief_page([make_record(metrics=metrics)]), 80)
    assert golden("no-mfu-the-infer-pass-did") in text
    heads = next(line for line in text.splitlines() if line.startswith("run"))
    assert heads.split() == ["run", "status", "rate", "±", "acc"]
    assert [line.split() for line in text.splitlines() if line.startswith("#1")] == [
        ["#1", "valid", "1,000", "2.0%", "/"]
    ]


def test_plans_leave_out_degrees_of_one() -> None:
    plan = {"nodes": 2, "devices": 8, "tp": 2, "pp": 1, "dp": 8, "launcher": "local"}
    assert "plan 2x8 TP2DP8" in report.render_text(
        report.build_brief_page([make_record(plan=plan)])
    )


def test_points_of_a_sweep_begin_their_rows() -> None:
    lines = report.render_text(
        report.build_summary_page(
            [make_record(), make_failed_record()], points=["devices=1", "devices=2"]
        )
    ).splitlines()
    assert [line.split()[0] for line in lines[2:]] == [
        "point",
        "tokens/s",
        "---------",
        "devices=1",
        "devices=2",
    ]


def make_table(*columns: tuple[str, Priority, str]) -> Table:
    """Return a table of one row; each column is given as title, priority and cell text."""
    heads = tuple(TableColumn(title, priority=priority) for title, priority, _ in columns)
    return Table(heads, (TableRow(tuple(Cell(text) for _, _, text in columns)),))


FOUR_COLUMNS = make_table(
    ("a", 1, "x" * 20), ("b", 2, "y" * 20), ("c", 3, "z" * 20), ("d", 2, "w" * 20)
)


@pytest.mark.parametrize(
    ("columns", "kept", "left_out"),
    [
        (None, "abcd", ""),
        (86, "abcd", ""),
        (85, "abd", "c"),
        (64, "abd", "c"),
        (63, "ab", "cd"),
        (41, "a", "bcd"),
        (5, "a", "bcd"),
    ],
)
def test_columns_are_dropped_by_priority_and_the_last_of_equals_first(
    columns: int | None, kept: str, left_out: str
) -> None:
    fitted = fit_columns(FOUR_COLUMNS, columns)
    assert "".join(column.title for column in fitted.columns) == kept
    assert "".join(column.title for column in fitted.left_out) == left_out


def test_text_is_wrapped_before_a_column_is_dropped() -> None:
    words = make_table(("a", 1, "one two three"), ("b", 2, "four five six"))
    assert fit_columns(words, 28).limits == (13, 13)
    assert fit_columns(words, 20).limits == (9, 9)
    assert [column.title for column in fit_columns(words, 11).columns] == [
        "a",
        "b",
    ]  # "three" and "four"
    assert [column.title for column in fit_columns(words, 10).columns] == ["a"]


def test_words_are_broken_only_where_nothing_else_helps() -> None:
    assert fit_columns(make_table(("a", 1, "x" * 20)), 12).limits == (12,)
    assert fit_columns(make_table(("a", 1, "x" * 20)), 2).limits == (8,)


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    blocks = (Heading(1, "word " * 40), Paragraph("推理 word " * 40), FOUR_COLUMNS, Code("short"))
    text = report.render_text(Page("", "en", blocks, "foot " * 40), columns)
    assert max(map(display_width, text.splitlines())) <= columns
    assert f"Not shown: {'b, c, d' if columns == 40 else 'c, d' if columns == 60 else 'c'}" in text


def test_units_on_a_chinese_page_are_chinese() -> None:
    records = make_records_of_all_statuses()
    for page in (report.build_summary_page(records, "zh"), report.build_brief_page(records, "zh")):
        text = report.render_text(page, 300)
        assert "题/s" in text
        assert "questions/s" not in text


def test_padding_to_an_unknown_side_is_refused() -> None:
    assert (pad_to_width("a", 3), pad_to_width("a", 3, "right")) == ("a  ", "  a")
    with pytest.raises(ValueError, match="align 'centre' is not known; allowed: left, right"):
        pad_to_width("a", 3, "centre")  # type: ignore[arg-type]
