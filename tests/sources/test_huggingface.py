"""Test fetching models through huggingface_hub itself, against a server that answers as the hub
does.
"""

import hashlib
from pathlib import Path

import pytest

from fixtures.golden import golden
from fixtures.hub import FILES, REVISION, WEIGHTS, publish_model
from fixtures.web import Page, Server
from steelyard.errors import RequestError
from steelyard.sources import catalog, huggingface
from steelyard.sources.download import DownloadError
from steelyard.sources.fetch import FetchOptions
from steelyard.sources.store import SourceStore


@pytest.fixture
def store(tmp_path: Path) -> SourceStore:
    """Return an empty store."""
    (tmp_path / "weights").mkdir()
    return SourceStore(tmp_path / "weights")


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip without huggingface_hub, and hide a token of the user."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_TOKEN", "")


@pytest.fixture
def get(server: Server, told, store: SourceStore):
    """Return a function that fetches a model from the test server, or from the address `at`."""

    def fetch(
        name: str = "org/tiny",
        revision: str | None = None,
        wish: FetchOptions | None = None,
        at: str = "",
    ):
        entry = catalog.find_source("weights", name)
        return huggingface.fetch_model(
            store,
            entry,
            revision,
            wish or FetchOptions(),
            told.tools(),
            lambda: "2026-11-16",
            at or server.url,
        )

    return fetch


def test_a_model_is_fetched_without_code_and_duplicate_weights(server, get, told, store):
    publish_model(server, "org/tiny", FILES)
    stored, was_stored = get()
    assert (stored.path, was_stored) == (store.folder / "org--tiny", False)
    names = ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert [file.path for file in stored.manifest.files] == names
    assert {name: (stored.path / name).read_bytes() for name in names} == {
        name: FILES[name] for name in names
    }
    assert (stored.manifest.revision, stored.manifest.licence) == (REVISION, "mit")
    assert {downloaded.checked_by for downloaded in stored.manifest.downloads} == {"hub"}
    assert {downloaded.name: downloaded.sha256 for downloaded in stored.manifest.downloads} == {
        name: hashlib.sha256(FILES[name]).hexdigest() for name in names
    }
    assert told.watched[-1] == (sum(len(FILES[name]) for name in names),) * 2
    assert store.read_pins()["org/tiny"].revision == REVISION
    server.requests.clear()
    assert get() == (stored, True)
    assert server.requests == []


def test_the_revision_of_the_first_use_is_pinned(server, get, told, store):
    publish_model(server, "org/tiny", FILES)
    get()
    publish_model(
        server, "org/tiny", {**FILES, "config.json": b'{"model_type": "other"}'}, "f" * 40
    )
    stored, _ = get(wish=FetchOptions(again=True))
    assert (stored.manifest.revision, (stored.path / "config.json").read_bytes()) == (
        REVISION,
        FILES["config.json"],
    )
    stored, _ = get(wish=FetchOptions(repin=True))
    assert (stored.manifest.revision, store.read_pins()["org/tiny"].revision) == ("f" * 40,) * 2
    stored, was_stored = get(revision=REVISION)
    assert (stored.manifest.revision, was_stored) == (REVISION, False)


def test_a_file_that_is_not_what_the_hub_lists_is_refused(server, get, told, store):
    publish_model(server, "org/tiny", FILES)
    server.pages[f"/org/tiny/resolve/{REVISION}/model.safetensors"].content = WEIGHTS[::-1]
    with pytest.raises(DownloadError, match=r"sha256 .*; the hub says"):
        get()
    assert store.find("org/tiny") is None
    publish_model(server, "org/tiny", FILES)
    assert get()[1] is False


def test_a_broken_download_is_continued_without_files_of_another_revision(server, get, told, store):
    publish_model(server, "org/tiny", FILES)
    tree = store.working_folder("org/tiny") / "tree"
    tree.mkdir(parents=True)
    (tree / "model-00001-of-00002.safetensors").write_bytes(b"of another revision")
    (tree / "config.json").write_bytes(b"of another revision")
    server.pages[f"/org/tiny/resolve/{REVISION}/model.safetensors"].cuts = [100_000]
    stored, _ = get()
    assert [file.path for file in stored.manifest.files] == [
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (stored.path / "config.json").read_bytes() == FILES["config.json"]
    assert (stored.path / "model.safetensors").read_bytes() == WEIGHTS
    # huggingface_hub requests the file a second time after the cut
    assert [request.path.rpartition("/")[2] for request in server.requests].count(
        "model.safetensors"
    ) == 2


def test_a_gated_model_is_refused_with_the_page_of_its_licence(server, get, told, store):
    publish_model(server, "meta-llama/Llama-2-7b-hf", FILES)
    gated_headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}
    for name in FILES:
        server.pages[f"/meta-llama/Llama-2-7b-hf/resolve/{REVISION}/{name}"] = Page(
            statuses=[403] * 9, headers=gated_headers
        )
    with pytest.raises(RequestError) as error:
        get("llama2-7b")
    assert str(error.value) == (golden("meta-llama-llama-2-7-hf"))


