"""Sizes that are auto: the largest that fits the devices' memory, and the next smaller one after a
failure for lack of memory.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest

from fixtures.cases import refusal
from fixtures.golden import golden
from steelyard.case.resolve import ResolvedCase, resolve_case
from steelyard.engine import engine_rows as engine_rows
from steelyard.plan import auto_sizes, degrees, memory
from steelyard.plan.auto_sizes import DeviceLimits

H200 = 150754820096  # bytes of memory, as its driver reports
GIB = 1 << 30
MMLU, LAMBADA, LLAMA, GLM = (
    "llama2-7b-mmlu",
    "aquila2-34b-lambada",
    "llama1-7b-openwebtext",
    "glm-large-record",
)


def chosen(found: ResolvedCase) -> dict[str, int]:
    """Return the sizes that were auto, by name, with the numbers chosen."""
    return {name: getattr(found.case.tune, name) for name in found.auto}


def on(
    name: str, memory_bytes: int | None, count: int = 1, **told: object
) -> tuple[ResolvedCase, DeviceLimits]:
    """Return a resolved case and `count` devices with this memory.

    `options` are precision, division, settings, sample, factor and even. Fused blocks are used on
    one device, as engine torch does.
    """
    asked = {
        "precision": None,
        "division": None,
        "settings": None,
        "sample": None,
        "factor": 1.0,
        "even": False,
        **told,
    }
    found = resolve_case(name, None, asked["precision"], asked["division"], asked["settings"])  # type: ignore[arg-type]
    plan = degrees.make_plan(found.case, 1, count, asked["sample"])  # type: ignore[arg-type]
    return found, DeviceLimits(
        plan, memory_bytes, count == 1, asked["even"], asked["factor"], asked["sample"]
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "asked", "wanted"),
    [
        # The sizes of the best rows of docs/results.md, where there are such rows.
        (MMLU, {}, {"batch_tokens": 32768}),
        (MMLU, {"division": "open"}, {"batch_tokens": 32768}),
        (LAMBADA, {}, {"batch_tokens": 16384}),
        (LLAMA, {"precision": "bf16"}, {"micro_batch": 3}),
        (LLAMA, {"precision": "bf16-pure"}, {"micro_batch": 8}),
        (LLAMA, {"precision": "bf16-pure", "sample": 48}, {"micro_batch": 12}),
        ("llama1-13b-openwebtext", {"precision": "bf16-pure"}, {"micro_batch": 3}),
        ("aquila2-7b-alpaca", {"precision": "bf16-pure"}, {"micro_batch": 10}),
        (GLM, {}, {"micro_batch": 32, "batch_tokens": 65536}),
        (GLM, {"division": "open"}, {"micro_batch": 64, "batch_tokens": 65536}),
    ],
)
def test_sizes_on_an_h200(name: str, asked: Mapping[str, object], wanted: dict[str, int]) -> None:
    assert chosen(auto_sizes.choose_sizes(*on(name, H200, **asked))) == wanted


def test_a_size_more_would_have_no_room() -> None:
    found, devices = on(LLAMA, 80 * GIB, precision="bf16-pure")
    rows = chosen(auto_sizes.choose_sizes(found, devices))["micro_batch"]
    tunes = [found.case.tune.model_copy(update={"micro_batch": n}) for n in (rows, rows + 1)]
    fits, more = (
        memory.estimate_bytes(found.case.model_copy(update={"tune": t}), devices.plan, True)
        for t in tunes
    )
    assert rows == 3
    assert fits <= auto_sizes.MAX_MEMORY_SHARE * 80 * GIB < more


@pytest.mark.parametrize(
    ("gib", "name", "asked", "wanted"),
    [
        (20, MMLU, {}, {"batch_tokens": 16384}),
        (24, MMLU, {"division": "open"}, {"batch_tokens": 4096}),
        (80, LAMBADA, {}, {"batch_tokens": 16384}),
        # nothing fits: the smallest size is chosen, and the check of memory refuses it later
        (24, LLAMA, {}, {"micro_batch": 1}),
        (24, GLM, {}, {"micro_batch": 4, "batch_tokens": 65536}),
    ],
)
def test_smaller_devices(
    gib: int, name: str, asked: Mapping[str, object], wanted: dict[str, int]
) -> None:
    assert chosen(auto_sizes.choose_sizes(*on(name, gib * GIB, **asked))) == wanted


def test_unknown_memory_has_the_documented_sizes() -> None:
    assert chosen(auto_sizes.choose_sizes(*on(MMLU, None))) == {"batch_tokens": 8192}
    assert chosen(auto_sizes.choose_sizes(*on(GLM, None))) == {
        "micro_batch": 1,
        "batch_tokens": 8192,
    }


def test_micro_batches_are_equal_where_that_costs_nothing() -> None:
    """11 rows fit. 2,048 rows do not divide by 9 to 11, and micro-batches of 8 cost 0.1 % more. 47
    rows divide by nothing: six micro-batches of 8 compute one padded row, five of 10 compute three.
    """
    vast = 126 * GIB / auto_sizes.MAX_MEMORY_SHARE + GIB
    assert chosen(auto_sizes.choose_sizes(*on(LLAMA, int(vast), precision="bf16-pure"))) == {
        "micro_batch": 8
    }
    assert chosen(
        auto_sizes.choose_sizes(*on(LLAMA, int(vast), precision="bf16-pure", sample=47))
    ) == {"micro_batch": 8}
    assert chosen(
        auto_sizes.choose_sizes(*on(LLAMA, int(vast), precision="bf16-pure", sample=5))
    ) == {"micro_batch": 5}
    assert chosen(
        auto_sizes.choose_sizes(*on(LLAMA, int(vast), precision="bf16-pure", sample=47, even=True))
    ) == {"micro_batch": 1}


def test_plans_have_their_own_sizes() -> None:
    eight = {"settings": ["tune.sharding=3"], "precision": "bf16"}
    assert chosen(auto_sizes.choose_sizes(*on(LLAMA, 80 * GIB, 8, **eight))) == {"micro_batch": 4}
    piped = {"settings": ["tune.parallel=PP8DP"], "precision": "bf16", "sample": 64}
    found, devices = on(LLAMA, H200, 8, **piped)
    rows = chosen(auto_sizes.choose_sizes(found, devices))["micro_batch"]
    assert 64 // rows >= 8  # at least as many micro-batches as stages
    assert rows == 1  # the size with the smallest bubble


def test_engines_that_need_more_get_less() -> None:
    asked = {"precision": "bf16-pure", "sample": 64}
    assert chosen(auto_sizes.choose_sizes(*on(LLAMA, 112 * GIB, **asked))) == {"micro_batch": 8}
    assert chosen(auto_sizes.choose_sizes(*on(LLAMA, 112 * GIB, factor=1.25, **asked))) == {
        "micro_batch": 4
    }
    assert {row.name: row.memory_factor for row in engine_rows.load_engine_rows().values() if row.memory_factor != 1} == {
        "megatron": 1.04, "paddle": 1.25, "flagscale": 1.25,
    }  # fmt: skip


def test_the_next_smaller_size() -> None:
    for name, asked, wanted in (
        (MMLU, {}, {"batch_tokens": 16384}),
        (LLAMA, {"precision": "bf16"}, {"micro_batch": 2}),
        (LLAMA, {"precision": "bf16-pure"}, {"micro_batch": 4}),
        (GLM, {}, {"micro_batch": 16, "batch_tokens": 32768}),
    ):
        found, devices = on(name, H200, **asked)
        less = auto_sizes.choose_smaller_sizes(auto_sizes.choose_sizes(found, devices), devices)
        assert less is not None
        assert chosen(less) == wanted
        assert less.origins == found.origins


def test_nothing_is_smaller_than_one_row() -> None:
    found, devices = on(LLAMA, None)
    assert auto_sizes.choose_smaller_sizes(found, devices) is None


def test_a_number_that_was_given_stays() -> None:
    found, devices = on(LLAMA, H200, settings=["tune.micro_batch=2"])
    assert found.auto == ()
    assert auto_sizes.choose_sizes(found, devices) is found
    assert auto_sizes.choose_smaller_sizes(found, devices) is None


def test_auto_is_a_value_of_a_setting() -> None:
    found = resolve_case(LLAMA, "smoke", settings=["tune.micro_batch=auto"])
    assert found.auto == ("micro_batch",)
    assert found.origins["tune.micro_batch"] == "auto (command line)"
    assert resolve_case(LLAMA).origins["tune.micro_batch"] == "auto (case)"
    assert resolve_case(LLAMA, "smoke").auto == ()


@pytest.mark.process
def test_show_says_what_one_device_here_would_get() -> None:
    command = [
        sys.executable,
        "-m",
        "steelyard",
        "show",
        GLM,
        "--set",
        "tune.batch_tokens=auto",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = {row["key"]: (row["value"], row["origin"]) for row in json.loads(done.stdout)["values"]}
    for key, origin in (("micro_batch", "case"), ("batch_tokens", "command line")):
        value, where = rows[f"tune.{key}"]
        assert value == "auto"
        assert re.fullmatch(rf"{origin}: \d+ with engine torch on one .+", where)


@pytest.mark.parametrize("text", ["most", "Auto", "0", "1.5"])
def test_other_words_are_refused(text: str) -> None:
    line = refusal(LLAMA, "full", f"tune.micro_batch={text}")
    assert line.startswith(golden("case-llama-1-7-openwebtext-command"))
    assert ", or auto (it is " in line
