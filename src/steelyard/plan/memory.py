"""Predict memory from shapes: what a device of each pipeline stage holds at its fullest, and
whether that fits.

What a framework takes besides (its own context, communication buffers, fragmentation) is not
included. Activations are what the backward of one layer of models/llama.py needs of its forward;
tests compare the table `SAVED` with what torch saves.
"""

from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

from steelyard.case.case import Case, Tune
from steelyard.case.precision import Precision
from steelyard.case.question import Train
from steelyard.errors import RequestError
from steelyard.models.auto_shape import AutoModel
from steelyard.models.shapes import GlmModel, LlamaModel, count_vocab_rows
from steelyard.plan import decode_bytes, flops, memory_glm
from steelyard.plan.degrees import Plan, divide_layers, get_shard_degree

# for fp8: of all but the layers' matrices
DTYPE_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 2}
# bytes of a weight for training in fp8: a copy for the forward, and a transposed one for the
# backward
FP8_COPIES = 2
FP32_BYTES = 4  # bytes of what is fp32 in any precision
MAX_STAGES = 1024  # a limit, since a record may come from a stranger
GIB = 1 << 30
# a prediction this many times the memory is refused; measured runs were within 2 % of theirs
REFUSED_FACTOR = 1.1
# one beyond this share of it gets a warning: a framework takes some memory for itself
WARNED_SHARE = 0.95
SCORING_LOGIT_TOKENS = 4096  # tokens whose logits scoring holds at one time
# Keys laid out for attention per computed token, where questions share a prefix: from MMLU with
# five shots on an H200, where 22.0 GiB were allocated, of which weights and activations were 16.3.
KEYS_PER_TOKEN = 12
# Bytes that the allocator reserves per byte of activations, where every batch has other sizes:
# 20.8 GiB instead of 17.2 and 72.6 instead of 67.0 with 12.6 and 62.8 of weights, 41.8 instead of
# 22.0 with a shared prefix.
ALLOCATOR_FACTOR = 2.6
# The same for a GLM: 24.7 times the hidden size was reserved for 18 times that a layer saves per
# token.
CLOZE_ALLOCATOR_FACTOR = 1.4

RecomputeMode = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class MemoryParts:
    """Predicted bytes on one device at its fullest, by what they hold; `total` is their sum.
    `parameters`: in the dtype they are stored in. `copies`: of parameters in the matmuls' dtype, if
    that is another; in fp8 also two of the layers' matrices. `gradients`; `states`: Adam's two
    moments; `activations`: what forwards save for backwards, or one layer's in scoring; `logits`:
    with the last norm's input and output in training; `cache`: keys and values in generation. Parts
    that do not apply, such as gradients in scoring, are 0.
    """

    parameters: int  # in the dtype they are stored in
    # of parameters in the matmuls' dtype, if that is another; in fp8 two of the layers' matrices
    copies: int
    gradients: int
    states: int  # Adam's two moments
    activations: int
    logits: int  # with the last norm's input and output
    cache: int = 0  # keys and values of requests

    @property
    def total(self) -> int:
        """Return the sum of all parts, in bytes."""
        return sum(astuple(self))


@dataclass(frozen=True)
class SavedActivation:
    """A row of the table `SAVED`: activations that a Llama layer saves for its backward. `name`
    says which, `numbers(model)` returns how many numbers per token, `recompute_modes` under which
    modes of recomputation they are saved (none, selective, full).

    `fp32` ones are 4 bytes in any precision. `compiler_recomputes`: not saved if the model is
    compiled. `plain_only`: saved by the block of models/llama.py and not by that of
    models/llama_fused.py; `fused_only` the other way round. `not_fp8`: not saved by that of
    models/llama_fp8.py.
    """

    name: str
    numbers: Callable[[LlamaModel], int]
    recompute_modes: tuple[RecomputeMode, ...] = ("none",)
    fp32: bool = False
    compiler_recomputes: bool = False
    plain_only: bool = False
    fused_only: bool = False
    not_fp8: bool = False


def _get_qkv_width(model: LlamaModel) -> int:
    """Return how many numbers queries, keys and values of one token have together."""
    return (model.heads + 2 * model.kv_heads) * model.dim


_NONE_AND_SELECTIVE: tuple[RecomputeMode, ...] = (
    "none",
    "selective",
)  # results of matmuls and attention

