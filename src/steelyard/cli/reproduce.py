"""The verb reproduce."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli import complete
from steelyard.cli.options import (
    PLACE,
    THRESHOLD,
    AcceleratorOption,
    EngineOptions,
    HangAfter,
    Json,
    Out,
    Quiet,
    Threshold,
    TimeLimit,
    Wide,
)
from steelyard.cli.out import Output, begin, dump, one_line, paged, say, tell
from steelyard.errors import RequestError

if TYPE_CHECKING:
    from steelyard.metrics.compare import Side
    from steelyard.metrics.fields import Field
    from steelyard.record.record import Record
    from steelyard.run.ready import Ready


def reproduce(
    source: Annotated[Path, typer.Argument(metavar="RECORD", help="The record of the run, or a folder of repeats of it.")],
    data: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The record's data, unless they are made; auto: as got.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(metavar="DIR", help="The record's weights, unless they are random.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The record's tokenizer. Default: beside weights or data.")
    ] = None,
    repeat: Annotated[int, typer.Option(metavar="N", help="Run N times, in fresh processes.")] = 1,
    threshold: Threshold = THRESHOLD,
    settings: EngineOptions = None,
    accelerator: AcceleratorOption = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="local, ssh or slurm. Default: the site's, else local.",
            rich_help_panel=PLACE,
            autocompletion=complete.launchers,
        ),
    ] = None,
    site: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file that describes the cluster; see run.", rich_help_panel=PLACE),
    ] = None,
    hang_after: HangAfter = 1800.0,
    time_limit: TimeLimit = None,
    out: Out = Path("records"),
    as_json: Json = False,
    quiet: Quiet = False,
    wide: Wide = False,
) -> int:
    """Run again what a record describes, then compare with it.

    Question, tune, plan, engine, passes and scope are the record's; data and weights must be the same. Exit code 0:
    valid and not significantly slower; 1: not so; 2: it cannot be the same run.

    \b
    Examples:
      steelyard reproduce records/20261116T041617-….json
      steelyard reproduce records/ --data mmlu/ --weights Llama-2-7b-hf/
    """
    output = Output(as_json, quiet, wide)
    begin("preparing", output)
    from steelyard.case.request import engine_settings
    from steelyard.cli.get import data_of
    from steelyard.cli.report import read
    from steelyard.cli.run import checked_repeat
    from steelyard.cli.wanted import site_file
    from steelyard.metrics import compare
    from steelyard.run import reproduce as again
    from steelyard.run.ready import ready

    base = compare.side(str(source), read([source]))
    found = (base.finished or base.records)[0]
    of_engine, others = engine_settings(settings or [])
    if others:
        raise RequestError(f"--set {others[0]!r}: reproduce takes only engine.KEY=VALUE; all else is the record's")
    where = again.Where(
        accelerator=accelerator,
        launcher=launcher,
        site=site_file(site, output),
        weights=weights,
        data=None if data is None else data_of(data, again.case(found)),
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
    if not output.silent:
        _say_before(found, before)
    done = _runs(one, checked_repeat(repeat), output)
    return _after(base, done, before, threshold, output, repeat)


def _check_plan(found: "Record", one: "Ready") -> None:
    told, now = found.plan, one.plan
    if (told.tp, told.pp, told.dp) != (now.tp, now.pp, now.dp):
        raise RequestError(f"record {found.id} ran as {told}; here its tune gives {now}; use the same number of devices")


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
    say(f"different here: {len(before)} field(s) (record / here)" if before else "nothing known is different here")
    for one in before:
        say(f"  {one_line(fields.line([one]))}")


def _runs(one: "Ready", times: int, output: Output) -> "list[Record]":
    from steelyard.cli.run import carry_out, hosts, interrupted

    done: list[Record] = []
    with hosts([one], output) as allocation:
        while len(done) < times and not (done and interrupted(done[-1])):
            done.append(carry_out(one, output, allocation, (len(done) + 1, times)))
    return done


def _after(
    base: "Side", done: "list[Record]", before: "tuple[Field, ...]", threshold: float, output: Output, times: int
) -> int:
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
        raise RequestError(f"not the same run: {fields.line(other)}; the new run is kept as record {ids}")
    compared = compare.compare(base, compare.side("reproduced", done), [], threshold)
    if output.json:
        told: dict[str, Any] = {"records": [record.printed(made) for made in done], "here": [field(one) for one in before]}
        dump(told | {"remarks": again.remarks(found), "comparison": table(compared)}, tell)
    else:
        tell(paged(report.comparison(compared), output.wide))
    whole = len(done) == times and all(made.status == "valid" for made in done)
    return 0 if whole and not compared.regressed else 1
