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

from fixtures.commands import Shell, finish, wait_for
from fixtures.golden import golden
from steelyard import cli
from steelyard.data import token_files as module
from steelyard.data import tokenizer
from steelyard.data.corpus import Corpus, fingerprint_corpus, open_corpus
from steelyard.data.token_files import CorpusSplit, TokenFiles, inspect_corpus, write_token_files
from steelyard.data.tokenizer import WordHashTokenizer
from steelyard.errors import LostError, RequestError

MADE = WordHashTokenizer(512)
TEXTS = ["one two", "three, four", "five\nsix \u20ac"]

Run = Callable[..., tuple[int, str, str]]


class Endless(WordHashTokenizer):
    """A tokenizer that has no end token."""

    @property
    def end(self) -> Any:
        return None


class Ending(WordHashTokenizer):
    """A tokenizer that appends its end token to every text."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[*ids, self.end] for ids in super().encode(texts)]


def lines(path: Path, texts: list[str], key: str = "text") -> Path:
    """Write texts as JSON lines under `key`, compressed if the name ends in .gz, and return the
    path.
    """
    content = "".join(json.dumps({"meta": [1], key: text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def documents(corpus: Corpus) -> list[list[int]]:
    """Return the tokens of each document."""
    return [part.tolist() for part in np.split(corpus.ids, corpus.ends[:-1])]


def left(folder: Path) -> list[str]:
    """Return the sorted file names of a folder."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_packed_documents_come_back(tmp_path: Path, name: str) -> None:
    told: list[tuple[int, int]] = []
    source = lines(tmp_path / name, TEXTS)
    made = write_token_files(
        [source], MADE, tmp_path / "c", watch=lambda done, total: told.append((done, total))
    )
    found = open_corpus(tmp_path / "c")
    expected = [[*ids, MADE.end] for ids in MADE.encode(TEXTS)]
    assert documents(found) == expected
    sizes = [
        (f"c{suffix}", (tmp_path / f"c{suffix}").stat().st_size)
        for suffix in ("_ids.npy", "_idx.npz")
    ]
    assert made == TokenFiles(3, sum(map(len, expected)), 0, sizes, fingerprint_corpus(found, None))
    assert told == [(source.stat().st_size,) * 2]
    ids, index = np.load(tmp_path / "c_ids.npy"), np.load(tmp_path / "c_idx.npz")
    assert (ids.dtype, index["lens"].dtype, index["docs"].dtype) == (np.uint16, np.int32, np.int64)
    assert index["docs"].tolist() == [0, 1, 2, 3]
    assert left(tmp_path) == ["c_ids.npy", "c_idx.npz", name]


def test_many_batches_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_TEXTS", 4)
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 40)
    texts = [f"{'word ' * (i % 13)}{i}" for i in range(50)]
    inputs = [lines(tmp_path / "a.jsonl", texts[:21]), lines(tmp_path / "b.jsonl.gz", texts[21:])]
    told: list[tuple[int, int]] = []
    made = write_token_files(
        inputs, WordHashTokenizer(70_000), tmp_path / "c", watch=lambda *now: told.append(now)
    )
    found = open_corpus(tmp_path / "c")
    assert found.ids.dtype == np.int32
    assert documents(found) == [[*ids, 0] for ids in WordHashTokenizer(70_000).encode(texts)]
    assert made.documents == 50
    assert len(told) > 10
    assert told == sorted(told)
    assert told[-1] == (sum(path.stat().st_size for path in inputs),) * 2


def test_ends_keys_and_empty_documents(tmp_path: Path) -> None:
    source = lines(tmp_path / "in", ["", "one", " \n", "two"], "content")
    made = write_token_files([source], MADE, tmp_path / "c", key="content", append_end=False)
    assert (made.documents, made.skipped) == (2, 2)
    assert documents(open_corpus(tmp_path / "c")) == MADE.encode(["one", "two"])
    write_token_files([source], Endless(512), tmp_path / "d", key="content", append_end=False)
    write_token_files([source], Ending(512), tmp_path / "e", key="content")
    assert documents(open_corpus(tmp_path / "e")) == Ending(512).encode(["one", "two"])
    with pytest.raises(
        RequestError, match=r"does not say which token ends a text; .*--no-append-end"
    ):
        write_token_files([source], Endless(512), tmp_path / "f", key="content")


