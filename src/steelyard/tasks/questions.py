"""Turn multiple-choice questions with four answers into prompts after answered examples, or
generate such questions.

A task of such questions reads its rows and calls `prepare_questions`, which does the rest in the
worker. `tasks/choices.py` has what a record keeps of the answers.
"""

import random
from dataclasses import dataclass

from pydantic import Field

from steelyard.data import selection
from steelyard.data.seeded_draws import choose_items
from steelyard.data.tokenizer import Tokenizer
from steelyard.errors import RequestError
from steelyard.schema import FrozenModel, to_canonical_json
from steelyard.tasks import choices
from steelyard.tasks.choices import LETTERS
from steelyard.tasks.task import (
    DataFacts,
    PreparedData,
    TaskRequest,
    TokenizerFacts,
    fingerprint_parts,
    is_published,
)

McqRow = tuple[str, str, str, str, str, str]  # question, four choices, the answer's letter


@dataclass(frozen=True)
class Subject:
    """One subject of a multiple-choice data set: its `name`, its answered examples (`dev`), of
    which the first come before each question, and the questions to ask (`test`); both are rows of
    (question, four choices, right letter).
    """

    name: str
    dev: tuple[McqRow, ...]
    test: tuple[McqRow, ...]


@dataclass(frozen=True)
class Prompts:
    """Tokenized prompts of multiple-choice questions, made by `encode_questions`; implements
    `ChoicePrompts`. Per prompt: `rows`, its token ids; `groups`, a number that prompts with the
    same beginning share; `index`, the question's position in the whole set; `gold`, the index (0 to
    3) of the right answer; `subject_of`, an index into `subjects`, the names.

    `letters` are the token ids of the four answers, `shortened` is the number of prompts that lost
    examples.
    """

    rows: list[list[int]]
    groups: list[int]
    index: list[int]  # position of each question in the whole set
    gold: list[int]
    subject_of: list[int]
    subjects: list[str]
    letters: list[int]  # token ids of the four answers
    shortened: int


class GeneratedQuestionsConfig(FrozenModel):
    """How to generate questions (`question.data.made`): `questions` in each of `subjects` (both
    numbers), and the `seed`, 0 by default.
    """

    subjects: int = Field(ge=1)
    questions: int = Field(ge=1)
    seed: int = 0


class QuestionFields(FrozenModel):
    """The fields of `question.data` of a multiple-choice task; a task adds the literal of its
    `kind`.

    `shots` is the number of answered examples before a question, `context` the most tokens that a
    prompt may have, `subjects` the number of subjects that the data must have (None: any).
    `fingerprint` is that of the published data; other data are not refused, but the record says
    that they are not published. `made`: how to generate questions if no data path is given; None:
    data are required.
    """

    kind: str
    shots: int = Field(5, ge=0, le=5)
    context: int = Field(2048, ge=16)
    subjects: int | None = Field(None, ge=1)  # required number of subjects; None: any
    fingerprint: str | None = None
    made: GeneratedQuestionsConfig | None = None


def prepare_questions(
    request: TaskRequest, subjects: list[Subject], label: str, location: str = "{}"
) -> PreparedData:
    """Make prompts of the questions that the request selects; return them as inputs, with facts for
    the record and outputs without passes.

    `label` names where the subjects came from; `location` is a format string with one `{}` for the
    subject, which names a subject's file in errors. Raises RequestError if the context is longer
    than the model's positions, there is no fitting tokenizer, the selection does not exist, or a
    prompt or answer cannot be encoded as required (`encode_questions`).
    """
    fields: QuestionFields = request.data
    if fields.context > request.positions:
        raise RequestError(
            f"question.data.context={fields.context} is more than the model's {request.positions}"
            " positions"
        )
    tokenizer = request.load_tokenizer()
    pool = select_questions(subjects, request.subjects, request.rows)
    prompts = encode_questions(
        subjects, fields, tokenizer, request.sample, request.seed, pool, location
    )
    digest = fingerprint_questions(subjects, tokenizer)
    facts = DataFacts(
        source=label,
        subjects=len(subjects),
        rows=sum(len(subject.test) for subject in subjects),
        rows_in_scope=len(prompts.rows),
        tokens=sum(len(row) for row in prompts.rows),
        shortened=prompts.shortened,
        fingerprint=digest,
        published=is_published(digest, fields.fingerprint),
        tokenizer=TokenizerFacts.from_tokenizer(tokenizer),
    )
    empty_outputs = choices.make_choice_outputs(
        prompts.gold, prompts.subject_of, prompts.subjects, prompts.index, prompts.letters
    )
    return PreparedData(prompts, facts, empty_outputs)


