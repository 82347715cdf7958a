"""Predicted memory of generation: weights, a step's activations and the cache of one request."""

import pytest

from steelyard.case.resolve import resolve_case
from steelyard.errors import RequestError
from steelyard.plan import memory
from steelyard.plan.degrees import Plan, make_single_plan

CASE = "llama3-8b-generate"
PARAMETERS = 8_030_261_248
KV_BYTES = 2 * 32 * 8 * 128 * 2  # of a token: keys and values, layers, heads, numbers of a head


def test_cache_is_that_of_the_longest_request() -> None:
    case = resolve_case(CASE).case
    parts = memory.predict_minimum(case, make_single_plan())
    assert (parts.parameters, parts.cache, parts.logits) == (2 * PARAMETERS, 1280 * KV_BYTES, 0)
    numbers = 2 * 4096 + (32 + 2 * 8) * 128 + 32 * 128 + 3 * 14336
    assert parts.activations == 512 * numbers * 2
    assert memory.format_parts(parts) == "parameters 15, activations 0.0586, cache 0.156"
    drawn = resolve_case(CASE, settings=["question.data.output_tokens=[16, 512]"]).case
    assert memory.predict_minimum(drawn, make_single_plan()).cache == 1536 * KV_BYTES


def test_fp8_keeps_one_byte_of_the_layers_matrices_and_16_bits_of_the_cache() -> None:
    plan = make_single_plan()
    half = memory.predict_minimum(resolve_case(CASE, precision="fp8").case, plan)
    full = memory.predict_minimum(resolve_case(CASE).case, plan)
    matrices = 32 * ((32 + 16) * 128 * 4096 + 4096 * 4096 + 3 * 4096 * 14336)
    assert full.cache == half.cache
    assert half.parameters in (full.parameters, full.parameters - matrices)


def test_a_tensor_parallel_rank_keeps_its_share_of_the_cache() -> None:
    plan = Plan(nodes=1, devices=4, tp=4, pp=1, dp=1, launcher="local")
    parts = memory.predict_minimum(resolve_case(CASE).case, plan)
    assert parts.cache == 1280 * KV_BYTES // 4


def test_what_does_not_fit_is_refused_with_its_parts() -> None:
    case = resolve_case(CASE).case
    with pytest.raises(RequestError, match=r"needs 15\.2 GiB per device by its shapes"):
        memory.check_memory(case, make_single_plan(), 10 << 30)
    assert memory.check_memory(case, make_single_plan(), 24 << 30) is None
