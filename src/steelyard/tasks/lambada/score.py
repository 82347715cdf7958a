"""Loss and last-word accuracy on LAMBADA from the answers a record keeps.

A passage that was not answered is "?" in `hits`; one that was and has no finite likelihood is None in `nll` or `last_nll`.
"""

from collections.abc import Callable
from math import exp, fsum, isfinite
from typing import Any, Self

from pydantic import Field, model_validator

from steelyard.schema import Frozen
from steelyard.tasks.task import Differences, Many, Tally

ANSWERS = ("items", "nll", "last_nll", "hit")  # an engine's answers: four lists of one length
LEAST = -1e-3  # a sum of log-probabilities can be above 0 by its rounding, and by no more


UNANSWERED = "?"


class LambadaAnswers(Frozen):
    """Per passage the negative log-likelihood (nats) of all its targets and of its last word's tokens, and whether greedy
    decoding gives the whole last word."""

    nll: list[float | None]
    last_nll: list[float | None]
    hits: str = Field(pattern=r"^[01?]*$")
    not_finite: int
    repeated: int


class LambadaOutputs(Frozen):
    """Per passage its predicted tokens, how many of them are the last word's, and its place in the whole set."""

    targets: list[Many]
    last: list[int]
    index: list[int]
    passes: dict[str, LambadaAnswers]

    @model_validator(mode="after")
    def _fit(self) -> Self:
        count = len(self.targets)
        if any(target < 1 for target in self.targets):
            raise ValueError("a passage without a token to predict")
        if any({len(one.nll), len(one.last_nll), len(one.hits)} != {count} for one in self.passes.values()):
            raise ValueError(f"answers are not those of {count} passages")
        return self


def outputs(targets: list[int], last: list[int], index: list[int]) -> LambadaOutputs:
    """The part that does not depend on a pass."""
    return LambadaOutputs(targets=targets, last=last, index=index, passes={})


def check(table: Any, outputs: LambadaOutputs) -> dict[str, Any]:
    """An engine's answers, if a record can be made of them; a value that is not finite becomes None, for JSON has neither."""
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
        raise ValueError(f"the engine's outputs name a passage beyond 0 to {passages - 1}, or a hit that is not 0 or 1")
    sums = [[value if value is not None and isfinite(value) else None for value in column] for column in (nll, last_nll)]
    low = min((value for column in sums for value in column if value is not None), default=0.0)
    if low < LEAST:
        raise ValueError(f"the engine's outputs have a negative log-likelihood of {low}; it is not below 0")
    return {"items": items, "nll": sums[0], "last_nll": sums[1], "hit": hit}


def merge(outputs: LambadaOutputs, name: str, tables: list[dict[str, Any]]) -> LambadaOutputs:
    """With a pass's answers of all ranks, in the order of the passages."""
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
    answers = LambadaAnswers(nll=nll, last_nll=last_nll, hits="".join(hits), not_finite=bad, repeated=repeated)
    return outputs.model_copy(update={"passes": {**outputs.passes, name: answers}})


def score(outputs: LambadaOutputs, name: str) -> dict[str, float]:
    """Over the answered passages: the losses and perplexities, if all are finite, and the accuracy of the last word.

    `loss` is the mean over passages of each one's loss per token, as published; `loss_token` weighs every token alike;
    `perplexity_last` is of whole last words, as LAMBADA's perplexity is commonly reported.
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
    values: dict[str, Callable[[], float]] = {
        "loss": lambda: fsum(one / count for one, count in zip(nll, targets, strict=True)) / len(nll),
        "loss_token": lambda: fsum(nll) / sum(targets),
        "perplexity": lambda: exp(fsum(nll) / sum(targets)),
        "perplexity_last": lambda: exp(fsum(last) / len(last)),
    }
    out = {}
    for name, value in values.items():
        try:
            out[name] = value()
        except OverflowError:  # no float can hold it: it is left out, as what is unknown is
            continue
    return out


def agreement(outputs: LambadaOutputs, one: str, other: str) -> float | None:
    """Share of the passages, answered in both passes, whose last word was right in both or wrong in both."""
    if one not in outputs.passes or other not in outputs.passes:
        return None
    both = zip(outputs.passes[one].hits, outputs.passes[other].hits, strict=True)
    pairs = [(a, b) for a, b in both if UNANSWERED not in (a, b)]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def differences(one: LambadaOutputs, other: LambadaOutputs, name: str) -> Differences | None:
    """Whether the last words were right in two runs, and the losses per token of the passages."""
    if name not in one.passes or name not in other.passes or one.index != other.index:
        return None
    ours, theirs = one.passes[name], other.passes[name]
    both = [i for i, pair in enumerate(zip(ours.hits, theirs.hits, strict=True)) if UNANSWERED not in pair]
    losses = [(ours.nll[i], theirs.nll[i], one.targets[i]) for i in both]
    apart = [abs(b - a) / count for a, b, count in losses if a is not None and b is not None]
    return Differences(len(both), sum(ours.hits[i] != theirs.hits[i] for i in both), max(apart, default=None))


def tally(outputs: LambadaOutputs, name: str) -> Tally | None:
    answers = outputs.passes.get(name)
    if answers is None:
        return None
    return Tally(len(outputs.targets), answers.hits.count(UNANSWERED), answers.repeated, answers.not_finite)
