"""Build what the page of a generation run says of its requests: load, window, latencies with their
definitions, how tokens were counted, how well the client kept up, outcomes, and checked answers.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from steelyard import words
from steelyard.metrics.metric_table import find_metric as metric_row
from steelyard.metrics.passes import find_rate_span
from steelyard.metrics.request_rules import OUTCOME_CODES
from steelyard.record.record import Record, Value
from steelyard.record.request_samples import US, ClientFacts, RequestSamples
from steelyard.report.derived_texts import DerivedTexts
from steelyard.report.document import (
    Cell,
    ColumnSpec,
    Fact,
    Facts,
    PageElement,
    Paragraph,
    build_table,
)
from steelyard.report.loads import STATISTICS, format_load
from steelyard.report.marks import format_declared_device
from steelyard.report.numbers import (
    UNKNOWN,
    format_count,
    format_number,
    format_percent,
    format_times,
)
from steelyard.words import PageWords

MAX_ERRORS = 5  # texts of failed requests that a page quotes
_LATENCIES = ("ttft", "ttft_sent", "tpot", "chunk_gap", "e2e", "queue_delay")
CHECKER_KEY = "checked_by"  # of the engine's details: what scored the answers again


@dataclass(frozen=True)
class _LatencyRow:
    """A row of the table of latencies: the `name` of a time, its stored values by statistic (mean,
    p50, ...), and the id of its `definition`, None if the record does not say.
    """

    name: str
    values: dict[str, Value]
    definition: str | None


def build_request_sections(
    record: Record, texts: DerivedTexts, say: PageWords
) -> list[tuple[str, list[PageElement]]]:
    """Return two sections, each a title and its elements: the facts of a record's requests, and the
    table of their latencies; empty for a record without request samples.
    """
    if not record.requests:
        return []
    samples = record.requests[0]
    facts = [
        *_load_facts(record, samples, say),
        *_window_facts(record, say),
        *_counting_facts(samples, say),
        *_client_facts(samples.client, say),
        *_outcome_facts(samples, say),
        *_check_facts(record, say),
    ]
    return [
        (say("requests"), [Facts(tuple(facts))]),
        (say("latencies"), _latency_elements(record, samples, texts, say)),
    ]


def _load_facts(record: Record, samples: RequestSamples, say: PageWords) -> list[Fact]:
    """Return the load, the limits that goodput counts by (if any), the declared device of a server
    that was not started here (if any), how long answers are, and how many requests were sent and
    answered.
    """
    table = samples.table
    sent = say(
        "requests.sent.text",
        format_count(len(table)),
        format_count(int(table.is_ok.sum())),
        format_count(int(table.output_tokens.sum())),
    )
    device = format_declared_device(record, say)
    declared = [] if device is None else [("device", device)]
    load = record.question.load
    mode = "" if load is None else say(f"requests.load.{load.mode}")
    slo = record.case.slo
    limits = () if slo is None else (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s))
    listed = [
        f"{name} {format_times([limit_s])}" for name, limit_s in limits if limit_s is not None
    ]
    labelled = (
        ("load", say("requests.load.text", format_load(record), mode)),
        *([("limits", say("comma").join(listed))] if listed else []),
        *declared,
        ("lengths", say(f"requests.lengths.{samples.lengths}")),
        ("sent", sent),
    )
    return [Fact(say(f"requests.{key}"), text) for key, text in labelled]


def _window_facts(record: Record, say: PageWords) -> list[Fact]:
    """Return how the window was found, how many requests are in it, and, apart from it, how long
    ramp-up and drain took; each only if it is known.
    """
    span = find_rate_span(record)
    note = "" if span is None or span.note is None else words.render_text(span.note, say.lang)
    count = record.metrics.get("window_requests")
    value = None if count is None else count.value
    number = "" if value is None else say("requests.window.text", format_count(round(value)))
    window = say("colon").join(filter(None, (number, note))) or UNKNOWN
    times = [(name, record.metrics.get(f"{name}_time")) for name in ("ramp", "drain")]
    return [
        Fact(say("requests.window"), window),
        *(
            Fact(say(f"requests.{name}"), format_times([value.value]))
            for name, value in times
            if value is not None and value.value is not None
        ),
    ]


def _counting_facts(samples: RequestSamples, say: PageWords) -> list[Fact]:
    """Return by what tokens were counted, and the salt of the prompts."""
    return [
        Fact(
            say("requests.counted_by"),
            say(f"requests.counted_by.{samples.counted_by}"),
            "bad" if samples.counted_by == "chunks" else "plain",
        ),
        Fact(say("requests.salt"), samples.salt or say("requests.salt.none")),
    ]


def _client_facts(client: ClientFacts | None, say: PageWords) -> list[Fact]:
    """Return, in a list, how well the loop that sent the requests kept up: how late it woke up, its
    share of a core, and the error of its stamps on the mock server, if measured; empty if nothing
    is known.
    """
    if client is None:
        return []
    texts = [
        say("requests.client.lag", *_format_us(client.lag_p99_us), *_format_us(client.lag_max_us)),
        say("requests.client.inside")
        if client.cpu_share is None
        else say("requests.client.cpu", format_percent(client.cpu_share)),
    ]
    if client.mock_error_us is not None:
        times = _format_us(*client.mock_error_us)
        texts.append(say("requests.client.mock", *times, format_count(client.mock_requests)))
    return [Fact(say("requests.client"), say("comma").join(texts))]


def _format_us(*times_us: int) -> list[str]:
    """Format times in microseconds, each with its unit."""
    return [format_times([time_us / US]) for time_us in times_us]


def _outcome_facts(samples: RequestSamples, say: PageWords) -> list[Fact]:
    """Return how many requests ended in which way, most frequent first, and the texts of the first
    errors, one fact each.
    """
    names, codes = list(OUTCOME_CODES), samples.table.outcome.tolist()
    counts = Counter(names[code] for code in codes)
    listed = (
        say("requests.outcomes.count", format_count(count), say(OUTCOME_CODES[name]))
        for name, count in counts.most_common()
    )
    return [
        Fact(
            say("requests.outcomes"),
            say("comma").join(listed) or UNKNOWN,
            "plain" if set(counts) <= {"ok"} else "bad",
        ),
        *(Fact(say("requests.error"), text, "bad") for text in samples.errors[:MAX_ERRORS]),
    ]


def _check_facts(record: Record, say: PageWords) -> list[Fact]:
    """Return, in a list, how many answers were checked by which engine, how many of their tokens
    are the likeliest, and how far the farthest is from that.
    """
    texts = [say("requests.checked.none")]
    for name in record.task.kind_row.check_passes:
        distances: Any = getattr(record.answers, "passes", {}).get(name)
        compared = getattr(distances, "compared", None)
        if not compared:
            continue
        checker = record.engine.details.model_dump().get(CHECKER_KEY)
        farthest = record.metrics.get("answer_distance")
        texts = [
            say(
                "requests.checked.text",
                format_count(len(compared)),
                checker if isinstance(checker, str) else say("requests.checker.unknown"),
                format_count(sum(distances.exact)),
                format_count(sum(compared)),
                format_number("number", None if farthest is None else farthest.value),
            )
        ]
    return [Fact(say("requests.checked"), texts[0])]


def _latency_elements(
    record: Record, samples: RequestSamples, texts: DerivedTexts, say: PageWords
) -> list[PageElement]:
    """Return the table of the latencies that the record has, with mean and percentiles, their
    intervals, and the id of each definition, and a note; empty if it has none. Below the table
    stands why a percentile is unknown.
    """
    rows = []
    for name in _LATENCIES:
        stored = {key: record.metrics.get(f"{name}_{key}") for key in STATISTICS}
        values = {key: value for key, value in stored.items() if value is not None}
        if values:
            rows.append(_LatencyRow(name, values, samples.all_definitions.get(name)))
    if not rows:
        return []

    def column(statistic: str) -> ColumnSpec[_LatencyRow]:
        """Return the column of the mean or of a percentile, with its interval below."""
        title = say("latencies.mean") if statistic == "mean" else statistic
        return ColumnSpec(
            title, lambda row: _time_cell(row.values.get(statistic)), right=True, optional=True
        )

    columns: tuple[ColumnSpec[_LatencyRow], ...] = (
        ColumnSpec(
            say("latencies.name"),
            lambda row: Cell(row.name, say.get_or_fallback(f"latency.{row.name}", row.name)),
        ),
        *map(column, STATISTICS),
        ColumnSpec(say("latencies.definition"), lambda row: row.definition or UNKNOWN, priority=2),
    )
    count = record.metrics.get("window_requests")
    value = None if count is None else count.value
    number = UNKNOWN if value is None else format_count(round(value))
    return [
        build_table(columns, rows, _list_reasons(rows, texts, say)),
        Paragraph(say("latencies.note", number), "muted"),
    ]


def _time_cell(value: Value | None) -> Cell:
    """Return a time with its interval below; UNKNOWN for None."""
    if value is None or value.value is None:
        return Cell(UNKNOWN)
    ends = (
        "" if value.interval is None else " – ".join(format_times([end]) for end in value.interval)
    )
    return Cell(format_times([value.value]), ends)


def _list_reasons(rows: list[_LatencyRow], texts: DerivedTexts, say: PageWords) -> list[str]:
    """Return why values of the table are unknown: a note for each reason, with the metrics that it
    is of.
    """
    names_by_reason: dict[str, list[str]] = {}
    for row in rows:
        for statistic, value in row.values.items():
            name = f"{row.name}_{statistic}"
            if value.value is None and (reason := texts.metric_note(name)):
                names_by_reason.setdefault(reason, []).append(metric_row(name).heading)
    return [
        say("load.unknown", say("comma").join(names), reason)
        for reason, names in names_by_reason.items()
    ]
