"""The verbs that bring data and weights here, and list what is here: data get, data list, weights get, weights list."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli import complete
from steelyard.cli.files import aligned, size
from steelyard.cli.options import Json, Quiet
from steelyard.cli.out import Output, answer, begin, dump, one_line, say
from steelyard.errors import RequestError

if TYPE_CHECKING:
    from steelyard.case.case import Case
    from steelyard.sources.download import Tools
    from steelyard.sources.get import Wish
    from steelyard.sources.store import CheckedBy, Here, Store
    from steelyard.sources.table import Kind, Source

AUTO = "auto"  # in the place of a path: what was got
MOST_TIMEOUT_S = 86400

_CHECKED: "dict[CheckedBy, str]" = {
    "table": "checked by its known hash",
    "pins": "checked by its pin",
    "hub": "checked by the hub's list",
    "first use": "pinned at first use",
    "nothing": "not checked",
}

From = Annotated[
    Path | None,
    typer.Option("--from", metavar="DIR", help="Take the files from this folder; nothing is downloaded."),
]
Mirrors = Annotated[
    list[str] | None,
    typer.Option("--mirror", metavar="URL", help="Ask URL/NAME/FILE first. Several are asked in order."),
]
Again = Annotated[bool, typer.Option("--again", help="Get it anew, although it is here.")]
Repin = Annotated[bool, typer.Option("--repin", help="Get it anew and accept other bytes than were pinned at first use.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="Give up a connection that is silent for so long.")]


def get_data(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A data set (steelyard data list), or the case that reads it.", autocompletion=complete.data
        ),
    ],
    offline: From = None,
    mirrors: Mirrors = None,
    again: Again = False,
    repin: Repin = False,
    timeout: Timeout = 30.0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Download a data set, check it, and keep it for --data auto.

    Broken downloads continue where they stopped, also in a later command. A file is checked by its SHA-256; one whose
    hash nobody has published is pinned at first use in pins.json. The folder is $XDG_CACHE_HOME/steelyard/data.

    \b
    Examples:
      steelyard data get mmlu
      steelyard data get record --from /media/usb
      steelyard data get openwebtext --mirror https://files.example.org/steelyard
    """
    wish = _wish(offline, mirrors, again, repin)
    return _get("data", _name(name), None, wish, timeout, Output(as_json, quiet))


def list_data(as_json: Json = False) -> None:
    """List data sets that can be got: size, licence, what is here and where.

    Example: steelyard data list
    """
    _list("data", as_json)


