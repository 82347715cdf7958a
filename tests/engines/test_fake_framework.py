"""A framework of another package runs a whole case where torch cannot be imported, neither by the
parent nor by a worker.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.commands import CASE, SMOKE, Shell
from fixtures.golden import golden

PACKAGE = Path(__file__).parents[1] / "fixtures" / "packages" / "fake_framework"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell whose path starts with a torch and a transformers that raise ImportError."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("torch", "transformers"):
        (broken / f"{name}.py").write_text(
            f"raise ImportError('{name} was imported', name='{name}')\n"
        )
    new_shell = Shell(tmp_path, (broken, PACKAGE))
    yield new_shell
    new_shell.clean()


def test_torch_cannot_be_imported_here(shell: Shell) -> None:
    done = shell(*SMOKE, "--out", shell.out)
    assert (done.code, done.out) == (2, "")
    assert done.lines == [golden("error-engine-torch-cannot-be-imported")]


@pytest.mark.parametrize("options", [(), ("--passes", "val,infer,bare"), ("--sample", "20")])
def test_a_case_runs_without_torch(shell: Shell, options: tuple[str, ...]) -> None:
    done = shell(*SMOKE, "--engine", "abacus", *options, "--out", shell.out)
    assert done.code == 0, done.err
    (record,) = shell.records()
    assert (record["status"], record["case"]["name"], record["engine"]) == (
        "valid",
        CASE,
        {
            "name": "abacus",
            "details": {"batches": 3 if options[:1] == ("--sample",) else 6},
            "conforms": None,
        },
    )
    assert record["weights"] == {"source": "random", "seed": 0}
    assert record["ranks"][0]["identity"]["name"] == "Abacus"
    assert record["ranks"][0]["identity"]["capability"] == "fp32"
    assert record["ranks"][0]["matmul_flops_per_s"] is None
    assert record["ranks"][0]["calibration"] == {"matmuls": "third_party"}
    assert record["environment"]["software"]["abacus"] == "1.0"
    assert record["metrics"]["p_infer_whole"]["value"] > 0
    assert record["outputs"]["passes"]["infer"] == record["outputs"]["passes"]["val"]
    assert "?" not in record["outputs"]["passes"]["val"]["choices"]
    checked = shell("verify", shell.out)
    assert (checked.code, checked.err) == (0, ""), checked.out
    assert "the record lacks" not in checked.out
    assert shell("report", shell.out).code == 0


@pytest.mark.parametrize(
    "options,said",
    [
        (
            ("--division", "open"),
            f"{CASE} has no division 'open' with engine abacus; allowed: closed",
        ),
        (("--precision", "bf16"), "engine abacus does not compute matmuls in bf16; allowed: fp32"),
        (
            ("--devices", "2", "--parallel", "TP2"),
            ("engine abacus cannot divide a model as TP2PP1DP1; allowed: --parallel DP"),
        ),
    ],
)
def test_requests_outside_the_engine_row_are_refused(
    shell: Shell, options: tuple[str, ...], said: str
) -> None:
    done = shell(*SMOKE, "--engine", "abacus", *options, "--out", shell.out)
    assert (done.code, done.lines) == (2, [f"error: {said}"])


def test_list_shows_the_third_party_engine(shell: Shell) -> None:
    engines = {engine["name"]: engine for engine in shell("list", "--json").json()["engines"]}
    assert engines["abacus"] == {
        "name": "abacus",
        "framework": "abacus",
        "cases": [CASE],
        "works": ["score_choices"],
        "families": ["llama"],
        "divisions": ["closed"],
        "precisions": ["fp32"],
        "trains_in": [],
        "degrees": ["DP"],
        "missing": None,
        "checkout": None,
        "endpoint": False,
        "untried": None,
        "package": "fake-framework 1.0",
    }
