"""Tests of prompts for generation: what follows from the seed, what from the salt of a run, how
long they are, and what is refused.
"""

from array import array
from dataclasses import replace
from itertools import combinations
from math import log2
from typing import Any

import numpy as np
import pytest

from steelyard.data.prompts import (
    HEX_DIGITS,
    PromptRequests,
    PromptSource,
    RequestCounter,
    count_checked,
)
from steelyard.data.tokenizer import WordHashTokenizer
from steelyard.errors import RequestError

SALT, OTHER_SALT = "00112233445566778899aabbccddeeff", "ffeeddccbbaa99887766554433221100"


class Letters:
    """A tokenizer of single characters, which begins a text with id 1 and, with `ends`, ends it
    with id 0; characters beyond `alphabet` (None: no limit) become id 3, which is decoded as "?".
    """

    source, vocab, sha256, end = "letters", 512, "", 0

    def __init__(self, ends: bool = False, alphabet: str | None = None) -> None:
        self.ends, self.alphabet = ends, alphabet

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [
            [1, *map(self._encode, text), *([0] if self.ends else [])] for text in texts
        ]  # fmt: skip

    def _encode(self, letter: str) -> int:
        return ord(letter) if self.alphabet is None or letter in self.alphabet else 3

    def decode(self, ids: list[int]) -> str:
        assert isinstance(ids, list)
        return "".join("?" if number == 3 else chr(number) for number in ids if number > 1)


def make_documents(*lengths: int) -> tuple[np.ndarray, ...]:
    """Return documents of letters, each of its own, which count up."""
    return tuple(
        np.array([97 + (i + number) % 26 for i in range(length)], np.int64)
        for number, length in enumerate(lengths)
    )


def make_requests(**changes: Any) -> PromptRequests:
    """Return requests of 64 drawn ids and 16 more, with other fields where `changes` name them."""
    fields: dict[str, Any] = {
        "source": PromptSource(),
        "count": 8,
        "prompt_rule": 64,
        "output_rule": 16,
        "lengths": "exact",
        "vocab": 512,
        "positions": 4096,
        "seed": 1,
        "salt": SALT,
    }
    return PromptRequests(**(fields | changes))


def find_prompts(requests: PromptRequests, count: int = 8) -> list[list[int]]:
    """Return the first prompts of a run."""
    return [list(requests.make(number).prompt) for number in range(count)]


TEXTS = PromptSource(make_documents(200, 90, 300), Letters())


@pytest.mark.parametrize("source", [PromptSource(), TEXTS])
def test_prompts_follow_from_the_seed_but_for_their_first_tokens(source):
    requests = make_requests(source=source)
    room = requests.most_salt_tokens
    ours, same = find_prompts(requests), find_prompts(make_requests(source=source))
    assert ours == same
    salted = find_prompts(replace(requests, salt=OTHER_SALT))
    seeded = find_prompts(replace(requests, seed=2))
    for one, other, third in zip(ours, salted, seeded, strict=True):
        assert one[room:] == other[room:]
        assert one[:room] != other[:room]
        assert one[room:] != third[room:]
        assert len(one) == len(other) == 64


