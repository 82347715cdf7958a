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
def told(path: Path) -> dict[str, Any]:
    """Return the record at `path` as a JSON table, read once."""
    table: dict[str, Any] = json.loads(path.read_bytes())
    return table


def smallest(**wanted: str) -> Path:
    """Return the path of the smallest published record with these values; `name` is the name of its
    case.
    """

    def fits(path: Path) -> bool:
        """Return whether the record has all these values."""
        one = told(path)
        return all(
            (one["case"] if key == "name" else one)[key] == value for key, value in wanted.items()
        )

    return min(filter(fits, RUNS), key=lambda path: path.stat().st_size)


CASES = sorted({told(path)["case"]["name"] for path in RUNS})
PAGES = {
    **{name: smallest(name=name, status="valid") for name in CASES},
    "failed": smallest(status="failed"),
    "invalid": smallest(status="invalid"),
}


class Shown(HTMLParser):
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


def page(path: Path, format: str) -> str:
    """Return the visible text of the record's Chinese page, without code."""
    text = report.render([record.read_record(path)], format, "zh")
    if format == "html":
        shown = Shown()
        shown.feed(text)
        return shown.text
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)  # drop code, which is indented


def evidence(found: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of a record that are not the catalogue's: names of machines and packages,
    sources, and the output of programs.
    """
    yield json.dumps(found["environment"], ensure_ascii=False)
    yield json.dumps(found["engine"], ensure_ascii=False)
    yield json.dumps(
        [found["site"], found["data"], found["weights"], found["failure"], found["reasons"]],
        ensure_ascii=False,
    )


def english(text: str, known: str) -> list[str]:
    """Return the English phrases of the text that are neither in `quoted` nor names."""
    plain = re.sub(r"\s+", " ", known)
    return [one for one in ENGLISH.findall(text) if one not in plain and one not in NAMES]


@pytest.mark.parametrize("format", ["text", "md", "html"])
@pytest.mark.parametrize("name", PAGES)
def test_a_chinese_page_is_chinese(name: str, format: str) -> None:
    assert english(page(PAGES[name], format), " ".join(evidence(told(PAGES[name])))) == []


def test_an_english_sentence_would_be_found() -> None:
    said = "检查：train: every rank took all steps，micro_batch=4 与 NVIDIA H200"
    assert english(said, "") == ["train: every rank took all steps"]
    assert len(CASES) == 6 + 3  # six shipped cases and three of SmolLM2


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.name)
def test_a_chinese_page_of_a_machine_is_chinese(path: Path) -> None:
    found = ceiling_rates.read_verified_spec_record(path)
    texts = [one.reason or "" for one in found.benches] + [
        str(one.detail.get("how", "")) for one in found.benches
    ]
    names = [one.name for one in found.benches]
    known = json.dumps([told(path)["environment"], texts, names], ensure_ascii=False)
    page = report.render_ceilings([ceilings_record.read_spec_record(path)], "md", "zh")
    assert english(page, known) == []
    assert "不稳定" in page or not any(
        one.note and one.note.startswith("not steady") for one in found.ceilings
    )


@pytest.mark.parametrize("name", PAGES)
def test_what_is_derived_is_what_is_stored(name: str) -> None:
    """An English page says what a new record would hold; its codes, names and results are those of
    the stored record.
    """
    found = record.read_record(PAGES[name])
    checks = DerivedTexts(found, PageWords("en")).list_checks()
    assert {(one.name, one.ok) for one in found.checks} <= {(one.name, one.ok) for one in checks}
    assert [one.code for one in DerivedTexts(found, PageWords("zh")).list_reasons()] == [
        one.code for one in found.reasons
    ]
    assert all(
        re.search(r"[\u4e00-\u9fff]", one.detail)
        for one in DerivedTexts(found, PageWords("zh")).list_checks()
    )
    assert len(DerivedTexts(found, PageWords("zh")).list_notes()) >= len(found.notes)
    for metric, value in found.metrics.items():
        assert bool(DerivedTexts(found, PageWords("zh")).metric_note(metric)) == bool(value.note), (
            metric
        )
    assert bool(DerivedTexts(found, PageWords("zh")).quality_note()) == (
        not found.quality.evaluated
    )


def test_a_failure_is_said_and_quoted() -> None:
    found = record.read_record(PAGES["failed"])
    first = DerivedTexts(found, PageWords("zh")).list_reasons()[0]
    assert first.quoted == found.reasons[0].text
    assert first.format(PageWords("zh")) == f"{first.text}：“{first.quoted}”"
    other = found.model_copy(update={"reasons": [record.Reason(code="new_one", text="why")]})
    assert (
        DerivedTexts(other, PageWords("en")).list_reasons()[0].format(PageWords("en"))
        == "The run failed: “why”"
    )


def test_text_that_does_not_follow_from_samples_is_shown_as_it_is() -> None:
    found = record.read_record(PAGES["llama2-7b-mmlu"])
    checks = [record.Check(name="mine", ok=False, detail="what I found")]
    forged = found.model_copy(update={"checks": checks, "notes": ["my note"]})
    assert [one.detail for one in DerivedTexts(forged, PageWords("zh")).list_checks()] == [
        "what I found"
    ]
    assert DerivedTexts(forged, PageWords("zh")).list_notes() == ["my note"]
