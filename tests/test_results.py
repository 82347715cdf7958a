"""Statements of docs/results.md and docs/notebook.md about the records, beyond the numbers in their
tables.

The tables themselves are made from the records, and compared with the documents by
tests/test_docs.py.
"""

from collections import Counter
from statistics import fmean

import pytest

from docs_tables import (
    PATH_BY_ID,
    ROOT,
    TABLES,
    DocsRow,
    find_column,
    load_records,
    make_table,
    read_metric_values,
)
from fixtures.records import SPECS
from steelyard.metrics import estimates, passes, side_comparison, standing, stats
from steelyard.metrics.time_waterfall import make_waterfalls
from steelyard.record import ceilings_record
from steelyard.report.document import Cell
from steelyard.report.numbers import UNKNOWN

NOTEBOOK = " ".join((ROOT / "docs/notebook.md").read_text().split())


def read_rows(name: str) -> list[DocsRow]:
    """Return the rows of a table of docs/tables.toml."""
    return [DocsRow(*row) for row in TABLES[name]["rows"]]


def read_rate(ids: str) -> float:
    """Return the rate of one run in tokens/s per device."""
    [value] = read_metric_values(ids, "tokens_per_device_s")
    return value


@pytest.mark.parametrize("name", ["mmlu-explain", "training-explain"])
def test_waterfalls_agree_with_the_measured_time(name) -> None:
    [run] = load_records(TABLES[name]["ids"])
    [waterfall] = make_waterfalls(run)
    assert waterfall.is_close
    assert (
        f"took {waterfall.profile.wall_s / waterfall.measured_s:.1%}".replace("%", " %") in NOTEBOOK
    )


def test_ceilings_have_a_row_for_each_precision_and_direction() -> None:
    [path] = SPECS
    table = make_table("ceilings")
    squares = [
        bench.precision
        for bench in ceilings_record.read_spec_record(path).benches
        if bench.name == "square 8192"
    ]
    assert squares == ["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8"]
    assert all(f"| matmul, square 8192 | {precision} |" in table for precision in squares)
    assert table.count("| memory, ") == 3
    assert table.count("| copy, ") == 4  # one device: no copy between devices


def test_difference_between_engines_is_significant() -> None:
    sides = {row.records[0].engine.name: row for row in read_rows("mmlu-energy")}
    assert all(run.status == "valid" for row in sides.values() for run in row.records)
    comparison_sides = [
        side_comparison.make_side(name, list(row.records)) for name, row in sides.items()
    ]
    comparison = side_comparison.compare_sides(*comparison_sides, across=(), threshold=0.01)
    assert comparison.ratio is not None
    assert comparison.ratio.verdict == "significant"
    assert TABLES["mmlu-engines"]["ids"] == " ".join(row.ids for row in sides.values())


def test_program_changes_keep_the_rate_within_half_a_percent() -> None:
    for row in read_rows("changes"):
        [old, new] = [
            fmean(read_metric_values(ids, "tokens_per_device_s")) for ids in (row.base, row.ids)
        ]
        assert abs(new / old - 1) < 0.005
        assert {run.status for run in (*row.records, *load_records(row.base))} == {"valid"}


def test_published_records_have_these_statuses_today() -> None:
    """Records from before the status unproven, by folder and kind of work, each as (stored status,
    status today): no record stores unproven, and those without an interval are unproven today.
    """
    counts: dict[tuple[str, str], Counter[tuple[str, str]]] = {}
    for record_id, path in PATH_BY_ID.items():
        [run] = load_records(record_id)
        if (run.formulas or 1) < standing.FIRST_VERSION_WITH_UNPROVEN:
            counter = counts.setdefault((path.parent.name, run.task.kind), Counter())
            counter[run.status, standing.find_status(run)] += 1
    valid, unproven = ("valid", "valid"), ("valid", "unproven")
    invalid, failed = ("invalid", "invalid"), ("failed", "failed")
    assert counts == {
        ("cpu", "score"): {valid: 4},
        ("cpu", "train"): {valid: 9, invalid: 1},
        ("cpu-fp8", "score"): {invalid: 4},
        ("cpu-fp8", "train"): {valid: 4},
        ("cpu-own-model", "score"): {unproven: 2},
        ("cpu-scoring", "score"): {valid: 1, invalid: 5},
        ("cpu-start-up", "score"): {valid: 6},
        ("h200", "score"): {valid: 58, invalid: 12, failed: 1},
        ("h200", "train"): {valid: 43, unproven: 27, invalid: 5, failed: 1},
        ("h200-rounded", "train"): {valid: 1},
    }


def test_unproven_published_runs_have_too_few_steps_or_batches() -> None:
    """Every one of them, and no other run of the full size that has a rate."""
    for record_id in PATH_BY_ID:
        [run] = load_records(record_id)
        rate_span = passes.find_rate_span(run)
        if run.status != "valid" or run.case.size == "smoke" or rate_span is None:
            continue
        slices = rate_span.slices  # turns of a load; other runs have steps
        count = slices.count if slices else len(rate_span.steps[rate_span.slowest_rank])
        assert (standing.find_status(run) == "unproven") == (count < stats.MIN_STEPS), record_id