def test_unknown_models_and_revisions_are_refused(server, get, told, store):
    missing_headers = {"X-Error-Code": "RepoNotFound"}
    server.pages["/api/models/org/none"] = Page(statuses=[404], headers=missing_headers)
    with pytest.raises(
        RequestError, match="no model 'org/none' on the hub, or it is private: check the name"
    ):
        get("org/none")
    server.pages["/api/models/org/none/revision/v9"] = Page(
        statuses=[404], headers={"X-Error-Code": "RevisionNotFound"}
    )
    with pytest.raises(
        RequestError,
        match=r"org/none has no such revision; see https://huggingface.co/org/none/commits/main",
    ):
        get("org/none", "v9")
    with pytest.raises(RequestError, match=r"'org/a\.\.b' is not the id of a model: "):
        get("org/a..b")
    publish_model(server, "org/data", {"data.csv": b""})
    with pytest.raises(RequestError, match=r"org/data: no config\.json at its top"):
        get("org/data")


def test_an_unreachable_hub_is_reported_in_one_line(get):
    with pytest.raises(
        DownloadError,
        match=r"^org/tiny: .*; run the same command again: complete files are kept$",
    ):
        get(at="http://127.0.0.1:9")


def test_a_missing_huggingface_hub_package_is_reported(get, monkeypatch):
    monkeypatch.setattr(huggingface, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"run pip install 'steelyard\[hub\]'"):
        get()


@pytest.mark.parametrize("below", [".", "org--tiny", "tiny"])
def test_a_model_is_copied_from_an_offline_folder(server, get, store, tmp_path, below):
    folder = tmp_path / "usb" / below
    folder.mkdir(parents=True)
    with pytest.raises(
        RequestError, match=r"no config\.json in it, nor in org--tiny/ or tiny/ below it"
    ):
        get(wish=FetchOptions(offline=tmp_path / "usb"))
    for name in ("config.json", "model.safetensors", "modeling_odd.py"):
        (folder / name).write_bytes(FILES[name])
    stored, _ = get(wish=FetchOptions(offline=tmp_path / "usb"))
    assert [file.path for file in stored.manifest.files] == ["config.json", "model.safetensors"]
    assert (server.requests, stored.manifest.revision) == ([], None)
    assert {downloaded.checked_by for downloaded in stored.manifest.downloads} == {"nothing"}
    assert store.read_pins() == {}


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (
            ["config.json", "pytorch_model.bin", "optimizer.bin"],
            ["config.json", "pytorch_model.bin"],
        ),
        (
            [
                "consolidated.safetensors",
                "model-00001-of-00002.safetensors",
                "model.safetensors.index.json",
            ],
            ["model-00001-of-00002.safetensors", "model.safetensors.index.json"],
        ),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
        (
            ["model.safetensors", "pytorch_model.bin.index.json", "pytorch_model-1-of-1.bin"],
            ["model.safetensors"],
        ),
        (
            ["LICENSE", "USE_POLICY.md", "tokenizer.model", "run.py", "a/config.json"],
            ["LICENSE", "USE_POLICY.md", "tokenizer.model"],
        ),
    ],
)
def test_which_files_of_a_model_are_downloaded(names, taken):
    assert huggingface.choose_files(names) == taken


def test_a_branch_at_the_stored_commit_is_not_downloaded_again(server, get, told, store):
    publish_model(server, "org/tiny", FILES)
    stored, _ = get()
    server.requests.clear()
    assert get(revision="main") == (stored, True)
    # the commit of the branch is looked up, and no weights are requested
    assert not any("model.safetensors" in str(request) for request in server.requests)


def test_a_model_without_weights_is_refused(server, get, tmp_path):
    publish_model(
        server,
        "org/tiny",
        {name: text for name, text in FILES.items() if not name.endswith((".safetensors", ".bin"))},
    )
    with pytest.raises(
        RequestError, match=r"org/tiny: neither safetensors nor pytorch_model\.bin at its top"
    ):
        get()
    (tmp_path / "config.json").write_bytes(FILES["config.json"])
    with pytest.raises(RequestError, match="neither safetensors nor"):
        get(wish=FetchOptions(offline=tmp_path))


def test_transferred_bytes_are_counted_once(told):
    """The library reports bytes of its chunk store through a second method of the progress bar;
    these must not be added to those of `update`.
    """
    meter = told.tools().meter
    meter.begin_transfer(100)
    bar = huggingface._make_bar_class(meter)(total=100)
    bar.update_transfer(60)
    bar.set_transfer_postfix_str("60 B/s")
    bar.update(100)
    assert [report for report in told.watched if report[0]] == [(100, 100)]


def test_a_failure_of_xet_storage_is_reported_in_one_line(server, get, monkeypatch):
    publish_model(server, "org/tiny", FILES)

    def fail(*arguments, **settings):
        raise RuntimeError("Data processing error: CAS service error")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(
        DownloadError,
        match="org/tiny: Data processing error: CAS service error; run the same command again",
    ):
        get()
