"""Runs of engine paddle as a user makes them: workers use a Python of their own, which `make
engine-paddle` installs.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_paddle.alike import STEPS
from steelyard.case.request import EngineSettings, Request
from steelyard.case.resolve import resolve_case
from steelyard.record.record import Record
from steelyard.run.checked_request import check_request
from steelyard.run.parent import run_case

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("STEELYARD_PADDLE_PYTHON", ROOT / ".venv-paddle" / "bin" / "python"))
CORPUS = "llama1-7b-openwebtext"
# Grouped-query attention and biases, which the shipped smoke models lack; at least two
# micro-batches in every step.
MODEL = ("question.model.kv_heads=2", "question.model.qkv_bias=true", "tune.micro_batch=2")

Run = Callable[..., Record]


@pytest.fixture(scope="session")
def python() -> str:
    """The path of the Python that has Paddle; tests are skipped without it."""
    if not PYTHON.exists():
        pytest.skip(
            f"no {PYTHON}: Paddle lives in a virtual environment of its own, see make engine-paddle"
        )
    return str(PYTHON)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory, python: str) -> Run:
    """A function that runs a case at size smoke on CPUs and returns its record."""

    def run_to_record(
        engine: str,
        case: str,
        *settings: str,
        devices: int = 1,
        weights: Path | None = None,
        precision: str | None = None,
    ) -> Record:
        request = Request(
            resolve_case(case, "smoke", precision, None, list(settings)),
            engine=engine,
            engine_settings=EngineSettings(python=python if engine == "paddle" else None),
            accelerator="cpu",
            devices=devices,
            steps=STEPS,
            weights=weights,
            out=tmp_path_factory.mktemp("records"),
        )
        return run_case(check_request(request))[0]

    return run_to_record


@pytest.fixture(scope="session")
def corpus(run: Run) -> Record:
    """The record of engine torch on one device."""
    return run("torch", CORPUS, *MODEL)
