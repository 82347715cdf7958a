"""Predicted memory of training: the published figures by hand, parameters against the modules,
activations against what torch saves.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from steelyard.case.case import Tune
from steelyard.case.precision import TRAINING_PRESETS
from steelyard.case.question import Train
from steelyard.case.resolve import resolve_case
from steelyard.models import llama, llama_fp8, llama_fused, llama_placements
from steelyard.models.attention import PackedLayout, make_packed_layout
from steelyard.models.llama import Llama, LlamaBlock, compute_rotary_cos_sin
from steelyard.models.llama_placements import Shard
from steelyard.models.shapes import LlamaModel as Model
from steelyard.plan import flops, memory
from steelyard.plan.degrees import Plan, divide_layers
from steelyard.weights import llama_weights

GIB = 1 << 30
LLAMA_7B = Model(
    family="llama",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=32,
    ffn=11008,
    vocab=32000,
    positions=2048,
)
LLAMA_13B = LLAMA_7B.model_copy(
    update={"layers": 40, "hidden": 5120, "heads": 40, "kv_heads": 40, "ffn": 13824}
)
SMALL = Model(
    family="llama", layers=6, hidden=64, heads=4, kv_heads=2, ffn=176, vocab=71, positions=64
)
TRAIN_BASE = {
    "length": 2048,
    "batch": 2048,
    "steps": 100,
    "lr": 3e-4,
    "min_lr": 3e-5,
    "schedule": "cosine",
    "warmup_steps": 2000,
}
TRAINED = Train.model_validate(
    TRAIN_BASE | {"decay_steps": 10000, "eps": 1e-6, "weight_decay": 0.1, "clip": 1.0}
)


def make_plan(tp: int = 1, pp: int = 1, dp: int = 1) -> Plan:
    """Return a plan on one node with these degrees."""
    return Plan(nodes=1, devices=tp * pp * dp, tp=tp, pp=pp, dp=dp, launcher="local")


def predict_parts(
    model: Model, precision: str = "bf16", run_plan: Plan | None = None, **tune: object
) -> list[memory.MemoryParts]:
    """Return the predicted parts of each pipeline stage, on one device by default."""
    return memory.predict_stages(
        model,
        TRAINING_PRESETS[precision],
        Tune.model_validate(tune),
        run_plan or make_plan(),
        TRAINED,
    )


def sum_state_bytes(parts: memory.MemoryParts) -> int:
    """Return the bytes of parameters, copies, gradients and optimizer states."""
    return parts.parameters + parts.copies + parts.gradients + parts.states


@pytest.mark.parametrize(
    ("model", "precision", "each", "gib"),
    [
        # fp32 weights, a 16-bit copy, fp32 gradients, two fp32 states
        (LLAMA_7B, "bf16", 4 + 2 + 4 + 8, 113),
        (LLAMA_7B, "fp16", 18, 113),
        (LLAMA_7B, "fp32", 16, 100),  # no copy
        (LLAMA_7B, "tf32", 16, 100),
        (LLAMA_7B, "bf16-pure", 8, 50),
        (LLAMA_13B, "bf16-pure", 2 + 2 + 4, 97),
        (LLAMA_13B, "bf16", 18, 218),
        # two fp8 copies of the layers' matrices, a 16-bit copy of all other parameters
        (LLAMA_7B, "fp8", 4 + 2 + 4 + 8, 113),
    ],
)
def test_state_on_one_device(model, precision, each, gib):
    [parts] = predict_parts(model, precision)
    assert sum_state_bytes(parts) == each * flops.count_model_parameters(model)
    assert round(sum_state_bytes(parts) / GIB) == gib
    assert parts.total == sum_state_bytes(parts) + parts.activations + parts.logits


def test_state_of_fp8_pure():
    """fp8-pure holds two fp8 copies of the layers' matrices more than bf16-pure."""
    [parts], [bf16] = predict_parts(LLAMA_7B, "fp8-pure"), predict_parts(LLAMA_7B, "bf16-pure")
    assert parts.copies == 2 * 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    assert sum_state_bytes(parts) == sum_state_bytes(bf16) + parts.copies
    # the inputs of qkv and of gate_up, in 16 bits
    assert bf16.activations - parts.activations == 2048 * 32 * 2 * 2 * 4096


def test_scoring_in_fp8_holds_half_of_the_loaded_layer_weights():
    def parts(precision, tokens):
        return memory.predict_minimum(
            resolve_case(
                "aquila2-34b-lambada", "full", precision, settings=[f"tune.batch_tokens={tokens}"]
            ).case,
            make_plan(),
        )

    matrices = flops.count_layer_parameters(resolve_case("aquila2-34b-lambada").case.question.model)
    wide, narrow = parts("bf16", 1 << 20), parts("fp8", 1 << 20)
    assert wide.parameters - narrow.parameters == matrices
    assert wide.activations == narrow.activations
    assert parts("fp8", 256).total == parts("bf16", 256).parameters  # at its peak, while loading


