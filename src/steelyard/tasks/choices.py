"""Multiple-choice tasks with four answers: what a record keeps of the answers, how they are
checked, merged and scored, and the `Task` row of such a task.

`tasks/questions.py` makes the prompts. MMLU uses both, and other packages can.
"""

from collections import Counter
from statistics import fmean
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from steelyard.schema import Frozen, GrownTable
from steelyard.tasks.task import (
    ACCURACY,
    Breakdown,
    Differences,
    Many,
    Score,
    Selected,
    Tally,
    Task,
)
from steelyard.words import meaning, pair

LETTERS = "ABCD"
ANSWERS = ("items", "best", "choice", "finite")  # an engine's answers: four lists of one length
UNANSWERED = "?"
OTHER = "*"  # a token that is not one of the letters
MOST_TOKENS = 1 << 31  # limit of a vocabulary


class ChoiceAnswers(GrownTable):
    """The answers of one pass, one character per question, `?` where it was not answered.

    `choices` is the likeliest of the four letters. `hits` says whether the likeliest token of the
    whole vocabulary is the right answer (1 or 0); the headline accuracy comes from it. `argmax` is
    that likeliest token: a letter, or `*` for any other token, whose id is then the next of
    `others` (most models answer with a letter, so this takes one byte per question).
    """

    LATER: ClassVar[tuple[str, ...]] = ("argmax", "others")

    choices: str = Field(pattern=r"^[ABCD?]*$")
    hits: str = Field(pattern=r"^[01?]*$")
    not_finite: int
    repeated: int
    argmax: str | None = Field(None, pattern=r"^[ABCD*?]*$")
    others: list[Many] | None = None


class ChoiceOutputs(GrownTable):
    """What a record keeps of a multiple-choice task: per question the right letter (`gold`), its
    subject (`subject_of`, an index into `subjects`) and its position in the whole set (`index`);
    the four letters' token ids; and the answers of each pass. Answers of version 1 have no
    `argmax`.
    """

    LATER: ClassVar[tuple[str, ...]] = ("version",)

    version: Literal[2] | None = Field(None, description="left out where it is 1")
    gold: str = Field(pattern=r"^[ABCD]*$")
    subjects: list[str]
    subject_of: list[int]
    index: list[int]
    letters: list[int] = Field(min_length=4, max_length=4)
    passes: dict[str, ChoiceAnswers]

    @model_validator(mode="after")
    def _fit(self) -> Self:
        """Raise ValueError if the lengths of answers and subjects do not fit the number of
        questions, or a subject does not exist.
        """
        count = len(self.gold)
        lengths = {
            len(column) for one in self.passes.values() for column in (one.choices, one.hits)
        }
        if len(self.subject_of) != count or lengths - {count}:
            raise ValueError(f"answers and subjects are not those of {count} questions")
        if any(not 0 <= subject < len(self.subjects) for subject in self.subject_of):
            raise ValueError("a question is of a subject that is not there")
        for one in self.passes.values():
            self._fit_argmax(one)
        return self

    def _fit_argmax(self, one: ChoiceAnswers) -> None:
        """Raise ValueError if a pass's `argmax`, `others` and `hits` contradict each other. A pass
        without `argmax` and `others` is fine.
        """
        if one.argmax is None and one.others is None:
            return
        if one.argmax is None or one.others is None or len(one.argmax) != len(self.gold):
            raise ValueError(f"argmax and others are not those of {len(self.gold)} questions")
        if one.argmax.count(OTHER) != len(one.others) or set(one.others) & set(self.letters):
            raise ValueError(
                "others are not the tokens of those questions whose argmax is no letter"
            )
        if any(
            hit != _hit(best, gold)
            for hit, best, gold in zip(one.hits, one.argmax, self.gold, strict=True)
        ):
            raise ValueError("hits are not those of argmax")


def _hit(best: str, gold: str) -> str:
    """Return "1" or "0", whether the likeliest token is the right letter, or "?" if the question
    was not answered.
    """
    return UNANSWERED if best == UNANSWERED else str(int(best == gold))


def argmax(outputs: ChoiceOutputs, name: str) -> list[int | None] | None:
    """Return the likeliest token id of each question, None where it was not answered; or None if
    the pass did not keep them. Raises KeyError if there is no such pass.
    """
    found = outputs.passes[name]
    if found.argmax is None or found.others is None:
        return None
    others = iter(found.others)
    known: dict[str, int | None] = {
        UNANSWERED: None,
        **dict(zip(LETTERS, outputs.letters, strict=True)),
    }
    return [next(others) if one == OTHER else known[one] for one in found.argmax]


