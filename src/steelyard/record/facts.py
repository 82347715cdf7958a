"""The tables of a record that say on what a run was made: machine, software, weights, ranks,
readings.

They are open: an accelerator, a framework or a later version may add columns. What a formula reads
has its type here.
"""

from typing import Annotated, Any, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from steelyard import accelerators
from steelyard.schema import Frozen, Layout, OpenTable

# Bounds that no machine comes near, so that no formula overflows on a stranger's record.
Bytes = Annotated[int, Field(ge=0, le=10**18)]
Rate = Annotated[float, Field(gt=0, le=1e30)]
Side = Annotated[int, Field(ge=1, le=10**12)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]


class DeviceFacts(OpenTable):
    name: str
    uuid: str | None = None
    memory_bytes: Bytes | None = None


class PeakFacts(OpenTable):
    """A datasheet row, as it was when the record was made."""

    name: str
    flops_per_s: dict[str, Rate]
    bandwidth_bytes_per_s: float | None = None
    source: str
    note: str | None = None


class Hardware(OpenTable):
    machine: str | None = None
    cpu: str | None = None
    cpu_cores: int | None = None
    memory_bytes: Bytes | None = None
    accelerator: str | None = None
    devices: list[DeviceFacts]
    peak: PeakFacts | None = None


class Software(OpenTable):
    os: str | None = None
    kernel: str | None = None
    driver: str | None = None
    container: str | None = None
    python: str | None = None
    packages: dict[str, str] = Field(default_factory=dict)
    cuda: str | None = None
    cudnn: str | None = None
    variables: dict[str, str] = Field(default_factory=dict)
    nccl: str | None = None

    @property
    def libraries(self) -> dict[str, str | None]:
        """Versions of the accelerators' runtimes and libraries, None where no worker reported them."""
        return {
            name: getattr(self, name, None)
            for row in accelerators.table().values()
            for name in row.libraries
        }

    @property
    def collectives(self) -> dict[str, str | None]:
        """Versions of the accelerators' libraries for collectives, None where no worker reported
        them.
        """
        rows = accelerators.table().values()
        return {
            row.collectives: getattr(self, row.collectives, None)
            for row in rows
            if row.collectives is not None
        }


class SourceFacts(OpenTable):
    """This package's own revision."""

    version: str | None = None
    revision: str | None = None
    dirty: bool | None = None


class Environment(OpenTable):
    hardware: Hardware
    software: Software
    source: SourceFacts


