"""Cloze micro-batches filled up to buckets: equal losses, scores and gradients, padding that is
counted, and few sizes.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from fixtures.glm import (
    CPU,
    END,
    SHAPE,
    START,
    TRAINING,
    RerunRecorder,
    make_job,
    make_samples,
    make_trainer,
    pack_samples,
)
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


def make_cloze_rows(division: str, count: int = 5, batch: int = 2) -> ClozeDataset:
    """Return cloze rows with this many samples to train on and two held out."""
    return ClozeDataset(make_samples(count), make_samples(2), division, batch, 1, START, END)


def plain_and_filled_micro_batches(division: str, groups: list[list[int]]):
    """Return the micro-batches of groups of sample indices as they are, filled up to their buckets,
    and the buckets.
    """
    rows = make_cloze_rows(division)
    sizes = [combine_sizes(measure_sample(rows, key) for key in group) for group in groups]
    pass_buckets = SizeBuckets(sizes)
    bucket = [pass_buckets.find_bucket(size) for size in sizes]
    packs = [rows.pack(group, held_out=False) for group in groups]
    unfilled = [send_cloze_batch(pack, CPU) for pack in packs]
    return (
        unfilled,
        [
            send_cloze_batch(fill_pack(pack, pack_bucket), CPU, pack_bucket)
            for pack, pack_bucket in zip(packs, bucket, strict=True)
        ],
        bucket,
    )


def gradients(glm_trainer: Trainer) -> list[Tensor]:
    """Return copies of the gradients of all parameters."""
    return [glm_trainer.optimizer.get_gradient(p).clone() for p in glm_trainer.optimizer.parameters]


def loss_and_gradients(glm_trainer: Trainer, micros) -> tuple[float, list[Tensor]]:
    """Return the loss and gradients of micro-batches; gradients are zeroed afterwards."""
    loss = float(glm_trainer.compute_gradients(micros, TARGETS))
    grads = gradients(glm_trainer)
    glm_trainer.optimizer.zero_grad()
    return loss, grads


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("division", DIVISIONS)
def test_filling_a_bucket_does_not_change_losses_scores_and_gradients(
    division: str, recorded: bool
) -> None:
    """Without dropout; with it, the mask depends on a token's position, which differs."""
    unfilled, filled_micros, _ = plain_and_filled_micro_batches(division, [[0, 1, 2], [3, 4]])
    plain_trainer = make_trainer(make_job())
    bucket_trainer = make_trainer(
        make_job(), lambda of: fused.make_cloze_trainer(of, RerunRecorder() if recorded else None)
    )
    assert sum(len(micro.tokens) for micro in filled_micros) > sum(
        len(micro.tokens) for micro in unfilled
    )
    for first, second in zip(unfilled, filled_micros, strict=True):
        scores, expected = bucket_trainer.evaluate(second), plain_trainer.evaluate(first)
        width = expected.shape[1]
        finite = expected.isfinite()
        assert torch.equal(finite, scores[:, :width].isfinite())
        assert not scores[:, width:].isfinite().any()
        torch.testing.assert_close(scores[:, :width][finite], expected[finite], atol=1e-12, rtol=0)
    for _ in range(3):  # run, recorded, replayed
        loss, expected = loss_and_gradients(plain_trainer, unfilled)
        filled_loss, grads = loss_and_gradients(bucket_trainer, filled_micros)
        assert filled_loss == pytest.approx(loss, abs=1e-12)
        for first, second in zip(grads, expected, strict=True):
            torch.testing.assert_close(first, second, atol=1e-12, rtol=0)
    assert bucket_trainer.details().get("graphs") == (2 if recorded else None)


