"""GLM's trainers have the losses and gradients of the literal implementation, in every division,
precision and mode of computing.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fixtures.glm import (
    CPU,
    SHAPE,
    TRAINING,
    build_random_glm,
    compute_loss_literally,
    make_job,
    make_samples,
    make_trainer,
    pack_samples,
    score_all_literally,
)
from steelyard.engines.reference import train_cloze as reference
from steelyard.engines.torch import train_cloze as fused
from steelyard.errors import RequestError
from steelyard.models import glm_fused, tensors
from steelyard.training.glm_trainer import send_cloze_batch
from steelyard.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE_WITH_DROPOUT = SHAPE.model_copy(update={"dropout": 0.1})
TARGETS = torch.tensor(5.0)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in float64 wherever a precision says fp32."""
    monkeypatch.setitem(tensors.DTYPES, "fp32", torch.float64)


def make_micro_batches(division: str, *groups: list[int]):
    """Return one micro-batch for each group of sample indices."""
    clozes = make_samples(5)
    return [
        send_cloze_batch(pack_samples(division, [clozes[i] for i in group]), CPU)
        for group in groups
    ]


def gradients(glm_trainer: Trainer) -> list[Tensor]:
    """Return copies of the gradients of all parameters."""
    return [glm_trainer.optimizer.get_gradient(p).clone() for p in glm_trainer.optimizer.parameters]


