"""Check, merge and score answers on ReCoRD: accuracy, exact match and F1.

For every question the record has the right candidates, and each candidate's exact match and F1: the
best over the question's answers, of texts normalized as in ReCoRD's own evaluation. A pass has
evaluations, each with the chosen candidate of every question, -1 if the scores were not finite;
that is neither a hit nor a match and has F1 0.
"""

import re
import string
from collections import Counter
from math import fsum
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from steelyard.schema import Frozen
from steelyard.tasks.held_out import first_stop
from steelyard.tasks.kind import TRAIN
from steelyard.tasks.task import Breakdown, Differences, Stopped, Tally
from steelyard.words import pair

if TYPE_CHECKING:
    from steelyard.data.cloze import Cloze

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_EVALUATION = {"step", "samples", "choices"}


Match = Annotated[int, Field(ge=0, le=1)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]


class RecordEvaluation(Frozen):
    """One evaluation, after `step` steps and `samples` trained samples: the chosen candidate of
    every question, as (question, candidate) pairs.
    """

    step: int
    samples: int
    choices: list[tuple[int, int]]
    repeated: int


class Pass(Frozen):
    """The outputs of a pass that does not train: its evaluations."""

    evaluations: list[RecordEvaluation]


class RecordSteps(Frozen):
    """The outputs of the training pass: its evaluations, and why it ended early, or None."""

    evaluations: list[RecordEvaluation]
    stopped: Stopped | None


class RecordOutputs(Frozen):
    """What a record keeps of ReCoRD: per question the right candidates (`right`), and each
    candidate's exact match (`em`) and F1; and the outputs of each pass.
    """

    items: int
    right: list[list[int]]
    em: list[list[Match]]
    f1: list[list[UnitInterval]]
    passes: dict[str, RecordSteps | Pass]

    @model_validator(mode="after")
    def _fit(self) -> Self:
        """Raise ValueError if the lists do not fit the number of questions, or an evaluation names
        a question or candidate that does not exist.
        """
        if {len(self.right), len(self.em), len(self.f1)} != {self.items}:
            raise ValueError(f"candidates are not those of {self.items} questions")
        if any(len(em) != len(f1) for em, f1 in zip(self.em, self.f1, strict=True)):
            raise ValueError("a question has other candidates for exact match than for F1")
        for one in (one for found in self.passes.values() for one in found.evaluations):
            if not all(
                0 <= item < self.items and -1 <= choice < len(self.em[item])
                for item, choice in one.choices
            ):
                raise ValueError("an evaluation names a question or a candidate that is not there")
        return self


def outputs(held: "list[Cloze]") -> RecordOutputs:
    """Return outputs without any pass; exact match and F1 of every candidate are computed here."""
    return RecordOutputs(
        items=len(held),
        right=[list(one.right) for one in held],
        em=[
            [max(exact(text, answer) for answer in one.answers) for text in one.texts]
            for one in held
        ],
        f1=[
            [round(max(f1(text, answer) for answer in one.answers), 6) for text in one.texts]
            for one in held
        ],
        passes={},
    )


def exact(text: str, answer: str) -> int:
    """Return 1 if the two texts are equal after normalization, else 0."""
    return int(_words(text) == _words(answer))


def f1(text: str, answer: str) -> float:
    """Return the F1 (0 to 1) of the two texts' normalized words, counted with repetition; 0 if they
    share none.
    """
    said, wanted = _words(text), _words(answer)
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def _words(text: str) -> list[str]:
    """Return the words of a text in lower case, without ASCII punctuation (words around it are
    joined) and without articles.
    """
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def check(table: Any, outputs: RecordOutputs) -> dict[str, Any]:
    """Return an engine's outputs of a pass if a record can be made of them: `evaluations`, and
    `stopped` if the pass trains. A pass without steps has exactly one evaluation.

    Raises TypeError or ValueError otherwise.
    """
    if not isinstance(table, dict) or set(table) not in (
        {"stopped", "evaluations"},
        {"evaluations"},
    ):
        raise TypeError(
            "the engine's outputs must be `stopped` and `evaluations` of the steps, or"
            " `evaluations` alone"
        )
    evaluations = table["evaluations"]
    if not isinstance(evaluations, list):
        raise TypeError("the engine's outputs must be a list: evaluations")
    if "stopped" not in table and len(evaluations) != 1:
        raise ValueError(
            f"the engine's outputs have {len(evaluations)} evaluations; a pass without steps"
            " has one"
        )
    out: dict[str, Any] = {"evaluations": [_evaluation(one, outputs) for one in evaluations]}
    steps = [one["step"] for one in out["evaluations"]]
    if steps != sorted(set(steps)):
        raise ValueError(
            f"the engine's outputs have evaluations at the steps {steps}; each is later than the"
            " one before"
        )
    if "stopped" in table:
        stopped = table["stopped"]
        if stopped is not None and (
            not isinstance(stopped, dict) or type(stopped.get("step")) is not int
        ):
            raise TypeError("the engine's outputs must be None or a table with a step: stopped")
        out["stopped"] = stopped
    return out


