"""Metrics and validity of records assembled from exact samples: every number worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from steelyard import words
from steelyard.case import resolve
from steelyard.metrics import metric_table as metrics
from steelyard.plan.degrees import Plan
from steelyard.record import record
from steelyard.record.record import EngineFacts, Record, Scope
from steelyard.record.run_facts import (
    CalibrationFacts,
    EngineDetails,
    Environment,
    TelemetrySeries,
)
from steelyard.run import assemble
from steelyard.run.failure import Failure, RankResults
from steelyard.run.messages import BorderMessage, CalibrationMessage
from steelyard.run.worker_files import RankFile
from steelyard.words import Message

GIB = 1 << 30
TOKENS_OF_STEPS = [100, 100, 100, 100, 100, 100]  # tokens of each step of one rank
PEAK = {"name": "chip", "flops_per_s": {"bf16": 4e6}, "source": "datasheet"}


def resolve_small_case(**changes: Any) -> resolve.ResolvedCase:
    """Return the MMLU case with a model of round numbers: 2 layers, hidden 8, 2 heads, ffn 16,
    vocabulary 32.
    """
    sets = [
        "layers=2",
        "hidden=8",
        "heads=2",
        "kv_heads=2",
        "ffn=16",
        "vocab=32",
        "nominal_parameters=1000",
    ]
    settings = [f"question.model.{setting}" for setting in sets] + list(changes.pop("settings", []))
    # without origins, as if all values stood in the case file
    return replace(resolve.resolve_case("llama2-7b-mmlu", settings=settings, **changes), origins={})


def make_rank_file(
    rank: int = 0,
    compute_s: float = 0.5,
    step_s: float = 1.0,
    hidden_s: float = 0.0,
    **overrides: Any,
) -> dict[str, Any]:
    """Return the content of one rank's file: passes val (from 10 s) and infer (from 30 s) of six
    steps each.

    A step of infer takes `step_s`, one of val twice that, of which the share `compute_s` is
    compute; `hidden_s` of each pass are in no step. `overrides` replaces fields.
    """
    samples: list[dict[str, Any]] = []
    windows = []
    for start_s, name in ((10.0, "val"), (30.0, "infer")):
        time_s = step_s * (2 if name == "val" else 1)
        for step, tokens in enumerate(TOKENS_OF_STEPS):
            counts = {
                "tokens": tokens,
                "samples": 2,
                "padded": 0,
                "logits": 2,
                "pairs": 2525,
                "square": 5000,
            }
            sample = {
                "pass": name,
                "rank": rank,
                "step": step,
                "start_s": step * time_s,
                "end_s": (step + 1) * time_s,
            }
            sample |= {
                "host_start_s": 0.0,
                "host_end_s": 0.0,
                "phases": {"compute": compute_s * time_s},
                "counts": counts,
            }
            samples.append(sample)
        wall = len(TOKENS_OF_STEPS) * time_s + hidden_s
        windows.append(
            {
                "pass": name,
                "rank": rank,
                "start_s": start_s,
                "wall_s": wall,
                "allocated_bytes": 3 * GIB,
            }
        )
        windows[-1]["reserved_bytes"] = 4 * GIB
    items = list(range(12))
    table = {"items": items, "best": [4] * 12, "choice": [0] * 12, "finite": [1] * 12}
    content = {
        "rank": rank,
        "device": f"cuda:{rank}",
        "status": "done",
        "error": None,
        "ended_s": 20.0,
        "budget": {"imports": 2.0, "val": 12.0, "infer": 6.0, "harness": 0.5},
        "windows": windows,
        "samples": samples,
        "outputs": {"val": table, "infer": table},
        "identity": {"name": "chip"},
        "versions": {"cuda": "13.0"},
        "details": {"attention": "flash"},
        "weights": {"source": "random"},
        "data": {
            "source": "made",
            "fingerprint": "f" * 64,
            "tokens": 600,
            "published": False,
            "rows": 12,
        },
        "common": (
            {
                "gold": "ABCD" * 3,
                "subjects": ["a", "b"],
                "subject_of": [0] * 8 + [1] * 4,
                "index": items,
            }
            | {"letters": [4, 5, 6, 7], "passes": {}}
        ),
    }
    return content | overrides


def make_telemetry(device: str = "cuda:0", **columns: Any) -> TelemetrySeries:
    """Return five telemetry readings of a device; `columns` replaces columns."""
    base = {
        "t_s": [0.0, 31.0, 33.0, 35.0, 50.0],
        "memory_bytes": [1 * GIB, 5 * GIB, 7 * GIB, 6 * GIB, 90 * GIB],
        "energy_j": [0.0, 3100.0, 3300.0, 3500.0, 5000.0],
        "processes": [0, 1, 1, 1, 0],
        "reasons": [[], ["sw_power_cap"], ["sw_power_cap"], [], []],
    }
    table = {"device": device, "period_s": 2.0, "baseline_processes": 0, "columns": base | columns}
    return TelemetrySeries.model_validate(table)


def make_run_facts(
    devices: int = 1, peak: dict[str, Any] | None = PEAK, **overrides: Any
) -> dict[str, Any]:
    """Return what the parent process knows of a run, as keyword arguments of the draft of a
    record.
    """
    hardware = {"devices": [{"name": "chip", "uuid": None, "memory_bytes": 80 * GIB}], "peak": peak}
    base: dict[str, Any] = {
        "id": "0" * 32,
        "created": "2026-01-01T00:00:00.000+00:00",
        "environment": Environment.model_validate(
            {"hardware": hardware, "software": {"cuda": None}, "source": {}}
        ),
        "site": {},
        "telemetry": [make_telemetry(f"cuda:{i}") for i in range(devices)],
        "plan": Plan(nodes=1, devices=devices, tp=1, pp=1, dp=devices, launcher="local"),
        "scope": Scope(kind="full"),
    }
    return base | overrides


def make_calibration(rank: int, stage: str = "before", **rates: Any) -> CalibrationMessage:
    """Return the message with these matmul rates of a rank's device, which took a second."""
    fields = {"rank": rank, "stage": stage, "rates": rates, "problem": None, "is_shipped": True}
    return CalibrationMessage.model_validate({"token": "", "time_s": 1.0, **fields})


