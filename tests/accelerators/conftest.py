"""The library that plays NVML, built once."""

import pytest

from fixtures.nvml import library


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> str:
    return library(tmp_path_factory.mktemp("nvml") / "full")
