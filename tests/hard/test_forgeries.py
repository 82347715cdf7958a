"""Tests of forged records whose metrics were derived again and whose hashes are correct:
contradictions do not verify.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fixtures.attacks import Attacks
from fixtures.golden import golden
from fixtures.records import RUNS, copy_published_record, is_on_shipped_tables, rewrite_record
from steelyard.metrics import verify
from steelyard.record import record


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem[-8:])
def test_published_records_verify_and_lack_no_evidence(path: Path) -> None:
    problems, remarks = verify.verify_with_remarks(path)
    assert (problems, [remark for remark in remarks if is_on_shipped_tables(remark)]) == ([], [])


def killed(table: dict[str, Any]) -> None:
    """Change the record as if its rank was still running and the run had not failed."""
    table["ranks"][0]["status"] = "running"
    table["failure"], table["reasons"] = None, []


def lost_rank(table: dict[str, Any]) -> None:
    """Change the plan to two ranks, of which the second left no results."""
    table["plan"] |= {"devices": 2, "dp": 2}


def vast_world(table: dict[str, Any]) -> None:
    """Change the plan to a million hosts and devices."""
    table["plan"] |= {"nodes": 10**6, "devices": 10**6, "tp": 10**6, "dp": 10**6}


def faster(table: dict[str, Any]) -> None:
    """Divide every time measured in a pass by ten; the budget stays."""
    for window in table["passes"]:
        window["wall_s"] /= 10
    for sample in table["samples"]:
        for name in ("start_s", "end_s", "host_start_s", "host_end_s"):
            sample[name] /= 10
        sample["phases"] = {name: value / 10 for name, value in sample["phases"].items()}


def faster_with_budget(table: dict[str, Any]) -> None:
    """Divide every time measured in a pass and the run's budget by ten, but not the budget of the
    rank.
    """
    faster(table)
    table["budget"]["infer"] /= 10


def shorter_pass(table: dict[str, Any]) -> None:
    """Divide the windows and budgets of the passes by ten, but not the times of the steps."""
    for window in table["passes"]:
        window["wall_s"] /= 10
    for rank in table["ranks"]:
        rank["budget"]["infer"] /= 10
    table["budget"]["infer"] /= 10


def gap(table: dict[str, Any]) -> None:
    """Let a step end earlier, so that it looks faster."""
    table["samples"][2]["end_s"] -= 0.5 * (
        table["samples"][2]["end_s"] - table["samples"][2]["start_s"]
    )


def late_readings(table: dict[str, Any]) -> None:
    """Move the last telemetry reading to long after the end of the run."""
    table["telemetry"][0]["columns"]["t_s"][-1] += 1e4


EARLIER_OUTCOMES = {killed: "`valid`", faster: "`valid`"}  # known from before the checks


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (killed, "rank 0 is 'running', and the run did not fail"),
        (lost_rank, "rank 1 is missing from a run that did not fail"),
        (vast_world, "rank 1 is missing from a run that did not fail"),
        (faster, "infer on rank 0 took "),
        (faster_with_budget, "the budget of infer is not that of rank 0"),
        (shorter_pass, "infer on rank 0: a step ends at "),
        (gap, "infer on rank 0: step 3 does not start where the one before it ends"),
        (late_readings, "after a run of "),
    ],
)
def test_contradictory_record_does_not_verify(
    change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path, attacks: Attacks
) -> None:
    path = rewrite_record(copy_published_record("mmlu-full-closed-bf16-torch", tmp_path), change)
    assert record.find_record_damage(path) == []
    problems = verify.verify_record(path)
    assert any(said in line for line in problems), problems
    attacks.add(
        f"record derived and sealed again: {change.__name__.replace('_', ' ')}",
        1,
        EARLIER_OUTCOMES.get(change, "/"),
        "does not verify",
    )


def read_resealed(path: Path) -> dict[str, Any]:
    """Seal the record again, so that it has all hashes of this version, and return its JSON
    document.
    """
    return json.loads(rewrite_record(path, lambda table: None).read_bytes())


def test_unknown_key_in_hashes_is_reported(tmp_path: Path) -> None:
    path = copy_published_record("mmlu-smoke-closed", tmp_path)
    document = read_resealed(path)
    document["hashes"]["signed"] = "by somebody"
    path.write_bytes(record.to_canonical_bytes(document))
    assert record.find_record_damage(path) == [golden("hashes-has-key-signed-which-no")]


@pytest.mark.parametrize(
    "place", [("budget",), ("metrics",), ("samples", 0, "phases"), ("outputs", "passes"), ("case",)]
)
def test_changed_order_of_keys_is_reported(place: tuple[Any, ...], tmp_path: Path) -> None:
    path = copy_published_record("mmlu-smoke-closed", tmp_path)
    document = read_resealed(path)
    assert record.find_record_damage(path) == []
    *parents, leaf = place
    node = document
    for part in parents:
        node = node[part]
    node[leaf] = dict(reversed([*node[leaf].items(), ("more", 0.0)][: len(node[leaf])]))
    path.write_bytes(record.to_canonical_bytes(document))
    expected = [] if len(node[leaf]) == 1 else ["the hash of bytes does not match"]
    assert record.find_record_damage(path) == expected
