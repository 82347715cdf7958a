"""The kernels between a block's matmuls against their plain meaning, in a process of their own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

CHECKS = Path(__file__).parents[1] / "fixtures" / "kernel_checks.py"


@pytest.mark.skipif(find_spec("triton") is None, reason="the kernels' language is not installed")
def test_by_the_interpreter():
    subprocess.run([sys.executable, CHECKS], env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_device():
    subprocess.run([sys.executable, CHECKS], check=True)
