"""Tests of request samples: packing, tables value by value, and hostile columns."""

import base64
import tracemalloc
import zlib
from itertools import accumulate
from time import monotonic
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from steelyard.record import request_samples
from steelyard.record.request_samples import (
    DEFINITIONS,
    LATER_COLUMNS,
    LEAST_NUMBERS,
    MAX_CHUNKS,
    MAX_REQUESTS,
    PER_CHUNK,
    PER_REQUEST,
    RequestPasses,
    RequestSamples,
    make_request_samples,
    pack_ints,
    unpack_ints,
)

FACTS = {
    "pass_name": "generate",
    "rank": 0,
    "counted_by": "ids",
    "lengths": "exact",
    "salt": "0123456789abcdef",
    "errors": [],
}
# Three requests: two chunks, none (it failed), three chunks.
COLUMNS = {
    "scheduled_us": [0, 500_000, 250_000],
    "due_us": [0, 100, 0],
    "sent_us": [10, 20, 30],
    "chunk_count": [2, 0, 3],
    "end_us": [5, 1_000_000, 0],
    "prompt_tokens": [32, 33, 34],
    "asked_tokens": [4, 4, 7],
    "output_tokens": [4, 0, 7],
    "usage_prompt_tokens": [33, -1, -1],
    "usage_output_tokens": [4, -1, -1],
    "retokenized_tokens": [-1, -1, 6],
    "outcome": [0, 1, 0],
    "chunk_us": [250_000, 125_000, 1_000_000, 0, 500_000],
    "chunk_tokens": [1, 3, 1, 2, 4],
}


def make(**changes: Any) -> RequestSamples:
    """Return samples of three requests, with other columns where `changes` name them."""
    return make_request_samples(COLUMNS | changes, **FACTS)


def make_table(count: int, chunks: int) -> dict[str, np.ndarray]:
    """Return the columns of a busy server: tokens every 20 ms, with jitter of some milliseconds."""
    generator = np.random.default_rng(7)
    gaps_us = np.maximum(generator.normal(20_000, 2_000, count * chunks), 1).astype(np.int64)
    columns = {name: np.zeros(count, np.int64) for name in PER_REQUEST}
    columns |= {
        "scheduled_us": generator.integers(0, 50_000, count),
        "sent_us": generator.integers(0, 200, count),
        "chunk_count": np.full(count, chunks),
        "end_us": generator.integers(0, 500, count),
        "prompt_tokens": np.full(count, 1024),
        "asked_tokens": np.full(count, chunks),
        "output_tokens": np.full(count, chunks),
        "chunk_us": gaps_us,
        "chunk_tokens": np.ones(count * chunks, np.int64),
    }
    return columns


def test_samples_of_before_a_column_came_say_that_it_is_unknown():
    samples = make()
    assert samples.table.usage_output_tokens.tolist() == [4, -1, -1]
    earlier = {k: v for k, v in samples.columns.items() if k not in LATER_COLUMNS}
    data = samples.model_dump(mode="json", by_alias=True) | {"columns": earlier}
    table = RequestSamples.model_validate(data).table
    assert table.usage_output_tokens.tolist() == [-1, -1, -1]
    assert table.usage_prompt_tokens.tolist() == [33, -1, -1]
    del earlier["usage_prompt_tokens"]
    refuse(data, "other columns")


def test_times_are_added_up_value_by_value():
    table = make().table
    assert table.scheduled_s.tolist() == [0, 0.5, 0.75]
    assert table.due_s.tolist() == [0, 0.5001, 0.75]
    assert table.sent_s.tolist() == [0.00001, 0.50012, 0.75003]
    assert table.chunk_starts.tolist() == [0, 2, 2, 5]
    assert table.chunk_s.tolist() == [0.25001, 0.37501, 1.75003, 1.75003, 2.25003]
    assert table.chunk_tokens.tolist() == [1, 3, 1, 2, 4]
    first, last = table.first_s.tolist(), table.last_s.tolist()
    assert (first[0], first[2], last[0], last[2]) == (0.25001, 1.75003, 0.37501, 2.25003)
    assert np.isnan([first[1], last[1]]).all()
    assert table.end_s.tolist() == [0.375015, 1.50012, 2.25003]
    assert table.is_ok.tolist() == [True, False, True]
    assert len(table) == 3
    for name in ("prompt_tokens", "asked_tokens", "output_tokens", "usage_prompt_tokens"):
        assert getattr(table, name).tolist() == COLUMNS[name]
    assert table.retokenized_tokens.tolist() == [-1, -1, 6]
    assert table.outcome.tolist() == [0, 1, 0]


def test_a_regular_end_without_a_token_is_not_ok():
    columns = {"chunk_count": [2, 0, 3], "outcome": [0, 0, 0]}
    assert make(**columns).table.is_ok.tolist() == [True, False, True]


