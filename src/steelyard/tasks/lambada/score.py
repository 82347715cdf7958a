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

from steelyard.schema import GrownTable
from steelyard.tasks.task import Differences, Many, Selected, Tally

ANSWERS = ("items", "nll", "last_nll", "hit")  # an engine's answers: four lists of one length
ARGMAX = "argmax"  # optional: per item a list of token ids
NO_TOKEN = -1
MOST_TOKENS = 1 << 31  # limit of a vocabulary
Token = Annotated[int, Field(ge=NO_TOKEN, lt=MOST_TOKENS)]
LEAST = -1e-3  # below 0 only by rounding of a sum of log-probabilities


UNANSWERED = "?"


class LambadaAnswers(GrownTable):
    """The answers of one pass: per passage the negative log-likelihood in nats of all its targets
    (`nll`) and of its last word (`last_nll`), and whether greedy decoding gives the whole last word
    (`hits`).

    `argmax` holds the likeliest token at each token of the last words, passage after passage, -1
    where a passage was not answered; None if the engine does not report it.
    """

    LATER: ClassVar[tuple[str, ...]] = ("argmax",)

    nll: list[float | None]
    last_nll: list[float | None]
    hits: str = Field(pattern=r"^[01?]*$")
    not_finite: int
    repeated: int
    argmax: list[Token] | None = None


class LambadaOutputs(GrownTable):
    """What a record keeps of LAMBADA: per passage its number of target tokens, how many of these
    are the last word's (`last`), and its position in the whole set; and the answers of each pass.
    Answers of version 1 have no `argmax`.
    """

    LATER: ClassVar[tuple[str, ...]] = ("version",)

    version: Literal[2] | None = Field(None, description="left out where it is 1")
    targets: list[Many]
    last: list[int]
    index: list[int]
    passes: dict[str, LambadaAnswers]

    @model_validator(mode="after")
    def _fit(self) -> Self:
        """Raise ValueError if a passage has no targets, or the lengths of a pass's answers do not
        fit the passages.
        """
        count = len(self.targets)
        if any(target < 1 for target in self.targets):
            raise ValueError("a passage without a token to predict")
        if any(
            {len(one.nll), len(one.last_nll), len(one.hits)} != {count}
            for one in self.passes.values()
        ):
            raise ValueError(f"answers are not those of {count} passages")
        if any(
            one.argmax is not None and len(one.argmax) != sum(self.last)
            for one in self.passes.values()
        ):
            raise ValueError(f"argmax are not those of {sum(self.last)} tokens of last words")
        return self


def outputs(targets: list[int], last: list[int], index: list[int]) -> LambadaOutputs:
    """Return outputs without any pass."""
    return LambadaOutputs(version=2, targets=targets, last=last, index=index, passes={})


def check(table: Any, outputs: LambadaOutputs) -> dict[str, Any]:
    """Return an engine's answers of a pass if a record can be made of them: lists `items`, `nll`,
    `last_nll` and `hit` of one length, and optionally `argmax`. Values that are not finite become
    None.

    Raises TypeError or ValueError if types, lengths, indices or signs are wrong.
    """
    passages = len(outputs.targets)
    columns: list[Any] = [table.get(name) for name in ANSWERS] if isinstance(table, dict) else []
    if not columns or not all(isinstance(column, list) for column in columns):
        raise TypeError(f"the engine's outputs must be lists: {', '.join(ANSWERS)}")
    items, nll, last_nll, hit = columns
    if not all(isinstance(value, int) for value in items + hit):
        raise TypeError("the engine's outputs must be lists of integers: items, hit")
    if not all(value is None or isinstance(value, float) for value in nll + last_nll):
        raise TypeError("the engine's outputs must be lists of floats (or None): nll, last_nll")
    if len({len(column) for column in columns}) != 1:
        raise ValueError("the engine's outputs must be lists of one length")
    if not all(0 <= item < passages for item in items) or not all(one in (0, 1) for one in hit):
        raise ValueError(
            f"the engine's outputs name a passage beyond 0 to {passages - 1}, or a hit that is not"
            " 0 or 1"
        )
    sums = [
        [value if value is not None and isfinite(value) else None for value in column]
        for column in (nll, last_nll)
    ]
    low = min((value for column in sums for value in column if value is not None), default=0.0)
    if low < LEAST:
        raise ValueError(
            f"the engine's outputs have a negative log-likelihood of {low}; it is not below 0"
        )
    out = {"items": items, "nll": sums[0], "last_nll": sums[1], "hit": hit}
    argmax = table.get(ARGMAX)
    return out if argmax is None else out | {ARGMAX: _check_argmax(argmax, items, outputs)}


