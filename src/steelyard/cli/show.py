"""The commands `list` and `show`, which print what there is and run nothing."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard import plugins
from steelyard.cli import complete
from steelyard.cli.options import (
    SMOKE,
    DivisionOption,
    JsonOption,
    PrecisionOption,
    RunOptions,
    SetOption,
    SizeOption,
)
from steelyard.cli.printing import (
    align_columns,
    format_descriptions,
    format_value,
    print_json,
    print_stdout,
)

if TYPE_CHECKING:
    from steelyard.accelerators.row import DetectedDevice
    from steelyard.case.case import Case
    from steelyard.case.resolve import ResolvedCase
    from steelyard.engine.engine_rows import EngineRow

MARGIN = "  "


def list_(as_json: JsonOption = False) -> None:
    """List cases, engines, accelerators and launchers.

    \b
    Examples:
      steelyard list
      steelyard list --json
    """
    from steelyard import accelerators
    from steelyard.case import resolve
    from steelyard.engine import engine_rows
    from steelyard.run import launch

    launchers = list(launch.load_launchers())
    device_entries: list[dict[str, Any]] = [
        {
            "accelerator": row.name,
            "package": _name_package(accelerators.ENTRY_POINT_GROUP, row.name),
            "index": i,
            "device": found_device.name,
            "memory_bytes": found_device.memory_bytes,
        }
        for row in accelerators.load_accelerators().values()
        for i, found_device in enumerate(row.find())
    ]
    shipped = [resolve.resolve_case(name).case for name in resolve.list_shipped_cases()]
    cases = [{"name": case.name, "title": case.title} for case in shipped]
    rows = [
        _engine_to_json(row, shipped) for _, row in sorted(engine_rows.load_engine_rows().items())
    ]
    if as_json:
        print_json(
            {
                "cases": cases,
                "engines": rows,
                "accelerators": device_entries,
                "launchers": launchers,
            }
        )
        return
    devices = []
    for device in device_entries:
        memory = f", {device['memory_bytes'] / (1 << 30):.0f} GiB" if device["memory_bytes"] else ""
        package = f", from {device['package']}" if device["package"] else ""
        devices.append(
            (f"{device['accelerator']}:{device['index']}", f"{device['device']}{memory}{package}")
        )
    sections = (
        ("cases", [(case["name"], case["title"]) for case in cases]),
        ("engines", [(row["name"], _describe_engine(row, len(cases))) for row in rows]),
        ("accelerators", devices),
        ("launchers", [(", ".join(launchers), "")]),
    )
    print_stdout(
        "\n".join(
            line
            for title, pairs in sections
            for line in (title, *format_descriptions(pairs, MARGIN))
        )
    )


def _name_package(group: str, name: str) -> str | None:
    """Return name and version of the package that brings a row of this name to an entry-point
    group; None for a row of Steelyard's own.
    """
    provider = plugins.find_provider(group, name)
    return None if provider is None else str(provider)


def _describe_engine(row: dict[str, Any], case_count: int) -> str:
    """Return one line on what an engine runs: cases, divisions, precisions, parallel degrees, the
    package that it is from unless it is Steelyard, and what is missing to run it. `row` is the dict
    that `_engine_to_json` returns, `case_count` the number of all cases.
    """
    case_names = (
        "all cases"
        if len(row["cases"]) == case_count
        else ", ".join(row["cases"]) or "none of these cases"
    )
    parts = [
        case_names,
        ", ".join(row["divisions"]),
        ", ".join(_list_precisions(row)),
        " ".join(row["degrees"]),
    ]
    parts += [f"from {row['package']}"] if row["package"] else []
    parts += [f"{row['missing']} is not installed"] if row["missing"] else []
    parts += (
        [f"needs --set engine.checkout=DIR, a checkout of {row['checkout']}"]
        if row["checkout"]
        else []
    )
    parts += ["needs --set engine.endpoint=URL, the address of a server"] if row["endpoint"] else []
    parts += [f"untried: {row['untried']}"] if row["untried"] else []
    return "; ".join(parts)


def _list_precisions(row: dict[str, Any]) -> list[str]:
    """Return the values of --precision that an engine takes, each once: the precisions of its
    matmuls if it scores, and those that it trains in. `row` is the dict that `_engine_to_json`
    returns.
    """
    scores = not all(_is_training(work) for work in row["works"])
    return list(dict.fromkeys([*(row["precisions"] if scores else []), *row["trains_in"]]))


def _is_training(work: str) -> bool:
    """Return whether a kind of work, such as `train_rows`, belongs to training."""
    from steelyard.tasks import kind as kinds

    return any(kind.trains and work in kind.works for kind in kinds.load_kinds().values())


def _engine_to_json(row: "EngineRow", cases: "list[Case]") -> dict[str, Any]:
    """Return what an engine can do, as JSON data: the names of those `cases` that it accepts,
    works, families, divisions, precisions, degrees, the package that it is from (None: Steelyard),
    a package that is missing, or None, the program of which it needs a checkout, or None, whether
    it needs the address of a server, and what nobody has run yet, or None.
    """
    from steelyard.engine import engine_rows

    accepted = [case.name for case in cases if row.refusal(case) is None]
    return {
        "name": row.name,
        "framework": row.framework,
        "cases": accepted,
        "works": list(row.works),
        "families": list(row.families),
        "divisions": list(row.divisions),
        "precisions": list(row.precisions),
        "trains_in": list(row.trains_in) if any(map(_is_training, row.works)) else [],
        "degrees": [degree.upper() for degree in row.degrees],
        "package": _name_package(engine_rows.ENGINES_GROUP, row.name),
        "missing": row.find_missing_module(),
        "checkout": row.checkout or None,
        "endpoint": row.endpoint,
        "untried": row.untried or None,
    }


def show(
    case: Annotated[
        str,
        typer.Argument(
            metavar="CASE",
            help="A case, your own .toml file, or smoke.",
            autocompletion=complete.cases,
        ),
    ],
    size: SizeOption = None,
    precision: PrecisionOption = None,
    division: DivisionOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every value of a case, and where it comes from.

    show smoke lists the runs that steelyard run smoke makes.

    \b
    Examples:
      steelyard show llama2-7b-mmlu
      steelyard show llama2-7b-mmlu --set tune.batch_tokens=16384
      steelyard show smoke
    """
    from steelyard import accelerators
    from steelyard.case.case import AUTO
    from steelyard.case.resolve import resolve_case
    from steelyard.plan import flops

    if case == SMOKE:
        _show_smoke(size, precision, division, settings, as_json)
        return
    resolved = resolve_case(case, size, precision, division, settings)
    values = {
        key: value
        for key, value in _flatten(resolved.case.model_dump(mode="json"))
        if not key.startswith("reference")
    }
    row = accelerators.detect_accelerator()
    device = row.find()[0]
    values |= {f"tune.{name}": AUTO for name in resolved.auto}
    origins = resolved.origins | _explain_auto_tunes(resolved, device)
    load = resolved.case.question.load
    if load is not None and resolved.case.requests is None:
        values["requests"] = load.count_default_requests(resolved.case.min_time_s)
        origins["requests"] = "by the load; --sample N: a window of N"
    rows = [
        {"key": key, "value": value, "origin": origins.get(key, "default")}
        for key, value in values.items()
    ]
    rows.append(
        {
            "key": "model parameters",
            "value": flops.count_model_parameters(resolved.case.question.model),
            "origin": "derived from the shapes",
        }
    )
    peak = accelerators.find_peak(row, device)
    rate = peak.flops_per_s.get(resolved.case.question.precision.matmul) if peak else None
    origin = (
        f"accelerator row {peak.name}" if peak else f"no accelerator row for {device.name}: no MFU"
    )
    rows.append({"key": "peak FLOP/s", "value": rate, "origin": origin})
    references = [row.model_dump(mode="json") for row in resolved.case.reference]
    if as_json:
        print_json(
            {
                "name": resolved.case.name,
                "size": resolved.case.size,
                "values": rows,
                "reference": references,
            }
        )
        return
    pairs = [(str(row["key"]), f"{format_value(row['value'])}  ({row['origin']})") for row in rows]
    lines = [
        f"{resolved.case.name}, size {resolved.case.size}: {resolved.case.title}",
        *format_descriptions(pairs, MARGIN),
    ]
    published = format_descriptions(
        [(str(i), _format_published_row(row)) for i, row in enumerate(references, 1)], MARGIN
    )
    lines += ["published results", *published] if references else []
    print_stdout("\n".join(lines))


