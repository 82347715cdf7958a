"""Check, merge and score answers on LAMBADA: loss, perplexity and last-word accuracy.

In a record, a passage that was not answered is "?" in `hits`. One that was answered without a
finite likelihood is None in `nll` or `last_nll`.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from math import exp, fsum, isfinite
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from steelyard.schema import GrownModel
from steelyard.tasks.task import Differences, OutputCount, Selection, Tally

ANSWER_COLUMNS = (
    "items",
    "nll",
    "last_nll",
    "hit",
)  # an engine's answers: four lists of one length
ARGMAX_COLUMN = "argmax"  # optional: per item a list of token ids
NO_TOKEN = -1
MAX_TOKENS = 1 << 31  # limit of a vocabulary
Token = Annotated[int, Field(ge=NO_TOKEN, lt=MAX_TOKENS)]
MIN_NLL = -1e-3  # below 0 only by rounding of a sum of log-probabilities


UNANSWERED = "?"


class LambadaAnswers(GrownModel):
    """The answers of one pass: per passage the negative log-likelihood in nats of all its targets
    (`nll`) and of its last word (`last_nll`), and whether greedy decoding gives the whole last word
    (`hits`: 1 or 0, `?` if not answered).

    `argmax` holds the likeliest token at each token of the last words, passage after passage, -1
    where a passage was not answered; None if the engine does not report it. `not_finite` and
    `repeated` count answers that are not finite, and answers that came again.
    """

    LATER: ClassVar[tuple[str, ...]] = ("argmax",)

    nll: list[float | None]
    last_nll: list[float | None]
    hits: str = Field(pattern=r"^[01?]*$")
    not_finite: int
    repeated: int
    argmax: list[Token] | None = None


class LambadaOutputs(GrownModel):
    """What a record keeps of LAMBADA: per passage its number of target tokens (`targets`), how many
    of these are the last word's (`last`), and its position in the whole set (`index`); and in
    `passes` the `LambadaAnswers` of each pass by name. Validation refuses lists that contradict
    each other. Answers of version 1 (`version` None) have no `argmax`.
    """

    LATER: ClassVar[tuple[str, ...]] = ("version",)

    version: Literal[2] | None = Field(None, description="left out where it is 1")
    targets: list[OutputCount]
    last: list[int]
    index: list[int]
    passes: dict[str, LambadaAnswers]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        """Validate LAMBADA's outputs after parsing, and return them. Raises ValueError if a passage
        has no targets, the lengths of a pass's answers are not the number of passages, or its
        `argmax` has not one token for each token of the last words.
        """
        count = len(self.targets)
        if any(target < 1 for target in self.targets):
            raise ValueError("a passage without a token to predict")
        if any(
            {len(answers.nll), len(answers.last_nll), len(answers.hits)} != {count}
            for answers in self.passes.values()
        ):
            raise ValueError(f"answers are not those of {count} passages")
        if any(
            answers.argmax is not None and len(answers.argmax) != sum(self.last)
            for answers in self.passes.values()
        ):
            raise ValueError(f"argmax are not those of {sum(self.last)} tokens of last words")
        return self


def make_passage_outputs(targets: list[int], last: list[int], index: list[int]) -> LambadaOutputs:
    """Return outputs of version 2 without any pass. Lists are per passage: its number of target
    tokens, how many of these are the last word's, and its position in the whole set.
    """
    return LambadaOutputs(version=2, targets=targets, last=last, index=index, passes={})


def check_passage_answers(answers: Any, outputs: LambadaOutputs) -> dict[str, Any]:
    """Return an engine's answers of a pass as a new dict if a record can be made of them: lists
    `items` (passage), `nll` and `last_nll` (float or None, nats) and `hit` (0 or 1) of one length,
    and optionally `argmax`. Values that are not finite become None; other keys are dropped.

    Raises TypeError for wrong types; ValueError for unequal lengths, a passage that does not exist,
    another `hit`, a negative log-likelihood below -0.001, or an `argmax` that does not fit.
    """
    passages = len(outputs.targets)
    columns: list[Any] = (
        [answers.get(name) for name in ANSWER_COLUMNS] if isinstance(answers, dict) else []
    )
    if not columns or not all(isinstance(column, list) for column in columns):
        raise TypeError(f"the engine's outputs must be lists: {', '.join(ANSWER_COLUMNS)}")
    items, nll, last_nll, hit = columns
    if not all(isinstance(value, int) for value in items + hit):
        raise TypeError("the engine's outputs must be lists of integers: items, hit")
    if not all(value is None or isinstance(value, float) for value in nll + last_nll):
        raise TypeError("the engine's outputs must be lists of floats (or None): nll, last_nll")
    if len({len(column) for column in columns}) != 1:
        raise ValueError("the engine's outputs must be lists of one length")
    if not all(0 <= item < passages for item in items) or not all(flag in (0, 1) for flag in hit):
        raise ValueError(
            f"the engine's outputs name a passage outside 0 to {passages - 1}, or a hit that is not"
            " 0 or 1"
        )
    sums = [
        [value if value is not None and isfinite(value) else None for value in column]
        for column in (nll, last_nll)
    ]
    lowest = min((value for column in sums for value in column if value is not None), default=0.0)
    if lowest < MIN_NLL:
        raise ValueError(
            f"the engine's outputs have a negative log-likelihood of {lowest}; it is not below 0"
        )
    checked = {"items": items, "nll": sums[0], "last_nll": sums[1], "hit": hit}
    argmax = answers.get(ARGMAX_COLUMN)
    return (
        checked
        if argmax is None
        else checked | {ARGMAX_COLUMN: _check_argmax(argmax, items, outputs)}
    )


def _check_argmax(argmax: Any, items: list[int], outputs: LambadaOutputs) -> list[list[int]]:
    """Return the optional `argmax` of an engine's answers, unchanged, if it has for each item a
    list of as many token ids as the item's last word has. Raises TypeError if it is no list of
    lists; ValueError if lengths do not fit or a value is no token id.
    """
    if not isinstance(argmax, list) or not all(isinstance(row, list) for row in argmax):
        raise TypeError(
            f"the engine's outputs must have a list of tokens for each item: {ARGMAX_COLUMN}"
        )
    if [len(row) for row in argmax] != [outputs.last[item] for item in items]:
        raise ValueError(
            "the engine's outputs must have as many tokens as the last word of each item has:"
            f" {ARGMAX_COLUMN}"
        )
    if not all(type(token) is int and 0 <= token < MAX_TOKENS for row in argmax for token in row):
        raise ValueError(
            f"the engine's outputs have a token in {ARGMAX_COLUMN} that is not an integer from 0 to"
            f" {MAX_TOKENS - 1}"
        )
    return argmax


def merge_passage_answers(
    outputs: LambadaOutputs, pass_name: str, rank_answers: list[dict[str, Any]]
) -> LambadaOutputs:
    """Return a copy of the outputs with one more pass, from the checked answers of all ranks.
    Passages that no rank answered are `?` in `hits` and None in the losses. A passage answered
    twice counts as repeated, and the later answer stays. `argmax` is kept only if every rank
    reports it.
    """
    count = len(outputs.targets)
    hits = [UNANSWERED] * count
    nll: list[float | None] = [None] * count
    last_nll: list[float | None] = [None] * count
    repeated = 0
    not_finite = 0
    for columns in rank_answers:
        for item, whole, last, hit in zip(
            *(columns[column] for column in ANSWER_COLUMNS), strict=True
        ):
            repeated += hits[item] != UNANSWERED
            not_finite += whole is None or last is None
            nll[item], last_nll[item], hits[item] = whole, last, str(int(hit))
    answers = LambadaAnswers(
        nll=nll,
        last_nll=last_nll,
        hits="".join(hits),
        not_finite=not_finite,
        repeated=repeated,
        argmax=_merge_argmax(outputs, rank_answers)
        if all(ARGMAX_COLUMN in columns for columns in rank_answers)
        else None,
    )
    return outputs.model_copy(update={"passes": {**outputs.passes, pass_name: answers}})


def _merge_argmax(outputs: LambadaOutputs, rank_answers: list[dict[str, Any]]) -> list[int]:
    """Return the likeliest tokens of all last words as one list in passage order, -1 for each token
    of an unanswered passage. Of repeated answers the last counts.
    """
    tokens_by_item = {
        item: row
        for columns in rank_answers
        for item, row in zip(columns["items"], columns[ARGMAX_COLUMN], strict=True)
    }
    return [
        token
        for item, size in enumerate(outputs.last)
        for token in tokens_by_item.get(item, [NO_TOKEN] * size)
    ]


def list_likeliest_words(outputs: LambadaOutputs, pass_name: str) -> list[tuple[int, ...]] | None:
    """Return the likeliest tokens of each passage's last word in a pass, -1 in those not answered;
    None if the pass did not keep them. Raises KeyError if there is no such pass.
    """
    tokens = outputs.passes[pass_name].argmax
    if tokens is None:
        return None
    ends = list(accumulate(outputs.last, initial=0))
    return [tuple(tokens[begin:end]) for begin, end in pairwise(ends)]


def score_passage_answers(outputs: LambadaOutputs, pass_name: str) -> dict[str, float]:
    """Score a pass over its answered passages: last-word accuracy `acc` (0 to 1) with standard
    error `se`, and, if all likelihoods are finite, losses in nats and perplexities (one too large
    for a float is left out). Empty if the pass is missing or nothing was answered.

    `loss` is the mean over passages of each passage's loss per token, as published; `loss_token`
    and `perplexity` weigh every token alike; `perplexity_last` is that of whole last words, as
    commonly reported for LAMBADA.
    """
    answers = outputs.passes.get(pass_name)
    answered = [i for i, hit in enumerate(answers.hits) if hit != UNANSWERED] if answers else []
    if answers is None or not answered:
        return {}
    acc = sum(answers.hits[i] == "1" for i in answered) / len(answered)
    nll, last = ([column[i] for i in answered] for column in (answers.nll, answers.last_nll))
    finite = (
        [value for value in nll if value is not None],
        [value for value in last if value is not None],
    )
    all_finite = len(finite[0]) == len(finite[1]) == len(answered)
    losses = _compute_losses(*finite, [outputs.targets[i] for i in answered]) if all_finite else {}
    return {**losses, "acc": acc, "se": (acc * (1 - acc) / len(answered)) ** 0.5}


def _compute_losses(nll: list[float], last: list[float], targets: list[int]) -> dict[str, float]:
    """Return `loss`, `loss_token`, `perplexity` and `perplexity_last` (see
    `score_passage_answers`); a value too large for a float is left out. Lists are per passage:
    negative log-likelihood in nats of all targets and of the last word, and number of targets.
    """
    values: dict[str, Callable[[], float]] = {
        "loss": lambda: (
            fsum(passage_nll / count for passage_nll, count in zip(nll, targets, strict=True))
            / len(nll)
        ),
        "loss_token": lambda: fsum(nll) / sum(targets),
        "perplexity": lambda: exp(fsum(nll) / sum(targets)),
        "perplexity_last": lambda: exp(fmean(last)),
    }
    losses = {}
    for name, value in values.items():
        try:
            losses[name] = value()
        except OverflowError:  # too large for a float: left out, as unknown values are
            continue
    return losses


def measure_passage_agreement(
    outputs: LambadaOutputs, first_pass: str, second_pass: str
) -> float | None:
    """Return the share (0 to 1) of passages, answered in both passes, with the same last word: the
    same likeliest tokens or, if a pass did not keep these, right in both or wrong in both. None if
    a pass is missing or no passage was answered in both.
    """
    if first_pass not in outputs.passes or second_pass not in outputs.passes:
        return None
    first, second = outputs.passes[first_pass], outputs.passes[second_pass]
    answered = [
        i
        for i, pair in enumerate(zip(first.hits, second.hits, strict=True))
        if UNANSWERED not in pair
    ]
    first_words, second_words = (
        list_likeliest_words(outputs, first_pass),
        list_likeliest_words(outputs, second_pass),
    )
    equal = sum(
        first.hits[i] == second.hits[i]
        if first_words is None or second_words is None
        else first_words[i] == second_words[i]
        for i in answered
    )
    return equal / len(answered) if answered else None


def compare_passage_outputs(
    first: LambadaOutputs, second: LambadaOutputs, pass_name: str
) -> Differences | None:
    """Compare two runs in a pass, over the passages that both answered: how many last words differ
    (by likeliest tokens, else by right or wrong), and the largest difference of a passage's loss in
    nats per token (None if none is finite in both).

    `tokens` equals the first, None if a run did not keep likeliest tokens. Returns None if the pass
    is missing in either, or the runs asked different passages.
    """
    if (
        pass_name not in first.passes
        or pass_name not in second.passes
        or first.index != second.index
    ):
        return None
    first_answers, second_answers = first.passes[pass_name], second.passes[pass_name]
    answered = [
        i
        for i, pair in enumerate(zip(first_answers.hits, second_answers.hits, strict=True))
        if UNANSWERED not in pair
    ]
    losses = [(first_answers.nll[i], second_answers.nll[i], first.targets[i]) for i in answered]
    loss_differences = [
        abs(b - a) / count for a, b, count in losses if a is not None and b is not None
    ]
    first_words, second_words = (
        list_likeliest_words(first, pass_name),
        list_likeliest_words(second, pass_name),
    )
    different_words = (
        None
        if first_words is None or second_words is None
        else sum(first_words[i] != second_words[i] for i in answered)
    )
    different_hits = sum(first_answers.hits[i] != second_answers.hits[i] for i in answered)
    return Differences(
        len(answered),
        different_hits if different_words is None else different_words,
        max(loss_differences, default=None),
        different_words,
    )


def explain_passage_mismatch(outputs: LambadaOutputs, selection: Selection) -> str | None:
    """Return why outputs do not answer the row ids that the user selected (other number or
    positions), as the end of an error message; None if they do, or no ids were given. A sample is
    not checked.
    """
    if selection.row_count not in (None, len(outputs.index)) or selection.positions not in (
        None,
        outputs.index,
    ):
        return f"{len(outputs.index)} passages, which are not the selected rows"
    return None


def tally_passage_answers(outputs: LambadaOutputs, pass_name: str) -> Tally | None:
    """Count a pass's passages, those without an answer, answers that came again, and answers that
    are not finite; return None if there is no such pass.
    """
    answers = outputs.passes.get(pass_name)
    if answers is None:
        return None
    return Tally(
        len(outputs.targets), answers.hits.count(UNANSWERED), answers.repeated, answers.not_finite
    )
