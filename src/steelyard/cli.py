"""The verbs. The only file that prints: answers on stdout, progress and errors on stderr."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard import __version__
from steelyard.errors import LostError, RequestError

# Typer brings its own copy of click in newer versions; this is the base of its errors in every version.
UsageProblem: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name="steelyard",
    help="Weigh an accelerator on real LLM work: is the answer right, how fast, at what cost, how close to the limit.\n\n"
    "Start with: steelyard run smoke",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Size = Annotated[str | None, typer.Option(help="full (published model and data, the default) or smoke (tiny, made, seconds).")]
Precision = Annotated[str | None, typer.Option(help="fp32, tf32, fp16 or bf16 (training also bf16-pure); default: the case's.")]
Division = Annotated[str | None, typer.Option(help="closed (every token computed) or open (shared prefixes computed once).")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override any value, such as tune.batch_tokens=16384.")
]
Records = Annotated[list[Path], typer.Argument(metavar="RECORD...", help="Records, or folders of records.")]


def main() -> None:
    """Run the command line; exit codes: 0 valid, 1 ran but invalid or failed, 2 the request is wrong."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = app(standalone_mode=False)
    except RequestError as error:
        _say(f"error: {_one_line(error)}")
        sys.exit(2)
    except LostError as error:
        _say(f"error: {_one_line(error)}")
        sys.exit(1)
    except UsageProblem as error:
        _usage(error)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _usage(error: Any) -> None:
    """One line for a mistyped command; the help, where nothing at all was asked."""
    if type(error).__name__ == "NoArgsIsHelpError":
        _print(error.format_message())
    else:
        verb = error.ctx.command_path if error.ctx else "steelyard"
        _say(f"error: {_one_line(error.format_message()).rstrip('.')}; see {verb} --help")


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _one_line(text: object) -> str:
    """Names and values in a text come from files and command lines, and may hold anything."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def _print(text: str) -> None:
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except OSError as error:
        # What is still in the buffer would fail again, with a traceback, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise LostError(f"stdout cannot be written: {error.strerror}") from error


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _dump(value: Any) -> None:
    _print(json.dumps(value, indent=2, ensure_ascii=False))


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        _print(__version__)
        raise typer.Exit(0)


@app.command("list")
def list_(as_json: Json = False) -> None:
    """Cases, engines, and the accelerators found on this machine.

    Example: steelyard list
    """
    from steelyard import accelerators, case, engines

    found: list[dict[str, Any]] = [
        {"accelerator": row.name, "index": i, "device": one.name, "memory_bytes": one.memory_bytes}
        for row in accelerators.table().values()
        for i, one in enumerate(row.find())
    ]
    cases = [{"name": name, "title": case.read(name)[0]["title"]} for name in case.names()]
    if as_json:
        _dump({"cases": cases, "engines": engines.names(), "accelerators": found})
        return
    width = max(len(row["name"]) for row in cases)
    lines = ["cases", *(f"  {row['name']:<{width}}  {row['title']}" for row in cases)]
    lines += ["engines", f"  {', '.join(engines.names())}", "accelerators"]
    for row in found:
        memory = f"  {row['memory_bytes'] / (1 << 30):.0f} GiB" if row["memory_bytes"] else ""
        lines.append(f"  {row['accelerator']}:{row['index']}  {row['device']}{memory}")
    _print("\n".join(lines))


@app.command()
def show(
    case: Annotated[str, typer.Argument(metavar="CASE", help="A case's name, or the path of your own TOML file.")],
    size: Size = None,
    precision: Precision = None,
    division: Division = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """The resolved case: every value with where it came from.

    Example: steelyard show llama2-7b-mmlu --set tune.batch_tokens=16384
    """
    from steelyard import accelerators, flops
    from steelyard.accelerators import peaks
    from steelyard.case import resolve

    resolved = resolve(case, size, precision, division, settings)
    values = {key: value for key, value in _leaves(resolved.case.model_dump(mode="json")) if not key.startswith("reference")}
    rows = [{"key": key, "value": value, "origin": resolved.origins.get(key, "default")} for key, value in values.items()]
    rows.append(
        {
            "key": "model parameters",
            "value": flops.parameters(resolved.case.question.model),
            "origin": "derived from the shapes",
        }
    )
    device = accelerators.detect().find()[0]
    peak = peaks.peak(device.name, device.memory_bytes)
    rate = peak.flops_per_s.get(resolved.case.question.precision.matmul) if peak else None
    origin = f"accelerator row {peak.name}" if peak else f"no accelerator row for {device.name}: no MFU"
    rows.append({"key": "peak FLOP/s", "value": rate, "origin": origin})
    references = [row.model_dump(mode="json") for row in resolved.case.reference]
    if as_json:
        _dump({"name": resolved.case.name, "size": resolved.case.size, "values": rows, "reference": references})
        return
    width = max(len(str(row["key"])) for row in rows)
    lines = [f"{row['key']:<{width}}  {_plain(row['value'])}  ({row['origin']})" for row in rows]
    lines += [
        f"published: {row['published_as']} (ran as {row['ran_as']}), {row['config']}; {row['source']}" for row in references
    ]
    _print("\n".join(lines))


def _plain(value: Any) -> str:
    return "/" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _leaves(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, value in table.items():
        if isinstance(value, dict) and value:
            out += _leaves(value, f"{prefix}{key}.")
        else:
            out.append((f"{prefix}{key}", value))
    return out


@app.command()
def run(
    cases: Annotated[
        list[str], typer.Argument(metavar="CASE...", help="Cases, your own .toml files, or smoke: every case, tiny.")
    ],
    size: Size = None,
    engine: Annotated[str, typer.Option(help="torch (ours) or transformers (what users run today).")] = "torch",
    accelerator: Annotated[str | None, typer.Option(help="cuda or cpu; default: the first one found.")] = None,
    precision: Precision = None,
    division: Division = None,
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    devices: Annotated[int, typer.Option(help="Devices per machine.")] = 1,
    passes: Annotated[
        str, typer.Option(help="val (eager), infer (compiled), bare (infer again with nothing measured inside).")
    ] = "val,infer",
    steps: Annotated[int | None, typer.Option(help="Stop each pass after so many batches.")] = None,
    sample: Annotated[int | None, typer.Option(help="A seeded sample of so many questions.")] = None,
    weights: Annotated[
        str, typer.Option(metavar="DIR|random", help="A Hugging Face folder of safetensors, or random.")
    ] = "random",
    data: Annotated[Path | None, typer.Option(help="Folder or .tar of the case's data (full size).")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json or tokenizer.model; default: beside weights or data.")
    ] = None,
    settings: Settings = None,
    site: Annotated[Path | None, typer.Option(help="TOML with machine and network, which cannot be detected.")] = None,
    repeat: Annotated[int, typer.Option(help="Run so many times, in fresh processes.")] = 1,
    hang_after: Annotated[float, typer.Option(help="Seconds without a sign of life before workers are ended.")] = 1800.0,
    time_limit: Annotated[float | None, typer.Option(help="Seconds a run may take in all.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("records"),
    as_json: Json = False,
) -> int:
    """Run cases, check the answers, and write a record of each.

    \b
    Examples:
      steelyard run smoke
      steelyard run llama2-7b-mmlu --data mmlu/ --weights Llama-2-7b-hf/
      steelyard run llama2-7b-mmlu --data mmlu/ --weights random --tokenizer tokenizer.model --sample 1404
    """
    from steelyard.run import Request

    requests = [
        Request(
            resolved=resolved,
            engine=engine,
            accelerator=accelerator,
            nodes=nodes,
            devices=devices,
            passes=tuple(name.strip() for name in passes.split(",") if name.strip()),
            sample=sample,
            steps=steps,
            weights=None if weights == "random" else Path(weights),
            data=data,
            tokenizer=tokenizer,
            site=site,
            out=out,
            hang_s=hang_after,
            limit_s=time_limit,
        )
        for resolved in _resolve(cases, engine, size, precision, division, settings)
        for _ in range(_at_least_one(repeat))
    ]
    return _run(requests, as_json)


def _at_least_one(repeat: int) -> int:
    if repeat < 1:
        raise RequestError(f"--repeat {repeat}: must be at least 1")
    return repeat


def _resolve(
    cases: list[str],
    engine: str,
    size: str | None,
    precision: str | None,
    division: str | None,
    settings: list[str] | None,
) -> list[Any]:
    """What to run. `smoke` stands for every case at that size, in every division that it and the engine have."""
    from steelyard import case, engines

    out = []
    for name in cases:
        if name != "smoke":
            out.append(case.resolve(name, size, precision, division, settings))
            continue
        if size not in (None, "smoke"):
            raise RequestError(f"run smoke --size {size}: smoke is a size; name a case to run it at size {size}")
        for known in case.names():
            every = case.resolve(known, "smoke", precision, division, settings).case.divisions
            able = [one for one in every if one in engines.DIVISIONS.get(engine, every)]
            out += [case.resolve(known, "smoke", precision, one, settings) for one in ([division] if division else able)]
    return out


def _run(requests: list[Any], as_json: bool) -> int:
    from rich.console import Console

    from steelyard import record, report
    from steelyard.progress import Display
    from steelyard.run import check, run_case

    for request in requests:  # all of them before the first is run
        check(request)
    console = Console(stderr=True, quiet=as_json)
    done = []
    for request in requests:
        question = request.resolved.case.question
        label = f"{request.resolved.case.name} {question.division} {question.precision.name} {request.engine}"
        with Display(console, label) as display:
            made, path = run_case(request, display.show)
        done.append(made)
        if not as_json:
            _say(f"{made.status}: {path}")
            for reason in made.reasons:
                _say(f"  {reason.code}: {reason.text}")
        if any(reason.code == "interrupted" for reason in made.reasons):
            break
    if as_json:
        _dump({"records": [record.to_table(made) for made in done]})
    else:
        _print(report.text(report.table(done)))
    return 0 if len(done) == len(requests) and all(made.status == "valid" for made in done) else 1


@app.command("report")
def report_(
    records: Records,
    format_: Annotated[str, typer.Option("--format", help="text, md or html.")] = "text",
    lang: Annotated[str, typer.Option(help="en or zh.")] = "en",
    to: Annotated[Path | None, typer.Option(help="Write to this file instead of stdout.")] = None,
    as_json: Json = False,
) -> None:
    """The result page of records: environment, strategy, what each metric means, values, published rows.

    Example: steelyard report records/*.json --format html --to page.html
    """
    from steelyard import report

    if format_ not in report.FORMATS:
        raise RequestError(f"--format {format_!r}: allowed: {', '.join(report.FORMATS)}")
    if lang not in report.LANGS:
        raise RequestError(f"--lang {lang!r}: allowed: {', '.join(report.LANGS)}")
    page = _page(records, format_, lang)
    if to is not None:
        _write(to, page)
    if as_json:
        _dump({"format": format_, "lang": lang, "page": None if to else page, "path": str(to) if to else None})
    elif to is None:
        _print(page)
    else:
        _say(f"page: {to}")


def _page(places: list[Path], format_: str, lang: str) -> str:
    from steelyard import report
    from steelyard.verify import MISFITS

    try:
        return report.render(_read(places), format_, lang)
    except MISFITS as error:
        where = ", ".join(map(str, places))
        raise RequestError(
            f"{where}: no page can be made of it: {type(error).__name__}: {error}; try steelyard verify"
        ) from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--to {str(path)!r} cannot be written: {error.strerror}") from error


def _paths(places: list[Path]) -> list[Path]:
    out: list[Path] = []
    for place in places:
        out += sorted(place.glob("*.json")) if place.is_dir() else [place]
    if not out:
        raise RequestError(f"no records in {', '.join(str(place) for place in places)}; give records or a folder of them")
    return out


def _read(places: list[Path]) -> list[Any]:
    from steelyard.verify import read

    return [read(path) for path in _paths(places)]


@app.command()
def verify(records: Records, as_json: Json = False) -> int:
    """Recompute every metric of records from their raw samples, and check their hashes.

    Example: steelyard verify records/
    """
    from steelyard.verify import verify as check

    paths = _paths(records)
    found = {str(path): check(path) if len(paths) == 1 else _verdict(path) for path in paths}
    wrong = {path: lines for path, lines in found.items() if lines}
    if as_json:
        _dump({"records": [{"path": path, "ok": not lines, "wrong": lines} for path, lines in found.items()]})
    else:
        for path, lines in found.items():
            _print(f"{'ok' if not lines else 'WRONG'}  {path}")
            for line in lines:
                _print(f"  {line}")
    return 1 if wrong else 0


def _verdict(path: Path) -> list[str]:
    """One of several: what is no record at all is wrong, and the others are still looked at."""
    from steelyard.verify import verify as check

    try:
        return check(path)
    except RequestError as error:
        return [_one_line(error)]


@app.command()
def schema(as_json: Json = False) -> None:
    """The JSON Schema of a record.

    Example: steelyard schema > record.schema.json
    """
    from steelyard import record

    _dump(record.schema())