@pytest.mark.parametrize("vocab", [4, 5, 512, 32_000, 128_256])
def test_salts_of_ids_have_64_bits(vocab):
    requests = make_requests(vocab=vocab)
    first = min(10, vocab // 2)
    salt = requests._make_salt("run", 0)
    assert len(salt) * log2(vocab - first) >= 64 > (len(salt) - 1) * log2(vocab - first)
    assert len(salt) == requests.most_salt_tokens
    drawn = [token for number in range(400) for token in requests._make_salt("run", number)]
    assert min(drawn) >= first
    assert max(drawn) < vocab
    # every id of a small vocabulary, and as many different ones as chance gives of a large one
    different, ids = len(set(drawn)), vocab - first
    assert different >= 0.98 * ids * (1 - (1 - 1 / ids) ** len(drawn))


def test_salts_of_a_text_are_16_hex_digits_behind_what_begins_a_text():
    requests = make_requests(source=TEXTS)
    for number in range(20):
        salt = requests._make_salt("run", number)
        assert salt[0] == 1
        digits = "".join(map(chr, salt[1:]))
        assert digits.endswith(" ")
        assert len(digits) == 17
        assert set(digits[:-1]) <= set(HEX_DIGITS)
        assert len(salt) <= requests.most_salt_tokens
    text = requests.make(0).text
    assert text[:16] == "".join(map(chr, requests._make_salt("run", 0)[1:17]))


@pytest.mark.parametrize("source", [PromptSource(), TEXTS])
def test_no_two_requests_begin_alike(source):
    """Neither of a run, nor of its warm-up, nor of another run: 5,000 salts, all different."""
    requests = make_requests(source=source)
    other = replace(requests, salt=OTHER_SALT)
    salts = {
        tuple(of._make_salt(purpose, number))
        for of in (requests, other)
        for purpose in ("run", "warm-up")
        for number in range(1250)
    }
    assert len(salts) == 5000


def test_salts_share_no_long_beginning():
    """Caches share what begins alike: of 200 prompts no two share three ids."""
    prompts = find_prompts(make_requests(vocab=32_000), 200)
    for one, other in combinations(prompts, 2):
        assert one[:3] != other[:3]


@pytest.mark.parametrize(
    ("source", "rule"),
    [(PromptSource(), 64), (TEXTS, 64), (PromptSource(make_documents(64), Letters()), 64)],
)
def test_warm_up_requests_resemble_none_that_is_measured(source, rule):
    requests = make_requests(source=source, prompt_rule=rule)
    room = requests.most_salt_tokens
    measured = [request[room:] for request in find_prompts(requests, 100)]
    for number in range(10):
        warmup = requests.make_warmup(number)
        assert (len(warmup.prompt), warmup.output_tokens) == requests.find_lengths(number)
        assert list(warmup.prompt)[room:] not in measured
        assert warmup.prompt[:room] != requests.make(number).prompt[:room]


def test_warm_up_requests_of_whole_documents_have_their_tokens_in_another_order():
    source = PromptSource(make_documents(40, 50), Letters(), prompt_lens=(40, 50))
    requests = make_requests(source=source, prompt_rule="data")
    room = requests.most_salt_tokens
    for number in range(4):
        measured, warmup = requests.make(number).prompt, requests.make_warmup(number).prompt
        assert list(measured)[room:] == source.documents[number % 2].tolist()[room:]
        assert len(warmup) == len(measured)
        assert warmup[room:] != measured[room:]


def test_prompts_are_contiguous_runs_of_documents():
    requests = make_requests(source=TEXTS, prompt_rule=80)
    room = requests.most_salt_tokens
    wholes = ["".join(map(chr, document)) for document in TEXTS.documents]
    for number in range(200):
        rest = "".join(map(chr, requests.make(number).prompt[room:]))
        assert len(rest) == 80 - room
        assert any(rest in whole for whole in wholes)


def test_a_run_may_begin_anywhere_in_any_document_that_is_long_enough():
    """Documents of one token each tell where a run comes from; both ends are reached."""
    documents = tuple(np.arange(100 * n, 100 * n + size) for n, size in ((1, 40), (2, 30), (3, 39)))
    requests = make_requests(source=PromptSource(documents), prompt_rule=38)
    starts = {int(requests._cut_prompt("run", number, 38)[0]) for number in range(200)}
    assert starts == {100, 101, 102, 300, 301}
    ends = {int(requests._cut_prompt("run", number, 38)[-1]) for number in range(200)}
    assert ends == {137, 138, 139, 337, 338}


def test_lengths_are_fixed_uniform_or_the_data_s_own():
    assert {make_requests().find_lengths(number) for number in range(50)} == {(64, 16)}
    uniform = make_requests(prompt_rule=(30, 33), output_rule=(1, 2))
    drawn = [uniform.find_lengths(number) for number in range(400)]
    assert set(drawn) == {(prompt, output) for prompt in range(30, 34) for output in (1, 2)}
    assert drawn == [uniform.find_lengths(number) for number in range(400)]
    assert [len(uniform.make(n).prompt) for n in range(50)] == [prompt for prompt, _ in drawn[:50]]
    source = PromptSource(prompt_lens=(20, 30), output_lens=(4, 5))
    data = make_requests(source=source, prompt_rule="data", output_rule="data")
    assert [data.find_lengths(number) for number in range(3)] == [(20, 4), (30, 5), (20, 4)]
    mixed = make_requests(source=source, prompt_rule=40, output_rule="data")
    assert [mixed.find_lengths(number) for number in range(3)] == [(40, 4), (40, 5), (40, 4)]


def test_uniform_lengths_are_even():
    uniform = make_requests(prompt_rule=(30, 39))
    lens = [uniform.find_lengths(number)[0] for number in range(4000)]
    counts = np.bincount(lens, minlength=40)[30:]
    assert counts.min() > 330
    assert counts.max() < 470


def test_a_text_encodes_to_its_prompt_again():
    requests = make_requests(source=TEXTS)
    for number in range(8):
        request = requests.make(number)
        assert Letters().encode([request.text])[0] == list(request.prompt)


def test_a_prompt_is_an_array_of_four_bytes_a_token():
    prompt = make_requests().make(0).prompt
    assert isinstance(prompt, array)
    assert prompt.itemsize == 4
    assert all(type(token) is int for token in list(prompt))


def test_ids_that_begin_a_text_of_a_document_are_not_kept_behind_the_salt():
    """A document's own first token is replaced by that of the salt: one beginning, at the front."""
    document = np.array([1, *range(97, 97 + 60)], np.int64)
    requests = make_requests(source=PromptSource((document,), Letters()), prompt_rule=61)
    assert list(requests.make(0).prompt).count(1) == 1


def test_a_tokenizer_that_ends_every_text_ends_no_salt():
    requests = make_requests(source=PromptSource(TEXTS.documents, Letters(ends=True)))
    assert 0 not in requests.make(0).prompt
    assert requests.encode_output("abc") == [97, 98, 99]
    assert requests.encode_output("") == []


def test_without_text_prompts_are_ids_alone():
    for source in (
        PromptSource(),
        PromptSource(TEXTS.documents, WordHashTokenizer(512)),  # cannot decode
    ):
        requests = make_requests(source=source)
        assert requests.make(0).text is None
        assert requests.encode_output("abc") is None
        assert requests.most_salt_tokens == 8


def test_a_tokenizer_without_hex_digits_salts_with_ids():
    """Digits that all become the unknown token would make all salts the same."""
    letters = Letters(alphabet="abcdefghijklmnopqrstuvwxyz ")
    requests = make_requests(source=PromptSource(TEXTS.documents, letters))
    assert requests.most_salt_tokens == 8
    assert requests.make(0).prompt[:8] != requests.make(1).prompt[:8]
    assert 3 not in requests.make(0).prompt[:8]
    assert requests.make(0).text is None
    assert requests.encode_output("abc") == [97, 98, 99]


class Words:
    """A tokenizer of words that marks the first of a text as if a space were before it."""

    source, vocab, sha256, end = "words", 512, "", 0
    pieces = ("", "", "", " a", "a", " b", "b", "ab", " ab", " ")

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[1, *self._cut(f" {text}" if text else "")] for text in texts]

    def _cut(self, text: str) -> list[int]:
        ids = []
        while text:
            piece = max((one for one in self.pieces if one and text.startswith(one)), key=len)
            ids.append(self.pieces.index(piece))
            text = text[len(piece) :]
        return ids

    def decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[number] for number in ids).removeprefix(" ")


