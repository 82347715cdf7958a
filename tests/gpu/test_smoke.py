"""All shipped cases on a GPU at size smoke. Its precision is fp32, so other kernels run than in
full runs.
"""

import json
import os
import sys

import pytest

from fixtures.commands import Shell, wait_for_result
from steelyard.case import resolve

pytestmark = pytest.mark.gpu
MMLU, CORPUS = "llama2-7b-mmlu", "llama1-7b-openwebtext"


def test_every_case_is_valid_on_a_device(shell: Shell) -> None:
    path = os.pathsep.join(filter(None, sys.path))  # the test's own packages
    done = wait_for_result(
        shell.start("run", "smoke", "--accelerator", "cuda", "--out", shell.out, PYTHONPATH=path),
        500,
    )
    records = [json.loads(path.read_text()) for path in sorted(shell.out.glob("*.json"))]
    # On a GPU, runs this small may end before a rate has a confidence interval; no other reason is
    # accepted.
    wrong = {
        record["case"]["name"]: record["reasons"]
        for record in records
        if {r["code"] for r in record["reasons"]} - {"interval"}
    }
    assert wrong == {}, done.err
    assert {record["case"]["name"] for record in records} == set(resolve.list_shipped_cases())


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize(
    ("case", "precision"), [(MMLU, "fp8"), (CORPUS, "fp8"), (CORPUS, "fp8-pure")]
)
def test_fp8_is_valid_on_a_device(case: str, precision: str, compiled: str, shell: Shell) -> None:
    """By plain modules, and by compiled kernels."""
    path = os.pathsep.join(filter(None, sys.path))
    arguments = (
        "run",
        case,
        "--size",
        "smoke",
        "--precision",
        precision,
        "--set",
        f"tune.compile={compiled}",
    )
    done = wait_for_result(
        shell.start(*arguments, "--accelerator", "cuda", "--out", shell.out, PYTHONPATH=path), 300
    )
    [record] = (json.loads(path.read_text()) for path in shell.out.glob("*.json"))
    assert {reason["code"] for reason in record["reasons"]} <= {"interval"}, done.err
    assert record["engine"]["details"]["fp8"] == "row-wise scales, torch._scaled_mm"