def literal_gradients() -> tuple[float, list[Tensor]]:
    """Return the mean loss of five samples by the literal implementation, and its gradients by
    autograd.
    """
    model = build_random_glm()
    loss = compute_loss_literally(model, make_samples(5)) / 5
    loss.backward()
    return float(loss.detach()), [p.grad for p in model.parameters()]


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("make", [fused.make_cloze_trainer, reference.make_reference_trainer])
@pytest.mark.parametrize("division", ["closed", "open"])
def test_loss_and_gradients_equal_the_literal_implementation(
    division: str, make, monkeypatch
) -> None:
    """The samples come in two micro-batches; the fused trainer reads logits four rows at a time."""
    monkeypatch.setattr(glm_fused, "LOGIT_ROWS", 4)
    glm_trainer = make_trainer(make_job(), make)
    loss = glm_trainer.compute_gradients(make_micro_batches(division, [0, 1, 2], [3, 4]), TARGETS)
    expected_loss, grads = literal_gradients()
    assert float(loss) == pytest.approx(expected_loss, abs=1e-10)
    for (name, _), gradient, expected in zip(
        glm_trainer.model.named_parameters(), gradients(glm_trainer), grads, strict=True
    ):
        torch.testing.assert_close(
            gradient, expected, atol=1e-10, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert min(float(grad.abs().max()) for grad in grads) > 1e-5


@pytest.mark.parametrize("make", [fused.make_cloze_trainer, reference.make_reference_trainer])
def test_fp32_loss_and_gradients_are_near_the_literal_implementation(make) -> None:
    glm_trainer = make_trainer(make_job(), make)
    loss = glm_trainer.compute_gradients(make_micro_batches("closed", [0, 1, 2, 3, 4]), TARGETS)
    expected_loss, grads = literal_gradients()
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(expected_loss, rel=1e-6)
    for gradient, expected in zip(gradients(glm_trainer), grads, strict=True):
        largest = float(expected.abs().max())
        torch.testing.assert_close(gradient, expected.float(), atol=3e-6 * max(largest, 1), rtol=0)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("make", [fused.make_cloze_trainer, reference.make_reference_trainer])
def test_evaluation_applies_no_dropout(make) -> None:
    glm_trainer = make_trainer(make_job(shape=SHAPE_WITH_DROPOUT), make)
    scores = glm_trainer.evaluate(make_micro_batches("open", [0, 1, 2, 3, 4])[0])
    assert not scores.requires_grad
    for row, expected in zip(
        scores.tolist(), score_all_literally(build_random_glm(), make_samples(5)), strict=True
    ):
        assert row[: len(expected)] == pytest.approx(
            [float(score.detach()) for score in expected], abs=1e-10
        )
    assert np.isneginf(scores[0, 2:].numpy()).all()
    losses = [
        float(glm_trainer.model.loss(make_micro_batches("open", [0])[0]).detach()) for _ in range(2)
    ]
    assert losses[0] != losses[1]


@pytest.mark.usefixtures("wide")
def test_recomputation_drops_the_same_numbers() -> None:
    results = {}
    for recompute in ("none", "full"):
        glm_trainer = make_trainer(make_job(shape=SHAPE_WITH_DROPOUT, recompute=recompute))
        torch.manual_seed(7)
        loss = glm_trainer.compute_gradients(make_micro_batches("closed", [0, 1, 2]), TARGETS)
        results[recompute] = float(loss), gradients(glm_trainer)
    assert results["none"][0] == results["full"][0]
    for stored_gradient, recomputed_gradient in zip(
        results["none"][1], results["full"][1], strict=True
    ):
        torch.testing.assert_close(stored_gradient, recomputed_gradient, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("wide")
def test_the_gradient_with_dropout_equals_finite_differences() -> None:
    """Finite differences along one direction, with the same numbers dropped at both ends."""
    glm_trainer = make_trainer(make_job(shape=SHAPE_WITH_DROPOUT))
    micro = make_micro_batches("open", [0, 1, 2])
    weights = glm_trainer.optimizer.parameters
    direction = [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).double()
        for i, p in enumerate(weights)
    ]

    def loss_at(step: float) -> float:
        with torch.no_grad():
            for p, d in zip(weights, direction, strict=True):
                p.add_(d, alpha=step)
            torch.manual_seed(11)
            value = float(glm_trainer.model.loss(micro[0]) / TARGETS)
            for p, d in zip(weights, direction, strict=True):
                p.add_(d, alpha=-step)
        return value

    torch.manual_seed(11)
    glm_trainer.compute_gradients(micro, TARGETS)
    slope = sum(
        float((g * d).sum()) for g, d in zip(gradients(glm_trainer), direction, strict=True)
    )
    assert (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6 == pytest.approx(slope, rel=1e-6)


def test_warming_up_changes_nothing() -> None:
    glm_trainer = make_trainer(make_job(shape=SHAPE_WITH_DROPOUT))
    before = [p.detach().clone() for p in glm_trainer.optimizer.parameters]
    glm_trainer.warm_up(make_micro_batches("open", [0, 1])[0])
    assert all(
        torch.equal(a, b) for a, b in zip(before, glm_trainer.optimizer.parameters, strict=True)
    )
    assert not any(bool(grad.count_nonzero()) for grad in gradients(glm_trainer))
    assert len(glm_trainer.placement.buckets) == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-pure", "tf32"])
def test_every_precision_learns(precision: str) -> None:
    glm_trainer = make_trainer(make_job(precision))
    micro = make_micro_batches("open", [0, 1, 2], [3, 4])
    losses, norms = [], []
    for _ in range(12):
        losses.append(float(glm_trainer.compute_gradients(micro, glm_trainer.sum_over_replicas(5))))
        norms.append(float(glm_trainer.update(3e-3)))
    # the first loss scale overflows fp16, so that the first step is skipped
    skipped = 1 if precision == "fp16" else 0
    assert norms[:skipped] == [math.inf] * skipped
    assert losses[skipped] == losses[0]
    assert all(0 < norm < 1e4 for norm in norms[skipped:])
    assert losses[0] == pytest.approx(literal_gradients()[0], rel=0.05)
    assert losses[-1] < losses[0] / 2
    master_dtype = {
        "bf16": torch.float32,
        "fp16": torch.float32,
        "bf16-pure": torch.bfloat16,
        "tf32": torch.float32,
    }[precision]
    assert (
        {p.dtype for p in glm_trainer.optimizer.master}
        == {master_dtype}
        == {flat.dtype for flat in glm_trainer.placement.buckets}
    )
    count = sum(p.numel() for p in glm_trainer.optimizer.parameters)
    master_name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[master_dtype]
    types = {
        "parameters": {"tf32": "fp32", "bf16-pure": "bf16"}.get(precision, precision),
        "main_parameters": master_name,
    }
    assert glm_trainer.details() == {
        "attention": "padded",
        "parameters": count,
        "optimizer_states": 2 * count,
        "dtypes": {**types, "gradients": master_name, "states": master_name},
    }
    assert glm_trainer.model.weights == {"source": "random", "seed": 0}


def test_gradients_lie_in_a_few_flat_buckets(monkeypatch) -> None:
    monkeypatch.setattr("steelyard.training.placement.BUCKET_NUMBERS", 5000)
    glm_trainer = make_trainer(make_job("bf16"))
    assert 2 < len(glm_trainer.placement.buckets) < 12
    glm_trainer.compute_gradients(make_micro_batches("open", [0, 1]), TARGETS)
    flattened = [gradient.flatten() for gradient in gradients(glm_trainer)]
    assert torch.equal(torch.cat(flattened), torch.cat(glm_trainer.placement.buckets))
    glm_trainer.update(1e-3)
    assert not any(bool(flat.count_nonzero()) for flat in glm_trainer.placement.buckets)


def test_a_replica_without_samples_takes_its_step() -> None:
    glm_trainer = make_trainer(make_job("fp16"))
    assert float(glm_trainer.compute_gradients([], TARGETS)) == 0.0
    assert float(glm_trainer.update(1e-3)) == 0.0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_restored_trainer_continues_bit_for_bit(precision: str) -> None:
    """Three steps of one trainer equal two steps of another and a third by a fresh trainer that got
    its state.
    """
    whole, first, second = (make_trainer(make_job(precision)) for _ in range(3))
    micro = make_micro_batches("open", [0, 1, 2], [3, 4])

    def step(glm_trainer: Trainer) -> tuple[float, float]:
        return float(glm_trainer.compute_gradients(micro, TARGETS)), float(glm_trainer.update(1e-3))

    expected = [step(whole) for _ in range(3)]
    assert [step(first), step(first)] == expected[:2]
    saved = {name: tensor.clone() for name, tensor in first.list_state().items()}
    assert {f"weights.{name}" for name, _ in first.model.named_parameters()} < saved.keys()
    for name, tensor in second.list_state().items():
        tensor.copy_(saved[name])
    second.restore(first.read_scalars())
    assert step(second) == expected[2] != expected[1]


def test_unsupported_tunes_are_refused_in_one_line() -> None:
    for tune, words in (
        (
            {"attention": "rows"},
            "tune.attention='rows' is not known; allowed: auto, flash, packed, padded",
        ),
        (
            {"attention": "packed"},
            "tune.attention=packed needs a GPU with Triton, tune.compile=true, a 16-bit precision",
        ),
        (
            {"recompute": "selective"},
            "tune.recompute='selective' does not work with GLM; allowed: none, full",
        ),
    ):
        with pytest.raises(RequestError, match=words) as caught:
            fused.make_cloze_trainer(make_job(**tune))
        assert "\n" not in str(caught.value)
    odd = SHAPE.model_copy(update={"hidden": 24, "heads": 4})
    with pytest.raises(
        RequestError,
        match="needs a head dimension that is a multiple of 8 up to 256, not 6; choose padded",
    ):
        fused.make_cloze_trainer(make_job(shape=odd, attention="flash"))


def test_padding_counted_by_the_reference_engine() -> None:
    clozes = make_samples(3)
    lengths = [
        len(cloze.context) + len(piece) + 1 for cloze in clozes for piece in cloze.candidates
    ]
    for division in ("closed", "open"):
        assert reference.count_padding(pack_samples(division, clozes), 24) == 24 * len(
            lengths
        ) - sum(lengths)


@pytest.mark.full
@pytest.mark.usefixtures("wide")
def test_compiled_equals_eager() -> None:
    """Micro-batches of other sizes compile nothing new."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    glm_trainer = make_trainer(make_job(compile=True))
    parts = make_micro_batches("closed", [0, 1], [2], [3, 4])
    glm_trainer.warm_up(parts[0])
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    loss = glm_trainer.compute_gradients(parts, TARGETS)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled > 0
    expected_loss, grads = literal_gradients()
    assert float(loss) == pytest.approx(expected_loss, abs=1e-10)
    for gradient, expected in zip(gradients(glm_trainer), grads, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-10, rtol=0)


@pytest.mark.full
def test_compiled_dropout_drops_the_same_numbers_in_backward() -> None:
    torch.compiler.reset()
    kernels = glm_fused.GlmKernels(True, False, 1e-5, 0.5)
    norm = torch.nn.LayerNorm(32)
    for rows in (40, 57):
        x, delta = torch.randn(rows, 32), torch.randn(rows, 32, requires_grad=True)
        out, normed = kernels.add_norm(x, delta, norm, 0.5)
        weight = torch.randn(rows, 32)
        keep_mask = (out - x).abs() > 1e-6
        torch.testing.assert_close(out, x + torch.where(keep_mask, 2 * delta, 0), atol=1e-5, rtol=0)
        assert 0.4 < float(keep_mask.float().mean()) < 0.6
        # compiled backward donates its buffers, so it can run only once
        (grad,) = torch.autograd.grad((out, normed), delta, (weight, weight.flip(0)))
        plain_out = x + torch.where(keep_mask, 2 * delta, 0)
        (expected,) = torch.autograd.grad(
            (plain_out, norm(plain_out)), delta, (weight, weight.flip(0))
        )
        torch.testing.assert_close(grad, expected, atol=1e-4, rtol=0)
        assert not bool(grad[~keep_mask].count_nonzero())


@pytest.mark.full
def test_two_replicas_learn_what_one_learns(tmp_path: Path) -> None:
    """Two processes over gloo, in float64: five samples divided unevenly, three steps with
    clipping. Losses, gradient norms and weights equal those of one process.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=0",
    ]
    tests = Path(__file__).parents[1]
    command += [str(tests / "ranks" / "glm_replicas.py"), str(tmp_path)]
    path = os.pathsep.join((str(tests), *filter(None, [os.environ.get("PYTHONPATH")])))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=env
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"rank-{i}.json").read_text()) for i in range(2))
    assert first["samples"] == second["samples"] == 5.0
    assert first["both"] == second["both"]
    assert first["both"]["losses"] == pytest.approx(first["alone"]["losses"], abs=1e-11)
    assert first["both"]["norms"] == pytest.approx(first["alone"]["norms"], abs=1e-11)
    assert first["both"]["weights"] == pytest.approx(first["alone"]["weights"], abs=1e-11)
    assert len(set(first["alone"]["losses"])) == 3
    assert max(first["alone"]["norms"]) > TRAINING.clip