def _explain_auto_tunes(resolved: "ResolvedCase", device: "DetectedDevice") -> dict[str, str]:
    """Return for each tune that is `auto` a new origin text, by dotted key (`tune.NAME`), with the
    value that a run with engine torch on one such device would choose. Nothing is measured.
    """
    from steelyard.case.case import AUTO
    from steelyard.engine.engine_rows import TORCH
    from steelyard.plan import auto_sizes, degrees

    plan = degrees.Plan(nodes=1, devices=1, tp=1, pp=1, dp=1, launcher="local")
    chosen = auto_sizes.choose_sizes(
        resolved, auto_sizes.DeviceLimits(plan, device.memory_bytes, TORCH.fused)
    ).case.tune
    setup = f"with engine torch on one {device.name}"
    origin_by_tune = {
        tune_name: resolved.origins[f"tune.{tune_name}"].removeprefix(f"{AUTO} (").removesuffix(")")
        for tune_name in resolved.auto
    }
    return {
        f"tune.{tune_name}": f"{origin}: {getattr(chosen, tune_name)} {setup}"
        for tune_name, origin in origin_by_tune.items()
    }


def _format_published_row(row: dict[str, Any]) -> str:
    """Return a published row (a dict) as text: precision (and the one that ran, if another),
    hardware configuration and source.
    """
    ran = f" (ran as {row['ran_as']})" if row["ran_as"] != row["published_as"] else ""
    return f"{row['published_as']}{ran}, {row['config']}; {row['source']}"


