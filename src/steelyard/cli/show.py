"""The verbs that only look: list and show."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli.options import DivisionOption, Json, PrecisionOption, Settings, SizeOption
from steelyard.cli.out import answer, dump, plain

if TYPE_CHECKING:
    from steelyard.case.case import Case
    from steelyard.engines import EngineRow


def list_(as_json: Json = False) -> None:
    """Cases, what each engine can run of them, the accelerators found on this machine, and the launchers.

    Example: steelyard list
    """
    from steelyard import accelerators, engines
    from steelyard.case import resolve
    from steelyard.run import launch

    launchers = list(launch.table())
    found: list[dict[str, Any]] = [
        {"accelerator": row.name, "index": i, "device": one.name, "memory_bytes": one.memory_bytes}
        for row in accelerators.table().values()
        for i, one in enumerate(row.find())
    ]
    known = [resolve.resolve(name).case for name in resolve.names()]
    cases = [{"name": case.name, "title": case.title} for case in known]
    rows = [_engine(row, known) for _, row in sorted(engines.table().items())]
    if as_json:
        dump({"cases": cases, "engines": rows, "accelerators": found, "launchers": launchers})
        return
    width = max(len(row["name"]) for row in cases)
    lines = ["cases", *(f"  {row['name']:<{width}}  {row['title']}" for row in cases), "engines"]
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        missing = f" ({row['missing']} is not installed)" if row["missing"] else ""
        missing += f" (needs --set engine.checkout=DIR, a checkout of {row['checkout']})" if row["checkout"] else ""
        lines.append(f"  {row['name']:<{width}}  {', '.join(row['cases']) or 'none of these cases'}{missing}")
        lines.append(
            f"  {'':<{width}}  {', '.join(row['divisions'])}; {', '.join(row['precisions'])}; {' '.join(row['degrees'])}"
        )
    lines.append("accelerators")
    for device in found:
        memory = f"  {device['memory_bytes'] / (1 << 30):.0f} GiB" if device["memory_bytes"] else ""
        lines.append(f"  {device['accelerator']}:{device['index']}  {device['device']}{memory}")
    answer("\n".join([*lines, "launchers", f"  {', '.join(launchers)}"]))


def _engine(row: "EngineRow", cases: "list[Case]") -> dict[str, Any]:
    """What an engine can do, from its row."""
    able = [case.name for case in cases if row.refusal(case) is None]
    return {
        "name": row.name,
        "framework": row.framework,
        "cases": able,
        "works": list(row.works),
        "families": list(row.families),
        "divisions": list(row.divisions),
        "precisions": list(row.precisions),
        "degrees": [degree.upper() for degree in row.degrees],
        "missing": row.missing(),
        "checkout": row.checkout or None,
    }


def show(
    case: Annotated[str, typer.Argument(metavar="CASE", help="A case's name, or the path of your own TOML file.")],
    size: SizeOption = None,
    precision: PrecisionOption = None,
    division: DivisionOption = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """The resolved case: every value with where it came from.

    Example: steelyard show llama2-7b-mmlu --set tune.batch_tokens=16384
    """
    from steelyard import accelerators
    from steelyard.case.resolve import resolve
    from steelyard.plan import flops

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
    row = accelerators.detect()
    device = row.find()[0]
    peak = accelerators.peak(row, device)
    rate = peak.flops_per_s.get(resolved.case.question.precision.matmul) if peak else None
    origin = f"accelerator row {peak.name}" if peak else f"no accelerator row for {device.name}: no MFU"
    rows.append({"key": "peak FLOP/s", "value": rate, "origin": origin})
    references = [row.model_dump(mode="json") for row in resolved.case.reference]
    if as_json:
        dump({"name": resolved.case.name, "size": resolved.case.size, "values": rows, "reference": references})
        return
    width = max(len(str(row["key"])) for row in rows)
    lines = [f"{row['key']:<{width}}  {plain(row['value'])}  ({row['origin']})" for row in rows]
    lines += [
        f"published: {row['published_as']} (ran as {row['ran_as']}), {row['config']}; {row['source']}" for row in references
    ]
    answer("\n".join(lines))


def _leaves(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, value in table.items():
        if isinstance(value, dict) and value:
            out += _leaves(value, f"{prefix}{key}.")
        else:
            out.append((f"{prefix}{key}", value))
    return out
