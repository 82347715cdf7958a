"""Whole Chinese pages of published records hold no English sentence but names and quotations."""

import json
import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fixtures.records import RUNS, SPECS
from steelyard import report
from steelyard.metrics import ceiling_rates
from steelyard.record import ceilings_record, record
from steelyard.report.derived_texts import DerivedTexts
from steelyard.words import PageWords

# Three or more words in a row. Words beside a digit, a slash or an equals sign are identifiers, no
# sentence.
ENGLISH = re.compile(r"(?<![\w.=/\\-])[A-Za-z]{2,}(?:[,;:]? [A-Za-z]{2,}){2,}(?![\w=/])")
# Names and terms of the field, which Chinese texts keep too.
NAMES = ("model flops utilization",)


@cache
def read_table(path: Path) -> dict[str, Any]:
    """Return the record at `path` as a JSON table, read once."""
    table: dict[str, Any] = json.loads(path.read_bytes())
    return table


def find_smallest_run(**fields: str) -> Path:
    """Return the path of the smallest published record with these values; `name` is the name of its
    case.
    """

    def fits(path: Path) -> bool:
        """Return whether the record has all these values."""
        table = read_table(path)
        return all(
            (table["case"] if key == "name" else table)[key] == value
            for key, value in fields.items()
        )

    return min(filter(fits, RUNS), key=lambda path: path.stat().st_size)


CASES = sorted({read_table(path)["case"]["name"] for path in RUNS})
PAGES = {
    **{name: find_smallest_run(name=name, status="valid") for name in CASES},
    "failed": find_smallest_run(status="failed"),
    "invalid": find_smallest_run(status="invalid"),
}


class VisibleText(HTMLParser):
    """The text of an HTML page that a reader sees, without code (the last lines of programs'
    output).
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside.append(tag)
        self.text += "\n"

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass
        self.text += "\n"

    def handle_data(self, data: str) -> None:
        if not {"style", "pre", "script"} & set(self.inside):
            self.text += data


def render_page(path: Path, format: str) -> str:
    """Return the visible text of the record's Chinese page, without code."""
    text = report.render([record.read_record(path)], format, "zh")
    if format == "html":
        visible = VisibleText()
        visible.feed(text)
        return visible.text
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)  # drop code, which is indented


def yield_quotable_texts(table: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of a record that are not the catalogue's: names of machines and packages,
    sources, and the output of programs.
    """
    yield json.dumps(table["environment"], ensure_ascii=False)
    yield json.dumps(table["engine"], ensure_ascii=False)
    yield json.dumps(
        [table["site"], table["data"], table["weights"], table["failure"], table["reasons"]],
        ensure_ascii=False,
    )


def find_english_phrases(text: str, quoted: str) -> list[str]:
    """Return the English phrases of the text that are neither in `quoted` nor names."""
    plain = re.sub(r"\s+", " ", quoted)
    return [
        phrase for phrase in ENGLISH.findall(text) if phrase not in plain and phrase not in NAMES
    ]


@pytest.mark.parametrize("format", ["text", "md", "html"])
@pytest.mark.parametrize("name", PAGES)
def test_a_chinese_page_has_no_english_sentence(name: str, format: str) -> None:
    assert (
        find_english_phrases(
            render_page(PAGES[name], format),
            " ".join(yield_quotable_texts(read_table(PAGES[name]))),
        )
        == []
    )


def test_an_english_sentence_is_found() -> None:
    text = "检查：train: every rank took all steps，micro_batch=4 与 NVIDIA H200"
    assert find_english_phrases(text, "") == ["train: every rank took all steps"]
    assert len(CASES) == 8 + 3  # eight shipped cases and three of SmolLM2


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.name)
def test_a_chinese_spec_page_has_no_english_sentence(path: Path) -> None:
    stored = ceiling_rates.read_verified_spec_record(path)
    texts = [item.reason for item in stored.benches if isinstance(item.reason, str)] + [
        str(item.detail.get("how", "")) for item in stored.benches
    ]
    names = [item.name for item in stored.benches]
    quoted = json.dumps([read_table(path)["environment"], texts, names], ensure_ascii=False)
    text = report.render_ceilings([ceilings_record.read_spec_record(path)], "md", "zh")
    assert find_english_phrases(text, quoted) == []
    assert "不稳定" in text or not any(
        item.note and item.note.startswith("not steady") for item in stored.ceilings
    )


@pytest.mark.parametrize("name", PAGES)
def test_derived_texts_match_the_stored_record(name: str) -> None:
    """An English page says what a new record would hold; its codes, names and results are those of
    the stored record.
    """
    stored = record.read_record(PAGES[name])
    checks = DerivedTexts(stored, PageWords("en")).list_checks()
    assert {(item.name, item.ok) for item in stored.checks} <= {
        (item.name, item.ok) for item in checks
    }
    assert [item.code for item in DerivedTexts(stored, PageWords("zh")).list_reasons()] == [
        item.code for item in stored.reasons
    ]
    assert all(
        re.search(r"[\u4e00-\u9fff]", item.detail)
        for item in DerivedTexts(stored, PageWords("zh")).list_checks()
    )
    assert len(DerivedTexts(stored, PageWords("zh")).list_notes()) >= len(stored.notes)
    for metric, value in stored.metrics.items():
        assert bool(DerivedTexts(stored, PageWords("zh")).metric_note(metric)) == bool(
            value.note
        ), metric
    assert bool(DerivedTexts(stored, PageWords("zh")).quality_note()) == (
        not stored.quality.evaluated
    )


def test_a_failure_is_explained_and_quoted() -> None:
    stored = record.read_record(PAGES["failed"])
    first = DerivedTexts(stored, PageWords("zh")).list_reasons()[0]
    assert first.quoted == stored.reasons[0].text
    assert first.format(PageWords("zh")) == f"{first.text}：“{first.quoted}”"
    other = stored.model_copy(update={"reasons": [record.Reason(code="new_one", text="why")]})
    assert (
        DerivedTexts(other, PageWords("en")).list_reasons()[0].format(PageWords("en"))
        == "The run failed: “why”"
    )


def test_text_that_does_not_follow_from_samples_is_shown_verbatim() -> None:
    stored = record.read_record(PAGES["llama2-7b-mmlu"])
    checks = [record.Check(name="mine", ok=False, detail="what I found")]
    forged = stored.model_copy(update={"checks": checks, "notes": ["my note"]})
    assert [item.detail for item in DerivedTexts(forged, PageWords("zh")).list_checks()] == [
        "what I found"
    ]
    assert DerivedTexts(forged, PageWords("zh")).list_notes() == ["my note"]
