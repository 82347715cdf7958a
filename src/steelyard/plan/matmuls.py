"""The matmuls of one micro-batch or packed batch, as shapes: run/calibrate.py times them to know
what a device can reach.

Only matmuls with weights, not attention. Their FLOPs add up to exactly `flops.count_weight_flops`.
"""

from collections.abc import Callable, Mapping

from pydantic import Field

from steelyard.case.case import Case
from steelyard.models import families
from steelyard.models.auto_shape import AutoModel
from steelyard.models.shapes import GlmModel, LlamaModel, vocab_rows
from steelyard.schema import Frozen, Layout

VOCABULARY = "vocabulary"  # name of the matmul that gives logits
# Numbers of a matmul's row operand and result together: larger ones are split by rows, so that
# timing them does not need the memory of the run itself. 256 MiB in 16 bit; each split is still far
# larger than a device's caches.
MOST_NUMBERS = 1 << 27
# Rows of a split are a multiple of this: where rows are contiguous in memory, an odd number of them
# would rule out a fast kernel that the whole matmul can use.
ALIGNED = 256


class Matmul(Frozen):
    """`count` equal matmuls of [m, k] by [k, n]. `layout` says which operand is transposed: nt
    (forward), nn or tn (backward).
    """

    name: str
    layout: Layout = "nt"
    m: int = Field(ge=1, le=10**12)
    n: int = Field(ge=1, le=10**12)
    k: int = Field(ge=1, le=10**12)
    count: int = Field(1, ge=1, le=10**12)

    @property
    def flops(self) -> int:
        """Return the FLOPs of one of these matmuls."""
        return 2 * self.m * self.n * self.k


def total(every: tuple[Matmul, ...]) -> int:
    """Return the FLOPs of all these matmuls, with their counts."""
    return sum(one.count * one.flops for one in every)


def of_model(
    model: LlamaModel | GlmModel | AutoModel,
    tokens: int,
    logits: int,
    layouts: tuple[Layout, ...],
    tp: int = 1,
) -> tuple[Matmul, ...]:
    """Return the matmuls of one device of a tensor-parallel group over all layers, for so many
    tokens and logits, in each of the layouts. A vocabulary that the group divides is padded, and
    its padding is included.
    """
    out: list[Matmul] = []
    for one in families.row(model.family).layer_matrices(model):
        outputs = one.outputs // tp if one.divided == "outputs" else one.outputs
        inputs = one.inputs // tp if one.divided == "inputs" else one.inputs
        out += _products(one.name, tokens, outputs, inputs, model.layers, layouts)
    return (
        *out,
        *_products(VOCABULARY, logits, vocab_rows(model.vocab, tp), model.hidden, 1, layouts),
    )


def _products(
    name: str, rows: int, outputs: int, inputs: int, count: int, layouts: tuple[Layout, ...]
) -> list[Matmul]:
    """Return the matmuls of one matrix in each layout: forward, and the two of backward if they are
    asked for; none for no rows.
    """
    if rows == 0:
        return []
    shapes = {
        "nt": (rows, outputs, inputs),
        "nn": (rows, inputs, outputs),
        "tn": (outputs, inputs, rows),
    }
    return [block for layout in layouts for block in _blocks(name, layout, *shapes[layout], count)]


def _blocks(name: str, layout: Layout, m: int, n: int, k: int, count: int) -> list[Matmul]:
    """Return `count` equal matmuls, split by rows (m) if operand and result have more than
    `MAX_NUMBERS` numbers. The remainder is a matmul of its own.
    """
    most = max(1, MOST_NUMBERS // (n + k))
    size = min(m, most // ALIGNED * ALIGNED or most)
    whole, rest = divmod(m, size)
    out = [Matmul(name=name, layout=layout, m=size, n=n, k=k, count=count * whole)]
    return [*out, Matmul(name=name, layout=layout, m=rest, n=n, k=k, count=count)] if rest else out


# How many logits a batch has if the data are not known, by kind of work, from its tokens and the
# model's positions; other kinds have one per token. A text with one answer has one; candidates of a
# cloze are few tokens beside their context, and are not counted.
LOGITS: dict[str, Callable[[int, int], int]] = {
    "score_choices": lambda tokens, positions: max(1, tokens // positions),
    "train_cloze": lambda tokens, positions: 0,
}


def of_case(
    case: Case, tp: int, counts: Mapping[str, int] | None = None, smaller: int = 1
) -> tuple[Matmul, ...]:
    """Return the matmuls of one batch of a case, or of one that is `divisor` times smaller, on one
    device of a tensor-parallel group. `counts` are those of a pass or step, if they are known: they
    say how many tokens and logits a batch has.
    """
    tokens, logits = batch(case, counts)
    if smaller > 1:
        tokens, logits = max(1, tokens // smaller), logits and max(1, logits // smaller)
    return of_model(case.question.model, tokens, logits, case.question.kind_row.products, tp)


def batch(case: Case, counts: Mapping[str, int] | None = None) -> tuple[int, int]:
    """Return the tokens that are computed together, and the logits among them; those of the longest
    possible batch if the data's counts are not known.
    """
    question, tune = case.question, case.tune
    known = counts if counts and counts["tokens"] else None
    if question.train is None:
        tokens = tune.batch_tokens if known is None else min(tune.batch_tokens, known["tokens"])
    else:
        tokens = tune.micro_batch * question.train.length
        # rows are contexts of different lengths, one per candidate
        if known is not None and question.row.work == "train_cloze":
            tokens = max(1, tune.micro_batch * known["tokens"] // max(1, known["samples"]))
    if known is not None:
        return tokens, round(tokens * known["logits"] / known["tokens"])
    logits = LOGITS.get(question.row.work)
    return tokens, tokens if logits is None else logits(tokens, question.model.positions)
