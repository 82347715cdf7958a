"""The commands `data get`, `data list`, `data pack` and `data inspect`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli import complete
from steelyard.cli.options import Again, Command, From, Json, Mirrors, Quiet, Repin, Timeout
from steelyard.cli.out import Output, aligned, answer, begin, dump, one_line, sized

if TYPE_CHECKING:
    from steelyard.data.tokenize import CorpusInspection, TokenFiles
    from steelyard.data.tokenizer import Tokenizer

TOKENIZER = "tokenizer.json, tokenizer.model, vocab.json with merges.txt, or the folder of one."

app = typer.Typer(
    help=(
        "Get data sets; make token files from text, and inspect them.\n\n"
        "Example: steelyard data get mmlu, then steelyard run llama2-7b-mmlu --data auto"
    ),
    no_args_is_help=True,
)


@app.command("get", cls=Command)
def get_data(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A data set (steelyard data list), or the case that reads it.",
            autocompletion=complete.data,
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

    Broken downloads continue where they stopped, also in a later command. A file is checked by its
    SHA-256; one whose hash nobody has published is pinned at first use in pins.json. The folder is
    $XDG_CACHE_HOME/steelyard/data.

    \b
    Examples:
      steelyard data get mmlu
      steelyard data get record --from /media/usb
      steelyard data get openwebtext --mirror https://files.example.org/steelyard
    """
    output = Output(as_json, quiet)
    begin("getting", output)
    from steelyard.cli import get

    return get.get(
        "data",
        get.data_name(name),
        None,
        get.checked_wish(offline, mirrors, again, repin),
        timeout,
        output,
    )


@app.command("list", cls=Command)
def list_data(as_json: Json = False) -> None:
    """List data sets that can be got: size, licence, what is here and where.

    Example: steelyard data list
    """
    from steelyard.cli import get

    get.show_list("data", as_json)


@app.command(cls=Command)
def pack(
    inputs: Annotated[
        list[Path],
        typer.Argument(metavar="INPUT", help="JSON lines, one document a line, plain or gzipped."),
    ],
    tokenizer: Annotated[
        Path, typer.Option(metavar="PATH", help=f"The model's tokenizer: {TOKENIZER}")
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="PREFIX", help="Where to write: PREFIX_ids.npy and PREFIX_idx.npz."),
    ],
    key: Annotated[
        str, typer.Option(metavar="NAME", help="The JSON key that holds the text.")
    ] = "text",
    append_end: Annotated[
        bool,
        typer.Option(
            "--append-end/--no-append-end", help="End each document with the tokenizer's end token."
        ),
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
    as_json: Json = False,
) -> None:
    """Tokenize text into a pair of token files, which training cases read with --data.

    A document is the begin token, if the tokenizer has one, the text, and the end token. Empty
    documents are skipped. If interrupted, nothing is left behind.

    \b
    Examples:
      steelyard data pack texts.jsonl.gz --tokenizer tokenizer.model --out corpus
      steelyard data pack pages.jsonl --key content --tokenizer gpt2/ --out pages
    """
    begin("reading the tokenizer", Output(as_json))
    from steelyard.cli.progress import showing_bytes
    from steelyard.data.tokenize import tokenize
    from steelyard.data.tokenizer import load

    known = load([tokenizer])
    with showing_bytes(one_line(out.name), quiet=as_json) as watch:
        made = tokenize(inputs, known, out, key, append_end, force, watch)
    paths = [(str(out.with_name(name)), size_bytes) for name, size_bytes in made.files]
    if as_json:
        files = [{"path": path, "size_bytes": size_bytes} for path, size_bytes in paths]
        dump({**asdict(made), "files": files})
    else:
        answer("\n".join(aligned(_written(made, paths))))


@app.command(cls=Command)
def inspect(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="The prefix of the pair, one of its files, or its folder."
        ),
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help=f"Check every token id against this tokenizer: {TOKENIZER}"
        ),
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
        about = (
            None
            if known is None
            else {"source": known.source, "vocab": known.vocab, "sha256": known.sha256}
        )
        dump({"path": str(source), **asdict(found), "tokenizer": about})
    else:
        answer("\n".join(aligned(_facts(found, known))))


def _written(made: "TokenFiles", paths: list[tuple[str, int]]) -> list[tuple[str, str]]:
    """Return label and value of each line that `data pack` prints about the token files that it
    wrote; `paths` are their paths and sizes in bytes.
    """
    return [
        ("documents", str(made.documents)),
        ("skipped", f"{made.skipped} without a word" if made.skipped else "0"),
        ("tokens", str(made.tokens)),
        ("fingerprint", made.fingerprint),
        *(("" if i else "files", text) for i, text in enumerate(sized(paths))),
    ]


def _facts(found: "CorpusInspection", tokenizer: "Tokenizer | None") -> list[tuple[str, str]]:
    """Return label and value of each line that `data inspect` prints; `tokenizer` is the one that
    ids were checked against, or None.
    """
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
        rows += [
            (name, f"{part.tokens} tokens in {part.documents} document(s)")
            for name, part in found.splits.items()
        ]
        rows.append(("epoch", f"{found.rows} rows of {ROW} tokens"))
    if tokenizer is not None:
        rows.append(
            ("tokenizer", f"{one_line(tokenizer.source)}: every id is below its {tokenizer.vocab}")
        )
    return [*rows, ("fingerprint", found.fingerprint)]
