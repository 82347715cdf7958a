"""The commands on existing records: `report`, `verify`, `sign` and `schema`."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard.cli import complete
from steelyard.cli.options import JsonOption, LangOption, RecordsArgument, WideOption
from steelyard.cli.printing import print_json, print_stdout, to_one_line
from steelyard.errors import RequestError


def report_(
    records: RecordsArgument,
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
    lang: LangOption = "en",
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write to this file. With --layout flagperf also a folder: one file per case.",
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
        typer.Option("--full", help="Text: every detail and all columns, not one screen per case."),
    ] = False,
    wide: WideOption = False,
    as_json: JsonOption = False,
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
    from steelyard.cli import page_output
    from steelyard.cli.records import (
        find_record_paths,
        read_run_records,
        read_spec_records,
        split_spec_records,
    )

    options = page_output.ExportOptions(format_, layout, lang, to, explain, full, wide, as_json)
    spec_paths, run_paths = split_spec_records(find_record_paths(records))
    page_output.export_records(
        options,
        [] if run_paths else read_spec_records(spec_paths),
        read_run_records(records) if run_paths else [],
    )


def verify(
    records: RecordsArgument,
    signers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="SSH allowed_signers file; every record must be signed by one of them.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Check records: metrics, hashes and signatures.

    Every metric is computed again from the raw samples. A record verifies with a remark if it asks
    another question than the shipped case of its name, has a datasheet peak that the shipped table
    never had, or lacks evidence that records of its version have. Exit code 0: all verify; 1: one
    does not.

    \b
    Examples:
      steelyard verify records/
      steelyard verify records/ --signers allowed_signers
    """
    from steelyard.cli.records import find_record_paths, verify_record

    record_paths = find_record_paths(records)
    results = [verify_record(path, signers, alone=len(record_paths) == 1) for path in record_paths]
    if as_json:
        print_json(
            {
                "records": [
                    asdict(result) | {"path": str(result.path), "ok": not result.wrong}
                    for result in results
                ]
            }
        )
    else:
        for result in results:
            print_stdout(f"{'WRONG' if result.wrong else 'ok'}  {to_one_line(result.path)}")
            signature_lines = (
                [str(result.signature)]
                if result.signature is not None and str(result.signature) not in result.wrong
                else []
            )
            remark_lines = [f"remark: {remark}" for remark in result.remarks]
            for line in (*result.wrong, *remark_lines, *signature_lines):
                print_stdout(f"  {to_one_line(line)}")
    return 1 if any(result.wrong for result in results) else 0


def sign(
    records: RecordsArgument,
    key: Annotated[
        Path,
        typer.Option(
            "--key",
            metavar="KEY",
            help="An SSH private key, or the .pub of one that ssh-agent holds.",
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Sign records with an SSH key. The signature is a file RECORD.json.sig beside each record.

    A record must verify to be signed. A key with a passphrase signs through ssh-agent. steelyard
    verify --signers FILE shows who signed.

    \b
    Examples:
      steelyard sign records/*.json --key ~/.ssh/id_ed25519
      steelyard run smoke --sign ~/.ssh/id_ed25519
    """
    from steelyard.cli.records import find_record_paths, read_spec_records, split_spec_records
    from steelyard.metrics.verify import read_verified_record
    from steelyard.record import signature

    record_paths = find_record_paths(records)
    spec_paths, run_paths = split_spec_records(record_paths)
    read_spec_records(spec_paths)  # all records must verify before the first is signed
    for path in run_paths:
        read_verified_record(path)
    signature_paths = [signature.sign_record(path, key) for path in record_paths]
    if as_json:
        print_json(
            {
                "signed": [
                    {"record": str(path), "signature": str(signature_path)}
                    for path, signature_path in zip(record_paths, signature_paths, strict=True)
                ]
            }
        )
        return
    for signature_path in signature_paths:
        print_stdout(f"signed  {to_one_line(signature_path)}")


def schema(
    of: Annotated[
        str,
        typer.Argument(metavar="[record|spec|report|worker|rank]", help="Which schema to print."),
    ] = "record",
    as_json: JsonOption = False,
) -> None:
    """Print the JSON Schema of records, reports and worker files.

    record: of a run. spec: a record of kind spec. report: what report --json prints. worker: a
    worker's input. rank: what a rank writes.

    \b
    Examples:
      steelyard schema > record.schema.json
      steelyard schema worker
    """
    from steelyard.record import ceilings_record as of_spec
    from steelyard.record import record
    from steelyard.report import report_data as of_report
    from steelyard.run import worker_files

    schemas: dict[str, Callable[[], dict[str, Any]]] = {
        "record": record.make_record_schema,
        "spec": of_spec.make_spec_record_schema,
        "report": of_report.report_schema,
        "worker": worker_files.WorkerSpec.model_json_schema,
        "rank": worker_files.RankFile.model_json_schema,
    }
    if of not in schemas:
        raise RequestError(f"schema {of!r}: allowed: {', '.join(schemas)}")
    print_json(schemas[of]())
