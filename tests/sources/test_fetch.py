"""Test fetching whole sources: what appears in the store, what is pinned, two processes at once,
and files from an offline folder.
"""

import hashlib
import io
import json
import os
import random
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fixtures.commands import SRC, wait_for
from fixtures.golden import golden
from fixtures.web import Page, Server
from steelyard.errors import RequestError
from steelyard.sources import catalog
from steelyard.sources import download as downloads
from steelyard.sources.catalog import CatalogSource, SourceFile
from steelyard.sources.download import DownloadError, NoSpaceError
from steelyard.sources.fetch import FetchOptions, fetch_source
from steelyard.sources.store import MANIFEST_NAME, SourceStore, make_folder_name

CONTENT_A, CONTENT_B = random.Random(1).randbytes(200_000), random.Random(2).randbytes(50_000)
TODAY = "2026-11-16T12:00:00.000+00:00"


def sha256_hex(content: bytes) -> str:
    """Return the SHA-256 of bytes in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def make_source(server: Server, *files: SourceFile) -> CatalogSource:
    """Return a source named "some" whose files are at paths of the server."""
    return CatalogSource(
        name="some",
        title="Some data",
        licence="MIT",
        page="https://example.org",
        files=tuple(
            replace(file, urls=tuple(f"{server.url}{url}" for url in file.urls)) for file in files
        ),
    )


def fetch_some(
    server: Server,
    log,
    store: SourceStore,
    catalog_source: CatalogSource,
    options: FetchOptions | None = None,
):
    """Fetch a source with the time TODAY; return where it is stored and whether it was stored
    before.
    """
    return fetch_source(
        store, catalog_source, options or FetchOptions(), log.tools(), lambda: TODAY
    )


@pytest.fixture
def store(tmp_path):
    """Return an empty store."""
    (tmp_path / "store").mkdir()
    return SourceStore(tmp_path / "store")


def list_store(store: SourceStore) -> list[str]:
    """Return the sorted names in a store, without lock files."""
    return sorted(path.name for path in store.folder.iterdir() if not path.name.endswith(".lock"))


def test_a_source_appears_whole_with_its_manifest(server, told, store):
    server.pages |= {"/a": Page(CONTENT_A), "/b": Page(CONTENT_B)}
    catalog_source = make_source(
        server,
        SourceFile("a.bin", ("/a",), len(CONTENT_A), sha256_hex(CONTENT_A)),
        SourceFile("b.bin", ("/b",), None, sha256_hex(CONTENT_B)),
    )
    assert store.find("some") is None
    stored, was_stored = fetch_some(server, told, store, catalog_source)
    assert (stored.path, was_stored) == (store.folder / "some", False)
    assert {
        path.name: path.read_bytes() for path in stored.path.iterdir() if path.name != MANIFEST_NAME
    } == {"a.bin": CONTENT_A, "b.bin": CONTENT_B}
    assert json.loads((stored.path / MANIFEST_NAME).read_text()) == {
        "version": 1,
        "name": "some",
        "licence": "MIT",
        "time": TODAY,
        "revision": None,
        "downloads": [
            {
                "name": "a.bin",
                "url": f"{server.url}/a",
                "size_bytes": len(CONTENT_A),
                "sha256": sha256_hex(CONTENT_A),
                "checked_by": "table",
            },
            {
                "name": "b.bin",
                "url": f"{server.url}/b",
                "size_bytes": len(CONTENT_B),
                "sha256": sha256_hex(CONTENT_B),
                "checked_by": "table",
            },
        ],
        "files": [
            {"path": "a.bin", "size_bytes": len(CONTENT_A)},
            {"path": "b.bin", "size_bytes": len(CONTENT_B)},
        ],
    }
    assert list_store(store) == ["some"]
    assert store.find("some") == stored
    server.requests.clear()
    assert fetch_some(server, told, store, catalog_source) == (stored, True)
    assert server.requests == []


def test_a_source_appears_only_when_all_files_are_right(server, told, store):
    server.pages |= {"/a": Page(CONTENT_A), "/b": Page(CONTENT_A)}
    catalog_source = make_source(
        server,
        SourceFile("a.bin", ("/a",), len(CONTENT_A), sha256_hex(CONTENT_A)),
        SourceFile("b.bin", ("/b",), None, sha256_hex(CONTENT_B)),
    )
    with pytest.raises(
        DownloadError,
        match=(
            f"b.bin could not be downloaded: .*sha256 {sha256_hex(CONTENT_A)}; the catalog says"
            f" {sha256_hex(CONTENT_B)}"
        ),
    ):
        fetch_some(server, told, store, catalog_source)
    assert store.find("some") is None
    assert list_store(store) == [".some.part"]
    server.pages["/b"] = Page(CONTENT_B)
    server.requests.clear()
    stored, _ = fetch_some(server, told, store, catalog_source)
    assert [request.path for request in server.requests] == ["/b"]  # a.bin is kept from before
    assert stored.manifest.downloads[0].url == f"{server.url}/a"
    assert list_store(store) == ["some"]


def test_progress_counts_the_missing_bytes_of_all_files(server, told, store):
    """An earlier command downloaded one file and a part of another: neither is in the rate or total
    of this one.
    """
    server.pages |= {"/a": Page(CONTENT_A), "/b": Page(CONTENT_B, cuts=[20_000, 0, 0, 0])}
    files = (
        SourceFile("a.bin", ("/a",), len(CONTENT_A), sha256_hex(CONTENT_A)),
        SourceFile("b.bin", ("/b",), len(CONTENT_B), sha256_hex(CONTENT_B)),
        SourceFile("c.bin", ("/a",), len(CONTENT_A), sha256_hex(CONTENT_A)),
    )
    with pytest.raises(DownloadError):
        fetch_some(server, told, store, make_source(server, *files))
    assert {total for _, total in told.watched} == {len(CONTENT_B) + 2 * len(CONTENT_A)}
    told.watched.clear()
    fetch_some(server, told, store, make_source(server, *files))
    assert {total for _, total in told.watched} == {len(CONTENT_B) - 20_000 + len(CONTENT_A)}
    assert told.watched[-1][0] == len(CONTENT_B) - 20_000 + len(CONTENT_A)


def test_a_file_damaged_in_the_working_folder_is_downloaded_again(server, told, store):
    server.pages |= {"/a": Page(CONTENT_A), "/b": Page(CONTENT_B, statuses=[404])}
    catalog_source = make_source(
        server,
        SourceFile("a.bin", ("/a",), len(CONTENT_A), sha256_hex(CONTENT_A)),
        SourceFile("b.bin", ("/b",)),
    )
    with pytest.raises(DownloadError):
        fetch_some(server, told, store, catalog_source)
    (store.working_folder("some") / "a.bin").write_bytes(CONTENT_A[::-1])
    stored, _ = fetch_some(server, told, store, catalog_source)
    assert (stored.path / "a.bin").read_bytes() == CONTENT_A


@pytest.mark.parametrize("harm", ["shorter", "gone", "no manifest", "odd manifest"])
def test_a_damaged_source_is_fetched_again(server, told, store, harm):
    server.pages["/a"] = Page(CONTENT_A)
    catalog_source = make_source(
        server, SourceFile("a.bin", ("/a",), len(CONTENT_A), sha256_hex(CONTENT_A))
    )
    stored, _ = fetch_some(server, told, store, catalog_source)
    file, manifest = stored.path / "a.bin", stored.path / MANIFEST_NAME
    damages = {
        "shorter": lambda: file.write_bytes(CONTENT_A[:-1]),
        "gone": file.unlink,
        "no manifest": manifest.unlink,
        "odd manifest": lambda: manifest.write_text("[]"),
    }
    damages[harm]()
    assert store.find("some") is None
    stored_again, was_stored = fetch_some(server, told, store, catalog_source)
    assert (was_stored, (stored_again.path / "a.bin").read_bytes()) == (False, CONTENT_A)
    assert list_store(store) == ["some"]


def test_a_file_without_a_hash_is_pinned_at_first_use(server, told, store):
    page = server.pages["/a"] = Page(CONTENT_A)
    catalog_source = make_source(server, SourceFile("a.bin", ("/a",)))
    stored, _ = fetch_some(server, told, store, catalog_source)
    assert [
        (downloaded.sha256, downloaded.checked_by) for downloaded in stored.manifest.downloads
    ] == [(sha256_hex(CONTENT_A), "first use")]
    pin = {
        "url": f"{server.url}/a",
        "size_bytes": len(CONTENT_A),
        "sha256": sha256_hex(CONTENT_A),
        "time": TODAY,
    }
    assert json.loads(store.pins_path.read_text()) == {"version": 1, "pins": {"some/a.bin": pin}}
    later, _ = fetch_source(
        store, catalog_source, FetchOptions(again=True), told.tools(), lambda: "2027-01-01"
    )
    assert [downloaded.checked_by for downloaded in later.manifest.downloads] == ["pins"]
    # the pin keeps the time of the first use
    assert json.loads(store.pins_path.read_text())["pins"] == {"some/a.bin": pin}
    page.content, page.etag = CONTENT_A[::-1], '"two"'
    reason = (
        f"sha256 {sha256_hex(CONTENT_A[::-1])}; the lock file .pinned 2026-11-16; if it has changed"
        f" on purpose: --repin. says {sha256_hex(CONTENT_A)}"
    )
    with pytest.raises(DownloadError, match=reason):
        fetch_some(server, told, store, catalog_source, FetchOptions(again=True))
    assert (stored.path / "a.bin").read_bytes() == CONTENT_A  # the stored file is unchanged
    repinned, was_stored = fetch_some(server, told, store, catalog_source, FetchOptions(repin=True))
    assert (was_stored, (repinned.path / "a.bin").read_bytes()) == (False, CONTENT_A[::-1])
    assert store.read_pins()["some/a.bin"].sha256 == sha256_hex(CONTENT_A[::-1])


def test_a_pin_does_not_overrule_the_catalog(server, told, store):
    server.pages["/a"] = Page(CONTENT_B)
    fetch_some(server, told, store, make_source(server, SourceFile("a.bin", ("/a",))))
    with_hash = make_source(
        server, SourceFile("a.bin", ("/a",), len(CONTENT_A), sha256_hex(CONTENT_A))
    )
    with pytest.raises(DownloadError, match=f"the catalog says {len(CONTENT_A)}"):
        fetch_some(server, told, store, with_hash, FetchOptions(repin=True))


def test_a_damaged_pin_file_is_refused(server, told, store):
    store.pins_path.write_text("{}}")
    with pytest.raises(
        RequestError, match=r"pins\.json: not a lock file of Steelyard; restore it, or remove it"
    ):
        fetch_some(server, told, store, make_source(server, SourceFile("a.bin", ("/a",))))


def make_record_zip(**names: bytes) -> bytes:
    """Return a zip with files of ReCoRD below one folder."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in names.items():
            archive.writestr(f"ReCoRD/{name}.jsonl", content)
    return buffer.getvalue()


def test_an_archive_is_unpacked_beside_the_other_files(server, told, store):
    zip_content = make_record_zip(train=b"1\n", val=b"2\n")
    server.pages |= {"/z": Page(zip_content), "/v": Page(CONTENT_B)}
    catalog_source = make_source(
        server,
        SourceFile("r.zip", ("/z",), None, sha256_hex(zip_content), top="train.jsonl"),
        SourceFile("vocab.txt", ("/v",)),
    )
    stored, _ = fetch_some(server, told, store, catalog_source)
    assert sorted(file.path for file in stored.manifest.files) == [
        "train.jsonl",
        "val.jsonl",
        "vocab.txt",
    ]
    assert [downloaded.sha256 for downloaded in stored.manifest.downloads] == [
        sha256_hex(zip_content),
        sha256_hex(CONTENT_B),
    ]
    assert list_store(store) == ["pins.json", "some"]


def test_an_invalid_archive_is_neither_stored_nor_pinned(server, told, store):
    server.pages["/z"] = Page(b"an error, as text")
    catalog_source = make_source(server, SourceFile("r.zip", ("/z",), top="train.jsonl"))
    with pytest.raises(DownloadError, match=r"r\.zip from .*/z: not a readable tar or zip: "):
        fetch_some(server, told, store, catalog_source)
    assert (store.read_pins(), store.find("some")) == ({}, None)
    server.pages["/z"] = Page(make_record_zip(train=b"1\n"))
    assert (
        fetch_some(server, told, store, catalog_source)[0].manifest.files[0].path == "train.jsonl"
    )


