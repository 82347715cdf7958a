"""Multiple-choice tasks with four answers: what a record keeps of the answers, how they are
checked, merged and scored, and the `Task` row of such a task.

`tasks/questions.py` makes the prompts. MMLU uses both, and other packages can.
"""

from collections import Counter
from statistics import fmean
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from steelyard.schema import FrozenModel, GrownModel
from steelyard.tasks.task import (
    ACCURACY,
    Breakdown,
    Differences,
    OutputCount,
    Score,
    Selection,
    Tally,
    Task,
)
from steelyard.words import get_meanings, get_text_pair

LETTERS = "ABCD"
ANSWER_COLUMNS = (
    "items",
    "best",
    "choice",
    "finite",
)  # an engine's answers: four lists of one length
UNANSWERED = "?"
OTHER_TOKEN = "*"  # a token that is not one of the letters
MAX_TOKENS = 1 << 31  # limit of a vocabulary


class ChoiceAnswers(GrownModel):
    """The answers of one pass, one character per question, `?` where it was not answered.

    `choices` is the likeliest of the four letters. `hits` says whether the likeliest token of the
    whole vocabulary is the right answer (1 or 0); the headline accuracy comes from it. `argmax` is
    that likeliest token: a letter, or `*` for any other token, whose id is then the next of
    `others` (most models answer with a letter, so this takes one byte per question). `not_finite`
    and `repeated` count answers whose scores were not finite, and answers that came again.
    """

    LATER: ClassVar[tuple[str, ...]] = ("argmax", "others")

    choices: str = Field(pattern=r"^[ABCD?]*$")
    hits: str = Field(pattern=r"^[01?]*$")
    not_finite: int
    repeated: int
    argmax: str | None = Field(None, pattern=r"^[ABCD*?]*$")
    others: list[OutputCount] | None = None


class ChoiceOutputs(GrownModel):
    """What a record keeps of a multiple-choice task: per question the right letter (`gold`), its
    subject (`subject_of`, an index into `subjects`) and its position in the whole set (`index`);
    the four letters' token ids (`letters`); and in `passes` the `ChoiceAnswers` of each pass by
    name. Validation refuses lists that contradict each other. Answers of version 1 (`version` None)
    have no `argmax`.
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
    def _check_lengths(self) -> Self:
        """Validate a multiple-choice task's outputs after parsing, and return them. Raises
        ValueError if the lengths of answers or subjects are not the number of questions, a subject
        does not exist, or a pass's `argmax`, `others` and `hits` contradict each other.
        """
        count = len(self.gold)
        lengths = {
            len(column)
            for answers in self.passes.values()
            for column in (answers.choices, answers.hits)
        }
        if len(self.subject_of) != count or lengths - {count}:
            raise ValueError(f"answers and subjects are not those of {count} questions")
        if any(not 0 <= subject < len(self.subjects) for subject in self.subject_of):
            raise ValueError("a question is of a subject that is not there")
        for answers in self.passes.values():
            self._check_argmax(answers)
        return self

    def _check_argmax(self, answers: ChoiceAnswers) -> None:
        """Raise ValueError if only one of a pass's `argmax` and `others` is there, their lengths do
        not fit, `others` has the token of a letter, or `hits` does not follow from `argmax`. A pass
        with neither (version 1) is fine.
        """
        if answers.argmax is None and answers.others is None:
            return
        if (
            answers.argmax is None
            or answers.others is None
            or len(answers.argmax) != len(self.gold)
        ):
            raise ValueError(f"argmax and others are not those of {len(self.gold)} questions")
        if answers.argmax.count(OTHER_TOKEN) != len(answers.others) or set(answers.others) & set(
            self.letters
        ):
            raise ValueError(
                "others are not the tokens of those questions whose argmax is no letter"
            )
        if any(
            hit != _mark_hit(best, gold)
            for hit, best, gold in zip(answers.hits, answers.argmax, self.gold, strict=True)
        ):
            raise ValueError("hits are not those of argmax")


def _mark_hit(best: str, gold: str) -> str:
    """Return "1" or "0", whether the likeliest token is the right letter, or "?" if the question
    was not answered.
    """
    return UNANSWERED if best == UNANSWERED else str(int(best == gold))


def list_likeliest_tokens(outputs: ChoiceOutputs, pass_name: str) -> list[int | None] | None:
    """Return the likeliest token id of each question in a pass, None where it was not answered; or
    None instead of a list if the pass did not keep them (version 1). Raises KeyError if there is no
    such pass.
    """
    answers = outputs.passes[pass_name]
    if answers.argmax is None or answers.others is None:
        return None
    others = iter(answers.others)
    token_ids: dict[str, int | None] = {
        UNANSWERED: None,
        **dict(zip(LETTERS, outputs.letters, strict=True)),
    }
    return [
        next(others) if character == OTHER_TOKEN else token_ids[character]
        for character in answers.argmax
    ]


def make_choice_outputs(
    gold: list[int],
    subject_of: list[int],
    subjects: list[str],
    index: list[int],
    letters: list[int],
) -> ChoiceOutputs:
    """Return outputs of version 2 without any pass. Lists are per question: `gold` the index (0 to
    3) of the right answer, `subject_of` an index into `subjects`, `index` its position in the whole
    set; `letters` are the four letters' token ids.
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


