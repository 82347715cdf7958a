"""Tests of the sources of prompts: seeded ids, texts, ShareGPT's file, traces; and hostile ones."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.data.prompts import PromptRequests
from steelyard.data.token_files import write_token_files
from steelyard.errors import RequestError
from steelyard.tasks.generate.data import check_source, prepare
from steelyard.tasks.generate.task import GenerateData, find_longest
from steelyard.tasks.task import PreparedData, Sources, TaskRequest

SALT = "00112233445566778899aabbccddeeff"
WORDS = [f"w{number}" for number in range(100)]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a tokenizer of hex digits and of the words w0 to w99, with ids of their own."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    letters = [f"{digit}" for digit in "0123456789abcdef"]
    pieces = ["<unk>", *letters, *(f"{word}" for word in WORDS), "▁"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    inner = Tokenizer(models.WordPiece(vocab, unk_token="<unk>", continuing_subword_prefix=""))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.pre_tokenizer = pre_tokenizers.Split("▁", "isolated")
    inner.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")])
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    inner.save(str(path))
    return path


def ask(data: Path | None, tokenizer: Path | None = None, **changes: Any) -> PreparedData:
    """Read the source of prompts that `changes` of the case describe."""
    fields: dict[str, Any] = {
        "kind": "generate",
        "source": "texts",
        "prompt_tokens": 48,
        "output_tokens": 8,
    }
    own = {key: value for key, value in changes.items() if key in GenerateData.model_fields}
    others = {key: value for key, value in changes.items() if key not in own}
    request = TaskRequest(
        **{
            "data": GenerateData(**(fields | own)),
            "vocab": 512,
            "positions": 512,
            "division": "closed",
            "seed": 1,
            "length": 0,
            "batch": 0,
            "sample": None,
            "sources": Sources(data, tokenizer, None),
            "requests": 5,
            "salt": SALT,
            **others,
        }
    )
    return prepare(request)


def write_lines(path: Path, *rows: Any) -> Path:
    """Write rows as JSON lines, a text as it is, and return the path."""
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def make_text(length: int, first: int = 0) -> str:
    """Return a text of so many words, which are as many tokens as there are words and blanks."""
    return " ".join(WORDS[(first + i) % 100] for i in range(length))


# Seeded ids.


def test_seeded_ids_need_no_data():
    prepared = ask(None, source="ids")
    requests: PromptRequests = prepared.inputs
    assert (requests.count, requests.source.documents, requests.source.tokenizer) == (5, (), None)
    assert (prepared.facts.source, prepared.facts.rows) == ("made", 5)
    assert (prepared.facts.tokenizer, prepared.facts.published) == (None, None)
    assert prepared.outputs.passes == {}
    assert len(requests.make(4).prompt) == 48


def test_the_fingerprint_of_seeded_ids_is_that_of_seed_and_vocabulary():
    ours = ask(None, source="ids").facts.fingerprint
    assert ours == ask(None, source="ids", salt="", requests=9).facts.fingerprint
    assert ours != ask(None, source="ids", seed=2).facts.fingerprint
    assert ours != ask(None, source="ids", vocab=511).facts.fingerprint


def test_seeded_ids_take_no_data(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "w1"})
    with pytest.raises(RequestError, match=r"seeded token ids; leave --data out"):
        ask(path, source="ids")


def test_a_sample_is_how_many_requests_are_sent():
    assert ask(None, source="ids", sample=3).inputs.count == 3


def test_prompts_without_room_for_a_salt_are_refused_before_the_run():
    with pytest.raises(RequestError, match=r"a prompt of 4 tokens has no room for its salt"):
        ask(None, source="ids", prompt_tokens=4)


# Texts.


def test_generated_texts_are_the_same_in_every_run():
    prepared = ask(None)
    assert (prepared.facts.source, prepared.facts.rows) == ("made", 16)
    assert prepared.facts.tokenizer.source == "made"
    assert prepared.facts.fingerprint == ask(None, salt="").facts.fingerprint
    assert prepared.facts.fingerprint != ask(None, seed=2).facts.fingerprint
    assert prepared.inputs.make(0).text is None


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_texts_are_lines_of_a_file(tmp_path, words, name):
    rows = [{"text": make_text(60, first)} for first in (0, 7)] + [{"text": "w5 w6"}]
    content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    prepared = ask(path, words, vocab=118)
    requests: PromptRequests = prepared.inputs
    assert [len(document) for document in requests.source.documents] == [119, 119]
    assert (prepared.facts.source, prepared.facts.rows) == (name, 2)
    # words are ids 17 and on, blanks the last id
    assert requests.source.documents[1].tolist()[:4] == [24, 117, 25, 117]
    request = requests.make(0)
    assert len(request.prompt) == 48
    assert f" {request.text.split(' ', 1)[1]} "[20:40] in f" {make_text(60)} {make_text(60, 7)} "


def test_the_fingerprint_of_texts_is_that_of_all_documents(tmp_path, words):
    """Too short ones are no prompts, and part of the data all the same."""
    long, short = {"text": make_text(60)}, {"text": "w5 w6"}
    path = write_lines(tmp_path / "a.jsonl", long, short)
    ours = ask(path, words, vocab=118).facts.fingerprint
    assert ours == ask(path, words, vocab=118, salt="", prompt_tokens=40).facts.fingerprint
    assert ours != ask(write_lines(path, long), words, vocab=118).facts.fingerprint
    assert ours != ask(write_lines(path, short, long), words, vocab=118).facts.fingerprint


def test_the_first_thousand_documents_are_read(tmp_path, words):
    rows = [{"text": make_text(30)}] * 1000
    path = write_lines(tmp_path / "a.jsonl", *rows, "never read")
    assert ask(path, words, vocab=118).facts.rows == 1000


def test_whole_documents_have_their_own_lengths(tmp_path, words):
    rows = [{"text": make_text(length)} for length in (10, 20, 30, 300)]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    requests: PromptRequests = ask(path, words, vocab=118, prompt_tokens="data").inputs
    # 10 words have no room for a salt, 300 none for an output
    assert requests.source.prompt_lens == (39, 59)
    assert [requests.find_lengths(number) for number in range(3)] == [(39, 8), (59, 8), (39, 8)]
    assert [len(requests.make(number).prompt) for number in range(3)] == [39, 59, 39]


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([{"text": 5}], r"line 1: text is 5; a line is"),
        ([{"body": "w1"}], r"line 1: text is None"),
        ([["text"]], r"line 1: text is None"),
        (["{"], r"line 1"),
        ([{"text": "w1 w2"}], r"none of the first 1 documents has at least 48 tokens"),
        ([], r"none of the first 0 documents|no rows|empty"),
    ],
)
def test_files_without_texts_are_refused(tmp_path, words, rows, match):
    with pytest.raises(RequestError, match=match):
        ask(write_lines(tmp_path / "a.jsonl", *rows), words, vocab=118)


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path, words):
    path = write_lines(tmp_path / "a.jsonl", {"text": make_text(100)})
    with pytest.raises(RequestError, match=r"tokenizer.* tokens and the model"):
        ask(path, words, vocab=100)


def test_token_files_are_documents_too(tmp_path):
    rows = [[1, *range(20, 90)], [1, *range(30, 40)]]
    documents = write_lines(tmp_path / "a.jsonl", *({"text": str(row)} for row in rows))
    write_token_files([documents], RowTokenizer(), tmp_path / "corpus")
    prepared = ask(tmp_path / "corpus")
    assert [row.tolist() for row in prepared.inputs.source.documents] == [[*rows[0], 0]]
    assert (prepared.inputs.source.tokenizer, prepared.inputs.make(0).text) == (None, None)


class RowTokenizer:
    """A tokenizer of texts that are lists of ids."""

    source, vocab, sha256, end = "rows", 512, "0" * 64, 0

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [json.loads(text) for text in texts]


def test_a_source_is_json_or_token_files(tmp_path):
    check_source(write_lines(tmp_path / "a.jsonl", "anything"))
    for name in ("a.txt", "missing.jsonl"):
        path = tmp_path / name
        if not name.startswith("missing"):
            path.write_text("text")
        with pytest.raises(RequestError):
            check_source(path)


# ShareGPT's file.


def write_chats(path: Path, *turns: tuple[Any, ...]) -> Path:
    """Write a file of conversations as ShareGPT's has them."""
    rows = [
        {"id": str(number), "conversations": [{"from": "human", "value": text} for text in texts]}
        for number, texts in enumerate(turns)
    ]
    path.write_text(json.dumps(rows))
    return path