def get_weights(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A model (steelyard weights list), or any id of the Hugging Face hub.",
            autocompletion=complete.weights,
        ),
    ],
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="Branch, tag or commit of the hub. Default: as pinned, else main.")
    ] = None,
    offline: From = None,
    mirrors: Mirrors = None,
    again: Again = False,
    repin: Repin = False,
    timeout: Timeout = 30.0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Download a model's weights and tokenizer, check them, and keep them.

    Models of the hub come through huggingface_hub: log in with hf auth login for gated ones, name a mirror in
    HF_ENDPOINT. Only safetensors (or .bin), config and tokenizer are taken, never code.

    \b
    Examples:
      steelyard weights get smollm2-135m
      steelyard weights get Qwen/Qwen2.5-0.5B
      steelyard weights get llama2-7b --from /media/usb/Llama-2-7b-hf
    """
    return _get("weights", name, revision, _wish(offline, mirrors, again, repin), timeout, Output(as_json, quiet))


def list_weights(as_json: Json = False) -> None:
    """List models that can be got: size, licence, what is here and where.

    Example: steelyard weights list
    """
    _list("weights", as_json)


def data_of(data: Path | None, case: "Case") -> Path | None:
    """What --data says of a case: a path, or auto, which is what was got for its task. Size smoke makes its own."""
    from steelyard.sources import table

    if data is None or str(data) != AUTO:
        return data
    if case.size == "smoke":
        return None
    source = table.of_task(case.question.row.name)
    if source is None:
        raise RequestError(f"--data auto: nothing is known to get for task {case.question.row.name!r}; give a path")
    here = _store("data").find(source.name)
    if here is None:
        raise RequestError(f"--data auto: {source.name} is not here yet; run steelyard data get {source.name} first")
    return here.path


def _wish(offline: Path | None, mirrors: list[str] | None, again: bool, repin: bool) -> "Wish":
    from steelyard.sources.get import Wish

    if offline is not None and not offline.is_dir():
        raise RequestError(f"--from {str(offline)!r} is not a folder; name the one that has the files")
    if offline is not None and mirrors:
        raise RequestError("--from and --mirror cannot be combined; drop one")
    for url in mirrors or []:
        if not url.startswith(("https://", "http://")):
            raise RequestError(f"--mirror {url!r}: not an address; allowed: https://… or http://…")
        if "@" in url.split("/")[2]:
            raise RequestError("--mirror: an address with a name and a password in it is not taken")
    return Wish(tuple(mirrors or ()), offline, again, repin)


def _name(name: str) -> str:
    """A case stands for its data."""
    from steelyard.case import resolve
    from steelyard.sources import table

    if name not in resolve.names():
        return name
    found = table.of_task(resolve.resolve(name).case.question.row.name)
    return name if found is None else found.name


def _get(kind: "Kind", name: str, revision: str | None, wish: "Wish", timeout: float, output: Output) -> int:
    begin("getting", output)
    from steelyard.run.clock import today
    from steelyard.sources import get, hub, table
    from steelyard.sources.download import DownloadError

    if not 0 < timeout <= MOST_TIMEOUT_S:
        raise RequestError(f"--timeout {timeout:g}: must be more than 0 and at most {MOST_TIMEOUT_S} seconds")
    source = table.row(kind, name)
    if revision is not None and not source.hub:
        raise RequestError(f"--revision {revision}: {source.name} is not a model of the hub; leave it out")
    if revision is not None and wish.offline is not None:
        raise RequestError("--revision and --from cannot be combined: a folder has the revision that was put there; drop one")
    if source.hub and wish.mirrors:
        raise RequestError(f"--mirror: {source.name} is a model of the hub; name a mirror of the hub in HF_ENDPOINT")
    store = _store(kind)
    try:
        here, before = _watched(
            source,
            timeout,
            output,
            lambda tools: (
                hub.get(store, source, revision, wish, tools, today)
                if source.hub
                else get.get(store, source, wish, tools, today)
            ),
        )
    except DownloadError as error:
        say(f"error: {one_line(error)}")
        return 1
    except OSError as error:  # of the disk: addresses have errors of their own
        say(f"error: {one_line(store.folder)}: {one_line(error.strerror or error)}; mend that, then run the same command again")
        return 1
    except KeyboardInterrupt:
        say("interrupted; run the same command again to go on")
        return 1
    if output.json:
        dump({**_row(source, here, 0), "before": before, **here.manifest.model_dump(exclude={"version", "name", "licence"})})
    else:
        answer(_got(kind, source, here, before, store))
    return 0


def _watched(source: "Source", timeout: float, output: Output, work: "Callable[[Tools], tuple[Here, bool]]") -> Any:
    from rich.console import Console

    from steelyard.cli.files import watching
    from steelyard.cli.progress import Display
    from steelyard.run.clock import sleep
    from steelyard.sources.download import Meter, Tools
    from steelyard.sources.http import Web

    def tell(text: str) -> None:
        if not output.silent or (text.startswith("warning:") and not output.json):
            say(one_line(text))

    tell(f"{source.name}: {source.title}; licence: {source.licence or 'see its page'}; {source.page}")
    with Display(Console(stderr=True, quiet=output.silent), source.name) as display:
        return work(Tools(Web(timeout), sleep, tell, Meter(watching(display.show))))


def _store(kind: "Kind") -> "Store":
    from steelyard.run import environment
    from steelyard.sources.store import Store

    try:
        return Store(environment.private_cache(os.environ, kind))
    except OSError as error:
        raise RequestError(f"the folder for {kind} cannot be made: {error}; {environment.CACHE_HINT}") from error


def _got(kind: "Kind", source: "Source", here: "Here", before: bool, store: "Store") -> str:
    made = here.manifest
    lines = [f"{name}  {text}" for name, text in aligned([(one.path, one.size_bytes) for one in made.files])]
    if not before:
        lines += [f"{_CHECKED[one.checked_by]}: {one.name} sha256 {one.sha256}" for one in made.downloads]
        lines += [f"pins are in {store.pins_path}"] if any(one.checked_by == "first use" for one in made.downloads) else []
    state = "already here" if before else "done"
    lines.append(f"{source.name}: {state}, {len(made.files)} file(s), {size(made.size_bytes)}, in {one_line(here.path)}")
    path = one_line(here.path)
    own = f"\n  or without a case: steelyard run --model {path} --task mmlu --data auto" if source.hub else ""
    lines.append("use it with --data auto" if kind == "data" else f"use it with --weights {path}{own}")
    return "\n".join(lines)


def _list(kind: "Kind", as_json: bool) -> None:
    from steelyard.sources import table

    store = _store(kind)
    others = [name for name in store.names() if name not in {one.name for one in table.TABLE[kind]}]
    sources = [*table.TABLE[kind], *(table.unlisted(name) for name in others)]
    rows = [_row(one, store.find(one.name), store.partial_bytes(one.name)) for one in sources]
    if as_json:
        dump({"folder": str(store.folder), "sources": rows})
        return
    shown = [(one["name"], _size(one), _state(one), one["licence"]) for one in rows]
    widths = [max(len(row[i]) for row in shown) for i in range(3)]
    lines = ["  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]).rstrip() for row in shown]
    answer("\n".join([*lines, f"folder: {one_line(store.folder)}", f"get one: steelyard {kind} get NAME"]))


def _row(source: "Source", here: "Here | None", partial_bytes: int) -> dict[str, Any]:
    known = [file.size_bytes for file in source.files]
    return {
        "name": source.name,
        "title": source.title,
        "licence": source.licence if here is None else here.manifest.licence,
        "page": source.page,
        "gated": source.gated,
        "here": here is not None,
        "path": None if here is None else str(here.path),
        "size_bytes": here.manifest.size_bytes if here else sum(map(int, known)) if known and None not in known else None,  # type: ignore[arg-type]
        "partial_bytes": partial_bytes,
        "files": [asdict(file) for file in source.files],
    }


def _size(row: dict[str, Any]) -> str:
    return "/" if row["size_bytes"] is None else size(row["size_bytes"])


def _state(row: dict[str, Any]) -> str:
    if row["here"]:
        return "here"
    return f"{size(row['partial_bytes'])} so far" if row["partial_bytes"] else "gated" if row["gated"] else "-"
