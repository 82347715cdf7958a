"""Models of those parts of a record that describe what a run was made on: machine, software,
weights, ranks, telemetry.

`run` fills them from what hosts and workers report; `metrics` and `report` read them from records.
Most accept additional keys, because an accelerator, a framework or a later version may add some;
every field that a formula reads has its type and bounds here.
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
from steelyard.schema import ExtensibleModel, FrozenModel, MatmulLayout

# Bounds far beyond any machine, so that no formula overflows on an untrusted record.
Bytes = Annotated[int, Field(ge=0, le=10**18)]
Rate = Annotated[float, Field(gt=0, le=1e30)]
MatmulDimension = Annotated[int, Field(ge=1, le=10**12)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]


class DeviceFacts(ExtensibleModel):
    """A device by its `name` as the driver reports it, its `uuid`, and its total memory in bytes;
    None where the driver does not tell.
    """

    name: str
    uuid: str | None = None
    memory_bytes: Bytes | None = None


class PeakFacts(ExtensibleModel):
    """The datasheet row of a device as it was when the record was made: its `name`, dense peak
    FLOP/s by precision (`flops_per_s`), memory bandwidth in bytes per second (None: unknown), the
    `source` of the numbers, and a `note` on them, if any.
    """

    name: str
    flops_per_s: dict[str, Rate]
    bandwidth_bytes_per_s: float | None = None
    source: str
    note: str | None = None


class Hardware(ExtensibleModel):
    """The hardware of a run: `machine` (model), `cpu`, `cpu_cores` and main memory of the first
    host, the `accelerator`'s name, the `devices` used on all hosts, and `peak`, the datasheet row
    of the devices (None if it is unknown or they differ). None is what is not known.
    """

    machine: str | None = None
    cpu: str | None = None
    cpu_cores: int | None = None
    memory_bytes: Bytes | None = None
    accelerator: str | None = None
    devices: list[DeviceFacts]
    peak: PeakFacts | None = None


class Software(ExtensibleModel):
    """The software of a run: `os`, `kernel`, `driver`, `container`, `python`, the versions of
    Python `packages` by name, of the runtime libraries (`cuda`, `cudnn`, `nccl`; other accelerators
    add keys), and the environment `variables` that a record keeps. None is what is not known.
    `libraries` and `collectives` return the versions that accelerators' rows list.
    """

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
        """Return the versions of the runtimes and libraries of a run, by the names that the rows of
        all known accelerators list; None for those that no worker reported.
        """
        return {
            name: getattr(self, name, None)
            for row in accelerators.load_accelerators().values()
            for name in row.libraries
        }

    @property
    def collectives(self) -> dict[str, str | None]:
        """Return the versions of the collective libraries of a run, such as nccl, by the names that
        the rows of all known accelerators list; None for those that no worker reported.
        """
        rows = accelerators.load_accelerators().values()
        return {
            row.collectives: getattr(self, row.collectives, None)
            for row in rows
            if row.collectives is not None
        }


class SourceFacts(ExtensibleModel):
    """The `version` of this package, its git `revision`, and whether files were changed since that
    revision (`dirty`); the last two are None where there is no repository.
    """

    version: str | None = None
    revision: str | None = None
    dirty: bool | None = None


class Environment(ExtensibleModel):
    """What a run was made on: `hardware`, `software`, and `source`, the version and git revision of
    this package.
    """

    hardware: Hardware
    software: Software
    source: SourceFacts


class EngineDetails(ExtensibleModel):
    """What an engine chose by itself: the attention kernel, fused blocks, how ranks exchange, how
    fp8 is computed, and the number of micro-batches; of a server, whether it was started here, and
    what its user declares of its devices. An engine may add keys that no formula reads.
    Serialized with the keys that were given, in the order they were given.
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
        None, description="how fp8 matmuls are computed; begins with `emulated` if they run in fp32"
    )
    micro_batches: int | None = Field(None, description="accumulated in a step")
    is_external: bool | None = Field(
        None, description="whether requests went to a server that was not started here"
    )
    device: str | None = Field(
        None, description="what the user says that such a server runs on, in their words"
    )
    devices: int | None = Field(
        None, ge=1, description="how many devices the user says that such a server runs on"
    )
    logprobs: bool | None = Field(
        None, description="whether a server was asked for its log-probabilities"
    )
    _key_order: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _keep_order(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate the details of an engine, and remember the order of the keys in the model's
        `_key_order` if the input is a dict.
        """
        details = validate(value)
        if isinstance(value, dict):
            details._key_order = tuple(value)
        return details

    @model_serializer(mode="wrap")
    def _serialize_set_fields(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize only the keys of the engine's details that were given, in the order of the dict
        they came from; in no certain order if it was no dict.
        """
        dumped = dump(self)
        return {name: dumped[name] for name in self._key_order or self.model_fields_set}


class WeightsFacts(ExtensibleModel):
    """Where the weights of a run came from: `source` is `random`, or the format of a checkpoint, or
    None if the run ended before; additional keys, such as the seed, or the files and the hash of
    their headers, are kept as the engine reported them. `is_trained`: neither random nor unknown.
    """

    source: str | None

    @property
    def is_trained(self) -> bool:
        """Return whether the weights come from a checkpoint: neither random nor unknown, as are
        those of a server that was not started here.
        """
        return self.source not in (None, "random", "unknown")


class DeviceState(ExtensibleModel):
    """A device before a run, as its driver reports it: settings that can make the same device
    faster or slower. None is what the driver does not report.

    `reasons` are the active slowdown reasons, `invalidating` those of them that would make a run
    invalid; `processes` counts compute processes on the device; `slowdown_c` is the temperature at
    which it slows down.
    """

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
        None, description="newest version of the vendor's runtime that the driver supports"
    )