def test_activations_of_7b_by_hand():
    """A token of a layer saves in 16 bits 4 · 4096 around the norms, 3 · 4096 for qkv, 2 · 4096
    rotated, 1 · 4096 attended and 3 · 11008, and in fp32 a log-sum-exp per head and a scale per
    norm.
    """
    token_bytes = 2 * (10 * 4096 + 3 * 11008) + 4 * (32 + 2)
    [parts] = predict_parts(LLAMA_7B, micro_batch=4)
    assert parts.activations == 4 * 2048 * 32 * token_bytes
    assert parts.logits == 4 * 2048 * (2 * 2 * 4096 + 2 * 2 * 32000)
    [eager] = predict_parts(LLAMA_7B, micro_batch=4, compile=False)
    assert eager.activations == 4 * 2048 * 32 * (token_bytes + 2 * 11008)
    assert eager.logits == 4 * 2048 * (2 * 2 * 4096 + (2 + 4 + 4) * 32000)
    [wide] = predict_parts(LLAMA_7B, "tf32")
    assert wide.activations == 2048 * 32 * (4 * (10 * 4096 + 3 * 11008) + 4 * 34)


def test_recomputation_saves_less_but_one_whole_layer():
    none = 2 * (10 * 4096 + 3 * 11008) + 4 * 34
    full, selective = 2 * 2 * 4096, 2 * (7 * 4096 + 2 * 11008) + 4 * 32
    for name, saved in (("none", none), ("selective", selective), ("full", full)):
        [parts] = predict_parts(LLAMA_7B, recompute=name)
        assert parts.activations == 2048 * (32 * saved + none - saved)


@pytest.mark.parametrize(
    ("sharding", "divided"),
    [
        (0, ()),
        (1, ("parameters", "states")),
        (2, ("parameters", "states", "gradients")),
        (3, ("parameters", "states", "gradients", "copies")),
    ],
)
def test_sharding_divides_over_its_degree(sharding, divided):
    [whole] = predict_parts(LLAMA_7B)
    for degree, shards in ((None, 8), (4, 4)):
        [parts] = predict_parts(
            LLAMA_7B, run_plan=make_plan(dp=8), sharding=sharding, sharding_degree=degree
        )
        for name in ("parameters", "states", "gradients", "copies"):
            assert getattr(parts, name) == getattr(whole, name) // (
                shards if name in divided else 1
            )
        assert parts.activations == whole.activations


