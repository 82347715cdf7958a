"""Formulas of generation that tell prefill from decoding: MFU of the one, MBU of the other, and
their energy.

They are exact where an engine reports its steps. A step that only prefills, or only decodes, counts
in full; a mixed one counts in neither, neither its time nor its work. Without steps they follow
from the requests at concurrency 1, where a request is prefilled until its first token and decoded
after it; else they are unknown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import fsum
from typing import Literal

import numpy as np

from steelyard.data import prompt_batches
from steelyard.metrics import energy, rates
from steelyard.metrics.passes import (
    count_devices,
    find_headline_pass,
    find_rate_span,
    select_samples,
    select_windows,
    step_compute_s,
)
from steelyard.metrics.rates import make_missing_headline_result
from steelyard.metrics.request_window import (
    RequestWindow,
    find_record_window,
)
from steelyard.metrics.result import Result
from steelyard.plan import decode_bytes, flops
from steelyard.record.record import Record, Sample
from steelyard.record.request_samples import RequestTable
from steelyard.words import Message

Phase = Literal["prefill", "decode"]
PHASE_NAMES: dict[Phase, Message] = {
    "prefill": Message("phase.prefill"),
    "decode": Message("phase.decode"),
}
STEP_COUNTS = ("prefill_tokens", "sequences", "context_tokens")  # of an engine's own steps
# how long a stretch of one phase must last, in periods of the telemetry, for its energy to be known
MIN_STRETCH_PERIODS = 3.0


@dataclass(frozen=True)
class PhaseWork:
    """The work of one phase in a window: so many `flops` (prefill) or `size_bytes` (decoding; None:
    not known of this model) in `time_s` seconds; `code` is the text that says where it is from.
    """

    time_s: float
    flops: int = 0
    size_bytes: int | None = None
    code: str = ""


def _classify_step(sample: Sample) -> Phase | None:
    """Return the phase of a step of which all work belongs to it; None for a mixed one."""
    prefilled, sequences = (sample.counts.get(name, 0) for name in STEP_COUNTS[:2])
    if bool(prefilled) == bool(sequences):
        return None
    return "prefill" if prefilled else "decode"


def _list_window_steps(record: Record, window: RequestWindow) -> list[Sample]:
    """Return the engine's own steps that lie in the window, of the lowest rank that reports any;
    empty if it does not tell prefill from decoding by their counts.
    """
    pass_name = find_headline_pass(record)
    samples = select_samples(record, pass_name) if pass_name else []
    told = [item for item in samples if any(name in item.counts for name in STEP_COUNTS)]
    lowest = min((item.rank for item in told), default=0)
    return [
        item
        for item in told
        if item.rank == lowest and window.begin_s <= item.start_s and item.end_s <= window.end_s
    ]


def _sum_times(steps: Sequence[Sample]) -> float:
    """Return the seconds of steps: their compute time, or if it is not marked all of it."""
    known = [(step_compute_s(step), step.end_s - step.start_s) for step in steps]
    return fsum(whole if compute is None else compute for compute, whole in known)


def _find_work(record: Record, phase: Phase) -> PhaseWork | Message:
    """Return the work of a phase in the record's window, or why it is not known."""
    found = find_record_window(record)
    if found is None:
        return Message("metric.no_window")
    if record.case.division != "closed":
        return Message("metric.not_counted")
    steps = _list_window_steps(record, found[1])
    if steps:
        chosen = [step for step in steps if _classify_step(step) == phase]
        if not chosen:
            return Message("phase.mixed", {"phase": PHASE_NAMES[phase]})
        return STEP_WORK[phase](record, chosen)
    load = record.question.load
    if load is None or load.concurrency != 1:
        return Message("phase.unknown")
    return REQUEST_WORK[phase](record, *found)


def _measure_prefill_steps(record: Record, steps: list[Sample]) -> PhaseWork | Message:
    """Return the FLOPs and the time of steps that only prefill."""
    names = ("tokens", "logits", "pairs")
    if any(name not in step.counts for step in steps for name in names):
        return Message("metric.not_counted")
    totals = {name: sum(step.counts[name] for step in steps) for name in names}
    count = flops.count_causal_flops(record.question.model, totals)
    return PhaseWork(_sum_times(steps), flops=count, code="phase.steps")


def _measure_decode_steps(record: Record, steps: list[Sample]) -> PhaseWork | Message:
    """Return the bytes and the time of steps that only decode."""
    contexts = sum(step.counts.get("context_tokens", 0) for step in steps)
    question = record.question
    size = decode_bytes.count_decode_bytes(question.model, question.precision, len(steps), contexts)
    return PhaseWork(_sum_times(steps), size_bytes=size, code="phase.steps")


def _measure_prefill_requests(
    record: Record, table: RequestTable, window: RequestWindow
) -> PhaseWork | Message:
    """Return the FLOPs of the prompts of a window at concurrency 1, and the time from sending each
    to its first token; without requests whose first chunk has several tokens, of which all but one
    were decoded.
    """
    indices = window.indices[table.is_ok[window.indices]]
    indices = indices[table.chunk_tokens[table.chunk_starts[indices]] == 1]
    if not len(indices):
        return Message("phase.chunks")
    model = record.question.model
    lens = table.prompt_tokens[indices].tolist()
    counts = prompt_batches.count_batch(
        lens, lens, len(lens), window=getattr(model, "window", None)
    )
    time_s = float((table.first_s - table.sent_s)[indices].sum())
    count = flops.count_causal_flops(model, counts)
    return PhaseWork(time_s, flops=count, code="phase.requests")


