"""The commands `weights get`, `weights list`, `weights inspect` and `weights convert`."""

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli import complete
from steelyard.cli.options import (
    AgainOption,
    FromOption,
    GroupedCommand,
    JsonOption,
    MirrorsOption,
    QuietOption,
    RepinOption,
    TimeoutOption,
)
from steelyard.cli.printing import (
    OutputOptions,
    align_columns,
    format_file_sizes,
    format_size,
    format_value,
    print_json,
    print_start_line,
    print_stderr,
    print_stdout,
    to_one_line,
)
from steelyard.errors import RequestError

if TYPE_CHECKING:
    from steelyard.models.shapes import LlamaModel
    from steelyard.weights.convert import ConversionResult
    from steelyard.weights.inspection import Inspection

LAYOUT_BY_FORMAT = {"hf": "huggingface", "megatron": "megatron"}
MAX_FILES = 8

app = typer.Typer(
    help=(
        "Get models; inspect and convert checkpoints.\n\nExample: steelyard weights get"
        " smollm2-135m"
    ),
    no_args_is_help=True,
)


@app.command("get", cls=GroupedCommand)
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
    offline: FromOption = None,
    mirrors: MirrorsOption = None,
    again: AgainOption = False,
    repin: RepinOption = False,
    timeout: TimeoutOption = 30.0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
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
    output = OutputOptions(as_json, quiet)
    print_start_line("getting", output)
    from steelyard.cli import get

    return get.get_source(
        "weights",
        name,
        revision,
        get.make_fetch_options(offline, mirrors, again, repin),
        timeout,
        output,
    )


@app.command("list", cls=GroupedCommand)
def list_weights(as_json: JsonOption = False) -> None:
    """List models that can be downloaded: size, licence, what is here and where.

    Example: steelyard weights list
    """
    from steelyard.cli import get

    get.print_sources("weights", as_json)


