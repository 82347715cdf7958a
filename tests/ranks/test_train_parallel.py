"""Training over real processes in float64: under every plan losses, norms and weights are those of
one process.
"""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from ranks.plan_tables import (
    FEW_STEPS,
    FP64_PLANS,
    LOADED_PLANS,
    LOW_PRECISION_PLANS,
    OVERFLOWING_SCALE,
    RESUMED,
    SMALL_GRAIN,
    UNPADDED_PLANS,
    VARIANT_PLANS,
    VARIANTS,
    normalize_plan,
    plans_with_checkpoints,
    variant_settings,
)
from ranks.train_plans import KEEP_EVERY, STEPS, build_engine, gather_stage_weights, run_training
from steelyard.data.training_rows import TrainingRow
from steelyard.engines.transformers.score import make_transformers_config
from steelyard.models import llama_placements as parallel
from steelyard.models import tensors
from steelyard.plan.degrees import divide_layers
from steelyard.training import adamw
from steelyard.training.micro_batches import RowBatches
from steelyard.training.packing import pack_rows
from steelyard.weights import hf_checkpoint, llama_weights

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-8
# phases of a step whose ranks exchange only before and after computing
SEPARATE_EXCHANGE_PHASES = ["data", "meet", "compute", "exchange", "compute"]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in float64 wherever a precision says fp32."""
    monkeypatch.setitem(tensors.DTYPES, "fp32", torch.float64)


@pytest.fixture(scope="module")
def alone() -> tuple[dict, dict[str, torch.Tensor]]:
    """The results and final weights of one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tensors.DTYPES, "fp32", torch.float64)
        engine = build_engine({"settings": {}}, 0, 1)
        return run_training(engine), gather_stage_weights(engine)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results and weights of all plans, executed once by eight processes."""
    folder = tmp_path_factory.mktemp("ranks")
    LlamaForCausalLM(
        make_transformers_config(build_engine({"settings": {}}, 0, 1).job.case.question.model)
    ).save_pretrained(folder / "hf")
    runs = [
        *plans_with_checkpoints(folder),
        *UNPADDED_PLANS,
        *VARIANT_PLANS,
        *[run | {"weights": str(folder / "hf")} for run in LOADED_PLANS],
    ]
    (folder / "asked.json").write_text(json.dumps(runs))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=8",
        "--max-restarts=0",
    ]
    command += [
        str(Path(__file__).parent / "train_plans.py"),
        str(folder / "asked.json"),
        str(folder),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=1200, env=env
    )
    assert done.returncode == 0, f"{done.stderr[:9000]}\n…\n{done.stderr[-4000:]}"
    return folder


def read_rank_results(folder: Path, name: str) -> list[dict]:
    """Return the results of a plan, one dict per rank."""
    return [json.loads((folder / f"rank-{i}.json").read_text())[name] for i in range(8)]


def merge_stage_weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the final weights of a plan, merged from the files of its pipeline stages."""
    number = [run["name"] for run in json.loads((folder / "asked.json").read_text())].index(name)
    out: dict[str, torch.Tensor] = {}
    for path in folder.glob(f"weights-{number}-*.pt"):
        stage_weights = torch.load(path)
        assert not out.keys() & stage_weights.keys()  # stages share no parameter
        out |= stage_weights
    return out