def test_one_recording_serves_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three micro-batches share one bucket: each has its own loss and gradients, and one pair of
    graphs is recorded.
    """
    monkeypatch.setattr(size_buckets, "TOKEN_MULTIPLE", 64)
    groups = [[0, 1], [1, 2], [2, 0]]
    unfilled, filled_micros, bucket = plain_and_filled_micro_batches("open", groups)
    assert len({(item.tokens, item.samples) for item in bucket}) == 1
    assert len({len(micro.tokens) for micro in unfilled}) > 1
    record = RerunRecorder()
    plain_trainer, recording_trainer = (
        make_trainer(make_job()),
        make_trainer(make_job(), lambda of: fused.make_cloze_trainer(of, record)),
    )
    losses = []
    for item, filled_micro in zip(2 * unfilled, 2 * filled_micros, strict=True):
        (loss, expected), (replayed_loss, grads) = (
            loss_and_gradients(plain_trainer, [item]),
            loss_and_gradients(recording_trainer, [filled_micro]),
        )
        losses.append(loss)
        assert replayed_loss == pytest.approx(loss, abs=1e-12)
        for a, b in zip(grads, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    assert len(set(losses)) == 3
    assert len(record.graphs) == 2


def test_padding_gets_no_gradient() -> None:
    """Other tokens in the padding change neither loss nor gradients, and embedding rows that only
    padding uses get a gradient of exactly zero.
    """
    _, full, _ = plain_and_filled_micro_batches("open", [[0, 1], [2, 3, 4]])
    glm_trainer = make_trainer(make_job())
    loss, grads = loss_and_gradients(glm_trainer, full[:1])
    micro = full[0]
    lengths = micro.layout.lengths
    real = sum(lengths[0][:2])
    padding = slice(real, sum(lengths[0]))
    assert padding.stop > padding.start
    micro.tokens[padding] = 58  # in no sample
    micro.positions[padding] = 23
    changed_loss, changed_grads = loss_and_gradients(glm_trainer, [micro])
    assert changed_loss == loss
    for before, after in zip(grads, changed_grads, strict=True):
        torch.testing.assert_close(before, after, atol=1e-15, rtol=0)
    names = [name for name, _ in glm_trainer.model.named_parameters()]
    assert not changed_grads[names.index("transformer.position_embeddings.weight")][
        23
    ].count_nonzero()


@pytest.mark.parametrize("division", DIVISIONS)
def test_sizes_and_tokens_of_a_filled_micro_batch(division: str) -> None:
    rows = make_cloze_rows(division)
    sizes = [
        combine_sizes(measure_sample(rows, key) for key in group) for group in ([0, 1, 2], [3, 4])
    ]
    packs = [rows.pack(group, held_out=False) for group in ([0, 1, 2], [3, 4])]
    pass_buckets = SizeBuckets(sizes)
    for size, pack in zip(sizes, packs, strict=True):
        assert (size.tokens, size.logits) == (pack.counts["tokens"], pack.counts["logits"])
        assert (size.contexts, size.spans, size.samples) == (
            len(pack.contexts),
            len(pack.spans),
            len(pack.candidates),
        )
        bucket = pass_buckets.find_bucket(size)
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
    rows = make_cloze_rows("closed", 40)
    groups = [[key, (key + 7) % 40] for key in range(40)]
    sizes = [combine_sizes(measure_sample(rows, key) for key in group) for group in groups]
    for limit, grain in ((40, 16), (4, 32), (2, 64), (1, 128)):
        monkeypatch.setattr(size_buckets, "MAX_BUCKETS", limit)
        pass_buckets = SizeBuckets(sizes)
        assert pass_buckets.token_multiple == grain
        assert len({pass_buckets.find_bucket(size) for size in sizes}) <= limit


def test_a_pack_too_large_for_its_bucket_is_refused() -> None:
    rows = make_cloze_rows("open")
    small = SizeBuckets([measure_sample(rows, 0)]).find_bucket(measure_sample(rows, 0))
    with pytest.raises(ValueError, match="no room for 2 contexts and 5 spans"):
        fill_pack(pack_samples("open", make_samples(2)), small)


def run_train_pass(
    record: RerunRecorder | None, dropout: float = 0.0
) -> tuple[list[Work], TorchCloze]:
    """Run a train pass of six steps, three samples to a micro-batch; return its works and the loop.
    None records no graphs.
    """
    train = TRAINING.model_copy(update={"batch": 8, "steps": 6})
    fake_job = make_job(
        shape=SHAPE.model_copy(update={"dropout": dropout}), train=train, micro_batch=3
    )
    fake_job.case.gate = None
    fake_job.inputs = ClozeDataset(make_samples(20), make_samples(2), "open", 8, 1, START, END)
    fake_job.steps, fake_job.world, fake_job.rank, fake_job.resume, fake_job.checkpoint_schedule = (
        6,
        1,
        0,
        None,
        None,
    )
    loop = TorchCloze(fake_job, record)
    loop.prepare("train", lambda name: nullcontext())
    return [item for item in loop.work("train") if isinstance(item, Work)], loop


def test_every_bucket_of_a_pass_is_recorded_before_it_begins() -> None:
    """Losses equal those of a pass without recordings, and padding counts as no work."""
    record = RerunRecorder()
    unrecorded, _ = run_train_pass(None)
    _, loop = run_train_pass(record)
    before = len(record.graphs)
    sizes = {loop.cloze.buckets.find_bucket(size) for _, size in loop.cloze.micro_batches}
    assert before == 2 * len(sizes) == 2 * loop.details()["graphs"] > 2
    recorded, _ = run_train_pass(RerunRecorder())
    for expected, actual in zip(unrecorded, recorded, strict=True):
        assert float(actual.values["loss"]) == pytest.approx(
            float(expected.values["loss"]), abs=1e-12
        )
        assert float(actual.values["grad_norm"]) == pytest.approx(
            float(expected.values["grad_norm"]), abs=1e-10
        )
        assert {**actual.counts, "padded": 0} == expected.counts
        assert actual.rows == expected.rows
    assert all(work.counts["padded"] > 0 for work in recorded)
    assert (
        ClozeCounter(make_cloze_rows("open", 20, 8), "open").count_expected(range(1))[0]
        == unrecorded[0].counts
    )


def test_every_replay_drops_other_numbers() -> None:
    """The same pass twice has the same losses; a micro-batch has different losses in two steps."""
    (first, _), (second, loop) = (
        run_train_pass(RerunRecorder(), 0.3),
        run_train_pass(RerunRecorder(), 0.3),
    )
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
    seed, seeds = torch.zeros(1, dtype=torch.int64), []

    def draw() -> None:
        seed.fill_(int(torch.randint(1 << 62, ())))

    def log_probs(micro: ClozeMicroBatch, dropout: float) -> Tensor:
        seeds.append(int(seed))
        return torch.zeros(len(micro.targets), requires_grad=True)

    trained_glm = TrainedGlm(
        make_job(), lambda model, gradient: LogProbComputation(log_probs, draw, RerunRecorder()), {}
    )
    trained_glm.build()
    trained_glm.compile(lambda parameter: parameter)
    _, full, _ = plain_and_filled_micro_batches("open", [[0, 1], [2, 3, 4]])
    for step in (1, 2, 1):
        torch.manual_seed(step)
        seeds.append(0)
        for micro in full:
            trained_glm.loss(micro).backward()
    steps = [list(dict.fromkeys(part)) for part in split_at_mark(seeds, 0)]
    assert [len(part) for part in steps] == [2, 2, 2]
    assert steps[0] == steps[2]
    assert len({*steps[0], *steps[1]}) == 4


def split_at_mark(values: list[int], mark: int) -> list[list[int]]:
    """Return the values after each mark, as one list per mark."""
    out: list[list[int]] = []
    for value in values:
        if value == mark:
            out.append([])
        else:
            out[-1].append(value)
    return out


def test_large_micro_batches_are_neither_filled_nor_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("steelyard.training.cloze_training.MAX_FILLED_TOKENS", 40)
    record = RerunRecorder()
    works, loop = run_train_pass(record)
    assert record.graphs == []
    assert loop.cloze.buckets is None
    assert all(work.counts["padded"] == 0 for work in works)
    largest_tokens = max(loop.cloze.micro_batches, key=lambda micro_batch: micro_batch[1].tokens)[
        1
    ].tokens
    assert loop.cloze.pack(loop.cloze.pick_largest()[0]).counts["tokens"] == largest_tokens > 40