def test_mirrors_are_asked_before_the_origin(server, told, store):
    server.pages |= {"/mirror/some/a.bin": Page(CONTENT_A), "/a": Page(CONTENT_A)}
    catalog_source = make_source(
        server, SourceFile("a.bin", ("/a",), len(CONTENT_A), sha256_hex(CONTENT_A))
    )
    stored, _ = fetch_some(
        server,
        told,
        store,
        catalog_source,
        FetchOptions(mirrors=(f"{server.url}/none", f"{server.url}/mirror/")),
    )
    assert [request.path for request in server.requests] == [
        "/none/some/a.bin",
        "/mirror/some/a.bin",
    ]
    assert stored.manifest.downloads[0].url == f"{server.url}/mirror/some/a.bin"


@pytest.mark.parametrize("below", [".", "some"])
def test_files_are_copied_from_an_offline_folder(server, told, store, tmp_path, below):
    folder = tmp_path / "usb" / below
    folder.mkdir(parents=True)
    catalog_source = make_source(
        server,
        SourceFile("a.bin", ("/a",), len(CONTENT_A), sha256_hex(CONTENT_A)),
        SourceFile("b.bin", ("/b",)),
    )
    offline = FetchOptions(offline=tmp_path / "usb")
    (folder / "a.bin").write_bytes(CONTENT_A)
    with pytest.raises(
        RequestError, match=f"no b.bin in it, nor in its some/; copy it there from {server.url}/b"
    ):
        fetch_some(server, told, store, catalog_source, offline)
    (folder / "b.bin").write_bytes(CONTENT_B)
    stored, _ = fetch_some(server, told, store, catalog_source, offline)
    assert ((stored.path / "a.bin").read_bytes(), (stored.path / "b.bin").read_bytes()) == (
        CONTENT_A,
        CONTENT_B,
    )
    assert stored.manifest.downloads[0].url == (folder / "a.bin").absolute().as_uri()
    assert (list(store.read_pins()), server.requests) == (["some/b.bin"], [])