def test_a_conversation_gives_prompt_and_length_of_the_output(tmp_path, words):
    path = write_chats(
        tmp_path / "chats.json",
        (make_text(20), make_text(5, 3)),
        (make_text(25), make_text(6), "w1", "w2"),  # the first two turns count
        (make_text(30),),  # one turn
        (make_text(18), make_text(9)),  # 35 tokens have no room for a salt
        (make_text(20), "w1"),  # an answer of one token
        (make_text(30), make_text(240)),  # too long for the model
        ("", make_text(9)),
        (None, make_text(9)),
    )
    prepared = ask(
        path, words, vocab=118, source="sharegpt", prompt_tokens="data", output_tokens="data"
    )
    requests: PromptRequests = prepared.inputs
    assert requests.source.prompt_lens == (39, 49)
    assert requests.source.output_lens == (9, 11)
    assert (prepared.facts.source, prepared.facts.rows) == ("chats.json", 2)
    assert [requests.find_lengths(number) for number in range(3)] == [(39, 9), (49, 11), (39, 9)]
    rest = requests.make(1).prompt[requests.most_salt_tokens :]
    assert list(rest) == requests.source.documents[1].tolist()[requests.most_salt_tokens :]


def test_lengths_of_a_chat_are_limited_as_the_field_does(tmp_path, words):
    path = write_chats(
        tmp_path / "chats.json",
        (make_text(512), make_text(513)),  # 1,023 and 1,025 tokens: the most
        (make_text(513), make_text(9)),  # 1,025 tokens
        (make_text(512), make_text(514)),  # 2,050 together
    )
    own = {"source": "sharegpt", "prompt_tokens": "data", "output_tokens": "data"}
    requests = ask(path, words, vocab=118, positions=4096, **own).inputs
    assert (requests.source.prompt_lens, requests.source.output_lens) == ((1023,), (1025,))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", "no conversations of two turns"),
        ("[]", "no conversations of two turns"),
        ('[1, null, {"conversations": {}}, {"conversations": [1, 2]}]', "no conversations"),
        ('[{"conversations": [{"value": 1}, {"value": "w1"}]}]', "no conversations"),
        ('[{"conversations": [{"value": "w1"}, {"value": "w1"}]}]', "no conversation fits"),
    ],
)
def test_hostile_files_of_chats_are_refused(tmp_path, words, text, match):
    path = tmp_path / "chats.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=match):
        ask(path, words, vocab=118, source="sharegpt", prompt_tokens="data", output_tokens=4)


