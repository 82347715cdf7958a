"""Cloze micro-batches filled up to buckets: equal losses, scores and gradients, padding that is
counted, and few sizes.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from fixtures.glm import CPU, END, SHAPE, START, TRAINING, Rerun, job, packed, samples, trainer
from steelyard.data.cloze_samples import ClozeDataset
from steelyard.data.counting import ClozeCounter
from steelyard.engine.work import Work
from steelyard.engines.torch import train_cloze as fused
from steelyard.engines.torch.train_cloze import TorchCloze
from steelyard.models import tensors
from steelyard.training import size_buckets
from steelyard.training.glm_trainer import (
    ClozeMicroBatch,
    LogProbComputation,
    TrainedGlm,
    send_cloze_batch,
)
from steelyard.training.size_buckets import SizeBuckets, combine_sizes, fill_pack, measure_sample
from steelyard.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
DIVISIONS = ["closed", "open"]
TARGETS = torch.tensor(5.0)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make buckets small enough for the test samples, and compute in float64 for fp32."""
    monkeypatch.setattr(size_buckets, "TOKEN_MULTIPLE", 16)
    monkeypatch.setattr(size_buckets, "FILLER_TOKENS", 5)
    monkeypatch.setitem(tensors.DTYPES, "fp32", torch.float64)


def rows_of(division: str, count: int = 5, batch: int = 2) -> ClozeDataset:
    """Return cloze rows with this many samples to train on and two held out."""
    return ClozeDataset(samples(count), samples(2), division, batch, 1, START, END)


def filled(division: str, groups: list[list[int]]):
    """Return the micro-batches of groups of sample indices as they are, filled up to their buckets,
    and the buckets.
    """
    rows = rows_of(division)
    sizes = [combine_sizes(measure_sample(rows, key) for key in group) for group in groups]
    made = SizeBuckets(sizes)
    bucket = [made.find_bucket(size) for size in sizes]
    packs = [rows.pack(group, held_out=False) for group in groups]
    plain = [send_cloze_batch(pack, CPU) for pack in packs]
    return (
        plain,
        [
            send_cloze_batch(fill_pack(pack, one), CPU, one)
            for pack, one in zip(packs, bucket, strict=True)
        ],
        bucket,
    )


def gradients(of: Trainer) -> list[Tensor]:
    """Return copies of the gradients of all parameters."""
    return [of.optimizer.get_gradient(p).clone() for p in of.optimizer.parameters]


def learned(made: Trainer, micros) -> tuple[float, list[Tensor]]:
    """Return the loss and gradients of micro-batches; gradients are zeroed afterwards."""
    loss = float(made.compute_gradients(micros, TARGETS))
    found = gradients(made)
    made.optimizer.zero_grad()
    return loss, found


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("division", DIVISIONS)
def test_losses_scores_and_gradients_are_equal(division: str, recorded: bool) -> None:
    """Without dropout; with it, the mask depends on a token's position, which differs."""
    plain, full, _ = filled(division, [[0, 1, 2], [3, 4]])
    made = trainer(job())
    other = trainer(job(), lambda of: fused.make_cloze_trainer(of, Rerun() if recorded else None))
    assert sum(len(micro.tokens) for micro in full) > sum(len(micro.tokens) for micro in plain)
    for one, two in zip(plain, full, strict=True):
        scores, wanted = other.evaluate(two), made.evaluate(one)
        width = wanted.shape[1]
        both = wanted.isfinite()
        assert torch.equal(both, scores[:, :width].isfinite())
        assert not scores[:, width:].isfinite().any()
        torch.testing.assert_close(scores[:, :width][both], wanted[both], atol=1e-12, rtol=0)
    for _ in range(3):  # run, recorded, replayed
        loss, wanted = learned(made, plain)
        found, grads = learned(other, full)
        assert found == pytest.approx(loss, abs=1e-12)
        for one, two in zip(grads, wanted, strict=True):
            torch.testing.assert_close(one, two, atol=1e-12, rtol=0)
    assert other.details().get("graphs") == (2 if recorded else None)