def test_an_offline_folder_with_another_file_is_refused(server, told, store, tmp_path):
    (tmp_path / "a.bin").write_bytes(CONTENT_B)
    catalog_source = make_source(server, SourceFile("a.bin", ("/a",), None, sha256_hex(CONTENT_A)))
    with pytest.raises(
        DownloadError,
        match=(f"a.bin: sha256 {sha256_hex(CONTENT_B)}; the catalog says {sha256_hex(CONTENT_A)}"),
    ):
        fetch_some(server, told, store, catalog_source, FetchOptions(offline=tmp_path))
    assert store.find("some") is None


def test_disk_space_for_all_files_is_checked_before_the_first(server, told, store, monkeypatch):
    server.pages["/a"] = Page(CONTENT_A)
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    catalog_source = make_source(
        server,
        SourceFile("a.bin", ("/a",), len(CONTENT_A), sha256_hex(CONTENT_A)),
        SourceFile("b.bin", ("/b",), 10**9, sha256_hex(CONTENT_B)),
    )
    with pytest.raises(
        NoSpaceError, match=f"^{len(CONTENT_A) + 10**9} bytes are needed in .*, and 0 are free"
    ):
        fetch_some(server, told, store, catalog_source)
    assert server.requests == []


WORKER = """
import sys
from pathlib import Path
from steelyard.sources.download import TransferMeter, DownloadTools
from steelyard.sources.fetch import FetchOptions, fetch_source
from steelyard.sources.http import HttpClient
from steelyard.sources.store import SourceStore
from steelyard.sources.catalog import SourceFile, CatalogSource
source = CatalogSource("some", "", "MIT", "", (SourceFile("a.bin", (sys.argv[2] + "/a",)), SourceFile("b.bin", (sys.argv[2] + "/b",))))
say = lambda text: print(text, flush=True)
here, before = fetch_source(SourceStore(Path(sys.argv[1])), source, FetchOptions(), DownloadTools(HttpClient(), None, say, TransferMeter(lambda *_: None)), lambda: "now")
print(before, here.manifest.size_bytes)
"""  # noqa: E501


def start_worker(store: SourceStore, server: Server) -> "subprocess.Popen[str]":
    """Start a process that fetches a.bin and b.bin from the server and prints whether they were
    stored before, and their bytes.
    """
    command = [sys.executable, "-c", WORKER, str(store.folder), server.url]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(SRC)}, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.process
def test_of_two_processes_one_downloads_and_the_other_waits(server, store):
    pause = threading.Event()
    server.pages |= {"/a": Page(CONTENT_A, pause=pause), "/b": Page(CONTENT_B)}
    first = start_worker(store, server)
    assert wait_for(lambda: server.requests)
    second = start_worker(store, server)
    assert second.stdout is not None
    assert second.stdout.readline() == golden("some-another-process-is-getting-it")
    pause.set()
    assert first.communicate(timeout=300)[0] == f"False {len(CONTENT_A) + len(CONTENT_B)}\n"
    assert second.communicate(timeout=300)[0] == f"True {len(CONTENT_A) + len(CONTENT_B)}\n"
    assert [request.path for request in server.requests] == ["/a", "/b"]


