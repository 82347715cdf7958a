"""The commands `weights get`, `weights list`, `weights inspect` and `weights convert`."""

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli import complete
from steelyard.cli.options import Again, Command, From, Json, Mirrors, Quiet, Repin, Timeout
from steelyard.cli.out import (
    Output,
    aligned,
    answer,
    begin,
    dump,
    one_line,
    plain,
    say,
    size,
    sized,
)
from steelyard.errors import RequestError

if TYPE_CHECKING:
    from steelyard.models.shapes import LlamaModel
    from steelyard.weights.convert import Conversion
    from steelyard.weights.inspection import Inspection

FORMATS = {"hf": "huggingface", "megatron": "megatron"}
MOST_FILES = 8

app = typer.Typer(
    help=(
        "Get models; inspect and convert checkpoints.\n\nExample: steelyard weights get"
        " smollm2-135m"
    ),
    no_args_is_help=True,
)


@app.command("get", cls=Command)
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
        str | None,
        typer.Option(
            metavar="REV", help="Branch, tag or commit of the hub. Default: as pinned, else main."
        ),
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

    Models of the hub come through huggingface_hub: log in with hf auth login for gated ones, name a
    mirror in HF_ENDPOINT. Only safetensors (or .bin), config and tokenizer are taken, never code.

    \b
    Examples:
      steelyard weights get smollm2-135m
      steelyard weights get Qwen/Qwen2.5-0.5B
      steelyard weights get llama2-7b --from /media/usb/Llama-2-7b-hf
    """
    output = Output(as_json, quiet)
    begin("getting", output)
    from steelyard.cli import get

    return get.get(
        "weights", name, revision, get.checked_wish(offline, mirrors, again, repin), timeout, output
    )


@app.command("list", cls=Command)
def list_weights(as_json: Json = False) -> None:
    """List models that can be got: size, licence, what is here and where.

    Example: steelyard weights list
    """
    from steelyard.cli import get

    get.show_list("weights", as_json)


@app.command(cls=Command)
def inspect(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A Hugging Face folder, or a checkpoint of Megatron or GLM."
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds: layout, shards, sizes, dimensions.

    Example: steelyard weights inspect Llama-2-7b-hf/
    """
    _ready(folder)
    begin("reading the checkpoint", Output(as_json))
    from steelyard.weights.inspection import inspect as look

    found = look(folder)
    if as_json:
        dump({"path": str(folder), **asdict(found), "files": _named(found.files)})
    else:
        answer(_facts(found))


@app.command(cls=Command)
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="The Llama checkpoint to read, in either format.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")],
    to: Annotated[str, typer.Option(metavar="FORMAT", help="hf or megatron.")],
    tp: Annotated[
        int, typer.Option(metavar="N", help="Tensor-parallel shards; megatron only.")
    ] = 1,
    case: Annotated[
        str | None,
        typer.Option(
            "--case",
            metavar="CASE",
            help="Take dimensions that the files do not say from this case's model.",
            autocompletion=complete.shipped_cases,
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Write a Llama checkpoint in another format, or with another number of shards.

    If interrupted, the same command continues where it stopped.

    \b
    Examples:
      steelyard weights convert Llama-2-7b-hf/ megatron/ --to megatron --tp 2
      steelyard weights convert megatron/ hf/ --to hf --case llama2-7b-mmlu
    """
    _check(to, tp)
    model = _model(case)
    _ready(source)
    begin("reading the checkpoint", Output(as_json))
    from steelyard.cli.progress import showing_bytes
    from steelyard.weights.convert import convert as write

    try:
        with showing_bytes(f"{one_line(target.resolve().name)} {to}", quiet=as_json) as watch:
            made = write(source, target, to, tp, model, watch)
    except KeyboardInterrupt:
        say("interrupted; run the same command again to go on")
        return 1
    if as_json:
        table = {"path": str(target), "layout": FORMATS[to], "tp": tp, "files": _named(made.files)}
        dump({**table, "size_bytes": made.size_bytes, "kept": made.kept})
    else:
        answer(_written(made, target, FORMATS[to] if tp == 1 else f"{FORMATS[to]} TP{tp}"))
    return 0


def _check(to: str, tp: int) -> None:
    """Raise RequestError if the target format is unknown, or the number of tensor-parallel shards
    is not allowed for it.
    """
    if to not in FORMATS:
        raise RequestError(f"--to {to!r}: allowed: {', '.join(FORMATS)}")
    if tp < 1:
        raise RequestError(f"--tp {tp}: must be at least 1")
    if to == "hf" and tp != 1:
        raise RequestError(
            f"--tp {tp} --to hf: a Hugging Face folder is not sharded by tensor parallelism; leave"
            " --tp out"
        )


def _model(name: str | None) -> "LlamaModel | None":
    """Return the Llama model of a case, or None if no case is named. Raise RequestError for a case
    with another model family.
    """
    from steelyard.case.resolve import resolve
    from steelyard.models.shapes import LlamaModel

    model = None if name is None else resolve(name).case.question.model
    if model is not None and not isinstance(model, LlamaModel):
        raise RequestError(
            f"--case {name}: its model is of family {model.family}; only Llama models can be"
            " converted"
        )
    return model


def _ready(folder: Path) -> None:
    """Raise RequestError if the folder does not exist or torch is not installed; called before
    torch is imported, which takes seconds.
    """
    if not folder.is_dir():
        raise RequestError(
            f"{str(folder)!r} is not a folder; give a Hugging Face folder or a Megatron checkpoint"
        )
    if find_spec("torch") is None:
        raise RequestError(
            "torch is not installed, which weights need; run pip install 'steelyard[torch]'"
        )


def _facts(found: "Inspection") -> str:
    """Format what `weights inspect` prints as aligned lines, with at most MAX_FILES files."""
    rows: list[tuple[str, str]] = [
        ("layout", found.layout),
        ("shards", f"{found.tp}" if found.tp == 1 else f"{found.tp} (tensor parallel)"),
        ("iteration", one_line(plain(found.iteration))),
        ("dtype", found.dtype),
        ("parameters", plain(found.parameters)),
        (
            "size",
            size(found.size_bytes)
            + (f" ({found.size_bytes} bytes)" if found.size_bytes >= 1 << 10 else ""),
        ),
        *((name, plain(value)) for name, value in found.shape.items()),
    ]
    files = sized(found.files[:MOST_FILES])
    if len(found.files) > MOST_FILES:
        files.append(f"… and {len(found.files) - MOST_FILES} more")
    rows += [("files" if i == 0 else "", text) for i, text in enumerate(files)]
    rows += [("note", one_line(note)) for note in found.notes]
    return "\n".join(aligned(rows))


def _written(made: "Conversion", target: Path, form: str) -> str:
    """Format what `weights convert` prints: its files with sizes, and how many were there from an
    earlier, interrupted conversion. `layout` names the format written.
    """
    lines = sized([(str(target / name), size_bytes) for name, size_bytes in made.files])
    done = "already complete, " if made.kept == len(made.files) else ""
    kept = (
        f", {made.kept} of them kept from an earlier conversion" if made.kept and not done else ""
    )
    lines.append(
        f"{form}: {done}{len(made.files)} file(s), {size(made.size_bytes)}{kept}, in"
        f" {one_line(target)}"
    )
    return "\n".join(lines)


def _named(files: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return pairs of file name and size in bytes as JSON data."""
    return [{"name": name, "size_bytes": size} for name, size in files]
