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
from hosts.runs import LoginShell

DOUBLE = Path(__file__).parents[1] / "fixtures" / "packages" / "double_engine"
PATH = os.pathsep.join((str(DOUBLE), str(SRC)))
EXACT = 1e-8
# Two hosts with two ranks each, one host with four ranks, and one process.
TWO_HOSTS = ("--nodes", "2", "--devices", "2")
FOUR_RANKS = ("--launcher", "local", "--devices", "4")
ONE_PROCESS = ("--launcher", "local", "--devices", "1")

Record = dict[str, Any]


@dataclass(frozen=True)
class ParityCase:
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
        set_options = [part for setting in self.settings for part in ("--set", setting)]
        return [
            self.case,
            "--size",
            "smoke",
            "--accelerator",
            "cpu",
            *self.options,
            *set_options,
            *more,
        ]


LLAMA = ("llama1-7b-openwebtext", ("--steps", "8"))
DP4, TP2PP2, DP2 = (
    ParityCase(LLAMA[0], plan, 8 * 3 + 8, LLAMA[1]) for plan in ("DP4", "TP2PP2", "DP2")
)
# Without dropout, since replicas draw other masks than one process. 30 steps include the evaluation
# after step 25.
GLM = ParityCase(
    "glm-large-record", "DP4", 30 * 3 + 96, ("--steps", "30"), ("question.model.dropout=0",)
)
# a wider tolerance, since losses are computed from logits in fp32 even in float64 runs
LAMBADA = ParityCase("aquila2-34b-lambada", "TP4", 2 * 2 * 64, within=1e-6)
MMLU = ParityCase("llama2-7b-mmlu", "DP4", 2 * 48)
LONG_CASES = [pytest.param(one, marks=pytest.mark.long) for one in (MMLU, GLM, LAMBADA)]


def make_test_id(value: object) -> str | None:
    """Return the test id of a parity case; None for other values."""
    return f"{value.case}-{value.parallel}" if isinstance(value, ParityCase) else None


@pytest.fixture(scope="module")
def one_process(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[ParityCase], Record]:
    """A function that returns the record of one process for a parity case, made once for all plans
    of a question.
    """
    records: dict[tuple[Any, ...], Record] = {}

    def record(asked: ParityCase) -> Record:
        question = (asked.case, asked.options, asked.settings)
        if question not in records:
            runs = LoginShell(cluster, tmp_path_factory.mktemp("one"))
            records[question] = runs.run_valid(
                *asked.arguments(*ONE_PROCESS, "--engine", "double"), PYTHONPATH=PATH
            )
        return records[question]

    return record


def run_in_float64(runs: LoginShell, case: ParityCase, *placement: str) -> Record:
    """Run a parity case in float64 on these hosts and return its record. The engine's package is on
    the path of all hosts.
    """
    runs.write_site(prologue=f"export PYTHONPATH={shlex.quote(PATH)}")
    return runs.run_valid(
        *case.arguments(*placement, "--parallel", case.parallel, "--engine", "double"),
        PYTHONPATH=PATH,
    )


def collect_numbers(record: Record) -> dict[str, Any]:
    """Return all that a run computed, by path: loss and gradient norm of every step, outputs, and
    scored metrics.
    """
    scores = {
        name: metric["value"]
        for name, metric in record["metrics"].items()
        if name.startswith(("loss", "acc", "perplexity"))
    }
    return flatten_leaves(
        {"steps": read_step_values(record), "outputs": record["outputs"], "scores": scores}
    )


def read_step_values(record: Record) -> list[dict[str, float]]:
    """Return the values (loss, gradient norm, …) of rank 0's training steps."""
    return [
        sample["values"]
        for sample in record["samples"]
        if sample["pass"] == "train" and sample["rank"] == 0 and sample["counts"]
    ]


def flatten_leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts and lists by their path, parts separated by `/`."""
    pairs = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else None
    )
    if pairs is None:
        return {path: tree}
    return {
        name: value
        for key, inner in pairs
        for name, value in flatten_leaves(inner, f"{path}/{key}").items()
    }


@pytest.mark.full
@pytest.mark.parametrize("asked", [DP4, TP2PP2, *LONG_CASES], ids=make_test_id)
def test_two_hosts_compute_the_numbers_of_one_process(
    runs: LoginShell, one_process: Callable[[ParityCase], Record], asked: ParityCase
) -> None:
    record, alone = run_in_float64(runs, asked, *TWO_HOSTS), one_process(asked)
    assert [(entry["name"], entry["ranks"]) for entry in record["hosts"]] == [
        ("node1", [0, 1]),
        ("node2", [2, 3]),
    ]
    assert [(entry["rank"], entry["host"]) for entry in record["ranks"]] == [
        (0, "node1"),
        (1, "node1"),
        (2, "node2"),
        (3, "node2"),
    ]
    assert record["case"]["key"] == alone["case"]["key"]
    computed, expected = collect_numbers(record), collect_numbers(alone)
    assert len(expected) >= asked.numbers
    assert computed.keys() == expected.keys()
    for name, value in expected.items():
        assert computed[name] == (
            pytest.approx(value, abs=0, rel=asked.within) if isinstance(value, float) else value
        ), name


@pytest.mark.long
@pytest.mark.parametrize("asked", [DP4, TP2PP2, MMLU, GLM, LAMBADA], ids=make_test_id)
def test_two_hosts_are_bit_equal_to_four_ranks_on_one_host(
    runs: LoginShell, asked: ParityCase
) -> None:
    """Computed in fp32, as users run it."""
    plan = ("--parallel", asked.parallel)
    assert collect_numbers(runs.run_valid(*asked.arguments(*TWO_HOSTS, *plan))) == collect_numbers(
        runs.run_valid(*asked.arguments(*FOUR_RANKS, *plan))
    )


@pytest.mark.full
def test_a_clock_offset_between_hosts_is_corrected(
    cluster: Cluster, runs: LoginShell, one_process: Callable[[ParityCase], Record]
) -> None:
    """The clock of node2 is five seconds ahead. All times of a record are on the parent's clock."""
    with cluster.clock_offset("node2", 5):
        record = run_in_float64(runs, DP2, "--nodes", "2")
    near, far = record["hosts"]
    assert (near["clock_offset_s"], near["clock_drift"]) == (0, 0)
    assert abs(far["clock_offset_s"] - 5) <= far["clock_uncertainty_s"] < 0.1
    windows = {(entry["pass"], entry["rank"]): entry["start_s"] for entry in record["passes"]}
    assert len(windows) == 6
    for name in ("before", "train", "after"):  # each pass begins at a barrier
        assert abs(windows[name, 0] - windows[name, 1]) < 0.3, name
    e2e_s = record["metrics"]["e2e_time"]["value"]
    assert [entry["host"] for entry in record["telemetry"]] == ["node1", "node2"]
    for entry in record["telemetry"]:
        times = entry["columns"]["t_s"]
        assert 0 < times[0] <= windows["before", 1] < windows["after", 1] <= times[-1] < e2e_s, (
            entry["host"]
        )
    assert read_step_values(record) == [
        pytest.approx(entry, abs=0, rel=EXACT) for entry in read_step_values(one_process(DP2))
    ]
