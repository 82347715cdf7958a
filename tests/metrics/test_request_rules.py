"""Validity rules of generation: each fault gets its code, and honest requests get none."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fixtures.requests import SALT, Timing, make_even_loop, make_generation_record, make_samples
from steelyard import words
from steelyard.case.precision import GENERATION_PRESETS
from steelyard.data.request_outcomes import OUTCOMES
from steelyard.metrics import (
    answer_rules,
    estimates,
    metric_table,
    missing_evidence,
    record_fields,
    request_rules,
    standing,
    validity,
)
from steelyard.record.record import Record
from steelyard.record.request_samples import ClientFacts, RequestSamples
from steelyard.record.run_facts import RankFacts
from steelyard.tasks.generate.answers import GenerateOutputs

NOISE = np.random.default_rng(7).uniform(0.9, 1.1, 80).tolist()
TIMINGS = make_even_loop(2, 80, noise=NOISE)  # four tokens each


def judge(record: Record) -> validity.Judgement:
    """Return what follows from a record."""
    return validity.judge_as_messages(record, metric_table.derive_metrics(record))


def list_codes(record: Record) -> list[str]:
    """Return the codes of the reasons against a record, without those of hosts and clocks that a
    made-up record does not have.
    """
    return [code for code, _ in judge(record).reasons]


def list_notes(record: Record) -> set[str]:
    """Return the codes of a record's notes."""
    return {note.code for note in judge(record).notes}


def describe(record: Record, code: str) -> str:
    """Return the sentence of the reason with this code."""
    return next(words.render_text(text) for one, text in judge(record).reasons if one == code)


def make_checked(largest: float | None = 0.0, numbers: int = 80, **changes: Any) -> dict[str, Any]:
    """Return the outputs of a run of 80 requests whose first answers were kept and checked."""
    kept = {"numbers": list(range(numbers)), "tokens": [[1, 2, 3, 4]] * numbers}
    distances = {
        "numbers": list(range(numbers)),
        "compared": [4] * numbers,
        "exact": [4] * numbers,
        "largest": [0.0] * (numbers - 1) + [largest],
    }
    return {"passes": {"generate": kept, "check": {**distances, **changes}}}


def make(
    timings: list[Timing] = TIMINGS,
    facts: dict[str, Any] | None = None,
    load: dict[str, Any] | None = None,
    is_checked_here: bool = True,
    **changes: Any,
) -> Record:
    """Return a record of these requests, whose answers were checked: in a pass of its own, or by
    the server's own log-probabilities.
    """
    samples = make_samples(timings, **(facts or {}))
    record = make_generation_record(samples, load, **({"outputs": make_checked()} | changes))
    if not is_checked_here:
        return record
    window = record.passes[0].model_copy(update={"pass_name": "check"})
    return record.model_copy(update={"passes": [*record.passes, window]})


def change_one(**changes: Any) -> list[Timing]:
    """Return the requests with other fields of the ninth."""
    return [*TIMINGS[:8], replace(TIMINGS[8], **changes), *TIMINGS[9:]]


def test_honest_requests_are_valid():
    record = make()
    judgement = judge(record)
    assert judgement.reasons == ()
    assert {
        "completed_requests",
        "asked_lengths",
        "lengths_of_question",
        "agreeing_tokens",
        "unbound_client",
        "steady_window",
        "possible_requests",
        "right_answers",
    } <= {check.name for check in judgement.checks}
    assert standing.derive_status(False, list_codes(record)) == "valid"


@pytest.mark.parametrize("outcome", [name for name in OUTCOMES if name != "ok"])
def test_every_other_end_is_a_reason_that_names_it(outcome):
    kept = make_checked(numbers=8)
    record = make(change_one(outcome=outcome), {"errors": ["500 Server Error"]}, outputs=kept)
    assert list_codes(record) == ["requests"]
    text = describe(record, "requests")
    name = words.render_text(words.Message(request_rules.OUTCOME_CODES[outcome]))
    assert text == (
        f"1 of 80 requests did not end regularly: 1 {name}; the first error: 500 Server Error"
    )


