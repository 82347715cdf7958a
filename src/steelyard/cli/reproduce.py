"""The verb reproduce."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli.options import THRESHOLD, EngineOptions, Json, Threshold
from steelyard.cli.out import dump, one_line, say, tell
from steelyard.errors import RequestError

if TYPE_CHECKING:
    from steelyard.metrics.compare import Side
    from steelyard.metrics.fields import Field
    from steelyard.record.record import Record
    from steelyard.run.ready import Ready


def reproduce(
    source: Annotated[Path, typer.Argument(metavar="RECORD", help="The record of the run, or a folder of repeats of it.")],
    accelerator: Annotated[str | None, typer.Option(help="cuda or cpu; default: the record's.")] = None,
    launcher: Annotated[str | None, typer.Option(help="local, ssh or slurm; default: the site's, else local.")] = None,
    weights: Annotated[Path | None, typer.Option(metavar="DIR", help="The record's weights, unless they are random.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder or file of the record's data, unless they are made.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Its tokenizer; default: beside weights or data.")] = None,
    site: Annotated[Path | None, typer.Option(help="TOML with what is true of this cluster; see run.")] = None,
    settings: EngineOptions = None,
    repeat: Annotated[int, typer.Option(help="Run so many times, in fresh processes.")] = 1,
    threshold: Threshold = THRESHOLD,
    hang_after: Annotated[float, typer.Option(help="Seconds without a sign of life before workers are ended.")] = 1800.0,
    time_limit: Annotated[float | None, typer.Option(help="Seconds a run may take in all.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("records"),
    as_json: Json = False,
) -> int:
    """Run again what a record tells of: question, tune, plan, engine, passes, scope. Then compare with it.

    Data and weights must be the same. Exit code 0 where the runs are valid and not significantly slower, 1 where not, 2
    where it cannot be the same run.

    \b
    Examples:
      steelyard reproduce records/2026….json
      steelyard reproduce records/2026….json --data mmlu/ --weights Llama-2-7b-hf/ --repeat 5
    """
    from steelyard.case.request import engine_settings
    from steelyard.cli.report import read
    from steelyard.cli.run import at_least_one
    from steelyard.metrics import compare
    from steelyard.run import reproduce as again
    from steelyard.run import site as sites
    from steelyard.run.ready import ready

    base = compare.side(str(source), read([source]))
    found = (base.finished or base.records)[0]
    of_engine, others = engine_settings(settings or [])
    if others:
        raise RequestError(f"--set {others[0]!r}: what is asked is the record's; only engine.KEY=VALUE says where things lie")
    where = again.Where(
        accelerator=accelerator,
        launcher=launcher,
        site=sites.find(site),
        weights=weights,
        data=data,
        tokenizer=tokenizer,
        engine_settings=of_engine,
        out=out,
        hang_s=hang_after,
        limit_s=time_limit,
    )
    one = ready(again.request(found, where))
    _check_plan(found, one)
    _check_weights(found, one)
    before = again.here(found, one)
    if not as_json:
        _say_before(found, before)
    done = _runs(one, at_least_one(repeat), as_json)
    return _after(base, done, before, threshold, as_json, repeat)


def _check_plan(found: "Record", one: "Ready") -> None:
    told, now = found.plan, one.plan
    if (told.tp, told.pp, told.dp) != (now.tp, now.pp, now.dp):
        raise RequestError(f"record {found.id} ran as {told}, and its tune makes {now} of these devices here")


def _check_weights(found: "Record", one: "Ready") -> None:
    """Before the run, where they lie on this host. Their reader imports torch, which a parent never does: another process
    looks at them."""
    from steelyard.run import reproduce as again

    folder = one.request.weights
    if folder is None or not folder.is_dir() or find_spec("torch") is None:
        return
    command = [sys.executable, "-P", "-m", "steelyard", "weights", "inspect", str(folder), "--json"]
    looked = subprocess.run(command, capture_output=True, text=True, check=False)
    if looked.returncode:
        raise RequestError(looked.stderr.strip().removeprefix("error: ") or f"--weights {str(folder)!r} cannot be read")
    again.check_weights(found, json.loads(looked.stdout)["header_sha256"])


def _say_before(found: "Record", before: "tuple[Field, ...]") -> None:
    from steelyard.metrics import fields
    from steelyard.run import reproduce as again

    for said in again.remarks(found):
        say(one_line(said))
    say(f"differs here: {len(before)} field(s) (record / here)" if before else "nothing known differs here")
    for one in before:
        say(f"  {one_line(fields.line([one]))}")


def _runs(one: "Ready", times: int, as_json: bool) -> "list[Record]":
    from rich.console import Console

    from steelyard.cli.run import carry_out, hosts, interrupted

    console = Console(stderr=True, quiet=as_json)
    done: list[Record] = []
    with hosts([one]) as allocation:
        while len(done) < times and not (done and interrupted(done[-1])):
            done.append(carry_out(one, console, allocation))
    return done


def _after(base: "Side", done: "list[Record]", before: "tuple[Field, ...]", threshold: float, as_json: bool, times: int) -> int:
    """The comparison with the record; refused where the runs read something else."""
    from steelyard import report
    from steelyard.cli.compare import field, table
    from steelyard.metrics import compare, fields
    from steelyard.record import record
    from steelyard.run import reproduce as again

    found = (base.finished or base.records)[0]
    other = [one for made in done for one in again.differs(found, made)]
    if other:
        ids = ", ".join(made.id[:8] for made in done)
        raise RequestError(f"not the same run: {fields.line(other)}; it was made all the same, as record {ids}")
    compared = compare.compare(base, compare.side("reproduced", done), [], threshold)
    if as_json:
        told: dict[str, Any] = {"records": [record.to_table(made) for made in done], "here": [field(one) for one in before]}
        dump(told | {"remarks": again.remarks(found), "comparison": table(compared)}, tell)
    else:
        tell(report.text(report.comparison(compared)))
    whole = len(done) == times and all(made.status == "valid" for made in done)
    return 0 if whole and not compared.regressed else 1
