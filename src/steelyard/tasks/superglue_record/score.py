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

from steelyard.schema import FrozenModel
from steelyard.tasks.held_out_loss import find_first_stop
from steelyard.tasks.kind import TRAIN
from steelyard.tasks.task import Breakdown, Differences, EarlyStop, Tally
from steelyard.words import get_text_pair

if TYPE_CHECKING:
    from steelyard.data.cloze_samples import ClozeSample

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_EVALUATION_KEYS = {"step", "samples", "choices"}


MatchFlag = Annotated[int, Field(ge=0, le=1)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]


class ClozeEvaluation(FrozenModel):
    """One evaluation, after `step` steps and `samples` trained samples: `choices` has the chosen
    candidate of every answered question, as (question, candidate) pairs of indices in question
    order, candidate -1 if the scores were not finite; `repeated` counts answers that came again.
    """

    step: int
    samples: int
    choices: list[tuple[int, int]]
    repeated: int


class ClozePassOutputs(FrozenModel):
    """The outputs of a pass of ReCoRD that does not train (`before`, `after`): its `evaluations`, a
    list of one `ClozeEvaluation`.
    """

    evaluations: list[ClozeEvaluation]


class ClozeTrainOutputs(FrozenModel):
    """The outputs of ReCoRD's training pass: its `evaluations` in the order of steps (a list of
    `ClozeEvaluation`, perhaps empty), and `stopped`, why it ended early, or None.
    """

    evaluations: list[ClozeEvaluation]
    stopped: EarlyStop | None


class ClozeOutputs(FrozenModel):
    """What a record keeps of ReCoRD: `items`, the number of evaluated questions; per question the
    indices of the right candidates (`right`), and each candidate's exact match (`em`, 0 or 1) and
    F1 (`f1`, 0 to 1); and in `passes` the outputs of each pass by name. Validation refuses lists of
    other lengths, and choices that do not exist.
    """

    items: int
    right: list[list[int]]
    em: list[list[MatchFlag]]
    f1: list[list[UnitInterval]]
    passes: dict[str, ClozeTrainOutputs | ClozePassOutputs]

    @model_validator(mode="after")
    def _check_candidates(self) -> Self:
        """Validate ReCoRD's outputs after parsing, and return them. Raises ValueError if a list's
        length is not the number of questions, a question has unequally many `em` and `f1`, or an
        evaluation names a question or candidate that does not exist (-1 is allowed).
        """
        if {len(self.right), len(self.em), len(self.f1)} != {self.items}:
            raise ValueError(f"candidates are not those of {self.items} questions")
        if any(len(em) != len(f1) for em, f1 in zip(self.em, self.f1, strict=True)):
            raise ValueError("a question has other candidates for exact match than for F1")
        for evaluation in (
            evaluation
            for pass_outputs in self.passes.values()
            for evaluation in pass_outputs.evaluations
        ):
            if not all(
                0 <= item < self.items and -1 <= choice < len(self.em[item])
                for item, choice in evaluation.choices
            ):
                raise ValueError(
                    "an evaluation names a question or a candidate that does not exist"
                )
        return self


def make_cloze_outputs(samples: "list[ClozeSample]") -> ClozeOutputs:
    """Return outputs without any pass for the evaluation samples. Exact match and F1 (rounded to 6
    digits) of every candidate are computed here, each the best over the sample's answers.
    """
    return ClozeOutputs(
        items=len(samples),
        right=[list(sample.right) for sample in samples],
        em=[
            [max(match_exactly(text, answer) for answer in sample.answers) for text in sample.texts]
            for sample in samples
        ],
        f1=[
            [
                round(max(compute_f1(text, answer) for answer in sample.answers), 6)
                for text in sample.texts
            ]
            for sample in samples
        ],
        passes={},
    )


def match_exactly(text: str, answer: str) -> int:
    """Return 1 if the two texts have the same words after normalization (`_normalize_words`), else
    0.
    """
    return int(_normalize_words(text) == _normalize_words(answer))


def compute_f1(text: str, answer: str) -> float:
    """Return the F1 (0 to 1) of the two texts' normalized words, counted with repetition; 0 if they
    share none.
    """
    text_words, answer_words = _normalize_words(text), _normalize_words(answer)
    common = sum((Counter(text_words) & Counter(answer_words)).values())
    return 2 * common / (len(text_words) + len(answer_words)) if common else 0.0