GOOD = b'{"text": "one"}\n'


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "no documents; give at least one line"),
        (b'{"text": " "}\n', "no documents; give at least one line"),
        (GOOD + b"\n", "line 2 is not JSON in UTF-8: Expecting value"),
        (GOOD + b'{"text": "one"', "line 2 is not JSON in UTF-8"),
        (GOOD * 2 + b'{"text": "\xff"}\n', "line 3 is not JSON in UTF-8: 'utf-8' codec"),
        (b"\xef\xbb\xbf" + GOOD, "line 1 is not JSON in UTF-8: Unexpected UTF-8 BOM"),
        (GOOD + b"[" * 100_000, "line 2 is not JSON in UTF-8"),
        (
            GOOD + b'["text"]\n',
            r"line 2 is \['text'\]; a line is \{\"text\": \"…\"\}; name another key with --key",
        ),
        (GOOD + b'{"texts": "one"}\n', "line 2 is {'texts': 'one'}; a line is"),
        (GOOD + b'{"text": 1}\n', "line 2 is {'text': 1}; a line is"),
        (GOOD + b'{"text": null}\n', "line 2 is {'text': None}; a line is"),
        (GOOD + b'{"text": "\\ud83d"}\n', "line 2 has the text '.*'; a text must be valid Unicode"),
        (GOOD + b'{"text": "' + b"x" * 200 + b'"}\n', "line 2 has more than 100 bytes"),
        (gzip.compress(GOOD * 1000, mtime=0)[:-20], "cannot be read: Compressed file ended"),
        (gzip.compress(GOOD, mtime=0)[:-8] + bytes(8), "cannot be read: CRC check failed"),
    ],
)
def test_bad_lines_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, reason: str
) -> None:
    if b"xxx" in content:
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(RequestError, match=reason) as error:
        write_token_files([tmp_path / "in.jsonl"], MADE, tmp_path / "c")
    assert str(error.value).startswith(str(tmp_path / "in.jsonl"))
    assert "\n" not in str(error.value)
    assert left(tmp_path) == ["in.jsonl"]


def test_nothing_is_written_over_unasked(tmp_path: Path) -> None:
    source = lines(tmp_path / "in.jsonl", TEXTS)
    write_token_files([source], MADE, tmp_path / "c")
    for kept in ("c_ids.npy", "c_idx.npz"):
        with pytest.raises(
            RequestError, match=f"{kept} exists; choose another --out, or overwrite it with --force"
        ):
            write_token_files([source], MADE, tmp_path / "c")
        (tmp_path / "c_ids.npy").unlink(missing_ok=True)
    write_token_files([source], MADE, tmp_path / "c", force=True)
    before = (tmp_path / "c_ids.npy").read_bytes()
    (tmp_path / "bad.jsonl").write_text("no\n")
    with pytest.raises(RequestError):
        write_token_files([tmp_path / "bad.jsonl"], MADE, tmp_path / "c", force=True)
    assert (tmp_path / "c_ids.npy").read_bytes() == before
    write_token_files([lines(tmp_path / "in.jsonl", TEXTS[:1])], MADE, tmp_path / "c", force=True)
    assert documents(open_corpus(tmp_path / "c")) == [[*MADE.encode(TEXTS[:1])[0], 0]]


