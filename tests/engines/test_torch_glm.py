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
    build,
    job,
    literal_loss,
    literal_scores,
    packed,
    samples,
    trainer,
)
from steelyard.engines.reference import train_cloze as reference
from steelyard.engines.torch import train_cloze as fused
from steelyard.errors import RequestError
from steelyard.models import glm_fused, tensors
from steelyard.training.glm_trainer import send_cloze_batch
from steelyard.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
DROPPED = SHAPE.model_copy(update={"dropout": 0.1})
TARGETS = torch.tensor(5.0)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in float64 wherever a precision says fp32."""
    monkeypatch.setitem(tensors.DTYPES, "fp32", torch.float64)


def micros(division: str, *groups: list[int]):
    """Return one micro-batch for each group of sample indices."""
    some = samples(5)
    return [send_cloze_batch(packed(division, [some[i] for i in group]), CPU) for group in groups]


def gradients(of: Trainer) -> list[Tensor]:
    """Return copies of the gradients of all parameters."""
    return [of.optimizer.get_gradient(p).clone() for p in of.optimizer.parameters]


def literal_gradients() -> tuple[float, list[Tensor]]:
    """Return the mean loss of five samples by the literal implementation, and its gradients by
    autograd.
    """
    model = build()
    loss = literal_loss(model, samples(5)) / 5
    loss.backward()
    return float(loss.detach()), [p.grad for p in model.parameters()]


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("make", [fused.make_cloze_trainer, reference.make_reference_trainer])
@pytest.mark.parametrize("division", ["closed", "open"])
def test_loss_and_gradients_are_the_literal_ones(division: str, make, monkeypatch) -> None:
    """The samples come in two micro-batches; the fused trainer reads logits four rows at a time."""
    monkeypatch.setattr(glm_fused, "LOGIT_ROWS", 4)
    made = trainer(job(), make)
    loss = made.compute_gradients(micros(division, [0, 1, 2], [3, 4]), TARGETS)
    wanted, grads = literal_gradients()
    assert float(loss) == pytest.approx(wanted, abs=1e-10)
    for (name, _), found, expected in zip(
        made.model.named_parameters(), gradients(made), grads, strict=True
    ):
        torch.testing.assert_close(
            found, expected, atol=1e-10, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert min(float(grad.abs().max()) for grad in grads) > 1e-5


@pytest.mark.parametrize("make", [fused.make_cloze_trainer, reference.make_reference_trainer])
def test_in_fp32_the_ways_agree(make) -> None:
    made = trainer(job(), make)
    loss = made.compute_gradients(micros("closed", [0, 1, 2, 3, 4]), TARGETS)
    wanted, grads = literal_gradients()
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(wanted, rel=1e-6)
    for found, expected in zip(gradients(made), grads, strict=True):
        most = float(expected.abs().max())
        torch.testing.assert_close(found, expected.float(), atol=3e-6 * max(most, 1), rtol=0)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("make", [fused.make_cloze_trainer, reference.make_reference_trainer])
def test_scores_drop_nothing(make) -> None:
    made = trainer(job(shape=DROPPED), make)
    found = made.evaluate(micros("open", [0, 1, 2, 3, 4])[0])
    assert not found.requires_grad
    for row, wanted in zip(found.tolist(), literal_scores(build(), samples(5)), strict=True):
        assert row[: len(wanted)] == pytest.approx(
            [float(one.detach()) for one in wanted], abs=1e-10
        )
    assert np.isneginf(found[0, 2:].numpy()).all()
    losses = [float(made.model.loss(micros("open", [0])[0]).detach()) for _ in range(2)]
    assert losses[0] != losses[1]


@pytest.mark.usefixtures("wide")
def test_what_is_computed_again_drops_the_same() -> None:
    found = {}
    for how in ("none", "full"):
        made = trainer(job(shape=DROPPED, recompute=how))
        torch.manual_seed(7)
        loss = made.compute_gradients(micros("closed", [0, 1, 2]), TARGETS)
        found[how] = float(loss), gradients(made)
    assert found["none"][0] == found["full"][0]
    for one, other in zip(found["none"][1], found["full"][1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("wide")
def test_a_dropped_loss_has_its_own_gradient() -> None:
    """Finite differences along one direction, with the same numbers dropped at both ends."""
    made = trainer(job(shape=DROPPED))
    micro = micros("open", [0, 1, 2])
    weights = made.optimizer.parameters
    direction = [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).double()
        for i, p in enumerate(weights)
    ]

    def loss_at(step: float) -> float:
        with torch.no_grad():
            for p, d in zip(weights, direction, strict=True):
                p.add_(d, alpha=step)
            torch.manual_seed(11)
            value = float(made.model.loss(micro[0]) / TARGETS)
            for p, d in zip(weights, direction, strict=True):
                p.add_(d, alpha=-step)
        return value

    torch.manual_seed(11)
    made.compute_gradients(micro, TARGETS)
    slope = sum(float((g * d).sum()) for g, d in zip(gradients(made), direction, strict=True))
    assert (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6 == pytest.approx(slope, rel=1e-6)


def test_warming_up_changes_nothing() -> None:
    made = trainer(job(shape=DROPPED))
    before = [p.detach().clone() for p in made.optimizer.parameters]
    made.warm_up(micros("open", [0, 1])[0])
    assert all(torch.equal(a, b) for a, b in zip(before, made.optimizer.parameters, strict=True))
    assert not any(bool(grad.count_nonzero()) for grad in gradients(made))
    assert len(made.placement.buckets) == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-pure", "tf32"])
def test_every_precision_learns(precision: str) -> None:
    made = trainer(job(precision))
    micro = micros("open", [0, 1, 2], [3, 4])
    losses, norms = [], []
    for _ in range(12):
        losses.append(float(made.compute_gradients(micro, made.sum_over_replicas(5))))
        norms.append(float(made.update(3e-3)))
    # the first loss scale overflows fp16, so that the first step is skipped
    skipped = 1 if precision == "fp16" else 0
    assert norms[:skipped] == [math.inf] * skipped
    assert losses[skipped] == losses[0]
    assert all(0 < norm < 1e4 for norm in norms[skipped:])
    assert losses[0] == pytest.approx(literal_gradients()[0], rel=0.05)
    assert losses[-1] < losses[0] / 2
    kept = {
        "bf16": torch.float32,
        "fp16": torch.float32,
        "bf16-pure": torch.bfloat16,
        "tf32": torch.float32,
    }[precision]
    assert (
        {p.dtype for p in made.optimizer.master}
        == {kept}
        == {flat.dtype for flat in made.placement.buckets}
    )
    count = sum(p.numel() for p in made.optimizer.parameters)
    short = {torch.float32: "fp32", torch.bfloat16: "bf16"}[kept]
    types = {
        "parameters": {"tf32": "fp32", "bf16-pure": "bf16"}.get(precision, precision),
        "main_parameters": short,
    }
    assert made.details() == {
        "attention": "padded",
        "parameters": count,
        "optimizer_states": 2 * count,
        "dtypes": {**types, "gradients": short, "states": short},
    }
    assert made.model.weights == {"source": "random", "seed": 0}


def test_gradients_lie_in_few_rows(monkeypatch) -> None:
    monkeypatch.setattr("steelyard.training.placement.BUCKET_NUMBERS", 5000)
    made = trainer(job("bf16"))
    assert 2 < len(made.placement.buckets) < 12
    made.compute_gradients(micros("open", [0, 1]), TARGETS)
    every = [one.flatten() for one in gradients(made)]
    assert torch.equal(torch.cat(every), torch.cat(made.placement.buckets))
    made.update(1e-3)
    assert not any(bool(flat.count_nonzero()) for flat in made.placement.buckets)


def test_a_replica_without_samples_takes_its_step() -> None:
    made = trainer(job("fp16"))
    assert float(made.compute_gradients([], TARGETS)) == 0.0
    assert float(made.update(1e-3)) == 0.0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_goes_on_where_another_stopped(precision: str) -> None:
    """Three steps of one trainer equal two steps of another and a third by a fresh trainer that got
    its state.
    """
    whole, first, second = (trainer(job(precision)) for _ in range(3))
    micro = micros("open", [0, 1, 2], [3, 4])

    def step(made: Trainer) -> tuple[float, float]:
        return float(made.compute_gradients(micro, TARGETS)), float(made.update(1e-3))

    expected = [step(whole) for _ in range(3)]
    assert [step(first), step(first)] == expected[:2]
    kept = {name: tensor.clone() for name, tensor in first.list_state().items()}
    assert {f"weights.{name}" for name, _ in first.model.named_parameters()} < kept.keys()
    for name, tensor in second.list_state().items():
        tensor.copy_(kept[name])
    second.restore(first.read_scalars())
    assert step(second) == expected[2] != expected[1]


def test_refusals() -> None:
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
            fused.make_cloze_trainer(job(**tune))
        assert "\n" not in str(caught.value)
    odd = SHAPE.model_copy(update={"hidden": 24, "heads": 4})
    with pytest.raises(
        RequestError, match="takes heads of 8, 16, … 256 numbers, not 6; choose padded"
    ):
        fused.make_cloze_trainer(job(shape=odd, attention="flash"))


def test_padding_of_the_reference() -> None:
    some = samples(3)
    lengths = [len(one.context) + len(piece) + 1 for one in some for piece in one.candidates]
    for division in ("closed", "open"):
        assert reference.count_padding(packed(division, some), 24) == 24 * len(lengths) - sum(
            lengths
        )


@pytest.mark.full
@pytest.mark.usefixtures("wide")
def test_compiled_equals_eager() -> None:
    """Micro-batches of other sizes compile nothing new."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    made = trainer(job(compile=True))
    parts = micros("closed", [0, 1], [2], [3, 4])
    made.warm_up(parts[0])
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    loss = made.compute_gradients(parts, TARGETS)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled > 0
    wanted, grads = literal_gradients()
    assert float(loss) == pytest.approx(wanted, abs=1e-10)
    for found, expected in zip(gradients(made), grads, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.full
def test_compiled_dropout_drops_the_same_backward() -> None:
    torch.compiler.reset()
    kernels = glm_fused.GlmKernels(True, False, 1e-5, 0.5)
    norm = torch.nn.LayerNorm(32)
    for rows in (40, 57):
        x, delta = torch.randn(rows, 32), torch.randn(rows, 32, requires_grad=True)
        out, normed = kernels.add_norm(x, delta, norm, 0.5)
        weight = torch.randn(rows, 32)
        kept = (out - x).abs() > 1e-6
        torch.testing.assert_close(out, x + torch.where(kept, 2 * delta, 0), atol=1e-5, rtol=0)
        assert 0.4 < float(kept.float().mean()) < 0.6
        # compiled backward donates its buffers, so it can run only once
        (grad,) = torch.autograd.grad((out, normed), delta, (weight, weight.flip(0)))
        same = x + torch.where(kept, 2 * delta, 0)
        (wanted,) = torch.autograd.grad((same, norm(same)), delta, (weight, weight.flip(0)))
        torch.testing.assert_close(grad, wanted, atol=1e-4, rtol=0)
        assert not bool(grad[~kept].count_nonzero())


@pytest.mark.full
def test_two_replicas_are_one(tmp_path: Path) -> None:
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
