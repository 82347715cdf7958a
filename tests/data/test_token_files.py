"""Test turning texts into token files, and the commands `data pack` and `data inspect`."""

import gzip
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.console

from fixtures.commands import Shell, wait_for, wait_for_result
from fixtures.golden import golden
from steelyard import cli
from steelyard.data import token_files as module
from steelyard.data import tokenizer
from steelyard.data.corpus import Corpus, fingerprint_corpus, open_corpus
from steelyard.data.token_files import CorpusSplit, TokenFiles, inspect_corpus, write_token_files
from steelyard.data.tokenizer import WordHashTokenizer
from steelyard.errors import LostError, RequestError

TOKENIZER = WordHashTokenizer(512)
TEXTS = ["one two", "three, four", "five\nsix \u20ac"]

RunCommand = Callable[..., tuple[int, str, str]]


class NoEndTokenizer(WordHashTokenizer):
    """A tokenizer that has no end token."""

    @property
    def end(self) -> Any:
        return None


class EndAddingTokenizer(WordHashTokenizer):
    """A tokenizer that appends its end token to every text."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[*ids, self.end] for ids in super().encode(texts)]


def write_lines(path: Path, texts: list[str], key: str = "text") -> Path:
    """Write texts as JSON lines under `key`, compressed if the name ends in .gz, and return the
    path.
    """
    content = "".join(json.dumps({"meta": [1], key: text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def list_documents(corpus: Corpus) -> list[list[int]]:
    """Return the tokens of each document."""
    return [part.tolist() for part in np.split(corpus.ids, corpus.ends[:-1])]


def list_names(folder: Path) -> list[str]:
    """Return the sorted file names of a folder."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_token_files_hold_the_encoded_documents(tmp_path: Path, name: str) -> None:
    progress: list[tuple[int, int]] = []
    source = write_lines(tmp_path / name, TEXTS)
    token_files = write_token_files(
        [source],
        TOKENIZER,
        tmp_path / "c",
        watch=lambda done, total: progress.append((done, total)),
    )
    corpus = open_corpus(tmp_path / "c")
    expected = [[*ids, TOKENIZER.end] for ids in TOKENIZER.encode(TEXTS)]
    assert list_documents(corpus) == expected
    sizes = [
        (f"c{suffix}", (tmp_path / f"c{suffix}").stat().st_size)
        for suffix in ("_ids.npy", "_idx.npz")
    ]
    assert token_files == TokenFiles(
        3, sum(map(len, expected)), 0, sizes, fingerprint_corpus(corpus, None)
    )
    assert progress == [(source.stat().st_size,) * 2]
    ids, index = np.load(tmp_path / "c_ids.npy"), np.load(tmp_path / "c_idx.npz")
    assert (ids.dtype, index["lens"].dtype, index["docs"].dtype) == (np.uint16, np.int32, np.int64)
    assert index["docs"].tolist() == [0, 1, 2, 3]
    assert list_names(tmp_path) == ["c_ids.npy", "c_idx.npz", name]


def test_several_files_are_encoded_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH_TEXTS", 4)
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 40)
    texts = [f"{'word ' * (number % 13)}{number}" for number in range(50)]
    inputs = [
        write_lines(tmp_path / "a.jsonl", texts[:21]),
        write_lines(tmp_path / "b.jsonl.gz", texts[21:]),
    ]
    progress: list[tuple[int, int]] = []
    token_files = write_token_files(
        inputs, WordHashTokenizer(70_000), tmp_path / "c", watch=lambda *now: progress.append(now)
    )
    corpus = open_corpus(tmp_path / "c")
    assert corpus.ids.dtype == np.int32
    assert list_documents(corpus) == [[*ids, 0] for ids in WordHashTokenizer(70_000).encode(texts)]
    assert token_files.documents == 50
    assert len(progress) > 10
    assert progress == sorted(progress)
    assert progress[-1] == (sum(path.stat().st_size for path in inputs),) * 2