def _show_smoke(
    size: str | None,
    precision: str | None,
    division: str | None,
    settings: list[str] | None,
    as_json: bool,
) -> None:
    """Print on stdout the runs that `run smoke` would make with the default engine of each case on
    this machine, as a table of case, division, precision, devices and engine, or as JSON; nothing
    is run. Raise RequestError for options that no such run has.
    """
    from steelyard.cli.requests import resolve_cases_at
    from steelyard.engine.default_engine import choose_default_engine

    options = RunOptions(size=size, precision=precision, division=division, settings=settings)
    cases_and_devices = resolve_cases_at((), SMOKE, None, options)
    runs = [
        {
            "case": resolved.case.name,
            "division": resolved.case.question.division,
            "precision": resolved.case.question.precision.name,
            "devices": devices,
            "engine": choose_default_engine(resolved.case),
            "title": resolved.case.title,
        }
        for resolved, devices in cases_and_devices
    ]
    if as_json:
        print_json({"name": SMOKE, "runs": runs})
        return
    count = f"{len(runs)} runs: every case at size smoke, each with its default engine"
    head = ("case", "division", "precision", "devices", "engine")
    cells = [head, *(tuple(str(run[name]) for name in head) for run in runs)]
    print_stdout("\n".join([count, *align_columns(cells), "run them: steelyard run smoke"]))


def _flatten(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the values of a nested dict as pairs of dotted key and value, in order; `prefix`
    stands before each key. Lists and empty dicts count as values.
    """
    pairs: list[tuple[str, Any]] = []
    for key, value in table.items():
        if isinstance(value, dict) and value:
            pairs += _flatten(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs
