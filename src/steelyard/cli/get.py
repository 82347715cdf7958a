"""Bring data and weights here, and list what is here: what data get, data list, weights get and
weights list do.
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

AUTO = "auto"  # in the place of a path: what was got
MOST_TIMEOUT_S = 86400

_CHECKED: dict[CheckedBy, str] = {
    "table": "checked by its known hash",
    "pins": "checked by its pin",
    "hub": "checked by the hub's list",
    "first use": "pinned at first use",
    "nothing": "not checked",
}


def data_of(data: Path | None, case: Case) -> Path | None:
    """Return what --data names for a case: a path, or for `auto` what was got for its task; None
    at size smoke, which makes its own."""
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
    """Return how a source is to be had; RequestError where the options do not go together."""
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
    """Return the name of a data set: a case stands for the one that it reads."""
    if name not in resolve.names():
        return name
    found = table.of_task(resolve.resolve(name).case.question.row.name)
    return name if found is None else found.name


def get(
    kind: Kind, name: str, revision: str | None, wish: Wish, timeout: float, output: Output
) -> int:
    """Bring a source here and print what it is; return the exit code."""
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
    except OSError as error:  # of the disk: addresses have errors of their own
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
    try:
        return Store(environment.private_cache(os.environ, kind))
    except OSError as error:
        raise RequestError(
            f"the folder for {kind} cannot be made: {error}; {environment.CACHE_HINT}"
        ) from error


def _got(kind: Kind, source: Source, here: Here, before: bool, store: Store) -> str:
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
    """Print the sources of a kind, with what is here of each."""
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
    return "/" if row["size_bytes"] is None else size(row["size_bytes"])


def _state(row: dict[str, Any]) -> str:
    if row["here"]:
        return "here"
    return (
        f"{size(row['partial_bytes'])} so far"
        if row["partial_bytes"]
        else "gated"
        if row["gated"]
        else "-"
    )
