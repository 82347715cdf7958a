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

A, B = random.Random(1).randbytes(200_000), random.Random(2).randbytes(50_000)
TODAY = "2026-11-16T12:00:00.000+00:00"


def sha(content: bytes) -> str:
    """Return the SHA-256 of bytes in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def source(server: Server, *files: SourceFile) -> CatalogSource:
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


def one(
    server: Server,
    told,
    store: SourceStore,
    wanted: CatalogSource,
    wish: FetchOptions | None = None,
):
    """Fetch a source with the time TODAY; return where it is stored and whether it was stored
    before.
    """
    return fetch_source(store, wanted, wish or FetchOptions(), told.tools(), lambda: TODAY)


@pytest.fixture
def store(tmp_path):
    """Return an empty store."""
    (tmp_path / "store").mkdir()
    return SourceStore(tmp_path / "store")


def visible(store: SourceStore) -> list[str]:
    """Return the sorted names in a store, without lock files."""
    return sorted(path.name for path in store.folder.iterdir() if not path.name.endswith(".lock"))


def test_a_source_appears_whole_with_its_manifest(server, told, store):
    server.pages |= {"/a": Page(A), "/b": Page(B)}
    wanted = source(
        server,
        SourceFile("a.bin", ("/a",), len(A), sha(A)),
        SourceFile("b.bin", ("/b",), None, sha(B)),
    )
    assert store.find("some") is None
    here, before = one(server, told, store, wanted)
    assert (here.path, before) == (store.folder / "some", False)
    assert {
        path.name: path.read_bytes() for path in here.path.iterdir() if path.name != MANIFEST_NAME
    } == {"a.bin": A, "b.bin": B}
    assert json.loads((here.path / MANIFEST_NAME).read_text()) == {
        "version": 1,
        "name": "some",
        "licence": "MIT",
        "time": TODAY,
        "revision": None,
        "downloads": [
            {
                "name": "a.bin",
                "url": f"{server.url}/a",
                "size_bytes": len(A),
                "sha256": sha(A),
                "checked_by": "table",
            },
            {
                "name": "b.bin",
                "url": f"{server.url}/b",
                "size_bytes": len(B),
                "sha256": sha(B),
                "checked_by": "table",
            },
        ],
        "files": [{"path": "a.bin", "size_bytes": len(A)}, {"path": "b.bin", "size_bytes": len(B)}],
    }
    assert visible(store) == ["some"]
    assert store.find("some") == here
    server.seen.clear()
    assert one(server, told, store, wanted) == (here, True)
    assert server.seen == []


def test_nothing_appears_before_all_of_it_is_right(server, told, store):
    server.pages |= {"/a": Page(A), "/b": Page(A)}
    wanted = source(
        server,
        SourceFile("a.bin", ("/a",), len(A), sha(A)),
        SourceFile("b.bin", ("/b",), None, sha(B)),
    )
    with pytest.raises(
        DownloadError,
        match=f"b.bin could not be had: .*sha256 {sha(A)}; the table of sources says {sha(B)}",
    ):
        one(server, told, store, wanted)
    assert store.find("some") is None
    assert visible(store) == [".some.part"]
    server.pages["/b"] = Page(B)
    server.seen.clear()
    here, _ = one(server, told, store, wanted)
    assert [seen.path for seen in server.seen] == ["/b"]  # a.bin is kept from before
    assert here.manifest.downloads[0].url == f"{server.url}/a"
    assert visible(store) == ["some"]


def test_progress_counts_what_is_left_of_all_files(server, told, store):
    """An earlier command downloaded one file and a part of another: neither is in the rate or total
    of this one.
    """
    server.pages |= {"/a": Page(A), "/b": Page(B, cuts=[20_000, 0, 0, 0])}
    files = (
        SourceFile("a.bin", ("/a",), len(A), sha(A)),
        SourceFile("b.bin", ("/b",), len(B), sha(B)),
        SourceFile("c.bin", ("/a",), len(A), sha(A)),
    )
    with pytest.raises(DownloadError):
        one(server, told, store, source(server, *files))
    assert {total for _, total in told.watched} == {len(B) + 2 * len(A)}
    told.watched.clear()
    one(server, told, store, source(server, *files))
    assert {total for _, total in told.watched} == {len(B) - 20_000 + len(A)}
    assert told.watched[-1][0] == len(B) - 20_000 + len(A)


def test_a_file_that_was_damaged_on_its_way_is_got_again(server, told, store):
    server.pages |= {"/a": Page(A), "/b": Page(B, statuses=[404])}
    wanted = source(
        server, SourceFile("a.bin", ("/a",), len(A), sha(A)), SourceFile("b.bin", ("/b",))
    )
    with pytest.raises(DownloadError):
        one(server, told, store, wanted)
    (store.working_folder("some") / "a.bin").write_bytes(A[::-1])
    here, _ = one(server, told, store, wanted)
    assert (here.path / "a.bin").read_bytes() == A


@pytest.mark.parametrize("harm", ["shorter", "gone", "no manifest", "odd manifest"])
def test_a_source_that_is_not_whole_is_not_here(server, told, store, harm):
    server.pages["/a"] = Page(A)
    wanted = source(server, SourceFile("a.bin", ("/a",), len(A), sha(A)))
    here, _ = one(server, told, store, wanted)
    file, manifest = here.path / "a.bin", here.path / MANIFEST_NAME
    harms = {
        "shorter": lambda: file.write_bytes(A[:-1]),
        "gone": file.unlink,
        "no manifest": manifest.unlink,
        "odd manifest": lambda: manifest.write_text("[]"),
    }
    harms[harm]()
    assert store.find("some") is None
    again, before = one(server, told, store, wanted)
    assert (before, (again.path / "a.bin").read_bytes()) == (False, A)
    assert visible(store) == ["some"]


def test_a_file_without_a_hash_is_pinned_at_first_use(server, told, store):
    page = server.pages["/a"] = Page(A)
    wanted = source(server, SourceFile("a.bin", ("/a",)))
    here, _ = one(server, told, store, wanted)
    assert [(made.sha256, made.checked_by) for made in here.manifest.downloads] == [
        (sha(A), "first use")
    ]
    pin = {"url": f"{server.url}/a", "size_bytes": len(A), "sha256": sha(A), "time": TODAY}
    assert json.loads(store.pins_path.read_text()) == {"version": 1, "pins": {"some/a.bin": pin}}
    later, _ = fetch_source(
        store, wanted, FetchOptions(again=True), told.tools(), lambda: "2027-01-01"
    )
    assert [made.checked_by for made in later.manifest.downloads] == ["pins"]
    # the pin keeps the time of the first use
    assert json.loads(store.pins_path.read_text())["pins"] == {"some/a.bin": pin}
    page.content, page.etag = A[::-1], '"two"'
    line = (
        f"sha256 {sha(A[::-1])}; the lock file .pinned 2026-11-16; if it has changed on purpose:"
        f" --repin. says {sha(A)}"
    )
    with pytest.raises(DownloadError, match=line):
        one(server, told, store, wanted, FetchOptions(again=True))
    assert (here.path / "a.bin").read_bytes() == A  # the stored file is unchanged
    again, before = one(server, told, store, wanted, FetchOptions(repin=True))
    assert (before, (again.path / "a.bin").read_bytes()) == (False, A[::-1])
    assert store.read_pins()["some/a.bin"].sha256 == sha(A[::-1])


def test_the_table_is_not_overruled_by_a_pin(server, told, store):
    server.pages["/a"] = Page(B)
    one(server, told, store, source(server, SourceFile("a.bin", ("/a",))))
    known = source(server, SourceFile("a.bin", ("/a",), len(A), sha(A)))
    with pytest.raises(DownloadError, match=f"the table of sources says {len(A)}"):
        one(server, told, store, known, FetchOptions(repin=True))


def test_a_damaged_lock_file_is_not_taken_for_an_empty_one(server, told, store):
    store.pins_path.write_text("{}}")
    with pytest.raises(
        RequestError, match=r"pins\.json: not a lock file of Steelyard; bring it back, or remove it"
    ):
        one(server, told, store, source(server, SourceFile("a.bin", ("/a",))))


def record_zip(**names: bytes) -> bytes:
    """Return a zip with files of ReCoRD below one folder."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as out:
        for name, content in names.items():
            out.writestr(f"ReCoRD/{name}.jsonl", content)
    return raw.getvalue()


