"""Tests of `data get`, `data list` and `--data auto`, with a local web server in place of the
publishers.
"""

import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fixtures.commands import Shell, wait_for, wait_for_result
from fixtures.golden import golden
from fixtures.hub import FILES as MODEL
from fixtures.hub import REVISION, publish_model
from fixtures.web import Page, Server, serve_pages
from steelyard.case import resolve
from steelyard.cli.get import find_data_path
from steelyard.errors import RequestError

STEM = "llama_openwebtext_100k"
FULL_RUN = ("run", "llama1-7b-openwebtext", "--accelerator", "cpu")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Start a mirror with ten tiny documents as the token files of OpenWebText, under their
    published names.
    """
    lengths = np.full(10, 40, dtype=np.int32)
    ids = np.arange(400, dtype=np.uint16) % 250
    np.save(tmp_path / "ids.npy", ids)
    np.savez(tmp_path / "idx.npz", lens=lengths, docs=np.arange(11, dtype=np.int64))
    with serve_pages() as web_server:
        web_server.pages |= {
            f"/m/openwebtext/{STEM}_ids.npy": Page((tmp_path / "ids.npy").read_bytes()),
            f"/m/openwebtext/{STEM}_idx.npz": Page((tmp_path / "idx.npz").read_bytes()),
        }
        yield web_server


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's data folder, in a cache of this test and without proxies."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "steelyard" / "data"


def test_get_then_list_then_auto(shell: Shell, server: Server, cache: Path) -> None:
    rows_before = {
        row["name"]: row for row in shell.run_in_process("data", "list", "--json").json()["sources"]
    }
    assert (rows_before["openwebtext"]["here"], rows_before["openwebtext"]["size_bytes"]) == (
        False,
        None,
    )
    assert rows_before["mmlu"]["size_bytes"] == 166_184_960
    result = shell.run_in_process("data", "get", "openwebtext", "--mirror", f"{server.url}/m")
    assert result.code == 0, result.err
    assert result.out.splitlines()[-2:] == [
        f"openwebtext: done, 2 file(s), 1.52 KiB, in {cache / 'openwebtext'}",
        "use it with --data auto",
    ]
    assert result.out.count("pinned at first use: ") == 2
    assert result.err.startswith("openwebtext: OpenWebText, 100k documents")
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    listed = shell.run_in_process("data", "list").out.splitlines()
    assert [line.split()[:4] for line in listed if line.startswith("openwebtext")] == [
        ["openwebtext", "1.52", "KiB", "here"]
    ]
    # the name of a case stands for its data set
    second = shell.run_in_process("data", "get", "llama1-7b-openwebtext", "--json")
    assert (second.code, second.err) == (0, "")
    assert (second.json()["before"], second.json()["path"]) == (True, str(cache / "openwebtext"))
    assert (
        shell.run_in_process("data", "inspect", cache / "openwebtext", "--json").json()["documents"]
        == 10
    )
    case = resolve.resolve_case("llama1-7b-openwebtext").case
    assert find_data_path(Path("auto"), case) == cache / "openwebtext"
    generation = resolve.resolve_case("llama2-7b-generate").case
    assert find_data_path(Path("auto"), generation) == cache / "openwebtext"
    third = shell.run_in_process("data", "get", "llama2-7b-generate", "--json")
    assert (third.code, third.json()["name"]) == (0, "openwebtext")


def test_auto_without_data_names_the_command_to_get_it(shell: Shell, cache: Path) -> None:
    result = shell.run_in_process(*FULL_RUN, "--data", "auto")
    assert (result.code, result.err) == (2, golden("error-data-auto-openwebtext-is-not"))
    result = shell.run_in_process(*FULL_RUN)
    assert (result.code, result.err) == (2, golden("error-llama-1-7-openwebtext-at"))


def test_a_case_that_makes_its_data_needs_none(shell: Shell, cache: Path) -> None:
    for arguments, line in (
        (
            ("run", "llama3-8b-generate", "--data", "auto", "--accelerator", "cpu"),
            "--data auto: llama3-8b-generate makes its data itself; leave --data out",
        ),
        (
            ("data", "get", "llama3-8b-generate"),
            "llama3-8b-generate makes its data itself; there is nothing to get",
        ),
    ):
        result = shell.run_in_process(*arguments)
        assert (result.code, result.lines) == (2, [f"error: {line}"])


def test_auto_means_no_data_at_size_smoke(cache: Path) -> None:
    smoke = resolve.resolve_case("llama1-7b-openwebtext", size="smoke").case
    assert find_data_path(Path("auto"), smoke) is None
    assert find_data_path(Path("/data/auto"), smoke) == Path("/data/auto")
    assert find_data_path(None, smoke) is None


def test_auto_for_a_task_without_published_data_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steelyard.sources.catalog.DATA_SOURCES", ())
    with pytest.raises(
        RequestError, match="--data auto: no data set is known for task 'mmlu'; give a path"
    ):
        find_data_path(Path("auto"), resolve.resolve_case("llama2-7b-mmlu").case)


def test_failed_download_is_one_line_and_exit_code_1(
    shell: Shell, server: Server, cache: Path
) -> None:
    server.pages[f"/m/openwebtext/{STEM}_idx.npz"].content = b"other"
    result = shell.run_in_process("data", "get", "lambada", "--from", shell.folder)
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines()[-1].startswith(
        golden("error-from-no-lambada_test-jsonl-in", shell.folder)
    )
    (shell.folder / "lambada_test.jsonl").write_bytes(b"x" * 1_819_752)
    result = shell.run_in_process("data", "get", "lambada", "--from", shell.folder, "--quiet")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"error: {shell.folder / 'lambada_test.jsonl'}: sha256 ")
    assert "the catalog says 4aa8d02cd17c7191" in result.err
    assert [
        entry["here"] for entry in shell.run_in_process("data", "list", "--json").json()["sources"]
    ] == [False] * 6


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("data", "get", "mmul"), "no data named 'mmul' in the catalog; did you mean 'mmlu'?"),
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
def test_wrong_requests_get_one_line(
    shell: Shell, cache: Path, words: tuple[str, ...], line: str
) -> None:
    result = shell.run_in_process(*words)
    assert (result.code, result.out, result.err) == (2, "", f"error: {line}\n")


def test_interrupted_download_resumes_with_the_same_command(
    shell: Shell, server: Server, cache: Path
) -> None:
    page = server.pages[f"/m/openwebtext/{STEM}_ids.npy"]
    page.stalls = [500]
    command = ("data", "get", "openwebtext", "--mirror", f"{server.url}/m")
    process = shell.start(*command, XDG_CACHE_HOME=str(cache.parents[1]))
    part_file = cache / ".openwebtext.part" / f"{STEM}_ids.npy.part"
    assert wait_for(
        lambda: (
            (part_file.exists() and part_file.stat().st_size == 500) or process.poll() is not None
        )
    )
    process.send_signal(signal.SIGINT)
    result = wait_for_result(process)
    assert (result.code, result.out, result.lines[-1]) == (
        1,
        "",
        golden("interrupted-run-the-same-command-again"),
    )
    assert part_file.stat().st_size == 500
    row = next(
        entry
        for entry in shell.run_in_process("data", "list", "--json").json()["sources"]
        if entry["name"] == "openwebtext"
    )
    assert (row["here"], row["partial_bytes"] >= 500) == (False, True)
    server.requests.clear()
    assert shell.run_in_process(*command, "--quiet").err == ""
    assert [entry.range for entry in server.requests] == ["bytes=500-", None]


@pytest.mark.parametrize("small_disk", ["1m"], indirect=True)
def test_full_disk_during_a_download_gets_one_line(
    shell: Shell, server: Server, small_disk: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not send the size of the file, so the lack of space cannot be known
    before.
    """
    monkeypatch.setattr("steelyard.sources.download.SPARE_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(small_disk))
    server.pages[f"/m/openwebtext/{STEM}_ids.npy"] = Page(
        bytes(3 << 20), length=False, chunked=True
    )
    result = shell.run_in_process(
        "data", "get", "openwebtext", "--mirror", f"{server.url}/m", "--quiet"
    )
    folder = small_disk / "steelyard" / "data"
    line = f"error: {folder}: No space left on device; fix it, then run the same command again\n"
    assert (result.code, result.out, result.err) == (1, "", line)
    assert not (folder / "openwebtext").exists()
    part_bytes = (folder / ".openwebtext.part" / f"{STEM}_ids.npy.part").stat().st_size
    server.pages[f"/m/openwebtext/{STEM}_ids.npy"] = Page(bytes(3 << 20))
    result = shell.run_in_process(
        "data", "get", "openwebtext", "--mirror", f"{server.url}/m", "--quiet"
    )
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {(3 << 20) - part_bytes} bytes are needed in {folder}/")


@pytest.mark.full
def test_run_uses_downloaded_data(shell: Shell, server: Server, cache: Path) -> None:
    """A model of two layers runs at size full with the documents that `data get` downloaded."""
    assert (
        shell.run_in_process(
            "data", "get", "openwebtext", "--mirror", f"{server.url}/m", "--quiet"
        ).code
        == 0
    )
    model_shape = {
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 4,
        "ffn": 128,
        "vocab": 256,
        "positions": 32,
    }
    settings = [f"question.model.{name}={value}" for name, value in model_shape.items()]
    settings += [
        "question.train.length=32",
        "question.train.batch=2",
        "question.data.held_out=1",
        "question.precision=fp32",
    ]
    settings += ["tune.compile=false", "tune.micro_batch=1"]
    options = [word for setting in settings for word in ("--set", setting)]
    command = (
        *FULL_RUN,
        "--data",
        "auto",
        "--steps",
        "2",
        "--passes",
        "train",
        *options,
        "--out",
        shell.out,
    )
    result = shell(*command, XDG_CACHE_HOME=str(cache.parents[1]))
    (record,) = shell.records()
    assert record["data"]["source"] == STEM, result.err
    assert record["status"] != "failed"  # it may be invalid on a busy machine


def test_model_of_the_hub_is_downloaded_and_listed(
    shell: Shell, server: Server, cache: Path
) -> None:
    pytest.importorskip("huggingface_hub")
    publish_model(server, "org/tiny", MODEL)
    variables = {
        "XDG_CACHE_HOME": str(cache.parents[1]),
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(shell.tmp / "hf"),
        "HF_TOKEN": "",
    }
    result = shell("weights", "get", "org/tiny", "--json", **variables)
    assert result.code == 0, result.err
    answer = result.json()
    assert (answer["path"], answer["revision"], answer["licence"]) == (
        str(cache.parent / "weights" / "org--tiny"),
        REVISION,
        "mit",
    )
    assert [entry["path"] for entry in answer["files"]] == [
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    rows = shell.run_in_process("weights", "list", "--json").json()["sources"]
    assert [row["path"] for row in rows if row["here"]] == [answer["path"]]


def test_list_of_weights_marks_gated_models(shell: Shell, cache: Path) -> None:
    lines = {
        line.split()[0]: line for line in shell.run_in_process("weights", "list").out.splitlines()
    }
    assert lines["llama2-7b"].split()[1:3] == ["/", "gated"]
    assert lines["folder:"].endswith("/steelyard/weights")
