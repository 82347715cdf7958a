"""Provide a fake NVML library, compiled once per session."""

import pytest

from fixtures.nvml import build_fake_nvml


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a fake libnvidia-ml with two devices, for LD_LIBRARY_PATH."""
    return build_fake_nvml(tmp_path_factory.mktemp("nvml") / "full")