class CoreBound(ExtensibleModel):
    """The most that one core of a host's CPU can compute: FLOPs a cycle by matmul precision, by its
    vector instructions (`vectors`, the kernel's flags), and `clock_hz`, which it does not exceed;
    `clock_from` says whether the clock is the host's own (`cpufreq`) or that of the fastest CPU
    (`any`). `count_flops_per_s` is the product.
    """

    flops_per_cycle: Annotated[dict[str, Rate], Field(min_length=1)]
    clock_hz: Rate
    vectors: list[str] = Field(default_factory=list)
    clock_from: str | None = None

    def get_flops_per_cycle(self, precision: str) -> float:
        """Return the FLOPs a cycle in a matmul precision; the most of any if it is not listed."""
        return self.flops_per_cycle.get(precision) or max(self.flops_per_cycle.values())

    def count_flops_per_s(self, precision: str) -> float:
        """Return the FLOP/s that one core does not exceed in a matmul precision."""
        return self.clock_hz * self.get_flops_per_cycle(precision)


class HostState(ExtensibleModel):
    """A host before a run, as its node agent reads it. `load_1m` is the load average of a minute;
    `cores` are online, `allowed` is how many CPU affinity allows, `quota` how many the control
    group allows (it may be a fraction; None: no limit). Memory and swap are in bytes; `governors`
    are the frequency governors of the cores, each once; `clock_source` is the kernel's;
    `core_bound` is what one core can compute at most; `devices` has the state of each device. None
    is what the host does not tell.
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
    core_bound: CoreBound | None = Field(
        None, description="what one core can compute at most; left out by older records"
    )
    devices: list[DeviceState] = Field(default_factory=list)


class CpuLoad(ExtensibleModel):
    """Cumulative CPU time on a host during a run, read about once a second; all lists are equally
    long.

    `t_s` is the time of each reading; the other lists are CPU seconds since the first reading:
    `busy_s` of all processes on the cores that the run may use, `own_s` of the run's own processes,
    `agent_s` of its node agent (part of `own_s`), `group_s` of the control group whose quota
    applies (None without one). `allowed` is the number of cores by CPU affinity, `quota` by the
    control group.
    """

    allowed: Annotated[int, Field(ge=1, le=10**6)]
    quota: Annotated[float, Field(gt=0, le=1e6)] | None = None
    t_s: list[Number]
    busy_s: list[Number]
    own_s: list[Number]
    agent_s: list[Number] = Field(default_factory=list)
    group_s: list[Number | None] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        """Raise ValueError if a list of CPU seconds that was given has not as many readings as
        `t_s`; lists left at their default are not checked.
        """
        for name in ("busy_s", "own_s", "agent_s", "group_s"):
            if name in self.model_fields_set and len(getattr(self, name)) != len(self.t_s):
                raise ValueError(f"{name} must have as many readings as t_s: {len(self.t_s)}")
        return self

    @property
    def cores(self) -> float:
        """Return how many cores of this host the run may use at once: the smaller of `allowed` and
        `quota`; `allowed` without a quota.
        """
        return min(float(self.allowed), self.quota or float(self.allowed))


class HostFacts(ExtensibleModel):
    """A host of a run: its `name`, `ranks`, `devices`, CPU, main memory, its `state` before the run
    and the CPU `load` during it (None where unknown).

    `clock_offset_s` is the host's monotonic clock minus the parent's at the start of the run, known
    to within `clock_uncertainty_s`; `clock_drift` is how many seconds the host's clock gains per
    second. All times in a record are on the parent's clock; `to_parent_clock` converts.
    """

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
    load: CpuLoad | None = Field(
        None,
        description="CPU time while the run went on; left out where the host does not count it",
    )

    def to_parent_clock(self, host_time_s: float) -> float:
        """Return `host_time_s`, seconds since the start of the run on this host's clock, as seconds
        on the parent's: corrected by the drift alone, the offset being removed already. A drift of
        None counts as 0.
        """
        return host_time_s * (1 - (self.clock_drift or 0.0))


class MatmulRate(FrozenModel):
    """One matmul shape of the case's model, timed on a rank: m × n × k in a memory `layout` (which
    operands are transposed), how many such matmuls one batch has (`count`), and the measured rate
    in FLOP/s. `flops` are those of all `count` together.
    """

    name: str
    layout: MatmulLayout
    m: MatmulDimension
    n: MatmulDimension
    k: MatmulDimension
    count: MatmulDimension
    flops_per_s: Rate

    @property
    def flops(self) -> int:
        """Return the FLOPs of all `count` matmuls together."""
        return 2 * self.m * self.n * self.k * self.count


class CalibrationFacts(ExtensibleModel):
    """Where the rates of a rank's device were measured. `matmuls`: `process`, a process of its own
    that loads no engine, or `third_party`, the same with a framework or a device class of another
    package. `collectives`: `worker`, the rank's own process, because ranks must be joined for it;
    None if none was timed. `problems` says by stage (`before` the first pass, `after` the last) why
    matmuls have no rate.
    """

    matmuls: str
    collectives: str | None = None
    problems: dict[str, str] = Field(default_factory=dict)


class RankFacts(ExtensibleModel):
    """What a record keeps of a rank besides its passes and samples; None where it was not measured.

    `device` is its name, such as cuda:0, `status` how the rank ended; `identity` the device's name,
    UUID, memory and the like, as the framework reports them; `threads` those of the framework;
    `matmul_flops_per_s` the measured rate of a large square matmul (`..._per_cpu_s`: per second of
    CPU time; `..._after`: after the last pass), `matmuls` the rates of the case's own shapes,
    `all_reduce_bytes_per_s` the rate of a small all-reduce, `calibration` where these were
    measured; `in_use_bytes` device memory in use after each pass, by pass. `budget` is wall
    seconds by named part of the rank's work, `beside` seconds of work in parallel with it, `clocks`
    the seconds that passed on each of the host's clocks.
    """

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
    matmul_flops_per_s_after: Rate | None = Field(
        None,
        description=(
            "rate of the square matmul after the last pass; of a device that is not the host's own"
            " CPU, and left out by older records"
        ),
    )
    matmuls: list[MatmulRate] | None = None
    all_reduce_bytes_per_s: Rate | None = None
    calibration: CalibrationFacts | None = Field(
        None, description="where the rates were measured; left out by older records"
    )
    in_use_bytes: dict[str, Bytes | None] | None = None
    budget: dict[str, Number] | None = None
    beside: dict[str, Number] | None = Field(
        None, description="time of work that ran in parallel with parts of the budget"
    )
    compile_cache: dict[str, int] | None = Field(
        None,
        description=(
            "kernels and graphs that compilers took from their caches (hits) or compiled (misses)"
        ),
    )
    clocks: dict[str, Number] | None = Field(
        None, description="seconds that each clock counted from its start to its end"
    )


class Restart(ExtensibleModel):
    """From where a resumed run continued: `record`, the id of the earlier record (None: its
    checkpoints were named by folder); `checkpoints`, their folder, relative to the new record;
    `step` and `plan` of the checkpoint; `passed_over`, names of later checkpoints that are damaged;
    and the `losses` of all steps up to it.
    """

    record: str | None
    checkpoints: str | None = None
    step: int
    plan: str
    passed_over: list[str] = Field(default_factory=list)
    losses: list[Number | None]


class StepDown(ExtensibleModel):
    """A first attempt of a run that ran out of memory: `tune`, the sizes that `auto` had chosen, by
    name, and the `error` as text. The run itself is the second attempt, with the next smaller
    sizes.
    """

    tune: dict[str, int]
    error: str


class TelemetryColumns(ExtensibleModel):
    """Telemetry readings of a device as equally long lists, one item per reading; None where the
    device gave no value, an empty list for a column that it does not have. `t_s` is the time of
    each reading in seconds since the start of the run; `memory_bytes` is in use; `energy_j` a
    running total; `reasons` are the names of the slowdown reasons active then; `processes` counts
    compute processes on the device. Further columns are kept.
    """

    t_s: list[Number]
    memory_bytes: list[Bytes | None] = Field(default_factory=list)
    energy_j: list[Number | None] = Field(default_factory=list)
    power_w: list[Number | None] = Field(default_factory=list)
    sm_clock_mhz: list[Number | None] = Field(default_factory=list)
    reasons: list[list[str] | None] = Field(default_factory=list)
    processes: list[int | None] = Field(default_factory=list)


class TelemetrySeries(ExtensibleModel):
    """The telemetry of one `device` (such as cuda:0) of a `host` during a run: `columns` of
    readings, whose `t_s` counts from the start of the run; `period_s` is the interval between
    readings.

    `baseline_processes` is the number of compute processes on the device before any worker started;
    `severity` says for each slowdown reason what it means for a run (nothing, note or invalidates).
    Both are None in records without them.
    """

    device: str
    host: str | None = None
    period_s: Number
    baseline_processes: int | None = None
    severity: dict[str, str] | None = None
    columns: TelemetryColumns

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        """Raise ValueError if a telemetry column that was given, known or not, is not a list with
        as many readings as `t_s`; columns left at their default are not checked.
        """
        rows = len(self.columns.t_s)
        for name, column in self.columns:
            if name in self.columns.model_fields_set and not (
                isinstance(column, list) and len(column) == rows
            ):
                raise ValueError(f"column {name} must be a list of as many readings as t_s: {rows}")
        return self
