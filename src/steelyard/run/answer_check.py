"""Check generated answers: which are kept, and the job that scores them again by teacher forcing.

A worker (run/worker.py) keeps the token ids of a seeded tenth of the requests. After the timed
pass a reference engine computes, after the same tokens, how far each generated token is from the
likeliest one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from steelyard.case.case import Case
from steelyard.data.counting import StepCounter, TextCounter
from steelyard.data.prompts import PromptRequests, count_checked
from steelyard.data.training_rows import RowKey
from steelyard.engine import engine_rows
from steelyard.engine.job import Job
from steelyard.plan import degrees
from steelyard.record.request_samples import ClientFacts, RequestSamples
from steelyard.run.request_columns import RequestState
from steelyard.run.requests import RequestTrace

CHECKERS = ("torch", "transformers")  # reference engines, the first that knows the model is taken
CHECK_TOKENS = 8192  # tokens of a batch: this pass is not measured
OWN_LOGPROBS = "logprobs"  # what checked answers, if the server reported their distances itself
UNKNOWN_WEIGHTS = "unknown"  # source of the weights of a server that was not started here


@dataclass(frozen=True)
class AnsweredTexts:
    """Answers to check: each row of `rows` is a prompt with what was generated behind it, of which
    the first `prompt_lens` tokens are the prompt; `numbers` are those of the requests. It is the
    input of work `check_answers`.
    """

    numbers: list[int] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    prompt_lens: list[int] = field(default_factory=list)

    @property
    def groups(self) -> list[int]:
        """The group number of each row: nothing is shared between them."""
        return list(range(len(self.rows)))

    def to_outputs(self) -> dict[str, Any]:
        """Return the generated tokens as a record keeps them."""
        tokens = [row[length:] for row, length in zip(self.rows, self.prompt_lens, strict=True)]
        return {"numbers": self.numbers, "tokens": tokens}

    def make_counter(self, case: Case) -> StepCounter:
        """Return what counts the tokens of the check, of which each row needs the logits of its
        generated tokens.
        """
        return AnswerCounter(self, getattr(case.question.model, "window", None))


class AnswerCounter(TextCounter):
    """Counts answers that are checked: all tokens of a row, and a logit for each generated one."""

    def __init__(self, answers: AnsweredTexts, window: int | None) -> None:
        """Keep the answers; `window` is the model's attention window, None: full attention."""
        super().__init__(answers, "closed", lambda length: 1, window)
        self.answers = answers

    def count(
        self, keys: Sequence[RowKey], prefix_groups: Sequence[int] = (), held_out: bool = False
    ) -> dict[str, int]:
        """Return the summed counts of the rows with these indices; other arguments are ignored."""
        sizes = [len(self.answers.rows[i]) - self.answers.prompt_lens[i] for i in keys]
        return super().count(keys) | {"logits": sum(sizes)}

    def count_expected(self, steps: range | None) -> list[dict[str, int]]:
        """Return a list of one table: the counts of all rows. `steps` is ignored."""
        return [self.count(range(len(self.answers.rows)))]


def collect_answers(
    trace: RequestTrace, requests: PromptRequests, every: bool, sent_as: str = "ids"
) -> AnsweredTexts:
    """Return the answers of a pass that are to be checked: of all requests if `every`, else of a
    seeded tenth. `sent_as` is how prompts were sent (a key of `SEEN_PROMPTS`). Requests that
    failed, and those of which the prompt that the model saw or the tokens are not known, cannot be
    checked; the next ones of the draw are in their place.
    """

    def find(number: int) -> tuple[list[int], list[int]] | None:
        """Return a request's prompt as the model saw it, and its answer; None if one is unknown."""
        ids = trace.get_output_ids(number, requests)
        prompt = SEEN_PROMPTS[sent_as](trace.states[number], requests)
        return None if prompt is None or not ids else (prompt, ids)

    return _select_answers(len(trace.states), find, requests, every)


def choose_answers(
    ids: Mapping[int, list[int]], requests: PromptRequests, every: bool
) -> AnsweredTexts:
    """Return the answers that are to be checked, as `collect_answers` does, of a rank that knows
    the `ids` of every request, by its number.
    """

    def find(number: int) -> tuple[list[int], list[int]] | None:
        """Return a request's prompt and answer."""
        return ([*requests.make(number).prompt], ids[number]) if ids.get(number) else None

    return _select_answers(max(ids, default=-1) + 1, find, requests, every)


def _select_answers(
    sent: int,
    find: Callable[[int], tuple[list[int], list[int]] | None],
    requests: PromptRequests,
    every: bool,
) -> AnsweredTexts:
    """Return the answers of as many requests as are to be checked, in the order of the draw, of
    those whose prompt and answer `find` returns, and which the model has positions for.
    """
    rows = dict[int, tuple[list[int], list[int]]]()
    for number in requests.order_checked(sent):
        if len(rows) == (sent if every else count_checked(sent)):
            break
        found = find(number)
        if found is not None and len(found[0]) + len(found[1]) <= requests.positions:
            rows[number] = found
    numbers = sorted(rows)
    return AnsweredTexts(
        numbers,
        [[*rows[number][0], *rows[number][1]] for number in numbers],
        [len(rows[number][0]) for number in numbers],
    )


def _encode_prompt(state: RequestState, requests: PromptRequests) -> list[int] | None:
    """Return the tokens of a prompt that was sent as text, as the model's tokenizer encodes it;
    None if the server counts others, or there is no text.
    """
    text, counted = state.request.text, state.end.prompt_tokens
    prompt = None if text is None else requests.encode_prompt(text)
    return prompt if prompt is not None and counted in (None, len(prompt)) else None


# How a prompt was sent → its tokens as the model saw them, None if they are not known: a chat
# template is the server's own. Texts of words (engines/http/word_vocabulary.py) are ids.
SEEN_PROMPTS: dict[str, Callable[[RequestState, PromptRequests], list[int] | None]] = {
    "ids": lambda state, requests: list(state.request.prompt),
    "words": lambda state, requests: list(state.request.prompt),
    "text": _encode_prompt,
    "chat": lambda state, requests: None,
}


def choose_checker(case: Case) -> str:
    """Return the name of the reference engine that checks answers of a case's model: the first of
    `CHECKERS` that has its family.
    """
    family = case.question.model.family
    return next(
        (name for name in CHECKERS if family in engine_rows.find_engine(name).families),
        CHECKERS[-1],
    )


def make_check_job(job: Job, work: str) -> Job:
    """Return the job of a reference engine that checks answers: the same model in the same
    precision, computed plainly, every token of every row on one device.
    """
    case, plan = job.case, degrees.make_single_plan()
    tune = case.tune.model_copy(
        update={"compile": False, "batch_tokens": CHECK_TOKENS, "warmup": 0, "attention": "auto"}
    )
    question = case.question.model_copy(update={"division": "closed"})
    return replace(
        job,
        case=case.model_copy(update={"tune": tune, "question": question}),
        work=work,
        plan=plan,
        place=degrees.find_position(plan, 0),
        rank=0,
        world=1,
        steps=None,
    )


def add_client_facts(samples: RequestSamples, details: dict[str, Any]) -> RequestSamples:
    """Return request samples with what an engine found out about its client before the pass: the
    error of its stamps on the mock server (`mock_requests`, `mock_error_us` of its details); the
    same samples if it did not.
    """
    if samples.client is None or "mock_error_us" not in details:
        return samples
    facts = samples.client.model_dump() | {
        "mock_requests": details["mock_requests"],
        "mock_error_us": tuple(details["mock_error_us"]),
    }
    return samples.model_copy(update={"client": ClientFacts(**facts)})