def _check_argmax(found: Any, items: list[int], outputs: LambadaOutputs) -> list[list[int]]:
    """Return the optional `argmax` of an engine if it has, for each item, as many token ids as the
    item's last word; raise TypeError or ValueError otherwise.
    """
    if not isinstance(found, list) or not all(isinstance(row, list) for row in found):
        raise TypeError(f"the engine's outputs must have a list of tokens for each item: {ARGMAX}")
    if [len(row) for row in found] != [outputs.last[item] for item in items]:
        raise ValueError(
            "the engine's outputs must have as many tokens as the last word of each item has:"
            f" {ARGMAX}"
        )
    if not all(type(token) is int and 0 <= token < MOST_TOKENS for row in found for token in row):
        raise ValueError(
            f"the engine's outputs have a token in {ARGMAX} that is not an integer from 0 to"
            f" {MOST_TOKENS - 1}"
        )
    return found


def merge(outputs: LambadaOutputs, name: str, tables: list[dict[str, Any]]) -> LambadaOutputs:
    """Return the outputs with one more pass, from the checked answers of all ranks. A passage
    answered twice counts as repeated, and the later answer stays. `argmax` is kept only if every
    rank reports it.
    """
    count = len(outputs.targets)
    hits = [UNANSWERED] * count
    nll: list[float | None] = [None] * count
    last_nll: list[float | None] = [None] * count
    repeated = 0
    bad = 0
    for table in tables:
        for item, whole, last, hit in zip(*(table[column] for column in ANSWERS), strict=True):
            repeated += hits[item] != UNANSWERED
            bad += whole is None or last is None
            nll[item], last_nll[item], hits[item] = whole, last, str(int(hit))
    answers = LambadaAnswers(
        nll=nll,
        last_nll=last_nll,
        hits="".join(hits),
        not_finite=bad,
        repeated=repeated,
        argmax=_merged(outputs, tables) if all(ARGMAX in table for table in tables) else None,
    )
    return outputs.model_copy(update={"passes": {**outputs.passes, name: answers}})


def _merged(outputs: LambadaOutputs, tables: list[dict[str, Any]]) -> list[int]:
    """Return the likeliest tokens of all last words in passage order, -1 where unanswered."""
    found = {
        item: row
        for table in tables
        for item, row in zip(table["items"], table[ARGMAX], strict=True)
    }
    return [
        token
        for item, size in enumerate(outputs.last)
        for token in found.get(item, [NO_TOKEN] * size)
    ]


def argmax(outputs: LambadaOutputs, name: str) -> list[tuple[int, ...]] | None:
    """Return the likeliest tokens of each passage's last word; None if the pass did not keep them.
    Raises KeyError if there is no such pass.
    """
    found = outputs.passes[name].argmax
    if found is None:
        return None
    ends = list(accumulate(outputs.last, initial=0))
    return [tuple(found[begin:end]) for begin, end in pairwise(ends)]


