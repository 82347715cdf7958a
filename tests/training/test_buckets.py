"""Micro-batches of a cloze filled up to a bucket: the same losses, scores and gradients, padding counted, few sizes."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fixtures.glm import CPU, END, START, Rerun, job, packed, samples, trainer
from steelyard.data.cloze import ClozeRows
from steelyard.engines.torch import glm as fused
from steelyard.models import tensors
from steelyard.training import buckets
from steelyard.training.buckets import Buckets, fill, size_of, together
from steelyard.training.glm import to_device
from steelyard.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
DIVISIONS = ["closed", "open"]
TARGETS = torch.tensor(5.0)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "GRAIN", 16)
    monkeypatch.setattr(buckets, "ROW", 5)
    monkeypatch.setitem(tensors.DTYPES, "fp32", torch.float64)


def rows_of(division: str, count: int = 5, batch: int = 2) -> ClozeRows:
    return ClozeRows(samples(count), samples(2), division, batch, 1, START, END)


def filled(division: str, groups: list[list[int]]):
    """Micro-batches as they are, and filled up."""
    rows = rows_of(division)
    sizes = [together(size_of(rows, key) for key in group) for group in groups]
    made = Buckets(sizes)
    bucket = [made.of(size) for size in sizes]
    packs = [rows.pack(group, held=False) for group in groups]
    plain = [to_device(pack, CPU) for pack in packs]
    return plain, [to_device(fill(pack, one), CPU, one) for pack, one in zip(packs, bucket, strict=True)], bucket


def gradients(of: Trainer) -> list[Tensor]:
    return [of.optimizer.gradient(p).clone() for p in of.optimizer.parameters]


def learned(made: Trainer, micros) -> tuple[float, list[Tensor]]:
    loss = float(made.learn(micros, TARGETS))
    found = gradients(made)
    made.optimizer.zero_grad()
    return loss, found


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("division", DIVISIONS)
def test_losses_scores_and_gradients_are_equal(division: str, recorded: bool) -> None:
    """Without dropout. With it the numbers dropped are drawn by a token's place, which differs: another draw, the same mean."""
    plain, full, _ = filled(division, [[0, 1, 2], [3, 4]])
    made = trainer(job())
    other = trainer(job(), lambda of: fused.trainer(of, Rerun() if recorded else None))
    assert sum(len(micro.tokens) for micro in full) > sum(len(micro.tokens) for micro in plain)
    for one, two in zip(plain, full, strict=True):
        scores, wanted = other.evaluate(two), made.evaluate(one)
        width = wanted.shape[1]
        both = wanted.isfinite()
        assert torch.equal(both, scores[:, :width].isfinite())
        assert not scores[:, width:].isfinite().any()
        torch.testing.assert_close(scores[:, :width][both], wanted[both], atol=1e-12, rtol=0)
    for _ in range(3):  # as they are, recorded, replayed
        loss, wanted = learned(made, plain)
        found, grads = learned(other, full)
        assert found == pytest.approx(loss, abs=1e-12)
        for one, two in zip(grads, wanted, strict=True):
            torch.testing.assert_close(one, two, atol=1e-12, rtol=0)
    assert other.details().get("graphs") == (2 if recorded else None)


def test_one_recording_serves_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three micro-batches of one bucket, in turn: each has its own loss and gradients, and one pair of graphs is there."""
    monkeypatch.setattr(buckets, "GRAIN", 64)
    groups = [[0, 1], [1, 2], [2, 0]]
    plain, full, bucket = filled("open", groups)
    assert len({(one.tokens, one.samples) for one in bucket}) == 1
    assert len({len(micro.tokens) for micro in plain}) > 1
    record = Rerun()
    made, other = trainer(job()), trainer(job(), lambda of: fused.trainer(of, record))
    losses = []
    for one, two in zip(2 * plain, 2 * full, strict=True):
        (loss, wanted), (found, grads) = learned(made, [one]), learned(other, [two])
        losses.append(loss)
        assert found == pytest.approx(loss, abs=1e-12)
        for a, b in zip(grads, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    assert len(set(losses)) == 3
    assert len(record.made) == 2


def test_padding_learns_nothing() -> None:
    """What stands in the padding changes nothing, and its own rows of the tables get exactly no gradient."""
    _, full, _ = filled("open", [[0, 1], [2, 3, 4]])
    made = trainer(job())
    loss, grads = learned(made, full[:1])
    micro = full[0]
    lengths = micro.layout.lengths
    real = sum(lengths[0][:2])
    padding = slice(real, sum(lengths[0]))
    assert padding.stop > padding.start
    micro.tokens[padding] = 58  # no sample has it
    micro.positions[padding] = 23
    again, other = learned(made, [micro])
    assert again == loss
    for one, two in zip(grads, other, strict=True):
        torch.testing.assert_close(one, two, atol=1e-15, rtol=0)
    names = [name for name, _ in made.model.named_parameters()]
    assert not other[names.index("transformer.position_embeddings.weight")][23].count_nonzero()


@pytest.mark.parametrize("division", DIVISIONS)
def test_what_fills_a_bucket(division: str) -> None:
    rows = rows_of(division)
    sizes = [together(size_of(rows, key) for key in group) for group in ([0, 1, 2], [3, 4])]
    packs = [rows.pack(group, held=False) for group in ([0, 1, 2], [3, 4])]
    made = Buckets(sizes)
    for size, pack in zip(sizes, packs, strict=True):
        assert (size.tokens, size.logits) == (pack.counts["tokens"], pack.counts["logits"])
        assert (size.contexts, size.spans, size.samples) == (len(pack.contexts), len(pack.spans), len(pack.candidates))
        bucket = made.of(size)
        full = fill(pack, bucket)
        assert len(full.tokens) == bucket.tokens == sum(full.contexts) + sum(full.spans)
        assert bucket.tokens % 16 == 0
        assert 0 <= bucket.tokens - size.tokens < 16
        assert full.counts == pack.counts | {"padded": bucket.tokens - size.tokens}
        assert (len(full.contexts), len(full.spans), sum(full.groups)) == (
            bucket.room.contexts,
            bucket.room.spans,
            bucket.room.spans,
        )
        assert max(full.contexts) <= bucket.room.longest[0]
        assert np.array_equal(full.tokens[: sum(pack.contexts)], pack.tokens[: sum(pack.contexts)])
        assert np.array_equal(full.tokens[sum(full.contexts) :], pack.tokens[sum(pack.contexts) :])


def test_a_pass_has_few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of("closed", 40)
    groups = [[key, (key + 7) % 40] for key in range(40)]
    sizes = [together(size_of(rows, key) for key in group) for group in groups]
    for most, grain in ((40, 16), (4, 32), (2, 64), (1, 128)):
        monkeypatch.setattr(buckets, "MOST", most)
        made = Buckets(sizes)
        assert made.grain == grain
        assert len({made.of(size) for size in sizes}) <= most


def test_too_much_for_a_bucket() -> None:
    rows = rows_of("open")
    small = Buckets([size_of(rows, 0)]).of(size_of(rows, 0))
    with pytest.raises(ValueError, match="no room for 2 contexts and 5 spans"):
        fill(packed("open", samples(2)), small)