def _normalize_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without ASCII punctuation (words around it are
    joined) and without articles.
    """
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def check_cloze_outputs(pass_outputs: Any, outputs: ClozeOutputs) -> dict[str, Any]:
    """Return an engine's outputs of a pass as a new dict if a record can be made of them: exactly
    `evaluations` (a list), and `stopped` (None or a dict with an integer `step`) if the pass
    trains.

    Raises TypeError for other keys or types; ValueError if a pass without `stopped` has not exactly
    one evaluation, the steps of evaluations do not increase, or an evaluation names what does not
    exist.
    """
    if not isinstance(pass_outputs, dict) or set(pass_outputs) not in (
        {"stopped", "evaluations"},
        {"evaluations"},
    ):
        raise TypeError(
            "the engine's outputs must be `stopped` and `evaluations` of the steps, or"
            " `evaluations` alone"
        )
    evaluations = pass_outputs["evaluations"]
    if not isinstance(evaluations, list):
        raise TypeError("the engine's outputs must be a list: evaluations")
    if "stopped" not in pass_outputs and len(evaluations) != 1:
        raise ValueError(
            f"the engine's outputs have {len(evaluations)} evaluations; a pass without steps"
            " has one"
        )
    checked: dict[str, Any] = {
        "evaluations": [_check_evaluation(evaluation, outputs) for evaluation in evaluations]
    }
    steps = [evaluation["step"] for evaluation in checked["evaluations"]]
    if steps != sorted(set(steps)):
        raise ValueError(
            f"the engine's outputs have evaluations at the steps {steps}; each is later than the"
            " one before"
        )
    if "stopped" in pass_outputs:
        stopped = pass_outputs["stopped"]
        if stopped is not None and (
            not isinstance(stopped, dict) or type(stopped.get("step")) is not int
        ):
            raise TypeError("the engine's outputs must be None or a table with a step: stopped")
        checked["stopped"] = stopped
    return checked


def _check_evaluation(evaluation: Any, outputs: ClozeOutputs) -> dict[str, Any]:
    """Return a copy of one evaluation of an engine: `step` and `samples` (integers from 0), and
    `choices`, a list of [question, candidate], candidate -1 if not finite. Raises TypeError for
    other keys or types, or a negative number; ValueError if a question or candidate does not exist.
    """
    if not isinstance(evaluation, dict) or set(evaluation) != _EVALUATION_KEYS:
        raise TypeError(
            "the engine's outputs must be tables as evaluations:"
            f" {', '.join(sorted(_EVALUATION_KEYS))}"
        )
    for name in ("step", "samples"):
        if type(evaluation[name]) is not int or evaluation[name] < 0:
            raise TypeError(
                f"the engine's outputs must be an integer from 0 on: {name} of an evaluation"
            )
    choices = evaluation["choices"]
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
            f"the engine's outputs name a question outside 0 to {items - 1}, or a candidate that it"
            " does not have"
        )
    return {
        "step": evaluation["step"],
        "samples": evaluation["samples"],
        "choices": [list(pair) for pair in choices],
    }


def merge_cloze_outputs(
    outputs: ClozeOutputs, pass_name: str, rank_outputs: list[dict[str, Any]]
) -> ClozeOutputs:
    """Return a copy of the outputs with one more pass, from the checked outputs of all ranks:
    evaluations of the same step become one, with all choices in question order and `samples` of the
    first rank. A question answered twice counts as repeated, and the later answer stays. Pass
    `train` also gets the earliest stop.
    """
    evaluations: dict[int, dict[str, Any]] = {}
    for rank in rank_outputs:
        for evaluation in rank["evaluations"]:
            combined = evaluations.setdefault(
                evaluation["step"], {"samples": evaluation["samples"], "choices": {}, "repeated": 0}
            )
            for item, choice in evaluation["choices"]:
                combined["repeated"] += item in combined["choices"]
                combined["choices"][item] = choice
    merged_evaluations = [
        ClozeEvaluation(
            step=step,
            samples=evaluation["samples"],
            choices=sorted(evaluation["choices"].items()),
            repeated=evaluation["repeated"],
        )
        for step, evaluation in sorted(evaluations.items())
    ]
    merged = (
        ClozeTrainOutputs(evaluations=merged_evaluations, stopped=find_first_stop(rank_outputs))
        if pass_name in TRAIN.stepped
        else ClozePassOutputs(evaluations=merged_evaluations)
    )
    return outputs.model_copy(update={"passes": {**outputs.passes, pass_name: merged}})


def score_cloze_outputs(outputs: ClozeOutputs, pass_name: str) -> dict[str, float]:
    """Return the scores (0 to 1) of the last evaluation of a pass over its answered questions:
    accuracy `acc` with standard error `se`, mean exact match `em` and mean `f1`. A choice of -1
    counts as wrong. Empty if there is no evaluation, or nothing was answered.
    """
    last = _find_last_evaluation(outputs, pass_name)
    if last is None or not last.choices:
        return {}
    acc = _compute_accuracy(outputs, last)
    chosen = [(item, choice) for item, choice in last.choices if choice >= 0]
    return {
        "acc": acc,
        "em": sum(outputs.em[item][choice] for item, choice in chosen) / len(last.choices),
        "f1": fsum(outputs.f1[item][choice] for item, choice in chosen) / len(last.choices),
        "se": (acc * (1 - acc) / len(last.choices)) ** 0.5,
    }


def list_accuracies(outputs: ClozeOutputs, pass_name: str) -> list[tuple[int, int, float | None]]:
    """Return (step, trained samples, accuracy from 0 to 1) of each evaluation of a pass, in order;
    accuracy is None if no question was answered. Empty if there is no such pass.
    """
    pass_outputs = outputs.passes.get(pass_name)
    evaluations = pass_outputs.evaluations if pass_outputs is not None else []
    return [
        (
            evaluation.step,
            evaluation.samples,
            _compute_accuracy(outputs, evaluation) if evaluation.choices else None,
        )
        for evaluation in evaluations
    ]


def _compute_accuracy(outputs: ClozeOutputs, evaluation: ClozeEvaluation) -> float:
    """Return the share (0 to 1) of an evaluation's answered questions whose chosen candidate is a
    right one; -1 is wrong. Raises ZeroDivisionError if there are none.
    """
    return sum(choice in outputs.right[item] for item, choice in evaluation.choices) / len(
        evaluation.choices
    )


def _find_last_evaluation(outputs: ClozeOutputs, pass_name: str) -> ClozeEvaluation | None:
    """Return the last evaluation of a pass; None if the pass is missing or has none."""
    pass_outputs = outputs.passes.get(pass_name)
    return (
        pass_outputs.evaluations[-1]
        if pass_outputs is not None and pass_outputs.evaluations
        else None
    )


def compare_cloze_outputs(
    first: ClozeOutputs, second: ClozeOutputs, pass_name: str
) -> Differences | None:
    """Compare two runs by the last evaluation of a pass: how many questions both answered, and for
    how many of these the chosen candidates differ. None if either has no evaluation, or they are
    after different steps.
    """
    first_evaluation, second_evaluation = (
        _find_last_evaluation(first, pass_name),
        _find_last_evaluation(second, pass_name),
    )
    if (
        first_evaluation is None
        or second_evaluation is None
        or first_evaluation.step != second_evaluation.step
    ):
        return None
    chosen = dict(second_evaluation.choices)
    choice_pairs = [
        (choice, chosen[item]) for item, choice in first_evaluation.choices if item in chosen
    ]
    return Differences(len(choice_pairs), sum(a != b for a, b in choice_pairs))


def tally_cloze_answers(outputs: ClozeOutputs, pass_name: str) -> Tally | None:
    """Count for the last evaluation of a pass the questions, those without an answer, answers that
    came again, and choices that are not finite (-1); return None if the pass has no evaluation (as
    training with random weights has none).
    """
    last = _find_last_evaluation(outputs, pass_name)
    if last is None:
        return None
    not_finite = sum(choice < 0 for _, choice in last.choices)
    return Tally(outputs.items, outputs.items - len(last.choices), last.repeated, not_finite)


def find_cloze_stop(outputs: ClozeOutputs) -> EarlyStop | None:
    """Return step and reason if the pass `train` ended early; None if it did not, or is missing."""
    pass_outputs = outputs.passes.get("train")
    return pass_outputs.stopped if isinstance(pass_outputs, ClozeTrainOutputs) else None


def make_cloze_breakdowns(outputs: ClozeOutputs) -> list[Breakdown]:
    """Return a list with one table for the report page: step, trained samples and accuracy (0 to 1,
    or None) of every evaluation, in the order before, train, after. Empty if there is no
    evaluation.
    """
    rows = tuple(
        row for name in ("before", "train", "after") for row in list_accuracies(outputs, name)
    )
    columns = (
        get_text_pair("breakdown.after_step"),
        get_text_pair("breakdown.samples"),
        ("acc", "acc"),
    )
    return [Breakdown(get_text_pair("breakdown.evaluations"), columns, rows)] if rows else []