def test_an_archive_is_unpacked_and_files_lie_beside_it(server, told, store):
    packed = record_zip(train=b"1\n", val=b"2\n")
    server.pages |= {"/z": Page(packed), "/v": Page(B)}
    wanted = source(
        server,
        SourceFile("r.zip", ("/z",), None, sha(packed), top="train.jsonl"),
        SourceFile("vocab.txt", ("/v",)),
    )
    here, _ = one(server, told, store, wanted)
    assert sorted(piece.path for piece in here.manifest.files) == [
        "train.jsonl",
        "val.jsonl",
        "vocab.txt",
    ]
    assert [made.sha256 for made in here.manifest.downloads] == [sha(packed), sha(B)]
    assert visible(store) == ["pins.json", "some"]


def test_an_archive_that_is_none_is_neither_kept_nor_pinned(server, told, store):
    server.pages["/z"] = Page(b"an error, as text")
    wanted = source(server, SourceFile("r.zip", ("/z",), top="train.jsonl"))
    with pytest.raises(DownloadError, match=r"r\.zip from .*/z: not a readable tar or zip: "):
        one(server, told, store, wanted)
    assert (store.read_pins(), store.find("some")) == ({}, None)
    server.pages["/z"] = Page(record_zip(train=b"1\n"))
    assert one(server, told, store, wanted)[0].manifest.files[0].path == "train.jsonl"


