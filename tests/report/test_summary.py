"""Runs on a terminal: the table after a run, one screen for each case, and which columns fit."""

from dataclasses import replace

import pytest

from fixtures.golden import golden
from fixtures.report import (
    WITHOUT_INTERVAL,
    make_failed_record,
    make_record,
    make_records_of_all_statuses,
    make_training_record,
)
from steelyard import report
from steelyard.record.record import Record
from steelyard.report.as_text import fit_table
from steelyard.report.case_tables import build_mfu_table, build_values_table
from steelyard.report.document import (
    Cell,
    Code,
    Fact,
    Facts,
    Heading,
    Page,
    Paragraph,
    Priority,
    Table,
    TableColumn,
    TableRow,
)
from steelyard.report.numbered_runs import NumberedRun, format_run_numbers, group_by_case
from steelyard.report.plain_text import display_width, pad_to_width
from steelyard.words import PageWords

AFTER_RUNS = """\
size full · torch

case            precision  status                    rate      ±    MFU     acc
--------------  ---------  -----------  -----------------  -----  -----  ------
llama2-7b-mmlu  bf16       valid          45,903 tokens/s  0.20%  62.1%   45.8%
llama2-7b-mmlu  bf16       valid        59.38 questions/s      /      /  45.8%*
open
llama2-7b-mmlu  fp16       invalid:       45,903 tokens/s  0.20%  62.1%   45.8%
                           quality
llama2-7b-mmlu  fp32       failed: oom                  /      /      /       /
* quality is reported, not checked
Not shown: scope, p_infer_whole, p_infer_core, mem, e2e_time. --wide shows all
columns.
"""

