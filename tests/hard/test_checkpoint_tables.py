"""Tests of the checksums in a checkpoint's JSON files: one changed digit is detected."""

import json
from pathlib import Path

import pytest

from fixtures.attacks import Attacks
from steelyard.errors import RequestError
from steelyard.plan.degrees import Plan
from steelyard.training import checkpoint_folders
from steelyard.training.checkpoint_folders import CheckpointState, OptimizerScalars

STATE = CheckpointState(
    step=2,
    losses=[2.5, 1.0625],
    numbers=OptimizerScalars(updates=2.0, scale=65536.0),
    plan=Plan(nodes=1, devices=1, tp=1, pp=1, dp=1, launcher="local"),
    weights={"source": "random", "seed": 0},
)


def test_state_round_trips_through_its_file(tmp_path: Path) -> None:
    checkpoint_folders.write_checkpoint_json(tmp_path / "state.json", STATE)
    assert (
        checkpoint_folders.read_checkpoint_json(tmp_path / "state.json", CheckpointState) == STATE
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [("1.0625", "1.0635"), ("65536.0", "65537.0"), ('"step": 2', '"step": 3'), ("seed", "seee")],
)
def test_changed_checkpoint_state_is_refused(old: str, new: str, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    checkpoint_folders.write_checkpoint_json(path, STATE)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(
        RequestError, match=r"state\.json: damaged: its checksum does not match its content"
    ):
        checkpoint_folders.read_checkpoint_json(path, CheckpointState)


def test_every_changed_byte_is_refused(tmp_path: Path, attacks: Attacks) -> None:
    path = tmp_path / "state.json"
    checkpoint_folders.write_checkpoint_json(path, STATE)
    raw, accepted = path.read_bytes(), []
    for position in range(len(raw)):
        path.write_bytes(raw[:position] + bytes([raw[position] ^ 1]) + raw[position + 1 :])
        try:
            accepted.append(checkpoint_folders.read_checkpoint_json(path, CheckpointState) == STATE)
        except RequestError:
            continue
    attacks.add(
        "byte of a checkpoint's `state.json`",
        len(raw),
        "no checksum",
        "refused, or the same value in another spelling",
    )
    assert all(accepted)  # equal values in another spelling


def test_earlier_state_without_a_checksum_is_read(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text(STATE.model_dump_json())
    assert checkpoint_folders.read_checkpoint_json(path, CheckpointState) == STATE
    assert "sha256" not in json.loads(path.read_text())
