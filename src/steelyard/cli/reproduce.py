"""Run again what a record describes, and compare the new runs with it: the work of the command
`reproduce`.
"""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from steelyard import report
from steelyard.case.request import Request, engine_settings
from steelyard.cli.compare import field, table
from steelyard.cli.get import data_of
from steelyard.cli.out import Output, dump, one_line, paged, say, tell
from steelyard.cli.records import read
from steelyard.cli.requests import checked_repeat, site_file
from steelyard.cli.runs import Turn, carry_out_all
from steelyard.errors import RequestError
from steelyard.metrics import compare, fields
from steelyard.metrics.compare import Side
from steelyard.metrics.fields import Field
from steelyard.record import record
from steelyard.record.record import Record
from steelyard.run import reproduce as again
from steelyard.run.ready import Ready, ready


def read_request(source: Path) -> tuple[Side, Request]:
    """Read a record, or a folder of its repeats; return it as the base of a comparison, with the
    request that would run it again.

    Raise RequestError if a record does not verify or cannot be run again.
    """
    base = compare.side(str(source), read([source]))
    return base, again.request((base.finished or base.records)[0])


def reproduce_record(
    base: Side, asked: Request, settings: list[str], repeat: int, threshold: float, output: Output
) -> int:
    """Run `request`, which describes the record `base`, `repeat` times; print the comparison and
    return the exit code: 0 if all runs are valid and not significantly slower by more than
    `threshold` (a share), otherwise 1.

    The new records are written. Raise RequestError if it cannot be the same run: settings other
    than engine.KEY, other data, weights or plan. What differs on this host is printed on stderr
    before.
    """
    found = (base.finished or base.records)[0]
    of_engine, others = engine_settings(settings)
    if others:
        raise RequestError(
            f"--set {others[0]!r}: reproduce takes only engine.KEY=VALUE; all else is the record's"
        )
    data = data_of(asked.data, asked.resolved.case)
    asked = replace(asked, site=site_file(asked.site, output), data=data, engine_settings=of_engine)
    again.check_sources(found, asked)
    one = ready(asked)
    told, now = found.plan, one.plan
    if (told.tp, told.pp, told.dp) != (now.tp, now.pp, now.dp):
        raise RequestError(
            f"record {found.id} ran as {told}; here its tune gives {now}; use the same number of"
            " devices"
        )
    _check_weights(found, one)
    before = again.here(found, one)
    if not output.silent:
        _say_before(found, before)
    done = [made for _, made in carry_out_all([Turn(one)] * checked_repeat(repeat), output)]
    return _after(base, done, before, threshold, output, repeat)


def _check_weights(found: Record, one: Ready) -> None:
    """Raise RequestError if the weights of the request, where they are on this host, are not those
    of the record. Their headers are read by a subprocess, because the reader imports torch. Nothing
    is checked without a local folder or without torch.
    """
    folder = one.request.weights
    if folder is None or not folder.is_dir() or find_spec("torch") is None:
        return
    command = [sys.executable, "-P", "-m", "steelyard", "weights", "inspect", str(folder), "--json"]
    looked = subprocess.run(command, capture_output=True, text=True, check=False)
    if looked.returncode:
        raise RequestError(
            looked.stderr.strip().removeprefix("error: ")
            or f"--weights {str(folder)!r} cannot be read"
        )
    again.check_weights(found, json.loads(looked.stdout)["header_sha256"])


def _say_before(found: Record, before: tuple[Field, ...]) -> None:
    """Print on stderr the remarks on the record's case, and what differs between the record and
    this host.
    """
    for said in again.remarks(found):
        say(one_line(said))
    say(
        f"different here: {len(before)} field(s) (record / here)"
        if before
        else "nothing known is different here"
    )
    for one in before:
        say(f"  {one_line(fields.line([one]))}")


def _after(
    base: Side,
    done: list[Record],
    before: tuple[Field, ...],
    threshold: float,
    output: Output,
    times: int,
) -> int:
    """Print the comparison of the new records with the base and return the exit code: 0 if there
    are `times` valid runs and they are not significantly slower.

    Raise RequestError if a run read other data or weights than the record. `differences` are those
    between the record and this host, for --json.
    """
    found = (base.finished or base.records)[0]
    other = [one for made in done for one in again.differs(found, made)]
    if other:
        ids = ", ".join(made.id[:8] for made in done)
        raise RequestError(
            f"not the same run: {fields.line(other)}; the new run is kept as record {ids}"
        )
    compared = compare.compare(base, compare.side("reproduced", done), [], threshold)
    if output.json:
        told: dict[str, Any] = {
            "records": [record.printed(made) for made in done],
            "here": [field(one) for one in before],
        }
        dump(told | {"remarks": again.remarks(found), "comparison": table(compared)}, tell)
    else:
        tell(paged(report.comparison(compared), output.wide))
    whole = len(done) == times and all(made.status == "valid" for made in done)
    return 0 if whole and not compared.regressed else 1