def outputs(
    gold: list[int],
    subject_of: list[int],
    subjects: list[str],
    index: list[int],
    letters: list[int],
) -> ChoiceOutputs:
    """Return outputs without any pass. `gold` holds the index (0 to 3) of the right answer of each
    question.
    """
    right = "".join(LETTERS[i] for i in gold)
    return ChoiceOutputs(
        version=2,
        gold=right,
        subjects=subjects,
        subject_of=subject_of,
        index=index,
        letters=letters,
        passes={},
    )


def check(table: Any, outputs: ChoiceOutputs) -> dict[str, Any]:
    """Return an engine's answers of a pass if a record can be made of them: lists `items`, `best`
    (token id), `choice` (0 to 3) and `finite`, of one length.

    Raises TypeError or ValueError otherwise. This runs in the worker, where the engine can still be
    blamed.
    """
    questions = len(outputs.gold)
    columns: list[Any] = [table.get(name) for name in ANSWERS] if isinstance(table, dict) else []
    if not columns or not all(
        isinstance(c, list) and all(isinstance(value, int) for value in c) for c in columns
    ):
        raise TypeError(f"the engine's outputs must be lists of integers: {', '.join(ANSWERS)}")
    if len({len(column) for column in columns}) != 1:
        raise ValueError("the engine's outputs must be lists of one length")
    items, best, choice, _ = columns
    if not all(0 <= item < questions for item in items) or not all(0 <= one < 4 for one in choice):
        raise ValueError(
            f"the engine's outputs name a question beyond 0 to {questions - 1}, or a choice beyond"
            " 0 to 3"
        )
    if not all(0 <= token < MOST_TOKENS for token in best):
        raise ValueError(f"the engine's outputs have a token in best beyond 0 to {MOST_TOKENS - 1}")
    return dict(zip(ANSWERS, columns, strict=True))


def merge(outputs: ChoiceOutputs, name: str, tables: list[dict[str, Any]]) -> ChoiceOutputs:
    """Return the outputs with one more pass, from the checked answers of all ranks. A question
    answered twice counts as repeated, and the later answer stays.
    """
    count = len(outputs.gold)
    choices, argmax, tokens = [UNANSWERED] * count, [UNANSWERED] * count, [0] * count
    letter_of = dict(zip(outputs.letters, LETTERS, strict=True))
    repeated = 0
    bad = 0
    for table in tables:
        for item, best, choice, finite in zip(*(table[column] for column in ANSWERS), strict=True):
            repeated += choices[item] != UNANSWERED
            bad += not finite
            choices[item] = LETTERS[choice]
            argmax[item], tokens[item] = letter_of.get(best, OTHER), best
    answers = ChoiceAnswers(
        choices="".join(choices),
        hits="".join(_hit(best, gold) for best, gold in zip(argmax, outputs.gold, strict=True)),
        not_finite=bad,
        repeated=repeated,
        argmax="".join(argmax),
        others=[token for token, one in zip(tokens, argmax, strict=True) if one == OTHER],
    )
    return outputs.model_copy(update={"passes": {**outputs.passes, name: answers}})


def score(outputs: ChoiceOutputs, name: str) -> dict[str, float]:
    """Score a pass over its answered questions: `acc` (likeliest token of the vocabulary is right)
    with standard error `se`, `macro` (mean accuracy over subjects) and `choice` (likeliest of the
    four letters is right). Empty if the pass is missing or nothing was answered.
    """
    answers = outputs.passes.get(name)
    asked = [i for i, hit in enumerate(answers.hits) if hit != UNANSWERED] if answers else []
    if answers is None or not asked:
        return {}
    acc = sum(answers.hits[i] == "1" for i in asked) / len(asked)
    by_subject = subject_accuracy(outputs, name)
    return {
        "acc": acc,
        "se": (acc * (1 - acc) / len(asked)) ** 0.5,
        "macro": fmean(by_subject.values()),
        "choice": sum(answers.choices[i] == outputs.gold[i] for i in asked) / len(asked),
    }


def subject_accuracy(outputs: ChoiceOutputs, name: str) -> dict[str, float]:
    """Return the accuracy (0 to 1) of a pass in each subject that has answered questions."""
    counts: dict[str, list[int]] = {}
    for subject, hit in zip(outputs.subject_of, outputs.passes[name].hits, strict=True):
        if hit != UNANSWERED:
            counts.setdefault(outputs.subjects[subject], []).append(int(hit))
    return {subject: sum(hits) / len(hits) for subject, hits in counts.items()}


