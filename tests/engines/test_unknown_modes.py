"""A mode that does not exist is refused, and does not silently mean one of those that do."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from fixtures.glm import SHAPE
from steelyard.accelerators.peaks import check_precision_name
from steelyard.case.resolve import resolve_case
from steelyard.engines.torch.llama_stage import recompute_block
from steelyard.engines.torch.shards import ShardedParameter
from steelyard.errors import RequestError
from steelyard.models.attention import attend_packed_rows, make_packed_layout
from steelyard.models.cloze_attention import attend_cloze
from steelyard.models.llama_placements import Shard
from steelyard.plan import flops, memory, memory_glm
from steelyard.training.fsdp import FsdpPlacement

UNKNOWN = cast(Any, "unknown")
LLAMA: Any = resolve_case("llama2-7b-mmlu").case.question.model
CPU = torch.device("cpu")
ROWS = torch.zeros(3, 1, 8)  # one row of three tokens, one head of dimension 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: recompute_block(lambda: (ROWS, ROWS), UNKNOWN),
            "recompute 'unknown'; allowed: none, selective, full",
        ),
        (
            lambda: memory.count_layer_bytes(LLAMA, 2, UNKNOWN, compiled=False),
            "recompute 'unknown'; allowed: none, selective, full",
        ),
        (
            lambda: memory_glm.count_glm_layer_bytes(SHAPE, 2, UNKNOWN),
            "attention 'unknown'; allowed: flash, packed, padded",
        ),
        (
            lambda: flops.count_flops(LLAMA, {}, UNKNOWN, 1),
            "convention 'unknown'; allowed: causal, palm, nominal",
        ),
        (
            lambda: ShardedParameter("one", ROWS, ROWS.dtype, cast(Any, 4), Shard(), False),
            "sharding 4; allowed: 0, 1, 2, 3",
        ),
        (
            lambda: FsdpPlacement(None, cast(Any, 0), ROWS.dtype, CPU),
            "sharding 0; allowed: 1, 2, 3",
        ),
        (
            lambda: attend_packed_rows(
                ROWS, ROWS, ROWS, make_packed_layout([3], None, CPU), "unknown"
            ),
            "attention kernel 'unknown'; allowed: rows, ",
        ),
        (
            lambda: attend_cloze(ROWS, cast(Any, None), "unknown", 0.0),
            "attention kernel 'unknown'; allowed: ",
        ),
    ],
)
def test_an_unknown_mode_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value).startswith(message)


def test_an_unknown_precision_is_refused() -> None:
    for name in ("fp32", "tf32", "fp8"):
        check_precision_name(name)
    with pytest.raises(RequestError, match="precision 'fp31' is not known; allowed: bf16, "):
        check_precision_name("fp31")
