"""The command `case new`: write a case file for a user's own model."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import GroupedCommand, JsonOption
from steelyard.cli.printing import (
    OutputOptions,
    print_json,
    print_start_line,
    print_stdout,
    to_one_line,
)
from steelyard.errors import RequestError

app = typer.Typer(
    help=(
        "Make a case file for a model of your own.\n\nExample: steelyard case new mine --from"
        " SmolLM2-135M/ --task mmlu"
    ),
    no_args_is_help=True,
)


@app.callback()
def root() -> None:
    """Do nothing. Typer keeps the name of a group's only command if the group has a callback."""


@app.command(cls=GroupedCommand)
def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the case; the file is NAME.toml.")
    ],
    source: Annotated[
        Path,
        typer.Option(
            "--from", metavar="DIR", help="Hugging Face folder: config, weights, tokenizer."
        ),
    ],
    task: Annotated[
        str,
        typer.Option(
            "--task", metavar="TASK", help="mmlu, lambada, openwebtext, alpaca or generate."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the file.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Write a complete case file, sizes full and smoke, for the model of a folder, and say what was
    assumed.

    \b
    Examples:
      steelyard case new smollm2-mmlu --from SmolLM2-135M/ --task mmlu
      steelyard run smollm2-mmlu.toml --weights SmolLM2-135M/ --data mmlu/
    """
    print_start_line("reading the model's folder", OutputOptions(as_json))
    from steelyard.case import resolve
    from steelyard.case.new_case import make_slug
    from steelyard.cli.model_case import AUTO_FAMILY, make_complete_case

    if make_slug(name) != name:
        raise RequestError(
            f"{name!r}: the name of a case may have lower-case letters, digits, '-' and '.', such"
            " as"
            f" {make_slug(name)}"
        )
    path = out / f"{name}.toml"
    if path.exists() and not force:
        raise RequestError(f"{path} exists; give another name, or add --force")
    result = make_complete_case(source, task, name)
    full = resolve.resolve_case(result.source, "full").case
    sizes = [
        "full",
        *(
            [resolve.resolve_case(result.source, "smoke").case.size]
            if result.source.table.get("smoke")
            else []
        ),
    ]
    try:
        path.write_text(result.source.text, encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"{path} cannot be written: {error.strerror}; choose another --out"
        ) from error
    if as_json:
        print_json(
            {
                "path": str(path),
                "name": name,
                "template": result.template,
                "sizes": sizes,
                "assumed": list(result.assumed),
            }
        )
        return 0
    lines = [f"{to_one_line(path)}: {to_one_line(name)}, sizes {' and '.join(sizes)}", "assumed:"]
    lines += [f"  {to_one_line(assumption)}" for assumption in result.assumed]
    run = f"steelyard run {shlex.quote(str(path))}"
    run += " --engine transformers" if full.question.model.family == AUTO_FAMILY else ""
    weights = "" if result.starts_random else f" --weights {shlex.quote(str(source))}"
    lines += [f"try it:  {to_one_line(run)} --size smoke"] if "smoke" in sizes else []
    needs_data = full.question.task_row.needs_data(full.question.data)
    data = " --data PATH" if needs_data else ""
    lines += [f"run it:  {to_one_line(run + weights)}{data}"]
    print_stdout("\n".join(lines))
    return 0
