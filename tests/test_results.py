"""Statements of docs/results.md and docs/notebook.md about the records, beyond the numbers in their
tables.

The tables themselves are made from the records, and compared with the documents by
tests/test_docs.py.
"""

from statistics import fmean

import pytest

from docs_tables import BY_ID, ROOT, TABLES, Row, load, make, values
from fixtures.records import SPECS
from steelyard.metrics import estimates, side_comparison
from steelyard.metrics.time_waterfall import make_waterfalls
from steelyard.record import ceilings_record

NOTEBOOK = " ".join((ROOT / "docs/notebook.md").read_text().split())


def rows(name: str) -> list[Row]:
    """Return the rows of a table of docs/tables.toml."""
    return [Row(*row) for row in TABLES[name]["rows"]]


def rate(ids: str) -> float:
    """Return the rate of one run in tokens/s per device."""
    [found] = values(ids, "tokens_per_device_s")
    return found


@pytest.mark.parametrize("name", ["mmlu-explain", "training-explain"])
def test_waterfalls_agree_with_what_was_measured(name) -> None:
    [one] = load(TABLES[name]["ids"])
    [found] = make_waterfalls(one)
    assert found.is_close
    assert f"took {found.profile.wall_s / found.measured_s:.1%}".replace("%", " %") in NOTEBOOK


def test_ceilings_have_a_row_for_each_precision_and_direction() -> None:
    [path] = SPECS
    table = make("ceilings")
    squares = [
        one.precision
        for one in ceilings_record.read_spec_record(path).benches
        if one.name == "square 8192"
    ]
    assert squares == ["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8"]
    assert all(f"| matmul, square 8192 | {precision} |" in table for precision in squares)
    assert table.count("| memory, ") == 3
    assert table.count("| copy, ") == 4  # one device: no copy between devices


def test_repeats_and_the_comparison() -> None:
    sides = {row.records[0].engine.name: row for row in rows("mmlu-energy")}
    assert all(one.status == "valid" for row in sides.values() for one in row.records)
    made = [side_comparison.make_side(name, list(row.records)) for name, row in sides.items()]
    found = side_comparison.compare_sides(*made, across=(), threshold=0.01)
    assert found.ratio is not None
    assert found.ratio.verdict == "significant"
    assert TABLES["mmlu-engines"]["ids"] == " ".join(row.ids for row in sides.values())


def test_changes_of_the_program_cost_nothing() -> None:
    for row in rows("changes"):
        [old, new] = [fmean(values(ids, "tokens_per_device_s")) for ids in (row.base, row.ids)]
        assert abs(new / old - 1) < 0.005
        assert {one.status for one in (*row.records, *load(row.base))} == {"valid"}


def losses(ids: str) -> list[float]:
    """Return the losses of one run's training steps."""
    [one] = load(ids)
    return [sample.values["loss"] for sample in one.samples if sample.pass_name == "train"]


def test_fp8_beside_bf16() -> None:
    """The notebook gives the differences of training losses beside those of the table: at the last
    step, and the mean of the last 20.
    """
    curves = [row for row in rows("fp8") if row.records[0].task.kind == "train"]
    pairs = [tuple(load(ids)[0].case.precision for ids in (row.ids, row.base)) for row in curves]
    assert pairs == [("fp8", "bf16"), ("fp8-pure", "bf16-pure"), ("bf16-pure", "bf16")]
    for row in curves:
        apart = [a - b for a, b in zip(losses(row.ids), losses(row.base), strict=True)]
        assert len(apart) == 200
        assert f" {abs(apart[-1]):.4f} " in NOTEBOOK
        assert f"{abs(fmean(apart[-20:])):.4f})" in NOTEBOOK


def test_fp8_answers_of_a_real_model() -> None:
    scored = [row for row in rows("fp8") if row.records[0].task.kind == "score"]
    assert [row.records[0].case.question["task"] for row in scored] == ["lambada", "mmlu"]
    for row in scored:
        [narrow], [wide] = row.records, load(row.base)
        assert (wide.case.precision, narrow.case.precision) == ("bf16", "fp8")
        assert wide.scope == narrow.scope


def test_default_sizes_are_those_of_auto() -> None:
    """All sizes are chosen by `auto`, except that of engine transformers with flash attention."""
    for row in rows("defaults"):
        for one in row.records:
            assert one.status == "valid"
            assert one.auto_tunes or one.tune.attention == "flash"


def test_glm_with_its_own_attention() -> None:
    auto = [one for row in rows("glm") for one in row.records if one.auto_tunes]
    assert len(auto) == 8
    assert {one.status for one in auto} == {"valid"}
    assert all(one.metrics["p_whole"].value <= one.metrics["samples_per_s"].value for one in auto)


def test_sizes_by_hand() -> None:
    """`auto` is the best size, or within one percent of it."""
    assert len(rows("sizes")) == 6
    for row in rows("sizes"):
        [ours], [other] = row.records, load(row.base)
        assert rate(row.ids) >= 0.99 * rate(row.base)
        assert ours.status == "valid"
        assert (bool(ours.auto_tunes), other.auto_tunes) == (True, ())
        machines = [one.environment.hardware.devices for one in (ours, other)]
        assert machines[0] == machines[1]


def test_the_code_of_several_devices() -> None:
    assert len(rows("several")) == 5
    for row in rows("several"):
        [one], [alone] = row.records, load(row.base)
        assert (one.tune.distributed, alone.tune.distributed) == (True, False)
        assert one.status == alone.status == "valid"
        assert one.metrics["mem"].value <= 1.02 * alone.metrics["mem"].value
        assert rate(row.ids) >= (0.99 if one.tune.sharding < 3 else 0.98) * rate(row.base)


def test_scoring_on_a_cpu() -> None:
    assert len(rows("cpu-scoring")) == 3
    for row in rows("cpu-scoring"):
        [ours], [other] = row.records, load(row.base)
        assert (ours.engine.name, other.engine.name) == ("torch", "transformers")
        assert rate(row.ids) > rate(row.base)
        assert ours.outputs["passes"]["infer"] == other.outputs["passes"]["infer"]


def test_no_number_comes_from_more_than_one_gpu() -> None:
    """The README and docs/results.md say so."""
    for ids in BY_ID:
        [one] = load(ids)
        assert one.plan.world == 1 or one.environment.hardware.accelerator == "cpu"


def test_engine_torch_is_compared_with_transformers() -> None:
    for row in rows("against-transformers"):
        assert [
            estimates.make_group_key(one, ["case", "precision", "devices"]) for one in row.records
        ] == [
            estimates.make_group_key(one, ["case", "precision", "devices"])
            for one in load(row.base)
        ]
        assert {one.engine.name for one in row.records} == {"torch"}
        assert {one.engine.name for one in load(row.base)} == {"transformers"}