def test_tables_compare_no_unproven_rates() -> None:
    """The only published comparison of runs that are too short is of three repeats a side."""
    compared = {
        (name, row.ids, row.base)
        for name, table in TABLES.items()
        if "make" not in table and "ratio of tokens_per_device_s" in table["columns"]
        for row in read_rows(name)
        if not all(map(standing.is_valid, (*row.records, *load_records(row.base))))
        and find_column("ratio of tokens_per_device_s")(row).text != UNKNOWN
    }
    assert compared == {
        (
            "against-transformers",
            "ee04d3aa 512e00ca 239bf7f2",
            "d07b9b33 09cf4424 675a7eb2",
        )
    }
    not_compared = [
        row.ids
        for name in ("sizes", "several")
        for row in read_rows(name)
        if find_column("ratio of tokens_per_device_s")(row) == Cell(UNKNOWN, "unproven")
    ]
    assert not_compared == [
        *("476a6b3f", "2b966b83", "abb9f441"),
        *("21a97ebd", "d3257a53", "66f816b5", "a21463d4", "049d031e"),
    ]


def read_losses(ids: str) -> list[float]:
    """Return the losses of one run's training steps."""
    [run] = load_records(ids)
    return [sample.values["loss"] for sample in run.samples if sample.pass_name == "train"]


def test_notebook_gives_the_loss_differences_of_fp8_and_bf16() -> None:
    """The notebook gives the differences of training losses beside those of the table: at the last
    step, and the mean of the last 20.
    """
    curves = [row for row in read_rows("fp8") if row.records[0].task.kind == "train"]
    pairs = [
        tuple(load_records(ids)[0].case.precision for ids in (row.ids, row.base)) for row in curves
    ]
    assert pairs == [("fp8", "bf16"), ("fp8-pure", "bf16-pure"), ("bf16-pure", "bf16")]
    for row in curves:
        differences = [
            a - b for a, b in zip(read_losses(row.ids), read_losses(row.base), strict=True)
        ]
        assert len(differences) == 200
        assert f" {abs(differences[-1]):.4f} " in NOTEBOOK
        assert f"{abs(fmean(differences[-20:])):.4f})" in NOTEBOOK


def test_fp8_scores_are_compared_with_bf16_on_the_same_scope() -> None:
    scored = [row for row in read_rows("fp8") if row.records[0].task.kind == "score"]
    assert [row.records[0].case.question["task"] for row in scored] == ["lambada", "mmlu"]
    for row in scored:
        [fp8_run], [bf16_run] = row.records, load_records(row.base)
        assert (bf16_run.case.precision, fp8_run.case.precision) == ("bf16", "fp8")
        assert bf16_run.scope == fp8_run.scope


def test_default_sizes_are_chosen_by_auto() -> None:
    """All sizes are chosen by `auto`, except that of engine transformers with flash attention."""
    for row in read_rows("defaults"):
        for run in row.records:
            assert run.status == "valid"
            assert run.auto_tunes or run.tune.attention == "flash"


def test_glm_runs_with_auto_sizes_are_valid() -> None:
    auto = [run for row in read_rows("glm") for run in row.records if run.auto_tunes]
    assert len(auto) == 8
    assert {run.status for run in auto} == {"valid"}
    assert all(run.metrics["p_whole"].value <= run.metrics["samples_per_s"].value for run in auto)


def test_auto_sizes_are_within_one_percent_of_hand_chosen_ones() -> None:
    """`auto` is the best size, or within one percent of it."""
    assert len(read_rows("sizes")) == 6
    for row in read_rows("sizes"):
        [auto_run], [fixed_run] = row.records, load_records(row.base)
        assert read_rate(row.ids) >= 0.99 * read_rate(row.base)
        assert auto_run.status == "valid"
        assert (bool(auto_run.auto_tunes), fixed_run.auto_tunes) == (True, ())
        machines = [run.environment.hardware.devices for run in (auto_run, fixed_run)]
        assert machines[0] == machines[1]


def test_distributed_code_on_one_device_costs_at_most_two_percent() -> None:
    assert len(read_rows("several")) == 5
    for row in read_rows("several"):
        [distributed], [plain] = row.records, load_records(row.base)
        assert (distributed.tune.distributed, plain.tune.distributed) == (True, False)
        assert distributed.status == plain.status == "valid"
        assert distributed.metrics["mem"].value <= 1.02 * plain.metrics["mem"].value
        assert read_rate(row.ids) >= (0.99 if distributed.tune.sharding < 3 else 0.98) * read_rate(
            row.base
        )


def test_torch_scores_faster_than_transformers_on_a_cpu() -> None:
    assert len(read_rows("cpu-scoring")) == 3
    for row in read_rows("cpu-scoring"):
        [torch_run], [transformers_run] = row.records, load_records(row.base)
        assert (torch_run.engine.name, transformers_run.engine.name) == ("torch", "transformers")
        assert read_rate(row.ids) > read_rate(row.base)
        assert torch_run.outputs["passes"]["infer"] == transformers_run.outputs["passes"]["infer"]


def test_no_published_record_uses_more_than_one_gpu() -> None:
    """The README and docs/results.md say so."""
    for ids in PATH_BY_ID:
        [run] = load_records(ids)
        assert run.plan.world == 1 or run.environment.hardware.accelerator == "cpu"


def test_engine_torch_is_compared_with_transformers() -> None:
    for row in read_rows("against-transformers"):
        assert [
            estimates.make_group_key(run, ["case", "precision", "devices"]) for run in row.records
        ] == [
            estimates.make_group_key(run, ["case", "precision", "devices"])
            for run in load_records(row.base)
        ]
        assert {run.engine.name for run in row.records} == {"torch"}
        assert {run.engine.name for run in load_records(row.base)} == {"transformers"}
