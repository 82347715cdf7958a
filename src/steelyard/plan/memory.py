"""Memory from shapes: what a device of each pipeline stage must hold at its fullest, and whether
that fits.

What a framework takes beside that (its own context, communication buffers, fragments) is not in it.
Activations are what the backward of one layer of models/llama.py needs of its forward; tests hold
the table to what torch saves.
"""

from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace
from itertools import pairwise
from typing import Literal

from steelyard.case.case import Case, Tune
from steelyard.case.precision import Precision
from steelyard.case.question import Train
from steelyard.errors import RequestError
from steelyard.models.auto_shape import AutoModel
from steelyard.models.shapes import GlmModel, LlamaModel, vocab_rows
from steelyard.plan import flops, memory_glm
from steelyard.plan.degrees import Plan, shard_degree, stage_layers

# of fp8, what all but the layers' matrices is in
BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 2}
# bytes of a weight in fp8 for training: one as it stands for the forward, one transposed for the
# backward
FP8_COPIES = 2
WIDE = 4  # bytes of what is kept in fp32 whatever the precision
MOST_STAGES = 1024  # a record may come from a stranger
GIB = 1 << 30
# a prediction this many times the memory is refused; measured runs were within 2 % of theirs
CERTAIN = 1.1
# one beyond this share of it is worth a warning: a framework takes some memory for itself
CLOSE = 0.95
LOGITS_AT_ONCE = 4096  # tokens, when scoring
# Keys laid out for attention for each token computed, where questions share a prefix: of MMLU with
# five shots on an H200, where
# 22.0 GiB were allocated, weights and activations being 16.3.
SHARED_KEYS = 12
# What an allocator holds for each byte of activations, where every batch has other sizes: 20.8 GiB
# instead of 17.2 and 72.6 instead of 67.0 with 12.6 and 62.8 of weights, 41.8 instead of 22.0 with
# a shared prefix.
SCATTER = 2.6
# The same of a GLM's: 24.7 numbers in units of the hidden size were held for 18 that a layer keeps
# of a token.
CLOZE_SCATTER = 1.4

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Parts:
    """Bytes on one device."""

    parameters: int  # as they are kept
    # of them in the type of the matmuls, where that is another; of fp8, two of the layers' matrices
    copies: int
    gradients: int
    states: int  # Adam's two
    activations: int
    logits: int  # with the last norm before them

    @property
    def total(self) -> int:
        return sum(astuple(self))


@dataclass(frozen=True)
class Saved:
    """Numbers a token that a layer keeps for its backward, and under which kinds of recomputation
    it does. `fused` ones are computed again by a compiler, without being asked; `plain` ones are
    kept by models/llama.py's own block, and not by that of models/llama_fused.py, `lean` ones the
    other way round; `wide_only` ones are not kept by that of models/llama_fp8.py."""

    name: str
    numbers: Callable[[LlamaModel], int]
    under: tuple[Recompute, ...] = ("none",)
    wide: bool = False
    fused: bool = False
    plain: bool = False
    lean: bool = False
    wide_only: bool = False


def _qkv(model: LlamaModel) -> int:
    return (model.heads + 2 * model.kv_heads) * model.dim


_BOTH: tuple[Recompute, ...] = ("none", "selective")  # results of matmuls and attention

SAVED = (
    Saved(
        "residual stream and what is to be added to it",
        lambda m: 2 * m.hidden,
        ("selective", "full"),
    ),
    Saved("input of the attention's norm", lambda m: m.hidden),
    Saved("scale of the attention's norm", lambda m: 1, wide=True),
    Saved("input of qkv", lambda m: m.hidden, wide_only=True),
    Saved("output of qkv", _qkv, _BOTH),
    Saved(
        "scales of the norms of queries and keys",
        lambda m: m.qk_norm * (m.heads + m.kv_heads),
        wide=True,
        plain=True,
    ),
    Saved("input of the norms of queries and keys", lambda m: m.qk_norm * _qkv(m), lean=True),
    Saved("rotated queries and keys", lambda m: (m.heads + m.kv_heads) * m.dim, plain=True),
    Saved("output of attention", lambda m: m.heads * m.dim, _BOTH),
    Saved("log-sum-exp of attention", lambda m: m.heads, _BOTH, wide=True),
    Saved("output of out", lambda m: m.hidden, ("selective",)),
    Saved("input of the FFN's norm", lambda m: m.hidden),
    Saved("scale of the FFN's norm", lambda m: 1, wide=True),
    Saved("input of gate_up", lambda m: m.hidden, wide_only=True),
    Saved("output of gate_up", lambda m: 2 * m.ffn, _BOTH),
    Saved("SiLU of the gate", lambda m: m.ffn, fused=True, plain=True),
    Saved("input of down", lambda m: m.ffn, plain=True),
)