def test_a_regular_end_without_a_token_is_empty():
    record = make(
        change_one(chunks_s=[], tokens=[], end_s=99.0, output=0, asked=4),
        outputs=make_checked(numbers=8),
        wall_s=99.0,
    )
    assert "1 without any token" in describe(record, "requests")


def test_missing_requests_are_counted():
    record = make(scope={"kind": "full", "requests": 90})
    assert describe(record, "requests").startswith("10 of 90 requests did not end regularly: 10 mi")
    window = make(scope={"kind": "window", "sample": 80, "requests": 90})
    assert list_codes(window) == []


def test_a_refused_setting_names_natural_lengths():
    timings = [replace(one, outcome="refused") for one in TIMINGS]
    errors = ["422: Unexpected fields in the request: {'ignore_eos'}"]
    record = make(timings, {"errors": errors}, outputs={})
    assert list_codes(record)[0] == "requests"
    assert "question.data.lengths=natural" in describe(record, "requests")
    natural = make(timings, {"errors": errors, "lengths": "natural"}, outputs={})
    assert "lengths=natural" not in describe(natural, "requests")


def test_requests_that_are_not_there_at_all():
    record = make_generation_record(None)
    assert list_codes(record)[0] == "requests"


@pytest.mark.parametrize("asked", [3, 5])
def test_another_length_than_asked(asked):
    record = make(change_one(asked=asked))
    assert list_codes(record) == ["short_output"]
    assert describe(record, "short_output") == (
        f"1 of 80 answers have another number of tokens than asked: request 8 has 4 of {asked}"
    )


def test_natural_answers_may_be_shorter_and_not_longer():
    assert list_codes(make(change_one(asked=9), {"lengths": "natural"})) == []
    assert list_codes(make(change_one(asked=3), {"lengths": "natural"})) == ["short_output"]


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        ({"prompt_tokens": 1024}, "prompt_tokens"),
        ({"output_tokens": 256}, "output_tokens"),
        ({"output_tokens": (5, 9)}, "output_tokens"),
        ({"lengths": "natural"}, "lengths"),
    ],
)
def test_lengths_are_those_of_the_question(data, fields):
    record = make_generation_record(make_samples(TIMINGS), data=data, outputs=make_checked())
    question = {**record.case.question}
    question["model"] = {**question["model"], "positions": 4096}
    record = record.model_copy(
        update={"case": record.case.model_copy(update={"question": question})}
    )
    assert list_codes(record) == ["token_counts"]
    assert describe(record, "token_counts").endswith(f": {fields}")


@pytest.mark.parametrize(
    ("timings", "facts", "part"),
    [
        (TIMINGS, {"counted_by": "chunks"}, "a chunk may carry any number"),
        (change_one(usage_output=5), {}, "usage counts 5 output tokens, and its chunks carry 4"),
        (change_one(usage_prompt=53), {}, "the server counts 53 tokens"),
        (change_one(usage_prompt=43), {}, "the server counts 43 tokens"),
        (
            [replace(one, tokens=[2, 1, 1, 1], asked=5) for one in TIMINGS],
            {},
            "was kept with 4 tokens, and 5 were counted",
        ),
    ],
)
def test_counts_that_disagree(timings, facts, part):
    record = make(timings, facts)
    assert list_codes(record) == ["token_counts"]
    assert part in describe(record, "token_counts")


def test_a_server_may_add_a_few_special_tokens():
    for usage in (44, 48, 52):
        assert list_codes(make(change_one(usage_prompt=usage))) == []
    long = [replace(one, prompt=1000, usage_prompt=1010) for one in TIMINGS]
    assert list_codes(make_long(long)) == []
    assert list_codes(make_long([replace(one, usage_prompt=1011) for one in long])) == [
        "token_counts"
    ]


def make_long(timings: list[Timing]) -> Record:
    """Return a record of these requests, with a model that has positions for them."""
    record = make_generation_record(make_samples(timings), data={"prompt_tokens": (48, 48)})
    question = {**record.case.question}
    question["model"] = {**question["model"], "positions": 4096}
    question["data"] = {**question["data"], "prompt_tokens": (1000, 1000)}
    case = record.case.model_copy(update={"question": question})
    return record.model_copy(update={"case": case, "outputs": make_checked()})