def test_end_tokens_text_keys_and_empty_documents(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", ["", "one", " \n", "two"], "content")
    token_files = write_token_files(
        [source], TOKENIZER, tmp_path / "c", key="content", append_end=False
    )
    assert (token_files.documents, token_files.skipped) == (2, 2)
    assert list_documents(open_corpus(tmp_path / "c")) == TOKENIZER.encode(["one", "two"])
    write_token_files(
        [source], NoEndTokenizer(512), tmp_path / "d", key="content", append_end=False
    )
    write_token_files([source], EndAddingTokenizer(512), tmp_path / "e", key="content")
    assert list_documents(open_corpus(tmp_path / "e")) == EndAddingTokenizer(512).encode(
        ["one", "two"]
    )
    with pytest.raises(
        RequestError, match=r"does not say which token ends a text; .*--no-append-end"
    ):
        write_token_files([source], NoEndTokenizer(512), tmp_path / "f", key="content")


VALID_LINE = b'{"text": "one"}\n'


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "no documents; give at least one line"),
        (b'{"text": " "}\n', "no documents; give at least one line"),
        (VALID_LINE + b"\n", "line 2 is not JSON in UTF-8: Expecting value"),
        (VALID_LINE + b'{"text": "one"', "line 2 is not JSON in UTF-8"),
        (VALID_LINE * 2 + b'{"text": "\xff"}\n', "line 3 is not JSON in UTF-8: 'utf-8' codec"),
        (b"\xef\xbb\xbf" + VALID_LINE, "line 1 is not JSON in UTF-8: Unexpected UTF-8 BOM"),
        (VALID_LINE + b"[" * 100_000, "line 2 is not JSON in UTF-8"),
        (
            VALID_LINE + b'["text"]\n',
            r"line 2 is \['text'\]; a line is \{\"text\": \"…\"\}; name another key with --key",
        ),
        (VALID_LINE + b'{"texts": "one"}\n', "line 2 is {'texts': 'one'}; a line is"),
        (VALID_LINE + b'{"text": 1}\n', "line 2 is {'text': 1}; a line is"),
        (VALID_LINE + b'{"text": null}\n', "line 2 is {'text': None}; a line is"),
        (
            VALID_LINE + b'{"text": "\\ud83d"}\n',
            "line 2 has the text '.*'; a text must be valid Unicode",
        ),
        (VALID_LINE + b'{"text": "' + b"x" * 200 + b'"}\n', "line 2 has more than 100 bytes"),
        (gzip.compress(VALID_LINE * 1000, mtime=0)[:-20], "cannot be read: Compressed file ended"),
        (gzip.compress(VALID_LINE, mtime=0)[:-8] + bytes(8), "cannot be read: CRC check failed"),
    ],
)
def test_invalid_lines_leave_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, reason: str
) -> None:
    if b"xxx" in content:
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(RequestError, match=reason) as error:
        write_token_files([tmp_path / "in.jsonl"], TOKENIZER, tmp_path / "c")
    assert str(error.value).startswith(str(tmp_path / "in.jsonl"))
    assert "\n" not in str(error.value)
    assert list_names(tmp_path) == ["in.jsonl"]