SAVED = (
    SavedActivation(
        "residual stream and what is to be added to it",
        lambda m: 2 * m.hidden,
        ("selective", "full"),
    ),
    SavedActivation("input of the attention's norm", lambda m: m.hidden),
    SavedActivation("scale of the attention's norm", lambda m: 1, fp32=True),
    SavedActivation("input of qkv", lambda m: m.hidden, not_fp8=True),
    SavedActivation("output of qkv", _get_qkv_width, _NONE_AND_SELECTIVE),
    SavedActivation(
        "scales of the norms of queries and keys",
        lambda m: m.qk_norm * (m.heads + m.kv_heads),
        fp32=True,
        plain_only=True,
    ),
    SavedActivation(
        "input of the norms of queries and keys",
        lambda m: m.qk_norm * _get_qkv_width(m),
        fused_only=True,
    ),
    SavedActivation(
        "rotated queries and keys", lambda m: (m.heads + m.kv_heads) * m.dim, plain_only=True
    ),
    SavedActivation("output of attention", lambda m: m.heads * m.dim, _NONE_AND_SELECTIVE),
    SavedActivation("log-sum-exp of attention", lambda m: m.heads, _NONE_AND_SELECTIVE, fp32=True),
    SavedActivation("output of out", lambda m: m.hidden, ("selective",)),
    SavedActivation("input of the FFN's norm", lambda m: m.hidden),
    SavedActivation("scale of the FFN's norm", lambda m: 1, fp32=True),
    SavedActivation("input of gate_up", lambda m: m.hidden, not_fp8=True),
    SavedActivation("output of gate_up", lambda m: 2 * m.ffn, _NONE_AND_SELECTIVE),
    SavedActivation("SiLU of the gate", lambda m: m.ffn, compiler_recomputes=True, plain_only=True),
    SavedActivation("input of down", lambda m: m.ffn, plain_only=True),
)


def count_layer_bytes(
    model: LlamaModel,
    size: int,
    recompute: RecomputeMode,
    compiled: bool,
    fused_blocks: bool = False,
    fp8: bool = False,
) -> int:
    """Return the bytes per token that one Llama layer saves for its backward under a mode of
    recomputation, numbers having `size` bytes, except those that are always fp32. Not divided by
    tensor parallelism. Raises ValueError for an unknown mode.

    `compiled`: with torch.compile. `fused_blocks`: of the block of models/llama_fused.py instead of
    models/llama.py. `fp8`: matmuls are in fp8.
    """

    def is_dropped(part: SavedActivation) -> bool:
        """Return whether these activations are not saved in this setting: recomputed by the
        compiler, saved by the other kind of block only, or not saved in fp8.
        """
        other_block_only = part.plain_only if fused_blocks else part.fused_only
        return (part.compiler_recomputes and compiled) or other_block_only or (part.not_fp8 and fp8)

    if recompute not in get_args(RecomputeMode):
        raise ValueError(f"recompute {recompute!r}; allowed: {', '.join(get_args(RecomputeMode))}")
    saved = [part for part in SAVED if recompute in part.recompute_modes and not is_dropped(part)]
    return sum(part.numbers(model) * (FP32_BYTES if part.fp32 else size) for part in saved)


