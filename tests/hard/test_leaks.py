"""Tests of which environment variables a record holds: those on a list, and never a secret."""

from dataclasses import replace

import pytest

from steelyard import accelerators
from steelyard.accelerators import CPU, CUDA, environment_variables
from steelyard.run import environment

pytestmark = pytest.mark.process


def recorded_variables(inherited: dict[str, str]) -> dict[str, str]:
    """Return the variables that a record of a CPU run would hold of this environment."""
    return environment.describe_host(CPU, [], inherited).software.variables


@pytest.mark.parametrize(
    "name",
    [
        "TORCHX_API_TOKEN",
        "NCCL_AUTH_TOKEN",
        "PYTORCH_INDEX_PASSWORD",
        "CUDA_REGISTRY",
        "TORCH_EXTENSIONS_DIR",
        "OMP_MINE",
    ],
)
def test_variables_are_recorded_by_full_name_not_prefix(name: str) -> None:
    assert recorded_variables({name: "hunter2", "NCCL_ALGO": "Ring"}) == {"NCCL_ALGO": "Ring"}


@pytest.mark.parametrize("word", ["TOKEN", "Key", "secret", "PASSWORD", "AUTH", "CREDENTIALS"])
def test_variables_that_look_secret_are_never_recorded(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"ABACUS_{word}_OF_MINE"
    row = replace(CPU, name="abacus", variables=("ABACUS_BEADS", "ABACUS_", name))
    rows = {**accelerators.load_accelerators(), "abacus": row}
    monkeypatch.setattr(accelerators, "load_accelerators", lambda: rows)
    inherited = {name: "hunter2", "ABACUS_BEADS": "10", "ABACUS_OTHER": "a beginning names nothing"}
    assert recorded_variables(inherited) == {"ABACUS_BEADS": "10"}


def test_tune_variables_are_recorded() -> None:
    allowed = accelerators.list_tune_variables()
    assert set(recorded_variables(dict.fromkeys(allowed, "1"))) == allowed


def test_variable_lists_hold_unique_recordable_names() -> None:
    listed = [*CUDA.variables, *CPU.variables, *environment_variables.TORCH_VARIABLES]
    assert sorted(set(listed)) == sorted(listed)
    assert [
        name for name in listed if not environment_variables.is_recorded(name, frozenset(listed))
    ] == []
    assert [name for name in listed if name in environment_variables.NCCL_ADDRESS_VARIABLES] == []