def max_difference(values: list[float], expected: list[float]) -> float:
    """Return the largest absolute difference."""
    return max(abs(a - b) for a, b in zip(values, expected, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("name", [one["name"] for one in FP64_PLANS])
def test_every_plan_learns_what_one_process_learns(folder, alone, name):
    expected, weights_alone = alone
    ranks = read_rank_results(folder, name)
    assert len(expected["losses"]) == STEPS
    for rank in ranks:  # every rank reports them
        assert max_difference(rank["losses"], expected["losses"]) <= TOLERANCE
        assert max_difference(rank["norms"], expected["norms"]) <= TOLERANCE
        assert rank["block"] == "fused"
        assert rank["phases"] == (
            SEPARATE_EXCHANGE_PHASES if name.startswith("DP8 0") else ["data", "meet", "compute"]
        )
    for when in ("before", "after"):
        replicas = {rank["place"][2]: rank[when] for rank in ranks}
        assert all(
            rank[when] == pytest.approx(replicas[rank["place"][2]], abs=TOLERANCE) for rank in ranks
        )
        assert sum(one["nll"] for one in replicas.values()) == pytest.approx(
            expected[when]["nll"], abs=TOLERANCE
        )
        assert sum(one["targets"] for one in replicas.values()) == expected[when]["targets"]
    weights = merge_stage_weights(folder, name)
    assert weights.keys() == weights_alone.keys()
    assert (
        max(float((weights[key] - weights_alone[key]).abs().max()) for key in weights) <= TOLERANCE
    )


def expected_collectives(name: str, position: list[int]) -> dict[str, int]:
    """Return how often a rank at (tp, pp, dp) issues each collective in a step, counted by hand."""
    parallel, sharding, sharding_degree, recompute, micro, _ = name.split()
    tp, pp, dp = (
        int(n)
        for n in re.fullmatch(r"(?:TP(\d))?(?:PP(\d))?(?:DP(\d))?", parallel).groups(default="1")
    )
    stage, sharding = position[1], int(sharding)
    degree = (dp if sharding_degree == "-" else int(sharding_degree)) if sharding else 1
    first, last, layers, micro_batches = (
        stage == 0,
        stage == pp - 1,
        4 // pp,
        -(-16 // (dp * int(micro))),
    )
    units = first + layers + last
    # recomputation repeats the all-gathers before qkv and gate_up and the reduce-scatter after out
    recomputes = recompute != "none"
    out = {
        # Per step: number of targets, loss; per unit: gradients.
        "copies all_reduce": (2 + units) * (dp > degree),
        "shards all_reduce": 3 * (degree > 1),  # targets, loss and norm
        "shards reduce_scatter": units * {0: 0, 1: 1, 2: micro_batches, 3: micro_batches}[sharding],
        # After the update (1, 2), or for every forward and backward (3); the last unit keeps its
        # weights for backward, and an embedding's backward reads none.
        "shards all_gather": {0: 0, 1: units, 2: units, 3: micro_batches * (2 * units - 1 - first)}[
            sharding
        ],
        "stages all_reduce": 2 * (pp > 1),  # loss, norm
        "stages sent or received": 2 * micro_batches * (2 - first - last),
        "tensor all_reduce": 2 + 2 * micro_batches * last,  # norms' gradients, norm; 2 per loss
        "tensor all_gather": micro_batches * ((6 + 2 * recomputes) * layers + first + last),
        "tensor reduce_scatter": micro_batches * ((4 + recomputes) * layers + first + last),
    }
    return {
        key: number
        for key, number in sorted(out.items())
        if number and (tp > 1 or "tensor" not in key)
    }


@pytest.mark.full
@pytest.mark.parametrize("name", [one["name"] for one in FP64_PLANS])
def test_collectives_of_a_step_are_those_counted_by_hand(folder, name):
    for rank in read_rank_results(folder, name):
        assert rank["issued"] == expected_collectives(name, rank["place"])


@pytest.mark.full
@pytest.mark.parametrize("name", [one["name"] for one in UNPADDED_PLANS])
def test_unpadded_rows_train_alike_under_every_plan(folder, name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steelyard.engines.torch.train.TOKEN_MULTIPLE", SMALL_GRAIN)
        expected = run_training(build_engine({"settings": {}, "case": "aquila2-7b-alpaca"}, 0, 1))
    ranks = read_rank_results(folder, name)
    replicas = {rank["place"][2]: rank["counts"] for rank in ranks}
    for step, counts in enumerate(expected["counts"]):
        assert sum(one[step]["tokens"] for one in replicas.values()) == counts["tokens"]
        micros = 16  # at most, over all replicas
        assert sum(one[step]["padded"] for one in replicas.values()) <= micros * SMALL_GRAIN
    assert len({one[0]["tokens"] for one in replicas.values()}) > 1  # replicas have different sizes
    for rank in ranks:
        assert max_difference(rank["losses"], expected["losses"]) <= TOLERANCE
        assert max_difference(rank["norms"], expected["norms"]) <= TOLERANCE


@cache
def train_variant_alone(variant: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """Return the results and weights of one process that trains a variant of the model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tensors.DTYPES, "fp32", torch.float64)
        engine = build_engine({"settings": variant_settings(variant) | FEW_STEPS}, 0, 1)
        return run_training(engine), gather_stage_weights(engine)


@pytest.mark.full
@pytest.mark.parametrize("name", [one["name"] for one in VARIANT_PLANS])
def test_every_variant_learns_what_one_process_learns(folder, alone, name):
    expected, weights_alone = train_variant_alone(name.split()[-1])
    for rank in read_rank_results(folder, name):
        assert max_difference(rank["losses"], expected["losses"]) <= TOLERANCE
        assert max_difference(rank["norms"], expected["norms"]) <= TOLERANCE
    weights = merge_stage_weights(folder, name)
    assert weights.keys() == weights_alone.keys()
    assert (
        max(float((weights[key] - weights_alone[key]).abs().max()) for key in weights) <= TOLERANCE
    )
    assert max_difference(expected["losses"], alone[0]["losses"][:4]) > 1e-3  # another model


def test_qk_norms_are_learned_with_sharding_and_recomputation():
    """One rank with sharded weights and the collectives of several, in a group of one."""
    expected, weights = train_variant_alone("qwen3")
    sharded_settings = {"tune.distributed": "true", "tune.sharding": 3, "tune.recompute": "full"}
    engine = build_engine(
        {"settings": variant_settings("qwen3") | FEW_STEPS | sharded_settings}, 0, 1
    )
    assert max_difference(run_training(engine)["losses"], expected["losses"]) <= TOLERANCE
    learned = gather_stage_weights(engine)
    assert (
        max(float((weight - weights[key]).abs().max()) for key, weight in learned.items())
        <= TOLERANCE
    )
    assert float((learned["layers.0.q_norm.weight"] - 1).abs().max()) > 1e-4  # they were learned


@pytest.mark.parametrize("sharding", range(4))
def test_one_rank_issues_the_collectives_of_several(alone, sharding):
    """They are really issued, in a group of one."""
    expected, weights = alone
    engine = build_engine(
        {
            "settings": {
                "tune.distributed": "true",
                "tune.sharding": sharding,
                "tune.micro_batch": 4,
            }
        },
        0,
        1,
    )
    results = run_training(engine)
    units, micro_batches = 6, 4
    copies, shards = {"copies all_reduce": 2 + units}, {"shards all_reduce": 3}
    assert (
        results["issued"]
        == [
            copies,
            shards | {"shards reduce_scatter": units, "shards all_gather": units},
            shards | {"shards reduce_scatter": micro_batches * units, "shards all_gather": units},
            shards
            | {
                "shards reduce_scatter": micro_batches * units,
                "shards all_gather": micro_batches * (2 * units - 2),
            },
        ][sharding]
    )
    assert engine.details()["distributed"] is True
    assert max_difference(results["losses"], expected["losses"]) <= TOLERANCE
    assert max_difference(results["norms"], expected["norms"]) <= TOLERANCE
    assert (
        max(
            float((weight - weights[key]).abs().max())
            for key, weight in gather_stage_weights(engine).items()
        )
        <= TOLERANCE
    )


def test_a_single_rank_issues_no_collectives(alone):
    assert alone[0]["issued"] == {}


@pytest.mark.full
def test_the_run_that_plans_are_compared_with_learns(alone):
    losses, norms = alone[0]["losses"], alone[0]["norms"]
    assert losses[-1] < losses[0] - 1
    assert max(norms) > 2.0 > min(norms)  # some are clipped and some are not
    assert alone[0]["after"]["nll"] < alone[0]["before"]["nll"]


@cache
def train_precision_alone(precision: str) -> dict:
    """Return the results of one process in a precision of fewer bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tensors.DTYPES, "fp32", torch.float32)
        patch.setattr(adamw, "FIRST_SCALE", OVERFLOWING_SCALE)
        return run_training(
            build_engine(
                {"settings": {} if precision == "fp16" else FEW_STEPS, "precision": precision}, 0, 1
            )
        )


@pytest.mark.full
@pytest.mark.parametrize("name", [one["name"] for one in LOW_PRECISION_PLANS])
def test_low_precisions_stay_near_one_process(folder, name):
    expected = train_precision_alone(name.split()[-1])
    for rank in read_rank_results(folder, name):
        assert max_difference(rank["losses"], expected["losses"]) <= 0.02
        skipped = [not np.isfinite(norm) for norm in rank["norms"]]
        assert skipped == [not np.isfinite(norm) for norm in expected["norms"]]
        assert any(skipped) == name.endswith("fp16")
        assert not all(skipped)


@pytest.mark.full
@pytest.mark.parametrize(("new", "old"), RESUMED.items(), ids=map(normalize_plan, RESUMED))
def test_training_resumes_under_another_plan(folder, alone, new, old):
    """If weights, moments, counters or the loss scale were lost or mixed up, the next losses would
    differ.
    """
    ranks = read_rank_results(folder, normalize_plan(new))
    expected = (
        read_rank_results(folder, normalize_plan(old))[0]["losses"]
        if "fp16" in new
        else alone[0]["losses"]
    )
    tolerance = 0.02 if "fp16" in new else TOLERANCE
    for rank in ranks:
        assert len(rank["losses"]) == STEPS - KEEP_EVERY
        assert max_difference(rank["curve"], expected) <= tolerance
    if "fp16" not in new:
        weights = merge_stage_weights(folder, normalize_plan(new))
        assert (
            max(float((weights[key] - alone[1][key]).abs().max()) for key in alone[1]) <= TOLERANCE
        )


@pytest.mark.full
def test_pretrained_weights_are_loaded_in_shards(folder):
    run = {"settings": {}, "weights": str(folder / "hf")}
    expected = run_training(build_engine(run, 0, 1))
    assert (
        max_difference(
            read_rank_results(folder, LOADED_PLANS[0]["name"])[0]["losses"], expected["losses"]
        )
        <= TOLERANCE
    )


@pytest.mark.full
def test_a_rank_holds_its_share_of_optimizer_states(folder, alone):
    whole = alone[0]["states"]
    norms = 9 * 64  # replicated: 9 norms of 64 numbers

    def states(name: str) -> list[int]:
        return [rank["states"] for rank in read_rank_results(folder, name)]

    assert whole == 2 * alone[0]["parameters"]
    assert alone[0]["dtypes"] == dict.fromkeys(
        ("parameters", "main_parameters", "gradients", "states"), "fp64"
    )
    assert {*read_rank_results(folder, "TP2DP4 2 - none 4 bf16-pure")[0]["dtypes"].values()} == {
        "bf16"
    }
    assert states("DP8 0 - none 2 -") == [whole] * 8
    assert sum(states("DP8 1 - selective 1 -")) == sum(states("DP8 3 - none 4 -")) == whole
    assert max(states("DP8 1 - selective 1 -")) < whole / 7
    assert sum(states("DP8 2 4 none 1 -")[:4]) == whole
    assert sum(states("TP8 0 - none 8 -")) == whole + 7 * norms * 2
    assert sum(states("PP4DP2 0 - selective 2 -")[:4]) == whole
    assert sum(states("TP2PP2DP2 2 - none 2 -")) == whole + norms * 2


def test_a_planted_bug_changes_the_losses(alone, monkeypatch):
    """The bug: all rows of a micro-batch are its first row."""
    original_pack = RowBatches.pack
    monkeypatch.setattr(
        RowBatches, "pack", lambda self, keys: original_pack(self, [keys[0]] * len(keys))
    )
    results = run_training(build_engine({"settings": {"tune.micro_batch": 4}}, 0, 1))
    assert max_difference(results["losses"], alone[0]["losses"]) > 1e-4


def test_rows_have_segments_of_many_lengths():
    rows = build_engine({"settings": {}}, 0, 1).job.inputs
    first_batch = [rows.row(key) for key in rows.batch(0)]
    assert len({n for row in first_batch for n in row.lens}) > 10
    assert max(len(row.lens) for row in first_batch) > 2
    assert len({row.tokens.tobytes() for row in first_batch}) == 16


@pytest.mark.parametrize("variant", [None, *VARIANTS])
def test_gradients_equal_those_of_transformers(monkeypatch, variant):
    """One step in fp32 on rows of one segment, since transformers knows no segments."""
    monkeypatch.setitem(tensors.DTYPES, "fp32", torch.float32)
    # biases make the scores of attention larger, and with them the rounding errors
    tolerance_factor = 2 if variant == "qwen2" else 1
    engine = build_engine({"settings": {} if variant is None else variant_settings(variant)}, 0, 1)
    engine.prepare("before", lambda part: nullcontext())
    model, train_length = engine.trainer.model.module, engine.train.length
    with torch.no_grad():
        for parameter in model.parameters():  # move norms and biases off 1 and 0
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 251, (3, train_length))
    targets = np.concatenate([tokens[:, 1:], np.full((3, 1), -100)], axis=1)
    rows = [
        TrainingRow(t, y, (train_length,), train_length, 1)
        for t, y in zip(tokens, targets, strict=True)
    ]
    pack = pack_rows(rows)
    loss = engine.trainer.compute_gradients(
        [engine.batches.to_device(pack)], engine.trainer.sum_over_replicas(len(pack.pick))
    )
    hf_model = AutoModelForCausalLM.from_config(
        make_transformers_config(engine.job.case.question.model)
    ).train()
    llama_weights.copy_to_hf_model(model, dict(hf_model.named_parameters(remove_duplicate=False)))
    ids = torch.from_numpy(tokens)
    expected = hf_model(input_ids=ids, labels=ids).loss
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    parts, gradient = (
        hf_checkpoint.map_hf_tensors(model.shape),
        engine.trainer.model.exchange.gradient,
    )
    error_norms, gradient_norms = [], []
    for name, parameter in hf_model.named_parameters():
        part = parts[name]
        logical_gradient = parallel.view_logically(
            part.parameter,
            gradient(model.get_parameter(part.parameter)),
            model.shape,
            llama_weights.WHOLE,
        )
        our_gradient = logical_gradient[tuple(slice(*span) for span in part.box)].reshape(
            parameter.shape
        )
        error_norms.append((our_gradient - parameter.grad).norm())
        gradient_norms.append(parameter.grad.norm())
        assert error_norms[-1] <= tolerance_factor * 2e-6 * gradient_norms[-1], name  # rounding
    assert (
        torch.stack(error_norms).norm()
        <= tolerance_factor * 1e-6 * torch.stack(gradient_norms).norm()
    )


def test_documents_of_a_row_do_not_see_each_other():
    engine = build_engine({"settings": {}}, 0, 1)
    engine.prepare("before", lambda part: nullcontext())
    texts = engine.job.inputs
    row = next(texts.row(key) for key in range(64) if len(texts.row(key).lens) > 2)
    first, second = row.lens[0], row.lens[0] + row.lens[1]
    tokens = row.tokens.copy()
    tokens[first] = (tokens[first] + 1) % 251

    def segment_losses(row: TrainingRow) -> list[float]:
        """Return the loss over the targets of each segment."""
        out, begin = [], 0
        for n in row.lens:
            segment_targets = np.full_like(row.targets, -100)
            segment_targets[begin : begin + n] = row.targets[begin : begin + n]
            out.append(
                float(
                    engine.trainer.evaluate(
                        engine.batches.to_device(pack_rows([replace(row, targets=segment_targets)]))
                    )
                )
            )
            begin += n
        return out

    with torch.no_grad():
        before, after = segment_losses(row), segment_losses(replace(row, tokens=tokens))
    changed = [abs(a - b) > 1e-6 for a, b in zip(before, after, strict=True)]
    assert changed == [False, True, *[False] * (len(row.lens) - 2)]
    assert max_difference(before[:1] + before[2:], after[:1] + after[2:]) == 0
    assert second < len(row.tokens)


@pytest.mark.parametrize(
    "layers, stages, sizes",
    [
        (32, 4, [8, 8, 8, 8]),
        (4, 1, [4]),
        (10, 4, [2, 3, 3, 2]),
        (5, 2, [3, 2]),
        (11, 4, [3, 3, 3, 2]),
        (4, 4, [1, 1, 1, 1]),
    ],
)
def test_layers_are_divided_among_stages(layers, stages, sizes):
    layer_ranges = divide_layers(layers, stages)
    assert [len(span) for span in layer_ranges] == sizes
    assert [i for span in layer_ranges for i in span] == list(range(layers))


@pytest.mark.parametrize(
    "name, dim",
    [
        ("embed.weight", 0),
        ("layers.3.qkv.weight", 0),
        ("layers.0.down.weight", 1),
        ("layers.0.ffn_norm.weight", None),
    ],
)
def test_dimension_that_tensor_parallelism_shards(name, dim):
    assert parallel.find_flat_split(name) == dim
