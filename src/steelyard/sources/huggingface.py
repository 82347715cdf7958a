"""Fetch a model of the Hugging Face hub with huggingface_hub: its files at one revision, each
checked by what the hub lists.

Python code of a model is never downloaded. Weights are downloaded in one form: safetensors, or
`.bin` if there are none. Called by `cli/get.py`; the result lies in the store like any other
source.
"""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from steelyard.errors import RequestError
from steelyard.sources.catalog import CatalogSource
from steelyard.sources.download import (
    DownloadError,
    DownloadTools,
    ExpectedFile,
    MismatchError,
    TransferMeter,
    check_disk_space,
    check_file,
)
from steelyard.sources.fetch import TREE_FOLDER, FetchOptions
from steelyard.sources.store import DownloadedFile, Pin, SourceStore, StoredSource

TEXT_SUFFIXES = (".json", ".txt", ".model", ".md", ".jinja", ".tiktoken")
LICENCE_NAMES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
MOST_BYTES = 1 << 40  # of one file
NOT_STATED = "not stated"
NO_WEIGHTS = (
    "neither safetensors nor pytorch_model.bin at its top; choose a model that has one of these"
)
INSTALL = (
    "huggingface_hub is not installed, which models of the hub need; run pip install"
    " 'steelyard[hub]'"
)


@dataclass(frozen=True)
class HubModel:
    """What the hub lists of a model at one revision: `revision`, the commit hash, `licence`, and
    `files` to download (ExpectedFile), with the size and hash each must have.
    """

    revision: str
    licence: str
    files: tuple[ExpectedFile, ...]


def fetch_model(
    store: SourceStore,
    source: CatalogSource,
    revision: str | None,
    options: FetchOptions,
    tools: DownloadTools,
    today: Callable[[], str],
    endpoint: str | None = None,
) -> tuple[StoredSource, bool]:
    """Fetch a hub model into the store; return it, and whether it was already there at that
    revision (then nothing is downloaded, unless `options` say again or repin).

    `revision` is a branch, tag or commit; None: whatever is stored, else the pinned one, else main,
    which is then pinned. With `options.offline` the model is copied from that folder, unchecked.
    `endpoint` is the hub's address, None: the one that $HF_ENDPOINT names. `today` returns the
    current time as text. Other processes that fetch the same model wait. Raises RequestError if
    huggingface_hub is missing, or the model is unknown, gated or unsuitable; DownloadError if a
    download fails; NoSpaceError.
    """
    with store.lock_source(
        source.name, lambda: tools.say(f"{source.name}: another process is downloading it; waiting")
    ):
        stored = store.find(source.name)
        if (
            stored is not None
            and not (options.again or options.repin)
            and revision in (None, stored.manifest.revision)
        ):
            return stored, True
        tree = store.working_folder(source.name) / TREE_FOLDER
        if options.offline is not None:
            shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True, exist_ok=True)
        if options.offline is not None:
            return _copy_model(store, source, options.offline, tree, today()), False
        if find_spec("huggingface_hub") is None:
            raise RequestError(INSTALL)
        pin = None if options.repin else store.read_pins().get(source.hub)
        model = _ask_hub(
            source,
            lambda: _list_files(source.hub, revision or (pin.revision if pin else None), endpoint),
        )
        if (
            stored is not None
            and not (options.again or options.repin)
            and model.revision == stored.manifest.revision
        ):
            return stored, True  # a branch or a tag that still names the same commit
        downloads = _ask_hub(
            source, lambda: _download_files(source.hub, model, tree, tools, endpoint)
        )
        shutil.rmtree(tree / ".cache", ignore_errors=True)
        if revision is None:
            store.add_pins(
                {source.hub: Pin(url=source.page, revision=model.revision, time=today())}
            )
        licence = source.licence or model.licence
        return store.publish(tree, source.name, licence, today(), downloads, model.revision), False


