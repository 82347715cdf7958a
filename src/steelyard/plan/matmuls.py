"""The matmuls of one micro-batch or packed batch, as shapes: run/calibrate.py times them to know
what a device can reach.

Only matmuls with weights, not attention. Their FLOPs add up to exactly `flops.count_weight_flops`.
"""

from collections.abc import Callable, Mapping

from pydantic import Field

from steelyard.case.case import Case
from steelyard.models import families
from steelyard.models.auto_shape import AutoModel
from steelyard.models.shapes import GlmModel, LlamaModel, count_vocab_rows
from steelyard.schema import FrozenModel, MatmulLayout

VOCABULARY = "vocabulary"  # name of the matmul that gives logits
# Numbers of a matmul's row operand and result together: larger ones are split by rows, so that
# timing them does not need the memory of the run itself. 256 MiB in 16 bit; each split is still far
# larger than a device's caches.
MAX_NUMBERS = 1 << 27
# Rows of a split are a multiple of this: where rows are contiguous in memory, an odd number of them
# would rule out a fast kernel that the whole matmul can use.
ROW_MULTIPLE = 256


class Matmul(FrozenModel):
    """`count` equal matmuls of [m, k] by [k, n] with a weight matrix; `name` is that of the matrix,
    or `vocabulary`. `layout` says what they compute and which operand is stored transposed: nt
    (forward), nn (gradient of the input) or tn (gradient of the weight). `flops` are those of one
    of them. Timed by run/calibrate.py; `list_model_matmuls` makes them.
    """

    name: str
    layout: MatmulLayout = "nt"
    m: int = Field(ge=1, le=10**12)
    n: int = Field(ge=1, le=10**12)
    k: int = Field(ge=1, le=10**12)
    count: int = Field(1, ge=1, le=10**12)

    @property
    def flops(self) -> int:
        """Return the FLOPs of one of these `count` matmuls: 2·m·n·k."""
        return 2 * self.m * self.n * self.k


def count_total_flops(matmuls: tuple[Matmul, ...]) -> int:
    """Return the sum of the FLOPs of all these matmuls, each times its `count`."""
    return sum(matmul.count * matmul.flops for matmul in matmuls)


class WeightMatrix(FrozenModel):
    """A weight matrix [outputs, inputs] on one device, `name` being that of its matmuls, of which
    the model has `count`, one in each layer.
    """

    name: str
    outputs: int = Field(ge=1, le=10**12)
    inputs: int = Field(ge=1, le=10**12)
    count: int = Field(1, ge=1, le=10**12)


