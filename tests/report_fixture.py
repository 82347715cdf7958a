"""Made-up records for the tests of report. No number here was measured: they only have to look like runs."""

import math
from typing import Any

from steelyard import case as cases
from steelyard.record import Record

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