def test_samples_are_the_same_after_a_file():
    samples = make()
    again = RequestSamples.model_validate_json(samples.model_dump_json(by_alias=True))
    assert again == samples
    assert again.model_dump_json(by_alias=True) == samples.model_dump_json(by_alias=True)
    assert again.definitions == DEFINITIONS
    assert (again.count, again.chunks) == (3, 5)
    for name, values in COLUMNS.items():
        assert unpack_ints(again.columns[name], len(values)).tolist() == values


@pytest.mark.parametrize(
    "values",
    [
        [],
        [0],
        [-1, 1, -(1 << 63), (1 << 63) - 1],
        list(range(-300, 300)),
        list(accumulate(range(1, 60), lambda a, b: a * b % (1 << 62))),
    ],
)
def test_packed_integers_come_back_exactly(values):
    text = pack_ints(np.array(values, np.int64))
    assert unpack_ints(text, len(values)).tolist() == values
    for wrong in (len(values) + 1, len(values) - 1, 2 * len(values) + 1):
        if wrong >= 0:
            with pytest.raises(ValueError, match="does not hold"):
                unpack_ints(text, wrong)


def test_no_requests_are_an_empty_table():
    samples = make_request_samples({name: [] for name in COLUMNS}, **FACTS)
    assert (samples.count, samples.chunks, len(samples.table)) == (0, 0, 0)
    assert samples.table.chunk_starts.tolist() == [0]


def test_a_thousand_requests_of_500_tokens_take_less_than_3_megabytes():
    samples = make_request_samples(make_table(1000, 500), **FACTS)
    assert len(samples.model_dump_json()) < 3e6
    assert samples.table.output_tokens.sum() == 500_000


@pytest.mark.long
def test_ten_thousand_requests_of_500_tokens_take_less_than_30_megabytes_and_5_seconds():
    columns = make_table(10_000, 500)
    text = make_request_samples(columns, **FACTS).model_dump_json()
    assert len(text) < 30e6
    begin_s = monotonic()
    table = RequestSamples.model_validate_json(text).table
    assert monotonic() - begin_s < 5
    assert len(table.chunk_s) == 5_000_000
    stamps = np.cumsum(columns["chunk_us"][:500]) + columns["scheduled_us"][0]
    assert table.chunk_s[:500] == pytest.approx((stamps + columns["sent_us"][0]) / 1e6)


# Hostile columns.


def change_column(name: str, text: str, **facts: Any) -> dict[str, Any]:
    """Return samples as a record has them, with other text in one column and other facts."""
    stored = make().model_dump(mode="json", by_alias=True)
    stored["columns"][name] = text
    return stored | facts


def refuse(stored: dict[str, Any], match: str) -> None:
    """Assert that samples are refused with a text, within the memory that they may need."""
    tracemalloc.start()
    try:
        with pytest.raises(ValidationError, match=match):
            RequestSamples.model_validate(stored)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def squeeze(raw: bytes) -> str:
    """Return bytes as a column packs them."""
    return base64.b64encode(zlib.compress(raw, 9)).decode()


def test_a_bomb_is_inflated_no_further_than_stated():
    refuse(change_column("outcome", squeeze(bytes(1 << 27))), "does not hold 3 numbers")
    refuse(change_column("chunk_us", squeeze(bytes(1 << 27))), "does not hold 5 numbers")


@pytest.mark.parametrize("name", [*PER_REQUEST, *PER_CHUNK])
@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda text: text[:-8], "damaged|does not hold"),
        (lambda text: text[: len(text) // 2], "damaged|does not hold"),
        (lambda text: "", "damaged|does not hold"),
        (lambda text: "AAAA" + text[4:], "damaged"),
        (lambda text: squeeze(b""), "does not hold"),
        (lambda text: squeeze(bytes(23)), "does not hold"),
        (lambda text: "é" * 8, "pattern"),
        (
            lambda text: base64.b64encode(base64.b64decode(text) + b"hidden").decode(),
            "does not hold",
        ),
    ],
)
def test_damaged_columns_are_refused(name, damage, match):
    refuse(change_column(name, damage(make().columns[name])), match)


def test_counts_that_are_stated_are_bounded_before_anything_is_decoded(monkeypatch):
    def fail(*args):
        raise AssertionError("decoded")

    stored = [change_column("outcome", squeeze(b""), **{name: value}) for name, value in (
        ("count", MAX_REQUESTS + 1), ("count", 10**30), ("count", -1),
        ("chunks", MAX_CHUNKS + 1), ("chunks", -1), ("chunks", "5"), ("count", 3.0),
    )]  # fmt: skip
    monkeypatch.setattr(request_samples, "unpack_ints", fail)
    for samples in stored:
        refuse(samples, "greater than or equal|less than or equal|valid integer|Unable to parse")


