"""The commands `list` and `show`, which print what there is and run nothing."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli import complete
from steelyard.cli.options import (
    SMOKE,
    DivisionOption,
    Json,
    PrecisionOption,
    RunOptions,
    Settings,
    SizeOption,
)
from steelyard.cli.out import aligned, answer, described, dump, plain

if TYPE_CHECKING:
    from steelyard.accelerators.row import Found
    from steelyard.case.case import Case
    from steelyard.case.resolve import Resolved
    from steelyard.engine.rows import EngineRow

MARGIN = "  "


def list_(as_json: Json = False) -> None:
    """List cases, engines, accelerators and launchers.

    \b
    Examples:
      steelyard list
      steelyard list --json
    """
    from steelyard import accelerators
    from steelyard.case import resolve
    from steelyard.engine import rows as engine_rows
    from steelyard.run import launch

    launchers = list(launch.table())
    found: list[dict[str, Any]] = [
        {"accelerator": row.name, "index": i, "device": one.name, "memory_bytes": one.memory_bytes}
        for row in accelerators.table().values()
        for i, one in enumerate(row.find())
    ]
    known = [resolve.resolve(name).case for name in resolve.names()]
    cases = [{"name": case.name, "title": case.title} for case in known]
    rows = [_engine(row, known) for _, row in sorted(engine_rows.table().items())]
    if as_json:
        dump({"cases": cases, "engines": rows, "accelerators": found, "launchers": launchers})
        return
    devices = []
    for device in found:
        memory = f", {device['memory_bytes'] / (1 << 30):.0f} GiB" if device["memory_bytes"] else ""
        devices.append(
            (f"{device['accelerator']}:{device['index']}", f"{device['device']}{memory}")
        )
    parts = (
        ("cases", [(case["name"], case["title"]) for case in cases]),
        ("engines", [(row["name"], _able(row, len(cases))) for row in rows]),
        ("accelerators", devices),
        ("launchers", [(", ".join(launchers), "")]),
    )
    answer("\n".join(line for title, pairs in parts for line in (title, *described(pairs, MARGIN))))


def _able(row: dict[str, Any], cases: int) -> str:
    """Describe in one line what an engine runs: cases, divisions, precisions, parallel degrees, and
    what is missing to run it. `row` is one of `_engine_to_json`, `case_count` the number of all
    cases.
    """
    what = (
        "all cases"
        if len(row["cases"]) == cases
        else ", ".join(row["cases"]) or "none of these cases"
    )
    told = [
        what,
        ", ".join(row["divisions"]),
        ", ".join(_named_precisions(row)),
        " ".join(row["degrees"]),
    ]
    told += [f"{row['missing']} is not installed"] if row["missing"] else []
    told += (
        [f"needs --set engine.checkout=DIR, a checkout of {row['checkout']}"]
        if row["checkout"]
        else []
    )
    return "; ".join(told)


def _named_precisions(row: dict[str, Any]) -> list[str]:
    """Return the values of --precision that an engine takes: the precisions of its matmuls if it
    scores, and those that it trains in.
    """
    scores = not all(_is_training(work) for work in row["works"])
    return list(dict.fromkeys([*(row["precisions"] if scores else []), *row["trains_in"]]))


def _is_training(work: str) -> bool:
    """Return whether a kind of work, such as `train_rows`, belongs to training."""
    from steelyard.tasks import kind as kinds

    return any(kind.trains and work in kind.works for kind in kinds.table().values())


def _engine(row: "EngineRow", cases: "list[Case]") -> dict[str, Any]:
    """Return what an engine can do, as JSON data: the names of the cases that it accepts, works,
    families, divisions, precisions, degrees, and a package that is missing, or None.
    """
    able = [case.name for case in cases if row.refusal(case) is None]
    return {
        "name": row.name,
        "framework": row.framework,
        "cases": able,
        "works": list(row.works),
        "families": list(row.families),
        "divisions": list(row.divisions),
        "precisions": list(row.precisions),
        "trains_in": list(row.trains_in) if any(map(_is_training, row.works)) else [],
        "degrees": [degree.upper() for degree in row.degrees],
        "missing": row.missing(),
        "checkout": row.checkout or None,
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
    settings: Settings = None,
    as_json: Json = False,
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
    from steelyard.case.resolve import resolve
    from steelyard.plan import flops

    if case == SMOKE:
        _smoke(size, precision, division, settings, as_json)
        return
    resolved = resolve(case, size, precision, division, settings)
    values = {
        key: value
        for key, value in _leaves(resolved.case.model_dump(mode="json"))
        if not key.startswith("reference")
    }
    row = accelerators.detect()
    device = row.find()[0]
    values |= {f"tune.{name}": AUTO for name in resolved.auto}
    origins = resolved.origins | _chosen(resolved, device)
    rows = [
        {"key": key, "value": value, "origin": origins.get(key, "default")}
        for key, value in values.items()
    ]
    rows.append(
        {
            "key": "model parameters",
            "value": flops.parameters(resolved.case.question.model),
            "origin": "derived from the shapes",
        }
    )
    peak = accelerators.peak(row, device)
    rate = peak.flops_per_s.get(resolved.case.question.precision.matmul) if peak else None
    origin = (
        f"accelerator row {peak.name}" if peak else f"no accelerator row for {device.name}: no MFU"
    )
    rows.append({"key": "peak FLOP/s", "value": rate, "origin": origin})
    references = [row.model_dump(mode="json") for row in resolved.case.reference]
    if as_json:
        dump(
            {
                "name": resolved.case.name,
                "size": resolved.case.size,
                "values": rows,
                "reference": references,
            }
        )
        return
    pairs = [(str(row["key"]), f"{plain(row['value'])}  ({row['origin']})") for row in rows]
    lines = [
        f"{resolved.case.name}, size {resolved.case.size}: {resolved.case.title}",
        *described(pairs, MARGIN),
    ]
    published = described(
        [(str(i), _published(row)) for i, row in enumerate(references, 1)], MARGIN
    )
    lines += ["published results", *published] if references else []
    answer("\n".join(lines))


def _chosen(resolved: "Resolved", device: "Found") -> dict[str, str]:
    """Return for each tune that is `auto` a new origin text, by dotted key, with the value that a
    run with engine torch on one such device would choose.
    """
    from steelyard.case.case import AUTO
    from steelyard.engine.rows import TORCH
    from steelyard.plan import auto, degrees

    plan = degrees.Plan(nodes=1, devices=1, tp=1, pp=1, dp=1, launcher="local")
    here = auto.choose(resolved, auto.Devices(plan, device.memory_bytes, TORCH.fused)).case.tune
    how = f"with engine torch on one {device.name}"
    where = {
        n: resolved.origins[f"tune.{n}"].removeprefix(f"{AUTO} (").removesuffix(")")
        for n in resolved.auto
    }
    return {f"tune.{n}": f"{origin}: {getattr(here, n)} {how}" for n, origin in where.items()}


def _published(row: dict[str, Any]) -> str:
    """Format a published row: precision (and the one that ran, if another), configuration and
    source.
    """
    ran = f" (ran as {row['ran_as']})" if row["ran_as"] != row["published_as"] else ""
    return f"{row['published_as']}{ran}, {row['config']}; {row['source']}"


def _smoke(
    size: str | None,
    precision: str | None,
    division: str | None,
    settings: list[str] | None,
    as_json: bool,
) -> None:
    """Print the runs that `run smoke` makes with engine torch on this machine, as a table or as
    JSON.
    """
    from steelyard.case.request import DEFAULT_ENGINE
    from steelyard.cli.requests import cases_at

    options = RunOptions(size=size, precision=precision, division=division, settings=settings)
    found = cases_at((), SMOKE, DEFAULT_ENGINE, options)
    runs = [
        {
            "case": one.case.name,
            "division": one.case.question.division,
            "precision": one.case.question.precision.name,
            "devices": devices,
            "title": one.case.title,
        }
        for one, devices in found
    ]
    if as_json:
        dump({"name": SMOKE, "runs": runs})
        return
    count = f"{len(runs)} runs: every case at size smoke, with engine torch"
    head = ("case", "division", "precision", "devices")
    cells = [head, *(tuple(str(run[name]) for name in head) for run in runs)]
    answer("\n".join([count, *aligned(cells), "run them: steelyard run smoke"]))


def _leaves(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the values of a nested dict with their dotted keys, in order. An empty dict counts as
    a value.
    """
    out: list[tuple[str, Any]] = []
    for key, value in table.items():
        if isinstance(value, dict) and value:
            out += _leaves(value, f"{prefix}{key}.")
        else:
            out.append((f"{prefix}{key}", value))
    return out
