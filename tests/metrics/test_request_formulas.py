"""Metrics of generation, value by value, from requests made by hand."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fixtures.requests import PROMPT, Timing, make_even_loop, make_generation_record, make_samples
from steelyard import words
from steelyard.case.load import Slo
from steelyard.metrics import metric_table, overview, passes, request_formulas, stats
from steelyard.metrics.declared_hardware import HARDWARE_METRICS
from steelyard.metrics.result import Result
from steelyard.plan import decode_bytes, flops
from steelyard.record.record import Record, Value
from steelyard.record.request_samples import DEFINITIONS, UNNAMED_DEFINITIONS

ONE = {"mode": "concurrency", "concurrency": 1}
PEAK = {
    "name": "chip",
    "flops_per_s": {"fp32": 1e9},
    "bandwidth_bytes_per_s": 1e8,
    "source": "datasheet",
}


LATENCIES = request_formulas.LATENCIES


def compute(record: Record) -> dict[str, Result]:
    """Return all metrics of a record."""
    return metric_table.compute_results(record)


def make_one_by_one(count: int = 14, **changes: Any) -> Record:
    """Return a record at concurrency 1 in which request i (from 0) takes 1 + i ms until its first
    token of four, and 10 ms for each further one. The window holds all but the first and last.
    """
    timings, time_s = [], 0.0
    for i in range(count):
        first = time_s + 0.001 * (i + 1)
        timings.append(Timing(time_s, [first + 0.01 * k for k in range(4)]))
        time_s = first + 0.03
    return make_generation_record(make_samples(timings), ONE, **changes)


def test_latencies_have_one_definition_each():
    timing = Timing(1.0, [2.0, 2.25, 4.0], due_s=1.25, sent_s=1.5, end_s=4.5)
    table = make_samples([timing, Timing(1.0, [3.0])]).table
    values = {name: compute_one(table).tolist() for name, compute_one in LATENCIES.items()}
    assert {name: value[0] for name, value in values.items()} == {
        "ttft": 1.0,  # from the schedule, not from sending
        "ttft_sent": 0.5,
        "tpot": 1.0,  # 2 s for the two tokens after the first
        "e2e": 3.5,  # to the end, not to the last token
        "queue_delay": 0.5,
    }
    assert np.isnan(values["tpot"][1])  # one token has no time per further token


def test_tokens_in_one_chunk_have_no_time_per_token_and_keep_no_limit_on_it():
    """A server that sends an answer at once says nothing of the time between its tokens."""
    timings = [
        Timing(float(t), [t + 0.25], tokens=[4]) if t % 2 else Timing(float(t), [t + 0.25, t + 0.5])
        for t in range(40)
    ]
    timings = [replace(one, end_s=one.scheduled_s + 1.0, asked=None) for one in timings]
    record = make_generation_record(make_samples(timings), ONE)
    tpot = LATENCIES["tpot"](make_samples(timings).table)
    assert np.isnan(tpot[1::2]).all()
    assert tpot[::2].tolist() == [0.25] * 20
    assert compute(record)["tpot_mean"].value == pytest.approx(0.25)
    slo = Slo(ttft_s=1.0, tpot_s=1.0)
    limited = record.model_copy(update={"case": record.case.model_copy(update={"slo": slo})})
    samples = limited.requests[0].model_copy(update={"lengths": "natural"})
    limited = limited.model_copy(update={"requests": [samples]})
    assert compute(limited)["goodput"].value == pytest.approx(0.5, abs=0.03)
    whole = make_generation_record(make_samples(timings[1::2]), ONE)
    assert compute(whole)["interactivity"].value is None


def test_tpot_counts_tokens_and_not_chunks():
    table = make_samples([Timing(0.0, [1.0, 2.0], tokens=[1, 4])]).table
    assert LATENCIES["tpot"](table).tolist() == [0.25]


def test_means_and_percentiles_of_the_window():
    record = make_one_by_one()
    results = compute(record)
    ttfts = [0.001 * i for i in range(2, 14)]  # requests 1 to 12
    assert results["window_requests"].value == 12
    assert results["ttft_mean"].value == pytest.approx(sum(ttfts) / 12)
    assert results["ttft_p50"].value == 0.007
    assert results["ttft_p50"].interval == (0.004, 0.011)  # ranks 3 and 10 of 12
    assert results["ttft_sent_p50"].value == 0.007
    assert results["queue_delay_p50"].value == 0.0
    assert results["tpot_p50"].value == pytest.approx(0.01)
    assert results["e2e_p50"].value == pytest.approx(0.037)
    assert results["interactivity"].value == pytest.approx(100.0)
    assert results["chunk_gap_p50"].value == pytest.approx(0.01)
    for name in ("ttft_p90", "tpot_p99", "chunk_gap_p90", "chunk_gap_p99"):
        assert results[name].value is None
    note = results["ttft_p90"].note
    assert note is not None
    assert words.render_text(note) == "needs 64 requests, the window has 12"
    assert results["ramp_time"].value == pytest.approx(0.031)
    assert results["drain_time"].value == pytest.approx(0.044)


def test_a_percentile_names_its_requests_and_loadgens_bound():
    note = compute(make_one_by_one())["ttft_p50"].note
    assert note is not None
    assert note.values == {"count": 12, "bound": 0.013}


def test_rates_are_what_arrives_over_the_window():
    record = make_one_by_one()
    results, window = compute(record), request_formulas.find_record_window(record)
    assert window is not None
    wall_s = window[1].wall_s
    assert wall_s == pytest.approx(sum(0.001 * i + 0.03 for i in range(2, 14)))
    assert results["output_tokens_per_s"].value == pytest.approx(12 * 4 / wall_s)
    assert results["tokens_per_s"].value == pytest.approx(12 * (4 + PROMPT) / wall_s)
    assert results["tokens_per_device_s"] == results["tokens_per_s"]
    assert results["samples_per_s"].value == pytest.approx(12 / wall_s)
    assert results["output_tokens_per_s"].interval is not None


def test_interval_of_a_mean_is_that_of_turns():
    values = np.array([1.0, 1.2, 0.9, 1.1, 1.0, 1.3, 0.8, 1.1, 1.0, 1.2, 1.1, 0.9])
    turns = values.reshape(6, 2).sum(axis=1)
    expected = stats.estimate_rate_interval(values.mean(), [2.0] * 6, turns.tolist())
    assert request_formulas.estimate_mean_interval(values, 2) == expected
    assert request_formulas.estimate_mean_interval(values, 3) is None  # four turns
    assert request_formulas.estimate_mean_interval(values[:0], 1) is None


def test_interactivity_has_the_reciprocal_interval():
    results = compute(make_noisy_loop())
    tpot, users = results["tpot_mean"], results["interactivity"]
    assert tpot.value
    assert tpot.interval
    assert users.interval
    assert users.value == pytest.approx(1 / tpot.value)
    assert users.interval == (1 / tpot.interval[1], 1 / tpot.interval[0])


def make_noisy_loop() -> Record:
    """Return a record at concurrency 2 whose requests take 1 s, 10 % more or less."""
    noise = np.random.default_rng(2).uniform(0.9, 1.1, 40).tolist()
    return make_generation_record(make_samples(make_even_loop(2, 40, noise=noise)))


def test_offline_waits_have_no_interval():
    timings = [Timing(0.0, [n // 2 + 0.5, n // 2 + 1.0]) for n in range(40)]
    results = compute(make_generation_record(make_samples(timings), {"mode": "offline"}))
    assert results["ttft_mean"].value == pytest.approx(10.0)
    assert results["ttft_mean"].interval is None
    assert results["ttft_p50"].value == 9.5
    assert results["ttft_p50"].interval is None
    assert results["tpot_p50"].interval == (0.5, 0.5)
    assert results["tpot_mean"].interval == (0.5, 0.5)
    assert results["output_tokens_per_s"].value == 4.0
    assert results["output_tokens_per_s"].interval == pytest.approx((4.0, 4.0))


def test_chunk_gaps_are_within_a_request():
    timings = [Timing(10.0 * t, [10 * t + 1, 10 * t + 1.5, 10 * t + 3.5]) for t in range(14)]
    record = make_generation_record(make_samples(timings), {"mode": "rate", "rate": 0.1})
    found = request_formulas.find_record_window(record)
    assert found is not None
    gaps, owner = request_formulas.list_chunk_gaps(*found)
    assert gaps.tolist() == [0.5, 2.0] * 12
    assert owner.tolist() == np.repeat(np.arange(1, 13), 2).tolist()
    assert compute(record)["chunk_gap_p50"].value == 0.5


def test_goodput_counts_requests_that_keep_every_limit():
    slo = Slo(ttft_s=0.0075, tpot_s=0.02).model_dump()
    record = make_one_by_one(case__slo=slo)
    found = request_formulas.find_record_window(record)
    assert found is not None
    good = 6  # those of 2 to 7 ms
    assert compute(record)["goodput"].value == pytest.approx(good / found[1].wall_s)
    strict = make_one_by_one(case__slo=Slo(ttft_s=1.0, tpot_s=0.005).model_dump())
    assert compute(strict)["goodput"].value == 0.0
    none = compute(make_one_by_one(case__slo=None))["goodput"]
    assert (none.value, none.note and none.note.code) == (None, "metric.no_slo")


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ({}, 12),
        ({"outcome": "cut"}, 11),
        ({"asked": 5}, 11),  # too short
    ],
)
def test_goodput_of_failed_and_short_answers(bad, good):
    timings = [Timing(float(t), [t + 0.25, t + 0.5]) for t in range(14)]
    timings[5] = Timing(5.0, [5.25, 5.5], **bad)
    record = make_generation_record(
        make_samples(timings), {"mode": "rate", "rate": 1.0}, case__slo={"ttft_s": 1.0}
    )
    assert compute(record)["goodput"].value == pytest.approx(good / 12.5)


def test_samples_of_another_definition_have_no_value():
    samples = make_one_by_one().requests[0]
    definitions = {**DEFINITIONS, "ttft": "sent-to-first-chunk/1"}
    changed = samples.model_copy(update={"definitions": definitions})
    results = compute(make_generation_record(changed, ONE))
    assert results["ttft_p50"].value is None
    assert results["ttft_mean"].value is None
    note = results["ttft_p50"].note
    assert note is not None
    assert note.code == "metric.other_definition"
    assert results["tpot_p50"].value is not None


def test_every_definition_that_a_metric_stands_on_must_be_known():
    samples = make_one_by_one().requests[0]

    def compute_with(**definitions: str) -> dict[str, Any]:
        stated = samples.model_copy(update={"definitions": {**DEFINITIONS, **definitions}})
        return compute(make_generation_record(stated, ONE, case__slo={"tpot_s": 1.0}))

    known = ("ttft_p50", "tpot_p50", "output_tokens_per_s", "tokens_per_s", "goodput")
    assert all(compute_with()[name].value for name in known)
    foreign = compute_with(tpot="other/1")
    assert [foreign[name].value for name in ("tpot_p50", "interactivity", "goodput")] == [None] * 3
    assert foreign["ttft_p50"].value is not None
    assert all(compute_with(window="end-time/9")[name].value is None for name in known)
    assert compute_with(output_tokens_per_s="whole-run/1")["output_tokens_per_s"].value is None
    assert compute_with(percentile="interpolated/9")["ttft_p50"].value is None


def test_samples_older_than_the_names_of_rates_have_their_first_definitions():
    samples = make_one_by_one().requests[0]
    older = {name: text for name, text in DEFINITIONS.items() if name not in UNNAMED_DEFINITIONS}
    record = make_generation_record(samples.model_copy(update={"definitions": older}), ONE)
    assert compute(record)["output_tokens_per_s"].value is not None


def test_chunks_of_several_tokens_make_decoding_no_faster():
    """Each token takes 10 ms, whether chunks have one token or two, or all tokens at once."""

    def measure(chunks: list[int]) -> tuple[float | None, float | None]:
        timings, begin = [], 0.0
        for _ in range(14):
            ends = [begin + 0.01 * sum(chunks[: i + 1]) for i in range(len(chunks))]
            timings.append(Timing(begin, ends, tokens=chunks))
            begin = ends[-1]
        hardware = make_hardware(PEAK)
        samples = make_samples(timings)
        results = compute(make_generation_record(samples, ONE, environment__hardware=hardware))
        return results["mbu"].value, results["mfu_prefill"].value

    one_by_one, in_pairs = measure([1, 1, 1, 1]), measure([1, 1, 2])
    assert one_by_one[0] == pytest.approx(in_pairs[0], rel=1e-3)
    assert measure([2, 2])[0] == pytest.approx(one_by_one[0], rel=0.02)  # other contexts
    assert measure([2, 2])[1] is None  # its first chunk was decoded too
    assert measure([4]) == (None, None)


def test_metrics_of_requests_are_only_those_of_generation():
    record = make_one_by_one()
    names = {metric.name for metric in metric_table.list_task_metrics(record.task)}
    assert {"ttft_p99", "goodput", "mbu", "exact_tokens"} <= names
    assert not names & {"p_infer_whole", "loss", "padded_share", "agreement"}
    assert all(result.value is not None or result.note for result in compute(record).values())


def test_prefill_and_decoding_at_concurrency_1():
    record = make_one_by_one(environment__hardware=make_hardware(PEAK))
    question, results = record.question, compute(record)
    counts = {"tokens": PROMPT, "logits": 1, "pairs": PROMPT * (PROMPT + 1) // 2}
    prefill_s = sum(0.001 * i for i in range(2, 14))
    expected = 12 * flops.count_causal_flops(question.model, counts) / prefill_s / 1e9
    assert results["mfu_prefill"].value == pytest.approx(expected)
    # three steps a request, behind 49, 50 and 51 tokens
    size = decode_bytes.count_decode_bytes(question.model, question.precision, 36, 12 * 150)
    assert size is not None
    assert results["mbu"].value == pytest.approx(size / (12 * 0.03) / 1e8)


def make_hardware(peak: dict[str, Any] | None) -> dict[str, Any]:
    """Return the facts of one device with these datasheet figures."""
    return {"accelerator": "cuda", "devices": [{"name": "chip", "uuid": None}], "peak": peak}


def test_decode_bytes_are_those_of_the_shapes():
    question = make_one_by_one().question
    model, precision = question.model, question.precision
    # layers: qkv 64 x (4 + 2 x 2) x 16, out 64 x 64, gate and up 64 x 320, down 160 x 64
    layer = 64 * 128 + 64 * 64 + 64 * 320 + 160 * 64
    assert decode_bytes.count_weight_bytes(model, precision) == 4 * (2 * layer + 512 * 64)
    assert decode_bytes.count_kv_bytes(model, precision) == 2 * 2 * 2 * 16 * 4
    fp8 = precision.model_copy(update={"matmul": "fp8", "weights": "fp8"})
    assert decode_bytes.count_weight_bytes(model, fp8) == 2 * layer + 2 * 512 * 64
    assert decode_bytes.count_kv_bytes(model, fp8) == 2 * 2 * 2 * 16 * 2
    small = precision.model_copy(update={"kv": "fp8"})
    assert decode_bytes.count_kv_bytes(model, small) == 2 * 2 * 2 * 16


def make_steps(kinds: str, time_s: float = 0.25) -> list[dict[str, Any]]:
    """Return engine steps of `time_s` each: p prefills 48 tokens, d decodes two sequences behind
    100 tokens, m does both.
    """
    out = []
    for step, kind in enumerate(kinds):
        counts = {
            "tokens": {"p": 48, "d": 2, "m": 50}[kind],
            "samples": 0,
            "logits": {"p": 1, "d": 2, "m": 3}[kind],
            "pairs": {"p": 1176, "d": 100, "m": 1276}[kind],
            "square": 1,
            "prefill_tokens": 0 if kind == "d" else 48,
            "sequences": 0 if kind == "p" else 2,
            "context_tokens": 0 if kind == "p" else 100,
        }
        times = {"start_s": step * time_s, "end_s": (step + 1) * time_s}
        host = {f"host_{name}": value for name, value in times.items()}
        facts = {"pass": "generate", "rank": 0, "step": step, "phases": {}, "counts": counts}
        out.append({**facts, **times, **host})
    return out


def make_stepped(kinds: str, **changes: Any) -> Record:
    """Return a record at concurrency 2, whose window is from 3 to 6 s, with these steps."""
    timings = make_even_loop(2, 10)
    base = {"samples": make_steps(kinds), "environment__hardware": make_hardware(PEAK)}
    return make_generation_record(make_samples(timings), **(base | changes))


def test_steps_tell_prefill_from_decoding():
    record = make_stepped("pppp" + "pdmdpdmd" * 2)
    found = request_formulas.find_record_window(record)
    assert found is not None
    begin, end = found[1].begin_s, found[1].end_s
    inside = [s for s in record.samples if begin <= s.start_s and s.end_s <= end]
    kinds = "".join("p" if not s.counts["sequences"] else "d" for s in inside)
    pure = [s for s in inside if not s.counts["sequences"]]
    decoding = [s for s in inside if not s.counts["prefill_tokens"]]
    assert "p" in kinds
    results, question = compute(record), record.question
    counts = {"tokens": 48, "logits": 1, "pairs": 1176}
    flops_of_step = flops.count_causal_flops(question.model, counts)
    assert results["mfu_prefill"].value == pytest.approx(flops_of_step / 0.25 / 1e9)
    size = decode_bytes.count_decode_bytes(question.model, question.precision, 1, 100)
    assert size is not None
    assert results["mbu"].value == pytest.approx(size / 0.25 / 1e8)
    assert len(pure) + len(decoding) < len(inside)  # mixed steps count in neither


@pytest.mark.parametrize(
    ("changes", "mfu_code", "mbu_code"),
    [
        ({"samples": []}, "phase.unknown", "phase.unknown"),
        ({"samples": make_steps("m" * 40)}, "phase.mixed", "phase.mixed"),
        ({"environment__hardware": make_hardware(None)}, "metric.no_peak", "metric.no_peak"),
        (
            {"environment__hardware": make_hardware(PEAK | {"bandwidth_bytes_per_s": None})},
            None,
            "metric.no_bandwidth",
        ),
        ({"case__division": "open"}, "metric.not_counted", "metric.not_counted"),
    ],
)
def test_what_cannot_be_told_has_a_reason(changes, mfu_code, mbu_code):
    results = compute(make_stepped("pd" * 20, **changes))
    codes = [
        result.note.code if result.value is None and result.note else None
        for result in (results["mfu_prefill"], results["mbu"])
    ]
    assert codes == [mfu_code, mbu_code]


def make_counter(period_s: float = 0.5) -> list[dict[str, Any]]:
    """Return telemetry of a device that draws 100 W until 14 s and 40 W then, by its counter."""
    times = [period_s * i for i in range(int(40 / period_s))]
    joules = [100 * min(t, 14.0) + 40 * max(0.0, t - 14.0) for t in times]
    columns = {"t_s": times, "energy_j": joules}
    return [{"device": "chip:0", "host": "a", "period_s": period_s, "columns": columns}]


RANK = {"rank": 0, "host": "a", "device": "chip:0", "status": "done"}


def test_energy_per_output_token():
    record = make_stepped("pd" * 20, telemetry=make_counter(), ranks=[RANK])
    span = passes.find_rate_span(record)
    assert span is not None
    begin, end = span.bounds[0]
    assert begin < 14 < end
    used = 100 * (14 - begin) + 40 * (end - 14)
    results = compute(record)
    assert results["energy"].value == pytest.approx(used)
    expected = used / span.counts["output_tokens"]
    assert results["energy_per_output_token"].value == pytest.approx(expected)
    assert results["energy_per_token"].value == pytest.approx(used / span.counts["tokens"])


def test_energy_of_a_phase_needs_stretches_that_telemetry_can_see():
    timings = make_even_loop(2, 20)
    samples = make_samples(timings)
    # prefill alone until 4 s (14 s of the run), then decoding alone
    steps = make_steps("p" * 16 + "d" * 24)
    record = make_generation_record(samples, samples=steps, telemetry=make_counter(), ranks=[RANK])
    found = request_formulas.find_record_window(record)
    assert found is not None
    results = compute(record)
    assert results["energy_prefill_per_token"].value == pytest.approx(100 * 0.25 / 48)
    assert results["energy_decode_per_token"].value == pytest.approx(40 * 0.25 / 2)
    alternating = make_stepped("pd" * 20, telemetry=make_counter(), ranks=[RANK])
    short = compute(alternating)["energy_decode_per_token"]
    assert (short.value, short.note and short.note.code) == (None, "phase.short")


DECLARED = {"name": "http", "details": {"is_external": True, "device": "8x chip"}}


def test_hardware_that_is_only_declared_has_no_metrics_and_no_headline():
    record = make_stepped("pd" * 20, telemetry=make_counter(), ranks=[RANK], engine=DECLARED)
    results = compute(record)
    for name in HARDWARE_METRICS & results.keys():
        assert results[name].value is None, name
        note = results[name].note
        assert note is not None
        assert note.code == "metric.not_seen"
    assert {"mem", "mfu", "mbu", "energy"} <= results.keys()
    assert results["output_tokens_per_s"].value is not None
    assert overview.make_overview_rows([record])[0].accelerator == "8x chip (declared)"


def test_declared_hardware_is_never_the_best():
    def make_proven(**changes: Any) -> Record:
        record = make_noisy_loop()
        values = metric_table.derive_metrics(record)
        return record.model_copy(update={"metrics": values, **changes})

    seen = make_proven()
    external = seen.engine.model_validate(DECLARED)
    declared = make_proven(engine=external)
    rows = overview.make_overview_rows([declared])
    assert rows[0].is_proven
    assert overview.find_best_rows(rows) == []
    both = overview.make_overview_rows([seen, declared])
    assert [row.first_record.engine.name for row in overview.find_best_rows(both)] == [
        "transformers"
    ]
    assert overview.compare_accelerators(both) == []


def test_metrics_are_stored_and_the_same_after_reading():
    record = make_noisy_loop()
    values = metric_table.derive_metrics(record)
    stored = {name: value.model_dump(mode="json") for name, value in values.items()}
    again = {
        name: Value.model_validate(value) for name, value in json.loads(json.dumps(stored)).items()
    }
    assert again == values
