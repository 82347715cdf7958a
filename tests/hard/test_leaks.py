"""Tests of which environment variables a record holds: those on a list, and never a secret."""

from dataclasses import replace

import pytest

from steelyard import accelerators
from steelyard.accelerators import CPU, CUDA, environment_variables
from steelyard.run import environment

pytestmark = pytest.mark.process


def kept(inherited: dict[str, str]) -> dict[str, str]:
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
def test_a_common_beginning_is_not_enough(name: str) -> None:
    assert kept({name: "hunter2", "NCCL_ALGO": "Ring"}) == {"NCCL_ALGO": "Ring"}


@pytest.mark.parametrize("word", ["TOKEN", "Key", "secret", "PASSWORD", "AUTH", "CREDENTIALS"])
def test_no_row_makes_a_secret_kept(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"ABACUS_{word}_OF_MINE"
    row = replace(CPU, name="abacus", variables=("ABACUS_BEADS", "ABACUS_", name))
    rows = {**accelerators.load_accelerators(), "abacus": row}
    monkeypatch.setattr(accelerators, "load_accelerators", lambda: rows)
    inherited = {name: "hunter2", "ABACUS_BEADS": "10", "ABACUS_OTHER": "a beginning names nothing"}
    assert kept(inherited) == {"ABACUS_BEADS": "10"}


def test_what_a_tune_may_set_is_kept() -> None:
    allowed = accelerators.list_tune_variables()
    assert set(kept(dict.fromkeys(allowed, "1"))) == allowed


def test_lists_hold_names_that_are_kept_and_none_twice() -> None:
    every = [*CUDA.variables, *CPU.variables, *environment_variables.TORCH_VARIABLES]
    assert sorted(set(every)) == sorted(every)
    assert [
        name for name in every if not environment_variables.is_recorded(name, frozenset(every))
    ] == []
    assert [name for name in every if name in environment_variables.NCCL_ADDRESS_VARIABLES] == []
