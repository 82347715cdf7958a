"""The spec record as a pydantic model, and functions that seal, write, read and check its file: the
ceilings of a machine.

`steelyard spec` measures what a machine can do at most: matmuls, memory, copies, attention,
collectives. `benches` are the raw timings of each rank. `ceilings` are derived from them, from
telemetry and from the datasheet; `steelyard verify` derives them again. run/ceilings_parent.py
writes it, report reads it.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from steelyard import words
from steelyard.errors import RequestError
from steelyard.plan.ceiling_shapes import CeilingGroup, CeilingUnit
from steelyard.record import record_file
from steelyard.record.record import FailureFacts, Reason, Seconds
from steelyard.record.run_facts import Environment, Number, RankFacts, TelemetrySeries
from steelyard.schema import FrozenModel, GrownModel
from steelyard.words import Message

WorkAmount = Annotated[float, Field(ge=1, le=1e30)]
CallCount = Annotated[int, Field(ge=1, le=10**12)]
Text = Annotated[str, Field(max_length=1000)]
RAW_KEY = "benches"  # the key of the raw measurements


class TimedCalls(FrozenModel):
    """One stretch of a benchmark of `spec`: `calls` calls that were timed together by one pair of
    device events, in `time_s` seconds in all (not per call). `start_s` is when it began, in seconds
    since the start of the command on the host's clock. Made by run/ceilings_worker.py.
    """

    start_s: Seconds
    time_s: Annotated[float, Field(ge=0, le=1e9)]
    calls: CallCount


class ErrorCheck(FrozenModel):
    """The error of a benchmark's result against fp64: `error` is the largest difference divided by
    the root mean square of the exact result, None if the result has a number that is not finite;
    `bound` is the largest error that is allowed. `is_within_bound` says whether it is kept.
    """

    error: Number | None
    bound: Number

    @property
    def is_within_bound(self) -> bool:
        """Return whether the error is finite and within the bound."""
        return self.error is not None and 0 <= self.error <= self.bound


class BenchTimings(GrownModel):
    """The raw timings of one benchmark of `spec` on one rank, as run/ceilings_worker.py measures
    them: `stretches` of calls, empty if it was not timed; then `reason` says why, or `checked`, the
    error of its result, is beyond its bound.

    `reason` is a message; a sentence in older records and if a plug-in gave one. If an exception
    was the cause, `error_text` quotes its first line, without paths and addresses.

    `group` is what is measured (such as matmul), `name` the benchmark in it, `precision` None where
    it has none. `amount` is the FLOPs or bytes of one call; for unit `B` it is the bytes of memory
    that could be allocated, and nothing is timed. `detail` has its sizes and kernel.
    """

    group: CeilingGroup
    name: Annotated[str, Field(max_length=200)]
    precision: Annotated[str, Field(max_length=32)] | None
    rank: Annotated[int, Field(ge=0, le=10**6)]
    unit: CeilingUnit
    detail: dict[str, int | Text]
    amount: WorkAmount | None = None
    checked: ErrorCheck | None = None
    stretches: list[TimedCalls] = Field(default_factory=list)
    reason: Text | Message | None = None
    error_text: Text | None = Field(
        None, description="of an exception; left out where there was none, and by older records"
    )

    LATER: ClassVar[tuple[str, ...]] = ("error_text",)


class Ceiling(FrozenModel):
    """The highest rate or size that one benchmark reached: `value` in the benchmark's unit, with
    its `interval` (low, high); None has its reason in `note`. Derived by metrics/ceiling_rates.py.

    `steady` is whether the last stretches agree; `sm_clock_mhz` and `power_w` are means of the
    device's telemetry meanwhile; `peak` is the datasheet's rate and `share` is `value` divided by
    it. These, and `interval`, are None where unknown and for a size in bytes.
    """

    value: float | None
    interval: tuple[float, float] | None = None
    steady: bool | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    peak: float | None = Field(None, description="the datasheet's rate of this")
    share: float | None = Field(None, description="of that")
    note: str | Message | None = None


class BenchLimits(FrozenModel):
    """When a benchmark of `spec` ends, in seconds: it is timed in stretches of `stretch_s` until
    the last `last` of them agree to `within` (a fraction), or `limit_s` is over. No benchmark
    begins after `total_s`, counted from the first.
    """

    stretch_s: Seconds
    limit_s: Seconds
    total_s: Seconds
    within: float = Field(ge=0, le=1)
    last: int = Field(ge=2, le=1000)


class SpecRecord(FrozenModel):
    """The file that `steelyard spec` writes on what a machine can do at most, made by
    run/ceilings_parent.py: raw timings `benches` of all ranks, and `ceilings`, of which
    `ceilings[i]` is derived from `benches[i]`.

    `status` is `valid`, or `failed` with `reasons` and `failure`; `created` an ISO 8601 time;
    `quick` whether the shorter limits were used; `limits` when a benchmark ends; `devices` the
    number of devices; `budget` wall seconds by named part; `ranks` facts on each rank; `telemetry`
    one series per device; `hashes` are set by `seal_spec_record`.
    """

    schema_version: int = Field(record_file.SCHEMA_VERSION, alias="schema")
    kind: Literal["spec"] = "spec"
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]
    created: Annotated[str, Field(pattern=r"^[0-9T:.+Z-]{10,40}$")]
    status: Literal["valid", "failed"]
    reasons: list[Reason]
    quick: bool
    limits: BenchLimits
    devices: Annotated[int, Field(ge=1, le=10**6)]
    environment: Environment
    budget: dict[str, Seconds]
    ranks: list[RankFacts]
    benches: list[BenchTimings]
    telemetry: list[TelemetrySeries]
    ceilings: list[Ceiling]
    failure: FailureFacts | None = None
    hashes: dict[str, str] = Field(default_factory=dict)


def spec_record_to_json(record: SpecRecord) -> dict[str, Any]:
    """Return a spec record as a dict of JSON data as its file holds it, keys in the order of the
    fields.
    """
    return record.model_dump(mode="json", by_alias=True)


def spec_record_to_english_json(record: SpecRecord) -> dict[str, Any]:
    """Return a spec record as the JSON data that `--json` prints: with English sentences instead of
    messages in the reasons of its benchmarks and the notes of its ceilings.
    """
    return spec_record_to_json(render_spec_record_in_english(record))


def render_spec_record_in_english(record: SpecRecord) -> SpecRecord:
    """Return a copy of a spec record with an English sentence in the place of each reason of a
    benchmark and each note of a ceiling; those that are None stay, and nothing else is changed. Its
    hashes then no longer fit.
    """
    benches = [
        bench.model_copy(update={"reason": words.render_in_english(bench.reason)})
        for bench in record.benches
    ]
    ceilings = [
        ceiling.model_copy(update={"note": words.render_in_english(ceiling.note)})
        for ceiling in record.ceilings
    ]
    return record.model_copy(update={"benches": benches, "ceilings": ceilings})


def seal_spec_record(record: SpecRecord) -> SpecRecord:
    """Return a copy of a spec record with its three hashes computed anew: `samples` (of `benches`),
    `record` and `bytes` (`compute_hashes`).
    """
    return record.model_copy(
        update={"hashes": record_file.compute_hashes(spec_record_to_json(record), RAW_KEY)}
    )


def write_spec_record(record: SpecRecord, folder: Path) -> Path:
    """Write a spec record to a new file in a folder, TIME-spec-ACCELERATOR-ID.json with 8
    characters of its id, and return its path. Hashes must be set before (`seal_spec_record`). Raise
    LostError if the file exists already or cannot be written.
    """
    accelerator = record.environment.hardware.accelerator or "unknown"
    name = record_file.join_file_name(record.created, "spec", accelerator, record.id[:8])
    return record_file.write_record_file(spec_record_to_json(record), folder / f"{name}.json")


def read_spec_record(path: Path) -> SpecRecord:
    """Read and validate a spec record file, and return it. Raise RequestError with one line if the
    file cannot be read, is not a spec record, or has not as many ceilings as benchmarks; hashes are
    not checked.
    """
    record = record_file.read_record_file(path, SpecRecord, "spec record")
    if len(record.ceilings) != len(record.benches):
        raise RequestError(
            f"{path}: not a spec record: {len(record.benches)} benches and {len(record.ceilings)}"
            " ceilings"
        )
    return record


def find_spec_record_damage(path: Path) -> list[str]:
    """Compare a spec record's file with what was written, and return a sentence for each
    difference, an empty list if there is none: bytes or order of keys that are not the canonical
    ones, a hash that does not match or is missing, or an unknown hash. Raise RequestError if the
    file cannot be read or parsed.
    """
    return record_file.find_file_damage(path, SpecRecord, RAW_KEY)


def make_spec_record_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a spec record as a dict, with docstrings as
    descriptions.
    """
    return record_file.make_json_schema(SpecRecord, "Steelyard spec record")
