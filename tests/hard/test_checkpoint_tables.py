"""A checkpoint's tables have a checksum: one changed digit shows."""

import json
from pathlib import Path

import pytest

from fixtures.attacks import Attacks
from steelyard.errors import RequestError
from steelyard.plan.degrees import Plan
from steelyard.training import checkpoints
from steelyard.training.checkpoints import Numbers, State

STATE = State(
    step=2,
    losses=[2.5, 1.0625],
    numbers=Numbers(updates=2.0, scale=65536.0),
    plan=Plan(nodes=1, devices=1, tp=1, pp=1, dp=1, launcher="local"),
    weights={"source": "random", "seed": 0},
)


def test_a_state_survives(tmp_path: Path) -> None:
    checkpoints.write(tmp_path / "state.json", STATE)
    assert checkpoints.read(tmp_path / "state.json", State) == STATE


@pytest.mark.parametrize(
    ("old", "new"),
    [("1.0625", "1.0635"), ("65536.0", "65537.0"), ('"step": 2', '"step": 3'), ("seed", "seee")],
)
def test_a_changed_state_is_refused(old: str, new: str, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    checkpoints.write(path, STATE)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(
        RequestError, match=r"state\.json: damaged: its checksum is not that of what it holds"
    ):
        checkpoints.read(path, State)


def test_every_changed_byte_is_refused(tmp_path: Path, attacks: Attacks) -> None:
    path = tmp_path / "state.json"
    checkpoints.write(path, STATE)
    raw, accepted = path.read_bytes(), []
    for place in range(len(raw)):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        try:
            accepted.append(checkpoints.read(path, State) == STATE)
        except RequestError:
            continue
    attacks.add(
        "byte of a checkpoint's `state.json`",
        len(raw),
        "no checksum",
        "refused, or the same value in another spelling",
    )
    assert all(accepted)  # what is read is what was written: another spelling of the same number


def test_an_older_state_without_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text(STATE.model_dump_json())
    assert checkpoints.read(path, State) == STATE
    assert "sha256" not in json.loads(path.read_text())
