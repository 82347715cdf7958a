"""Accuracy, exact match and F1 on ReCoRD from the choices a record keeps.

Of every question the record has the candidates that are right, and each candidate's exact match and F1: the best over the
question's answers, of texts compared as ReCoRD's own evaluation compares them. A pass has evaluations, each with the candidate
that was chosen for every question, -1 where the scores were not finite; that is no hit and has neither match nor F1.
"""

import re
import string
from collections import Counter
from math import fsum
from typing import Any

from steelyard.data.cloze import Cloze

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_EVALUATION = {"step", "samples", "choices"}


def outputs(held: list[Cloze]) -> dict[str, Any]:
    """The part that does not depend on a pass."""
    return {
        "items": len(held),
        "right": [list(one.right) for one in held],
        "em": [[max(exact(text, answer) for answer in one.answers) for text in one.texts] for one in held],
        "f1": [[round(max(f1(text, answer) for answer in one.answers), 6) for text in one.texts] for one in held],
        "passes": {},
    }


def exact(text: str, answer: str) -> int:
    return int(_words(text) == _words(answer))


def f1(text: str, answer: str) -> float:
    """Of the words of both, each as often as it stands there."""
    said, wanted = _words(text), _words(answer)
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def _words(text: str) -> list[str]:
    """In lower case, without ASCII punctuation (what stood around it is joined), then without articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def check(table: Any, common: dict[str, Any]) -> dict[str, Any]:
    """An engine's outputs of a pass, if a record can be made of them."""
    if not isinstance(table, dict) or set(table) not in ({"stopped", "evaluations"}, {"evaluations"}):
        raise TypeError("the engine's outputs must be `stopped` and `evaluations` of the steps, or `evaluations` alone")
    evaluations = table["evaluations"]
    if not isinstance(evaluations, list):
        raise TypeError("the engine's outputs must be a list: evaluations")
    if "stopped" not in table and len(evaluations) != 1:
        raise ValueError(f"the engine's outputs have {len(evaluations)} evaluations; a pass without steps has one")
    out: dict[str, Any] = {"evaluations": [_evaluation(one, common) for one in evaluations]}
    steps = [one["step"] for one in out["evaluations"]]
    if steps != sorted(set(steps)):
        raise ValueError(f"the engine's outputs have evaluations at the steps {steps}; each is later than the one before")
    if "stopped" in table:
        stopped = table["stopped"]
        if stopped is not None and (not isinstance(stopped, dict) or type(stopped.get("step")) is not int):
            raise TypeError("the engine's outputs must be None or a table with a step: stopped")
        out["stopped"] = stopped
    return out


def _evaluation(found: Any, common: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(found, dict) or set(found) != _EVALUATION:
        raise TypeError(f"the engine's outputs must be tables as evaluations: {', '.join(sorted(_EVALUATION))}")
    for name in ("step", "samples"):
        if type(found[name]) is not int or found[name] < 0:
            raise TypeError(f"the engine's outputs must be an integer from 0 on: {name} of an evaluation")
    choices = found["choices"]
    if not isinstance(choices, list) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(type(i) is int for i in pair) for pair in choices
    ):
        raise TypeError("the engine's outputs must be a list of pairs of integers: choices of an evaluation")
    items = common["items"]
    if not all(0 <= item < items and -1 <= choice < len(common["em"][item]) for item, choice in choices):
        raise ValueError(f"the engine's outputs name a question beyond 0 to {items - 1}, or a candidate that it does not have")
    return {"step": found["step"], "samples": found["samples"], "choices": [list(pair) for pair in choices]}


def merge(common: dict[str, Any], name: str, tables: list[dict[str, Any]]) -> dict[str, Any]:
    """A pass's evaluations, each with the choices of all ranks in the order of the questions."""
    evaluations: dict[int, dict[str, Any]] = {}
    for table in tables:
        for one in table["evaluations"]:
            mine = evaluations.setdefault(one["step"], {"samples": one["samples"], "choices": {}, "repeated": 0})
            for item, choice in one["choices"]:
                mine["repeated"] += item in mine["choices"]
                mine["choices"][item] = choice
    merged: dict[str, Any] = {
        "evaluations": [
            {"step": step, **one, "choices": [list(pair) for pair in sorted(one["choices"].items())]}
            for step, one in sorted(evaluations.items())
        ]
    }
    if name == "train":
        stopped = [table["stopped"] for table in tables if table.get("stopped")]
        merged["stopped"] = min(stopped, key=lambda one: int(one["step"])) if stopped else None
    return {**common, "passes": {**common["passes"], name: merged}}


def score(found: dict[str, Any], name: str) -> dict[str, float]:
    """Of the pass's last evaluation, over the questions answered: accuracy and its standard error, exact match, F1."""
    choices = _last(found, name).get("choices")
    if not choices:
        return {}
    acc = _accuracy(found, choices)
    chosen = [(item, choice) for item, choice in choices if choice >= 0]
    return {
        "acc": acc,
        "em": sum(found["em"][item][choice] for item, choice in chosen) / len(choices),
        "f1": fsum(found["f1"][item][choice] for item, choice in chosen) / len(choices),
        "se": (acc * (1 - acc) / len(choices)) ** 0.5,
    }


def history(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Of each evaluation of a pass its step, the samples trained on until then, and the accuracy, None where none answered."""
    return [
        {
            "step": one["step"],
            "samples": one["samples"],
            "acc": _accuracy(found, one["choices"]) if one["choices"] else None,
        }
        for one in _evaluations(found, name)
    ]


def _accuracy(found: dict[str, Any], choices: list[list[int]]) -> float:
    return sum(choice in found["right"][item] for item, choice in choices) / len(choices)


def _evaluations(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = found.get("passes", {}).get(name, {}).get("evaluations", [])
    return out


def _last(found: dict[str, Any], name: str) -> dict[str, Any]:
    return (_evaluations(found, name) or [{}])[-1]


def agreement(found: dict[str, Any], one: str, other: str) -> float | None:
    return None


def breakdown(found: dict[str, Any], name: str) -> dict[str, float]:
    """Nothing: the questions have no parts."""
    return {}


def tally(found: dict[str, Any], name: str) -> tuple[int, int, int, int]:
    """Of the pass's last evaluation: questions in scope, those without an answer, answers too many, and answers from scores
    that are not finite. A pass without one, as steps with random weights are, has nothing in scope."""
    last = _last(found, name)
    if not last:
        return 0, 0, 0, 0
    choices = last["choices"]
    return found["items"], found["items"] - len(choices), last["repeated"], sum(choice < 0 for _, choice in choices)