@pytest.mark.parametrize(
    ("source", "text", "code"),
    [
        ("Llama-2-7b-hf", 4, []),
        ("Llama-2-7b-hf", 5, ["token_counts"]),
        ("random", 5, []),  # random weights make tokens that no text has
        ("unknown", 5, []),
    ],
)
def test_tokenized_text_counts_with_trained_weights_only(source, text, code):
    timings = [replace(one, retokenized=text) for one in TIMINGS]
    assert list_codes(make(timings, weights={"source": source})) == code


def test_natural_answers_may_end_with_a_token_that_is_no_text():
    timings = [replace(one, retokenized=3) for one in TIMINGS]
    weights = {"source": "Llama-2-7b-hf"}
    assert list_codes(make(timings, weights=weights)) == ["token_counts"]
    assert list_codes(make(timings, {"lengths": "natural"}, weights=weights)) == []


@pytest.mark.parametrize(
    ("division", "cached", "codes"),
    [("closed", 38, []), ("closed", 39, ["warm_cache"]), ("open", 3840, [])],
)
def test_cached_tokens_are_one_percent_at_most(division, cached, codes):
    engine = {"name": "vllm", "details": {"cached_tokens": cached}}
    record = make(engine=engine, case__division=division)
    assert list_codes(record) == codes


def test_prompts_need_64_bits_of_salt():
    assert list_codes(make(facts={"salt": SALT[:16]})) == []
    assert list_codes(make(facts={"salt": SALT[:15]})) == ["warm_cache"]


def test_a_server_without_a_counter_gets_a_note():
    client = ClientFacts(lag_p99_us=100, lag_max_us=200, cpu_share=0.1)
    assert "note.cache_unknown" in list_notes(make(facts={"client": client}))
    assert "note.cache_unknown" not in list_notes(make())


@pytest.mark.parametrize(
    ("client", "is_bound"),
    [
        ({"lag_p99_us": 10_000}, False),
        ({"lag_p99_us": 10_001}, True),
        ({"cpu_share": 0.8}, False),
        ({"cpu_share": 0.81}, True),
        ({"mock_requests": 10, "mock_error_us": (1, 10_000, 20_000)}, False),
        ({"mock_requests": 10, "mock_error_us": (1, 10_001, 20_000)}, True),
    ],
)
def test_a_client_that_does_not_keep_up(client, is_bound):
    facts = ClientFacts(**({"lag_p99_us": 0, "lag_max_us": 0, "cpu_share": None} | client))
    # 0.25 s to the first token: 1 % is less than 10 ms
    record = make(facts={"client": facts})
    assert list_codes(record) == (["client_bound"] if is_bound else [])
    smoke = make(facts={"client": facts}, case__size="smoke")
    assert list_codes(smoke) == []
    assert ("note.client_slow" in list_notes(smoke)) is is_bound


@pytest.mark.parametrize(("late_s", "is_bound"), [(0.0024, False), (0.0030, True)])
def test_late_sends_are_compared_with_the_time_to_the_first_token(late_s, is_bound):
    # 1 % of a mean TTFT of about 0.25 s is 2.5 ms, more than 2 ms
    timings = [replace(one, sent_s=one.scheduled_s + late_s) for one in TIMINGS]
    assert list_codes(make(timings)) == (["client_bound"] if is_bound else [])


def test_a_wait_for_a_slot_is_not_the_clients():
    # a closed loop whose slots are free a second before they are scheduled is none; an open one is
    timings = [Timing(float(t), [t + 1.5], due_s=t + 0.5 if t else 0.0) for t in range(80)]
    load = {"mode": "rate", "rate": 1.0, "arrivals": "constant", "max_concurrency": 1}
    kept = {"numbers": [*range(8)], "tokens": [[1]] * 8}
    checked = {"numbers": [*range(8)], "compared": [1] * 8, "exact": [1] * 8, "largest": [0.0] * 8}
    outputs = {"passes": {"generate": kept, "check": checked}}
    assert list_codes(make(timings, load=load, outputs=outputs)) == []