def fingerprint_questions(subjects: list[Subject], tokenizer: Tokenizer) -> str:
    """Return the SHA-256 (hex) of all subjects' rows and of the tokenizer's vocabulary."""
    return fingerprint_parts(
        tokenizer,
        (to_canonical_json([subject.name, subject.dev, subject.test]) for subject in subjects),
    )


def format_question(row: McqRow) -> str:
    """Return the text of a question: the question, a line "A. …" to "D. …" for each choice, and the
    line "Answer:" without the answer.
    """
    choices = "".join(
        f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, row[1:5], strict=True)
    )
    return f"{row[0]}{choices}\nAnswer:"


def format_header(subject: str) -> str:
    """Return the first line of a prompt, which names the subject with spaces for "_", and an empty
    line behind it. As in the published prompts there are two spaces before the name.
    """
    # Each word has a space before it, the first one too: two spaces, as in the published prompts.
    words = "".join(f" {word}" for word in subject.split("_"))
    return f"The following are multiple choice questions (with answers) about {words}.\n\n"


def format_prompt(subject: Subject, row: McqRow, shots: int, dropped: int = 0) -> str:
    """Return a prompt's text: header, the subject's examples `dropped` to `shots` - 1, each with
    its answer and an empty line behind it, and the question up to "Answer:".
    """
    examples = "".join(
        f"{format_question(example)} {example[5]}\n\n" for example in subject.dev[dropped:shots]
    )
    return format_header(subject.name) + examples + format_question(row)


def select_questions(
    subjects: list[Subject], names: tuple[str, ...] | None, rows: tuple[str, ...] | None
) -> list[int] | None:
    """Return the sorted positions, in the whole set (subject after subject), of the questions named
    by row ids or, if there are none, by subject names; None if neither is given, which means all.
    Raises RequestError for unknown, repeated or malformed ids, and unknown subjects.
    """
    positions, begin = {}, 0
    for subject in subjects:
        positions[subject.name] = range(begin, begin + len(subject.test))
        begin += len(subject.test)
    if rows is not None:
        return selection.find_positions(rows, begin, "question", positions)
    return None if names is None else selection.find_group_positions(names, positions)