def make_outcome(
    *ranks: dict[str, Any], code: str | None = None
) -> tuple[RankResults, Failure | None]:
    """Return the ranks' results, with a matmul rate of 2e6 FLOP/s and passes that agents saw begin
    and end on time, and the failure, which is None without a `code`.
    """
    files = [RankFile.model_validate(rank) for rank in ranks]
    results = RankResults({file.rank: file for file in files}, agent_output="tail")
    results.calibrations = {
        (file.rank, "before"): make_calibration(file.rank, matmul_flops_per_s=2e6) for file in files
    }
    for window in (window for file in files for window in file.windows):
        for event, time_s in (("begin", 0.0), ("end", window.wall_s)):
            results.add_border(
                BorderMessage.model_validate(
                    {
                        "token": "",
                        "rank": window.rank,
                        "event": event,
                        "pass_name": window.pass_name,
                        "t_s": window.start_s + time_s,
                        "within_s": 0.05,
                    }
                )
            )
    return results, None if code is None else Failure(code, "text")


def make_mmlu_record(*ranks: dict[str, Any], **options: Any) -> Record:
    """Return the record of a run of these ranks, one good rank by default.

    Options are `resolved` (the case), `facts` (of the parent) and `code` (of a failure).
    """
    resolved_case = options.pop("resolved", None) or resolve_small_case()
    rank_files = ranks or (make_rank_file(),)
    run_facts = options.pop("facts", None) or make_run_facts(len(rank_files))
    return assemble_record(resolved_case, run_facts, make_outcome(*rank_files, **options))


def make_calibrated_record(*calibrations: CalibrationMessage, **changes: Any) -> Record:
    """Return the record of a run of one rank with these matmul rates, and `changes` of its rank
    file.
    """
    results, failure = make_outcome(make_rank_file(**changes))
    results.calibrations = {(one.rank, one.stage): one for one in calibrations}
    return assemble_record(resolve_small_case(), make_run_facts(), (results, failure))


