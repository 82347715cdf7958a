"""Tests of `data get`, `data list` and `--data auto`, with a local web server in place of the
publishers.
"""

import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fixtures.commands import Shell, finish, wait_for
from fixtures.golden import golden
from fixtures.hub import FILES as MODEL
from fixtures.hub import REVISION, publish
from fixtures.web import Page, Server, serving
from steelyard.case import resolve
from steelyard.cli.get import find_data_path
from steelyard.errors import RequestError

STEM = "llama_openwebtext_100k"
FULL = ("run", "llama1-7b-openwebtext", "--accelerator", "cpu")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Start a mirror with ten tiny documents as the token files of OpenWebText, under their
    published names.
    """
    lens = np.full(10, 40, dtype=np.int32)
    ids = np.arange(400, dtype=np.uint16) % 250
    np.save(tmp_path / "ids.npy", ids)
    np.savez(tmp_path / "idx.npz", lens=lens, docs=np.arange(11, dtype=np.int64))
    with serving() as one:
        one.pages |= {
            f"/m/openwebtext/{STEM}_ids.npy": Page((tmp_path / "ids.npy").read_bytes()),
            f"/m/openwebtext/{STEM}_idx.npz": Page((tmp_path / "idx.npz").read_bytes()),
        }
        yield one


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's data folder, in a cache of this test and without proxies."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "steelyard" / "data"


def test_get_then_list_then_auto(shell: Shell, server: Server, cache: Path) -> None:
    before = {row["name"]: row for row in shell.ask("data", "list", "--json").json()["sources"]}
    assert (before["openwebtext"]["here"], before["openwebtext"]["size_bytes"]) == (False, None)
    assert before["mmlu"]["size_bytes"] == 166_184_960
    done = shell.ask("data", "get", "openwebtext", "--mirror", f"{server.url}/m")
    assert done.code == 0, done.err
    assert done.out.splitlines()[-2:] == [
        f"openwebtext: done, 2 file(s), 1.52 KiB, in {cache / 'openwebtext'}",
        "use it with --data auto",
    ]
    assert done.out.count("pinned at first use: ") == 2
    assert done.err.startswith("openwebtext: OpenWebText, 100k documents")
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    listed = shell.ask("data", "list").out.splitlines()
    assert [line.split()[:4] for line in listed if line.startswith("openwebtext")] == [
        ["openwebtext", "1.52", "KiB", "here"]
    ]
    # the name of a case stands for its data set
    again = shell.ask("data", "get", "llama1-7b-openwebtext", "--json")
    assert (again.code, again.err) == (0, "")
    assert (again.json()["before"], again.json()["path"]) == (True, str(cache / "openwebtext"))
    assert shell.ask("data", "inspect", cache / "openwebtext", "--json").json()["documents"] == 10
    case = resolve.resolve_case("llama1-7b-openwebtext").case
    assert find_data_path(Path("auto"), case) == cache / "openwebtext"


def test_auto_without_data_says_what_to_get(shell: Shell, cache: Path) -> None:
    done = shell.ask(*FULL, "--data", "auto")
    assert (done.code, done.err) == (2, golden("error-data-auto-openwebtext-is-not"))
    done = shell.ask(*FULL)
    assert (done.code, done.err) == (2, golden("error-llama-1-7-openwebtext-at"))


def test_auto_is_for_size_full_and_a_path_stays_a_path(cache: Path) -> None:
    smoke = resolve.resolve_case("llama1-7b-openwebtext", size="smoke").case
    assert find_data_path(Path("auto"), smoke) is None
    assert find_data_path(Path("/data/auto"), smoke) == Path("/data/auto")
    assert find_data_path(None, smoke) is None


def test_auto_of_a_task_that_nobody_publishes_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steelyard.sources.catalog.DATA_SOURCES", ())
    with pytest.raises(
        RequestError, match="--data auto: nothing is known to get for task 'mmlu'; give a path"
    ):
        find_data_path(Path("auto"), resolve.resolve_case("llama2-7b-mmlu").case)


def test_a_download_that_fails_is_one_line_and_code_1(
    shell: Shell, server: Server, cache: Path
) -> None:
    server.pages[f"/m/openwebtext/{STEM}_idx.npz"].content = b"other"
    done = shell.ask("data", "get", "lambada", "--from", shell.folder)
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[-1].startswith(
        golden("error-from-no-lambada_test-jsonl-in", shell.folder)
    )
    (shell.folder / "lambada_test.jsonl").write_bytes(b"x" * 1_819_752)
    done = shell.ask("data", "get", "lambada", "--from", shell.folder, "--quiet")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {shell.folder / 'lambada_test.jsonl'}: sha256 ")
    assert "the table of sources says 4aa8d02cd17c7191" in done.err
    assert [one["here"] for one in shell.ask("data", "list", "--json").json()["sources"]] == [
        False
    ] * 6


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("data", "get", "mmul"), "no data 'mmul' to get; did you mean 'mmlu'?"),
        (
            ("data", "get", "mmlu", "--from", "nowhere"),
            "--from 'nowhere' is not a folder; name the one that has the files",
        ),
        (
            ("data", "get", "mmlu", "--mirror", "ftp://x"),
            "--mirror 'ftp://x': not an address; allowed: https://… or http://…",
        ),
        (
            ("data", "get", "mmlu", "--from", ".", "--mirror", "https://x"),
            "--from and --mirror cannot be combined; drop one",
        ),
        (
            ("data", "get", "mmlu", "--timeout", "0"),
            "--timeout 0: must be more than 0 and at most 86400 seconds",
        ),
        (
            ("weights", "get", "glm-large", "--revision", "v1"),
            "--revision v1: glm-large is not a model of the hub; leave it out",
        ),
        (
            ("weights", "get", "smollm2-135m", "--mirror", "https://x"),
            "--mirror: smollm2-135m is a model of the hub; name a mirror of the hub in HF_ENDPOINT",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_requests_that_are_wrong(
    shell: Shell, cache: Path, words: tuple[str, ...], line: str
) -> None:
    done = shell.ask(*words)
    assert (done.code, done.out, done.err) == (2, "", f"error: {line}\n")


def test_an_interrupt_keeps_the_part_and_the_same_command_goes_on(
    shell: Shell, server: Server, cache: Path
) -> None:
    page = server.pages[f"/m/openwebtext/{STEM}_ids.npy"]
    page.stalls = [500]
    command = ("data", "get", "openwebtext", "--mirror", f"{server.url}/m")
    process = shell.start(*command, XDG_CACHE_HOME=str(cache.parents[1]))
    part = cache / ".openwebtext.part" / f"{STEM}_ids.npy.part"
    assert wait_for(
        lambda: (part.exists() and part.stat().st_size == 500) or process.poll() is not None
    )
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.code, done.out, done.lines[-1]) == (
        1,
        "",
        golden("interrupted-run-the-same-command-again"),
    )
    assert part.stat().st_size == 500
    row = next(
        one
        for one in shell.ask("data", "list", "--json").json()["sources"]
        if one["name"] == "openwebtext"
    )
    assert (row["here"], row["partial_bytes"] >= 500) == (False, True)
    server.seen.clear()
    assert shell.ask(*command, "--quiet").err == ""
    assert [one.range for one in server.seen] == ["bytes=500-", None]


@pytest.mark.parametrize("small_disk", ["1m"], indirect=True)
def test_a_disk_that_runs_full_is_one_line(
    shell: Shell, server: Server, small_disk: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not send the size of the file, so the lack of space cannot be known before."""
    monkeypatch.setattr("steelyard.sources.download.SPARE_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(small_disk))
    server.pages[f"/m/openwebtext/{STEM}_ids.npy"] = Page(
        bytes(3 << 20), length=False, chunked=True
    )
    done = shell.ask("data", "get", "openwebtext", "--mirror", f"{server.url}/m", "--quiet")
    folder = small_disk / "steelyard" / "data"
    line = f"error: {folder}: No space left on device; mend that, then run the same command again\n"
    assert (done.code, done.out, done.err) == (1, "", line)
    assert not (folder / "openwebtext").exists()
    kept = (folder / ".openwebtext.part" / f"{STEM}_ids.npy.part").stat().st_size
    server.pages[f"/m/openwebtext/{STEM}_ids.npy"] = Page(bytes(3 << 20))
    done = shell.ask("data", "get", "openwebtext", "--mirror", f"{server.url}/m", "--quiet")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {(3 << 20) - kept} bytes are needed in {folder}/")


@pytest.mark.full
def test_a_run_takes_what_was_got(shell: Shell, server: Server, cache: Path) -> None:
    """A model of two layers runs at size full with the documents that `data get` downloaded."""
    assert (
        shell.ask("data", "get", "openwebtext", "--mirror", f"{server.url}/m", "--quiet").code == 0
    )
    small = {
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 4,
        "ffn": 128,
        "vocab": 256,
        "positions": 32,
    }
    settings = [f"question.model.{name}={value}" for name, value in small.items()]
    settings += [
        "question.train.length=32",
        "question.train.batch=2",
        "question.data.held_out=1",
        "question.precision=fp32",
    ]
    settings += ["tune.compile=false", "tune.micro_batch=1"]
    words = [word for setting in settings for word in ("--set", setting)]
    command = (
        *FULL,
        "--data",
        "auto",
        "--steps",
        "2",
        "--passes",
        "train",
        *words,
        "--out",
        shell.out,
    )
    done = shell(*command, XDG_CACHE_HOME=str(cache.parents[1]))
    (record,) = shell.records()
    assert record["data"]["source"] == STEM, done.err
    assert record["status"] != "failed"  # it may be invalid on a busy machine


def test_a_model_of_the_hub(shell: Shell, server: Server, cache: Path) -> None:
    pytest.importorskip("huggingface_hub")
    publish(server, "org/tiny", MODEL)
    place = {
        "XDG_CACHE_HOME": str(cache.parents[1]),
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(shell.tmp / "hf"),
        "HF_TOKEN": "",
    }
    done = shell("weights", "get", "org/tiny", "--json", **place)
    assert done.code == 0, done.err
    told = done.json()
    assert (told["path"], told["revision"], told["licence"]) == (
        str(cache.parent / "weights" / "org--tiny"),
        REVISION,
        "mit",
    )
    assert [one["path"] for one in told["files"]] == [
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    rows = shell.ask("weights", "list", "--json").json()["sources"]
    assert [row["path"] for row in rows if row["here"]] == [told["path"]]


def test_the_list_of_weights_says_what_is_gated(shell: Shell, cache: Path) -> None:
    lines = {line.split()[0]: line for line in shell.ask("weights", "list").out.splitlines()}
    assert lines["llama2-7b"].split()[1:3] == ["/", "gated"]
    assert lines["folder:"].endswith("/steelyard/weights")
