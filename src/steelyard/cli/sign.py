"""The verb sign."""

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import Json, Records
from steelyard.cli.out import answer, dump, one_line


def sign(
    records: Records,
    key: Annotated[
        Path, typer.Option("--key", metavar="KEY", help="An SSH private key, or the .pub of one that ssh-agent holds.")
    ],
    as_json: Json = False,
) -> None:
    """Sign records with an SSH key. The signature is a file RECORD.json.sig beside each record.

    A record must verify to be signed. A key with a passphrase signs through ssh-agent. steelyard verify --signers FILE
    shows who signed.

    \b
    Examples:
      steelyard sign records/*.json --key ~/.ssh/id_ed25519
      steelyard run smoke --sign ~/.ssh/id_ed25519
    """
    from steelyard.cli.report import by_kind, paths, read_specs
    from steelyard.metrics.verify import read
    from steelyard.record import signature

    every = paths(records)
    of_spec, runs = by_kind(every)
    read_specs(of_spec)  # all records before the first is signed
    for path in runs:
        read(path)
    made = [signature.sign(path, key) for path in every]
    if as_json:
        dump({"signed": [{"record": str(path), "signature": str(one)} for path, one in zip(every, made, strict=True)]})
        return
    for one in made:
        answer(f"signed  {one_line(one)}")