def test_counts_of_a_record_are_bounded_together_before_anything_is_decoded(monkeypatch):
    adapter = TypeAdapter(RequestPasses)
    stored = make().model_dump(mode="json", by_alias=True)
    assert len(adapter.validate_python([stored] * 4)) == 4
    monkeypatch.setattr(request_samples, "unpack_ints", lambda *args: pytest.fail("decoded"))
    for name, most in (("count", MAX_REQUESTS), ("chunks", MAX_CHUNKS)):
        half = stored | {name: most // 2 + 1}
        for passes in ([half, half], [half, half, stored | {name: -most}]):
            with pytest.raises(ValidationError, match=r"state more than .* together"):
                adapter.validate_python(passes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, -1) for name in COLUMNS if LEAST_NUMBERS.get(name, 0) >= 0),
        ("usage_prompt_tokens", -2),
        ("retokenized_tokens", -2),
        ("chunk_tokens", 0),
        ("outcome", 10),
        *((name, 10**15 + 1) for name in COLUMNS if name not in ("chunk_count", "outcome")),
        *((name, (1 << 63) - 1) for name in COLUMNS),
        *((name, -(1 << 63)) for name in COLUMNS),
    ],
)  # fmt: skip
def test_impossible_numbers_are_refused(name, value):
    column = [*COLUMNS[name]]
    column[0] = value
    with pytest.raises(ValidationError, match=r"request samples|chunks of the requests"):
        make(**{name: column})


def test_sums_that_overflow_are_refused():
    """Each number is allowed, and all together wrap around to a small positive sum."""
    count = 20_000
    columns = {name: np.zeros(count, np.int64) for name in PER_REQUEST}
    columns |= {"chunk_us": np.zeros(0, np.int64), "chunk_tokens": np.zeros(0, np.int64)}
    columns["scheduled_us"][:] = 10**15
    with pytest.raises(ValidationError, match="scheduled_us adds up to an impossible number"):
        make_request_samples(columns, **FACTS)
    columns["scheduled_us"][:] = 0
    columns["chunk_count"][0] = columns["output_tokens"][0] = count
    columns["chunk_us"] = np.full(count, 10**15)
    columns["chunk_tokens"] = np.ones(count, np.int64)
    with pytest.raises(ValidationError, match="chunk_us adds up to an impossible number"):
        make_request_samples(columns, **FACTS)
    columns["chunk_tokens"], columns["chunk_us"] = columns["chunk_us"], columns["chunk_tokens"]
    with pytest.raises(ValidationError, match="chunk_tokens adds up to an impossible number"):
        make_request_samples(columns, **FACTS)


@pytest.mark.parametrize(
    "counts", [[2, 0, 2], [2, 1, 3], [5, 0, 1 << 62], [1 << 62, 1 << 62, 1 << 62], [0, 0, 0]]
)
def test_chunks_that_do_not_add_up_are_refused(counts):
    with pytest.raises(ValidationError, match=r"not as many as stated|impossible number"):
        make(chunk_count=counts)


def test_chunks_that_wrap_around_to_the_stated_number_are_refused():
    """All 18,447 counts are allowed numbers, and their sum is 2 to the power of 64."""
    columns = {name: np.zeros(18_447, np.int64) for name in PER_REQUEST}
    columns |= {"chunk_us": np.zeros(0, np.int64), "chunk_tokens": np.zeros(0, np.int64)}
    columns["chunk_count"][:-1] = 10**15
    columns["chunk_count"][-1] = 2**64 - 18_446 * 10**15
    assert columns["chunk_count"].sum() == 0
    with pytest.raises(ValidationError, match="not as many as stated"):
        make_request_samples(columns, **FACTS)


def test_tokens_that_are_not_those_of_the_chunks_are_refused():
    """A record cannot state more tokens than it shows chunks for."""
    for tokens in ([5, 0, 7], [4, 1, 7], [4, 0, 6], [0, 0, 0]):
        with pytest.raises(ValidationError, match="are not the output_tokens"):
            make(output_tokens=tokens)
    with pytest.raises(ValidationError, match="are not the output_tokens"):
        make(chunk_count=[1, 1, 3])


def test_other_columns_are_refused():
    stored = make().model_dump(mode="json", by_alias=True)
    more = stored | {"columns": stored["columns"] | {"hidden": stored["columns"]["outcome"]}}
    refuse(more, "other columns")
    for name in COLUMNS.keys() - LATER_COLUMNS.keys():
        columns = {key: text for key, text in stored["columns"].items() if key != name}
        refuse(stored | {"columns": columns}, "other columns")


@pytest.mark.parametrize(
    "facts",
    [
        {"salt": "XYZ"},
        {"salt": "0" * 65},
        {"errors": ["x"] * 21},
        {"errors": ["x" * 1001]},
        {"rank": -1},
        {"counted_by": "guess"},
        {"lengths": "any"},
        {"count": 4},
        {"chunks": 4},
        {"client": {"lag_p99_us": -1, "lag_max_us": 0, "cpu_share": None}},
        {"more": 1},
    ],
)
def test_other_facts_are_refused(facts):
    stored = make().model_dump(mode="json", by_alias=True)
    with pytest.raises(ValidationError):
        RequestSamples.model_validate(stored | facts)
