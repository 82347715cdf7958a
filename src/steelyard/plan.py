"""Plans: how the work is laid over devices, and whether it can fit at all."""

import re
from dataclasses import dataclass

from steelyard import flops
from steelyard.case import Case
from steelyard.errors import RequestError
from steelyard.question import Model
from steelyard.record import Plan

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
GIB = 1 << 30

# What each degree of a kind of work may be, by what it must divide; a kind that has no pipeline has PP1 alone.
DIVIDES = {"tp": (("key groups", "kv_heads"), ("FFN columns", "ffn"))}
PIPELINE = {"score": False, "train": True}
WHOLE = ("transformers",)  # engines that hold a whole model on each device


@dataclass(frozen=True)
class Place:
    """Where a rank stands in a plan."""

    tp: int
    pp: int
    dp: int


def place(plan: Plan, rank: int) -> Place:
    """Ranks of one tensor-parallel team are neighbours, then come the stages of a pipeline, then the replicas."""
    return Place(rank % plan.tp, rank // plan.tp % plan.pp, rank // (plan.tp * plan.pp))


def make(case: Case, nodes: int, devices: int) -> Plan:
    """The plan that `tune.parallel` asks for, over all devices."""
    if nodes < 1 or devices < 1:
        raise RequestError(f"--nodes {nodes} --devices {devices}: both must be at least 1")
    tp, pp, dp = degrees(case.tune.parallel, nodes * devices)
    _check_model(case, tp, pp)
    return Plan(nodes=nodes, devices=devices, tp=tp, pp=pp, dp=dp, launcher="local")


def degrees(text: str, world: int) -> tuple[int, int, int]:
    """TP, PP and DP of a text such as TP2PP4DP1. The factor without a number, or else DP if it is not named, takes the
    devices that the others leave."""
    named = dict(re.findall(r"(TP|PP|DP)(\d*)", text))
    given = {name: int(number) for name, number in named.items() if number}
    free = [name for name, number in named.items() if not number] or [name for name in ("DP",) if name not in named]
    if len(free) > 1 or any(number < 1 for number in given.values()):
        raise RequestError(f"tune.parallel={text!r}: one factor may go without a number, others are 1 or more, as in TP2DP4")
    product = 1
    for number in given.values():
        product *= number
    if world % product or (not free and product != world):
        exactly = f"{product} devices" if not free else f"a multiple of {product} devices"
        raise RequestError(
            f"tune.parallel={text!r} takes {exactly} and there are {world}; change --devices, --nodes or the factors"
        )
    all_of = {"TP": 1, "PP": 1, "DP": 1} | given | dict.fromkeys(free, world // product)
    return all_of["TP"], all_of["PP"], all_of["DP"]


def able(engine: str, plan: Plan) -> bool:
    """Whether an engine can divide a model so."""
    return engine not in WHOLE or plan.tp == plan.pp == 1


def _check_model(case: Case, tp: int, pp: int) -> None:
    model = case.question.model
    sizes = {what: getattr(model, key) for what, key in DIVIDES["tp"]}
    for what, size in sizes.items():
        if size % tp:
            allowed = [str(n) for n in range(1, model.kv_heads + 1) if not any(size % n for size in sizes.values())]
            raise RequestError(f"TP{tp} does not divide the model's {size} {what}; allowed: {', '.join(allowed)}")
    if pp > 1 and not PIPELINE[case.question.kind]:
        raise RequestError(f"PP{pp}: {case.name} scores, and scoring has no pipeline; allowed: PP1")


def weights_bytes(model: Model, kept: str, tp: int) -> int:
    """Memory of one device's share of the weights."""
    return flops.parameters(model) * BYTES[kept] // tp


def check_fits(case: Case, plan: Plan, memory_bytes: int | None) -> None:
    """Refuse what cannot run: weights larger than a device. Unknown memory is not refused."""
    kept = case.question.precision.weights
    need = weights_bytes(case.question.model, kept, plan.tp)
    if memory_bytes is not None and need > memory_bytes:
        raise RequestError(
            f"the weights of {case.name} in {kept} take {need / GIB:.1f} GiB a device and one has "
            f"{memory_bytes / GIB:.1f} GiB; choose a 16-bit --precision, more devices with --parallel TP, or --size smoke"
        )