def test_a_mirror_is_asked_first(server, told, store):
    server.pages |= {"/mirror/some/a.bin": Page(A), "/a": Page(A)}
    wanted = source(server, SourceFile("a.bin", ("/a",), len(A), sha(A)))
    here, _ = one(
        server,
        told,
        store,
        wanted,
        FetchOptions(mirrors=(f"{server.url}/none", f"{server.url}/mirror/")),
    )
    assert [seen.path for seen in server.seen] == ["/none/some/a.bin", "/mirror/some/a.bin"]
    assert here.manifest.downloads[0].url == f"{server.url}/mirror/some/a.bin"


@pytest.mark.parametrize("below", [".", "some"])
def test_a_folder_brings_the_files(server, told, store, tmp_path, below):
    folder = tmp_path / "usb" / below
    folder.mkdir(parents=True)
    wanted = source(
        server, SourceFile("a.bin", ("/a",), len(A), sha(A)), SourceFile("b.bin", ("/b",))
    )
    offline = FetchOptions(offline=tmp_path / "usb")
    (folder / "a.bin").write_bytes(A)
    with pytest.raises(
        RequestError, match=f"no b.bin in it, nor in its some/; bring it there from {server.url}/b"
    ):
        one(server, told, store, wanted, offline)
    (folder / "b.bin").write_bytes(B)
    here, _ = one(server, told, store, wanted, offline)
    assert ((here.path / "a.bin").read_bytes(), (here.path / "b.bin").read_bytes()) == (A, B)
    assert here.manifest.downloads[0].url == (folder / "a.bin").absolute().as_uri()
    assert (list(store.read_pins()), server.seen) == (["some/b.bin"], [])


def test_a_folder_with_another_file_is_refused(server, told, store, tmp_path):
    (tmp_path / "a.bin").write_bytes(B)
    wanted = source(server, SourceFile("a.bin", ("/a",), None, sha(A)))
    with pytest.raises(
        DownloadError, match=f"a.bin: sha256 {sha(B)}; the table of sources says {sha(A)}"
    ):
        one(server, told, store, wanted, FetchOptions(offline=tmp_path))
    assert store.find("some") is None


