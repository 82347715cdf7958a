"""Triton kernels between the matmuls of a Llama and a GLM against their plain functions, in a
process of their own.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
CHECKS = [TESTS / "fixtures" / name for name in ("kernel_checks.py", "glm_kernel_checks.py")]


def run_checks(checks: Path, **env: str) -> None:
    """Run a script of checks with the tests on its path; fail if it exits with an error."""
    path = os.pathsep.join((str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])))
    subprocess.run(
        [sys.executable, checks], env=os.environ | {"PYTHONPATH": path, **env}, check=True
    )


@pytest.mark.skipif(find_spec("triton") is None, reason="the kernels' language is not installed")
@pytest.mark.parametrize("checks", CHECKS, ids=lambda path: path.stem)
def test_kernels_pass_their_checks_in_the_triton_interpreter(checks: Path) -> None:
    run_checks(checks, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("checks", CHECKS, ids=lambda path: path.stem)
def test_kernels_pass_their_checks_on_a_gpu(checks: Path) -> None:
    run_checks(checks)
