"""Parallel plans: how work is divided over devices, in degrees of tensor, pipeline and data
parallelism.
"""

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

from pydantic import Field

from steelyard.case.case import Case
from steelyard.case.question import Train
from steelyard.errors import RequestError
from steelyard.schema import FrozenModel

# Sizes of a model that each degree must divide: their name in messages, and the model's field.
DIVIDED_SIZES = {"tp": (("key groups", "kv_heads"), ("FFN columns", "ffn"))}
DEGREES_PATTERN = re.compile(r"(?=.)(?:TP\d{0,4})?(?:PP\d{0,4})?(?:DP\d{0,4})?", re.ASCII)
# Degrees that users of other programs write, and that no engine here has.
UNSUPPORTED_DEGREES = {
    "VP": "virtual pipeline stages (with them megatron-core's losses were wrong by 0.04)",
    "SP": (
        "a separate degree for sequence parallelism (megatron-core's needs Transformer Engine;"
        " engine torch's comes with TP)"
    ),
    "CP": "context parallelism",
    "EP": "expert parallelism",
}


MAX_DEVICES = 10**6
Degree = Annotated[int, Field(ge=1, le=MAX_DEVICES)]


class Plan(FrozenModel):
    """A parallel plan, stored in records: `nodes` hosts of `devices` devices each, and degrees
    `tp`, `pp` and `dp` of tensor, pipeline and data parallelism, whose product is the number of
    ranks (`world`). `launcher` is the name of what starts the processes, such as local. As text
    (`str`) it is TP2PP1DP4; `config` is nodes x devices, such as 1x8. `make_plan` checks that
    degrees, devices and case fit together; this class checks only that each number is from 1 to
    10^6.
    """

    nodes: Degree
    devices: Degree
    tp: Degree
    pp: Degree
    dp: Degree
    launcher: str

    @property
    def world(self) -> int:
        """Return the number of ranks of the plan, nodes x devices."""
        return self.nodes * self.devices

    @property
    def config(self) -> str:
        """Return nodes x devices of a node as text, as published pages write it: 1x8, 2x8."""
        return f"{self.nodes}x{self.devices}"

    def __str__(self) -> str:
        return f"TP{self.tp}PP{self.pp}DP{self.dp}"


@dataclass(frozen=True)
class RankPosition:
    """The position of a rank in a plan, each number from 0: `tp` in its tensor-parallel group, `pp`
    the pipeline stage, `dp` the replica. Made by `find_position`; engines get it as `Job.place`.
    """

    tp: int
    pp: int
    dp: int


def make_single_plan() -> Plan:
    """Return the plan of one device, on which a model is not divided."""
    return Plan(nodes=1, devices=1, tp=1, pp=1, dp=1, launcher="local")