def make_overload(count: int = 80) -> list[Timing]:
    """Return requests that arrive every 0.1 s at one slot that serves each in 0.5 s."""
    return [
        Timing(t / 10, [t / 2 + 0.25, t / 2 + 0.5], due_s=max(t / 10, t / 2)) for t in range(count)
    ]


def test_an_open_loop_beyond_capacity_is_unsteady():
    load = {"mode": "rate", "rate": 10.0, "arrivals": "constant", "max_concurrency": 1}
    record = make(make_overload(), load=load, outputs={})
    assert "unsteady" in list_codes(record)
    # TTFT grows to half a minute: it is not the half second of service
    ttft = (
        make_samples(make_overload()).table.first_s
        - make_samples(make_overload()).table.scheduled_s
    )
    assert ttft.mean() == pytest.approx(16.05)
    smoke = make(make_overload(), load=load, outputs={}, case__size="smoke")
    assert "unsteady" not in list_codes(smoke)


def test_drifting_times_per_token_are_unsteady():
    noise = [1 + 0.01 * number for number in range(80)]
    timings = make_even_loop(2, 80, noise=noise)
    assert list_codes(make(timings)) == ["unsteady"]


def test_a_trace_gets_a_note():
    load = {"mode": "rate", "arrivals": "trace", "max_concurrency": 1}
    record = make_generation_record(make_samples(make_overload()), load, data={"source": "trace"})
    assert "unsteady" not in list_codes(record)
    assert "note.trace" in list_notes(record)


@pytest.mark.parametrize(
    ("timings", "load", "wall_s", "part"),
    [
        (TIMINGS, None, 1.0, "and the pass at 1.000 s"),
        (TIMINGS, {"mode": "concurrency", "concurrency": 1}, None, "2 requests were in flight"),
        (TIMINGS, {"mode": "rate", "rate": 4.0}, None, "by the load it is at"),
        (TIMINGS, {"mode": "offline"}, None, "by the load it is at 0.0000 s"),
        (
            make_overload(),
            {"mode": "rate", "rate": 11.0, "arrivals": "constant", "max_concurrency": 1},
            None,
            "request 1 is scheduled at 0.1000 s; by the load it is at 0.0909 s",
        ),
        # one after another is no load of four at a time
        (
            [Timing(float(t), [t + 0.5, t + 1.0]) for t in range(80)],
            {"mode": "concurrency", "concurrency": 4},
            None,
            "request 1 is scheduled at 1.0000 s; by the load it is at 0.0000 s",
        ),
        # a client that is late cannot write that it waited for a slot
        (
            [Timing(t / 10, [t / 10 + 0.5], due_s=t / 10 + 0.3) for t in range(80)],
            {"mode": "rate", "rate": 10.0, "arrivals": "constant"},
            None,
            "request 0 is due at 0.3000 s, when a slot had been free for it",
        ),
        # Poisson arrivals are those that follow from the question's seed
        (
            [Timing(t / 10, [t / 10 + 0.5]) for t in range(80)],
            {"mode": "rate", "rate": 10.0, "arrivals": "poisson"},
            None,
            "request 0 is scheduled at 0.0000 s",
        ),
    ],
)
def test_times_that_cannot_be_true(timings, load, wall_s, part):
    record = make(timings, load=load, wall_s=wall_s, outputs={})
    assert "implausible" in list_codes(record)
    assert part in describe(record, "implausible")


def test_a_slot_may_be_used_again_at_once():
    table = make_samples(TIMINGS).table
    assert request_rules.count_in_flight(table) == 2


def test_a_rate_above_the_peak_is_implausible():
    peak = {"name": "chip", "flops_per_s": {"fp32": 1e6}, "source": "datasheet"}
    hardware = {"accelerator": "cuda", "devices": [{"name": "chip", "uuid": None}], "peak": peak}
    assert list_codes(make(environment__hardware=hardware)) == ["implausible"]
    fast = hardware | {"peak": peak | {"flops_per_s": {"fp32": 1e12}}}
    assert list_codes(make(environment__hardware=fast)) == []
    # the peak of the client's device says nothing of a server elsewhere
    engine = {"name": "http", "details": {"is_external": True}}
    assert list_codes(make(environment__hardware=hardware, engine=engine)) == []


