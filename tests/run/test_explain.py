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


def steps(count: int) -> Iterator[Phase | Work]:
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
def test_a_stretch_follows_one_step_that_warms(there: int, wanted: int, taken: list[int]) -> None:
    items = explain._take_steps(explain._skip_first_step(lambda: steps(there)), wanted)
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
def test_steps_of_a_stretch(
    case: str, size: str, devices: int, sample: int | None, count: int
) -> None:
    asked = resolve.resolve_case(case, size).case
    assert (
        explain.count_profiled_steps(
            asked, degrees.make_plan(asked, 1, devices, sample, "local"), sample
        )
        == count
    )


def asked(engine: str, **options: Any) -> Request:
    """Return a smoke request of the corpus case with `--explain` on the CPU."""
    return Request(
        resolve.resolve_case(CORPUS, "smoke"),
        engine=engine,
        accelerator="cpu",
        explain=True,
        **options,
    )


def test_what_has_no_profiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.plugins.is_installed", lambda module: True)
    with pytest.raises(
        RequestError, match="--explain: engine paddle has no profiler; allowed: engines on torch"
    ):
        check_request(asked("paddle"))


@pytest.mark.full
@pytest.mark.parametrize(("case", "devices"), [(CASE, 1), (CORPUS, 2), ("glm-large-record", 1)])
def test_real_runs(case: str, devices: int, shell: Shell) -> None:
    how = ("--devices", str(devices), "--explain", "--trace", "--out", shell.out)
    done = shell("run", case, "--size", "smoke", "--accelerator", "cpu", *how)
    assert done.code == 0, done.err
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
    assert "Why it is not higher" in done.out
    assert done.lines[-1] == f"by kernel: steelyard report {shell.out} --explain"
    [case] = shell("report", shell.out, "--explain", "--json").json()["cases"]
    [explained] = case["runs"][0]["explain"]
    assert min(row["time_s"] for row in explained["rows"]) > 0
    assert sum(row["share"] for row in explained["rows"]) == pytest.approx(1.0, abs=0.01)
    assert shell("verify", shell.out).code == 0
    told = shell("report", shell.out, "--explain").out
    assert "other kernels" in told
    assert "matmuls" in told