def find_position(plan: Plan, rank: int) -> RankPosition:
    """Return the position of a rank in a plan: ranks of one tensor-parallel group are neighbours,
    then come pipeline stages, then replicas (rank = tp + TP · (pp + PP · dp)). Ranks beyond the
    world are not refused.
    """
    return RankPosition(rank % plan.tp, rank // plan.tp % plan.pp, rank // (plan.tp * plan.pp))


def make_plan(
    case: Case, nodes: int, devices: int, sample_size: int | None = None, launcher: str = "local"
) -> Plan:
    """Return the plan that `tune.parallel` asks for, over all nodes · devices. `sample_size` is how
    many rows or samples of a global batch the run computes; None: all. `launcher` is only stored.

    Raises RequestError if nodes or devices are below 1, the degrees are malformed or do not match
    the number of devices, or the model or batch cannot be divided so (`_check_model`,
    `_check_training`).
    """
    if nodes < 1 or devices < 1:
        raise RequestError(f"--nodes {nodes} --devices {devices}: both must be at least 1")
    tp, pp, dp = parse_degrees(case.tune.parallel, nodes * devices)
    _check_model(case, tp, pp)
    if dp > 1 and not case.question.kind_row.replicas:
        raise RequestError(
            f"DP{dp}: {case.name} is a {case.question.kind_row.noun} case, in which one model"
            " serves all requests; allowed: --parallel TP"
        )
    if case.question.train is not None:
        _check_training(case, case.question.train, sample_size, tp, pp, dp)
    return Plan(nodes=nodes, devices=devices, tp=tp, pp=pp, dp=dp, launcher=launcher)


def parse_degrees(text: str, world: int) -> tuple[int, int, int]:
    """Return (TP, PP, DP) of a text such as TP2PP4DP1, for `world` devices; a degree that is not
    named is 1. The one degree without a number, or else DP if it is not named, takes the devices
    that the others leave.

    Raises RequestError if the text is not of this form and order, names a parallelism that no
    engine has (VP, SP, CP, EP), leaves two degrees open or has a 0, or does not match the number of
    devices.
    """
    for name, explanation in UNSUPPORTED_DEGREES.items():
        if name in text:
            raise RequestError(
                f"--parallel {text!r}: no engine has {explanation}; allowed: TP, PP and DP"
            )
    if not DEGREES_PATTERN.fullmatch(text):
        raise RequestError(
            f"--parallel {text!r}: not degrees; give them as TP2, DP4, TP2DP4 or TP2PP4DP1, in this"
            " order"
        )
    named = dict(re.findall(r"(TP|PP|DP)(\d*)", text, re.ASCII))
    numbered = {name: int(number) for name, number in named.items() if number}
    unnumbered = [name for name, number in named.items() if not number] or [
        name for name in ("DP",) if name not in named
    ]
    if len(unnumbered) > 1 or any(number < 1 for number in numbered.values()):
        raise RequestError(
            f"--parallel {text!r}: only one degree may lack a number, and numbers are 1 or more, as"
            " in TP2DP4"
        )
    product = 1
    for number in numbered.values():
        product *= number
    if world % product or (not unnumbered and product != world):
        needed_text = f"{product} devices" if not unnumbered else f"a multiple of {product} devices"
        raise RequestError(
            f"--parallel {text!r} needs {needed_text}, and there are {world}; change --devices,"
            " --nodes or the degrees"
        )
    degree_by_name = (
        {"TP": 1, "PP": 1, "DP": 1} | numbered | dict.fromkeys(unnumbered, world // product)
    )
    return degree_by_name["TP"], degree_by_name["PP"], degree_by_name["DP"]


def _check_model(case: Case, tp: int, pp: int) -> None:
    """Raise RequestError if TP does not divide the model's key heads or FFN columns (where it has
    such fields), or PP is above 1 for a kind of work without a pipeline (scoring).
    """
    model = case.question.model
    sizes = {
        size_name: getattr(model, key)
        for size_name, key in DIVIDED_SIZES["tp"]
        if hasattr(model, key)
    }
    for size_name, size in sizes.items():
        if size % tp:
            allowed = [
                str(n)
                for n in range(1, model.kv_heads + 1)
                if not any(size % n for size in sizes.values())
            ]
            raise RequestError(
                f"TP{tp} does not divide the model's {size} {size_name}; allowed:"
                f" {', '.join(allowed)}"
            )
    if pp > 1 and not case.question.kind_row.pipeline:
        noun = case.question.kind_row.noun
        article = "an" if noun.startswith(("a", "e", "i", "o", "u")) else "a"
        raise RequestError(
            f"PP{pp}: {case.name} is {article} {noun} case, which has no pipeline; allowed: PP1"
        )


def _check_training(
    case: Case, train: Train, sample_size: int | None, tp: int, pp: int, dp: int
) -> None:
    """Raise RequestError if training cannot be divided so: TP must divide the tokens of a row, PP
    be at most the number of layers, and, where a batch counts rows, at most the number of
    micro-batches of a step; with `tune.sharding` its degree must divide DP; tied embeddings allow
    neither TP, PP nor sharding.
    """
    model, tune = case.question.model, case.tune
    if train.length % tp:
        raise RequestError(
            f"TP{tp} does not divide the {train.length} tokens of a row; change"
            " question.train.length or TP"
        )
    if pp > model.layers:
        raise RequestError(
            f"PP{pp}: the model has {model.layers} layers; allowed: PP1 to PP{model.layers}"
        )
    if model.tied and (tp * pp > 1 or tune.sharding):
        raise RequestError(
            "a model with tied embeddings cannot be divided; allowed: TP1PP1 and tune.sharding=0"
        )
    if tune.sharding and dp % get_shard_degree(case, dp):
        allowed = ", ".join(str(n) for n in range(1, dp + 1) if dp % n == 0)
        raise RequestError(
            f"tune.sharding_degree={tune.sharding_degree} does not divide DP{dp}; allowed:"
            f" {allowed}"
        )
    rows = train.batch if sample_size is None else sample_size
    accumulation = -(-rows // (dp * tune.micro_batch))
    if case.question.task_row.batch_unit == "rows" and accumulation < pp:
        raise RequestError(
            f"PP{pp} needs at least {pp} micro-batches a step, and {rows} rows over"
            f" DP{dp} in micro-batches of {tune.micro_batch} make {accumulation}; lower PP, DP or"
            " tune.micro_batch"
        )


def get_shard_degree(case: Case, dp: int) -> int:
    """Return how many replicas divide among them what `tune.sharding` says: `tune.sharding_degree`,
    else all `dp`; 1 if sharding is 0.
    """
    return (case.tune.sharding_degree or dp) if case.tune.sharding else 1


def divide_layers(layers: int, stages: int) -> list[range]:
    """Return the range of layers of each pipeline stage, from 0, in order and as even as possible.
    Layers left over go to inner stages first, then to the first, and last to the last stage, which
    has the logits.
    """
    sizes = [layers // stages] * stages
    order = [*range(1, stages - 1), 0, stages - 1]
    for i in order[: layers % stages]:
        sizes[i] += 1
    ends = accumulate(sizes)
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