def check_choice_answers(answers: Any, outputs: ChoiceOutputs) -> dict[str, Any]:
    """Return an engine's answers of a pass as a new dict if a record can be made of them: lists of
    integers `items` (question), `best` (token id), `choice` (0 to 3) and `finite` (0: the scores
    were not finite), of one length; other keys are dropped.

    Raises TypeError if they are not lists of integers; ValueError for unequal lengths, a question
    or choice that does not exist, or a token id out of range. This runs in the worker, where the
    engine can still be blamed.
    """
    questions = len(outputs.gold)
    columns: list[Any] = (
        [answers.get(name) for name in ANSWER_COLUMNS] if isinstance(answers, dict) else []
    )
    if not columns or not all(
        isinstance(c, list) and all(isinstance(value, int) for value in c) for c in columns
    ):
        raise TypeError(
            f"the engine's outputs must be lists of integers: {', '.join(ANSWER_COLUMNS)}"
        )
    if len({len(column) for column in columns}) != 1:
        raise ValueError("the engine's outputs must be lists of one length")
    items, best, choice, _ = columns
    if not all(0 <= item < questions for item in items) or not all(
        0 <= letter < 4 for letter in choice
    ):
        raise ValueError(
            f"the engine's outputs name a question outside 0 to {questions - 1}, or a choice"
            " outside 0 to 3"
        )
    if not all(0 <= token < MAX_TOKENS for token in best):
        raise ValueError(f"the engine's outputs have a token in best outside 0 to {MAX_TOKENS - 1}")
    return dict(zip(ANSWER_COLUMNS, columns, strict=True))


def merge_choice_answers(
    outputs: ChoiceOutputs, pass_name: str, rank_answers: list[dict[str, Any]]
) -> ChoiceOutputs:
    """Return a copy of the outputs with one more pass, from the checked answers of all ranks;
    `hits` is derived from the likeliest token. Questions that no rank answered are `?`. A question
    answered twice counts as repeated, and the later answer stays.
    """
    count = len(outputs.gold)
    choices, likeliest, tokens = [UNANSWERED] * count, [UNANSWERED] * count, [0] * count
    letter_of = dict(zip(outputs.letters, LETTERS, strict=True))
    repeated = 0
    not_finite = 0
    for columns in rank_answers:
        for item, best, choice, finite in zip(
            *(columns[column] for column in ANSWER_COLUMNS), strict=True
        ):
            repeated += choices[item] != UNANSWERED
            not_finite += not finite
            choices[item] = LETTERS[choice]
            likeliest[item], tokens[item] = letter_of.get(best, OTHER_TOKEN), best
    answers = ChoiceAnswers(
        choices="".join(choices),
        hits="".join(
            _mark_hit(best, gold) for best, gold in zip(likeliest, outputs.gold, strict=True)
        ),
        not_finite=not_finite,
        repeated=repeated,
        argmax="".join(likeliest),
        others=[
            token
            for token, character in zip(tokens, likeliest, strict=True)
            if character == OTHER_TOKEN
        ],
    )
    return outputs.model_copy(update={"passes": {**outputs.passes, pass_name: answers}})


