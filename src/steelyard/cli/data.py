"""The commands `data get`, `data list`, `data pack` and `data inspect`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    print_json,
    print_start_line,
    print_stdout,
    to_one_line,
)

if TYPE_CHECKING:
    from steelyard.data.token_files import CorpusInspection, TokenFiles
    from steelyard.data.tokenizer import Tokenizer

TOKENIZER_HELP = (
    "tokenizer.json, tokenizer.model, vocab.json with merges.txt, or the folder of one."
)

app = typer.Typer(
    help=(
        "Get data sets; make token files from text, and inspect them.\n\n"
        "Example: steelyard data get mmlu, then steelyard run llama2-7b-mmlu --data auto"
    ),
    no_args_is_help=True,
)


@app.command("get", cls=GroupedCommand)
def get_data(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A data set (steelyard data list), or the case that reads it.",
            autocompletion=complete.data,
        ),
    ],
    offline: FromOption = None,
    mirrors: MirrorsOption = None,
    again: AgainOption = False,
    repin: RepinOption = False,
    timeout: TimeoutOption = 30.0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
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
    output = OutputOptions(as_json, quiet)
    print_start_line("getting", output)
    from steelyard.cli import get

    return get.get_source(
        "data",
        get.find_data_name(name),
        None,
        get.make_fetch_options(offline, mirrors, again, repin),
        timeout,
        output,
    )


@app.command("list", cls=GroupedCommand)
def list_data(as_json: JsonOption = False) -> None:
    """List data sets that can be downloaded: size, licence, what is here and where.

    Example: steelyard data list
    """
    from steelyard.cli import get

    get.print_sources("data", as_json)


@app.command(cls=GroupedCommand)
def pack(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT", help="JSON lines, one document per line, plain or gzipped."
        ),
    ],
    tokenizer: Annotated[
        Path, typer.Option(metavar="PATH", help=f"The model's tokenizer: {TOKENIZER_HELP}")
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
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Tokenize text into a pair of token files, which training cases read with --data.

    A document is the begin token, if the tokenizer has one, the text, and the end token. Empty
    documents are skipped. If interrupted, nothing is left behind.

    \b
    Examples:
      steelyard data pack texts.jsonl.gz --tokenizer tokenizer.model --out corpus
      steelyard data pack pages.jsonl --key content --tokenizer gpt2/ --out pages
    """
    print_start_line("reading the tokenizer", OutputOptions(as_json))
    from steelyard.cli.progress import show_bytes_progress
    from steelyard.data.token_files import write_token_files
    from steelyard.data.tokenizer import load_tokenizer

    loaded = load_tokenizer([tokenizer])
    with show_bytes_progress(to_one_line(out.name), quiet=as_json) as watch:
        token_files = write_token_files(inputs, loaded, out, key, append_end, force, watch)
    paths = [(str(out.with_name(name)), size_bytes) for name, size_bytes in token_files.files]
    if as_json:
        files = [{"path": path, "size_bytes": size_bytes} for path, size_bytes in paths]
        print_json({**asdict(token_files), "files": files})
    else:
        print_stdout("\n".join(align_columns(_list_pack_facts(token_files, paths))))


@app.command(cls=GroupedCommand)
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
            metavar="PATH", help=f"Check every token id against this tokenizer: {TOKENIZER_HELP}"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a pair of token files holds: documents, tokens, and the split for training.

    \b
    Examples:
      steelyard data inspect data/llama_openwebtext_100k
      steelyard data inspect data/ --tokenizer Llama-7b/tokenizer.model
    """
    from steelyard.data.corpus import check_ids, open_corpus
    from steelyard.data.token_files import inspect_corpus as look
    from steelyard.data.tokenizer import load_tokenizer

    loaded = None if tokenizer is None else load_tokenizer([tokenizer])
    corpus = open_corpus(source)
    if loaded is not None:
        check_ids(corpus, loaded.vocab)
    inspection = look(corpus)
    if as_json:
        tokenizer_facts = (
            None
            if loaded is None
            else {"source": loaded.source, "vocab": loaded.vocab, "sha256": loaded.sha256}
        )
        print_json({"path": str(source), **asdict(inspection), "tokenizer": tokenizer_facts})
    else:
        print_stdout("\n".join(align_columns(_list_corpus_facts(inspection, loaded))))


def _list_pack_facts(
    token_files: "TokenFiles", paths: list[tuple[str, int]]
) -> list[tuple[str, str]]:
    """Return label and value of each line that `data pack` prints about the token files that it
    wrote: documents, skipped ones, tokens, fingerprint, files. `paths` are the files' paths and
    sizes in bytes.
    """
    return [
        ("documents", str(token_files.documents)),
        ("skipped", f"{token_files.skipped} empty document(s)" if token_files.skipped else "0"),
        ("tokens", str(token_files.tokens)),
        ("fingerprint", token_files.fingerprint),
        *(("" if i else "files", text) for i, text in enumerate(format_file_sizes(paths))),
    ]


def _list_corpus_facts(
    inspection: "CorpusInspection", tokenizer: "Tokenizer | None"
) -> list[tuple[str, str]]:
    """Return label and value of each line that `data inspect` prints: sizes, lengths of documents,
    highest id, the split for training (`/` if there are too few documents) and fingerprint.
    `tokenizer` is the one that ids were checked against, or None.
    """
    from steelyard.data.token_files import ROW_TOKENS

    rows = [
        ("name", to_one_line(inspection.name)),
        ("documents", str(inspection.documents)),
        ("tokens", str(inspection.tokens)),
        ("dtype", inspection.dtype),
        (
            "lengths",
            f"{inspection.shortest} to {inspection.longest}, {inspection.mean:.1f} on average",
        ),
        ("highest id", str(inspection.highest)),
    ]
    if inspection.splits is None:
        rows.append(("split", "/ (too few documents to train on, to validate and to test)"))
    else:
        rows += [
            (name, f"{split.tokens} tokens in {split.documents} document(s)")
            for name, split in inspection.splits.items()
        ]
        rows.append(("epoch", f"{inspection.rows} rows of {ROW_TOKENS} tokens"))
    if tokenizer is not None:
        rows.append(
            (
                "tokenizer",
                f"{to_one_line(tokenizer.source)}: every id is below its vocabulary size"
                f" {tokenizer.vocab}",
            )
        )
    return [*rows, ("fingerprint", inspection.fingerprint)]