def test_one_recording_serves_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three micro-batches share one bucket: each has its own loss and gradients, and one pair of
    graphs is recorded.
    """
    monkeypatch.setattr(size_buckets, "TOKEN_MULTIPLE", 64)
    groups = [[0, 1], [1, 2], [2, 0]]
    plain, full, bucket = filled("open", groups)
    assert len({(one.tokens, one.samples) for one in bucket}) == 1
    assert len({len(micro.tokens) for micro in plain}) > 1
    record = Rerun()
    made, other = trainer(job()), trainer(job(), lambda of: fused.make_cloze_trainer(of, record))
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
    """Other tokens in the padding change neither loss nor gradients, and embedding rows that only
    padding uses get a gradient of exactly zero.
    """
    _, full, _ = filled("open", [[0, 1], [2, 3, 4]])
    made = trainer(job())
    loss, grads = learned(made, full[:1])
    micro = full[0]
    lengths = micro.layout.lengths
    real = sum(lengths[0][:2])
    padding = slice(real, sum(lengths[0]))
    assert padding.stop > padding.start
    micro.tokens[padding] = 58  # in no sample
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
    sizes = [
        combine_sizes(measure_sample(rows, key) for key in group) for group in ([0, 1, 2], [3, 4])
    ]
    packs = [rows.pack(group, held_out=False) for group in ([0, 1, 2], [3, 4])]
    made = SizeBuckets(sizes)
    for size, pack in zip(sizes, packs, strict=True):
        assert (size.tokens, size.logits) == (pack.counts["tokens"], pack.counts["logits"])
        assert (size.contexts, size.spans, size.samples) == (
            len(pack.contexts),
            len(pack.spans),
            len(pack.candidates),
        )
        bucket = made.find_bucket(size)
        full = fill_pack(pack, bucket)
        assert len(full.tokens) == bucket.tokens == sum(full.contexts) + sum(full.spans)
        assert bucket.tokens % 16 == 0
        assert 0 <= bucket.tokens - size.tokens < 16
        assert full.counts == pack.counts | {"padded": bucket.tokens - size.tokens}
        assert (len(full.contexts), len(full.spans), sum(full.groups)) == (
            bucket.capacity.contexts,
            bucket.capacity.spans,
            bucket.capacity.spans,
        )
        assert max(full.contexts) <= bucket.capacity.longest[0]
        assert np.array_equal(full.tokens[: sum(pack.contexts)], pack.tokens[: sum(pack.contexts)])
        assert np.array_equal(full.tokens[sum(full.contexts) :], pack.tokens[sum(pack.contexts) :])


def test_a_pass_has_few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of("closed", 40)
    groups = [[key, (key + 7) % 40] for key in range(40)]
    sizes = [combine_sizes(measure_sample(rows, key) for key in group) for group in groups]
    for most, grain in ((40, 16), (4, 32), (2, 64), (1, 128)):
        monkeypatch.setattr(size_buckets, "MAX_BUCKETS", most)
        made = SizeBuckets(sizes)
        assert made.token_multiple == grain
        assert len({made.find_bucket(size) for size in sizes}) <= most


def test_too_much_for_a_bucket() -> None:
    rows = rows_of("open")
    small = SizeBuckets([measure_sample(rows, 0)]).find_bucket(measure_sample(rows, 0))
    with pytest.raises(ValueError, match="no room for 2 contexts and 5 spans"):
        fill_pack(packed("open", samples(2)), small)


def passed(record: Rerun | None, dropout: float = 0.0) -> tuple[list[Work], TorchCloze]:
    """Run a train pass of six steps, three samples to a micro-batch; return its works and the loop.
    None records no graphs.
    """
    train = TRAINING.model_copy(update={"batch": 8, "steps": 6})
    of = job(shape=SHAPE.model_copy(update={"dropout": dropout}), train=train, micro_batch=3)
    of.case.gate = None
    of.inputs = ClozeDataset(samples(20), samples(2), "open", 8, 1, START, END)
    of.steps, of.world, of.rank, of.resume, of.checkpoint_schedule = 6, 1, 0, None, None
    loop = TorchCloze(of, record)
    loop.prepare("train", lambda name: nullcontext())
    return [one for one in loop.work("train") if isinstance(one, Work)], loop


def test_a_pass_is_recorded_before_it_begins() -> None:
    """Losses equal those of a pass without recordings, and padding counts as no work."""
    record = Rerun()
    plain, _ = passed(None)
    _, loop = passed(record)
    before = len(record.made)
    sizes = {loop.cloze.buckets.find_bucket(size) for _, size in loop.cloze.micro_batches}
    assert before == 2 * len(sizes) == 2 * loop.details()["graphs"] > 2
    again, _ = passed(Rerun())
    for one, two in zip(plain, again, strict=True):
        assert float(two.values["loss"]) == pytest.approx(float(one.values["loss"]), abs=1e-12)
        assert float(two.values["grad_norm"]) == pytest.approx(
            float(one.values["grad_norm"]), abs=1e-10
        )
        assert {**two.counts, "padded": 0} == one.counts
        assert two.rows == one.rows
    assert all(work.counts["padded"] > 0 for work in again)
    assert (
        ClozeCounter(rows_of("open", 20, 8), "open").count_expected(range(1))[0] == plain[0].counts
    )


def test_every_replay_drops_other_numbers() -> None:
    """The same pass twice has the same losses; a micro-batch has different losses in two steps."""
    (first, _), (second, loop) = passed(Rerun(), 0.3), passed(Rerun(), 0.3)
    assert [float(work.values["loss"]) for work in first] == [
        float(work.values["loss"]) for work in second
    ]
    micro = loop.cloze.to_device(loop.cloze.pack([0, 1, 2]))
    losses = []
    for step in (4, 4, 5):
        loop.cloze.seed(step)
        losses.append(float(loop.trainer.model.loss(micro).detach()))
    assert losses[0] == losses[1] != losses[2]


def test_a_seed_is_drawn_for_each_micro_batch() -> None:
    """It differs between micro-batches, is the same again for the same step, and a replay reads its
    current value.
    """
    seed, seen = torch.zeros(1, dtype=torch.int64), []

    def draw() -> None:
        seed.fill_(int(torch.randint(1 << 62, ())))

    def log_probs(micro: ClozeMicroBatch, dropout: float) -> Tensor:
        seen.append(int(seed))
        return torch.zeros(len(micro.targets), requires_grad=True)

    made = TrainedGlm(
        job(), lambda model, gradient: LogProbComputation(log_probs, draw, Rerun()), {}
    )
    made.build()
    made.compile(lambda parameter: parameter)
    _, full, _ = filled("open", [[0, 1], [2, 3, 4]])
    for step in (1, 2, 1):
        torch.manual_seed(step)
        seen.append(0)
        for micro in full:
            made.loss(micro).backward()
    steps = [list(dict.fromkeys(part)) for part in split(seen, 0)]
    assert [len(part) for part in steps] == [2, 2, 2]
    assert steps[0] == steps[2]
    assert len({*steps[0], *steps[1]}) == 4


def split(values: list[int], mark: int) -> list[list[int]]:
    """Return the values after each mark, as one list per mark."""
    out: list[list[int]] = []
    for one in values:
        if one == mark:
            out.append([])
        else:
            out[-1].append(one)
    return out


def test_large_micro_batches_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.training.cloze_training.MAX_FILLED_TOKENS", 40)
    record = Rerun()
    done, loop = passed(record)
    assert record.made == []
    assert loop.cloze.buckets is None
    assert all(work.counts["padded"] == 0 for work in done)
    most = max(loop.cloze.micro_batches, key=lambda one: one[1].tokens)[1].tokens
    assert loop.cloze.pack(loop.cloze.pick_largest()[0]).counts["tokens"] == most > 40