def test_room_is_looked_at_for_all_files_before_the_first(server, told, store, monkeypatch):
    server.pages["/a"] = Page(A)
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    wanted = source(
        server,
        SourceFile("a.bin", ("/a",), len(A), sha(A)),
        SourceFile("b.bin", ("/b",), 10**9, sha(B)),
    )
    with pytest.raises(
        NoSpaceError, match=f"^{len(A) + 10**9} bytes are needed in .*, and 0 are free"
    ):
        one(server, told, store, wanted)
    assert server.seen == []


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
"""


def worker(store: SourceStore, server: Server) -> "subprocess.Popen[str]":
    """Start a process that fetches a.bin and b.bin from the server and prints whether they were
    stored before, and their bytes.
    """
    command = [sys.executable, "-c", WORKER, str(store.folder), server.url]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(SRC)}, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.process
def test_of_two_processes_one_gets_it_and_the_other_waits(server, store):
    pause = threading.Event()
    server.pages |= {"/a": Page(A, pause=pause), "/b": Page(B)}
    first = worker(store, server)
    assert wait_for(lambda: server.seen)
    second = worker(store, server)
    assert second.stdout is not None
    assert second.stdout.readline() == golden("some-another-process-is-getting-it")
    pause.set()
    assert first.communicate(timeout=300)[0] == f"False {len(A) + len(B)}\n"
    assert second.communicate(timeout=300)[0] == f"True {len(A) + len(B)}\n"
    assert [seen.path for seen in server.seen] == ["/a", "/b"]


@pytest.mark.process
def test_a_killed_process_leaves_a_part_and_no_lock(server, told, store):
    page = server.pages["/a"] = Page(A, stalls=[150_000])
    server.pages["/b"] = Page(B)
    process = worker(store, server)
    part = store.working_folder("some") / "a.bin.part"
    assert wait_for(lambda: part.exists() and part.stat().st_size > 0)
    process.kill()
    process.communicate()
    had = part.stat().st_size
    assert (0 < had <= 150_000, store.find("some")) == (True, None)
    assert store.count_partial_bytes("some") >= had
    server.seen.clear()
    page.stalls.clear()
    wanted = source(server, SourceFile("a.bin", ("/a",)), SourceFile("b.bin", ("/b",)))
    here, _ = one(server, told, store, wanted)
    assert [(seen.path, seen.range) for seen in server.seen] == [
        ("/a", f"bytes={had}-"),
        ("/b", None),
    ]
    assert (here.path / "a.bin").read_bytes() == A


@pytest.mark.parametrize("name", ["", "..", ".x", "a b", "a\\b", "a\nb", "ä"])
def test_a_name_is_a_plain_folder(name):
    with pytest.raises(RequestError, match="is no name of a source"):
        make_folder_name(name)
    assert make_folder_name("a/../b") == "a--..--b"


def test_the_table_is_sound():
    for kind, sources in catalog.CATALOG.items():
        assert len({row.name for row in sources}) == len(sources)
        for row in sources:
            assert make_folder_name(row.name) == row.name
            assert bool(row.files) != bool(row.hub), row.name
            assert row.licence
            assert row.page.startswith("https://")
            assert sum(bool(file.top) for file in row.files) <= 1
            for file in row.files:
                assert Path(file.name).name == file.name
                assert all(url.startswith("https://") for url in file.urls)
                assert file.urls
                assert file.sha256 is None or len(bytes.fromhex(file.sha256)) == 32
                assert file.git_blob is None or len(bytes.fromhex(file.git_blob)) == 20
            assert catalog.find_source(kind, row.name) is row


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
    }


def test_unknown_names_are_refused_with_the_nearest():
    for kind, name, line in (
        ("data", "mmul", "no data 'mmul' to get; did you mean 'mmlu'?"),
        ("data", "org/model", "no data 'org/model' to get; known: mmlu, lambada, "),
        (
            "weights",
            "smollm2-135",
            (
                "no weights 'smollm2-135' to get; did you mean 'smollm2-135m'? (or the id of a"
                " model, such as"
            ),
        ),
        ("weights", "a/b/c", "no weights 'a/b/c' to get; known: "),
    ):
        with pytest.raises(RequestError) as caught:
            catalog.find_source(kind, name)
        assert str(caught.value).startswith(line)
    assert catalog.find_source("weights", "org/model").hub == "org/model"


def test_known_hashes_are_those_of_the_files_that_are_here(data_dir):
    files = {file.name: file for row in catalog.DATA_SOURCES for file in row.files}
    for name, path in (
        ("lambada_test.jsonl", data_dir / "lambada" / "lambada_test.jsonl"),
        ("vocab.txt", data_dir / "tokenizers" / "bert-large-uncased" / "vocab.txt"),
    ):
        content = path.read_bytes()
        assert (files[name].size_bytes, files[name].sha256) == (len(content), sha(content))