def count_stage_parameters(model: LlamaModel, plan: Plan, stage: int) -> int:
    """Return the number of parameters on one device of a pipeline stage (from 0), without sharding
    over replicas: its layers, the embedding on the first stage, the last norm and the output matrix
    on the last; tied ones count once if both are on one stage.

    Matrices and biases are divided over a tensor-parallel group, norms are not; a divided
    vocabulary is padded.
    """
    biases = _get_qkv_width(model) if model.qkv_bias else 0
    norms = 2 * model.hidden + (2 * model.dim if model.qk_norm else 0)
    layer = (flops.count_layer_parameters(model) // model.layers + biases) // plan.tp + norms
    embedding = count_vocab_rows(model.vocab, plan.tp) * model.hidden
    first, last = stage == 0, stage == plan.pp - 1
    embedding_count = (first + last) if not (first and last and model.tied) else 1
    return (
        len(divide_layers(model.layers, plan.pp)[stage]) * layer
        + embedding_count * embedding
        + last * model.hidden
    )


def count_stage_matrices(model: LlamaModel, plan: Plan, stage: int) -> int:
    """Return the number of weights in the layers' matrices on one device of a pipeline stage: those
    that are multiplied in fp8; without embedding, output matrix, biases and norms.
    """
    return (
        len(divide_layers(model.layers, plan.pp)[stage])
        * (flops.count_layer_parameters(model) // model.layers)
        // plan.tp
    )


def predict_stages(
    model: LlamaModel,
    precision: Precision,
    tune: Tune,
    plan: Plan,
    train: Train,
    fused_blocks: bool = False,
    with_gathered: bool = False,
) -> list[MemoryParts]:
    """Return the predicted memory of one device of each pipeline stage in training, first stage
    first.

    `fused_blocks`: layers are those of models/llama_fused.py. `with_gathered` adds what is gathered
    from shards for a while only. Raises ValueError for more stages than layers, or than 1024.
    """
    if not 1 <= plan.pp <= min(model.layers, MAX_STAGES):
        raise ValueError(f"{plan.pp} stages for {model.layers} layers")
    stages = [
        _predict_stage(model, precision, tune, plan, train, stage, fused_blocks)
        for stage in range(plan.pp)
    ]
    if not with_gathered:
        return stages
    return [
        _add_gathered(parts, model, precision, tune, plan, train, stage)
        for stage, parts in enumerate(stages)
    ]


def count_unit_parameters(model: LlamaModel, plan: Plan, stage: int) -> list[int]:
    """Return the number of parameters, on one device, of each unit of a stage that is gathered from
    shards on its own, in order: the embedding on the first stage, every layer, and on the last
    stage the last norm with the output matrix (without it if that is the embedding of the same
    stage).
    """
    layers = len(divide_layers(model.layers, plan.pp)[stage])
    embedding = count_vocab_rows(model.vocab, plan.tp) * model.hidden
    first, last = stage == 0, stage == plan.pp - 1
    others = count_stage_parameters(model, plan, stage) - (embedding if first else 0)
    head = [model.hidden + (embedding if not (first and model.tied) else 0)] if last else []
    return [*([embedding] if first else []), *[(others - sum(head)) // layers] * layers, *head]


def _add_gathered(
    parts: MemoryParts,
    model: LlamaModel,
    precision: Precision,
    tune: Tune,
    plan: Plan,
    train: Train,
    stage: int,
) -> MemoryParts:
    """Return a copy of a stage's parts with what is whole for a while only, in bytes: with sharding
    2 or 3 the gradients of the two neighbouring units that are largest together, with sharding 3
    their weights too (as copies if matmuls have another dtype), and on the last stage the tokens'
    hidden states that a tensor-parallel rank gathers for the logits.

    Units add nothing if the sharding degree is 1 and `tune.distributed` is not set.
    """
    degree = plan.dp if tune.sharding_degree is None else tune.sharding_degree
    size = DTYPE_BYTES[precision.matmul]
    mixed = DTYPE_BYTES[precision.weights] != size
    unit_sizes = count_unit_parameters(model, plan, stage)
    pair = (
        max(map(sum, pairwise(unit_sizes)), default=sum(unit_sizes))
        if degree > 1 or tune.distributed
        else 0
    )
    weights = pair * size if tune.sharding == 3 else 0
    gathered = tune.micro_batch * train.length * (model.hidden - model.hidden // plan.tp) * size
    return replace(
        parts,
        parameters=parts.parameters + (0 if mixed else weights),
        copies=parts.copies + (weights if mixed else 0),
        gradients=parts.gradients
        + (
            pair * DTYPE_BYTES[precision.gradients or precision.weights] if tune.sharding > 1 else 0
        ),
        logits=parts.logits + (gathered if stage == plan.pp - 1 else 0),
    )


def _predict_stage(
    model: LlamaModel,
    precision: Precision,
    tune: Tune,
    plan: Plan,
    train: Train,
    stage: int,
    fused_blocks: bool,
) -> MemoryParts:
    """Return the predicted training memory of one device of a pipeline stage, without what is
    gathered from shards for a while.

    Optimizer states are divided over the shard group from `tune.sharding` 1 on, gradients from 2,
    weights from 3, and fp32 weights beside a 16-bit copy from 1. Logits are on the last stage only.
    """
    parameters = count_stage_parameters(model, plan, stage)
    degree = plan.dp if tune.sharding_degree is None else tune.sharding_degree
    stored_size, size = DTYPE_BYTES[precision.weights], DTYPE_BYTES[precision.matmul]
    mixed = stored_size != size
    tokens = tune.micro_batch * train.length

    fp8 = precision.matmul == "fp8"

    def count_bytes(bytes_each: int, divided_from: int) -> int:
        """Return the bytes of all parameters of the stage at `bytes_each` bytes; of one shard of
        them, rounded up, if `tune.sharding` is at least `divided_from`.
        """
        return bytes_each * (
            -(-parameters // degree) if tune.sharding >= divided_from else parameters
        )

    return MemoryParts(
        # If matmuls read a copy, only the optimizer reads the parameters: they are divided with its
        # states.
        parameters=count_bytes(stored_size, 1 if mixed else 3),
        copies=(count_bytes(size, 3) if mixed else 0)
        + (_count_fp8_copies(model, mixed, tune, plan, degree, stage) if fp8 else 0),
        gradients=count_bytes(DTYPE_BYTES[precision.gradients or precision.weights], 2),
        states=count_bytes(2 * DTYPE_BYTES[precision.states or precision.weights], 1),
        activations=tokens
        * _count_activation_bytes(model, size, tune, plan, train, stage, fused_blocks, fp8)
        // plan.tp,
        logits=tokens * _count_logit_bytes(model, size, plan, tune.compile)
        if stage == plan.pp - 1
        else 0,
    )


def _count_fp8_copies(
    model: LlamaModel, mixed: bool, tune: Tune, plan: Plan, degree: int, stage: int
) -> int:
    """Return the bytes that fp8 adds to the copies on a device of a stage: two fp8 copies of the
    layers' matrices; 0 with sharding 3.

    If stored weights have another dtype (`mixed`) and are whole on the device (no sharding, or
    `degree` 1), fp8 copies are made from them, and the 16-bit copies that are not needed are
    subtracted, which leaves 0.
    """
    if tune.sharding == 3:
        return 0
    whole = degree == 1 or tune.sharding == 0
    spared = DTYPE_BYTES["bf16"] if mixed and whole else 0
    return (FP8_COPIES - spared) * count_stage_matrices(model, plan, stage)


def _count_activation_bytes(
    model: LlamaModel,
    size: int,
    tune: Tune,
    plan: Plan,
    train: Train,
    stage: int,
    fused_blocks: bool,
    fp8: bool,
) -> int:
    """Return the activation bytes per token of a micro-batch on a stage, before tensor parallelism
    divides them: what its layers save, times the micro-batches in flight at once in 1F1B (at most
    `plan.pp - stage`), plus what one layer has more while it is recomputed.
    """
    batches = -(-train.batch // (plan.dp * tune.micro_batch))
    saved = count_layer_bytes(model, size, tune.recompute, tune.compile, fused_blocks, fp8)
    recomputed = count_layer_bytes(model, size, "none", tune.compile, fused_blocks, fp8) - saved
    return (
        saved * len(divide_layers(model.layers, plan.pp)[stage]) * min(plan.pp - stage, batches)
        + recomputed
    )


def _count_logit_bytes(model: LlamaModel, size: int, plan: Plan, compiled: bool) -> int:
    """Return the bytes per token at the logits on one device of the last stage: the last norm's
    input and output, the logits of its part of the vocabulary, and beside them their gradients if
    compiled, else an fp32 copy and its softmax.
    """
    beside = size if compiled else 2 * FP32_BYTES
    return 2 * model.hidden * size // plan.tp + count_vocab_rows(model.vocab, plan.tp) * (
        size + beside
    )


def predict_minimum(case: Case, plan: Plan) -> MemoryParts:
    """Return what the fullest device holds at least, by parts: the memory that a run certainly
    needs. A case whose prediction does not fit can be refused (`check_memory`).

    Llama in training: the fullest stage, with the fused block, which saves less. Llama and models
    of which only FLOPs are known in scoring: weights, activations, logits. Llama in generation:
    weights, activations, the cache of one request. All else (GLM): no activations.
    """
    question = case.question
    if isinstance(question.model, LlamaModel) and question.train is not None:
        # The block that saves less of the two: only what certainly does not fit is refused.
        stages = predict_stages(
            question.model,
            question.precision,
            case.tune,
            plan,
            question.train,
            fused_blocks=True,
            with_gathered=True,
        )
        return max(stages, key=lambda stage: stage.total)
    if isinstance(question.model, LlamaModel) and question.load is not None:
        return _predict_generation(case, question.model, plan)
    if isinstance(question.model, LlamaModel):
        return _predict_scoring(question.model, question.precision, case.tune, plan)
    if isinstance(question.model, AutoModel):
        return _predict_auto_scoring(question.model, question.precision, case.tune)
    return _predict_fixed(case, plan)


def _predict_generation(case: Case, model: LlamaModel, plan: Plan) -> MemoryParts:
    """Return the least memory of generation on one device of a tensor-parallel group: weights, one
    layer's activations of a step (`tune.batch_tokens`), and the keys and values of the longest
    request alone. How many requests an engine keeps beside it is its own choice.
    """
    question = case.question
    scoring = _predict_scoring(model, question.precision, case.tune, plan)
    kv_bytes = decode_bytes.count_kv_bytes(model, question.precision) or 0
    longest = question.task_row.longest(question.data) or 0
    return replace(scoring, logits=0, cache=longest * kv_bytes // plan.tp)


def _predict_auto_scoring(model: AutoModel, precision: Precision, tune: Tune) -> MemoryParts:
    """Return the predicted memory of scoring a model of which only FLOPs are known, on one device:
    weights, activations of one layer for a batch, as if all its results were as wide as its input,
    and logits of 4096 tokens.
    """
    size = DTYPE_BYTES[precision.weights]
    layer = 2 * model.hidden + model.token_flops // (2 * model.layers * model.hidden)
    logits = SCORING_LOGIT_TOKENS * model.vocab * size
    return MemoryParts(model.parameters * size, 0, 0, 0, tune.batch_tokens * layer * size, logits)


def _predict_scoring(
    model: LlamaModel, precision: Precision, tune: Tune, plan: Plan
) -> MemoryParts:
    """Return the predicted memory of scoring on one device of a tensor-parallel group: weights, one
    layer's activations of a batch (`tune.batch_tokens`), and the logits of 4096 tokens. In fp8 it
    is the larger of loading (16-bit weights alone) and of the passes (one byte less for each weight
    of the layers' matrices).
    """
    size = DTYPE_BYTES[precision.weights]
    layer = (
        2 * model.hidden
        + (_get_qkv_width(model) + model.heads * model.dim + 3 * model.ffn) // plan.tp
    )
    rows = count_vocab_rows(model.vocab, plan.tp)
    weights = count_stage_parameters(model, plan, 0) * size
    activations, logits = tune.batch_tokens * layer * size, SCORING_LOGIT_TOKENS * rows * size
    if precision.matmul != "fp8":
        return MemoryParts(weights, 0, 0, 0, activations, logits)
    fp8_saving = count_stage_matrices(
        model, plan, 0
    )  # 16-bit weights become fp8: one byte less each
    passes = MemoryParts(weights - fp8_saving, 0, 0, 0, activations, logits)
    return max(MemoryParts(weights, 0, 0, 0, 0, 0), passes, key=lambda parts: parts.total)


def estimate_bytes(case: Case, plan: Plan, fused_blocks: bool) -> int:
    """Return the bytes that the fullest device is expected to hold, for choosing a size: where
    shapes do not determine it, rather too much than too little.

    In scoring the allocator is expected to reserve 2.6 times all but the parameters (for Llama in
    division open, shared prefixes included); a GLM in training gets the activations of a cloze
    batch. `fused_blocks`: in training, the engine runs the blocks of models/llama_fused.py, and
    gathered shards count.
    """
    question = case.question
    if isinstance(question.model, LlamaModel) and question.train is not None:
        stages = predict_stages(
            question.model,
            question.precision,
            case.tune,
            plan,
            question.train,
            fused_blocks=fused_blocks,
            with_gathered=fused_blocks,
        )
        return max(stage.total for stage in stages)
    minimum = predict_minimum(case, plan)
    if isinstance(question.model, AutoModel):
        return minimum.parameters + int(ALLOCATOR_FACTOR * (minimum.total - minimum.parameters))
    if isinstance(question.model, LlamaModel):
        shared = (
            _count_prefix_bytes(question.model, question.precision, case.tune, plan)
            if question.division == "open"
            else 0
        )
        return minimum.parameters + int(
            ALLOCATOR_FACTOR * (minimum.total - minimum.parameters + shared)
        )
    return minimum.total + _count_cloze_bytes(case)


def _count_prefix_bytes(model: LlamaModel, precision: Precision, tune: Tune, plan: Plan) -> int:
    """Return the bytes that division open adds in scoring on a device of a tensor-parallel group: a
    cached prefix of the model's longest length for every layer, and keys and values of one layer
    laid out for each question that attends to it (12 for each token of a batch).
    """
    pair = 2 * model.kv_heads * model.dim * DTYPE_BYTES[precision.weights] // plan.tp
    return pair * (model.layers * model.positions + KEYS_PER_TOKEN * tune.batch_tokens)


def _count_cloze_bytes(case: Case) -> int:
    """Return the estimated activation bytes of a micro-batch of cloze samples, 1.4 times what the
    layers save; 0 if the case is no training of a GLM.

    A row of ReCoRD has about 210 tokens; an example has ten rows in division closed and one in
    open, which is estimated as half of the longest length for each candidate, and as one longest
    length. Recomputation `selective` counts as `full`.
    """
    train, model, size = (
        case.question.train,
        case.question.model,
        DTYPE_BYTES[case.question.precision.matmul],
    )
    if train is None or not isinstance(model, GlmModel):
        return 0
    candidates = 1 + int(getattr(case.question.data, "wrong", 0))
    tokens = (
        case.tune.micro_batch
        * train.length
        * (candidates if case.question.division == "closed" else 2)
        // 2
    )
    recompute: Literal["none", "full"] = "none" if case.tune.recompute == "none" else "full"
    return int(CLOZE_ALLOCATOR_FACTOR * tokens * memory_glm.count_glm_bytes(model, size, recompute))


def _predict_fixed(case: Case, plan: Plan) -> MemoryParts:
    """Return the memory of parameters, their copy in the matmuls' dtype if that is another,
    gradients and optimizer states, for a model whose activations are not predicted (GLM). Only
    states are divided over shards. A precision without gradients or states (scoring) gives
    parameters alone.
    """
    precision, shards = case.question.precision, get_shard_degree(case, plan.dp)
    parameters = flops.count_model_parameters(case.question.model)
    stored_size, matmul = DTYPE_BYTES[precision.weights], DTYPE_BYTES[precision.matmul]
    if precision.gradients is None or precision.states is None:
        return MemoryParts(parameters * stored_size, 0, 0, 0, 0, 0)
    gradients, states = (
        parameters * DTYPE_BYTES[precision.gradients],
        2 * parameters * DTYPE_BYTES[precision.states] // shards,
    )
    return MemoryParts(
        parameters * stored_size,
        parameters * matmul if matmul != stored_size else 0,
        gradients,
        states,
        0,
        0,
    )


def format_parts(parts: MemoryParts) -> str:
    """Return the parts that are not zero as text, in GiB with three significant digits and without
    the unit, in the order of the fields: "parameters 12.6, activations 3.1".
    """
    return ", ".join(f"{name} {size / GIB:.3g}" for name, size in asdict(parts).items() if size)


def check_memory(case: Case, plan: Plan, memory_bytes: int | None) -> str | None:
    """Raise RequestError if the least memory that a case needs (`predict_minimum`) is more than 1.1
    times `memory_bytes` of a device; return a warning text, with settings that need less, if it is
    above 95 %, else None. Unknown memory (None) is never refused.
    """
    parts = predict_minimum(case, plan)
    if memory_bytes is None or parts.total <= WARNED_SHARE * memory_bytes:
        return None
    advice = _format_advice(case)
    message = (
        f"{case.name} in {case.question.precision.name} needs {parts.total / GIB:.1f} GiB per"
        f" device by its shapes ({format_parts(parts)}), and a device has {memory_bytes / GIB:.1f}"
        " GiB"
    )
    if parts.total > REFUSED_FACTOR * memory_bytes:
        raise RequestError(f"{message}; choose {advice}, or --size smoke")
    return f"{message}; it may not fit: {advice} need less"


def _format_advice(case: Case) -> str:
    """Return, as text joined by commas, command-line settings that need less memory, without those
    already set; others for training than for scoring.
    """
    wide = DTYPE_BYTES[case.question.precision.weights] > DTYPE_BYTES["bf16"]
    steps: tuple[tuple[str, bool], ...]
    if case.question.kind_row.trains:
        steps = (
            ("--precision bf16-pure", wide),
            ("more devices with --parallel TP or PP", True),
            ("--set tune.sharding=3", case.tune.sharding != 3),
            ("--set tune.recompute=full", case.tune.recompute != "full"),
        )
    else:
        steps = (
            ("a 16-bit --precision", wide),
            ("more devices with --parallel TP", True),
            ("a smaller tune.batch_tokens", True),
        )
    return ", ".join(step for step, helps in steps if helps)