def choose_files(names: Iterable[str]) -> list[str]:
    """Return the names of the model files to download, sorted: those with a suffix of
    `TEXT_SUFFIXES`, licences, and the weights in one form; only names without a folder.

    Weights are all safetensors, else pytorch_model*.bin. Safetensors named consolidated* are taken
    only if there are no others. With safetensors the index of the .bin files is left out too.
    """
    top = sorted(name for name in names if "/" not in name)
    texts = [
        name
        for name in top
        if name.endswith(TEXT_SUFFIXES) or name.upper().startswith(LICENCE_NAMES)
    ]
    tensors = [name for name in top if name.endswith(".safetensors")]
    # consolidated* are the same weights in another layout
    standard = [name for name in tensors if not name.startswith("consolidated")]
    weights = (
        standard
        or tensors
        or [name for name in top if name.endswith(".bin") and name.startswith("pytorch_model")]
    )
    unused = {f"{name}.index.json" for name in ("pytorch_model.bin",)} if tensors else set()
    return [name for name in top if name in {*texts, *weights} - unused]


def has_weights(names: Iterable[str]) -> bool:
    """Return whether one of these file names ends in .safetensors or .bin."""
    return any(name.endswith((".safetensors", ".bin")) for name in names)


def _list_files(model_id: str, revision: str | None, endpoint: str | None) -> HubModel:
    """Ask the hub for a model at a revision (None: main); return its commit, its licence ("not
    stated" if its card has none), and the files to download (`choose_files`) with the size and hash
    to check each by. Raises RequestError if there is no config.json or no weights among them, and
    the errors of huggingface_hub.
    """
    from huggingface_hub import HfApi

    info = HfApi(endpoint, library_name="steelyard").model_info(
        model_id, revision=revision, files_metadata=True
    )
    names = choose_files(listed.rfilename for listed in info.siblings or [])
    if "config.json" not in names:
        raise RequestError(
            f"{model_id}: no config.json at its top; it is not a model that transformers reads"
        )
    if not has_weights(names):
        raise RequestError(f"{model_id}: {NO_WEIGHTS}")
    files = tuple(
        _expect_listed(listed) for listed in info.siblings or [] if listed.rfilename in names
    )
    licence = info.card_data.get("license") if info.card_data is not None else None
    return HubModel(str(info.sha), str(licence or NOT_STATED), files)


def _expect_listed(listed: Any) -> ExpectedFile:
    """Return what a file must be from its entry in the hub's listing: name, size, and the SHA-256
    of a large file (Git LFS) or the git object id of a small one.
    """
    sha256, git_blob = (None, listed.blob_id) if listed.lfs is None else (listed.lfs.sha256, None)
    return ExpectedFile(
        listed.rfilename, listed.size, sha256, git_blob, MOST_BYTES, "the hub", "hub"
    )


def _download_files(
    model_id: str, model: HubModel, tree: Path, tools: DownloadTools, endpoint: str | None
) -> list[DownloadedFile]:
    """Download the files of a model into `tree` and check them; return name, address, size and
    SHA-256 of each, in the listed order.

    Files that are there and right are not downloaded again; wrong ones, other files at the top of
    `tree`, and its `.cache` are deleted first. Raises MismatchError if a file is not as listed,
    NoSpaceError if the disk is too full for all that is missing, and the errors of huggingface_hub.
    """
    from huggingface_hub import hf_hub_download, hf_hub_url

    names = {expected.name for expected in model.files}
    # partial files of a killed command, which the library never resumes
    shutil.rmtree(tree / ".cache", ignore_errors=True)
    for path in tree.iterdir():
        if path.is_file() and path.name not in names:
            path.unlink()  # of another revision that an earlier command began
    missing = [expected for expected in model.files if not _has_right_file(tree, expected)]
    check_disk_space(tree, sum(expected.size_bytes or 0 for expected in missing))
    tools.meter.begin_transfer(sum(expected.size_bytes or 0 for expected in missing))
    bar = _make_bar_class(tools.meter)
    downloads = []
    for expected in model.files:
        if expected in missing:
            hf_hub_download(
                model_id,
                expected.name,
                revision=model.revision,
                local_dir=tree,
                tqdm_class=bar,
                endpoint=endpoint,
            )
        url = hf_hub_url(model_id, expected.name, revision=model.revision, endpoint=endpoint)
        downloads.append(check_file(tree / expected.name, expected, url))
    return downloads


def _has_right_file(tree: Path, expected: ExpectedFile) -> bool:
    """Return whether `tree` has the expected file with the expected size and hash; a wrong one is
    deleted.
    """
    try:
        check_file(tree / expected.name, expected)
    except FileNotFoundError:
        return False
    except MismatchError:
        (tree / expected.name).unlink()
        return False
    return True