@pytest.mark.parametrize(
    ("precision", "largest", "codes"),
    [
        ("fp32", 0.01, []),
        ("fp32", 0.011, ["wrong_answers"]),
        ("bf16", 0.5, []),
        ("bf16", 0.51, ["wrong_answers"]),
        ("fp8", 1.0, []),
        ("fp32", None, ["wrong_answers"]),
    ],
)
def test_answers_are_within_the_tolerance_of_the_precision(precision, largest, codes):
    record = make(outputs=make_checked(largest))
    question = {**record.case.question, "precision": GENERATION_PRESETS[precision].model_dump()}
    case = record.case.model_copy(update={"question": question})
    assert list_codes(record.model_copy(update={"case": case})) == codes


def test_every_precision_of_generation_has_a_tolerance():
    matmuls = {preset.matmul for preset in GENERATION_PRESETS.values()}
    assert matmuls <= answer_rules.ANSWER_TOLERANCE_NATS.keys()


def test_answers_that_were_not_checked_are_invalid_unless_nobody_knows_the_weights():
    unchecked = {"passes": {"generate": make_checked()["passes"]["generate"]}}
    record = make(outputs=unchecked)
    assert list_codes(record) == ["unchecked"]
    assert "--set engine.logprobs=true" in describe(record, "unchecked")
    unknown = make(outputs=unchecked, weights={"source": "unknown"})
    assert list_codes(unknown) == []
    assert "note.weights_unknown" in list_notes(unknown)
    assert list_codes(make(outputs=make_checked(numbers=7))) == ["unchecked"]
    assert list_codes(make(outputs=make_checked(numbers=8))) == []  # a tenth


@pytest.mark.parametrize(
    ("precision", "wrong_tokens", "codes"),
    [
        ("fp32", 6, []),
        ("fp32", 7, ["wrong_answers"]),
        ("bf16", 64, []),
        ("bf16", 65, ["wrong_answers"]),
    ],
)
def test_so_many_tokens_are_the_likeliest_as_noise_leaves(precision, wrong_tokens, codes):
    """No token is far from the likeliest, but too many are not it."""
    exact = [4] * 80
    for number in range(wrong_tokens):
        exact[number % 80] -= 1
    record = make(outputs=make_checked(0.005, exact=exact), case__precision=precision)
    question = {**record.case.question}
    question["precision"] = {**question["precision"], "matmul": precision, "name": precision}
    case = record.case.model_copy(update={"question": question})
    assert list_codes(record.model_copy(update={"case": case})) == codes


def test_answers_tokenized_again_may_have_another_number_of_tokens():
    """A server that gives no ids: its text of four tokens may be written with three."""
    outputs = make_checked()
    outputs["passes"]["generate"]["tokens"] = [[1, 2, 3]] * 80
    outputs["passes"]["check"] |= {"compared": [3] * 80, "exact": [3] * 80}
    assert list_codes(make(outputs=outputs, facts={"counted_by": "usage"})) == []
    assert list_codes(make(outputs=outputs)) == ["token_counts"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"largest": []}, "one value for each request"),
        ({"numbers": [0] * 80}, "names? a request twice"),
        ({"exact": [5] * 80}, "more tokens are the likeliest than were compared"),
    ],
)
def test_answers_that_contradict_themselves_are_refused(change, match):
    outputs = make_checked()
    outputs["passes"]["check"] |= change
    with pytest.raises(ValueError, match=match):
        GenerateOutputs.model_validate(outputs)


def test_answers_left_out_of_the_check():
    outputs = make_checked(compared=[4] * 79 + [3], exact=[4] * 79 + [3])
    assert "note.own_logprobs" in list_notes(make(outputs=outputs, is_checked_here=False))
    checked = make(outputs=outputs)
    assert list_codes(checked) == ["wrong_answers"]
    assert "note.own_logprobs" not in list_notes(checked)


