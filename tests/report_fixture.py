"""Made-up records for the tests of report. No number here was measured: they only have to look like runs."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from steelyard import assemble
from steelyard import case as cases
from steelyard.precision import TRAIN
from steelyard.record import Record
from steelyard.tasks import TASKS

METRICS: dict[str, tuple[float | None, str, tuple[float, float] | None, str | None]] = {
    "e2e_time": (412.6, "s", None, None),
    "p_val_whole": (38120.4, "tokens/s", (37990.0, 38251.0), None),
    "p_val_core": (38644.9, "tokens/s", None, None),
    "p_infer_whole": (45902.7, "tokens/s", (45810.2, 45995.1), None),
    "p_infer_core": (46387.2, "tokens/s", (46301.8, 46472.6), None),
    "tokens_per_device_s": (45902.7, "tokens/s", None, None),
    "samples_per_s": (59.38, "samples/s", None, None),
    "mfu": (0.6206, "fraction", None, "causal"),
    "mfu_core": (0.6271, "fraction", None, None),
    "mfu_achievable": (0.8123, "fraction", None, None),
    "mfu_palm": (0.6634, "fraction", None, None),
    "mfu_nominal": (0.6495, "fraction", None, None),
    "flops_causal": (1.4529e17, "FLOP", None, None),
    "mem": (31.26, "GiB", None, None),
    "mem_total": (139.81, "GiB", None, None),
    "energy": (158230.0, "J", None, None),
    "energy_per_token": (0.014577, "J/token", None, None),
    "acc": (0.4583, "fraction", (0.4501, 0.4665), None),
    "acc_val": (0.4581, "fraction", None, None),
    "acc_se": (0.00421, "fraction", None, None),
    "agreement": (0.99964, "fraction", None, None),
    "harness_overhead": (None, "fraction", None, "the bare pass was not run"),
    "novel_metric": (12.5, "widgets", None, None),
}
UNITS_OPEN = {"p_val_whole", "p_val_core", "p_infer_whole", "p_infer_core"}

ENVIRONMENT: dict[str, Any] = {
    "hardware": {
        "machine": None,
        "cpu": "AMD EPYC 9454 48-Core Processor",
        "cpu_cores": 16,
        "memory_bytes": 137438953472,
        "accelerator": "cuda",
        "devices": [{"name": "NVIDIA H200", "uuid": "GPU-0", "memory_bytes": 150119120896}],
        "peak": {"name": "NVIDIA H200 SXM 141GB", "flops_per_s": {"tf32": 494.7e12, "bf16": 989.4e12}, "source": "datasheet"},
    },
    "software": {
        "os": "Ubuntu 24.04",
        "kernel": "6.8.0",
        "driver": "570.86",
        "container": None,
        "python": "3.11.7",
        "packages": {"torch": "2.11.0", "triton": "3.6.0"},
        "cuda": "12.8",
        "cudnn": "9.10",
    },
    "source": {"version": "0.1.0", "revision": "abc1234", "dirty": True},
}


def samples(tokens: int = 32768, count: int = 40) -> list[dict[str, Any]]:
    out, at = [], 0.0
    for step in range(count):
        end = at + 0.706 + 0.02 * math.sin(step)
        out.append(
            {"pass": "infer", "rank": 0, "step": step, "start_s": at, "end_s": end, "host_start_s": at, "host_end_s": end}
            | {"phases": {"compute": end - at}, "counts": {"tokens": tokens, "samples": 42}}
        )
        at = end
    return out


def _telemetry(count: int = 120) -> list[dict[str, Any]]:
    power = [None if t == 50 else 120.0 + 560 * (t > 8) + 12 * math.sin(t) for t in range(count)]
    clock = [1980 - 220 * (t > 8) + 15 * math.cos(t) for t in range(count)]
    return [
        {
            "device": "GPU-0",
            "period_s": 0.5,
            "columns": {"t_s": [t / 2 for t in range(count)], "power_w": power, "sm_clock_mhz": clock},
        }
    ]


def make(**changes: Any) -> Record:
    """A valid full run; dotted names with two underscores change parts of it: case__precision="fp16"."""
    resolved = cases.resolve("llama2-7b-mmlu")
    asked = resolved.case
    table: dict[str, Any] = {
        "id": "0f3c9a7e5b21",
        "created": "2026-01-02T03:04:05.678+00:00",
        "status": "valid",
        "reasons": [],
        "notes": ["at the power limit for 96 % of the pass"],
        "case": {"name": asked.name, "key": "4be1c0ffee123456", "size": "full", "division": "closed", "precision": "bf16"}
        | {"question": asked.question.model_dump(mode="json"), "gate": None, "max_interval": 0.05}
        | {"reference": [row.model_dump(mode="json") for row in asked.reference], "origins": resolved.origins},
        "scope": {"kind": "full"},
        "tune": asked.tune.model_dump(mode="json"),
        "plan": {"nodes": 1, "devices": 1, "tp": 1, "pp": 1, "dp": 1, "launcher": "local"},
        "engine": {"name": "torch", "details": {"attention": "flash", "compile": "inductor"}},
        "environment": ENVIRONMENT,
        "site": {"network": "InfiniBand, 200Gb/s"},
        "weights": {"source": "Llama-2-7b-hf", "sha256": "9f" * 32},
        "data": {"source": "MMLU data.tar", "rows": 14042, "subjects": 57, "tokens": 10854627, "shortened": 524}
        | {"fingerprint": "c0de" * 16, "tokenizer": {"kind": "sentencepiece", "sha256": "ab" * 32}},
        "passes": [],
        "budget": {"import": 9.1, "load": 14.2, "compile": 31.7, "val": 284.75, "infer": 70.35, "harness": 2.5},
        "ranks": [],
        "samples": samples(),
        "telemetry": _telemetry(),
        "outputs": {},
        "checks": [{"name": "coverage", "ok": True, "detail": "steps cover 99.8 % of the window"}],
        "quality": {
            "metric": "acc",
            "value": 0.4583,
            "gate": {"target": 0.458, "within": 0.01},
            "evaluated": True,
            "note": None,
        },
        "metrics": {n: {"value": v, "unit": u, "interval": i, "note": t} for n, (v, u, i, t) in METRICS.items()},
        "hashes": {"record": "ee" * 32},
    }
    for key, value in changes.items():
        node = table
        *parents, leaf = key.split("__")
        for parent in parents:
            node[parent] = dict(node[parent])  # some are shared with other records
            node = node[parent]
        node[leaf] = value
    return Record.model_validate(table)


def open_window() -> Record:
    units = {n: {"value": v, "unit": "questions/s" if n in UNITS_OPEN else u} for n, (v, u, _, _) in METRICS.items()}
    units |= {
        "p_infer_core": {"value": 371.94, "unit": "questions/s"},
        "mfu": {"value": None, "unit": "fraction", "note": "no peak"},
    }
    quality = {"metric": "acc", "value": 0.2514, "gate": None, "evaluated": False, "note": "weights are random"}
    return make(id="1a" * 6, case__division="open", scope={"kind": "window", "sample": 1404}, metrics=units, quality=quality)


def invalid() -> Record:
    reasons = [{"code": "quality", "text": "acc 0.4321 misses its gate 0.458 within 0.01"}]
    checks = [{"name": "gate", "ok": False, "detail": "0.4321 is not within 0.01 of 0.458"}]
    return make(id="2b" * 6, status="invalid", case__precision="fp16", reasons=reasons, checks=checks)


def failed() -> Record:
    tail = 'Traceback (most recent call last):\n  File "worker.py", line 7\nOutOfMemoryError: \x1b[31mCUDA out of memory\x1b[0m'
    failure = {"rank": 0, "exit_code": 1, "error": "OutOfMemoryError", "stderr_tail": tail}
    reasons = [{"code": "oom", "text": "rank 0 ran out of device memory"}]
    empty: dict[str, Any] = {"samples": [], "telemetry": [], "metrics": {}, "checks": []}
    quality = {"metric": "acc", "value": None, "gate": None, "evaluated": False, "note": "the run failed"}
    return make(
        id="3c" * 6, status="failed", case__precision="fp32", reasons=reasons, failure=failure, quality=quality, **empty
    )


def everything() -> list[Record]:
    return [make(), open_window(), invalid(), failed()]


GIB = 1 << 30
COUNTS = {"tokens": 100, "samples": 2, "padded": 0, "logits": 90, "pairs": 2525, "square": 5000}
BEGUN = 20.0  # when the train pass begins, from the start of the run


def rank_samples(
    rank: int, times: Sequence[float], losses: Sequence[float | None], aside: dict[int, tuple[str, float]]
) -> list[dict[str, Any]]:
    """Steps of one rank, a tenth of each waiting for data and eight computing. `aside` holds what comes after a step."""
    out: list[dict[str, Any]] = []
    at = 0.0

    def add(time_s: float, phases: dict[str, float], counts: dict[str, int], values: dict[str, float | None]) -> None:
        nonlocal at
        row = {"pass": "train", "rank": rank, "step": len(out), "start_s": at, "end_s": at + time_s, "host_start_s": at}
        out.append(row | {"host_end_s": at + time_s, "phases": phases, "counts": counts, "values": values})
        at += time_s

    for step, (time_s, loss) in enumerate(zip(times, losses, strict=True)):
        values = {"loss": loss, "grad_norm": 1.0 + step, "lr": 3e-4}
        add(time_s, {"data": time_s / 8, "compute": time_s * 3 / 4}, COUNTS, values)
        if step in aside:
            phase, spent_s = aside[step]
            add(spent_s, {phase: spent_s}, {}, {})
    return out


def _device(rank: int) -> dict[str, Any]:
    """100 W, and a GiB more a stage sooner."""
    t_s = [float(t) for t in range(200)]
    columns = {"t_s": t_s, "energy_j": [100 * t for t in t_s], "memory_bytes": [(40 - rank) * GIB] * 200}
    return {"device": f"cuda:{rank}", "period_s": 1.0, "baseline_processes": 0, "columns": columns}


def question(task: str = "openwebtext", steps: int = 4, **train: Any) -> dict[str, Any]:
    """Two layers of round numbers, rows of 50 tokens."""
    model = {"family": "llama", "layers": 2, "hidden": 8, "heads": 2, "kv_heads": 2, "ffn": 16, "vocab": 32, "positions": 64}
    table = {"length": 50, "batch": 4, "steps": steps, "lr": 3e-4, "min_lr": 3e-5, "schedule": "cosine", "warmup_steps": 2}
    table |= {"decay_steps": 100, "eps": 1e-6, "weight_decay": 0.1, "clip": 1.0}
    asked = {"kind": "train", "task": task, "model": model | {"nominal_parameters": 1000}, "train": table | train}
    asked |= {"data": {"kind": task, "held_out": 4}, "precision": TRAIN["bf16"].model_dump(mode="json")}
    return cases.Question.model_validate(asked).model_dump(mode="json")


@contextmanager
def nouns() -> Iterator[None]:
    """Tasks of training whose items are called rows, whatever the package calls them."""
    row = replace(TASKS["mmlu"], noun="row")
    with patch.dict(TASKS, {"openwebtext": row, "alpaca": row}):
        yield


def training(
    times: Sequence[Sequence[float]] = ((2.0, 1.0, 1.0, 1.0),),
    losses: Sequence[float | None] | None = None,
    plan: tuple[int, int, int] | None = None,
    aside: dict[int, tuple[str, float]] | None = None,
    **changes: Any,
) -> Record:
    """A sealed record of training, derived from the times of every rank's steps."""
    world, steps = len(times), len(times[0])
    tp, pp, dp = plan or (1, 1, world)
    losses = losses or [9.0 - step for step in range(steps)]
    samples = [rank_samples(rank, own, losses, aside or {}) for rank, own in enumerate(times)]
    window = {"pass": "train", "start_s": BEGUN, "allocated_bytes": 3 * GIB, "reserved_bytes": 4 * GIB}
    passes = [window | {"rank": rank, "wall_s": own[-1]["end_s"]} for rank, own in enumerate(samples)]
    hardware = ENVIRONMENT["hardware"] | {"peak": {"name": "chip", "flops_per_s": {"bf16": 1e6}, "source": "datasheet"}}
    ranks = [{"rank": rank, "device": f"cuda:{rank}", "matmul_flops_per_s": 5e5} for rank in range(world)]
    held_out = {"before": {"nll": 360.0, "targets": 40}, "after": {"nll": 240.0, "targets": 40}, "train": {"stopped": None}}
    base = {
        "case__name": "llama1-7b-openwebtext",
        "case__question": question(steps=steps),
        "case__gate": {"metric": "loss_after", "below": "loss_before", "target": None},
        "case__reference": [],
        "case__origins": {"tune.sharding": "case"},
        "tune": cases.Tune(sharding=1).model_dump(mode="json"),
        "plan": {"nodes": 1, "devices": world, "tp": tp, "pp": pp, "dp": dp, "launcher": "local"},
        "environment__hardware": hardware,
        "weights": {"source": "random"},
        "data": {"source": "made", "rows": 100, "fingerprint": "f" * 64, "published": True},
        "passes": passes,
        "ranks": ranks,
        "samples": [one for own in samples for one in own],
        "telemetry": [_device(rank) for rank in range(world)],
        "outputs": {"held_out": 4, "passes": held_out},
        "metrics": {},
        "notes": [],
    }
    with nouns():
        return assemble.finish(make(**(base | changes)), None, "")