def test_without_a_copy_parameters_are_sharded_last():
    sizes = [
        predict_parts(LLAMA_13B, "bf16-pure", make_plan(dp=8), sharding=stage)[0]
        for stage in range(4)
    ]
    assert [parts.parameters * 8 // sizes[0].parameters for parts in sizes] == [8, 8, 8, 1]
    assert [parts.states * 8 // sizes[0].states for parts in sizes] == [8, 1, 1, 1]


def test_earlier_pipeline_stages_hold_more_micro_batches():
    stages = predict_parts(LLAMA_7B, run_plan=make_plan(pp=4))
    last = stages[3].activations
    assert [stage.activations // last for stage in stages] == [4, 3, 2, 1]
    assert [bool(stage.logits) for stage in stages] == [False, False, False, True]
    [few] = {
        stage.activations
        for stage in predict_parts(LLAMA_7B, run_plan=make_plan(pp=4), micro_batch=2048)
    }
    assert few == 2048 * last  # one micro-batch in all: no stage holds more
    assert sum(map(sum_state_bytes, stages)) == 18 * flops.count_model_parameters(LLAMA_7B)


def test_layers_that_do_not_divide_go_to_the_inner_stages():
    assert [len(layers) for layers in divide_layers(10, 4)] == [2, 3, 3, 2]
    uneven = predict_parts(LLAMA_7B.model_copy(update={"layers": 10}), run_plan=make_plan(pp=4))
    layer = uneven[3].activations // 2  # the last stage holds one micro-batch
    assert [stage.activations // layer for stage in uneven] == [4 * 2, 3 * 3, 2 * 3, 1 * 2]
    assert sum(map(sum_state_bytes, uneven)) == 18 * flops.count_model_parameters(
        LLAMA_7B.model_copy(update={"layers": 10})
    )


def test_tensor_parallelism_divides_all_but_the_norms():
    [whole], [half] = predict_parts(LLAMA_7B), predict_parts(LLAMA_7B, run_plan=make_plan(tp=2))
    assert half.activations * 2 == whole.activations
    assert half.logits * 2 == whole.logits
    norms = 65 * 4096
    assert half.states // 8 - norms == (whole.states // 8 - norms) // 2


def predict_with_units(
    precision: str, run_plan: Plan, **tune: object
) -> tuple[list[memory.MemoryParts], list[memory.MemoryParts]]:
    """Return the predicted parts of each stage, without and with the units that are gathered for a
    while.
    """
    arguments = LLAMA_7B, TRAINING_PRESETS[precision], Tune.model_validate(tune), run_plan, TRAINED
    return memory.predict_stages(*arguments), memory.predict_stages(*arguments, with_gathered=True)


LAYER_PARAMETERS, TABLE_PARAMETERS = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096, 32000 * 4096


def test_parameters_of_the_units_of_a_stage():
    assert memory.count_unit_parameters(LLAMA_7B, make_plan(), 0) == [
        TABLE_PARAMETERS,
        *[LAYER_PARAMETERS] * 32,
        TABLE_PARAMETERS + 4096,
    ]
    assert memory.count_unit_parameters(LLAMA_7B, make_plan(pp=4), 0) == [
        TABLE_PARAMETERS,
        *[LAYER_PARAMETERS] * 8,
    ]
    assert memory.count_unit_parameters(LLAMA_7B, make_plan(pp=4), 1) == [LAYER_PARAMETERS] * 8
    tied = LLAMA_7B.model_copy(update={"tied": True})
    assert memory.count_unit_parameters(tied, make_plan(), 0) == [
        TABLE_PARAMETERS,
        *[LAYER_PARAMETERS] * 32,
        4096,
    ]
    for stage in range(4):
        run_plan = make_plan(tp=2, pp=4)
        assert sum(
            memory.count_unit_parameters(LLAMA_7B, run_plan, stage)
        ) == memory.count_stage_parameters(LLAMA_7B, run_plan, stage)


@pytest.mark.parametrize(
    ("precision", "sharding", "more"),
    [
        ("bf16", 0, {}),
        ("bf16", 1, {}),  # gradients stay whole
        ("bf16", 2, {"gradients": 4}),
        ("bf16", 3, {"gradients": 4, "copies": 2}),
        ("bf16-pure", 2, {"gradients": 2}),
        ("bf16-pure", 3, {"gradients": 2, "parameters": 2}),
    ],
)
def test_two_units_are_gathered_at_a_time(precision, sharding, more):
    [without], [with_units] = predict_with_units(precision, make_plan(dp=8), sharding=sharding)
    for name in ("parameters", "copies", "gradients", "states", "activations", "logits"):
        assert (
            getattr(with_units, name)
            == getattr(without, name) + more.get(name, 0) * 2 * LAYER_PARAMETERS
        )
    [without], [unsharded] = predict_with_units(precision, make_plan(), sharding=sharding)
    assert unsharded == without  # one device: nothing is sharded
    [without], [forced] = predict_with_units(
        precision, make_plan(), sharding=sharding, distributed=True
    )
    assert forced.total == without.total + sum(more.values()) * 2 * LAYER_PARAMETERS


def test_a_tensor_parallel_rank_gathers_the_inputs_of_the_logits():
    without, with_units = predict_with_units("bf16", make_plan(tp=2, pp=2))
    assert with_units[0] == without[0]
    assert with_units[1].logits == without[1].logits + 2048 * 2 * (4096 - 2048)


@pytest.mark.parametrize(
    "changes", [{}, {"tied": True}, {"qkv_bias": True}, {"qk_norm": True, "head_dim": 24}]
)
@pytest.mark.parametrize("tp", [1, 2])
def test_parameters_equal_those_of_the_modules(changes, tp):
    model = SMALL.model_copy(update=changes)
    with torch.device("meta"):
        module = Llama(
            llama_placements.make_shard_shape(llama_weights.get_llama_shape(model), Shard(0, tp))
        )
    assert memory.count_stage_parameters(model, make_plan(tp=tp), 0) == sum(
        p.numel() for p in module.parameters()
    )
    stages = [
        memory.count_stage_parameters(model, make_plan(tp=tp, pp=3), stage) for stage in range(3)
    ]
    # with tied embeddings the first and the last stage each hold the table
    second_table = memory.count_vocab_rows(71, tp) * 64 if model.tied else 0
    assert sum(stages) == sum(p.numel() for p in module.parameters()) + second_table


@pytest.mark.parametrize("tp", [1, 2, 3, 8])
def test_the_vocabulary_is_padded_as_the_models_pad_it(tp):
    for vocab in (71, 32000, 100008):
        shape = replace(
            llama_weights.get_llama_shape(SMALL), heads=24, kv_heads=24, ffn=48, vocab=vocab
        )
        assert (
            memory.count_vocab_rows(vocab, tp)
            == llama_placements.make_shard_shape(shape, Shard(0, tp)).vocab
        )


@pytest.mark.parametrize("pp", [0, 7, 10**12])
def test_an_impossible_plan_is_refused(pp):
    impossible_plan = make_plan().model_copy(update={"pp": pp})
    with pytest.raises(ValueError, match="stages for 6 layers"):
        predict_parts(SMALL, run_plan=impossible_plan)


def _plain_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: PackedLayout, kernel: str, prefix: object, window: object
) -> Tensor:
    """Return attention that saves its output, as fused kernels on packed rows do."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(
        0, 1
    )


class _FusedNorm(torch.autograd.Function):
    """RMSNorm as a fused kernel does it: only its input, its weight and a scale for each token are
    saved.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = x.float().square().mean(-1, keepdim=True).add(eps).rsqrt()
        ctx.save_for_backward(x, scale, weight)
        return (x.float() * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


def measure_saved_bytes(
    model: Model,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int = 32,
    lean: bool = False,
    fp8: bool = False,
) -> int:
    """Return the bytes that torch saves for the backward of a layer: each storage once, without
    weights and rotary tables.

    The layer is compiled if `compiled`, a fused block if `lean`, an fp8 block if `fp8`.
    """
    monkeypatch.setattr(llama, "attend_packed_rows", _plain_attention)
    monkeypatch.setattr(llama_fused, "attend_packed_rows", _plain_attention)
    monkeypatch.setattr(llama_fp8, "attend_packed_rows", _plain_attention)
    shape = llama_weights.get_llama_shape(model)
    block = LlamaBlock(shape).to(torch.bfloat16)
    run = torch.compile(block, backend="aot_eager_decomp_partition") if compiled else block
    if fp8:
        run = llama_fp8.Fp8TrainBlock(
            block, llama_fp8.Fp8Training(torch.zeros_like, llama_fp8.Fp8Kernels(False))
        )
    elif lean:
        run = llama_fused.FusedBlock(
            block,
            llama_fused.AccumulatingLinears(torch.zeros_like),
            llama_fused.BlockKernels(False),
        )
    elif not compiled:
        monkeypatch.setattr(
            torch.nn.RMSNorm, "forward", lambda self, x: _FusedNorm.apply(x, self.weight, self.eps)
        )
    x, delta = (
        torch.randn(tokens, model.hidden, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2)
    )
    cos, sin = compute_rotary_cos_sin(torch.arange(tokens), shape, torch.bfloat16)
    excluded = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), cos, sin)}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        """Record the storage of a saved tensor and return the tensor."""
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run(
            x,
            delta,
            cos,
            sin,
            make_packed_layout([tokens], None, torch.device("cpu")),
            "rows",
            None,
        )
    return sum(
        tensor.untyped_storage().nbytes()
        for pointer, tensor in saved.items()
        if pointer not in excluded
    )


SHAPES = [
    {},
    {"kv_heads": 4},
    {"ffn": 64},
    {"hidden": 128, "heads": 8},
    {"qk_norm": True},
    {"qk_norm": True, "head_dim": 24},
]


@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.usefixtures("one_thread")
def test_activations_are_what_torch_saves(changes, monkeypatch):
    model = SMALL.model_copy(update=changes)
    assert measure_saved_bytes(model, False, monkeypatch) == 32 * memory.count_layer_bytes(
        model, 2, "none", compiled=False
    )


@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("one_thread")
def test_activations_of_a_fused_block_are_what_torch_saves(changes, compiled, monkeypatch):
    """Whether its parts are compiled changes nothing: they are functions of their arguments
    alone.
    """
    model = SMALL.model_copy(update=changes)
    saved = measure_saved_bytes(model, False, monkeypatch, lean=True)
    assert saved == 32 * memory.count_layer_bytes(model, 2, "none", compiled, fused_blocks=True)
    # With norms of queries and keys a fused block saves their input (the output of qkv) too, so it
    # need not save less.
    assert model.qk_norm or saved < measure_saved_bytes(model, False, monkeypatch)


@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.usefixtures("one_thread")
def test_activations_of_an_fp8_block_are_what_torch_saves(changes, monkeypatch):
    model = SMALL.model_copy(update=changes)
    saved = measure_saved_bytes(model, False, monkeypatch, fp8=True)
    assert saved == 32 * memory.count_layer_bytes(
        model, 2, "none", False, fused_blocks=True, fp8=True
    )
    assert (
        saved
        == measure_saved_bytes(model, False, monkeypatch, lean=True) - 32 * 2 * 2 * model.hidden
    )


@pytest.mark.usefixtures("one_thread")
def test_activations_are_what_a_compiler_saves(monkeypatch):
    """The compiler decides what to save before it generates any code."""
    assert measure_saved_bytes(SMALL, True, monkeypatch) == 32 * memory.count_layer_bytes(
        SMALL, 2, "none", compiled=True
    )