def assemble_record(
    resolved_case: resolve.ResolvedCase,
    run_facts: dict[str, Any],
    run_outcome: tuple[RankResults, Failure | None],
) -> Record:
    """Assemble the record of a run that starts at second 1000 and ends at 1025.5 of the clock."""
    draft = assemble.make_draft(
        resolved_case, EngineFacts(name="torch", details=EngineDetails()), **run_facts
    )
    times = assemble.RunTimes(
        origin_s=1000.0, agents_started_s=1000.25, workers_started_s=1000.5, ended_s=1025.0
    )
    return assemble.assemble_record(
        draft, resolved_case.case, times, *run_outcome, clock=lambda: 1025.5
    )


def get_metric_value(record: Record, name: str) -> float | None:
    """Return the value of the metric `name`, or None if it is unknown."""
    return record.metrics[name].value


def test_budget_adds_up_to_e2e_time():
    record = make_mmlu_record()
    assert record.budget == {
        "start": 0.25,
        "agents": 0.25,
        "launch": 25.0 - 0.5 - 20.5,
        "imports": 2.0,
        "val": 12.0,
        "infer": 6.0,
        "harness": 0.5,
        "record": 0.5,
    }
    assert get_metric_value(record, "e2e_time") == sum(record.budget.values()) == 25.5


def test_rates_are_total_work_over_total_time():
    record = make_mmlu_record()
    assert get_metric_value(record, "p_infer_whole") == 600 / 6.0
    assert get_metric_value(record, "p_infer_core") == 600 / 3.0
    assert get_metric_value(record, "p_val_whole") == 600 / 12.0
    assert get_metric_value(record, "p_val_core") == 600 / 6.0
    assert get_metric_value(record, "tokens_per_device_s") == 100.0
    assert get_metric_value(record, "samples_per_s") == 2.0
    assert record.metrics["p_infer_whole"].unit == "tokens/s"
    assert record.metrics["p_infer_whole"].interval == (100.0, 100.0)  # equal steps: no spread


def test_in_division_open_rates_count_questions():
    record = make_mmlu_record(resolved=resolve_small_case(division="open"))
    assert (get_metric_value(record, "p_infer_whole"), record.metrics["p_infer_whole"].unit) == (
        2.0,
        "questions/s",
    )


def test_time_outside_steps_lowers_the_whole_rate_and_is_unaccounted():
    record = make_mmlu_record(make_rank_file(hidden_s=6.0))
    assert get_metric_value(record, "p_infer_whole") == 600 / 12.0
    assert record.status == "invalid"
    assert {reason.code for reason in record.reasons} == {"unaccounted"}
    assert record.reasons[1].text.values["share"] == 0.5


def test_two_ranks_add_their_work_and_the_slower_one_sets_the_time():
    slow = make_rank_file(1, step_s=2.0)
    halves = ({"items": list(range(6))}, {"items": list(range(6, 12))})
    ranks = []
    for rank, half in zip((make_rank_file(0), slow), halves, strict=True):
        table = {"items": half["items"], "best": [4] * 6, "choice": [0] * 6, "finite": [1] * 6}
        ranks.append(
            rank
            | {
                "outputs": {"val": table, "infer": table},
                "data": rank["data"] | {"tokens": 1200},
            }
        )
    record = make_mmlu_record(*ranks)
    assert get_metric_value(record, "p_infer_whole") == 1200 / 12.0
    assert get_metric_value(record, "p_infer_core") == 1200 / 6.0
    assert get_metric_value(record, "tokens_per_device_s") == 50.0
    assert record.status == "valid", record.reasons


