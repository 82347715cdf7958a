"""Test prompts from 1,000 documents of the real OpenWebText with the real Llama tokenizer."""

from pathlib import Path

import pytest

from steelyard.data.prompts import PromptRequests
from steelyard.tasks.generate.data import prepare
from steelyard.tasks.generate.task import GenerateData
from steelyard.tasks.task import Sources, TaskRequest

SALT, OTHER_SALT = "00112233445566778899aabbccddeeff", "ffeeddccbbaa99887766554433221100"


@pytest.fixture(scope="module")
def requests(data_dir: Path) -> PromptRequests:
    """The requests of case llama2-7b-generate, of a run with a known salt."""
    return prepare(
        TaskRequest(
            data=GenerateData(
                kind="generate", source="texts", prompt_tokens=1024, output_tokens=256
            ),
            vocab=32000,
            positions=4096,
            division="closed",
            seed=1,
            length=0,
            batch=0,
            sample=None,
            sources=Sources(
                data_dir / "openwebtext" / "openwebtext-1000.jsonl.gz",
                data_dir / "tokenizers" / "llama" / "tokenizer.model",
                None,
            ),
            requests=160,
            salt=SALT,
        )
    ).inputs


def test_real_prompts_are_contiguous_runs_of_1024_tokens(requests: PromptRequests) -> None:
    wholes = [document.astype("<i4").tobytes() for document in requests.source.documents]
    assert all(len(document) >= 1024 for document in requests.source.documents)
    assert len(wholes) == 392
    prompts = [requests.make(number) for number in range(160)]
    salts = set()
    for request in prompts:
        assert len(request.prompt) == 1024
        salt = requests._make_salt("run", request.number)
        assert list(request.prompt[: len(salt)]) == salt
        assert 12 <= len(salt) <= requests.most_salt_tokens == 19
        assert salt[0] == 1  # the beginning of a text, which is nowhere else
        assert list(request.prompt).count(1) == 1
        rest = request.prompt[len(salt) :].tobytes()
        # a run of whole tokens of four bytes, so that the offset is a multiple of four
        assert any(whole.find(rest) % 4 == 0 for whole in wholes if rest in whole)
        salts.add(tuple(salt))
    assert len(salts) == 160


def test_the_text_of_a_real_prompt_encodes_to_about_the_prompt(requests: PromptRequests) -> None:
    lens = []
    for number in range(40):
        request = requests.make(number)
        assert request.text is not None
        lens.append(len(requests.source.tokenizer.encode([request.text])[0]))
        assert int(request.text[:16], 16) >= 0  # the salt is in the text, whole
    assert max(abs(length - 1024) for length in lens) <= 10
    assert sum(lens) / len(lens) == pytest.approx(1024, abs=3)


def test_a_real_output_encodes_to_its_ids_again(requests: PromptRequests) -> None:
    same = 0
    for number in range(40):
        text = requests.source.tokenizer.decode(requests.source.documents[number][1:257].tolist())
        ids = requests.encode_output(text)
        assert abs(len(ids) - 256) <= 3
        same += ids == requests.source.documents[number][1:257].tolist()
    assert same >= 35