def score_choice_answers(outputs: ChoiceOutputs, pass_name: str) -> dict[str, float]:
    """Return the scores (0 to 1) of a pass over its answered questions: `acc` (likeliest token of
    the vocabulary is right) with standard error `se`, `macro` (mean over subjects of their `acc`)
    and `choice` (likeliest of the four letters is right). Empty if the pass is missing or nothing
    was answered.
    """
    answers = outputs.passes.get(pass_name)
    answered = [i for i, hit in enumerate(answers.hits) if hit != UNANSWERED] if answers else []
    if answers is None or not answered:
        return {}
    acc = sum(answers.hits[i] == "1" for i in answered) / len(answered)
    by_subject = compute_subject_accuracy(outputs, pass_name)
    return {
        "acc": acc,
        "se": (acc * (1 - acc) / len(answered)) ** 0.5,
        "macro": fmean(by_subject.values()),
        "choice": sum(answers.choices[i] == outputs.gold[i] for i in answered) / len(answered),
    }


def compute_subject_accuracy(outputs: ChoiceOutputs, pass_name: str) -> dict[str, float]:
    """Return the accuracy (0 to 1) of a pass by name of subject, for subjects with answered
    questions: the share whose likeliest token is right. Raises KeyError if there is no such pass.
    """
    counts: dict[str, list[int]] = {}
    for subject, hit in zip(outputs.subject_of, outputs.passes[pass_name].hits, strict=True):
        if hit != UNANSWERED:
            counts.setdefault(outputs.subjects[subject], []).append(int(hit))
    return {subject: sum(hits) / len(hits) for subject, hits in counts.items()}


def measure_choice_agreement(
    outputs: ChoiceOutputs, first_pass: str, second_pass: str
) -> float | None:
    """Return the share (0 to 1) of questions, answered in both passes of a run, for which both
    chose the same of the four letters; None if a pass is missing or no question was answered in
    both.
    """
    if first_pass not in outputs.passes or second_pass not in outputs.passes:
        return None
    letters = zip(
        outputs.passes[first_pass].choices, outputs.passes[second_pass].choices, strict=True
    )
    pairs = [(a, b) for a, b in letters if UNANSWERED not in (a, b)]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def measure_choice_variety(outputs: ChoiceOutputs, pass_name: str) -> float | None:
    """Return the probability (0 to 1) that two questions, drawn with replacement from those that a
    pass answered, have different letters; None if the pass is missing or answered none.
    """
    answers = outputs.passes.get(pass_name)
    counts = Counter(answers.choices.replace(UNANSWERED, "") if answers else "")
    if not counts:
        return None
    return 1 - sum((count / counts.total()) ** 2 for count in counts.values())


def compare_choice_outputs(
    first: ChoiceOutputs, second: ChoiceOutputs, pass_name: str
) -> Differences | None:
    """Compare two runs in a pass, over the questions that both answered: how many letters and how
    many likeliest tokens differ (`tokens` None if a run did not keep these). None if the pass is
    missing in either, or the runs asked different questions.
    """
    if (
        pass_name not in first.passes
        or pass_name not in second.passes
        or first.index != second.index
    ):
        return None
    letters = zip(first.passes[pass_name].choices, second.passes[pass_name].choices, strict=True)
    pairs = [(a, b) for a, b in letters if UNANSWERED not in (a, b)]
    first_tokens, second_tokens = (
        list_likeliest_tokens(first, pass_name),
        list_likeliest_tokens(second, pass_name),
    )
    tokens = (
        None
        if first_tokens is None or second_tokens is None
        else zip(first_tokens, second_tokens, strict=True)
    )
    different_tokens = (
        None if tokens is None else sum(a != b for a, b in tokens if None not in (a, b))
    )
    return Differences(len(pairs), sum(a != b for a, b in pairs), tokens=different_tokens)