def test_existing_files_are_overwritten_only_with_force(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    write_token_files([source], TOKENIZER, tmp_path / "c")
    for existing in ("c_ids.npy", "c_idx.npz"):
        with pytest.raises(
            RequestError,
            match=f"{existing} exists; choose another --out, or overwrite it with --force",
        ):
            write_token_files([source], TOKENIZER, tmp_path / "c")
        (tmp_path / "c_ids.npy").unlink(missing_ok=True)
    write_token_files([source], TOKENIZER, tmp_path / "c", force=True)
    content_before = (tmp_path / "c_ids.npy").read_bytes()
    (tmp_path / "bad.jsonl").write_text("no\n")
    with pytest.raises(RequestError):
        write_token_files([tmp_path / "bad.jsonl"], TOKENIZER, tmp_path / "c", force=True)
    assert (tmp_path / "c_ids.npy").read_bytes() == content_before
    write_token_files(
        [write_lines(tmp_path / "in.jsonl", TEXTS[:1])], TOKENIZER, tmp_path / "c", force=True
    )
    assert list_documents(open_corpus(tmp_path / "c")) == [[*TOKENIZER.encode(TEXTS[:1])[0], 0]]


def test_invalid_inputs_and_outputs_are_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    for inputs, out, reason in (
        ([source, tmp_path / "none"], "c", "none' is not a file; give .jsonl or .jsonl.gz files"),
        ([tmp_path], "c", "is not a file; give .jsonl"),
        ([source], "", "a folder; add a name for the pair, such as .*/corpus"),
        ([source], "no/c", "no folder .*no'; make it, or choose another"),
    ):
        with pytest.raises(RequestError, match=reason):
            write_token_files(inputs, TOKENIZER, tmp_path / out)
    assert list_names(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize(
    "fault",
    [OSError(28, "No space left on device"), KeyboardInterrupt()],
    ids=["full", "interrupt"],
)
def test_a_failure_at_the_end_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, fault: Any
) -> None:
    real_call, calls = getattr(os, call), 0

    def fail_second_call(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise fault
        real_call(*arguments)

    monkeypatch.setattr(os, call, fail_second_call)
    with pytest.raises(LostError if isinstance(fault, OSError) else KeyboardInterrupt) as error:
        write_token_files([write_lines(tmp_path / "in.jsonl", TEXTS)], TOKENIZER, tmp_path / "c")
    if isinstance(fault, OSError):
        assert str(error.value).endswith(golden("cannot-be-written-no-space-left"))
    assert list_names(tmp_path) == ["in.jsonl"]


def test_inspection_counts_documents_tokens_and_rows() -> None:
    ids = np.arange(5000, dtype=np.uint16)
    inspection = inspect_corpus(Corpus(ids, np.array([4200, 4210, 5000]), "c"))
    assert inspection.splits == {
        "train": CorpusSplit(1, 4200),
        "valid": CorpusSplit(1, 10),
        "test": CorpusSplit(1, 790),
    }
    assert (inspection.documents, inspection.tokens, inspection.rows, inspection.highest) == (
        3,
        5000,
        2,
        4999,
    )
    assert (inspection.shortest, inspection.longest, inspection.mean) == (10, 4200, 5000 / 3)
    too_few_documents = inspect_corpus(Corpus(ids, np.array([4200, 5000]), "c"))
    assert (too_few_documents.splits, too_few_documents.rows) == (None, None)


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> RunCommand:
    """Return a function that runs a `data` command in this process, with the word-hash tokenizer
    for every path, and returns its exit status, stdout and stderr.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda places: TOKENIZER)

    def command(*arguments: str) -> tuple[int, str, str]:
        handler_before = signal.getsignal(signal.SIGTERM)
        monkeypatch.setattr(sys, "argv", ["steelyard", "data", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        signal.signal(signal.SIGTERM, handler_before)
        assert isinstance(exit_info.value.code, int)
        return exit_info.value.code, *capsys.readouterr()

    return command


def test_help_shows_examples(run: RunCommand) -> None:
    code, stdout, stderr = run("--help")
    assert (code, stderr) == (0, "")
    assert "steelyard data get" in stdout.split("Example:")[1]
    assert [line.split()[0] for line in stdout.split("Commands:")[1].split("\n") if line] == [
        "get",
        "list",
        "pack",
        "inspect",
    ]
    for verb in ("pack", "inspect"):
        code, stdout, stderr = run(verb, "--help")
        assert (code, stderr) == (0, "")
        assert f"steelyard data {verb}" in stdout.split("Example", 1)[1]
        assert "--json" in stdout


def test_pack_and_inspect_from_the_command_line(run: RunCommand, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [*TEXTS, ""])
    code, stdout, stderr = run("pack", "in.jsonl", "--tokenizer", "any", "--out", "c")
    digest = fingerprint_corpus(open_corpus(tmp_path / "c"), None)
    tokens = len(open_corpus(tmp_path / "c").ids)
    assert (code, stderr) == (0, "")
    assert stdout.splitlines()[:5] == [
        "documents    3",
        "skipped      1 empty document(s)",
        f"tokens       {tokens}",
        f"fingerprint  {digest}",
        f"files        c_ids.npy  {128 + 2 * tokens} bytes",
    ]
    code, stdout, stderr = run(
        "pack",
        "in.jsonl",
        "--tokenizer",
        "any",
        "--out",
        "c",
        "--force",
        "--json",
        "--no-append-end",
    )
    assert (code, stderr) == (0, "")
    packed = json.loads(stdout)
    assert (packed["documents"], packed["tokens"], packed["skipped"]) == (3, tokens - 3, 1)
    assert packed["files"][0] == {"path": "c_ids.npy", "size_bytes": 128 + 2 * (tokens - 3)}
    code, stdout, stderr = run("inspect", "c", "--tokenizer", "any")
    assert (code, stderr) == (0, "")
    inspected = dict(line.split("  ", 1) for line in stdout.splitlines())
    assert inspected["tokenizer"].strip() == "made: every id is below its vocabulary size 512"
    assert [line.split()[0] for line in stdout.splitlines()[6:9]] == ["train", "valid", "test"]
    code, stdout, stderr = run("inspect", "c_ids.npy", "--json")
    assert (code, stderr) == (0, "")
    assert json.loads(stdout)["fingerprint"] == packed["fingerprint"]
    assert json.loads(stdout)["tokenizer"] is None
    write_lines(tmp_path / "few.jsonl", TEXTS[:1])
    run("pack", "few.jsonl", "--tokenizer", "any", "--out", "few")
    assert "split        / (too few documents" in run("inspect", "few")[1]


def test_user_errors_are_reported_in_one_line(run: RunCommand, tmp_path: Path) -> None:
    for arguments, reason in (
        (("inspect", "none"), "error: data 'none' does not exist; "),
        (
            ("pack", "none", "--tokenizer", "any", "--out", "c"),
            "error: 'none' is not a file; give .jsonl",
        ),
        (("pack", "--tokenizer", "any", "--out", "c"), "error: Missing argument"),
    ):
        code, stdout, stderr = run(*arguments)
        assert (code, stdout, stderr.count("\n")) == (2, "", 1)
        assert stderr.startswith(reason)
    np.save(tmp_path / "c_ids.npy", np.array([1, 600, 3], np.uint16))
    np.savez(tmp_path / "c_idx.npz", lens=[3], docs=[0, 1])
    code, stdout, stderr = run("inspect", ".", "--tokenizer", "any")
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert "c_ids.npy: token 1 (counted from 0) is 600; allowed: 0 to 511" in stderr


def test_progress_is_shown(
    run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr, console_class = io.StringIO(), rich.console.Console
    monkeypatch.setattr(
        rich.console,
        "Console",
        lambda **options: console_class(
            file=stderr, force_terminal=True, width=100, quiet=options["quiet"]
        ),
    )
    write_lines(tmp_path / "in.jsonl", TEXTS)
    assert run("pack", "in.jsonl", "--tokenizer", "any", "--out", "c")[0] == 0
    assert "MiB  " in stderr.getvalue()
    assert "0/1" in stderr.getvalue()  # progress is in whole MiB, and the file is small


def test_an_interrupted_pack_leaves_no_files(shell: Shell, tmp_path: Path) -> None:
    vocabulary = {chr(code): code for code in (*range(33, 127), *range(161, 173), *range(174, 256))}
    other_bytes = [code for code in range(256) if code not in vocabulary.values()]
    ids = {
        piece: code
        for code, piece in enumerate(
            [*vocabulary, *(chr(256 + code) for code in range(len(other_bytes))), "<|endoftext|>"]
        )
    }
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    write_lines(tmp_path / "in.jsonl", ["word " * 2000] * 5000)
    process = shell.start("data", "pack", "in.jsonl", "--tokenizer", ".", "--out", "c")
    assert wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob(".c_ids.npy.*")))
    process.send_signal(signal.SIGINT)
    result = wait_for_result(process)
    assert (result.code, result.out, result.err) == (1, "", "interrupted\n")
    assert [name for name in list_names(tmp_path) if "c_" in name] == []
