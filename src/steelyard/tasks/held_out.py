"""What a record keeps of training beside its samples: the loss of held-out rows before and after, and why it stopped early."""

from typing import Any


def outputs(held_out: int) -> dict[str, Any]:
    """The part that does not depend on a pass."""
    return {"held_out": held_out, "passes": {}}


def check(table: Any, common: dict[str, Any]) -> dict[str, Any]:
    """An engine's outputs of a pass, if a record can be made of them."""
    if not isinstance(table, dict) or set(table) not in ({"stopped"}, {"nll", "targets"}):
        raise TypeError("the engine's outputs must be `stopped` of the steps, or `nll` and `targets` of held-out rows")
    if "targets" in table and (not isinstance(table["targets"], int) or not isinstance(table["nll"], float | None)):
        raise TypeError("the engine's outputs must be a float or None, and an integer")
    return dict(table)


def merge(common: dict[str, Any], name: str, tables: list[dict[str, Any]]) -> dict[str, Any]:
    """A pass's outputs of all replicas."""
    if name == "train":
        stopped = [table["stopped"] for table in tables if table["stopped"]]
        merged: dict[str, Any] = {"stopped": min(stopped, key=lambda one: int(one["step"])) if stopped else None}
    else:
        parts = [table["nll"] for table in tables]
        known = None if None in parts else float(sum(parts))
        merged = {"nll": known, "targets": sum(table["targets"] for table in tables)}
    return {**common, "passes": {**common["passes"], name: merged}}


def score(found: dict[str, Any], name: str) -> dict[str, float]:
    """The mean loss of the held-out rows, of a pass that looked at them."""
    table = found.get("passes", {}).get(name, {})
    known = table.get("nll") is not None and table.get("targets")
    return {"loss": table["nll"] / table["targets"]} if known else {}


def agreement(found: dict[str, Any], one: str, other: str) -> float | None:
    return None


def breakdown(found: dict[str, Any], name: str) -> dict[str, float]:
    return {}


def tally(found: dict[str, Any], name: str) -> tuple[int, int, int, int]:
    """Steps are covered by samples, which the record has: nothing to count here."""
    return 0, 0, 0, 0