@pytest.mark.process
def test_a_killed_process_leaves_a_part_and_no_lock(server, told, store):
    page = server.pages["/a"] = Page(CONTENT_A, stalls=[150_000])
    server.pages["/b"] = Page(CONTENT_B)
    process = start_worker(store, server)
    part = store.working_folder("some") / "a.bin.part"
    assert wait_for(lambda: part.exists() and part.stat().st_size > 0)
    process.kill()
    process.communicate()
    part_bytes = part.stat().st_size
    assert (0 < part_bytes <= 150_000, store.find("some")) == (True, None)
    assert store.count_partial_bytes("some") >= part_bytes
    server.requests.clear()
    page.stalls.clear()
    catalog_source = make_source(server, SourceFile("a.bin", ("/a",)), SourceFile("b.bin", ("/b",)))
    stored, _ = fetch_some(server, told, store, catalog_source)
    assert [(request.path, request.range) for request in server.requests] == [
        ("/a", f"bytes={part_bytes}-"),
        ("/b", None),
    ]
    assert (stored.path / "a.bin").read_bytes() == CONTENT_A


@pytest.mark.parametrize("name", ["", "..", ".x", "a b", "a\\b", "a\nb", "ä"])
def test_a_source_name_that_is_no_plain_folder_is_refused(name):
    with pytest.raises(RequestError, match="is not the name of a source"):
        make_folder_name(name)
    assert make_folder_name("a/../b") == "a--..--b"


def test_every_catalog_source_is_well_formed():
    for kind, sources in catalog.CATALOG.items():
        assert len({entry.name for entry in sources}) == len(sources)
        for entry in sources:
            assert make_folder_name(entry.name) == entry.name
            assert bool(entry.files) != bool(entry.hub), entry.name
            assert entry.licence
            assert entry.page.startswith("https://")
            assert sum(bool(file.top) for file in entry.files) <= 1
            for file in entry.files:
                assert Path(file.name).name == file.name
                assert all(url.startswith("https://") for url in file.urls)
                assert file.urls
                assert file.sha256 is None or len(bytes.fromhex(file.sha256)) == 32
                assert file.git_blob is None or len(bytes.fromhex(file.git_blob)) == 20
            assert catalog.find_source(kind, entry.name) is entry


def test_every_shipped_task_has_a_source():
    from steelyard import tasks

    assert {
        task.name: getattr(catalog.find_task_source(task.name), "name", None)
        for task in tasks.SHIPPED_TASKS
    } == {
        "mmlu": "mmlu",
        "lambada": "lambada",
        "openwebtext": "openwebtext",
        "alpaca": "alpaca",
        "superglue_record": "record",
        "generate": "openwebtext",
    }


def test_unknown_names_are_refused_with_the_nearest():
    for kind, name, reason in (
        ("data", "mmul", "no data named 'mmul' in the catalog; did you mean 'mmlu'?"),
        ("data", "org/model", "no data named 'org/model' in the catalog; known: mmlu, lambada, "),
        (
            "weights",
            "smollm2-135",
            (
                "no weights named 'smollm2-135' in the catalog; did you mean 'smollm2-135m'? (or"
                " the id of a model, such as"
            ),
        ),
        ("weights", "a/b/c", "no weights named 'a/b/c' in the catalog; known: "),
    ):
        with pytest.raises(RequestError) as error:
            catalog.find_source(kind, name)
        assert str(error.value).startswith(reason)
    assert catalog.find_source("weights", "org/model").hub == "org/model"


def test_catalog_hashes_equal_those_of_the_shared_files(data_dir):
    files = {file.name: file for entry in catalog.DATA_SOURCES for file in entry.files}
    for name, path in (
        ("lambada_test.jsonl", data_dir / "lambada" / "lambada_test.jsonl"),
        ("vocab.txt", data_dir / "tokenizers" / "bert-large-uncased" / "vocab.txt"),
    ):
        content = path.read_bytes()
        assert (files[name].size_bytes, files[name].sha256) == (len(content), sha256_hex(content))