def score(outputs: LambadaOutputs, name: str) -> dict[str, float]:
    """Score a pass over its answered passages: last-word accuracy `acc` with standard error `se`,
    and, if all likelihoods are finite, losses in nats and perplexities. Empty if the pass is
    missing or nothing was answered.

    `loss` is the mean over passages of each passage's loss per token, as published; `loss_token`
    and `perplexity` weigh every token alike; `perplexity_last` is that of whole last words, as
    commonly reported for LAMBADA.
    """
    answers = outputs.passes.get(name)
    asked = [i for i, hit in enumerate(answers.hits) if hit != UNANSWERED] if answers else []
    if answers is None or not asked:
        return {}
    acc = sum(answers.hits[i] == "1" for i in asked) / len(asked)
    nll, last = ([column[i] for i in asked] for column in (answers.nll, answers.last_nll))
    finite = [one for one in nll if one is not None], [one for one in last if one is not None]
    whole = len(finite[0]) == len(finite[1]) == len(asked)
    known = _losses(*finite, [outputs.targets[i] for i in asked]) if whole else {}
    return {**known, "acc": acc, "se": (acc * (1 - acc) / len(asked)) ** 0.5}


def _losses(nll: list[float], last: list[float], targets: list[int]) -> dict[str, float]:
    """Return the losses and perplexities by name; a value too large for a float is left out."""
    values: dict[str, Callable[[], float]] = {
        "loss": lambda: (
            fsum(one / count for one, count in zip(nll, targets, strict=True)) / len(nll)
        ),
        "loss_token": lambda: fsum(nll) / sum(targets),
        "perplexity": lambda: exp(fsum(nll) / sum(targets)),
        "perplexity_last": lambda: exp(fmean(last)),
    }
    out = {}
    for name, value in values.items():
        try:
            out[name] = value()
        except OverflowError:  # too large for a float: left out, as unknown values are
            continue
    return out


def agreement(outputs: LambadaOutputs, one: str, other: str) -> float | None:
    """Return the share of passages, answered in both passes, with the same last word: the same
    likeliest tokens or, if a pass did not keep these, right in both or wrong in both. None if a
    pass is missing or none was answered in both.
    """
    if one not in outputs.passes or other not in outputs.passes:
        return None
    ours, theirs = outputs.passes[one], outputs.passes[other]
    both = [
        i
        for i, pair in enumerate(zip(ours.hits, theirs.hits, strict=True))
        if UNANSWERED not in pair
    ]
    words, others = argmax(outputs, one), argmax(outputs, other)
    same = sum(
        ours.hits[i] == theirs.hits[i] if words is None or others is None else words[i] == others[i]
        for i in both
    )
    return same / len(both) if both else None


def differences(one: LambadaOutputs, other: LambadaOutputs, name: str) -> Differences | None:
    """Compare two runs in a pass: last words (by likeliest tokens, else by right or wrong), and the
    largest difference of a passage's loss per token. None if the pass is missing in either, or the
    runs asked different passages.
    """
    if name not in one.passes or name not in other.passes or one.index != other.index:
        return None
    ours, theirs = one.passes[name], other.passes[name]
    both = [
        i
        for i, pair in enumerate(zip(ours.hits, theirs.hits, strict=True))
        if UNANSWERED not in pair
    ]
    losses = [(ours.nll[i], theirs.nll[i], one.targets[i]) for i in both]
    apart = [abs(b - a) / count for a, b, count in losses if a is not None and b is not None]
    words, others = argmax(one, name), argmax(other, name)
    tokens = None if words is None or others is None else sum(words[i] != others[i] for i in both)
    right = sum(ours.hits[i] != theirs.hits[i] for i in both)
    return Differences(
        len(both), right if tokens is None else tokens, max(apart, default=None), tokens
    )


def off_scope(outputs: LambadaOutputs, selected: Selected) -> str | None:
    """Return why outputs do not answer the rows that the user selected, or None if they do."""
    if selected.row_count not in (None, len(outputs.index)) or selected.places not in (
        None,
        outputs.index,
    ):
        return f"{len(outputs.index)} passages, which are not the rows named"
    return None


def tally(outputs: LambadaOutputs, name: str) -> Tally | None:
    """Return how a pass's answers cover the passages; None if there is no such pass."""
    answers = outputs.passes.get(name)
    if answers is None:
        return None
    return Tally(
        len(outputs.targets), answers.hits.count(UNANSWERED), answers.repeated, answers.not_finite
    )