@pytest.mark.parametrize(
    ("numbers", "compared", "lengths", "codes"),
    [
        (80, [4] * 80, "exact", []),
        (8, [4] * 8, "exact", []),  # a tenth
        (7, [4] * 7, "exact", ["unchecked"]),
        (80, [1] * 80, "exact", ["unchecked"]),  # the server's best token of each
        (80, [4] * 79 + [3], "exact", ["unchecked"]),
        (80, [4] * 79 + [3], "natural", []),  # the token that ends it
        (80, [4] * 79 + [2], "natural", ["unchecked"]),
    ],
)
def test_a_servers_own_log_probabilities_must_cover_whole_answers(
    numbers: int, compared: list[int], lengths: str, codes: list[str]
) -> None:
    outputs = make_checked(numbers=numbers, compared=compared, exact=compared)
    record = make(outputs=outputs, facts={"lengths": lengths}, is_checked_here=False)
    assert list_codes(record) == codes


def test_a_client_that_was_not_measured_gets_a_note():
    client = {"lag_p99_us": 1, "lag_max_us": 2, "cpu_share": 0.1}
    measured = client | {"mock_requests": 9, "mock_error_us": (1, 2, 3)}
    code = "note.client_not_measured"
    assert code in list_notes(make(facts={"client": ClientFacts(**client)}))
    assert code not in list_notes(make(facts={"client": ClientFacts(**measured)}))
    assert code not in list_notes(make())  # an engine in this process


def test_chunks_that_come_in_bursts_get_a_note():
    """Three of four tokens are read together: the times between them are those of the reader."""
    burst = [Timing(t.scheduled_s, [t.chunks_s[0] + 1e-6 * i for i in range(4)]) for t in TIMINGS]
    assert "note.bursts" in list_notes(make(burst))
    assert "note.bursts" not in list_notes(make())


def test_log_probabilities_that_a_server_was_asked_for_and_did_not_report():
    engine = {"name": "http", "details": {"is_external": True, "logprobs": True}}
    outputs = {"passes": {"generate": make_checked()["passes"]["generate"]}}
    unknown = {"outputs": outputs, "weights": {"source": "unknown"}, "is_checked_here": False}
    assert "unchecked" in list_codes(make(engine=engine, **unknown))
    assert list_codes(make(engine={"name": "http", "details": {}}, **unknown)) == []