def test_places_that_cannot_be_are_refused(tmp_path: Path) -> None:
    source = lines(tmp_path / "in.jsonl", TEXTS)
    for inputs, out, reason in (
        ([source, tmp_path / "none"], "c", "none' is not a file; give .jsonl or .jsonl.gz files"),
        ([tmp_path], "c", "is not a file; give .jsonl"),
        ([source], "", "a folder; add a name for the pair, such as .*/corpus"),
        ([source], "no/c", "no folder .*no'; make it, or choose another"),
    ):
        with pytest.raises(RequestError, match=reason):
            write_token_files(inputs, MADE, tmp_path / out)
    assert left(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize(
    "fault",
    [OSError(28, "No space left on device"), KeyboardInterrupt()],
    ids=["full", "interrupt"],
)
def test_a_failure_at_the_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, fault: Any
) -> None:
    real, calls = getattr(os, call), 0

    def second_fails(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise fault
        real(*arguments)

    monkeypatch.setattr(os, call, second_fails)
    with pytest.raises(LostError if isinstance(fault, OSError) else KeyboardInterrupt) as error:
        write_token_files([lines(tmp_path / "in.jsonl", TEXTS)], MADE, tmp_path / "c")
    if isinstance(fault, OSError):
        assert str(error.value).endswith(golden("cannot-be-written-no-space-left"))
    assert left(tmp_path) == ["in.jsonl"]


def test_inspect_counts() -> None:
    ids = np.arange(5000, dtype=np.uint16)
    found = inspect_corpus(Corpus(ids, np.array([4200, 4210, 5000]), "c"))
    assert found.splits == {
        "train": CorpusSplit(1, 4200),
        "valid": CorpusSplit(1, 10),
        "test": CorpusSplit(1, 790),
    }
    assert (found.documents, found.tokens, found.rows, found.highest) == (3, 5000, 2, 4999)
    assert (found.shortest, found.longest, found.mean) == (10, 4200, 5000 / 3)
    few = inspect_corpus(Corpus(ids, np.array([4200, 5000]), "c"))
    assert (few.splits, few.rows) == (None, None)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Return a function that runs a `data` command in this process, with the word-hash tokenizer
    for every path, and returns its exit status, stdout and stderr.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda places: MADE)

    def command(*arguments: str) -> tuple[int, str, str]:
        before = signal.getsignal(signal.SIGTERM)
        monkeypatch.setattr(sys, "argv", ["steelyard", "data", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        signal.signal(signal.SIGTERM, before)
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return command


def test_help_teaches(run: Run) -> None:
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert "steelyard data get" in out.split("Example:")[1]
    assert [line.split()[0] for line in out.split("Commands:")[1].split("\n") if line] == [
        "get",
        "list",
        "pack",
        "inspect",
    ]
    for verb in ("pack", "inspect"):
        code, out, err = run(verb, "--help")
        assert (code, err) == (0, "")
        assert f"steelyard data {verb}" in out.split("Example", 1)[1]
        assert "--json" in out


def test_the_verbs(run: Run, tmp_path: Path) -> None:
    lines(tmp_path / "in.jsonl", [*TEXTS, ""])
    code, out, err = run("pack", "in.jsonl", "--tokenizer", "any", "--out", "c")
    mark = fingerprint_corpus(open_corpus(tmp_path / "c"), None)
    tokens = len(open_corpus(tmp_path / "c").ids)
    assert (code, err) == (0, "")
    assert out.splitlines()[:5] == [
        "documents    3",
        "skipped      1 without a word",
        f"tokens       {tokens}",
        f"fingerprint  {mark}",
        f"files        c_ids.npy  {128 + 2 * tokens} bytes",
    ]
    code, out, err = run(
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
    assert (code, err) == (0, "")
    table = json.loads(out)
    assert (table["documents"], table["tokens"], table["skipped"]) == (3, tokens - 3, 1)
    assert table["files"][0] == {"path": "c_ids.npy", "size_bytes": 128 + 2 * (tokens - 3)}
    code, out, err = run("inspect", "c", "--tokenizer", "any")
    assert (code, err) == (0, "")
    facts = dict(line.split("  ", 1) for line in out.splitlines())
    assert facts["tokenizer"].strip() == "made: every id is below its 512"
    assert [line.split()[0] for line in out.splitlines()[6:9]] == ["train", "valid", "test"]
    code, out, err = run("inspect", "c_ids.npy", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["fingerprint"] == table["fingerprint"]
    assert json.loads(out)["tokenizer"] is None
    lines(tmp_path / "few.jsonl", TEXTS[:1])
    run("pack", "few.jsonl", "--tokenizer", "any", "--out", "few")
    assert "split        / (too few documents" in run("inspect", "few")[1]


def test_mistakes_end_in_one_line(run: Run, tmp_path: Path) -> None:
    for arguments, reason in (
        (("inspect", "none"), "error: data 'none' does not exist; "),
        (
            ("pack", "none", "--tokenizer", "any", "--out", "c"),
            "error: 'none' is not a file; give .jsonl",
        ),
        (("pack", "--tokenizer", "any", "--out", "c"), "error: Missing argument"),
    ):
        code, out, err = run(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(reason)
    np.save(tmp_path / "c_ids.npy", np.array([1, 600, 3], np.uint16))
    np.savez(tmp_path / "c_idx.npz", lens=[3], docs=[0, 1])
    code, out, err = run("inspect", ".", "--tokenizer", "any")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "c_ids.npy: token 1 (counted from 0) is 600; allowed: 0 to 511" in err


def test_progress_is_shown(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr, real = io.StringIO(), rich.console.Console
    monkeypatch.setattr(
        rich.console,
        "Console",
        lambda **options: real(file=stderr, force_terminal=True, width=100, quiet=options["quiet"]),
    )
    lines(tmp_path / "in.jsonl", TEXTS)
    assert run("pack", "in.jsonl", "--tokenizer", "any", "--out", "c")[0] == 0
    assert "MiB  " in stderr.getvalue()
    assert "0/1" in stderr.getvalue()  # progress is in whole MiB, and the file is small


def test_interrupted_it_leaves_nothing(shell: Shell, tmp_path: Path) -> None:
    vocabulary = {chr(i): i for i in (*range(33, 127), *range(161, 173), *range(174, 256))}
    missing = [i for i in range(256) if i not in vocabulary.values()]
    ids = {
        piece: i
        for i, piece in enumerate(
            [*vocabulary, *(chr(256 + i) for i in range(len(missing))), "<|endoftext|>"]
        )
    }
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    lines(tmp_path / "in.jsonl", ["word " * 2000] * 5000)
    process = shell.start("data", "pack", "in.jsonl", "--tokenizer", ".", "--out", "c")
    assert wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob(".c_ids.npy.*")))
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.code, done.out, done.err) == (1, "", "interrupted\n")
    assert [name for name in left(tmp_path) if "c_" in name] == []