def test_mfu_in_three_conventions():
    record = make_mmlu_record()
    # A layer: 8·(2+4)·4 for QKV, 8·8 out, 3·8·16 feed-forward = 640 weights; two layers 1280.
    causal = 2 * 1280 * 600 + 2 * 32 * 8 * 12 + 4 * 2 * 8 * 2525 * 6
    # Parameters without the input embedding: 1280 + 5 norms of 8 + output embedding of 256.
    palm = 2 * (1280 + 40 + 256) * 600 + 4 * 2 * 8 * 5000 * 6
    assert get_metric_value(record, "flops_causal") == causal
    assert get_metric_value(record, "flops_palm") == palm
    assert get_metric_value(record, "flops_nominal") == 2 * 1000 * 600
    assert get_metric_value(record, "mfu") == causal / 6.0 / 4e6
    assert get_metric_value(record, "mfu_core") == causal / 3.0 / 4e6
    assert get_metric_value(record, "mfu_achievable") == causal / 6.0 / 2e6
    assert get_metric_value(record, "mfu_palm") == palm / 6.0 / 4e6
    assert get_metric_value(record, "mfu_nominal") == 1_200_000 / 6.0 / 4e6


CASE_MATMULS = [
    # 300 FLOPs
    {"name": "up", "layout": "nt", "m": 10, "n": 5, "k": 1, "count": 3, "flops_per_s": 1e6},
    # 100 FLOPs
    {"name": "down", "layout": "nt", "m": 10, "n": 5, "k": 1, "count": 1, "flops_per_s": 5e5},
]


def test_the_matmul_rate_is_total_flops_over_total_time_of_the_case_shapes():
    """All FLOPs over all time: 400 in 0.3 ms and 0.2 ms. A mean of the two rates, or the rate of
    the square matmul, would differ.
    """
    rates = {"matmul_flops_per_s": 2e6, "matmuls": CASE_MATMULS}
    record = make_calibrated_record(make_calibration(0, **rates))
    assert get_metric_value(record, "matmul_rate") == pytest.approx(8e5, rel=1e-12)
    assert get_metric_value(record, "mfu_achievable") == pytest.approx(
        get_metric_value(record, "flops_causal") / 6.0 / 8e5, rel=1e-12
    )
    older_metrics = metrics.derive_metrics(record.model_copy(update={"formulas": None}))
    assert older_metrics["matmul_rate"].value == 2e6


def test_without_a_datasheet_row_there_is_no_mfu():
    record = make_mmlu_record(facts=make_run_facts(peak=None))
    assert get_metric_value(record, "mfu") is None
    assert record.metrics["mfu"].note == Message("metric.no_peak")
    assert get_metric_value(record, "mfu_achievable") is not None


def test_a_precision_without_a_datasheet_rate_has_no_mfu():
    record = make_mmlu_record(resolved=resolve_small_case(precision="tf32"))
    assert (get_metric_value(record, "mfu"), record.metrics["mfu"].note) == (
        None,
        Message("metric.no_peak_rate", {"row": "chip", "precision": "tf32"}),
    )


def test_memory_and_energy_are_those_of_the_headline_pass():
    record = make_mmlu_record()
    assert get_metric_value(record, "mem") == 7.0  # the 90 GiB came after the pass
    assert get_metric_value(record, "mem_total") == 80.0
    assert (
        get_metric_value(record, "mem_allocated"),
        get_metric_value(record, "mem_reserved"),
    ) == (3.0, 4.0)
    assert get_metric_value(record, "energy") == pytest.approx(600.0)  # 100 W over 30 s to 36 s
    assert get_metric_value(record, "energy_per_token") == pytest.approx(1.0)
    assert get_metric_value(record, "energy_per_sample") == pytest.approx(50.0)
    assert (
        get_metric_value(record, "tokens_per_joule"),
        get_metric_value(record, "samples_per_joule"),
    ) == pytest.approx((1.0, 0.02))
    assert [record.metrics[name].unit for name in ("tokens_per_joule", "samples_per_joule")] == [
        "tokens/J",
        "questions/J",
    ]
    assert record.metrics["energy"].note is None


def test_memory_of_a_pass_between_readings_is_that_of_the_readings_around_it():
    # the pass is from 30 s to 36 s, a reading every 2 s
    late = make_telemetry(t_s=[0.0, 28.5, 37.5, 40.0, 50.0])
    record = make_mmlu_record(facts=make_run_facts(telemetry=[late]))
    assert get_metric_value(record, "mem") == 7.0
    assert record.metrics["mem"].note == Message("metric.memory_around")