def agreement(outputs: ChoiceOutputs, one: str, other: str) -> float | None:
    """Return the share of questions, answered in both passes, for which both chose the same letter;
    None if a pass is missing or no question was answered in both.
    """
    if one not in outputs.passes or other not in outputs.passes:
        return None
    both = zip(outputs.passes[one].choices, outputs.passes[other].choices, strict=True)
    pairs = [(a, b) for a, b in both if UNANSWERED not in (a, b)]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def differences(one: ChoiceOutputs, other: ChoiceOutputs, name: str) -> Differences | None:
    """Compare two runs' letters and likeliest tokens in a pass; None if it is missing in either, or
    the runs asked different questions.
    """
    if name not in one.passes or name not in other.passes or one.index != other.index:
        return None
    both = zip(one.passes[name].choices, other.passes[name].choices, strict=True)
    pairs = [(a, b) for a, b in both if UNANSWERED not in (a, b)]
    ours, theirs = argmax(one, name), argmax(other, name)
    tokens = None if ours is None or theirs is None else zip(ours, theirs, strict=True)
    apart = None if tokens is None else sum(a != b for a, b in tokens if None not in (a, b))
    return Differences(len(pairs), sum(a != b for a, b in pairs), tokens=apart)


def off_scope(outputs: ChoiceOutputs, selected: Selected) -> str | None:
    """Return why outputs do not answer what the user selected (wrong subjects or rows), or None if
    they do. With a sample, selected subjects may be missing.
    """
    asked = {outputs.subjects[subject] for subject in outputs.subject_of}
    wanted = set(selected.subjects or asked)
    if asked - wanted or (selected.sample is None and wanted - asked):
        return f"subjects {', '.join(sorted(asked ^ wanted)[:5])}"
    found = dict(Counter(outputs.subjects[subject] for subject in outputs.subject_of))
    # checked first: it bounds the size of the lists that are compared next
    right = selected.row_count in (None, len(outputs.gold))
    if not (
        right
        and selected.places in (None, outputs.index)
        and selected.group_counts in (None, found)
    ):
        return f"{len(outputs.gold)} questions, which are not the rows named"
    return None


def tally(outputs: ChoiceOutputs, name: str) -> Tally | None:
    """Return how a pass's answers cover the questions; None if there is no such pass."""
    answers = outputs.passes.get(name)
    if answers is None:
        return None
    return Tally(
        len(answers.choices),
        answers.choices.count(UNANSWERED),
        answers.repeated,
        answers.not_finite,
    )


def breakdowns(outputs: ChoiceOutputs) -> list[Breakdown]:
    """Return one table for the page, accuracy by subject in passes val and infer; none if nothing
    was answered.
    """
    passes = [name for name in ("val", "infer") if name in outputs.passes]
    found = {name: subject_accuracy(outputs, name) for name in passes}
    subjects = [
        subject for subject in outputs.subjects if any(subject in one for one in found.values())
    ]
    if not subjects:
        return []
    rows = tuple((subject, *(found[name].get(subject) for name in passes)) for subject in subjects)
    columns = (pair("breakdown.subject"), *((name, name) for name in passes))
    return [Breakdown(pair("breakdown.by_subject"), columns, rows)]


SCORES = (
    *ACCURACY,
    Score("acc_choice", "choice", *meaning("mmlu.acc_choice")),
    Score("acc_choice_val", "choice", *meaning("mmlu.acc_choice_val"), of="val"),
    Score("acc_macro", "macro", *meaning("mmlu.acc_macro")),
)


def choice_task(name: str, data: type[Frozen], reader: str, data_check: str = "") -> Task:
    """Return the `Task` row of a multiple-choice task, which only adds how its data are read:
    `data` is the model of `question.data`, `reader` and `data_check` are "module:function". Its
    reader calls `questions.prepare_questions`.
    """
    return Task(
        name=name,
        kind="score",
        work="score_choices",
        noun="question",
        data=data,
        outputs=ChoiceOutputs,
        reader=reader,
        data_check=data_check,
        check=check,
        merge=merge,
        score=score,
        tally=tally,
        scores=SCORES,
        quality="acc",
        passes=("val", "infer"),
        agreement=agreement,
        differences=differences,
        breakdowns=breakdowns,
        selects=("subjects", "rows"),
        off_scope=off_scope,
    )
