"""Download data sets and models into the user's cache, list them, and find what `--data auto`
means.

The work of the commands `data get`, `data list`, `weights get` and `weights list`; `sources/` does
the downloading.
"""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from steelyard.case import resolve
from steelyard.case.case import Case
from steelyard.cli.printing import (
    OutputOptions,
    align_columns,
    format_file_sizes,
    format_size,
    print_json,
    print_stderr,
    print_stdout,
    to_one_line,
)
from steelyard.cli.progress import show_bytes_progress
from steelyard.errors import RequestError
from steelyard.run import environment
from steelyard.run.clock import read_utc_time, sleep
from steelyard.sources import catalog, huggingface
from steelyard.sources import fetch as sources
from steelyard.sources.catalog import CatalogSource, SourceKind
from steelyard.sources.download import DownloadError, DownloadTools, TransferMeter
from steelyard.sources.fetch import FetchOptions
from steelyard.sources.http import HttpClient
from steelyard.sources.store import CheckedBy, SourceStore, StoredSource

AUTO_PATH = "auto"  # in place of a path: what was downloaded
MAX_TIMEOUT_S = 86400

_CHECK_TEXTS: dict[CheckedBy, str] = {
    "table": "checked by its known hash",
    "pins": "checked by its pin",
    "hub": "checked by the hub's list",
    "first use": "pinned at first use",
    "nothing": "not checked",
}


def find_data_path(data: Path | None, case: Case) -> Path | None:
    """Return the path that --data means for a case: the path itself, unchecked, or for `auto` the
    folder of the downloaded data set of its task.

    Return None if `data` is None, and for `auto` at size smoke, whose data is generated. Raise
    RequestError if `auto` has no data set for the task, it is not downloaded yet, or the case makes
    its data itself.
    """
    if data is None or str(data) != AUTO_PATH:
        return data
    if case.size == "smoke":
        return None
    task = case.question.task_row
    if not task.needs_data(case.question.data):
        raise RequestError(f"--data auto: {case.name} makes its data itself; leave --data out")
    source = catalog.find_task_source(task.name)
    if source is None:
        raise RequestError(f"--data auto: no data set is known for task {task.name!r}; give a path")
    stored = _open_store("data").find(source.name)
    if stored is None:
        raise RequestError(
            f"--data auto: {source.name} is not here yet; run steelyard data get {source.name}"
            " first"
        )
    return stored.path


def make_fetch_options(
    offline_folder: Path | None, mirrors: list[str] | None, again: bool, repin: bool
) -> FetchOptions:
    """Check the options of `data get` and `weights get` and return them as one object.
    `offline_folder` is that of --from, a folder to take files from instead of the network; `again`
    and `repin` are passed on.

    Raise RequestError if --from is no folder or combined with --mirror, or a mirror is no http
    address or holds a password.
    """
    if offline_folder is not None and not offline_folder.is_dir():
        raise RequestError(
            f"--from {str(offline_folder)!r} is not a folder; name the one that has the files"
        )
    if offline_folder is not None and mirrors:
        raise RequestError("--from and --mirror cannot be combined; drop one")
    for url in mirrors or []:
        if not url.startswith(("https://", "http://")):
            raise RequestError(f"--mirror {url!r}: not an address; allowed: https://… or http://…")
        if "@" in url.split("/")[2]:
            raise RequestError(
                "--mirror: an address with a user name or password is not allowed; leave them out"
            )
    return FetchOptions(tuple(mirrors or ()), offline_folder, again, repin)


def find_data_name(name: str) -> str:
    """Return the name of the data set to download: that of the case's task if `name` is a shipped
    case, otherwise `name` unchanged, known or not. Raise RequestError if the case makes its data
    itself.
    """
    if name not in resolve.list_shipped_cases():
        return name
    question = resolve.resolve_case(name).case.question
    if not question.task_row.needs_data(question.data):
        raise RequestError(f"{name} makes its data itself; there is nothing to get")
    source = catalog.find_task_source(question.task_row.name)
    return name if source is None else source.name


def get_source(
    kind: SourceKind,
    name: str,
    revision: str | None,
    options: FetchOptions,
    timeout_s: float,
    output: OutputOptions,
) -> int:
    """Download a data set or model (`kind`) into the user's cache unless it is there, print on
    stdout what was got (with --json its manifest), and return the exit code: 0, or 1 with a line on
    stderr if the download, the disk or the user ended it.

    `revision` is one of the hub, `timeout_s` how long a connection may be silent. Progress goes to
    stderr. Raise RequestError for an unknown name, a bad timeout, and options that do not fit the
    source.
    """
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise RequestError(
            f"--timeout {timeout_s:g}: must be more than 0 and at most {MAX_TIMEOUT_S} seconds"
        )
    source = catalog.find_source(kind, name)
    if revision is not None and not source.hub:
        raise RequestError(
            f"--revision {revision}: {source.name} is not a model of the hub; leave it out"
        )
    if revision is not None and options.offline is not None:
        raise RequestError(
            "--revision and --from cannot be combined: a folder has the revision that was put"
            " there; drop one"
        )
    if source.hub and options.mirrors:
        raise RequestError(
            f"--mirror: {source.name} is a model of the hub; name a mirror of the hub in"
            " HF_ENDPOINT"
        )
    store = _open_store(kind)

    def print_line(text: str) -> None:
        """Print a line on stderr: any text normally, with --quiet only texts that begin with
        `warning:`, with --json nothing.
        """
        if not output.silent or (text.startswith("warning:") and not output.json):
            print_stderr(to_one_line(text))

    print_line(
        f"{source.name}: {source.title}; licence: {source.licence or 'see its page'}; {source.page}"
    )
    try:
        with show_bytes_progress(source.name, output.silent) as watch:
            tools = DownloadTools(HttpClient(timeout_s), sleep, print_line, TransferMeter(watch))
            if source.hub:
                stored, was_here = huggingface.fetch_model(
                    store, source, revision, options, tools, read_utc_time
                )
            else:
                stored, was_here = sources.fetch_source(
                    store, source, options, tools, read_utc_time
                )
    except DownloadError as error:
        print_stderr(f"error: {to_one_line(error)}")
        return 1
    except OSError as error:  # of the disk: network errors are DownloadErrors
        print_stderr(
            f"error: {to_one_line(store.folder)}: {to_one_line(error.strerror or error)}; fix it,"
            " then run the same command again"
        )
        return 1
    except KeyboardInterrupt:
        print_stderr("interrupted; run the same command again to continue")
        return 1
    if output.json:
        print_json(
            {
                **_source_to_json(source, stored, 0),
                "before": was_here,
                **stored.manifest.model_dump(exclude={"version", "name", "licence"}),
            }
        )
    else:
        print_stdout(_format_result(kind, source, stored, was_here, store))
    return 0


