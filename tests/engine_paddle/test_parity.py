"""Engine paddle against engine torch, in fp32 on CPUs: losses and gradient norms of ten steps, and
held-out losses.

A loss does not depend on the plan, so all runs of a case are compared with one run of engine torch.
"""

from pathlib import Path

import pytest
import torch

from engine_paddle.alike import assert_same_training, training_curve
from engine_paddle.conftest import CORPUS, MODEL, Run
from fixtures.huggingface import list_tensor_sizes, write_hf_folder
from steelyard.case.resolve import resolve_case
from steelyard.models.llama_init import get_llama_shape
from steelyard.record.record import Record

pytestmark = pytest.mark.full

ALPACA = "aquila2-7b-alpaca"
OPTIMIZER_STATES = 238_720  # two for each of the 119,360 parameters
MODES: dict[str, tuple[tuple[str, ...], int, list[str], int]] = {
    "single": ((), 1, ["single"], OPTIMIZER_STATES),
    "recompute": (("tune.recompute=full",), 1, ["single", "recompute"], OPTIMIZER_STATES),
    "dp": (("tune.parallel=DP2",), 2, ["dp"], OPTIMIZER_STATES),
    "dp with recompute": (
        ("tune.parallel=DP2", "tune.recompute=full"),
        2,
        ["dp", "recompute"],
        OPTIMIZER_STATES,
    ),
    "sharding 1": (("tune.parallel=DP2", "tune.sharding=1"), 2, ["sharding 1"], 119_424),
}
EXCHANGE = {"dp": "inside", "dp with recompute": "separate", "sharding 1": "inside"}


@pytest.mark.parametrize("mode", MODES)
def test_training_equals_engine_torch_in_every_mode(run: Run, corpus: Record, mode: str) -> None:
    settings, devices, names, states = MODES[mode]
    record = run("paddle", CORPUS, *MODEL, *settings, devices=devices)
    assert_same_training(record, corpus)
    details = record.engine.details.model_dump()
    assert (details["modes"], details["never_run"], details["compiled"]) == (names, [], False)
    assert (details["parameters"], details["optimizer_states"], details["master_weights"]) == (
        119_360,
        states,
        0,
    )
    assert details["dtypes"] == dict.fromkeys(
        ("gradients", "logits", "parameters", "states"), "fp32"
    )
    assert details.get("exchange") == EXCHANGE.get(mode)
    assert record.weights == corpus.weights
    for rank in range(1, devices):
        assert list(training_curve(record, rank)) == list(training_curve(record))
    software = record.environment.software
    assert software.packages["paddlepaddle"].startswith(details["paddle"])
    assert "torch" not in software.packages
    assert software.python is not None
    assert str(Path(software.python)) == software.python  # a version, not a path


def test_packed_rows_and_loaded_weights_train_as_in_engine_torch(run: Run, tmp_path: Path) -> None:
    """Segments of a row do not see each other, and bf16 weights are read alike."""
    shape = get_llama_shape(resolve_case(ALPACA, "smoke").case.question.model)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: (
            (
                torch.randn(size, generator=generator) * 0.1 if len(size) > 1 else torch.ones(size)
            ).to(torch.bfloat16)
        )
        for name, size in list_tensor_sizes(shape).items()
    }
    folder = write_hf_folder(tmp_path, shape, tensors)
    torch_record, paddle_record = (
        run(engine, ALPACA, weights=folder) for engine in ("torch", "paddle")
    )
    assert_same_training(paddle_record, torch_record)
    assert paddle_record.weights == torch_record.weights
    assert paddle_record.weights.source == "huggingface"