def _make_bar_class(meter: TransferMeter) -> type[Any]:
    """Return a subclass of huggingface_hub's tqdm that is never drawn and adds the bytes received
    to `meter`; it is passed to the library as `tqdm_class`.
    """
    from huggingface_hub import utils

    tqdm: Any = getattr(utils, "tqdm")  # noqa: B009  exported, though not in the way that a type checker knows

    class MeterBar(tqdm):  # type: ignore[misc]
        """A progress bar that is never drawn, for huggingface_hub's `tqdm_class`; `update(n)` adds
        the bytes received to the TransferMeter of the enclosing function, and reports of the chunk
        store's transfer are ignored.
        """

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            """Create a disabled tqdm bar, whatever the caller asks for."""
            super().__init__(*arguments, **{**settings, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            """Add `n` received bytes to the meter (None: 0). Returns None."""
            meter.add(int(n or 0))
            return None

        def update_transfer(self, *arguments: Any, **settings: Any) -> None:
            """Ignore bytes that the chunk store (Xet) sends. Without this method the library makes
            a second bar, and bytes count twice.
            """

        def set_transfer_postfix_str(self, *arguments: Any, **settings: Any) -> None:
            """Ignore the transfer's status text."""

    return MeterBar


def _ask_hub(source: CatalogSource, ask: Callable[[], Any]) -> Any:
    """Call `ask`, which uses huggingface_hub, and return its result; turn the library's errors into
    errors of one line.

    Raises RequestError for what the user can mend (gated or unknown model, unknown revision, bad
    id); DownloadError for a MismatchError, and for network errors, OSError and RuntimeError. Others
    pass through, such as NoSpaceError.
    """
    from huggingface_hub import errors

    # The base class of its HTTP library's errors (requests or httpx, depending on the version).
    network_error: type[Exception] = next(
        base for base in errors.HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"
    )
    try:
        return ask()
    except errors.GatedRepoError as error:
        raise RequestError(
            f"{source.hub} is gated: accept its terms on {source.page} with your account, log in"
            " here with hf auth login (or set HF_TOKEN), and run the same command again"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise RequestError(
            f"{source.hub} has no such revision; see {source.page}/commits/main"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise RequestError(
            f"no model {source.hub!r} on the hub, or it is private: check the name, or log in with"
            " hf auth login"
        ) from error
    except errors.HFValidationError as error:
        raise RequestError(f"{source.hub!r} is not the id of a model: {error}") from error
    except MismatchError as error:
        raise DownloadError(f"{source.hub}: {error}; run the same command again") from error
    except (network_error, OSError, RuntimeError) as error:  # RuntimeError comes from hf_xet
        first = " ".join(str(error).split())[:300] or type(error).__name__
        raise DownloadError(
            f"{source.hub}: {first}; run the same command again: complete files are kept"
        ) from error


def _copy_model(
    store: SourceStore, source: CatalogSource, folder: Path, tree: Path, time: str
) -> StoredSource:
    """Copy a model's files (`choose_files`) from a local folder to `tree`, publish that in the
    store and return it. Their content is not checked against anything.

    The model's folder is the first that has a config.json: `folder`'s OWNER--NAME, NAME or
    subfolder named like the source, else `folder` itself. Raises RequestError if there is none or
    it has no weights, NoSpaceError if the disk is full.
    """
    folders = (
        folder / source.hub.replace("/", "--"),
        folder / PurePosixPath(source.hub).name,
        folder / source.name,
        folder,
    )
    model_folder = next(
        (candidate for candidate in folders if (candidate / "config.json").is_file()), None
    )
    if model_folder is None:
        raise RequestError(
            f"--from {folder}: no config.json in it, nor in {folders[0].name}/ or"
            f" {folders[1].name}/"
            " below it"
        )
    names = choose_files(path.name for path in model_folder.iterdir() if path.is_file())
    if not has_weights(names):
        raise RequestError(f"--from {model_folder}: {NO_WEIGHTS}")
    check_disk_space(tree, sum((model_folder / name).stat().st_size for name in names))
    downloads = []
    for name in names:
        shutil.copyfile(model_folder / name, tree / name)
        expected = ExpectedFile(name, None, None, None, MOST_BYTES, "")
        downloads.append(
            check_file(tree / name, expected, (model_folder / name).absolute().as_uri())
        )
    return store.publish(tree, source.name, source.licence or NOT_STATED, time, downloads)
