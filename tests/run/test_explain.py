"""Tests of profiled steps: how many there are, which requests are refused, and real profiled runs
on the CPU.
"""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from fixtures.commands import CASE, Shell
from steelyard.case import resolve
from steelyard.case.request import Request
from steelyard.engine.work import Phase, Work
from steelyard.errors import RequestError
from steelyard.plan import degrees
from steelyard.run import explain
from steelyard.run.checked_request import check_request

CORPUS = "llama1-7b-openwebtext"


def make_steps(count: int) -> Iterator[Phase | Work]:
    """Yield the phases and work of an engine with this many steps and a scoring step at the end."""
    for step in range(count):
        yield Phase("compute")
        yield Work(rows=[step])
    yield Phase("score")
    yield Work({})


@pytest.mark.parametrize(
    ("there", "wanted", "taken"),
    [(5, 2, [1, 2]), (3, 4, [1, 2]), (1, 4, [0])],
    ids=["some", "all that are left", "the only one"],
)
def test_profiled_steps_follow_one_warmup_step(there: int, wanted: int, taken: list[int]) -> None:
    items = explain._take_steps(explain._skip_first_step(lambda: make_steps(there)), wanted)
    assert [row for item in items if isinstance(item, Work) for row in item.rows or ()] == taken


@pytest.mark.parametrize(
    ("case", "size", "devices", "sample", "count"),
    [
        (CORPUS, "smoke", 1, None, 4),
        (CASE, "full", 1, None, 4),  # scoring: batches of equal size
        (CORPUS, "full", 1, None, 1),  # 2,048 rows of a 7B model
        (CORPUS, "full", 1, 16, 1),
        (CORPUS, "full", 8, 16, 4),
    ],
)
def test_number_of_profiled_steps(
    case: str, size: str, devices: int, sample: int | None, count: int
) -> None:
    resolved_case = resolve.resolve_case(case, size).case
    assert (
        explain.count_profiled_steps(
            resolved_case, degrees.make_plan(resolved_case, 1, devices, sample, "local"), sample
        )
        == count
    )


def make_explain_request(engine: str, **options: Any) -> Request:
    """Return a smoke request of the corpus case with `--explain` on the CPU."""
    return Request(
        resolve.resolve_case(CORPUS, "smoke"),
        engine=engine,
        accelerator="cpu",
        explain=True,
        **options,
    )


def test_explain_is_refused_for_an_engine_without_a_profiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("steelyard.plugins.is_installed", lambda module: True)
    with pytest.raises(
        RequestError, match="--explain: engine paddle has no profiler; allowed: engines on torch"
    ):
        check_request(make_explain_request("paddle"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "devices"),
    [(CASE, 1), (CORPUS, 2), pytest.param("glm-large-record", 1, marks=pytest.mark.long)],
)
def test_real_runs_write_a_profile_and_a_trace(case: str, devices: int, shell: Shell) -> None:
    options = ("--devices", str(devices), "--explain", "--trace", "--out", shell.out)
    result = shell("run", case, "--size", "smoke", "--accelerator", "cpu", *options)
    assert result.code == 0, result.err
    [record] = shell.records()
    [profile] = record["profile"]
    assert (profile["rank"], profile["steps"]) == (0, 4)
    kinds = {kernel["kind"] for kernel in profile["kernels"]}
    assert {"matmul", "other"} <= kinds
    assert ("communication" in kinds) is (devices > 1)
    assert sum(kernel["time_s"] for kernel in profile["kernels"]) <= profile["wall_s"]
    headline = [
        s
        for s in record["samples"]
        if s["pass"] == profile["pass"] and s["rank"] == 0 and s["counts"]
    ]
    assert profile["counts"]["tokens"] <= 4 * max(sample["counts"]["tokens"] for sample in headline)
    assert "explain" in record["budget"]
    trace = json.loads(gzip.decompress((shell.out / profile["trace"]).read_bytes()))
    assert trace["traceEvents"]
    assert "Why it is not higher" in result.out
    assert result.lines[-1] == f"by kernel: steelyard report {shell.out} --explain"
    [case] = shell("report", shell.out, "--explain", "--json").json()["cases"]
    [explained] = case["runs"][0]["explain"]
    assert min(row["time_s"] for row in explained["rows"]) > 0
    assert sum(row["share"] for row in explained["rows"]) == pytest.approx(1.0, abs=0.01)
    assert shell("verify", shell.out).code == 0
    page = shell("report", shell.out, "--explain").out
    assert "other kernels" in page
    assert "matmuls" in page
