"""The verbs that only look: list and show."""

from typing import Annotated, Any

import typer

from steelyard.cli.options import Division, Json, Precision, Settings, Size
from steelyard.cli.out import answer, dump, plain


def list_(as_json: Json = False) -> None:
    """Cases, engines, and the accelerators found on this machine.

    Example: steelyard list
    """
    from steelyard import accelerators, engines
    from steelyard.case import case

    found: list[dict[str, Any]] = [
        {"accelerator": row.name, "index": i, "device": one.name, "memory_bytes": one.memory_bytes}
        for row in accelerators.table().values()
        for i, one in enumerate(row.find())
    ]
    cases = [{"name": name, "title": case.read(name)[0]["title"]} for name in case.names()]
    if as_json:
        dump({"cases": cases, "engines": engines.names(), "accelerators": found})
        return
    width = max(len(row["name"]) for row in cases)
    lines = ["cases", *(f"  {row['name']:<{width}}  {row['title']}" for row in cases)]
    lines += ["engines", f"  {', '.join(engines.names())}", "accelerators"]
    for row in found:
        memory = f"  {row['memory_bytes'] / (1 << 30):.0f} GiB" if row["memory_bytes"] else ""
        lines.append(f"  {row['accelerator']}:{row['index']}  {row['device']}{memory}")
    answer("\n".join(lines))


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
    from steelyard import accelerators
    from steelyard.accelerators import peaks
    from steelyard.case.case import resolve
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
    device = accelerators.detect().find()[0]
    peak = peaks.peak(device.name, device.memory_bytes)
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