def _open_store(kind: SourceKind) -> SourceStore:
    """Return the store of downloaded data sets or models (`kind`) in the user's cache, whose folder
    is created if needed. Raise RequestError if it cannot be, or others can write it.
    """
    try:
        return SourceStore(environment.make_private_cache(os.environ, kind))
    except OSError as error:
        raise RequestError(
            f"the folder for {kind} cannot be created: {error}; {environment.CACHE_HINT}"
        ) from error


def _format_result(
    kind: SourceKind,
    source: CatalogSource,
    stored: StoredSource,
    was_here: bool,
    store: SourceStore,
) -> str:
    """Return the text that `get` prints at its end: files with sizes, how each download was checked
    (unless all was there before), the folder, and how to use it.
    """
    manifest = stored.manifest
    lines = format_file_sizes([(item.path, item.size_bytes) for item in manifest.files])
    if not was_here:
        lines += [
            f"{_CHECK_TEXTS[item.checked_by]}: {item.name} sha256 {item.sha256}"
            for item in manifest.downloads
        ]
        lines += (
            [f"pins are in {store.pins_path}"]
            if any(item.checked_by == "first use" for item in manifest.downloads)
            else []
        )
    state = "already here" if was_here else "done"
    lines.append(
        f"{source.name}: {state}, {len(manifest.files)} file(s),"
        f" {format_size(manifest.size_bytes)}, in"
        f" {to_one_line(stored.path)}"
    )
    path = to_one_line(stored.path)
    without_case = (
        f"\n  or without a case: steelyard run --model {path} --task mmlu --data auto"
        if source.hub
        else ""
    )
    lines.append(
        "use it with --data auto"
        if kind == "data"
        else f"use it with --weights {path}{without_case}"
    )
    return "\n".join(lines)


def print_sources(kind: SourceKind, as_json: bool) -> None:
    """Print on stdout all data sets or models (`kind`) of the catalog, then others that were
    downloaded, one line each with size, state (`here`, bytes so far, `gated` or `-`) and licence,
    then the folder; or as JSON with `folder` and `sources`. The folder is created if needed;
    RequestError if it cannot be used.
    """
    store = _open_store(kind)
    unlisted = [
        name
        for name in store.list_names()
        if name not in {item.name for item in catalog.CATALOG[kind]}
    ]
    shown = [*catalog.CATALOG[kind], *(catalog.make_unlisted_source(name) for name in unlisted)]
    rows = [
        _source_to_json(item, store.find(item.name), store.count_partial_bytes(item.name))
        for item in shown
    ]
    if as_json:
        print_json({"folder": str(store.folder), "sources": rows})
        return
    lines = align_columns(
        [
            (item["name"], _format_entry_size(item), _format_entry_state(item), item["licence"])
            for item in rows
        ]
    )
    print_stdout(
        "\n".join(
            [
                *lines,
                f"folder: {to_one_line(store.folder)}",
                f"download one: steelyard {kind} get NAME",
            ]
        )
    )


def _source_to_json(
    source: CatalogSource, stored: StoredSource | None, partial_bytes: int
) -> dict[str, Any]:
    """Return a data set or model as JSON data, for `list` and `get`: name, title, licence, page,
    `gated`, `here`, path, sizes and files. `stored` is the complete download of it, or None;
    `partial_bytes` are those of an unfinished one. `size_bytes` is None if it is not known before
    the download.
    """
    file_sizes = [file.size_bytes for file in source.files]
    return {
        "name": source.name,
        "title": source.title,
        "licence": source.licence if stored is None else stored.manifest.licence,
        "page": source.page,
        "gated": source.gated,
        "here": stored is not None,
        "path": None if stored is None else str(stored.path),
        "size_bytes": (
            stored.manifest.size_bytes
            if stored
            else sum(map(int, file_sizes))  # type: ignore[arg-type]
            if file_sizes and None not in file_sizes
            else None
        ),
        "partial_bytes": partial_bytes,
        "files": [asdict(file) for file in source.files],
    }


def _format_entry_size(entry: dict[str, Any]) -> str:
    """Format the size in an entry of the list, `/` if unknown."""
    return "/" if entry["size_bytes"] is None else format_size(entry["size_bytes"])


def _format_entry_state(entry: dict[str, Any]) -> str:
    """Return the state in an entry of the list: `here`, the size of a partial download, `gated`, or
    `-`.
    """
    if entry["here"]:
        return "here"
    return (
        f"{format_size(entry['partial_bytes'])} so far"
        if entry["partial_bytes"]
        else "gated"
        if entry["gated"]
        else "-"
    )