@app.command(cls=GroupedCommand)
def inspect(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A Hugging Face folder, or a checkpoint of Megatron or GLM."
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Show what a checkpoint holds: layout, shards, sizes, dimensions.

    Example: steelyard weights inspect Llama-2-7b-hf/
    """
    _check_can_read(folder)
    print_start_line("reading the checkpoint", OutputOptions(as_json))
    from steelyard.weights.inspection import inspect_checkpoint as look

    inspection = look(folder)
    if as_json:
        print_json(
            {"path": str(folder), **asdict(inspection), "files": _files_to_json(inspection.files)}
        )
    else:
        print_stdout(_format_inspection(inspection))


@app.command(cls=GroupedCommand)
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
            help="Take dimensions that the files do not state from this case's model.",
            autocompletion=complete.shipped_cases,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Write a Llama checkpoint in another format, or with another number of shards.

    If interrupted, the same command continues where it stopped.

    \b
    Examples:
      steelyard weights convert Llama-2-7b-hf/ megatron/ --to megatron --tp 2
      steelyard weights convert megatron/ hf/ --to hf --case llama2-7b-mmlu
    """
    _check_target(to, tp)
    model = _find_llama_model(case)
    _check_can_read(source)
    print_start_line("reading the checkpoint", OutputOptions(as_json))
    from steelyard.cli.progress import show_bytes_progress
    from steelyard.weights.convert import convert_checkpoint as write

    try:
        with show_bytes_progress(
            f"{to_one_line(target.resolve().name)} {to}", quiet=as_json
        ) as watch:
            conversion = write(source, target, to, tp, model, watch)
    except KeyboardInterrupt:
        print_stderr("interrupted; run the same command again to continue")
        return 1
    if as_json:
        table = {
            "path": str(target),
            "layout": LAYOUT_BY_FORMAT[to],
            "tp": tp,
            "files": _files_to_json(conversion.files),
        }
        print_json({**table, "size_bytes": conversion.size_bytes, "kept": conversion.reused})
    else:
        print_stdout(
            _format_conversion(
                conversion,
                target,
                LAYOUT_BY_FORMAT[to] if tp == 1 else f"{LAYOUT_BY_FORMAT[to]} TP{tp}",
            )
        )
    return 0


def _check_target(to: str, tp: int) -> None:
    """Raise RequestError if the target format is neither `hf` nor `megatron`, or the number of
    tensor-parallel shards is below 1 or, for `hf`, not 1.
    """
    if to not in LAYOUT_BY_FORMAT:
        raise RequestError(f"--to {to!r}: allowed: {', '.join(LAYOUT_BY_FORMAT)}")
    if tp < 1:
        raise RequestError(f"--tp {tp}: must be at least 1")
    if to == "hf" and tp != 1:
        raise RequestError(
            f"--tp {tp} --to hf: a Hugging Face folder is not sharded by tensor parallelism; leave"
            " --tp out"
        )


def _find_llama_model(case_name: str | None) -> "LlamaModel | None":
    """Return the Llama model of a case at full size, or None if no case is named. Raise
    RequestError for an unknown case or one with another model family.
    """
    from steelyard.case.resolve import resolve_case
    from steelyard.models.shapes import LlamaModel

    model = None if case_name is None else resolve_case(case_name).case.question.model
    if model is not None and not isinstance(model, LlamaModel):
        raise RequestError(
            f"--case {case_name}: its model is of family {model.family}; only Llama models can be"
            " converted"
        )
    return model


def _check_can_read(folder: Path) -> None:
    """Raise RequestError if `folder` is not a folder or torch is not installed; called before torch
    is imported, which takes seconds.
    """
    if not folder.is_dir():
        raise RequestError(
            f"{str(folder)!r} is not a folder; give a Hugging Face folder or a Megatron checkpoint"
        )
    if find_spec("torch") is None:
        raise RequestError(
            "torch is not installed, which weights need; run pip install 'steelyard[torch]'"
        )


def _format_inspection(inspection: "Inspection") -> str:
    """Return the text that `weights inspect` prints: aligned lines of label and value (layout,
    shards, iteration, dtype, parameters, size, then the model's dimensions), with at most
    `MAX_FILES` files, then how many more, and the notes.
    """
    rows: list[tuple[str, str]] = [
        ("layout", inspection.layout),
        (
            "shards",
            f"{inspection.tp}" if inspection.tp == 1 else f"{inspection.tp} (tensor parallel)",
        ),
        ("iteration", to_one_line(format_value(inspection.iteration))),
        ("dtype", inspection.dtype),
        ("parameters", format_value(inspection.parameters)),
        (
            "size",
            format_size(inspection.size_bytes)
            + (f" ({inspection.size_bytes} bytes)" if inspection.size_bytes >= 1 << 10 else ""),
        ),
        *((name, format_value(value)) for name, value in inspection.shape.items()),
    ]
    files = format_file_sizes(inspection.files[:MAX_FILES])
    if len(inspection.files) > MAX_FILES:
        files.append(f"… and {len(inspection.files) - MAX_FILES} more")
    rows += [("files" if i == 0 else "", text) for i, text in enumerate(files)]
    rows += [("note", to_one_line(note)) for note in inspection.notes]
    return "\n".join(align_columns(rows))


def _format_conversion(conversion: "ConversionResult", target: Path, layout: str) -> str:
    """Return the text that `weights convert` prints: its files with sizes, and a line with their
    number, size, and how many were there from an earlier, interrupted conversion. `layout` names
    the format written.
    """
    lines = format_file_sizes(
        [(str(target / name), size_bytes) for name, size_bytes in conversion.files]
    )
    state = "already complete, " if conversion.reused == len(conversion.files) else ""
    kept = (
        f", {conversion.reused} of them reused from an earlier conversion"
        if conversion.reused and not state
        else ""
    )
    lines.append(
        f"{layout}: {state}{len(conversion.files)} file(s),"
        f" {format_size(conversion.size_bytes)}{kept}, in"
        f" {to_one_line(target)}"
    )
    return "\n".join(lines)


def _files_to_json(files: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return pairs of file name and size in bytes as JSON data."""
    return [{"name": name, "size_bytes": size} for name, size in files]