def _evaluation(found: Any, outputs: RecordOutputs) -> dict[str, Any]:
    """Return one evaluation of an engine with its `step`, `samples` and `choices`, if they are
    valid; raise TypeError or ValueError otherwise.
    """
    if not isinstance(found, dict) or set(found) != _EVALUATION:
        raise TypeError(
            f"the engine's outputs must be tables as evaluations: {', '.join(sorted(_EVALUATION))}"
        )
    for name in ("step", "samples"):
        if type(found[name]) is not int or found[name] < 0:
            raise TypeError(
                f"the engine's outputs must be an integer from 0 on: {name} of an evaluation"
            )
    choices = found["choices"]
    if not isinstance(choices, list) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(type(i) is int for i in pair)
        for pair in choices
    ):
        raise TypeError(
            "the engine's outputs must be a list of pairs of integers: choices of an evaluation"
        )
    items = outputs.items
    if not all(
        0 <= item < items and -1 <= choice < len(outputs.em[item]) for item, choice in choices
    ):
        raise ValueError(
            f"the engine's outputs name a question beyond 0 to {items - 1}, or a candidate that it"
            " does not have"
        )
    return {
        "step": found["step"],
        "samples": found["samples"],
        "choices": [list(pair) for pair in choices],
    }


def merge(outputs: RecordOutputs, name: str, tables: list[dict[str, Any]]) -> RecordOutputs:
    """Return the outputs with one more pass, whose evaluations have the choices of all ranks in
    question order. A question answered twice counts as repeated, and the later answer stays.
    """
    evaluations: dict[int, dict[str, Any]] = {}
    for table in tables:
        for one in table["evaluations"]:
            mine = evaluations.setdefault(
                one["step"], {"samples": one["samples"], "choices": {}, "repeated": 0}
            )
            for item, choice in one["choices"]:
                mine["repeated"] += item in mine["choices"]
                mine["choices"][item] = choice
    found = [
        RecordEvaluation(
            step=step,
            samples=one["samples"],
            choices=sorted(one["choices"].items()),
            repeated=one["repeated"],
        )
        for step, one in sorted(evaluations.items())
    ]
    merged = (
        RecordSteps(evaluations=found, stopped=first_stop(tables))
        if name in TRAIN.stepped
        else Pass(evaluations=found)
    )
    return outputs.model_copy(update={"passes": {**outputs.passes, name: merged}})


def score(outputs: RecordOutputs, name: str) -> dict[str, float]:
    """Score the last evaluation of a pass over its answered questions: accuracy `acc` with standard
    error `se`, exact match `em`, and `f1`. Empty if there is none.
    """
    last = _last(outputs, name)
    if last is None or not last.choices:
        return {}
    acc = _accuracy(outputs, last)
    chosen = [(item, choice) for item, choice in last.choices if choice >= 0]
    return {
        "acc": acc,
        "em": sum(outputs.em[item][choice] for item, choice in chosen) / len(last.choices),
        "f1": fsum(outputs.f1[item][choice] for item, choice in chosen) / len(last.choices),
        "se": (acc * (1 - acc) / len(last.choices)) ** 0.5,
    }


def history(outputs: RecordOutputs, name: str) -> list[tuple[int, int, float | None]]:
    """Return (step, trained samples, accuracy) of each evaluation of a pass; accuracy is None if no
    question was answered. Empty if there is no such pass.
    """
    found = outputs.passes.get(name)
    every = found.evaluations if found is not None else []
    return [
        (one.step, one.samples, _accuracy(outputs, one) if one.choices else None) for one in every
    ]


def _accuracy(outputs: RecordOutputs, evaluation: RecordEvaluation) -> float:
    """Return the share of an evaluation's answered questions whose choice is right. Raises
    ZeroDivisionError if there are none.
    """
    return sum(choice in outputs.right[item] for item, choice in evaluation.choices) / len(
        evaluation.choices
    )


def _last(outputs: RecordOutputs, name: str) -> RecordEvaluation | None:
    """Return the last evaluation of a pass; None if there is none."""
    found = outputs.passes.get(name)
    return found.evaluations[-1] if found is not None and found.evaluations else None


def differences(one: RecordOutputs, other: RecordOutputs, name: str) -> Differences | None:
    """Compare the candidates that two runs chose in the last evaluation of a pass; None if there is
    none in either, or they are after different steps.
    """
    ours, theirs = _last(one, name), _last(other, name)
    if ours is None or theirs is None or ours.step != theirs.step:
        return None
    chosen = dict(theirs.choices)
    both = [(choice, chosen[item]) for item, choice in ours.choices if item in chosen]
    return Differences(len(both), sum(a != b for a, b in both))


def tally(outputs: RecordOutputs, name: str) -> Tally | None:
    """Return how the last evaluation of a pass covers the questions; None if the pass has no
    evaluation (as training with random weights has none).
    """
    last = _last(outputs, name)
    if last is None:
        return None
    bad = sum(choice < 0 for _, choice in last.choices)
    return Tally(outputs.items, outputs.items - len(last.choices), last.repeated, bad)


def stopped(outputs: RecordOutputs) -> Stopped | None:
    """Return why the pass `train` ended early; None if it did not, or is missing."""
    found = outputs.passes.get("train")
    return found.stopped if isinstance(found, RecordSteps) else None


def breakdowns(outputs: RecordOutputs) -> list[Breakdown]:
    """Return one table for the page, the accuracy of every evaluation in the order of the run; none
    if there is no evaluation.
    """
    rows = tuple(one for name in ("before", "train", "after") for one in history(outputs, name))
    columns = (pair("breakdown.after_step"), pair("breakdown.samples"), ("acc", "acc"))
    return [Breakdown(pair("breakdown.evaluations"), columns, rows)] if rows else []
