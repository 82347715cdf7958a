"""Accuracy on MMLU from the answers a record keeps.

`hits` says per question whether the likeliest token of the whole vocabulary was the right answer (the headline), `choices`
which of the four letters was likeliest, `gold` which is right; a question that was not answered is "?".
"""

from math import fsum
from typing import Any

LETTERS = "ABCD"
ANSWERS = ("items", "best", "choice", "finite")  # an engine's answers: four lists of one length


def outputs(
    gold: list[int], subject_of: list[int], subjects: list[str], index: list[int], letters: list[int]
) -> dict[str, Any]:
    """The part that does not depend on a pass."""
    return {
        "gold": "".join(LETTERS[i] for i in gold),
        "subjects": subjects,
        "subject_of": subject_of,
        "index": index,
        "letters": letters,
        "passes": {},
    }


def check(table: Any, common: dict[str, Any]) -> dict[str, Any]:
    """An engine's answers, if a record can be made of them: that happens where the engine is no longer there to blame."""
    questions = len(common["gold"])
    columns: list[Any] = [table.get(name) for name in ANSWERS] if isinstance(table, dict) else []
    if not columns or not all(isinstance(c, list) and all(isinstance(value, int) for value in c) for c in columns):
        raise TypeError(f"the engine's outputs must be lists of integers: {', '.join(ANSWERS)}")
    if len({len(column) for column in columns}) != 1:
        raise ValueError("the engine's outputs must be lists of one length")
    items, _, choice, _ = columns
    if not all(0 <= item < questions for item in items) or not all(0 <= one < 4 for one in choice):
        raise ValueError(f"the engine's outputs name a question beyond 0 to {questions - 1}, or a choice beyond 0 to 3")
    return dict(zip(ANSWERS, columns, strict=True))


def merge(common: dict[str, Any], name: str, tables: list[dict[str, Any]]) -> dict[str, Any]:
    """A pass's answers of all ranks, in the order of the questions."""
    count = len(common["gold"])
    choices, hits = ["?"] * count, ["?"] * count
    repeated = 0
    bad = 0
    for table in tables:
        for item, best, choice, finite in zip(table["items"], table["best"], table["choice"], table["finite"], strict=True):
            repeated += choices[item] != "?"
            bad += not finite
            choices[item] = LETTERS[choice]
            hits[item] = str(int(best == common["letters"][LETTERS.index(common["gold"][item])]))
    answers = {"choices": "".join(choices), "hits": "".join(hits), "not_finite": bad, "repeated": repeated}
    return {**common, "passes": {**common["passes"], name: answers}}


def score(found: dict[str, Any], name: str) -> dict[str, float]:
    """Over the answered questions: acc and its standard error, the mean over subjects, and the four-letter accuracy."""
    answers = found.get("passes", {}).get(name)
    if answers is None:
        return {}
    asked = [i for i, hit in enumerate(answers["hits"]) if hit != "?"]
    if not asked:
        return {}
    right = [i for i in asked if answers["hits"][i] == "1"]
    acc = len(right) / len(asked)
    by_subject = subject_accuracy(found, name)
    return {
        "acc": acc,
        "se": (acc * (1 - acc) / len(asked)) ** 0.5,
        "macro": fsum(by_subject.values()) / len(by_subject),
        "choice": sum(answers["choices"][i] == found["gold"][i] for i in asked) / len(asked),
    }


def subject_accuracy(found: dict[str, Any], name: str) -> dict[str, float]:
    """Accuracy by subject, of the subjects that were asked."""
    counts: dict[str, list[int]] = {}
    for subject, hit in zip(found["subject_of"], found["passes"][name]["hits"], strict=True):
        if hit != "?":
            counts.setdefault(found["subjects"][subject], []).append(int(hit))
    return {subject: sum(hits) / len(hits) for subject, hits in counts.items()}


def agreement(found: dict[str, Any], one: str, other: str) -> float | None:
    """Share of the questions, answered in both passes, that got the same letter."""
    passes = found.get("passes", {})
    if one not in passes or other not in passes:
        return None
    pairs = [(a, b) for a, b in zip(passes[one]["choices"], passes[other]["choices"], strict=True) if "?" not in (a, b)]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def tally(found: dict[str, Any], name: str) -> tuple[int, int, int, int]:
    """Questions in scope, those without an answer, answered more than once, with logits that are not finite."""
    answers = found["passes"][name]
    return len(answers["choices"]), answers["choices"].count("?"), answers["repeated"], answers["not_finite"]
