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
from steelyard.sources.download import (
    DownloadError,
    Expected,
    Meter,
    MismatchError,
    Tools,
    check,
    check_space,
)
from steelyard.sources.get import TREE, Wish
from steelyard.sources.store import Downloaded, Here, Pin, Store
from steelyard.sources.table import Source

TEXTS = (".json", ".txt", ".model", ".md", ".jinja", ".tiktoken")
LICENCES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
MOST_BYTES = 1 << 40  # of one file
NOT_STATED = "not stated"
NO_WEIGHTS = (
    "neither safetensors nor pytorch_model.bin at its top; take a model that has one of these"
)
INSTALL = (
    "huggingface_hub is not installed, which models of the hub need; run pip install"
    " 'steelyard[hub]'"
)


@dataclass(frozen=True)
class Model:
    """The files of a hub model at one revision (commit hash), and its licence."""

    revision: str
    licence: str
    files: tuple[Expected, ...]


def get(
    store: Store,
    source: Source,
    revision: str | None,
    wish: Wish,
    tools: Tools,
    today: Callable[[], str],
    endpoint: str | None = None,
) -> tuple[Here, bool]:
    """Fetch a model into the store; return it, and whether it was already there at that revision
    (then nothing is downloaded, unless `options` say again or repin).

    `revision` is a branch, tag or commit; None: the pinned one, else main, which is then pinned.
    With `options.offline` the model is copied from that folder. `endpoint` is the hub's address,
    None: the one that $HF_ENDPOINT names. `today` returns the current time as text. Other processes
    that fetch the same model wait. Raises RequestError if huggingface_hub is missing or the model
    is unknown, gated or unsuitable, DownloadError if a download fails.
    """
    with store.locked(
        source.name, lambda: tools.say(f"{source.name}: another process is getting it; waiting")
    ):
        here = store.find(source.name)
        if (
            here is not None
            and not (wish.again or wish.repin)
            and revision in (None, here.manifest.revision)
        ):
            return here, True
        tree = store.working(source.name) / TREE
        if wish.offline is not None:
            shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True, exist_ok=True)
        if wish.offline is not None:
            return _copied(store, source, wish.offline, tree, today()), False
        if find_spec("huggingface_hub") is None:
            raise RequestError(INSTALL)
        pin = None if wish.repin else store.pins().get(source.hub)
        model = _asked(
            source,
            lambda: _listed(source.hub, revision or (pin.revision if pin else None), endpoint),
        )
        if (
            here is not None
            and not (wish.again or wish.repin)
            and model.revision == here.manifest.revision
        ):
            return here, True  # a branch or a tag that still names the same commit
        arrived = _asked(source, lambda: _downloaded(source.hub, model, tree, tools, endpoint))
        shutil.rmtree(tree / ".cache", ignore_errors=True)
        if revision is None:
            store.pin({source.hub: Pin(url=source.page, revision=model.revision, time=today())})
        licence = source.licence or model.licence
        return store.appear(tree, source.name, licence, today(), arrived, model.revision), False


def chosen(names: Iterable[str]) -> list[str]:
    """Return the names of the model files to download, sorted: text files, the licence and the
    weights in one form, at the top of the repository only.

    Of weights, safetensors are preferred to pytorch_model*.bin, and files named consolidated* are
    taken only if there are no other safetensors.
    """
    top = sorted(name for name in names if "/" not in name)
    texts = [name for name in top if name.endswith(TEXTS) or name.upper().startswith(LICENCES)]
    tensors = [name for name in top if name.endswith(".safetensors")]
    # consolidated* are the same weights in another layout
    plain = [name for name in tensors if not name.startswith("consolidated")]
    weights = (
        plain
        or tensors
        or [name for name in top if name.endswith(".bin") and name.startswith("pytorch_model")]
    )
    unread = {f"{name}.index.json" for name in ("pytorch_model.bin",)} if tensors else set()
    return [name for name in top if name in {*texts, *weights} - unread]


def has_weights(names: Iterable[str]) -> bool:
    """Return whether one of these names is a safetensors or .bin file."""
    return any(name.endswith((".safetensors", ".bin")) for name in names)


def _listed(hub: str, revision: str | None, endpoint: str | None) -> Model:
    """Ask the hub for the files of a model at a revision (None: main). Raises RequestError if there
    is no config.json or no weights at its top.
    """
    from huggingface_hub import HfApi

    info = HfApi(endpoint, library_name="steelyard").model_info(
        hub, revision=revision, files_metadata=True
    )
    names = chosen(one.rfilename for one in info.siblings or [])
    if "config.json" not in names:
        raise RequestError(
            f"{hub}: no config.json at its top; it is not a model that transformers reads"
        )
    if not has_weights(names):
        raise RequestError(f"{hub}: {NO_WEIGHTS}")
    files = tuple(_expected(one) for one in info.siblings or [] if one.rfilename in names)
    licence = info.card_data.get("license") if info.card_data is not None else None
    return Model(str(info.sha), str(licence or NOT_STATED), files)


