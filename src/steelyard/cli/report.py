"""The commands on existing records: `report`, `verify`, `sign` and `schema`."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard.cli import complete
from steelyard.cli.options import Json, Lang, Records, Wide
from steelyard.cli.out import answer, dump, one_line
from steelyard.errors import RequestError


def report_(
    records: Records,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="text (the default), md, html or csv.",
            autocompletion=complete.report_formats,
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            metavar="LAYOUT",
            help="flagperf: order, tables and columns of FlagPerf's published pages, in Markdown.",
        ),
    ] = None,
    lang: Lang = "en",
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write to this file. With --layout flagperf also a folder: one file a case.",
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Only why the rate is not higher: where the time of a step goes."
        ),
    ] = False,
    full: Annotated[
        bool,
        typer.Option("--full", help="Text: every detail and all columns, not one screen a case."),
    ] = False,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Show records on the terminal, or write a page, a table or data.

    The terminal shows one screen a case; --full prints all of the page.

    \b
    Examples:
      steelyard report records/
      steelyard report records/ --full
      steelyard report records/ --format html --to page.html
      steelyard report records/ --explain

    \b
    One row a record, for a spreadsheet:
      steelyard report records/ --format csv --to runs.csv

    \b
    Numbers for a program (steelyard schema report says what is in it):
      steelyard report records/ --json

    \b
    The form of FlagPerf's published pages, to submit there; one file a case:
      steelyard report records/ --layout flagperf --lang zh --to pages/
    """
    from steelyard.cli import pages
    from steelyard.cli.records import by_kind, paths, read, read_specs

    wanted = pages.Export(format_, layout, lang, to, explain, full, wide, as_json)
    of_spec, runs = by_kind(paths(records))
    pages.export(wanted, [] if runs else read_specs(of_spec), read(records) if runs else [])


def verify(
    records: Records,
    signers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="SSH allowed_signers file; every record must be signed by one of them.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Check records: metrics, hashes and signatures.

    Every metric is computed again from the raw samples. A record that asks another question than
    the shipped case of its name verifies, with a remark. Exit code 0: all verify; 1: one does not.

    \b
    Examples:
      steelyard verify records/
      steelyard verify records/ --signers allowed_signers
    """
    from steelyard.cli.records import paths, verdict

    every = paths(records)
    found = [verdict(path, signers, alone=len(every) == 1) for path in every]
    if as_json:
        dump(
            {
                "records": [
                    asdict(one) | {"path": str(one.path), "ok": not one.wrong} for one in found
                ]
            }
        )
    else:
        for one in found:
            answer(f"{'WRONG' if one.wrong else 'ok'}  {one_line(one.path)}")
            signed = (
                [str(one.signature)]
                if one.signature is not None and str(one.signature) not in one.wrong
                else []
            )
            for line in (*one.wrong, *one.remarks, *signed):
                answer(f"  {one_line(line)}")
    return 1 if any(one.wrong for one in found) else 0


def sign(
    records: Records,
    key: Annotated[
        Path,
        typer.Option(
            "--key",
            metavar="KEY",
            help="An SSH private key, or the .pub of one that ssh-agent holds.",
        ),
    ],
    as_json: Json = False,
) -> None:
    """Sign records with an SSH key. The signature is a file RECORD.json.sig beside each record.

    A record must verify to be signed. A key with a passphrase signs through ssh-agent. steelyard
    verify --signers FILE shows who signed.

    \b
    Examples:
      steelyard sign records/*.json --key ~/.ssh/id_ed25519
      steelyard run smoke --sign ~/.ssh/id_ed25519
    """
    from steelyard.cli.records import by_kind, paths, read_specs
    from steelyard.metrics.verify import read
    from steelyard.record import signature

    every = paths(records)
    of_spec, runs = by_kind(every)
    read_specs(of_spec)  # all records must verify before the first is signed
    for path in runs:
        read(path)
    made = [signature.sign(path, key) for path in every]
    if as_json:
        dump(
            {
                "signed": [
                    {"record": str(path), "signature": str(one)}
                    for path, one in zip(every, made, strict=True)
                ]
            }
        )
        return
    for one in made:
        answer(f"signed  {one_line(one)}")


def schema(
    of: Annotated[
        str,
        typer.Argument(metavar="[record|spec|report|worker|rank]", help="Which schema to print."),
    ] = "record",
    as_json: Json = False,
) -> None:
    """Print the JSON Schema of records, reports and worker files.

    record: of a run. spec: a record of kind spec. report: what report --json prints. worker: a
    worker's input. rank: what a rank writes.

    \b
    Examples:
      steelyard schema > record.schema.json
      steelyard schema worker
    """
    from steelyard.record import record
    from steelyard.record import spec as of_spec
    from steelyard.report import data as of_report
    from steelyard.run import boundary

    schemas: dict[str, Callable[[], dict[str, Any]]] = {
        "record": record.schema,
        "spec": of_spec.schema,
        "report": of_report.schema,
        "worker": boundary.WorkerSpec.model_json_schema,
        "rank": boundary.RankFile.model_json_schema,
    }
    if of not in schemas:
        raise RequestError(f"schema {of!r}: allowed: {', '.join(schemas)}")
    dump(schemas[of]())
