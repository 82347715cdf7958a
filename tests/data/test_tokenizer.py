"""Test tokenizers: ids as published, the same vocabulary from two kinds of file, the order of
search, and refusals of invalid files.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken
from tokenizers import Tokenizer as Inner
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.processors import TemplateProcessing

from fixtures.golden import golden
from fixtures.vocabularies import TEXTS, get_load_error, load_gpt2
from steelyard.data import tokenizer
from steelyard.data.tokenizer import JsonTokenizer, SentencePieceTokenizer, WordHashTokenizer
from steelyard.errors import RequestError
from steelyard.tasks import questions
from steelyard.tasks.mmlu import data
from steelyard.tasks.questions import GeneratedQuestionsConfig


@pytest.fixture(scope="module")
def llama_json(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer.json made of Llama's SentencePiece model: its pieces, and as merges every
    pair of pieces that makes a piece, in the order of its score.
    """
    sentencepiece_model: Any = sentencepiece.SentencePieceProcessor(
        model_file=str(data_dir / "tokenizers" / "llama" / "tokenizer.model")
    )
    ids = {
        sentencepiece_model.id_to_piece(token): token
        for token in range(sentencepiece_model.get_piece_size())
    }
    pairs = [
        (
            (-sentencepiece_model.get_score(token), ids[piece[:cut]], ids[piece[cut:]]),
            (piece[:cut], piece[cut:]),
        )
        for piece, token in ids.items()
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    merges = [pair for _, pair in sorted(pairs)]
    json_tokenizer = Inner(BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    json_tokenizer.add_special_tokens(
        [AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")]
    )
    json_tokenizer.normalizer = Normalizers([Prepend("▁"), Replace(" ", "▁")])
    json_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    path = tmp_path_factory.mktemp("llama") / "tokenizer.json"
    json_tokenizer.save(str(path))
    return path


def test_the_word_hash_tokenizer_by_hand() -> None:
    hash_tokenizer = WordHashTokenizer(512)
    ids = hash_tokenizer.encode(["Answer: B", "Answer:", " A B C D", "A", ""])
    assert ids[0] == [1, *ids[1][1:], 3]
    assert len(ids[1]) == 3  # begin token, "Answer", ":"
    assert ids[2] == [1, 2, 3, 4, 5]
    expected = 6 + int.from_bytes(hashlib.sha256(b"A").digest()[:4], "big") % 506
    assert ids[3] == [1, expected]
    assert ids[4] == [1]
    assert questions.find_answer_tokens(hash_tokenizer) == [2, 3, 4, 5]
    assert hash_tokenizer.end == 0  # no text has it: 1 begins, 2-5 are letters, words from 6 on


def test_word_hash_ids_stay_in_the_vocabulary_and_off_the_answer_letters() -> None:
    subjects = questions.generate_questions(
        "mmlu", GeneratedQuestionsConfig(subjects=4, questions=12), 5
    )
    texts = [
        questions.format_prompt(subject, row, 5) for subject in subjects for row in subject.test
    ]
    for vocab in (7, 64, 512):
        encoded = WordHashTokenizer(vocab).encode(texts)
        assert all(1 <= token < vocab for row in encoded for token in row)
        for text, row in zip(texts, encoded, strict=True):
            assert sum(2 <= token <= 5 for token in row) == 5  # the answers of the five examples
            assert row.count(1) == 1, text


def test_word_hash_vocabularies_of_other_sizes_have_other_digests() -> None:
    assert WordHashTokenizer(512).sha256 == hashlib.sha256(b"made-1:512").hexdigest()
    assert WordHashTokenizer(512).sha256 != WordHashTokenizer(513).sha256


@pytest.mark.parametrize("vocab", [1, 5, 6])
def test_a_word_hash_vocabulary_below_seven_is_refused(vocab: int) -> None:
    with pytest.raises(RequestError) as error:
        WordHashTokenizer(vocab)
    assert str(error.value) == golden("question-model-vocab-has-no-room", vocab)


def test_the_llama_tokenizer_gives_the_published_ids(data_dir: Path) -> None:
    loaded = tokenizer.load_tokenizer([data_dir / "tokenizers" / "llama" / "tokenizer.model"])
    assert isinstance(loaded, SentencePieceTokenizer)
    assert (loaded.source, loaded.vocab) == ("tokenizer.model", 32000)
    assert loaded.encode(["Hello world", ""]) == [[1, 15043, 3186], [1]]
    assert loaded.end == 2
    assert questions.find_answer_tokens(loaded) == [319, 350, 315, 360]


def test_llama_is_the_same_from_tokenizer_model_and_tokenizer_json(
    data_dir: Path, llama_json: Path
) -> None:
    from_model = tokenizer.load_tokenizer([data_dir / "tokenizers" / "llama"])
    from_json = tokenizer.load_tokenizer([llama_json])
    assert isinstance(from_json, JsonTokenizer)
    assert (from_model.vocab, from_model.sha256) == (from_json.vocab, from_json.sha256)
    texts = TEXTS[:-1]  # "Prepend" leaves an empty text empty
    assert from_model.encode(texts) == from_json.encode(texts)
    subject = data.read_subjects(data_dir / "mmlu" / "mmlu_data.tar.gz")[7]
    prompts = [questions.format_prompt(subject, row, 5) for row in subject.test[:20]]
    assert from_model.encode(prompts) == from_json.encode(prompts)
    assert questions.find_answer_tokens(from_json) == [319, 350, 315, 360]


def test_byte_level_answers_have_a_leading_space(data_dir: Path, tmp_path: Path) -> None:
    gpt2_tokenizer = load_gpt2(data_dir)
    gpt2_tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = tokenizer.load_tokenizer([tmp_path])
    assert (loaded.source, loaded.vocab) == ("tokenizer.json", 50257)
    assert loaded.encode(["Hello world"]) == [[15496, 995]]
    pieces = json.loads((data_dir / "tokenizers" / "gpt2" / "vocab.json").read_text())
    assert (
        questions.find_answer_tokens(loaded)
        == [pieces[f"Ġ{letter}"] for letter in "ABCD"]
        == [317, 347, 327, 360]
    )
    in_order = sorted(pieces, key=lambda piece: pieces[piece])
    assert loaded.sha256 == hashlib.sha256(json.dumps(in_order).encode()).hexdigest()


def test_padding_and_truncation_settings_are_ignored(data_dir: Path, tmp_path: Path) -> None:
    gpt2_tokenizer = load_gpt2(data_dir)
    gpt2_tokenizer.enable_padding(length=9)
    gpt2_tokenizer.enable_truncation(3)
    gpt2_tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["truncation"]["max_length"] == 3
    assert tokenizer.load_tokenizer([tmp_path]).encode(["Hello world", " A B C D"]) == [
        [15496, 995],
        [317, 347, 327, 360],
    ]


def test_added_tokens_count_as_vocabulary(data_dir: Path, tmp_path: Path) -> None:
    gpt2_tokenizer = load_gpt2(data_dir)
    gpt2_tokenizer.add_tokens(["<one more>"])
    gpt2_tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = tokenizer.load_tokenizer([tmp_path])
    assert loaded.vocab == 50258
    assert loaded.encode(["<one more>"]) == [[50257]]


@pytest.mark.parametrize("size", [31000 + 1 - 1024, 30000, 31000])
def test_a_vocabulary_up_to_1023_smaller_than_the_models_is_accepted(size: int) -> None:
    tokenizer.check_vocabulary_size(WordHashTokenizer(size), 31000)


@pytest.mark.parametrize(
    ("size", "vocab", "allowed"),
    [(31001, 31000, "29977 to 31000"), (29976, 31000, "29977 to 31000"), (513, 512, "1 to 512")],
)
def test_a_vocabulary_that_does_not_fit_the_model_is_refused(
    size: int, vocab: int, allowed: str
) -> None:
    with pytest.raises(RequestError) as error:
        tokenizer.check_vocabulary_size(WordHashTokenizer(size), vocab)
    assert str(error.value) == (golden("tokenizer-made-has-tokens-and-the", size, vocab, allowed))


def test_folders_and_file_names_are_searched_in_order(data_dir: Path, tmp_path: Path) -> None:
    """Folders are searched in order; in each tokenizer.json comes first, then tokenizer.model, then
    the folder tokenizer/.
    """
    model = (data_dir / "tokenizers" / "llama" / "tokenizer.model").read_bytes()
    empty, nested, both_files, named_file = (
        tmp_path / name for name in ("empty", "nested", "both", "my-own.json")
    )
    for folder in (empty, nested / "tokenizer", both_files):
        folder.mkdir(parents=True)
    (nested / "tokenizer" / "tokenizer.model").write_bytes(model)
    (both_files / "tokenizer.model").write_bytes(model)
    load_gpt2(data_dir).save(str(both_files / "tokenizer.json"))
    load_gpt2(data_dir).save(str(named_file))
    archive = tmp_path / "data.tar"
    archive.write_bytes(b"")
    assert (
        tokenizer.load_tokenizer([tmp_path / "absent", empty, archive, nested, both_files]).vocab
        == 32000
    )
    assert tokenizer.load_tokenizer([empty, both_files, nested]).vocab == 50257
    assert tokenizer.load_tokenizer([both_files / "tokenizer.model", both_files]).vocab == 32000
    assert tokenizer.load_tokenizer([named_file]).source == "my-own.json"
    (nested / "tokenizer.json").write_bytes((both_files / "tokenizer.json").read_bytes())
    assert tokenizer.load_tokenizer([nested]).vocab == 50257


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    advice = (
        "put tokenizer.json, tokenizer.model, vocab.json with merges.txt, or vocab.txt beside the"
        " weights or the data, or name it with --tokenizer"
    )
    assert get_load_error() == f"no tokenizer found (looked in: no folder); {advice}"
    other_file = tmp_path / "notes.md"
    other_file.write_text("x")
    assert (
        get_load_error(tmp_path, other_file)
        == f"no tokenizer found (looked in: {tmp_path}, {other_file}); {advice}"
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a tokenizer.json: EOF while parsing a value at line 1 column 0"),
        (b"\xff\xfe\x00", "not a tokenizer.json: stream did not contain valid UTF-8"),
        (b'{"a":\n', "not a tokenizer.json: "),
        (b"[1, 2]", "not a tokenizer.json: "),
        (b"[" * 100_000, "not a tokenizer.json: "),
        (
            b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}',
            "a tokenizer.json without tokens",
        ),
        (
            (
                b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a",'
                b' "b"]]}}'
            ),
            "not a tokenizer.json: ",
        ),
    ],
)
def test_an_invalid_tokenizer_json_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    assert get_load_error(tmp_path).startswith(f"{path}: {reason}")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe" * 100, b"hello\nworld" * 50, b"{}"])
def test_an_invalid_sentencepiece_model_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    assert get_load_error(tmp_path).startswith(f"{path}: not a SentencePiece model: ")


def test_a_truncated_sentencepiece_model_is_refused(data_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes((data_dir / "tokenizers" / "llama" / "tokenizer.model").read_bytes()[:400_000])
    assert get_load_error(tmp_path).startswith(f"{path}: not a SentencePiece model: ")


def test_a_git_lfs_pointer_is_refused(tmp_path: Path) -> None:
    """A clone without Git LFS leaves such a file."""
    path = tmp_path / "tokenizer.model"
    path.write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:9e556afd\nsize 499723\n"
    )
    assert get_load_error(tmp_path).startswith(f"{path}: not a SentencePiece model: ")


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate((256 << 20) + 1)
    assert get_load_error(tmp_path) == f"{path}: 268435457 bytes; the limit is 268435456"


def test_a_sentencepiece_model_may_have_no_end_token(tmp_path: Path) -> None:
    texts = (f"the lake holds {number} stones" for number in range(200))
    trainer: Any = sentencepiece.SentencePieceTrainer
    trainer.train(
        sentence_iterator=texts,
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=40,
        eos_id=-1,
        minloglevel=2,
        num_threads=1,
    )
    assert tokenizer.load_tokenizer([tmp_path]).end is None


@pytest.mark.parametrize(
    ("config", "end"),
    [
        (None, None),
        ({}, None),
        ({"eos_token": None}, None),
        ({"eos_token": "<|endoftext|>"}, 50256),
        ({"eos_token": {"content": "<|endoftext|>", "lstrip": False}}, 50256),
        ({"eos_token": "no such token"}, None),
    ],
)
def test_the_end_token_of_a_tokenizer_json_is_named_by_its_config(
    config: Any, end: int | None, data_dir: Path, tmp_path: Path
) -> None:
    load_gpt2(data_dir).save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer.load_tokenizer([tmp_path]).end == end


EOS_FORMAT = "allowed: a string, or a table with a string as content"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b'{"eos_token": ', "not JSON: Expecting value: line 1 column 15 (char 14)"),
        (
            b'{"eos_token": "\xff"}',
            "not UTF-8: 'utf-8' codec can't decode byte 0xff in position 15: invalid start byte",
        ),
        (b"[" * 100_000, "not JSON: maximum recursion depth exceeded"),
        (b"[1]", "[1]; a tokenizer_config.json is a table; repair or remove it"),
        (b'{"eos_token": 2}', f"eos_token is 2; {EOS_FORMAT}"),
        (b'{"eos_token": ["a"]}', f"eos_token is ['a']; {EOS_FORMAT}"),
        (b'{"eos_token": {"content": 2}}', f"eos_token is {{'content': 2}}; {EOS_FORMAT}"),
        (b'{"eos_token": {}}', f"eos_token is {{}}; {EOS_FORMAT}"),
        (
            b'{"eos_token": ' + b"[" * 900 + b"]" * 900 + b"}",
            f"eos_token is [[[[[[[...]]]]]]]; {EOS_FORMAT}",
        ),
        (b" " * ((16 << 20) + 1), "16777217 bytes; the limit is 16777216"),
    ],
)
def test_an_invalid_tokenizer_config_is_refused(
    content: bytes, reason: str, data_dir: Path, tmp_path: Path
) -> None:
    load_gpt2(data_dir).save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "tokenizer_config.json"
    path.write_bytes(content)
    assert get_load_error(tmp_path).startswith(f"{path}: {reason}")


def test_the_end_token_of_smollm2(smollm2: Path) -> None:
    loaded = tokenizer.load_tokenizer([smollm2])
    assert (loaded.source, loaded.end) == ("tokenizer.json", 2)
    assert loaded.encode(["<|im_end|>"]) == [[2]]
