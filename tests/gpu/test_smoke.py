"""All shipped cases on a device at size smoke, which is fp32: other kernels than those of full
runs.
"""

import json
import os
import sys

import pytest

from fixtures.commands import Shell, finish
from steelyard.case import resolve

pytestmark = pytest.mark.gpu
MMLU, CORPUS = "llama2-7b-mmlu", "llama1-7b-openwebtext"


def test_every_case_is_valid_on_a_device(shell: Shell) -> None:
    path = os.pathsep.join(filter(None, sys.path))  # wherever its packages lie
    done = finish(
        shell.start("run", "smoke", "--accelerator", "cuda", "--out", shell.out, PYTHONPATH=path),
        500,
    )
    records = [json.loads(path.read_text()) for path in sorted(shell.out.glob("*.json"))]
    # On a device, runs so small may end before a rate has an interval: that is all that may be
    # wrong with them.
    wrong = {
        one["case"]["name"]: one["reasons"]
        for one in records
        if {r["code"] for r in one["reasons"]} - {"interval"}
    }
    assert wrong == {}, done.err
    assert {one["case"]["name"] for one in records} == set(resolve.list_shipped_cases())


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize(
    ("case", "precision"), [(MMLU, "fp8"), (CORPUS, "fp8"), (CORPUS, "fp8-pure")]
)
def test_fp8_is_valid_on_a_device(case: str, precision: str, compiled: str, shell: Shell) -> None:
    """As it is written, and by its kernels."""
    path = os.pathsep.join(filter(None, sys.path))
    asked = (
        "run",
        case,
        "--size",
        "smoke",
        "--precision",
        precision,
        "--set",
        f"tune.compile={compiled}",
    )
    done = finish(
        shell.start(*asked, "--accelerator", "cuda", "--out", shell.out, PYTHONPATH=path), 300
    )
    [found] = (json.loads(path.read_text()) for path in shell.out.glob("*.json"))
    assert {reason["code"] for reason in found["reasons"]} <= {"interval"}, done.err
    assert found["engine"]["details"]["fp8"] == "row-wise scales, torch._scaled_mm"