def test_a_closed_loop_whose_first_wave_never_ends_has_no_steady_window():
    """One of the first four requests takes as long as all others together."""
    timings = [Timing(0.0, [1.0, 100.0]), *(Timing(0.0, [0.5, 1.0]) for _ in range(3))]
    timings += [
        Timing(1.0 + i // 3, [1.5 + i // 3, 2.0 + i // 3]) for i in range(28 - len(timings))
    ]
    load = {"mode": "concurrency", "concurrency": 4}
    record = make(timings, load=load, outputs={})
    assert "unsteady" in list_codes(record)
    assert "few_steps" not in list_codes(record)
    assert "fewer than three were issued after the first 4" in describe(record, "unsteady")
    short = make(timings[:27], load=load, outputs={})
    assert "unsteady" not in list_codes(short)
    assert "few_steps" in list_codes(short)


def test_declared_hardware_gets_a_note():
    engine = {"name": "http", "details": {"is_external": True, "device": "8x chip"}}
    record = make(engine=engine)
    note = next(one for one in judge(record).notes if one.code == "note.declared")
    assert "8x chip is declared, not seen" in words.render_text(note)


def test_rates_for_each_device_are_over_the_devices_that_are_declared():
    def make_declared(**details: Any) -> Record:
        return make(engine={"name": "http", "details": {"is_external": True, **details}})

    one = metric_table.compute_results(make_declared(device="chip"))
    record = make_declared(device="chip", devices=8)
    eight = metric_table.compute_results(record)
    assert eight["output_tokens_per_s"].value == one["output_tokens_per_s"].value
    assert one["tokens_per_device_s"].value == 8 * eight["tokens_per_device_s"].value
    note = next(one for one in judge(record).notes if one.code == "note.declared")
    assert "it runs on 8 × chip is declared" in words.render_text(note)
    assert estimates.list_device_names(record) == ["8 × chip (declared)"]
    # what an engine that was started here says of devices changes nothing
    ours = make(engine={"name": "transformers", "details": {"devices": 8}})
    assert metric_table.compute_results(ours)["tokens_per_device_s"].value == (
        one["tokens_per_device_s"].value
    )
    none = make(engine={"name": "http", "details": {"is_external": True}})
    assert "note.undeclared" in list_notes(none)


def test_short_runs_are_unproven():
    few = make_even_loop(2, 11)
    checked = make_checked(numbers=11)
    record = make(few, outputs=checked)
    assert list_codes(record) == ["few_steps"]
    assert describe(record, "few_steps").startswith(
        "the window has 3 turns of the load, which are as many requests each as run together;"
        " at least 5 are needed"
    )
    offline = make(few, load={"mode": "offline"}, outputs=checked)
    assert describe(offline, "few_steps").startswith("an interval of an offline run needs")
    fewest = make(few[:4], outputs=make_checked(numbers=4))
    assert list_codes(fewest) == ["few_steps"]
    assert "too few for a window" in describe(fewest, "few_steps")
    assert list_codes(make(few, outputs=checked, case__size="smoke")) == []


def test_a_wide_interval_is_invalid():
    assert list_codes(make(case__max_interval=0.2)) == []
    assert list_codes(make(case__max_interval=0.001)) == ["interval"]


STRIPPED: dict[str, Callable[[Record], dict[str, Any]]] = {
    "request samples (pass generate)": lambda record: {"requests": []},
    "the answers that were checked (pass generate)": lambda record: {
        "outputs": {"passes": {"check": record.outputs["passes"]["check"]}},
        "passes": [
            *record.passes,
            record.passes[0].model_copy(update={"pass_name": "check"}),
        ],
    },
}


@pytest.mark.parametrize("sentence", STRIPPED)
def test_what_was_taken_out_of_a_record_is_noticed(sentence):
    whole = make()
    assert not [text for text in list_missing(whole) if "request samples" in text]
    stripped = whole.model_copy(update=STRIPPED[sentence](whole))
    assert [text for text in list_missing(stripped) if sentence in text]


def list_missing(record: Record) -> list[str]:
    """Return the sentences on evidence that a record lacks."""
    return missing_evidence.list_missing_evidence(record, judge(record))


def test_servers_have_no_matmul_rates():
    for is_external in (True, False, None):
        engine = {"name": "http", "details": {"is_external": is_external}}
        record = make(engine=engine).model_copy(update={"ranks": [RankFacts(rank=0)]})
        without = [text for text in list_missing(record) if "matmul rates (rank 0)" in text]
        assert len(without) == (is_external is None)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("unknown", "the case has no gate; the source of the weights is unknown"),
        ("random", "the case has no gate; the weights are random"),
        ("safetensors", "the case has no gate"),
    ],
)
def test_unknown_weights_are_not_called_random(source, text):
    unevaluated = judge(make(weights={"source": source})).unevaluated
    assert words.render_text(unevaluated) == text


def test_stamps_of_the_library_are_no_setting():
    details = {"scheduling": "continuous batching", "library_stamps": {"mean_us": 3.5}}
    fields = record_fields.list_setting_fields(make(engine={"name": "t", "details": details}))
    assert fields["engine.details.scheduling"] == "continuous batching"
    assert not [name for name in fields if "library_stamps" in name]


def test_samples_without_facts_on_the_client_are_noticed():
    record = make(facts={"client": None})
    assert "note.no_client_facts" in list_notes(record)
    assert [text for text in list_missing(record) if "request samples" in text]


def test_rules_of_the_kind_are_all_here():
    rules = make().task.kind_row.rules
    names = [rule.rpartition(":")[2] for rule in rules]
    known = {**vars(request_rules), **vars(answer_rules)}
    assert [name for name in names if name not in known] == []
    assert isinstance(make_samples(TIMINGS), RequestSamples)