def layer_bytes(
    model: LlamaModel,
    size: int,
    recompute: Recompute,
    compiled: bool,
    lean: bool = False,
    fp8: bool = False,
) -> int:
    """Bytes a token that one layer keeps, numbers being `size` bytes; a `lean` one is that of
    models/llama_fused.py.
    """

    def drops(part: Saved) -> bool:
        other = part.plain if lean else part.lean
        return (part.fused and compiled) or other or (part.wide_only and fp8)

    kept = [part for part in SAVED if recompute in part.under and not drops(part)]
    return sum(part.numbers(model) * (WIDE if part.wide else size) for part in kept)


def stage_parameters(model: LlamaModel, plan: Plan, stage: int) -> int:
    """Trained numbers on one device of a stage. Matrices are divided over a tensor-parallel group,
    norms are not.
    """
    biases = _qkv(model) if model.qkv_bias else 0
    norms = 2 * model.hidden + (2 * model.dim if model.qk_norm else 0)
    layer = (flops.layer_parameters(model) // model.layers + biases) // plan.tp + norms
    table = vocab_rows(model.vocab, plan.tp) * model.hidden
    first, last = stage == 0, stage == plan.pp - 1
    tables = (first + last) if not (first and last and model.tied) else 1
    return (
        len(stage_layers(model.layers, plan.pp)[stage]) * layer
        + tables * table
        + last * model.hidden
    )


def stage_matrices(model: LlamaModel, plan: Plan, stage: int) -> int:
    """Weights of the layers' matrices among them: those that fp8 multiplies."""
    return (
        len(stage_layers(model.layers, plan.pp)[stage])
        * (flops.layer_parameters(model) // model.layers)
        // plan.tp
    )


def predict(
    model: LlamaModel,
    precision: Precision,
    tune: Tune,
    plan: Plan,
    train: Train,
    lean: bool = False,
    units: bool = False,
) -> list[Parts]:
    """What a device of each stage holds, first stage first. `units`: with what is whole only for a
    while.
    """
    if not 1 <= plan.pp <= min(model.layers, MOST_STAGES):
        raise ValueError(f"{plan.pp} stages for {model.layers} layers")
    stages = [_stage(model, precision, tune, plan, train, stage, lean) for stage in range(plan.pp)]
    if not units:
        return stages
    return [
        _with_units(parts, model, precision, tune, plan, train, stage)
        for stage, parts in enumerate(stages)
    ]


def unit_parameters(model: LlamaModel, plan: Plan, stage: int) -> list[int]:
    """The same of each unit of a stage: the embedding, every layer, the last norm with the output."""
    layers = len(stage_layers(model.layers, plan.pp)[stage])
    table = vocab_rows(model.vocab, plan.tp) * model.hidden
    first, last = stage == 0, stage == plan.pp - 1
    rest = stage_parameters(model, plan, stage) - (table if first else 0)
    head = [model.hidden + (table if not (first and model.tied) else 0)] if last else []
    return [*([table] if first else []), *[(rest - sum(head)) // layers] * layers, *head]


def _with_units(
    parts: Parts,
    model: LlamaModel,
    precision: Precision,
    tune: Tune,
    plan: Plan,
    train: Train,
    stage: int,
) -> Parts:
    """Where gradients are divided, those of two neighbouring units are whole at a time, and so are
    divided weights. A tensor-parallel rank gathers the tokens that logits are made of."""
    degree = plan.dp if tune.sharding_degree is None else tune.sharding_degree
    size = BYTES[precision.matmul]
    mixed = BYTES[precision.weights] != size
    numbers = unit_parameters(model, plan, stage)
    pair = (
        max(map(sum, pairwise(numbers)), default=sum(numbers))
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
        + (pair * BYTES[precision.gradients or precision.weights] if tune.sharding > 1 else 0),
        logits=parts.logits + (gathered if stage == plan.pp - 1 else 0),
    )


def _stage(
    model: LlamaModel,
    precision: Precision,
    tune: Tune,
    plan: Plan,
    train: Train,
    stage: int,
    lean: bool,
) -> Parts:
    numbers = stage_parameters(model, plan, stage)
    degree = plan.dp if tune.sharding_degree is None else tune.sharding_degree
    kept, size = BYTES[precision.weights], BYTES[precision.matmul]
    mixed = kept != size
    tokens = tune.micro_batch * train.length

    fp8 = precision.matmul == "fp8"

    def held(each: int, divided_from: int) -> int:
        return each * (-(-numbers // degree) if tune.sharding >= divided_from else numbers)

    return Parts(
        # Where matmuls read a copy, the optimiser alone reads the parameters: they are divided with
        # its states.
        parameters=held(kept, 1 if mixed else 3),
        copies=(held(size, 3) if mixed else 0)
        + (_fp8_copies(model, mixed, tune, plan, degree, stage) if fp8 else 0),
        gradients=held(BYTES[precision.gradients or precision.weights], 2),
        states=held(2 * BYTES[precision.states or precision.weights], 1),
        activations=tokens
        * _activations(model, size, tune, plan, train, stage, lean, fp8)
        // plan.tp,
        logits=tokens * _logits(model, size, plan, tune.compile) if stage == plan.pp - 1 else 0,
    )


def _fp8_copies(
    model: LlamaModel, mixed: bool, tune: Tune, plan: Plan, degree: int, stage: int
) -> int:
    """Bytes of two copies of the layers' matrices, where weights are kept. Where fp32 is whole they
    are made of it, and 16-bit copies, which stand between them elsewhere, are not there."""
    if tune.sharding == 3:
        return 0
    whole = degree == 1 or tune.sharding == 0
    spared = BYTES["bf16"] if mixed and whole else 0
    return (FP8_COPIES - spared) * stage_matrices(model, plan, stage)


def _activations(
    model: LlamaModel,
    size: int,
    tune: Tune,
    plan: Plan,
    train: Train,
    stage: int,
    lean: bool,
    fp8: bool,
) -> int:
    """Bytes a token of a micro-batch: of all that are under way at once in 1F1B, and of the one
    layer that is computed again. A tensor-parallel group divides all of them, those between its
    matmuls by sequence."""
    batches = -(-train.batch // (plan.dp * tune.micro_batch))
    kept = layer_bytes(model, size, tune.recompute, tune.compile, lean, fp8)
    again = layer_bytes(model, size, "none", tune.compile, lean, fp8) - kept
    return (
        kept * len(stage_layers(model.layers, plan.pp)[stage]) * min(plan.pp - stage, batches)
        + again
    )


def _logits(model: LlamaModel, size: int, plan: Plan, compiled: bool) -> int:
    """Bytes a token: the last norm's input and output, the logits, and beside them their gradients
    where a compiler reads them as fp32 on the way, or a copy in fp32 and its softmax."""
    beside = size if compiled else 2 * WIDE
    return 2 * model.hidden * size // plan.tp + vocab_rows(model.vocab, plan.tp) * (size + beside)


def need(case: Case, plan: Plan) -> Parts:
    """What the fullest device holds, as far as shapes tell it."""
    question = case.question
    if isinstance(question.model, LlamaModel) and question.train is not None:
        # The leaner of the two blocks that engines run: what is refused must be certain not to fit.
        stages = predict(
            question.model,
            question.precision,
            case.tune,
            plan,
            question.train,
            lean=True,
            units=True,
        )
        return max(stages, key=lambda stage: stage.total)
    if isinstance(question.model, LlamaModel):
        return _scoring(question.model, question.precision, case.tune, plan)
    if isinstance(question.model, AutoModel):
        return _scoring_auto(question.model, question.precision, case.tune)
    return _held(case, plan)


def _scoring_auto(model: AutoModel, precision: Precision, tune: Tune) -> Parts:
    """Of a model of which only FLOPs are known: results of a layer's products, were they all as
    wide as its input.
    """
    size = BYTES[precision.weights]
    layer = 2 * model.hidden + model.token_flops // (2 * model.layers * model.hidden)
    logits = LOGITS_AT_ONCE * model.vocab * size
    return Parts(model.parameters * size, 0, 0, 0, tune.batch_tokens * layer * size, logits)


def _scoring(model: LlamaModel, precision: Precision, tune: Tune, plan: Plan) -> Parts:
    """Weights, one layer's activations of a batch, and the logits of a chunk of tokens."""
    size = BYTES[precision.weights]
    layer = 2 * model.hidden + (_qkv(model) + model.heads * model.dim + 3 * model.ffn) // plan.tp
    rows = vocab_rows(model.vocab, plan.tp)
    weights = stage_parameters(model, plan, 0) * size
    activations, logits = tune.batch_tokens * layer * size, LOGITS_AT_ONCE * rows * size
    if precision.matmul != "fp8":
        return Parts(weights, 0, 0, 0, activations, logits)
    half = stage_matrices(model, plan, 0)  # of what is loaded in 16 bits, one byte a number is kept
    passes = Parts(weights - half, 0, 0, 0, activations, logits)
    return max(Parts(weights, 0, 0, 0, 0, 0), passes, key=lambda parts: parts.total)


def expected_bytes(case: Case, plan: Plan, fused: bool) -> int:
    """What the fullest device is expected to hold, for choosing a size: where shapes do not tell,
    rather more than less.
    """
    question = case.question
    if isinstance(question.model, LlamaModel) and question.train is not None:
        stages = predict(
            question.model,
            question.precision,
            case.tune,
            plan,
            question.train,
            lean=fused,
            units=fused,
        )
        return max(stage.total for stage in stages)
    held = need(case, plan)
    if isinstance(question.model, AutoModel):
        return held.parameters + int(SCATTER * (held.total - held.parameters))
    if isinstance(question.model, LlamaModel):
        shared = (
            _shared(question.model, question.precision, case.tune, plan)
            if question.division == "open"
            else 0
        )
        return held.parameters + int(SCATTER * (held.total - held.parameters + shared))
    return held.total + _cloze(case)


def _shared(model: LlamaModel, precision: Precision, tune: Tune, plan: Plan) -> int:
    """A prefix of every layer, and keys and values of one layer laid out for each question that
    sees it.
    """
    pair = 2 * model.kv_heads * model.dim * BYTES[precision.weights] // plan.tp
    return pair * (model.layers * model.positions + SHARED_KEYS * tune.batch_tokens)


def _cloze(case: Case) -> int:
    """Activations of a micro-batch of contexts with candidates. Of ReCoRD a row has about 210
    tokens, and an example ten rows closed, one open: half and a whole of the longest."""
    train, model, size = (
        case.question.train,
        case.question.model,
        BYTES[case.question.precision.matmul],
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
    return int(CLOZE_SCATTER * tokens * memory_glm.glm_bytes(model, size, recompute))


def _held(case: Case, plan: Plan) -> Parts:
    """What is held from first to last of a model whose activations are not predicted."""
    precision, shards = case.question.precision, shard_degree(case, plan.dp)
    numbers = flops.parameters(case.question.model)
    kept, matmul = BYTES[precision.weights], BYTES[precision.matmul]
    if precision.gradients is None or precision.states is None:
        return Parts(numbers * kept, 0, 0, 0, 0, 0)
    gradients, states = (
        numbers * BYTES[precision.gradients],
        2 * numbers * BYTES[precision.states] // shards,
    )
    return Parts(numbers * kept, numbers * matmul if matmul != kept else 0, gradients, states, 0, 0)


def listed(parts: Parts) -> str:
    """The parts that are not empty, in GiB."""
    return ", ".join(f"{name} {size / GIB:.3g}" for name, size in asdict(parts).items() if size)


def check_fits(case: Case, plan: Plan, memory_bytes: int | None) -> str | None:
    """Refuse what certainly does not fit a device; returns a warning where it is close. Unknown
    memory is not refused.
    """
    parts = need(case, plan)
    if memory_bytes is None or parts.total <= CLOSE * memory_bytes:
        return None
    how = _advice(case)
    said = (
        f"{case.name} in {case.question.precision.name} takes {parts.total / GIB:.1f} GiB a device"
        f" by its shapes ({listed(parts)}) and one has {memory_bytes / GIB:.1f} GiB"
    )
    if parts.total > CERTAIN * memory_bytes:
        raise RequestError(f"{said}; choose {how}, or --size smoke")
    return f"{said}; it may not fit: {how} need less"


def _advice(case: Case) -> str:
    """List what makes a run need less memory, without what is set already."""
    wide = BYTES[case.question.precision.weights] > BYTES["bf16"]
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
