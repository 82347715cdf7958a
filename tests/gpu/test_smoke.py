"""All shipped cases on a device at size smoke, which is fp32: other kernels than those of full runs."""

import json
import os
import sys

import pytest

from fixtures.commands import Shell, finish
from steelyard.case import resolve

pytestmark = pytest.mark.gpu


def test_every_case_is_valid_on_a_device(shell: Shell) -> None:
    path = os.pathsep.join(filter(None, sys.path))  # wherever its packages lie
    done = finish(shell.start("run", "smoke", "--accelerator", "cuda", "--out", shell.out, PYTHONPATH=path), 500)
    records = [json.loads(path.read_text()) for path in sorted(shell.out.glob("*.json"))]
    # On a device, runs so small may end before a rate has an interval: that is all that may be wrong with them.
    wrong = {one["case"]["name"]: one["reasons"] for one in records if {r["code"] for r in one["reasons"]} - {"interval"}}
    assert wrong == {}, done.err
    assert {one["case"]["name"] for one in records} == set(resolve.names())