def _expected(listed: Any) -> Expected:
    """Return what a file must be, from the hub's listing: a large file (Git LFS) is checked by its
    SHA-256, a small one by its git object id.
    """
    sha256, git_blob = (None, listed.blob_id) if listed.lfs is None else (listed.lfs.sha256, None)
    return Expected(listed.rfilename, listed.size, sha256, git_blob, MOST_BYTES, "the hub", "hub")


def _downloaded(
    hub: str, model: Model, tree: Path, tools: Tools, endpoint: str | None
) -> list[Downloaded]:
    """Download all files of a model into `tree` and return what each is; files that are there and
    right are not downloaded again, files of another revision are deleted.

    Raises MismatchError if a file is not as listed, NoSpaceError if the disk is full, and the hub
    library's errors.
    """
    from huggingface_hub import hf_hub_download, hf_hub_url

    names = {one.name for one in model.files}
    # partial files of a killed command, which the library never resumes
    shutil.rmtree(tree / ".cache", ignore_errors=True)
    for path in tree.iterdir():
        if path.is_file() and path.name not in names:
            path.unlink()  # of another revision that an earlier command began
    missing = [one for one in model.files if not _is_whole(tree, one)]
    check_space(tree, sum(one.size_bytes or 0 for one in missing))
    tools.meter.begin(sum(one.size_bytes or 0 for one in missing))
    bar = _bar(tools.meter)
    out = []
    for one in model.files:
        if one in missing:
            hf_hub_download(
                hub,
                one.name,
                revision=model.revision,
                local_dir=tree,
                tqdm_class=bar,
                endpoint=endpoint,
            )
        url = hf_hub_url(hub, one.name, revision=model.revision, endpoint=endpoint)
        out.append(check(tree / one.name, one, url))
    return out


def _is_whole(tree: Path, one: Expected) -> bool:
    """Return whether a file of `tree` is the expected one; a wrong one is deleted."""
    try:
        check(tree / one.name, one)
    except FileNotFoundError:
        return False
    except MismatchError:
        (tree / one.name).unlink()
        return False
    return True


def _bar(meter: Meter) -> type[Any]:
    """Return a tqdm class for the hub's library that shows nothing and adds the bytes received to
    `meter`.
    """
    from huggingface_hub import utils

    tqdm: Any = getattr(utils, "tqdm")  # noqa: B009  exported, though not in the way that a type checker knows

    class Bar(tqdm):  # type: ignore[misc]
        """A progress bar that is never drawn and counts bytes."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            """Create a disabled tqdm bar, whatever the caller asks for."""
            super().__init__(*arguments, **{**settings, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            """Add received bytes to the meter."""
            meter.add(int(n or 0))
            return None

        def update_transfer(self, *arguments: Any, **settings: Any) -> None:
            """Ignore bytes that the chunk store (Xet) sends. Without this method the library makes
            a second bar, and bytes count twice.
            """

        def set_transfer_postfix_str(self, *arguments: Any, **settings: Any) -> None:
            """Ignore the transfer's status text."""

    return Bar


def _asked(source: Source, ask: Callable[[], Any]) -> Any:
    """Call a function that uses the hub's library and return its result; turn the library's errors
    into one line.

    RequestError for what the user can mend (gated model, unknown model or revision, bad id),
    DownloadError for a wrong file or a failed transfer.
    """
    from huggingface_hub import errors

    # The base class of its HTTP library's errors (requests or httpx, depending on the version).
    network: type[Exception] = next(
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
        raise RequestError(f"{source.hub!r} is no id of a model: {error}") from error
    except MismatchError as error:
        raise DownloadError(f"{source.hub}: {error}; run the same command again") from error
    except (network, OSError, RuntimeError) as error:  # RuntimeError comes from hf_xet
        first = " ".join(str(error).split())[:300] or type(error).__name__
        raise DownloadError(
            f"{source.hub}: {first}; run the same command again: files that are whole stay"
        ) from error


def _copied(store: Store, source: Source, folder: Path, tree: Path, time: str) -> Here:
    """Copy a model from a local folder (or its subfolder named like the model) into the store. Its
    files are not checked against anything. Raises RequestError if there is no config.json or no
    weights.
    """
    places = (
        folder / source.hub.replace("/", "--"),
        folder / PurePosixPath(source.hub).name,
        folder / source.name,
        folder,
    )
    place = next((one for one in places if (one / "config.json").is_file()), None)
    if place is None:
        raise RequestError(
            f"--from {folder}: no config.json in it, nor in {places[0].name}/ or {places[1].name}/"
            " below it"
        )
    names = chosen(path.name for path in place.iterdir() if path.is_file())
    if not has_weights(names):
        raise RequestError(f"--from {place}: {NO_WEIGHTS}")
    check_space(tree, sum((place / name).stat().st_size for name in names))
    arrived = []
    for name in names:
        shutil.copyfile(place / name, tree / name)
        unknown = Expected(name, None, None, None, MOST_BYTES, "")
        arrived.append(check(tree / name, unknown, (place / name).absolute().as_uri()))
    return store.appear(tree, source.name, source.licence or NOT_STATED, time, arrived)