ONE_SCREEN = """\
llama2-7b-mmlu · full
---------------------

NVIDIA H200 · torch · plan 1x1

run  precision  status                    rate      ±    MFU     acc  J/token
     scope
---  ---------  -----------  -----------------  -----  -----  ------  -------
#1   bf16       valid          45,903 tokens/s  0.20%  62.1%   45.8%  0.01458
     whole
#2   bf16 open  valid        59.38 questions/s      /      /  45.8%*        /
     1404
     samples
#3   fp16       invalid:       45,903 tokens/s  0.20%  62.1%   45.8%  0.01458
     whole      quality
#4   fp32       failed: oom                  /      /      /       /        /
     whole
* quality is reported, not checked

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
        "±",
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
        "±",
        "MFU",
        "acc",
        "p_infer_whole",
        "p_infer_core",
        "mem",
        "e2e_time",
    ]
    assert lines[5:7] == [lines[5]] * 2
    assert lines[5].split()[:5] == ["valid", "45,903", "0.20%", "62.1%", "45.8%"]


def test_an_unproven_run_says_so_after_its_run_and_on_one_screen() -> None:
    """Also one that an earlier version stored as valid."""
    records = [make_record(**WITHOUT_INTERVAL)]
    for page in (report.build_summary_page(records), report.build_brief_page(records)):
        [row] = [line for line in report.render_text(page, 120).splitlines() if "45,903" in line]
        assert "unproven: few_steps" in row
        assert "±" not in report.render_text(page, 120).partition("45,903")[0]
    text = report.render_text(report.build_summary_page(records, "zh"), 120)
    assert "未证实: few_steps" in text


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
    [part], dropped = fit_table(FOUR_COLUMNS, columns)
    assert "".join(column.title for column in part.columns) == kept
    assert "".join(column.title for column in dropped) == left_out


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        (None, ["abcd"]),
        (86, ["abcd"]),
        (85, ["abc", "ad"]),
        (64, ["abc", "ad"]),
        (63, ["ab", "ac", "ad"]),
        (18, ["ab", "ac", "ad"]),
    ],
)
def test_a_table_is_split_where_no_column_may_be_left_out(
    columns: int | None, parts: list[str]
) -> None:
    fitted, left_out = fit_table(FOUR_COLUMNS, columns, all_columns=True)
    assert ["".join(column.title for column in part.columns) for part in fitted] == parts
    assert left_out == []
    for part in fitted:
        assert columns is None or sum(part.limits) + 2 * (len(part.limits) - 1) <= columns


def test_text_is_wrapped_to_a_readable_width_before_a_table_is_split() -> None:
    words = make_table(("a", 1, "one two " * 5), ("b", 2, "six ten " * 5))  # 39 columns each
    assert [part.limits for part in fit_table(words, 42, all_columns=True)[0]] == [(20, 20)]
    three = make_table(*(("a", 1, "one two " * 5) for _ in range(3)))
    assert [part.limits for part in fit_table(three, 60, all_columns=True)[0]] == [
        (29, 29),
        (29, 29),
    ]


def test_parts_of_a_table_repeat_the_first_column() -> None:
    page = Page("", "en", (replace(FOUR_COLUMNS, footnotes=("a note",)),))
    assert report.render_text(page, 63, all_columns=True).splitlines() == [
        *("a                     b", "-" * 20 + "  " + "-" * 20, "x" * 20 + "  " + "y" * 20, ""),
        *("a                     c", "-" * 20 + "  " + "-" * 20, "x" * 20 + "  " + "z" * 20, ""),
        *("a                     d", "-" * 20 + "  " + "-" * 20, "x" * 20 + "  " + "w" * 20),
        "a note",
    ]


def test_text_is_wrapped_before_a_column_is_dropped() -> None:
    words = make_table(("a", 1, "one two three"), ("b", 2, "four five six"))
    assert fit_table(words, 28)[0][0].limits == (13, 13)
    assert fit_table(words, 20)[0][0].limits == (9, 9)
    assert len(fit_table(words, 11)[0][0].columns) == 2  # "three" and "four"
    assert len(fit_table(words, 10)[0][0].columns) == 1


def test_words_are_broken_only_where_nothing_else_helps() -> None:
    assert fit_table(make_table(("a", 1, "x" * 20)), 12)[0][0].limits == (12,)
    assert fit_table(make_table(("a", 1, "x" * 20)), 2)[0][0].limits == (8,)


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 120])
@pytest.mark.parametrize("lang", report.LANGS)
def test_a_full_report_fits_the_terminal_and_loses_nothing(columns: int, lang: report.Lang) -> None:
    records = [*make_records_of_all_statuses(), make_training_record()]
    failure = {"rank": 0, "exit_code": 1, "error": "x" * 200, "stderr_tail": f"  {'y' * 200}\nz"}
    records.append(make_record(id="f" * 12, status="failed", failure=failure))
    page = report.build_report_page(records, lang)
    text = report.render_text(page, columns, all_columns=True)
    assert max(map(display_width, text.splitlines())) <= columns
    unlimited = report.render_text(page)
    assert max(map(display_width, unlimited.splitlines())) > 120
    # every word is there, if not on the same line; a long one may be broken
    joined = "".join(text.split())
    assert [word for word in unlimited.split() if len(word) <= 8 and word not in joined] == []


def make_repeats() -> list[Record]:
    """Return records of a case: three repeats, one of which is invalid, then another engine."""
    metrics = [
        {
            "tokens_per_device_s": {
                "value": rate,
                "unit": "tokens/s/device",
                "interval": [rate - 1, rate + 1],
            },
            "mfu": {"value": rate / 1000, "unit": "fraction"},
            "mem": {"value": 10.0, "unit": "GiB"},
            "acc": {"value": 0.5, "unit": "fraction"},
            "energy_per_token": {"value": 1.0, "unit": "J/token"},
        }
        for rate in (100.0, 104.0, 160.0, 80.0)
    ]
    bad = {"status": "invalid", "reasons": [{"code": "clock", "text": ""}]}
    return [
        make_record(id="a" * 12, metrics=metrics[0]),
        make_record(id="b" * 12, metrics=metrics[1]),
        make_record(id="c" * 12, metrics=metrics[2], **bad),
        make_record(id="d" * 12, metrics=metrics[3], engine__name="paddle"),
    ]


def test_a_brief_report_merges_repeats() -> None:
    lines = report.render_text(report.build_brief_page(make_repeats()), 80).splitlines()
    assert lines[5:11] == [
        "run    engine  runs  status                   rate      ±    MFU    acc  J/token",
        "                                          tokens/s",
        "-----  ------  ----  -------------------  --------  -----  -----  -----  -------",
        "#1–#3  torch      3  valid                   102.0  24.9%  10.2%  50.0%    1.000",
        "                     2 of 3 count, clock",
        "#4     paddle     1  valid                   80.00   1.2%   8.0%  50.0%    1.000",
    ]
    assert "A row with several runs shows the means" in " ".join(lines)
    single = report.render_text(report.build_brief_page(make_repeats()[2:]))
    assert "runs" not in single


def test_all_values_of_a_full_report_merge_repeats() -> None:
    runs = group_by_case(make_repeats())["llama2-7b-mmlu", "full"]
    say = PageWords("en")
    table = build_values_table(runs, say)
    rows = [[cell.text for cell in row.cells] for row in table.rows if row.kind == "measured"]
    mfu = [column.title for column in table.columns].index("*MFU")
    assert [(row[0], row[mfu]) for row in rows] == [("#1–#3 torch", "10.2%"), ("#4 paddle", "8.0%")]
    assert [row.cells[0].sub for row in table.rows[:2]] == [
        "valid, 2 of 3 count, whole",
        "valid, whole",
    ]
    assert "A row with several runs shows the means of the runs that count." in table.footnotes
    mfu_table = build_mfu_table(runs, say)
    assert mfu_table is not None
    assert [[cell.text for cell in row.cells][:2] for row in mfu_table.rows[:2]] == [
        ["#1–#3 NVIDIA H200 × 1 · torch · bf16 · closed", "10.2%"],
        ["#4 NVIDIA H200 × 1 · paddle · bf16 · closed", "8.0%"],
    ]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([1], "#1"),
        ([1, 2], "#1, #2"),
        ([1, 2, 3], "#1–#3"),
        ([7, 1, 2, 5, 6, 9], "#1, #2, #5–#7, #9"),
    ],
)
def test_numbers_of_runs_are_shortened(numbers: list[int], text: str) -> None:
    record = make_record()
    assert format_run_numbers(NumberedRun(number, record) for number in numbers) == text


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    facts = Facts((Fact("a label " * 10, "text"), Fact("b", "text " * 40)))
    code = Code(f"if x:\n    {'y' * 200}")
    blocks = (Heading(1, "word " * 40), Paragraph("推理 word " * 40), FOUR_COLUMNS, facts, code)
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
