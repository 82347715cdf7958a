"""What the page of a generation run says of its requests: exact texts from made records."""

from typing import Any

import pytest

from fixtures import load_records as made
from fixtures.golden import golden
from steelyard import report
from steelyard.record.record import Record
from steelyard.report.derived_texts import DerivedTexts
from steelyard.report.document import Facts, Figures, Heading, Table, walk_elements
from steelyard.report.request_details import build_request_sections
from steelyard.report.run_details import build_run_details
from steelyard.words import PageWords


def read_facts(record: Record, lang: report.Lang = "en") -> dict[str, str]:
    """Return the facts of a record's requests by label; the last of several with one label."""
    say = PageWords(lang)
    (_, [facts]), _ = build_request_sections(record, DerivedTexts(record, say), say)
    assert isinstance(facts, Facts)
    return {fact.label: fact.text for fact in facts.items}


def read_latencies(record: Record) -> Table:
    """Return the table of a record's latencies."""
    say = PageWords("en")
    table = build_request_sections(record, DerivedTexts(record, say), say)[1][1][0]
    assert isinstance(table, Table)
    return table


def test_the_facts_of_the_requests() -> None:
    facts = read_facts(made.make_generation_record(details={"checked_by": "torch"}))
    assert facts["Load"] == golden("load-of-a-closed-loop")
    assert facts["Limits of goodput"] == "TTFT 2.00 s, TPOT 100 ms"
    assert facts["Lengths"] == golden("lengths-exact")
    assert facts["Requests"] == "20 planned, 20 answered, 60 output tokens"
    assert facts["Window"].startswith("160 requests: ")
    assert (facts["Ramp-up"], facts["Drain"]) == ("1.25 s", "750 ms")
    assert facts["Tokens counted by"] == "their ids"
    assert facts["Salt"] == "5a175a175a175a17"
    assert facts["Client"] == golden("client-of-a-run")
    assert facts["Outcomes"] == "20 ended regularly"
    assert facts["Answers checked"] == golden("answers-checked")
    assert "Error" not in facts
    assert "Device" not in facts


def test_failed_requests_are_counted_with_their_first_error() -> None:
    facts = read_facts(made.make_generation_record(failures=4))
    assert facts["Outcomes"] == "16 ended regularly, 4 refused"
    assert facts["Error"] == "503 Service Unavailable: <b>full</b>"
    assert facts["Requests"] == "20 planned, 16 answered, 48 output tokens"


def test_natural_lengths_and_missing_counts_are_marked() -> None:
    record = made.make_generation_record()
    samples = record.requests[0].model_copy(
        update={"lengths": "natural", "counted_by": "chunks", "salt": "", "client": None}
    )
    facts = read_facts(record.model_copy(update={"requests": [samples]}))
    assert facts["Lengths"] == golden("lengths-natural")
    assert facts["Tokens counted by"] == golden("counted-by-chunks")
    assert facts["Salt"] == golden("no-salt")
    assert "Client" not in facts
    assert facts["Answers checked"] == golden("answers-checked-by-nobody-named")


def test_latencies_have_intervals_definitions_and_reasons() -> None:
    table = read_latencies(made.make_generation_record())
    assert [column.title for column in table.columns] == [
        "Time",
        "mean",
        "p50",
        "p90",
        "definition",
    ]
    ttft, tpot = table.rows
    assert [f"{cell.text} {cell.sub}".strip() for cell in ttft.cells] == [
        "ttft first token, from the schedule",
        "91.9 ms",
        "83.5 ms 79.3 ms – 87.7 ms",
        "125 ms",
        "scheduled-to-first-token/1",
    ]
    assert tpot.cells[4].text == "first-to-last-token-over-n-minus-1/1"
    [note] = table.footnotes
    assert note.startswith("No ttft_p99, tpot_p99: ")


def test_the_details_have_both_sections_and_times_in_milliseconds() -> None:
    elements = build_run_details(made.make_generation_record(), 3, PageWords("en"))
    titles = [item.text for item in elements if isinstance(item, Heading)]
    assert titles.index("Requests") + 1 == titles.index("Latencies") < titles.index("All metrics")
    [metrics] = [
        item for item in elements if isinstance(item, Table) and item.columns[0].title == "Metric"
    ]
    [row] = [row for row in metrics.rows if row.cells[1].text == "ttft_p50"]
    assert [cell.text for cell in row.cells[2:5]] == ["83.5", "ms", "79.3 ms – 87.7 ms"]


def test_headline_numbers_of_a_run() -> None:
    page = report.build_report_page([made.make_generation_record()], "en")
    [figures] = [item for item in walk_elements(page.elements) if isinstance(item, Figures)]
    assert [(figure.label, figure.value, figure.unit) for figure in figures.items] == [
        ("output_tokens_per_s", "1,710", "tokens/s"),
        ("interactivity", "118.0", "tokens/s"),
        ("ttft_p50", "83.5", "ms"),
        ("ttft_p90", "125", "ms"),
        ("tpot_p50", "8.47", "ms"),
        ("exact_tokens", "99.9%", "no gate"),
        ("mem", "38.5", "GiB"),
        ("e2e_time", "96.40", "s"),
    ]


@pytest.mark.parametrize("lang", report.LANGS)
@pytest.mark.parametrize("device", ["8 x ABC One", None])
def test_a_declared_device_is_marked_wherever_it_stands(
    device: str | None, lang: report.Lang
) -> None:
    details: dict[str, Any] = {"is_external": True} | ({"device": device} if device else {})
    records = made.make_sweep("http", points=made.SWEEP[:2], details=details)
    declared = golden("declared-device", language=lang)
    words = declared if device else golden("undeclared-device", language=lang)
    text = report.render(records, "text", lang)
    # nowhere the device of the machine that sent the requests
    assert "NVIDIA H200 ×" not in text
    assert "NVIDIA H200 (" not in text
    assert text.count(words) >= 6
    assert words in report.render_text(report.build_brief_page(records, lang))
