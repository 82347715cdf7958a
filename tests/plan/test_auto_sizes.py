"""Sizes that are auto: the largest that fits the devices' memory, and the next smaller one after a
failure for lack of memory.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest

from fixtures.cases import get_resolve_error
from fixtures.golden import golden
from steelyard.case.resolve import ResolvedCase, resolve_case
from steelyard.engine import engine_rows
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


def get_chosen_sizes(resolved: ResolvedCase) -> dict[str, int]:
    """Return the sizes that were auto, by name, with the numbers chosen."""
    return {name: getattr(resolved.case.tune, name) for name in resolved.auto}


def resolve_on(
    name: str, memory_bytes: int | None, count: int = 1, **options: object
) -> tuple[ResolvedCase, DeviceLimits]:
    """Return a resolved case and `count` devices with this memory.

    `options` are precision, division, settings, sample, factor and even. Fused blocks are used on
    one device, as engine torch does.
    """
    request = {
        "precision": None,
        "division": None,
        "settings": None,
        "sample": None,
        "factor": 1.0,
        "even": False,
        **options,
    }
    resolved = resolve_case(
        name, None, request["precision"], request["division"], request["settings"]
    )  # type: ignore[arg-type]
    plan = degrees.make_plan(resolved.case, 1, count, request["sample"])  # type: ignore[arg-type]
    return resolved, DeviceLimits(
        plan, memory_bytes, count == 1, request["even"], request["factor"], request["sample"]
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
    assert get_chosen_sizes(auto_sizes.choose_sizes(*resolve_on(name, H200, **asked))) == wanted


def test_the_next_larger_size_does_not_fit() -> None:
    resolved, devices = resolve_on(LLAMA, 80 * GIB, precision="bf16-pure")
    rows = get_chosen_sizes(auto_sizes.choose_sizes(resolved, devices))["micro_batch"]
    tunes = [resolved.case.tune.model_copy(update={"micro_batch": n}) for n in (rows, rows + 1)]
    fits, more = (
        memory.estimate_bytes(resolved.case.model_copy(update={"tune": t}), devices.plan, True)
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
def test_sizes_on_smaller_devices(
    gib: int, name: str, asked: Mapping[str, object], wanted: dict[str, int]
) -> None:
    assert (
        get_chosen_sizes(auto_sizes.choose_sizes(*resolve_on(name, gib * GIB, **asked))) == wanted
    )


def test_unknown_memory_has_the_documented_sizes() -> None:
    assert get_chosen_sizes(auto_sizes.choose_sizes(*resolve_on(MMLU, None))) == {
        "batch_tokens": 8192
    }
    assert get_chosen_sizes(auto_sizes.choose_sizes(*resolve_on(GLM, None))) == {
        "micro_batch": 1,
        "batch_tokens": 8192,
    }


def test_micro_batches_are_equal_where_that_costs_nothing() -> None:
    """11 rows fit. 2,048 rows do not divide by 9 to 11, and micro-batches of 8 cost 0.1 % more. 47
    rows divide by nothing: six micro-batches of 8 compute one padded row, five of 10 compute three.
    """
    vast = 126 * GIB / auto_sizes.MAX_MEMORY_SHARE + GIB
    assert get_chosen_sizes(
        auto_sizes.choose_sizes(*resolve_on(LLAMA, int(vast), precision="bf16-pure"))
    ) == {"micro_batch": 8}
    assert get_chosen_sizes(
        auto_sizes.choose_sizes(*resolve_on(LLAMA, int(vast), precision="bf16-pure", sample=47))
    ) == {"micro_batch": 8}
    assert get_chosen_sizes(
        auto_sizes.choose_sizes(*resolve_on(LLAMA, int(vast), precision="bf16-pure", sample=5))
    ) == {"micro_batch": 5}
    assert get_chosen_sizes(
        auto_sizes.choose_sizes(
            *resolve_on(LLAMA, int(vast), precision="bf16-pure", sample=47, even=True)
        )
    ) == {"micro_batch": 1}


def test_plans_have_their_own_sizes() -> None:
    eight = {"settings": ["tune.sharding=3"], "precision": "bf16"}
    assert get_chosen_sizes(auto_sizes.choose_sizes(*resolve_on(LLAMA, 80 * GIB, 8, **eight))) == {
        "micro_batch": 4
    }
    piped = {"settings": ["tune.parallel=PP8DP"], "precision": "bf16", "sample": 64}
    resolved, devices = resolve_on(LLAMA, H200, 8, **piped)
    rows = get_chosen_sizes(auto_sizes.choose_sizes(resolved, devices))["micro_batch"]
    assert 64 // rows >= 8  # at least as many micro-batches as stages
    assert rows == 1  # the size with the smallest bubble


def test_engines_with_a_memory_factor_get_smaller_sizes() -> None:
    options = {"precision": "bf16-pure", "sample": 64}
    assert get_chosen_sizes(auto_sizes.choose_sizes(*resolve_on(LLAMA, 112 * GIB, **options))) == {
        "micro_batch": 8
    }
    assert get_chosen_sizes(
        auto_sizes.choose_sizes(*resolve_on(LLAMA, 112 * GIB, factor=1.25, **options))
    ) == {"micro_batch": 4}
    assert {
        row.name: row.memory_factor
        for row in engine_rows.load_engine_rows().values()
        if row.memory_factor != 1
    } == {
        "megatron": 1.04,
        "paddle": 1.25,
        "flagscale": 1.25,
    }


def test_the_next_smaller_size() -> None:
    for name, options, expected in (
        (MMLU, {}, {"batch_tokens": 16384}),
        (LLAMA, {"precision": "bf16"}, {"micro_batch": 2}),
        (LLAMA, {"precision": "bf16-pure"}, {"micro_batch": 4}),
        (GLM, {}, {"micro_batch": 16, "batch_tokens": 32768}),
    ):
        resolved, devices = resolve_on(name, H200, **options)
        less = auto_sizes.choose_smaller_sizes(auto_sizes.choose_sizes(resolved, devices), devices)
        assert less is not None
        assert get_chosen_sizes(less) == expected
        assert less.origins == resolved.origins


def test_nothing_is_smaller_than_one_row() -> None:
    resolved, devices = resolve_on(LLAMA, None)
    assert auto_sizes.choose_smaller_sizes(resolved, devices) is None


def test_an_explicit_size_is_not_changed() -> None:
    resolved, devices = resolve_on(LLAMA, H200, settings=["tune.micro_batch=2"])
    assert resolved.auto == ()
    assert auto_sizes.choose_sizes(resolved, devices) is resolved
    assert auto_sizes.choose_smaller_sizes(resolved, devices) is None


def test_auto_is_a_value_of_a_setting() -> None:
    resolved = resolve_case(LLAMA, "smoke", settings=["tune.micro_batch=auto"])
    assert resolved.auto == ("micro_batch",)
    assert resolved.origins["tune.micro_batch"] == "auto (command line)"
    assert resolve_case(LLAMA).origins["tune.micro_batch"] == "auto (case)"
    assert resolve_case(LLAMA, "smoke").auto == ()


@pytest.mark.process
def test_show_names_the_size_for_one_local_device() -> None:
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
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = {
        row["key"]: (row["value"], row["origin"]) for row in json.loads(result.stdout)["values"]
    }
    for key, origin in (("micro_batch", "case"), ("batch_tokens", "command line")):
        value, where = rows[f"tune.{key}"]
        assert value == "auto"
        assert re.fullmatch(rf"{origin}: \d+ with engine torch on one .+", where)


@pytest.mark.parametrize("text", ["most", "Auto", "0", "1.5"])
def test_sizes_that_are_neither_numbers_nor_auto_are_refused(text: str) -> None:
    line = get_resolve_error(LLAMA, "full", f"tune.micro_batch={text}")
    assert line.startswith(golden("case-llama-1-7-openwebtext-command"))
    assert ", or auto (it is " in line