def encode_questions(
    subjects: list[Subject],
    data: QuestionFields,
    tokenizer: Tokenizer,
    sample: int | None,
    seed: int,
    pool: list[int] | None = None,
    location: str = "{}",
) -> Prompts:
    """Tokenize the prompts of all questions, or of those at the positions in `pool`, or of a seeded
    sample of these, in the order of the set.

    If a prompt is longer than `data.context`, its leading examples are dropped one by one; prompts
    of one subject with equally many dropped are a group. Raises RequestError if a question does not
    fit even without examples (`location` formats its subject's file), an answer is not one token,
    or the sample is larger than the set.
    """
    all_pairs = [(s, q) for s, subject in enumerate(subjects) for q in range(len(subject.test))]
    index = choose_items(len(all_pairs), sample, seed, pool=pool)
    pairs = [all_pairs[i] for i in index]
    dropped = [0] * len(pairs)
    rows: list[list[int]] = [[] for _ in pairs]
    pending = list(range(len(pairs)))
    while pending:
        texts = [
            format_prompt(
                subjects[pairs[i][0]],
                subjects[pairs[i][0]].test[pairs[i][1]],
                data.shots,
                dropped[i],
            )
            for i in pending
        ]
        for i, ids in zip(pending, tokenizer.encode(texts), strict=True):
            rows[i] = ids
        pending = [i for i in pending if len(rows[i]) > data.context]
        for i in pending:
            dropped[i] += 1
            if dropped[i] > data.shots:
                s, q = pairs[i]
                raise RequestError(
                    f"{location.format(subjects[s].name)}: row {q + 1} alone has {len(rows[i])}"
                    f" tokens; the context is {data.context}"
                )
    return Prompts(
        rows=rows,
        groups=_number_keys([(s, d) for (s, _), d in zip(pairs, dropped, strict=True)]),
        index=index,
        gold=[LETTERS.index(subjects[s].test[q][5]) for s, q in pairs],
        subject_of=[s for s, _ in pairs],
        subjects=[subject.name for subject in subjects],
        letters=find_answer_tokens(tokenizer),
        shortened=sum(1 for d in dropped if d),
    )


def _number_keys(keys: list[tuple[int, int]]) -> list[int]:
    """Return a number for each key, equal ones for equal keys, counted from 0 in order of first
    appearance.
    """
    numbers: dict[tuple[int, int], int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def find_answer_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of " A", " B", " C" and " D" as they follow "Answer:". Raises
    RequestError if one of them is not exactly one more token behind those of "Answer:".
    """
    before, *after = tokenizer.encode(["Answer:", *(f"Answer: {letter}" for letter in LETTERS)])
    tokens = []
    for letter, ids in zip(LETTERS, after, strict=True):
        if ids[: len(before)] != before or len(ids) != len(before) + 1:
            raise RequestError(
                f"tokenizer {tokenizer.source}: the answer ' {letter}' is not one token; it cannot"
                " be scored"
            )
        tokens.append(ids[-1])
    return tokens


_NOUNS = (
    "lake",
    "river",
    "hill",
    "stone",
    "cloud",
    "field",
    "tower",
    "garden",
    "harbour",
    "forest",
    "island",
    "valley",
)
_VERBS = ("holds", "carries", "follows", "covers", "crosses", "reaches", "feeds", "guards")
_MADE_NAMES = ("tides", "orchards", "signals", "quarries", "ledgers", "lanterns")


def generate_questions(task: str, config: GeneratedQuestionsConfig, shots: int) -> list[Subject]:
    """Generate `config.subjects` subjects, sorted by name, each with `shots` examples and
    `config.questions` questions about which thing stands in which relation to another; determined
    by the seed and the task's name.
    """
    rng = random.Random(f"{task}:{config.seed}")
    subjects = []
    for i in range(config.subjects):
        name = f"made_{_MADE_NAMES[i % len(_MADE_NAMES)]}_{i}"
        rows = [_generate_question(rng) for _ in range(shots + config.questions)]
        subjects.append(Subject(name, tuple(rows[:shots]), tuple(rows[shots:])))
    return sorted(subjects, key=lambda subject: subject.name)


def _generate_question(rng: random.Random) -> McqRow:
    """Generate one question whose first sentence contains the answer: text, four shuffled choices
    and the right letter. Advances `rng`.
    """
    things = rng.sample(_NOUNS, 5)
    verb, filler = rng.choice(_VERBS), " ".join(rng.choices(_NOUNS, k=rng.randrange(0, 9)))
    question = (
        f"The {things[4]} {verb} the {things[0]} near {filler or 'nothing'}. What does the"
        f" {things[4]} {verb[:-1]}?"
    )
    choices = things[:4]
    rng.shuffle(choices)
    return (
        question,
        choices[0],
        choices[1],
        choices[2],
        choices[3],
        LETTERS[choices.index(things[0])],
    )
