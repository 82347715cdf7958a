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
from steelyard.cli.out import Output, aligned, answer, dump, one_line, say, size, sized
from steelyard.cli.progress import showing_bytes
from steelyard.errors import RequestError
from steelyard.run import environment
from steelyard.run.clock import sleep, today
from steelyard.sources import get as sources
from steelyard.sources import hub, table
from steelyard.sources.download import DownloadError, Meter, Tools
from steelyard.sources.get import Wish
from steelyard.sources.http import Web
from steelyard.sources.store import CheckedBy, Here, Store
from steelyard.sources.table import Kind, Source

AUTO = "auto"  # in place of a path: what was downloaded
MOST_TIMEOUT_S = 86400

_CHECKED: dict[CheckedBy, str] = {
    "table": "checked by its known hash",
    "pins": "checked by its pin",
    "hub": "checked by the hub's list",
    "first use": "pinned at first use",
    "nothing": "not checked",
}


def data_of(data: Path | None, case: Case) -> Path | None:
    """Return the path that --data means for a case: the path itself, or for `auto` the downloaded
    data set of its task.

    Return None if `data` is None, and for `auto` at size smoke, whose data is generated. Raise
    RequestError if `auto` has no data set for the task, or it is not downloaded yet.
    """
    if data is None or str(data) != AUTO:
        return data
    if case.size == "smoke":
        return None
    source = table.of_task(case.question.row.name)
    if source is None:
        raise RequestError(
            f"--data auto: nothing is known to get for task {case.question.row.name!r}; give a path"
        )
    here = _store("data").find(source.name)
    if here is None:
        raise RequestError(
            f"--data auto: {source.name} is not here yet; run steelyard data get {source.name}"
            " first"
        )
    return here.path


def checked_wish(offline: Path | None, mirrors: list[str] | None, again: bool, repin: bool) -> Wish:
    """Check the options of `data get` and `weights get` and return them as one object;
    `offline_folder` is that of --from.

    Raise RequestError if --from is no folder or combined with --mirror, or a mirror is no http
    address or holds a password.
    """
    if offline is not None and not offline.is_dir():
        raise RequestError(
            f"--from {str(offline)!r} is not a folder; name the one that has the files"
        )
    if offline is not None and mirrors:
        raise RequestError("--from and --mirror cannot be combined; drop one")
    for url in mirrors or []:
        if not url.startswith(("https://", "http://")):
            raise RequestError(f"--mirror {url!r}: not an address; allowed: https://… or http://…")
        if "@" in url.split("/")[2]:
            raise RequestError("--mirror: an address with a name and a password in it is not taken")
    return Wish(tuple(mirrors or ()), offline, again, repin)


def data_name(name: str) -> str:
    """Return the name of the data set to download: that of the case's task if `name` is a shipped
    case, otherwise `name` unchanged, known or not.
    """
    if name not in resolve.names():
        return name
    found = table.of_task(resolve.resolve(name).case.question.row.name)
    return name if found is None else found.name


def get(
    kind: Kind, name: str, revision: str | None, wish: Wish, timeout: float, output: Output
) -> int:
    """Download a data set or model into the user's cache unless it is there, print what was got,
    and return the exit code: 0, or 1 if the download, the disk or the user ended it.

    `revision` is one of the hub, `timeout_s` how long a connection may be silent. Raise
    RequestError for an unknown name, and for options that do not fit the source.
    """
    if not 0 < timeout <= MOST_TIMEOUT_S:
        raise RequestError(
            f"--timeout {timeout:g}: must be more than 0 and at most {MOST_TIMEOUT_S} seconds"
        )
    source = table.row(kind, name)
    if revision is not None and not source.hub:
        raise RequestError(
            f"--revision {revision}: {source.name} is not a model of the hub; leave it out"
        )
    if revision is not None and wish.offline is not None:
        raise RequestError(
            "--revision and --from cannot be combined: a folder has the revision that was put"
            " there; drop one"
        )
    if source.hub and wish.mirrors:
        raise RequestError(
            f"--mirror: {source.name} is a model of the hub; name a mirror of the hub in"
            " HF_ENDPOINT"
        )
    store = _store(kind)

    def tell(text: str) -> None:
        """Print a line on stderr; with --quiet only warnings, with --json nothing."""
        if not output.silent or (text.startswith("warning:") and not output.json):
            say(one_line(text))

    tell(
        f"{source.name}: {source.title}; licence: {source.licence or 'see its page'}; {source.page}"
    )
    try:
        with showing_bytes(source.name, output.silent) as watch:
            tools = Tools(Web(timeout), sleep, tell, Meter(watch))
            if source.hub:
                here, before = hub.get(store, source, revision, wish, tools, today)
            else:
                here, before = sources.get(store, source, wish, tools, today)
    except DownloadError as error:
        say(f"error: {one_line(error)}")
        return 1
    except OSError as error:  # of the disk: network errors are DownloadErrors
        say(
            f"error: {one_line(store.folder)}: {one_line(error.strerror or error)}; mend that, then"
            " run the same command again"
        )
        return 1
    except KeyboardInterrupt:
        say("interrupted; run the same command again to go on")
        return 1
    if output.json:
        dump(
            {
                **_row(source, here, 0),
                "before": before,
                **here.manifest.model_dump(exclude={"version", "name", "licence"}),
            }
        )
    else:
        answer(_got(kind, source, here, before, store))
    return 0