def test_a_device_without_readings_has_null_metrics_with_a_reason():
    record = make_mmlu_record(
        facts=make_run_facts(
            telemetry=[make_telemetry(memory_bytes=[None] * 5, energy_j=[None] * 5)]
        )
    )
    assert (get_metric_value(record, "mem"), get_metric_value(record, "energy")) == (None, None)
    assert record.metrics["mem"].note == Message("metric.no_memory")
    assert record.metrics["energy"].note == Message(
        "energy.device", {"device": "cuda:0", "why": Message("energy.nothing")}
    )
    assert record.metrics["tokens_per_joule"].note == record.metrics["energy"].note


def test_quality_is_derived_from_the_answers():
    record = make_mmlu_record()  # every answer is A; gold is ABCD three times
    assert get_metric_value(record, "acc") == 0.25
    assert get_metric_value(record, "acc_choice") == 0.25
    assert get_metric_value(record, "acc_se") == pytest.approx((0.25 * 0.75 / 12) ** 0.5)
    assert get_metric_value(record, "agreement") == 1.0
    assert (record.quality.evaluated, record.quality.value) == (False, 0.25)
    assert record.quality.note == words.join_messages(
        Message("quality.random"), Message("quality.other_data")
    )


def make_gated_record(**answers: Any) -> Record:
    """Return a record that the quality gate applies to: full scope, weights that are not random,
    the published data.

    `answers` replaces outputs of passes.
    """
    rank = make_rank_file()
    rank["weights"] = {"source": "huggingface"}
    rank["data"]["published"] = True
    for name, table in answers.items():
        rank["outputs"] = rank["outputs"] | {name: rank["outputs"][name] | table}
    target = ["gate.target=0.25", "gate.within=0.01"]
    return make_mmlu_record(rank, resolved=resolve_small_case(settings=target))


def test_quality_of_a_changed_question_is_not_evaluated():
    resolved_case = resolve.resolve_case(
        "llama2-7b-mmlu", settings=["question.data.shots=0", "max_interval=9", "gate.within=0.5"]
    )
    rank = make_rank_file()
    rank["weights"], rank["data"]["published"] = {"source": "huggingface"}, True
    record = make_mmlu_record(rank, resolved=resolved_case)
    assert record.quality.note == Message("quality.changed")
    assert record.notes[-3:] == [
        Message("note.question", {"keys": ("question.data.shots",)}),
        Message("note.limits", {"keys": ("max_interval", "gate.within")}),
        Message("note.modified", {"case": "llama2-7b-mmlu", "parts": ("gate", "max_interval")}),
    ]


def test_a_sample_in_division_open_is_noted():
    record = make_mmlu_record(
        resolved=resolve_small_case(division="open"),
        facts=make_run_facts(scope=Scope(kind="window", sample=12)),
    )
    assert record.notes[-1] == Message("note.sample")


def test_the_gate_passes_and_fails():
    assert (make_gated_record().status, make_gated_record().quality.evaluated) == ("valid", True)
    two_right = {"best": [4, 9, 9, 9] * 2 + [9] * 4}
    wrong = make_gated_record(infer=two_right, val=two_right)
    assert wrong.status == "invalid"
    assert [reason.code for reason in wrong.reasons] == ["quality"]
    values = {"metric": "acc", "value": 2 / 12, "target": 0.25, "within": 0.01}
    assert wrong.reasons[0].text == Message("check.gate.bad", values)


def test_infer_and_val_must_agree():
    apart = make_gated_record(val={"best": [9] * 12})
    assert [reason.code for reason in apart.reasons] == ["quality"]
    assert apart.reasons[0].text == Message("check.gate_agree.bad", {"apart": 0.25, "most": 0.005})


def test_a_power_cap_is_a_note_and_a_thermal_slowdown_invalidates():
    assert make_mmlu_record().status == "valid"
    values = {"device": "cuda:0", "reason": "sw_power_cap", "share": 2 / 3}
    assert make_mmlu_record().notes[0] == Message("note.slowdown", values)
    hot = make_mmlu_record(
        facts=make_run_facts(
            telemetry=[make_telemetry(reasons=[[], [], ["hw_thermal_slowdown"], [], []])]
        )
    )
    assert [reason.code for reason in hot.reasons] == ["slowdown"]