def explain_choice_mismatch(outputs: ChoiceOutputs, selection: Selection) -> str | None:
    """Return why outputs do not answer what the user selected (wrong subjects, or rows by number,
    position or group), as the end of an error message; None if they do. With a sample, selected
    subjects may be missing. Row ids are compared as far as they can be without the data.
    """
    present = {outputs.subjects[subject] for subject in outputs.subject_of}
    selected_subjects = set(selection.subjects or present)
    if present - selected_subjects or (selection.sample is None and selected_subjects - present):
        return f"subjects {', '.join(sorted(present ^ selected_subjects)[:5])}"
    group_counts = dict(Counter(outputs.subjects[subject] for subject in outputs.subject_of))
    # checked first: it bounds the size of the lists that are compared next
    count_fits = selection.row_count in (None, len(outputs.gold))
    if not (
        count_fits
        and selection.positions in (None, outputs.index)
        and selection.group_counts in (None, group_counts)
    ):
        return f"{len(outputs.gold)} questions, which are not the selected rows"
    return None


def tally_choice_answers(outputs: ChoiceOutputs, pass_name: str) -> Tally | None:
    """Count a pass's questions, those without an answer, answers that came again, and answers that
    are not finite; return None if there is no such pass.
    """
    answers = outputs.passes.get(pass_name)
    if answers is None:
        return None
    return Tally(
        len(answers.choices),
        answers.choices.count(UNANSWERED),
        answers.repeated,
        answers.not_finite,
    )


def make_choice_breakdowns(outputs: ChoiceOutputs) -> list[Breakdown]:
    """Return a list with one table for the report page: a row per subject that was answered, with
    its accuracy (0 to 1, None if unanswered) in each of the passes val and infer that exist. Empty
    if nothing was answered.
    """
    passes = [name for name in ("val", "infer") if name in outputs.passes]
    accuracies = {name: compute_subject_accuracy(outputs, name) for name in passes}
    subjects = [
        subject
        for subject in outputs.subjects
        if any(subject in accuracy for accuracy in accuracies.values())
    ]
    if not subjects:
        return []
    rows = tuple(
        (subject, *(accuracies[name].get(subject) for name in passes)) for subject in subjects
    )
    columns = (get_text_pair("breakdown.subject"), *((name, name) for name in passes))
    return [Breakdown(get_text_pair("breakdown.by_subject"), columns, rows)]


CHOICE_SCORES = (
    *ACCURACY,
    Score("acc_choice", "choice", *get_meanings("mmlu.acc_choice")),
    Score("acc_choice_val", "choice", *get_meanings("mmlu.acc_choice_val"), of="val"),
    Score("acc_macro", "macro", *get_meanings("mmlu.acc_macro")),
)


def choice_task(name: str, data: type[FrozenModel], reader: str, data_check: str = "") -> Task:
    """Return the `Task` row of a multiple-choice task (scoring, quality `acc`), which only adds how
    its data are read: `data` is the model of `question.data`, `reader` and `data_check` are
    "module:function". Its reader calls `questions.prepare_questions`.
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
        check=check_choice_answers,
        merge=merge_choice_answers,
        score=score_choice_answers,
        tally=tally_choice_answers,
        scores=CHOICE_SCORES,
        quality="acc",
        passes=("val", "infer"),
        agreement=measure_choice_agreement,
        variety=measure_choice_variety,
        differences=compare_choice_outputs,
        breakdowns=make_choice_breakdowns,
        selects=("subjects", "rows"),
        off_scope=explain_choice_mismatch,
    )
