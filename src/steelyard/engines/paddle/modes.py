"""The parallel modes, recomputation and mixed precision that a run of engine `paddle` needs, and
refusals of those it cannot have. Imports no Paddle.

What has never been run by this project's tests is named in every record that uses it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from steelyard.case.precision import Precision
from steelyard.engine.job import Job
from steelyard.errors import RequestError
from steelyard.plan.degrees import get_shard_degree

# Run by this project's tests, on a CPU and in fp32, against engine torch (tests/engine_paddle). All
# else follows Paddle's documentation and was never run.
TRIED = ("cpu", "fp32", "single", "dp", "sharding 1", "recompute")


@dataclass(frozen=True)
class PaddleModes:
    """How a run's model is parallelized, made from a job by `choose_modes`: `tp` and `pp` are the
    degrees of tensor and pipeline parallelism. `shards` replicas divide among them what ZeRO level
    `sharding` says (1: optimizer states, 2: gradients too; 0 or one shard: nothing); there are
    `copies` of such groups, so that `dp` = copies x shards. `recompute`: whole layers are computed
    again in the backward pass. `is_data_parallel` says whether there are only whole replicas,
    `names` lists the modes in use.
    """

    tp: int
    pp: int
    copies: int
    shards: int
    sharding: int
    recompute: bool

    @property
    def dp(self) -> int:
        """Return the number of data-parallel replicas."""
        return self.copies * self.shards

    @property
    def is_data_parallel(self) -> bool:
        """Return whether there are several whole replicas and no other parallelism."""
        return self.tp == self.pp == self.shards == 1 and self.copies > 1

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the modes in use, as `never_run` and refusals name them, in this
        order: `tp`, `pp`, `sharding N`, `dp`, `copies of shards`, `recompute`; on one device
        `single` first. `dp` stands for several copies, also of sharded groups.
        """
        uses = {
            "tp": self.tp > 1,
            "pp": self.pp > 1,
            f"sharding {self.sharding}": self.shards > 1,
            "dp": self.copies > 1,
            "copies of shards": self.copies > 1 and self.shards > 1,
            "recompute": self.recompute,
        }
        parallel = [name for name, used in uses.items() if used]
        return tuple(parallel if self.tp * self.pp * self.dp > 1 else ["single", *parallel])


def choose_modes(job: Job) -> PaddleModes:
    """Return the modes of a run, from its tune and plan. Raises RequestError for sharding 3,
    selective recomputation, sharding 2 in a pipeline (if several replicas share), or a vocabulary
    that TP does not divide.
    """
    tune, plan, model = job.case.tune, job.plan, job.case.question.model
    if tune.sharding > 2:
        raise RequestError(
            f"tune.sharding={tune.sharding}: engine paddle divides states and gradients; allowed:"
            " 0, 1, 2"
        )
    if tune.recompute == "selective":
        raise RequestError(
            "tune.recompute=selective: engine paddle recomputes whole layers; allowed: none, full"
        )
    shards = get_shard_degree(job.case, plan.dp)
    if plan.pp > 1 and tune.sharding == 2 and shards > 1:
        raise RequestError(
            "tune.sharding=2: not in a pipeline of engine paddle; allowed there: 0, 1"
        )
    if model.vocab % plan.tp:
        raise RequestError(
            f"TP{plan.tp} does not divide the {model.vocab} tokens of the vocabulary, as engine"
            " paddle needs"
        )
    return PaddleModes(
        plan.tp, plan.pp, plan.dp // shards, shards, tune.sharding, tune.recompute == "full"
    )


def refuse_modes(modes: PaddleModes, lacks: Mapping[str, str]) -> None:
    """Raise RequestError for the first mode in use that this device does not have. `lacks` (of the
    device class) maps names of modes, as `PaddleModes.names` has them, to reasons.
    """
    for name in modes.names:
        if name in lacks:
            raise RequestError(
                f"engine paddle has no {name} on this device: {lacks[name]}; see docs/engines.md"
            )


def list_untried(modes: PaddleModes, device: str, precision: str) -> list[str]:
    """Return those of device type (`cpu`, `gpu`), precision and modes of a run that this project's
    tests have never run with Paddle (they are not in `TRIED`), in this order.
    """
    return [item for item in (device, precision, *modes.names) if item not in TRIED]


# Paddle's O2 casts the model's parameters to 16 bit, and with them their gradients; the optimizer
# keeps fp32 master weights and moments. Where it cannot (a CPU), it leaves all in fp32 and says
# nothing: so dtypes are checked (`check_dtypes`).
# Paddle's dtypes by the precision of matmuls
DTYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
FP32 = "float32"
SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def amp_level(precision: Precision) -> str | None:
    """Return Paddle's level of mixed precision: `O2`, or None if everything is fp32."""
    return None if DTYPES[precision.matmul] == FP32 else "O2"


def short_names(types: set[str]) -> str:
    """Return Paddle's dtype names as records have them, sorted, joined by a slash: `bf16/fp32`."""
    return "/".join(sorted(SHORT_NAMES.get(name, name) for name in types))


def check_dtypes(precision: Precision, seen: Mapping[str, set[str]]) -> None:
    """Raise RuntimeError if tensors have other dtypes than the precision prescribes: parameters,
    gradients and logits that of the matmuls, states fp32.

    `seen` maps `parameters`, `gradients`, `logits` or `states` (master weights and moments) to the
    set of Paddle's dtype names that were seen (`bfloat16`); kinds that do not exist yet are left
    out.
    """
    computed = DTYPES[precision.matmul]
    prescribed = {"parameters": computed, "gradients": computed, "logits": computed, "states": FP32}
    for name, types in seen.items():
        if types - {prescribed[name]}:
            raise RuntimeError(
                f"precision {precision.name}: {name} must be {prescribed[name]}, but Paddle made"
                " them"
                f" {', '.join(sorted(types))}"
            )