def test_chats_and_traces_need_a_file():
    for source, match in (("sharegpt", "ShareGPT's JSON file"), ("trace", "a trace")):
        with pytest.raises(RequestError, match=f"come from {match}: name it with --data"):
            ask(None, source=source)


def test_chats_of_prompts_that_are_too_long_for_the_case_are_refused(tmp_path, words):
    path = write_chats(tmp_path / "chats.json", (make_text(20), make_text(5)))
    with pytest.raises(RequestError, match="no document has 48 tokens, the longest has 39"):
        ask(path, words, vocab=118, source="sharegpt", output_tokens="data")


# Traces.

TRACE = {"source": "trace", "prompt_tokens": "data", "output_tokens": "data"}


def test_a_trace_has_lengths_and_arrivals(tmp_path):
    path = write_lines(
        tmp_path / "trace.jsonl",
        {"prompt_tokens": 20, "output_tokens": 4, "arrival_s": 100.5},
        {"prompt_tokens": 30, "output_tokens": 5, "arrival_s": 100.5},
        {"prompt_tokens": 40, "output_tokens": 6, "arrival_s": 103},
    )
    prepared = ask(path, **TRACE)
    source = prepared.inputs.source
    assert (source.prompt_lens, source.output_lens) == ((20, 30, 40), (4, 5, 6))
    assert source.arrivals_s == (0, 0, 2.5)  # since the first
    assert (source.documents, source.tokenizer) == ((), None)
    assert (prepared.facts.source, prepared.facts.rows) == ("trace.jsonl", 3)
    assert [len(prepared.inputs.make(number).prompt) for number in range(4)] == [20, 30, 40, 20]
    later = write_lines(
        tmp_path / "later.jsonl",
        {"prompt_tokens": 20, "output_tokens": 4, "arrival_s": 0},
        {"prompt_tokens": 30, "output_tokens": 5, "arrival_s": 0},
        {"prompt_tokens": 40, "output_tokens": 6, "arrival_s": 2.5},
    )
    assert ask(later, **TRACE).facts.fingerprint == prepared.facts.fingerprint
    assert ask(later, **TRACE, seed=2).inputs.make(0).prompt != prepared.inputs.make(0).prompt