class BatchMatmuls(FrozenModel):
    """The matmuls with weights of one batch on one device, as plain numbers that need no case or
    model: so many `tokens` by each matrix of `layers` and so many `logits` by the `vocabulary`, in
    each of the `layouts`. `list_shapes` returns their shapes. A worker sends it to the process that
    times them (run/calibration_worker.py).
    """

    tokens: int = Field(ge=0, le=10**12)
    logits: int = Field(ge=0, le=10**12)
    layouts: tuple[MatmulLayout, ...]
    layers: tuple[WeightMatrix, ...]
    vocabulary: WeightMatrix

    def list_shapes(self, divisor: int = 1) -> tuple[Matmul, ...]:
        """Return the matmuls of this batch, or of one with `divisor` times fewer tokens and logits
        (at least 1 of each that it has): those of each layer matrix, with its `count`, then those
        of the vocabulary (none for 0 logits). Large ones are split by rows into two entries.
        """
        tokens, logits = self.tokens, self.logits
        if divisor > 1:
            tokens, logits = max(1, tokens // divisor), logits and max(1, logits // divisor)
        rows = [*((matrix, tokens) for matrix in self.layers), (self.vocabulary, logits)]
        return tuple(
            matmul
            for matrix, count in rows
            for matmul in _list_matrix_matmuls(
                matrix.name, count, matrix.outputs, matrix.inputs, matrix.count, self.layouts
            )
        )


def _describe_batch(
    model: LlamaModel | GlmModel | AutoModel,
    tokens: int,
    logits: int,
    layouts: tuple[MatmulLayout, ...],
    tp: int,
) -> BatchMatmuls:
    """Return the matmuls with weights of one device of a tensor-parallel group for so many tokens
    and logits. A vocabulary that the group divides is padded, and its padding is included.
    """
    matrices = families.find_family(model.family).layer_matrices(model)
    return BatchMatmuls(
        tokens=tokens,
        logits=logits,
        layouts=layouts,
        layers=tuple(
            WeightMatrix(
                name=matrix.name,
                outputs=matrix.outputs // tp if matrix.divided == "outputs" else matrix.outputs,
                inputs=matrix.inputs // tp if matrix.divided == "inputs" else matrix.inputs,
                count=model.layers,
            )
            for matrix in matrices
        ),
        vocabulary=WeightMatrix(
            name=VOCABULARY, outputs=count_vocab_rows(model.vocab, tp), inputs=model.hidden
        ),
    )


def list_model_matmuls(
    model: LlamaModel | GlmModel | AutoModel,
    tokens: int,
    logits: int,
    layouts: tuple[MatmulLayout, ...],
    tp: int = 1,
) -> tuple[Matmul, ...]:
    """Return the matmuls with weights of one device of a tensor-parallel group, over all layers,
    for so many tokens and logits, in each of the layouts (`BatchMatmuls.list_shapes`).
    """
    return _describe_batch(model, tokens, logits, layouts, tp).list_shapes()


def _list_matrix_matmuls(
    name: str, rows: int, outputs: int, inputs: int, count: int, layouts: tuple[MatmulLayout, ...]
) -> list[Matmul]:
    """Return the matmuls of one weight matrix [outputs, inputs] with `rows` tokens, in each layout:
    nt is the forward, nn and tn are the two of the backward; empty for no rows. Each layout is one
    `Matmul` with `count` as its field; one whose row operand and result together have more than
    `MAX_NUMBERS` numbers is split by rows (m) into at most two entries: full splits, with `count`
    times their number, and the remaining rows (`_split_rows`).
    """
    if rows == 0:
        return []
    shapes = {
        "nt": (rows, outputs, inputs),
        "nn": (rows, inputs, outputs),
        "tn": (outputs, inputs, rows),
    }
    return [
        matmul for layout in layouts for matmul in _split_rows(name, layout, *shapes[layout], count)
    ]


def _split_rows(
    name: str, layout: MatmulLayout, m: int, n: int, k: int, count: int
) -> list[Matmul]:
    """Return `count` equal matmuls as one entry, or split by rows (m) if row operand and result
    together have more than `MAX_NUMBERS` numbers: full splits, of a multiple of 256 rows if
    possible, as one entry, and the remaining rows as another.
    """
    max_rows = max(1, MAX_NUMBERS // (n + k))
    size = min(m, max_rows // ROW_MULTIPLE * ROW_MULTIPLE or max_rows)
    full_splits, remaining_rows = divmod(m, size)
    out = [Matmul(name=name, layout=layout, m=size, n=n, k=k, count=count * full_splits)]
    return (
        [*out, Matmul(name=name, layout=layout, m=remaining_rows, n=n, k=k, count=count)]
        if remaining_rows
        else out
    )


# How many logits a batch has if the data are not known, by kind of work, from its tokens and the
# model's positions; other kinds have one per token. A text with one answer has one; candidates of a
# cloze are few tokens beside their context, and are not counted.
LOGIT_COUNTS: dict[str, Callable[[int, int], int]] = {
    "score_choices": lambda tokens, positions: max(1, tokens // positions),
    "train_cloze": lambda tokens, positions: 0,
}


def describe_case_batch(
    case: Case, tp: int, counts: Mapping[str, int] | None = None
) -> BatchMatmuls:
    """Return the matmuls of one batch of a case on one device of a tensor-parallel group; forward
    only in scoring, backward too in training.

    `counts` are those of a pass or step ("tokens", "logits", "samples"), if they are known: they
    say how many tokens and logits a batch has.
    """
    tokens, logits = count_tokens_and_logits(case, counts)
    return _describe_batch(case.question.model, tokens, logits, case.question.kind_row.products, tp)


def list_case_matmuls(
    case: Case, tp: int, counts: Mapping[str, int] | None = None, divisor: int = 1
) -> tuple[Matmul, ...]:
    """Return the shapes of the matmuls of one batch of a case (`describe_case_batch`), or of one
    with `divisor` times fewer tokens and logits.
    """
    return describe_case_batch(case, tp, counts).list_shapes(divisor)


def count_tokens_and_logits(case: Case, counts: Mapping[str, int] | None = None) -> tuple[int, int]:
    """Return (tokens that are computed together in a batch or micro-batch, logits among them).

    With `counts` of a pass or step ("tokens", "logits", "samples") logits are in proportion to
    these, a scoring batch has at most their tokens, and a cloze micro-batch their mean tokens per
    sample for each of its samples. Without them, or with no tokens, those of the longest possible
    batch: logits by `LOGIT_COUNTS`, else one per token.
    """
    question, tune = case.question, case.tune
    known_counts = counts if counts and counts["tokens"] else None
    if question.train is None:
        tokens = (
            tune.batch_tokens
            if known_counts is None
            else min(tune.batch_tokens, known_counts["tokens"])
        )
    else:
        tokens = tune.micro_batch * question.train.length
        # rows are contexts of different lengths, one per candidate
        if known_counts is not None and question.task_row.work == "train_cloze":
            tokens = max(
                1, tune.micro_batch * known_counts["tokens"] // max(1, known_counts["samples"])
            )
    if known_counts is not None:
        return tokens, round(tokens * known_counts["logits"] / known_counts["tokens"])
    count_logits = LOGIT_COUNTS.get(question.task_row.work)
    return tokens, tokens if count_logits is None else count_logits(
        tokens, question.model.positions
    )
