"""Tests of which generated answers are checked, and of the rows that are scored again."""

import numpy as np
import pytest

from fixtures.scripted_port import make_requests, run_requests
from steelyard.case import resolve
from steelyard.case.load import Load
from steelyard.data.prompts import PromptSource
from steelyard.engine.generation import RequestEnd
from steelyard.run.answer_check import AnsweredTexts, choose_checker, collect_answers

CLOSED = Load(mode="concurrency", concurrency=4)


class Letters:
    """A tokenizer of single letters: ids are their codes, behind a 1. A text of which `merges` is a
    part has one token fewer than letters.
    """

    source, vocab, sha256, end = "letters", 512, "", 0

    def __init__(self, merges: str = "") -> None:
        self.merges = merges

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [
            [1, *map(ord, text.replace(self.merges, "#") if self.merges else text)]
            for text in texts
        ]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(number) for number in ids if number > 1)


def answer_with(text: str | None, ids: list[int], outcome: str = "ok", prompt_tokens=None):
    """Return the chunk and the end of an answer."""
    end = RequestEnd(outcome, text=text, prompt_tokens=prompt_tokens, counted_by="usage")
    return [(0.5, ids or len(text or "xxx")), (1.0, end)]


def collect(requests, every: bool = True, sent_as: str = "ids", **answer) -> AnsweredTexts:
    """Return the answers of a run that are checked, of a server that always answers alike."""
    fields = {"text": None, "ids": [7, 8, 9]} | answer
    run = run_requests(CLOSED, requests, lambda *_: answer_with(**fields))
    return collect_answers(run.trace, requests, every, sent_as)


def test_all_answers_are_checked_at_size_smoke_and_a_drawn_tenth_otherwise():
    requests = make_requests(200, 3)
    assert collect(requests).numbers == list(range(200))
    answers = collect(requests, every=False)
    assert answers.numbers == sorted(requests.order_checked(200)[:20])
    assert len(answers.numbers) == 20
    for number, row, length in zip(answers.numbers, answers.rows, answers.prompt_lens, strict=True):
        assert row == [*requests.make(number).prompt, 7, 8, 9]
        assert length == 32
    assert answers.to_outputs() == {"numbers": answers.numbers, "tokens": [[7, 8, 9]] * 20}
    assert answers.groups == list(range(20))


def test_requests_that_failed_or_have_no_known_tokens_are_left_out():
    answers = [
        answer_with(None, [7, 8, 9]),
        answer_with(None, [7, 8, 9], "cut"),
        answer_with(None, []),  # tokens were counted, and nobody says which
        answer_with(None, [7]),
        answer_with("abc", [], "failed"),
    ]
    requests = make_requests(5, 3)
    run = run_requests(CLOSED, requests, lambda request, _: answers[request.number])
    assert collect_answers(run.trace, requests, every=True).numbers == [0, 3]


def test_answers_whose_tokens_are_unknown_are_replaced_by_the_next_ones_of_the_draw():
    requests = make_requests(40, 3)
    first = requests.order_checked(40)[0]
    unknown = answer_with(None, [])
    run = run_requests(
        CLOSED,
        requests,
        lambda request, _: unknown if request.number == first else answer_with(None, [7, 8, 9]),
    )
    checked = collect_answers(run.trace, requests, every=False)
    assert checked.numbers == sorted(requests.order_checked(40)[1:5])


def test_a_run_without_answers_checks_nothing():
    requests = make_requests(3, 3)
    run = run_requests(CLOSED, requests, lambda *_: [(0.5, RequestEnd("refused"))])
    assert collect_answers(run.trace, requests, every=False) == AnsweredTexts()


def make_texts(**changes):
    """Return two requests whose prompts are letters with a text."""
    source = PromptSource((np.full(104, ord("q")),), Letters(**changes))
    return make_requests(2, 3, source=source)


def test_texts_are_encoded_only_where_ids_are_missing():
    requests = make_texts()
    prompts = [list(requests.make(number).prompt) for number in range(2)]
    rows = collect(requests, text="xyz", ids=[]).rows
    assert rows == [[*prompt, 120, 121, 122] for prompt in prompts]
    rows = collect(requests, text="xyz", ids=[7, 8, 9]).rows
    assert rows == [[*prompt, 7, 8, 9] for prompt in prompts]


def test_the_prompt_of_a_row_is_the_one_that_the_model_saw():
    """Tokens of a text are those of its tokenizer, which may join what the ids had apart."""
    requests, number = make_texts(merges="qq"), 1
    prompts = [list(requests.make(number).prompt) for number in range(2)]
    joined = requests.source.tokenizer.encode([requests.make(number).text])[0]
    assert len(joined) < 32
    for sent_as, prompt in (("ids", prompts[number]), ("words", prompts[number]), ("text", joined)):
        answers = collect(requests, sent_as=sent_as)
        assert answers.rows[number] == [*prompt, 7, 8, 9]
        assert answers.prompt_lens[number] == len(prompt)
    # with the count of the server: only what agrees with it
    assert number in collect(requests, sent_as="text", prompt_tokens=len(joined)).numbers
    assert number not in collect(requests, sent_as="text", prompt_tokens=len(joined) + 1).numbers
    # the template of a chat is the server's own
    assert collect(requests, sent_as="chat").numbers == []
    # ids alone are no text
    assert collect(make_requests(2, 3), sent_as="text").numbers == []


def test_rows_that_do_not_fit_the_model_are_left_out():
    assert collect(make_requests(2, 3, positions=35)).numbers == [0, 1]
    assert collect(make_requests(2, 3, positions=34)).numbers == []


@pytest.mark.parametrize(("model", "checker"), [("llama3-8b-generate", "torch")])
def test_the_checker_is_the_first_engine_that_knows_the_model(model, checker):
    assert choose_checker(resolve.resolve_case(model, "smoke").case) == checker
