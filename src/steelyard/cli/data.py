"""The verbs for data: data pack and data inspect for token files; data get and data list are in cli/get.py."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli import get
from steelyard.cli.files import aligned, watching
from steelyard.cli.options import Command, Json
from steelyard.cli.out import Output, answer, begin, dump, one_line, say

if TYPE_CHECKING:
    from steelyard.data.tokenize import CorpusInspection, TokenFiles
    from steelyard.data.tokenizer import Tokenizer

TOKENIZER = "tokenizer.json, tokenizer.model, vocab.json with merges.txt, or the folder of one."

app = typer.Typer(
    help="Get data sets; make token files from text, and inspect them.\n\n"
    "Example: steelyard data get mmlu, then steelyard run llama2-7b-mmlu --data auto",
    no_args_is_help=True,
)
app.command("get", cls=Command)(get.get_data)
app.command("list", cls=Command)(get.list_data)


@app.command(cls=Command)
def pack(
    inputs: Annotated[list[Path], typer.Argument(metavar="INPUT", help="JSON lines, one document a line, plain or gzipped.")],
    tokenizer: Annotated[Path, typer.Option(metavar="PATH", help=f"The model's tokenizer: {TOKENIZER}")],
    out: Annotated[Path, typer.Option(metavar="PREFIX", help="Where to write: PREFIX_ids.npy and PREFIX_idx.npz.")],
    key: Annotated[str, typer.Option(metavar="NAME", help="The JSON key that holds the text.")] = "text",
    append_end: Annotated[
        bool, typer.Option("--append-end/--no-append-end", help="End each document with the tokenizer's end token.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
    as_json: Json = False,
) -> int:
    """Tokenize text into a pair of token files, which training cases read with --data.

    A document is the begin token, if the tokenizer has one, the text, and the end token. Empty documents are skipped. If
    interrupted, nothing is left behind.

    \b
    Examples:
      steelyard data pack texts.jsonl.gz --tokenizer tokenizer.model --out corpus
      steelyard data pack pages.jsonl --key content --tokenizer gpt2/ --out pages
    """
    begin("reading the tokenizer", Output(as_json))
    from steelyard.data.tokenizer import load

    try:
        made = _tokenize(inputs, load([tokenizer]), out, key, append_end, force, as_json)
    except KeyboardInterrupt:
        say("interrupted")
        return 1
    paths = [(str(out.with_name(name)), size_bytes) for name, size_bytes in made.files]
    if as_json:
        files = [{"path": path, "size_bytes": size_bytes} for path, size_bytes in paths]
        dump({**asdict(made), "files": files})
    else:
        answer(_table(_written(made, paths)))
    return 0


@app.command(cls=Command)
def inspect(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="The prefix of the pair, one of its files, or its folder.")],
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help=f"Check every token id against this tokenizer: {TOKENIZER}")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a pair of token files holds: documents, tokens, and the split for training.

    \b
    Examples:
      steelyard data inspect data/llama_openwebtext_100k
      steelyard data inspect data/ --tokenizer Llama-7b/tokenizer.model
    """
    from steelyard.data.corpus import check_ids, open_corpus
    from steelyard.data.tokenize import inspect as look
    from steelyard.data.tokenizer import load

    known = None if tokenizer is None else load([tokenizer])
    corpus = open_corpus(source)
    if known is not None:
        check_ids(corpus, known.vocab)
    found = look(corpus)
    if as_json:
        about = None if known is None else {"source": known.source, "vocab": known.vocab, "sha256": known.sha256}
        dump({"path": str(source), **asdict(found), "tokenizer": about})
    else:
        answer(_table(_facts(found, known)))


def _tokenize(
    inputs: list[Path], tokenizer: "Tokenizer", out: Path, key: str, append_end: bool, force: bool, quiet: bool
) -> "TokenFiles":
    from rich.console import Console

    from steelyard.cli.progress import Display
    from steelyard.data.tokenize import tokenize

    with Display(Console(stderr=True, quiet=quiet), one_line(out.name)) as display:
        return tokenize(inputs, tokenizer, out, key, append_end, force, watching(display.show))


def _written(made: "TokenFiles", paths: list[tuple[str, int]]) -> list[tuple[str, str]]:
    files = [f"{name}  {size}" for name, size in aligned(paths)]
    return [
        ("documents", str(made.documents)),
        ("skipped", f"{made.skipped} without a word" if made.skipped else "0"),
        ("tokens", str(made.tokens)),
        ("fingerprint", made.fingerprint),
        *(("" if i else "files", text) for i, text in enumerate(files)),
    ]


def _facts(found: "CorpusInspection", tokenizer: "Tokenizer | None") -> list[tuple[str, str]]:
    from steelyard.data.tokenize import ROW

    rows = [
        ("name", one_line(found.name)),
        ("documents", str(found.documents)),
        ("tokens", str(found.tokens)),
        ("dtype", found.dtype),
        ("lengths", f"{found.shortest} to {found.longest}, {found.mean:.1f} in the mean"),
        ("highest id", str(found.highest)),
    ]
    if found.splits is None:
        rows.append(("split", "/ (too few documents to train on, to validate and to test)"))
    else:
        rows += [(name, f"{part.tokens} tokens in {part.documents} document(s)") for name, part in found.splits.items()]
        rows.append(("epoch", f"{found.rows} rows of {ROW} tokens"))
    if tokenizer is not None:
        rows.append(("tokenizer", f"{one_line(tokenizer.source)}: every id is below its {tokenizer.vocab}"))
    return [*rows, ("fingerprint", found.fingerprint)]


def _table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