def test_a_published_trace_has_milliseconds_and_other_names(tmp_path):
    path = write_lines(
        tmp_path / "trace.jsonl",
        {"timestamp": 27_000, "input_length": 20, "output_length": 4, "hash_ids": [1, 2]},
        {"timestamp": 27_250, "input_length": 30, "output_length": 5, "hash_ids": [1]},
    )
    source = ask(path, **TRACE).inputs.source
    assert source.arrivals_s == (0, 0.25)
    assert (source.prompt_lens, source.output_lens) == ((20, 30), (4, 5))


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([], "an empty trace"),
        ([{"prompt_tokens": 20, "output_tokens": 4}], "line 1: no time of arrival"),
        ([{"output_tokens": 4, "arrival_s": 0}], "line 1: lengths must be whole numbers"),
        ([{"prompt_tokens": 20.0, "output_tokens": 4, "arrival_s": 0}], "whole numbers"),
        ([{"prompt_tokens": True, "output_tokens": 4, "arrival_s": 0}], "whole numbers"),
        ([{"prompt_tokens": 0, "output_tokens": 4, "arrival_s": 0}], "whole numbers"),
        ([{"prompt_tokens": 20, "output_tokens": -4, "arrival_s": 0}], "whole numbers"),
        ([{"prompt_tokens": 510, "output_tokens": 3, "arrival_s": 0}], "more than the model's 512"),
        ([{"prompt_tokens": 10**400, "output_tokens": 3, "arrival_s": 0}], "more than the model's"),
        ([{"prompt_tokens": 20, "output_tokens": 4, "arrival_s": "0"}], "no time of arrival"),
        ([{"prompt_tokens": 20, "output_tokens": 4, "arrival_s": True}], "no time of arrival"),
        ([{"prompt_tokens": 20, "output_tokens": 4, "arrival_s": -1}], "no time of arrival"),
        ([{"prompt_tokens": 20, "output_tokens": 4, "arrival_s": 10**400}], "no time of arrival"),
        (['{"prompt_tokens": 20, "output_tokens": 4, "arrival_s": NaN}'], "line 1"),
        (['{"prompt_tokens": 20, "output_tokens": 4, "arrival_s": 1e999}'], "line 1"),
        (["[20, 4, 0]"], "whole numbers"),
        (["{"], "line 1"),
        (
            [
                {"prompt_tokens": 20, "output_tokens": 4, "arrival_s": 2},
                {"prompt_tokens": 20, "output_tokens": 4, "arrival_s": 1},
            ],
            "line 2: arrives before the line above; sort the trace",
        ),
        ([{"prompt_tokens": 3, "output_tokens": 4, "arrival_s": 0}], "no room for its salt"),
    ],
)
def test_hostile_traces_are_refused(tmp_path, rows, match):
    with pytest.raises(RequestError, match=match):
        ask(write_lines(tmp_path / "trace.jsonl", *rows), **TRACE)


def test_a_trace_is_no_longer_than_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr("steelyard.tasks.generate.data.MAX_TRACE_ROWS", 2)
    row = {"prompt_tokens": 20, "output_tokens": 4, "arrival_s": 0}
    assert ask(write_lines(tmp_path / "trace.jsonl", row, row), **TRACE).facts.rows == 2
    with pytest.raises(RequestError, match="a trace of more than 2 lines"):
        ask(write_lines(tmp_path / "trace.jsonl", row, row, row), **TRACE)


# The fields of the case.


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"source": "ids", "prompt_tokens": "data"}, "prompts of source 'ids' have none"),
        ({"source": "ids", "output_tokens": "data"}, "prompts of source 'ids' have none"),
        ({"source": "texts", "output_tokens": "data"}, "prompts of source 'texts' have none"),
        ({"prompt_tokens": (20, 10)}, "two bounds"),
        ({"prompt_tokens": 0}, "a number of tokens"),
        ({"output_tokens": (0, 4)}, "two bounds"),
        ({"output_tokens": 1 << 25}, "a number of tokens"),
        ({"prompt_tokens": "any"}, "two bounds such as"),
        ({"lengths": "some"}, "exact"),
    ],
)
def test_lengths_that_are_none_are_refused(fields, match):
    plain = {"kind": "generate", "source": "texts", "prompt_tokens": 48, "output_tokens": 8}
    with pytest.raises(ValueError, match=match):
        GenerateData(**(plain | fields))


def test_the_longest_of_a_case_is_known_unless_the_data_decide():
    plain = {"kind": "generate", "source": "trace"}
    assert find_longest(GenerateData(**plain, prompt_tokens=48, output_tokens=8)) == 56
    assert find_longest(GenerateData(**plain, prompt_tokens=(4, 50), output_tokens=(1, 9))) == 59
    assert find_longest(GenerateData(**plain, prompt_tokens=48, output_tokens="data")) is None