def _measure_decode_requests(
    record: Record, table: RequestTable, window: RequestWindow
) -> PhaseWork | Message:
    """Return the bytes of the tokens after the first chunk of each request of a window at
    concurrency 1, one step each, and the time between the first and the last chunk; without
    requests whose tokens came in one chunk.
    """
    indices = window.indices[table.is_ok[window.indices]]
    indices = indices[np.diff(table.chunk_starts)[indices] >= 2]
    if not len(indices):
        return Message("phase.chunks")
    question = record.question
    first_tokens = table.chunk_tokens[table.chunk_starts[indices]]
    steps = table.output_tokens[indices] - first_tokens
    begins = table.prompt_tokens[indices] + first_tokens - 1
    seen: int | None = getattr(question.model, "window", None)
    contexts = _sum_contexts(begins + steps, seen) - _sum_contexts(begins, seen)
    size = decode_bytes.count_decode_bytes(
        question.model, question.precision, int(steps.sum()), contexts
    )
    time_s = float((table.last_s - table.first_s)[indices].sum())
    return PhaseWork(time_s, size_bytes=size, code="phase.requests")


def _sum_contexts(lengths: "np.ndarray[tuple[int], np.dtype[np.int64]]", seen: int | None) -> int:
    """Return the sum over rows of the keys that all their tokens see, `seen` at most each."""
    return sum(prompt_batches.count_causal_pairs(length, seen) for length in lengths.tolist())


STEP_WORK = {"prefill": _measure_prefill_steps, "decode": _measure_decode_steps}
REQUEST_WORK = {"prefill": _measure_prefill_requests, "decode": _measure_decode_requests}


def mfu_prefill(record: Record) -> Result:
    """Return the FLOPs of prefill (convention causal) over its time and the datasheet peak of all
    devices, a share; without a value if prefill cannot be told from decoding.
    """
    work, peak = _find_work(record, "prefill"), rates.datasheet_peak(record)
    if peak.value is None:
        return Result(None, peak.note)
    if isinstance(work, Message):
        return Result(None, work)
    if not work.time_s or not work.flops:
        return make_missing_headline_result(record)
    share = work.flops / work.time_s / (peak.value * count_devices(record))
    return Result(share, Message(work.code, {"convention": "causal", "time": work.time_s}))


def mbu(record: Record) -> Result:
    """Return the bytes that decoding must read (plan/decode_bytes.py) over its time and the
    datasheet bandwidth of all devices, a share; without a value if decoding cannot be told from
    prefill, or the model's weights or the bandwidth are not known.
    """
    work, row = _find_work(record, "decode"), record.environment.hardware.peak
    if row is None:
        return Result(None, Message("metric.no_peak"))
    if row.bandwidth_bytes_per_s is None:
        return Result(None, Message("metric.no_bandwidth", {"row": row.name}))
    if isinstance(work, Message):
        return Result(None, work)
    if work.size_bytes is None:
        family = record.question.model.family
        return Result(None, Message("metric.no_decode_bytes", {"family": family}))
    if not work.time_s or not work.size_bytes:
        return make_missing_headline_result(record)
    share = work.size_bytes / work.time_s / (row.bandwidth_bytes_per_s * count_devices(record))
    return Result(
        share, Message(work.code, {"convention": decode_bytes.CONVENTION, "time": work.time_s})
    )


def phase_energy(record: Record, phase: Phase) -> Result:
    """Return the joules of all devices for each token of a phase: prompt tokens of prefill, output
    tokens of decoding. Only stretches of steps of that phase alone count that are long enough for
    the telemetry to see; without a value if there are none.
    """
    found, pass_name = find_record_window(record), find_headline_pass(record)
    if found is None or pass_name is None or find_rate_span(record) is None:
        return make_missing_headline_result(record)
    steps = _list_window_steps(record, found[1])
    if not steps:
        return Result(None, Message("phase.unknown"))
    starts = {item.rank: item.start_s for item in select_windows(record, pass_name)}
    series = {rank: rates.find_series(record, rank) for rank in starts}
    if not series or None in series.values():
        return Result(None, Message("energy.no_device", {"rank": min(starts, default=0)}))
    least_s = MIN_STRETCH_PERIODS * max(item.period_s for item in series.values() if item)
    stretches = [
        stretch
        for kind, group in groupby(steps, _classify_step)
        if kind == phase and (stretch := list(group))[-1].end_s - stretch[0].start_s >= least_s
    ]
    if not stretches:
        return Result(None, Message("phase.short", {"phase": PHASE_NAMES[phase], "least": least_s}))
    devices = {(item.host, item.device): (item, starts[r]) for r, item in series.items() if item}
    parts = [
        energy.measure_device_energy(item, start + s[0].start_s, start + s[-1].end_s)
        for item, start in devices.values()
        for s in stretches
    ]
    unknown = next((part.why for part in parts if part.joules is None), None)
    name = "prefill_tokens" if phase == "prefill" else "sequences"
    tokens = sum(step.counts.get(name, 0) for stretch in stretches for step in stretch)
    if unknown is not None or not tokens:
        return Result(None, unknown or Message("energy.zero"))
    used = fsum(part.joules for part in parts if part.joules is not None)
    return Result(used / tokens, Message("phase.stretches", {"count": len(stretches)}))


energy_prefill_per_token = partial(phase_energy, phase="prefill")
energy_decode_per_token = partial(phase_energy, phase="decode")