def test_another_process_on_the_device_invalidates():
    record = make_mmlu_record(
        facts=make_run_facts(telemetry=[make_telemetry(processes=[0, 1, 2, 1, 0])])
    )
    assert [reason.code for reason in record.reasons] == ["shared"]


def test_smoke_is_exempt_from_clocks_and_interval():
    hot = make_run_facts(
        telemetry=[make_telemetry(reasons=[[], [], ["hw_thermal_slowdown"], [], []])]
    )
    assert make_mmlu_record(resolved=resolve_small_case(size="smoke"), facts=hot).status == "valid"


def test_a_wide_interval_invalidates():
    rank = make_rank_file()
    start = 0.0
    for sample in rank["samples"]:
        if sample["pass"] == "infer":
            time_s = 0.4 if sample["step"] % 2 else 1.6
            sample["start_s"], sample["end_s"] = start, start + time_s
            start += time_s
    record = make_mmlu_record(rank)
    assert [reason.code for reason in record.reasons] == ["interval"]


def test_a_wrong_token_count_invalidates():
    rank = make_rank_file()
    rank["samples"][0]["counts"]["tokens"] = 101
    record = make_mmlu_record(rank)
    values = {"pass": "val", "tokens": 601, "wanted": 600}
    assert [(r.code, r.text) for r in record.reasons] == [
        ("tokens", Message("check.counted.bad", values))
    ]


@pytest.mark.parametrize(
    "table, code", [({"finite": [1] * 11 + [0]}, "nan"), ({"items": [*range(11), 0]}, "coverage")]
)
def test_nonfinite_or_repeated_answers_invalidate(table, code):
    rank = make_rank_file()
    rank["outputs"] = {"infer": rank["outputs"]["infer"] | table}
    rank["windows"], rank["samples"] = rank["windows"][1:], rank["samples"][6:]
    assert code in {reason.code for reason in make_mmlu_record(rank).reasons}


def test_a_nonfinite_loss_invalidates():
    rank = make_rank_file()
    rank["samples"][7]["values"] = {"loss": None}
    message = Message("check.finite_values.bad", {"pass": "infer", "step": 1, "rank": 0})
    assert [(r.code, r.text) for r in make_mmlu_record(rank).reasons] == [("nan", message)]


def test_a_failed_run_keeps_its_metrics():
    rank = make_rank_file(status="raised", error="ValueError: x")
    record = make_mmlu_record(rank, code="raised")
    assert record.status == "failed"
    assert record.reasons[0].code == "raised"
    assert record.failure is not None
    assert (record.failure.rank, record.failure.stderr_tail) == (None, "tail")
    assert get_metric_value(record, "p_infer_whole") == 100.0
    empty = make_mmlu_record(
        code="killed", facts=make_run_facts(), resolved=resolve_small_case()
    ).status
    assert empty == "failed"


def test_a_run_without_rank_files_still_makes_a_record():
    record = assemble_record(resolve_small_case(), make_run_facts(), make_outcome(code="killed"))
    assert record.status == "failed"
    assert all(
        metric.value is None
        for name, metric in record.metrics.items()
        if name not in ("e2e_time", "mem_total")
    )
    assert all(metric.note for metric in record.metrics.values() if metric.value is None)
    assert get_metric_value(record, "e2e_time") == 25.5


def test_harness_overhead_compares_with_the_bare_pass():
    rank = make_rank_file()
    rank["windows"].append(
        {
            "pass": "bare",
            "rank": 0,
            "start_s": 40.0,
            "wall_s": 5.0,
            "allocated_bytes": 0,
            "reserved_bytes": 0,
        }
    )
    assert get_metric_value(make_mmlu_record(rank), "harness_overhead") == pytest.approx(0.2)
    assert make_mmlu_record().metrics["harness_overhead"].note == Message("metric.no_bare")


