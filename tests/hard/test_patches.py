"""Tests of engines that change what their own process measures with: the limit on rates, and the
clock that a pass is compared with, are not in their reach.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.attacks import Attacks
from fixtures.commands import SMOKE, Shell
from fixtures.golden import golden
from fixtures.patching_engines import install_patching_engine
from fixtures.records import format_sentence

pytestmark = pytest.mark.full


@pytest.fixture
def patchers(tmp_path: Path) -> Shell:
    """Return a shell with the third-party engine `patcher` installed."""
    return Shell(tmp_path, (install_patching_engine(tmp_path / "package"),))


def run_patcher(shell: Shell, patch: str) -> dict[str, Any]:
    """Run the engine with this patch, check that the record verifies, and return it as a JSON
    document.
    """
    log = shell.folder / "imports.txt"
    shell(*SMOKE, "--engine", "patcher", "--out", shell.out, PATCH=patch, PATCH_LOG=str(log))
    (path,) = shell.out.iterdir()
    imported_by = log.read_text()
    assert "steelyard.run.worker" in imported_by
    assert "steelyard.run.calibration_worker" not in imported_by
    assert shell("verify", path, PATCH_LOG=str(log)).code == 0
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def list_reasons(document: dict[str, Any]) -> dict[str, str]:
    """Return the reasons of a record as sentences, by code."""
    return {entry["code"]: format_sentence(entry["text"]) for entry in document["reasons"]}


@pytest.mark.parametrize(
    ("patch", "title"),
    [
        ("calibration", "the functions that time matmuls"),
        pytest.param("torch", "torch's matmul", marks=pytest.mark.long),
    ],
)
def test_an_engine_that_patches_the_calibration_does_not_raise_its_limit(
    patchers: Shell, patch: str, title: str, attacks: Attacks
) -> None:
    document = run_patcher(patchers, patch)
    assert document["status"] == "invalid", document["failure"]
    assert set(list_reasons(document)) == {"implausible"}
    rank = document["ranks"][0]
    assert rank["calibration"] == {"matmuls": "process"}
    assert rank["matmul_flops_per_s"] < 1e14
    assert set(rank["matmul_cpu_rates"]) == {"before", "after"}
    attacks.add(f"engine that replays a pass, and patches {title}", 1, "`valid`", "`implausible`")


def test_an_engine_that_slows_down_every_clock_is_invalid(
    patchers: Shell, attacks: Attacks
) -> None:
    document = run_patcher(patchers, "clocks")
    reasons = list_reasons(document)
    assert (document["status"], set(reasons)) == ("invalid", {"clock"}), document["failure"]
    assert reasons["clock"].startswith(golden("the-end-of-infer-on-rank-0-was-at"))
    for window in document["passes"]:
        seen_s = window["seen_end_s"] - window["seen_start_s"]
        assert seen_s == pytest.approx(2 * window["wall_s"], rel=0.1)
    # its own clocks agree with each other
    assert {check["name"]: check["ok"] for check in document["checks"]}["clocks_agree"]
    attacks.add("engine that slows down every clock of its process", 1, "`valid`", "`clock`")


@pytest.mark.long
def test_an_engine_that_kills_the_calibration_keeps_the_limit_from_before(
    patchers: Shell, attacks: Attacks
) -> None:
    document = run_patcher(patchers, "kills")
    assert set(list_reasons(document)) == {"implausible"}
    assert set(document["ranks"][0]["matmul_cpu_rates"]) == {"before"}
    assert golden("rank-0-matmuls-were-killed") in [*map(format_sentence, document["notes"])]
    attacks.add(
        "engine that replays a pass, and kills the process that times matmuls",
        1,
        "`implausible`",
        "`implausible`, with a note",
    )


@pytest.mark.long
def test_an_engine_that_closes_the_pipe_to_the_agent_gets_a_note(
    patchers: Shell, attacks: Attacks
) -> None:
    document = run_patcher(patchers, "closes")
    assert document["failure"] is None
    assert "seen_start_s" not in document["passes"][0]
    assert golden("val-the-node-agent-did-not-see") in [*map(format_sentence, document["notes"])]
