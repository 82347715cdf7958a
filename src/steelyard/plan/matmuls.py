"""The matmuls of one micro-batch or packed batch, as shapes: what a device is to be timed with to
know what it can reach.

Products with weights alone; attention is none of them. Their FLOPs are those of
`flops.weight_flops`, to the unit.
"""

from collections.abc import Callable, Mapping

from pydantic import Field

from steelyard.case.case import Case
from steelyard.models import families
from steelyard.models.auto_shape import AutoModel
from steelyard.models.shapes import GlmModel, LlamaModel, vocab_rows
from steelyard.schema import Frozen, Layout

VOCABULARY = "vocabulary"  # the product that gives logits
# Numbers of a product's rows, operand and result together: more are taken in blocks of rows, so
# that knowing a rate does not take the memory of the run that it is for. 256 MiB in 16 bit; each
# block is still far larger than a device's caches.
MOST_NUMBERS = 1 << 27
# Rows of a block are a multiple of this: where they are what lies side by side in memory, an odd
# number of them takes a fast kernel away from a product that has it as a whole.
ALIGNED = 256


class Matmul(Frozen):
    """`count` products of [m, k] by [k, n]."""

    name: str
    layout: Layout = "nt"
    m: int = Field(ge=1, le=10**12)
    n: int = Field(ge=1, le=10**12)
    k: int = Field(ge=1, le=10**12)
    count: int = Field(1, ge=1, le=10**12)

    @property
    def flops(self) -> int:
        """Of one product."""
        return 2 * self.m * self.n * self.k


def total(every: tuple[Matmul, ...]) -> int:
    return sum(one.count * one.flops for one in every)


def of_model(
    model: LlamaModel | GlmModel | AutoModel,
    tokens: int,
    logits: int,
    layouts: tuple[Layout, ...],
    tp: int = 1,
) -> tuple[Matmul, ...]:
    """Of one device of a tensor-parallel group, over all layers. A vocabulary that the group
    divides is padded, and what is computed of the padding is in it."""
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
    """The products of a matrix: its forward, and of a kind that trains both of its backward."""
    if rows == 0:
        return []
    shapes = {
        "nt": (rows, outputs, inputs),
        "nn": (rows, inputs, outputs),
        "tn": (outputs, inputs, rows),
    }
    return [block for layout in layouts for block in _blocks(name, layout, *shapes[layout], count)]


def _blocks(name: str, layout: Layout, m: int, n: int, k: int, count: int) -> list[Matmul]:
    most = max(1, MOST_NUMBERS // (n + k))
    size = min(m, most // ALIGNED * ALIGNED or most)
    whole, rest = divmod(m, size)
    out = [Matmul(name=name, layout=layout, m=size, n=n, k=k, count=count * whole)]
    return [*out, Matmul(name=name, layout=layout, m=rest, n=n, k=k, count=count)] if rest else out


# Without data, how many logits a batch has: by kind of work, of its tokens and the model's
# positions. A text with one answer has one logit; candidates of a cloze are few tokens beside their
# context, and none is counted.
LOGITS: dict[str, Callable[[int, int], int]] = {
    "score_choices": lambda tokens, positions: max(1, tokens // positions),
    "train_cloze": lambda tokens, positions: 0,
}


def of_case(
    case: Case, tp: int, counts: Mapping[str, int] | None = None, smaller: int = 1
) -> tuple[Matmul, ...]:
    """Of one batch of a case, or of one so many times smaller; with what its rows hold (`counts`,
    of a pass or a step) where that is known."""
    tokens, logits = batch(case, counts)
    if smaller > 1:
        tokens, logits = max(1, tokens // smaller), logits and max(1, logits // smaller)
    return of_model(case.question.model, tokens, logits, case.question.kind_row.products, tp)


def batch(case: Case, counts: Mapping[str, int] | None = None) -> tuple[int, int]:
    """Tokens computed together, and the logits among them; the longest batch where the data are not
    known.
    """
    question, tune = case.question, case.tune
    known = counts if counts and counts["tokens"] else None
    if question.train is None:
        tokens = tune.batch_tokens if known is None else min(tune.batch_tokens, known["tokens"])
    else:
        tokens = tune.micro_batch * question.train.length
        # contexts of their own length, one a candidate
        if known is not None and question.row.work == "train_cloze":
            tokens = max(1, tune.micro_batch * known["tokens"] // max(1, known["samples"]))
    if known is not None:
        return tokens, round(tokens * known["logits"] / known["tokens"])
    logits = LOGITS.get(question.row.work)
    return tokens, tokens if logits is None else logits(tokens, question.model.positions)
