"""A run over several hosts has the losses, outputs and scores of one process, even if the hosts'
clocks differ.

Two hosts with two ranks each, over ssh and gloo. Engine `double` computes in float64, so that the
other order of additions in a plan does not hide a mistake.
"""

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fixtures.commands import SRC
from hosts.cluster import Cluster
from hosts.runs import Runs

DOUBLE = Path(__file__).parents[1] / "fixtures" / "packages" / "double_engine"
PATH = os.pathsep.join((str(DOUBLE), str(SRC)))
EXACT = 1e-8
# Two hosts with two ranks each, one host with four ranks, and one process.
HOSTS = ("--nodes", "2", "--devices", "2")
FOUR = ("--launcher", "local", "--devices", "4")
ONE = ("--launcher", "local", "--devices", "1")

Record = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """A case and a parallel plan whose numbers are compared with those of one process.

    `numbers` is how many numbers are compared at least, `within` the relative tolerance of floats.
    """

    case: str
    parallel: str
    numbers: int  # how many numbers are compared at least
    options: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    within: float = EXACT

    def arguments(self, *more: str) -> list[str]:
        """Return the arguments of `steelyard run` for this case, followed by `more`."""
        told = [part for setting in self.settings for part in ("--set", setting)]
        return [self.case, "--size", "smoke", "--accelerator", "cpu", *self.options, *told, *more]


LLAMA = ("llama1-7b-openwebtext", ("--steps", "8"))
DP4, TP2PP2, DP2 = (Asked(LLAMA[0], plan, 8 * 3 + 8, LLAMA[1]) for plan in ("DP4", "TP2PP2", "DP2"))
# Without dropout, since replicas draw other masks than one process. 30 steps include the evaluation
# after step 25.
GLM = Asked(
    "glm-large-record", "DP4", 30 * 3 + 96, ("--steps", "30"), ("question.model.dropout=0",)
)
# a wider tolerance, since losses are computed from logits in fp32 even in float64 runs
LAMBADA = Asked("aquila2-34b-lambada", "TP4", 2 * 2 * 64, within=1e-6)
MMLU = Asked("llama2-7b-mmlu", "DP4", 2 * 48)
LONG = [pytest.param(one, marks=pytest.mark.long) for one in (GLM, LAMBADA)]


def named(value: object) -> str | None:
    """Return the test id of a parity case; None for other values."""
    return f"{value.case}-{value.parallel}" if isinstance(value, Asked) else None


@pytest.fixture(scope="module")
def one_process(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Asked], Record]:
    """A function that returns the record of one process for a parity case, made once for all plans
    of a question.
    """
    made: dict[tuple[Any, ...], Record] = {}

    def record(asked: Asked) -> Record:
        question = (asked.case, asked.options, asked.settings)
        if question not in made:
            runs = Runs(cluster, tmp_path_factory.mktemp("one"))
            made[question] = runs.record(
                *asked.arguments(*ONE, "--engine", "double"), PYTHONPATH=PATH
            )
        return made[question]

    return record


def double(runs: Runs, asked: Asked, *where: str) -> Record:
    """Run a parity case in float64 on these hosts and return its record. The engine's package is on
    the path of all hosts.
    """
    runs.write_site(prologue=f"export PYTHONPATH={shlex.quote(PATH)}")
    return runs.record(
        *asked.arguments(*where, "--parallel", asked.parallel, "--engine", "double"),
        PYTHONPATH=PATH,
    )


def numbers(record: Record) -> dict[str, Any]:
    """Return all that a run computed, by path: loss and gradient norm of every step, outputs, and
    scored metrics.
    """
    scores = {
        name: one["value"]
        for name, one in record["metrics"].items()
        if name.startswith(("loss", "acc", "perplexity"))
    }
    return flat({"steps": steps(record), "outputs": record["outputs"], "scores": scores})


def steps(record: Record) -> list[dict[str, float]]:
    """Return the values (loss, gradient norm, …) of rank 0's training steps."""
    return [
        one["values"]
        for one in record["samples"]
        if one["pass"] == "train" and one["rank"] == 0 and one["counts"]
    ]


def flat(table: Any, place: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts and lists by their path, parts separated by `/`."""
    pairs = (
        table.items()
        if isinstance(table, dict)
        else enumerate(table)
        if isinstance(table, list)
        else None
    )
    if pairs is None:
        return {place: table}
    return {
        name: value for key, inner in pairs for name, value in flat(inner, f"{place}/{key}").items()
    }


@pytest.mark.full
@pytest.mark.parametrize("asked", [DP4, TP2PP2, MMLU, *LONG], ids=named)
def test_two_hosts_answer_as_one_process(
    runs: Runs, one_process: Callable[[Asked], Record], asked: Asked
) -> None:
    record, alone = double(runs, asked, *HOSTS), one_process(asked)
    assert [(one["name"], one["ranks"]) for one in record["hosts"]] == [
        ("node1", [0, 1]),
        ("node2", [2, 3]),
    ]
    assert [(one["rank"], one["host"]) for one in record["ranks"]] == [
        (0, "node1"),
        (1, "node1"),
        (2, "node2"),
        (3, "node2"),
    ]
    assert record["case"]["key"] == alone["case"]["key"]
    found, expected = numbers(record), numbers(alone)
    assert len(expected) >= asked.numbers
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == (
            pytest.approx(value, abs=0, rel=asked.within) if isinstance(value, float) else value
        ), name


@pytest.mark.long
@pytest.mark.parametrize("asked", [DP4, TP2PP2, MMLU, GLM, LAMBADA], ids=named)
def test_two_hosts_are_bit_equal_to_four_ranks_on_one(runs: Runs, asked: Asked) -> None:
    """Computed in fp32, as users run it."""
    plan = ("--parallel", asked.parallel)
    assert numbers(runs.record(*asked.arguments(*HOSTS, *plan))) == numbers(
        runs.record(*asked.arguments(*FOUR, *plan))
    )


@pytest.mark.full
def test_a_clock_that_is_off(
    cluster: Cluster, runs: Runs, one_process: Callable[[Asked], Record]
) -> None:
    """The clock of node2 is five seconds ahead. All times of a record are on the parent's clock."""
    with cluster.clock_offset("node2", 5):
        record = double(runs, DP2, "--nodes", "2")
    near, far = record["hosts"]
    assert (near["clock_offset_s"], near["clock_drift"]) == (0, 0)
    assert abs(far["clock_offset_s"] - 5) <= far["clock_uncertainty_s"] < 0.1
    windows = {(one["pass"], one["rank"]): one["start_s"] for one in record["passes"]}
    assert len(windows) == 6
    for name in ("before", "train", "after"):  # each pass begins at a barrier
        assert abs(windows[name, 0] - windows[name, 1]) < 0.3, name
    e2e_s = record["metrics"]["e2e_time"]["value"]
    assert [one["host"] for one in record["telemetry"]] == ["node1", "node2"]
    for one in record["telemetry"]:
        times = one["columns"]["t_s"]
        assert 0 < times[0] <= windows["before", 1] < windows["after", 1] <= times[-1] < e2e_s, one[
            "host"
        ]
    assert steps(record) == [
        pytest.approx(one, abs=0, rel=EXACT) for one in steps(one_process(DP2))
    ]