class EngineDetails(OpenTable):
    """What an engine chose by itself: kernels, batches. An engine may state more than a formula
    reads.
    """

    attention: str | None = Field(None, description="the attention kernel")
    block: str | None = Field(
        None,
        description="`fused`: a layer keeps less for its backward pass than plain operations do",
    )
    exchanged: str | None = Field(
        None,
        description="`units`: replicas and tensor-parallel ranks hold one layer whole at a time",
    )
    exchange: str | None = Field(
        None, description="`inside`: ranks exchange within the compute phase of a step"
    )
    fp8: str | None = Field(
        None, description="how fp8 matmuls are made; begins with `emulated` where sums are of fp32"
    )
    micro_batches: int | None = Field(None, description="accumulated in a step")
    _order: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _keep_order(cls, told: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        made = validate(told)
        if isinstance(told, dict):
            made._order = tuple(told)
        return made

    @model_serializer(mode="wrap")
    def _as_told(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        table = dump(self)
        return {name: table[name] for name in self._order or self.model_fields_set}


class Weights(OpenTable):
    """Where weights came from: `random` with its seed, or a checkpoint's files and the hash of
    their headers.
    """

    source: str | None

    @property
    def trained(self) -> bool:
        return self.source not in (None, "random")


class DeviceState(OpenTable):
    """A device before a run, as its driver tells: what can make the same device another one. Null
    is what it does not tell. `invalidating` are those of the slowdown reasons that would make a run
    invalid."""

    device: str
    persistence: bool | None = None
    processes: int | None = None
    sm_clock_mhz: Number | None = None
    sm_clock_max_mhz: Number | None = None
    application_clock_mhz: Number | None = None
    application_clock_default_mhz: Number | None = None
    power_limit_w: Number | None = None
    power_default_w: Number | None = None
    ecc: bool | None = None
    mig: bool | None = None
    reasons: list[str] | None = None
    invalidating: list[str] | None = None
    temperature_c: Number | None = None
    slowdown_c: Number | None = None
    numa_node: int | None = None
    runtime: str | None = Field(
        None, description="newest version of the vendor's runtime that the driver serves"
    )


class HostState(OpenTable):
    """A host before a run. `cores` are online, `allowed` of them by affinity, `quota` by the
    control group.
    """

    load_1m: Number | None = None
    cores: int | None = None
    allowed: int | None = None
    quota: Number | None = None
    memory_bytes: Bytes | None = None
    available_bytes: Bytes | None = None
    swap_bytes: Bytes | None = None
    swap_used_bytes: Bytes | None = None
    governors: list[str] | None = None
    clock_source: str | None = None
    numa_nodes: int | None = None
    devices: list[DeviceState] = Field(default_factory=list)


class Load(OpenTable):
    """CPU time on a host, in seconds since the first reading, about one a second: `busy_s` of the
    cores that the run may use, by whomever; `own_s` of the run's own processes, `agent_s` of these
    its agent's; `group_s` of the control group whose quota holds, where there is one. `allowed`
    cores are offered by affinity, `quota` by the control group."""

    allowed: Annotated[int, Field(ge=1, le=10**6)]
    quota: Annotated[float, Field(gt=0, le=1e6)] | None = None
    t_s: list[Number]
    busy_s: list[Number]
    own_s: list[Number]
    agent_s: list[Number] = Field(default_factory=list)
    group_s: list[Number | None] = Field(default_factory=list)

    @model_validator(mode="after")
    def _same_length(self) -> Self:
        for name in ("busy_s", "own_s", "agent_s", "group_s"):
            if name in self.model_fields_set and len(getattr(self, name)) != len(self.t_s):
                raise ValueError(
                    f"{name} has not as many readings as t_s, which has {len(self.t_s)}"
                )
        return self

    @property
    def cores(self) -> float:
        """That the run may use at once."""
        return min(float(self.allowed), self.quota or float(self.allowed))


class HostFacts(OpenTable):
    """A host of a run. `clock_offset_s` is its monotonic clock less the parent's at the start of
    the run, as far as `clock_uncertainty_s` tells; `clock_drift` is what it gains in a second.
    Times in a record are all on the parent's."""

    name: str
    ranks: list[int]
    devices: list[DeviceFacts] = Field(default_factory=list)
    cpu: str | None = None
    cpu_cores: int | None = None
    memory_bytes: Bytes | None = None
    clock_offset_s: Number | None = None
    clock_uncertainty_s: Number | None = None
    clock_drift: Number | None = None
    state: HostState | None = Field(
        None, description="before any worker started; left out by older records"
    )
    load: Load | None = Field(
        None,
        description="CPU time while the run went on; left out where the host does not count it",
    )

    def on_the_parents_clock(self, t_s: float) -> float:
        """A time since the start of the run, as its own clock tells it."""
        return t_s * (1 - (self.clock_drift or 0.0))


class MatmulRate(Frozen):
    """A shape of the case's own matmuls, how many a batch has, and the rate at which it was timed."""

    name: str
    layout: Layout
    m: Side
    n: Side
    k: Side
    count: Side
    flops_per_s: Rate

    @property
    def flops(self) -> int:
        """Of all of them."""
        return 2 * self.m * self.n * self.k * self.count


class RankFacts(OpenTable):
    """What a record keeps of a rank beside its passes and samples."""

    rank: int
    host: str | None = None
    device: str | None = None
    status: str | None = None
    identity: dict[str, Any] | None = None
    threads: int | None = None
    matmul_flops_per_s: Rate | None = None
    matmul_flops_per_cpu_s: Rate | None = None
    matmul_cpu_rates: dict[str, list[Rate]] | None = Field(
        None,
        description=(
            "FLOP per second of CPU time in several short timings of the square matmul: `before`"
            " the first pass, `after` the last; of a device that works in CPU time, and left out by"
            " older records"
        ),
    )
    matmuls: list[MatmulRate] | None = None
    all_reduce_bytes_per_s: Rate | None = None
    in_use_bytes: dict[str, Bytes | None] | None = None
    budget: dict[str, Number] | None = None
    beside: dict[str, Number] | None = Field(
        None, description="time of work that ran beside parts of the budget"
    )
    compile_cache: dict[str, int] | None = Field(
        None,
        description=(
            "kernels and graphs that compilers found in their caches (hits) and had to make"
            " (misses)"
        ),
    )
    clocks: dict[str, Number] | None = Field(
        None, description="seconds that each clock counted from its start to its end"
    )


class Restart(OpenTable):
    """What a run goes on from."""

    record: str | None
    checkpoints: str | None = None
    step: int
    plan: str
    passed_over: list[str] = Field(default_factory=list)
    losses: list[Number | None]


class StepDown(OpenTable):
    """What a first attempt had chosen, and ran out of memory with; the run is the second, a size
    smaller.
    """

    tune: dict[str, int]
    error: str


class Columns(OpenTable):
    """Readings of a device, equally long lists; None is a reading that the device does not give."""

    t_s: list[Number]
    memory_bytes: list[Bytes | None] = Field(default_factory=list)
    energy_j: list[Number | None] = Field(default_factory=list)
    power_w: list[Number | None] = Field(default_factory=list)
    sm_clock_mhz: list[Number | None] = Field(default_factory=list)
    reasons: list[list[str] | None] = Field(default_factory=list)
    processes: list[int | None] = Field(default_factory=list)


class Series(OpenTable):
    """What was read off a device. `t_s` counts from the start of the run; `baseline_processes` are
    compute processes on the device before any worker started; `severity` says what each slowdown
    reason means, where the record says it."""

    device: str
    host: str | None = None
    period_s: Number
    baseline_processes: int | None = None
    severity: dict[str, str] | None = None
    columns: Columns

    @model_validator(mode="after")
    def _same_length(self) -> Self:
        rows = len(self.columns.t_s)
        for name, column in self.columns:
            if name in self.columns.model_fields_set and not (
                isinstance(column, list) and len(column) == rows
            ):
                raise ValueError(
                    f"column {name} is no list of as many readings as t_s, which has {rows}"
                )
        return self