def _store(kind: Kind) -> Store:
    """Return the store of downloaded data sets or models in the user's cache, whose folder is
    created. Raise RequestError if it cannot be.
    """
    try:
        return Store(environment.private_cache(os.environ, kind))
    except OSError as error:
        raise RequestError(
            f"the folder for {kind} cannot be made: {error}; {environment.CACHE_HINT}"
        ) from error


def _got(kind: Kind, source: Source, here: Here, before: bool, store: Store) -> str:
    """Format what `get` prints: files with sizes, how each download was checked (unless it was
    there before), the folder, and how to use it.
    """
    made = here.manifest
    lines = sized([(one.path, one.size_bytes) for one in made.files])
    if not before:
        lines += [
            f"{_CHECKED[one.checked_by]}: {one.name} sha256 {one.sha256}" for one in made.downloads
        ]
        lines += (
            [f"pins are in {store.pins_path}"]
            if any(one.checked_by == "first use" for one in made.downloads)
            else []
        )
    state = "already here" if before else "done"
    lines.append(
        f"{source.name}: {state}, {len(made.files)} file(s), {size(made.size_bytes)}, in"
        f" {one_line(here.path)}"
    )
    path = one_line(here.path)
    own = (
        f"\n  or without a case: steelyard run --model {path} --task mmlu --data auto"
        if source.hub
        else ""
    )
    lines.append(
        "use it with --data auto" if kind == "data" else f"use it with --weights {path}{own}"
    )
    return "\n".join(lines)


def show_list(kind: Kind, as_json: bool) -> None:
    """Print all known data sets or models (`kind`), and other downloaded ones, with size, state and
    licence; or as JSON.
    """
    store = _store(kind)
    others = [name for name in store.names() if name not in {one.name for one in table.TABLE[kind]}]
    listed = [*table.TABLE[kind], *(table.unlisted(name) for name in others)]
    rows = [_row(one, store.find(one.name), store.partial_bytes(one.name)) for one in listed]
    if as_json:
        dump({"folder": str(store.folder), "sources": rows})
        return
    lines = aligned([(one["name"], _size(one), _state(one), one["licence"]) for one in rows])
    answer(
        "\n".join(
            [*lines, f"folder: {one_line(store.folder)}", f"get one: steelyard {kind} get NAME"]
        )
    )


def _row(source: Source, here: Here | None, partial_bytes: int) -> dict[str, Any]:
    """Return a source as JSON data. `stored` is what is downloaded of it, or None; its size is None
    if it is not known before the download.
    """
    known = [file.size_bytes for file in source.files]
    return {
        "name": source.name,
        "title": source.title,
        "licence": source.licence if here is None else here.manifest.licence,
        "page": source.page,
        "gated": source.gated,
        "here": here is not None,
        "path": None if here is None else str(here.path),
        "size_bytes": (
            here.manifest.size_bytes
            if here
            else sum(map(int, known))  # type: ignore[arg-type]
            if known and None not in known
            else None
        ),
        "partial_bytes": partial_bytes,
        "files": [asdict(file) for file in source.files],
    }


def _size(row: dict[str, Any]) -> str:
    """Format the size in an entry of the list, `/` if unknown."""
    return "/" if row["size_bytes"] is None else size(row["size_bytes"])


def _state(row: dict[str, Any]) -> str:
    """Return the state in an entry of the list: `here`, the size of a partial download, `gated`, or
    `-`.
    """
    if row["here"]:
        return "here"
    return (
        f"{size(row['partial_bytes'])} so far"
        if row["partial_bytes"]
        else "gated"
        if row["gated"]
        else "-"
    )
