"""Loss and last-word accuracy on LAMBADA from the answers a record keeps.

Per passage: `nll` and `last_nll` are the negative log-likelihoods (nats) of all its targets and of its last word's tokens,
`hits` says whether greedy decoding gives the whole last word. A passage that was not answered is "?" in `hits`; one that was
and has no finite likelihood is None in `nll` or `last_nll`.
"""

from collections.abc import Callable
from math import exp, fsum, isfinite
from typing import Any

ANSWERS = ("items", "nll", "last_nll", "hit")  # an engine's answers: four lists of one length
LEAST = -1e-3  # a sum of log-probabilities can be above 0 by its rounding, and by no more


def outputs(targets: list[int], last: list[int], index: list[int]) -> dict[str, Any]:
    """The part that does not depend on a pass."""
    return {"targets": targets, "last": last, "index": index, "passes": {}}


def check(table: Any, common: dict[str, Any]) -> dict[str, Any]:
    """An engine's answers, if a record can be made of them; a value that is not finite becomes None, for JSON has neither."""
    passages = len(common["targets"])
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


def merge(common: dict[str, Any], name: str, tables: list[dict[str, Any]]) -> dict[str, Any]:
    """A pass's answers of all ranks, in the order of the passages."""
    count = len(common["targets"])
    hits = ["?"] * count
    nll: list[float | None] = [None] * count
    last_nll: list[float | None] = [None] * count
    repeated = 0
    bad = 0
    for table in tables:
        for item, whole, last, hit in zip(*(table[column] for column in ANSWERS), strict=True):
            repeated += hits[item] != "?"
            bad += whole is None or last is None
            nll[item], last_nll[item], hits[item] = whole, last, str(int(hit))
    answers = {"nll": nll, "last_nll": last_nll, "hits": "".join(hits), "not_finite": bad, "repeated": repeated}
    return {**common, "passes": {**common["passes"], name: answers}}


def score(found: dict[str, Any], name: str) -> dict[str, float]:
    """Over the answered passages: the losses and perplexities, if all are finite, and the accuracy of the last word.

    `loss` is the mean over passages of each one's loss per token, as published; `loss_token` weighs every token alike;
    `perplexity_last` is of whole last words, as LAMBADA's perplexity is commonly reported.
    """
    answers = found.get("passes", {}).get(name)
    asked = [i for i, hit in enumerate(answers["hits"]) if hit != "?"] if answers else []
    if not asked:
        return {}
    acc = sum(answers["hits"][i] == "1" for i in asked) / len(asked)
    nll, last = ([answers[column][i] for i in asked] for column in ("nll", "last_nll"))
    known = {} if None in nll or None in last else _losses(nll, last, [found["targets"][i] for i in asked])
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


def agreement(found: dict[str, Any], one: str, other: str) -> float | None:
    """Share of the passages, answered in both passes, whose last word was right in both or wrong in both."""
    passes = found.get("passes", {})
    if one not in passes or other not in passes:
        return None
    pairs = [(a, b) for a, b in zip(passes[one]["hits"], passes[other]["hits"], strict=True) if "?" not in (a, b)]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def breakdown(found: dict[str, Any], name: str) -> dict[str, float]:
    """Nothing: the passages have no parts."""
    return {}


def tally(found: dict[str, Any], name: str) -> tuple[int, int, int, int]:
    """Passages in scope, those without an answer, answers too many, and answers that are not finite."""
    count = len(found["targets"])
    answers = found.get("passes", {}).get(name)
    if answers is None:
        return count, count, 0, 0
    return count, answers["hits"].count("?"), answers["repeated"], answers["not_finite"]