def test_padding_is_recorded_and_never_counted():
    rank = make_rank_file()
    for sample in rank["samples"]:
        sample["counts"]["padded"] = 100
    record = make_mmlu_record(rank)
    assert get_metric_value(record, "padded_share") == 0.5
    assert get_metric_value(record, "p_infer_whole") == 100.0
    assert get_metric_value(record, "mfu") == get_metric_value(make_mmlu_record(), "mfu")


def test_unknown_metrics_have_notes_and_records_are_sealed():
    run_record = make_mmlu_record()
    assert all(metric.note for metric in run_record.metrics.values() if metric.value is None)
    assert set(run_record.hashes) == {"samples", "record", "bytes"}
    assert run_record.metrics == metrics.derive_metrics(run_record)
    assert record.seal_record(run_record).hashes == run_record.hashes


def test_borders_that_the_agent_saw_are_in_the_record():
    rank = make_rank_file()
    rank["windows"][0] |= {"seen_start_s": 1.0, "seen_end_s": 2.0, "seen_within_s": 3.0}
    results, failure = make_outcome(rank)
    del results.borders[0, "val", "end"]
    val, infer = assemble_record(resolve_small_case(), make_run_facts(), (results, failure)).passes
    # what the rank itself says of them does not count
    assert (val.seen_start_s, val.seen_end_s, val.seen_within_s) == (None, None, None)
    assert (infer.seen_start_s, infer.seen_end_s, infer.seen_within_s) == (30.0, 36.0, 0.05)


def test_the_first_begin_and_the_last_end_of_a_pass_count():
    results, _ = make_outcome(make_rank_file())
    border = results.borders[0, "infer", "begin"]
    for event, time_s in (("begin", 33.0), ("end", 37.0)):
        results.add_border(border.model_copy(update={"event": event, "t_s": time_s}))
    assert results.borders[0, "infer", "begin"].t_s == 30.0
    assert results.borders[0, "infer", "end"].t_s == 37.0


def test_matmul_rates_come_from_the_processes_that_timed_them():
    before = make_calibration(
        0, matmul_flops_per_s=2e6, matmul_flops_per_cpu_s=3e6, matmul_cpu_rates=[3e6, 4e6]
    )
    after = make_calibration(0, "after", matmul_flops_per_s=1e6, matmul_cpu_rates=[5e6])
    rank = make_calibrated_record(before, after).ranks[0].model_dump()
    assert {name: rank[name] for name in rank if name.startswith(("matmul", "calib"))} == {
        "matmul_flops_per_s": 2e6,
        "matmul_flops_per_cpu_s": 3e6,
        "matmul_cpu_rates": {"before": [3e6, 4e6], "after": [5e6]},
        "matmul_flops_per_s_after": 1e6,
        "calibration": {"matmuls": "process"},
    }


def test_a_record_says_where_rates_were_measured():
    third_party = make_calibration(0).model_copy(update={"is_shipped": False})
    rank = make_calibrated_record(third_party, all_reduce_bytes_per_s=1e9).ranks[0]
    assert rank.calibration == CalibrationFacts(matmuls="third_party", collectives="worker")


def test_matmuls_that_could_not_be_timed_have_no_rate_and_a_problem():
    failed = make_calibration(0).model_copy(update={"problem": "no memory"})
    odd = make_calibration(0, "after", matmul_cpu_rates=[-1.0])
    rank = make_calibrated_record(failed, odd).ranks[0]
    assert rank.matmul_flops_per_s is None
    assert rank.calibration == CalibrationFacts(
        matmuls="process",
        problems={
            "before": "no memory",
            "after": "matmul_cpu_rates.0: Input should be greater than 0",
        },
    )
    assert "calibration" not in make_calibrated_record().ranks[0].model_dump()


def test_the_calibration_after_the_passes_is_a_part_of_the_budget():
    record = make_calibrated_record(
        make_calibration(0), make_calibration(0, "after", matmul_cpu_rates=[1.0])
    )
    assert (record.budget["calibrate_after"], record.budget["launch"]) == (1.0, 3.0)
    assert list(record.budget)[-2:] == ["calibrate_after", "record"]
    assert get_metric_value(record, "e2e_time") == sum(record.budget.values()) == 25.5
