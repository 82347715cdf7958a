"""Provide a fake NVML library, compiled once per session."""

import pytest

from fixtures.nvml import library


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a fake libnvidia-ml with two devices, for LD_LIBRARY_PATH."""
    return library(tmp_path_factory.mktemp("nvml") / "full")