def test_an_output_is_encoded_behind_its_prompt():
    requests = make_requests(source=PromptSource(TEXTS.documents, Words()))
    assert requests.encode_output("b a") == [5, 3]  # a text that begins with it
    assert requests.encode_output("b a", "b b") == [6, 3]
    assert requests.encode_output(" b a", "a") == [5, 3]
    assert requests.encode_output("b a", "b a") is None  # "ab" is one token
    assert requests.encode_output("b", "b " * 40 + "b") == [6]  # the end of a prompt is enough


def test_an_output_is_encoded_without_what_begins_a_text():
    requests = make_requests(source=TEXTS)
    assert requests.encode_output("the") == [116, 104, 101]
    assert requests.encode_output("") == []


# What is refused before the run.


def test_prompts_need_room_for_a_salt():
    make_requests(prompt_rule=9).check()
    with pytest.raises(RequestError, match=r"8 tokens has no room .* up to 8; .* 9 tokens or more"):
        make_requests(prompt_rule=8).check()
    with pytest.raises(RequestError, match=r"5 tokens has no room for its salt"):
        make_requests(prompt_rule=(5, 100)).check()
    source = PromptSource(prompt_lens=(100, 7), output_lens=(1, 1))
    with pytest.raises(RequestError, match=r"7 tokens has no room for its salt"):
        make_requests(source=source, prompt_rule="data").check()
    make_requests(source=TEXTS, prompt_rule=20).check()
    with pytest.raises(RequestError, match=r"up to 19; ask for prompts of 20 tokens"):
        make_requests(source=TEXTS, prompt_rule=19).check()


def test_the_shortest_prompt_that_passes_can_be_made():
    for source in (PromptSource(), TEXTS):
        shortest = make_requests(source=source).most_salt_tokens + 1
        requests = make_requests(source=source, prompt_rule=shortest)
        requests.check()
        assert [len(prompt) for prompt in find_prompts(requests)] == [shortest] * 8


def test_prompts_and_outputs_must_fit_the_model():
    make_requests(prompt_rule=4000, output_rule=96).check()
    with pytest.raises(RequestError, match=r"up to 4097 tokens, more than the model's 4096"):
        make_requests(prompt_rule=4000, output_rule=97).check()
    with pytest.raises(RequestError, match=r"up to 4097 tokens"):
        make_requests(prompt_rule=(10, 4000), output_rule=(1, 97)).check()
    source = PromptSource(prompt_lens=(4000, 100), output_lens=(96, 3996))
    make_requests(source=source, prompt_rule="data", output_rule="data").check()
    with pytest.raises(RequestError, match=r"up to 4097 tokens"):
        make_requests(source=source, prompt_rule="data", output_rule=97).check()


def test_a_document_must_be_as_long_as_the_longest_prompt():
    make_requests(source=TEXTS, prompt_rule=300).check()
    with pytest.raises(RequestError, match="no document has 301 tokens, the longest has 300"):
        make_requests(source=TEXTS, prompt_rule=(30, 301)).check()


def test_the_data_s_own_lengths_need_some():
    for changes in ({"prompt_rule": "data"}, {"output_rule": "data"}):
        with pytest.raises(RequestError, match="this data has none"):
            make_requests(**changes).check()
        with pytest.raises(RequestError, match="this data has none"):
            make_requests(**changes).find_lengths(0)


def test_a_vocabulary_must_have_ids_for_salts():
    make_requests(vocab=4, prompt_rule=65).check()
    with pytest.raises(RequestError, match=r"question\.model\.vocab=3 is too small"):
        make_requests(vocab=3, prompt_rule=65).check()


# Which answers are checked.


def test_a_tenth_of_the_answers_is_checked_that_nobody_knows_before():
    requests = make_requests()
    order = requests.order_checked(1000)
    assert sorted(order) == list(range(1000))
    assert order == requests.order_checked(1000)
    assert order != replace(requests, salt=OTHER_SALT).order_checked(1000)
    assert order != replace(requests, seed=2).order_checked(1000)
    assert [count_checked(sent) for sent in (0, 1, 10, 11, 64, 1000)] == [0, 1, 1, 2, 7, 100]
    assert len(replace(requests, salt="").order_checked(5)) == 5


def test_the_prefill_of_requests_is_counted():
    counter = RequestCounter(make_requests(prompt_rule=(30, 33)), "closed")
    lens = [counter.requests.find_lengths(number)[0] for number in range(8)]
    counts = counter.count_expected(None)[0]
    assert counts["tokens"] == sum(lens)
    assert counts["pairs"] == sum(n * (n + 1) // 2 for n in lens)
    assert (counts["samples"], counts["square"]) == (8, sum(n * n for n in lens))
    assert counter.count([2, 3])["tokens"] == lens[2] + lens[3]
    many = RequestCounter(make_requests(count=5000), "closed").count_expected(None)[0]
    assert many["samples"] == 1000
