"""Parts of engine paddle that need no Paddle: weights, dtypes, modes, and the rendezvous of its
ranks.
"""

import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.golden import golden
from steelyard.case.precision import TRAINING_PRESETS
from steelyard.case.request import Request
from steelyard.case.resolve import resolve_case
from steelyard.engine import engine_rows
from steelyard.engines.paddle import host_weights, modes, rendezvous
from steelyard.engines.paddle.modes import PaddleModes
from steelyard.errors import RequestError
from steelyard.models import llama_init, llama_placements
from steelyard.models.llama_placements import WHOLE, Shard
from steelyard.models.shapes import LlamaModel
from steelyard.run.checked_request import check_request

CORPUS = "llama1-7b-openwebtext"
# torch draws normal numbers 16 at a time; sizes of these matrices are no multiples of 16.
MODEL = LlamaModel(
    family="llama",
    layers=1,
    hidden=24,
    heads=4,
    kv_heads=2,
    ffn=22,
    vocab=33,
    positions=64,
    qkv_bias=True,
)


def draw_torch_weights() -> dict[str, np.ndarray]:
    """Return the random weights of engine torch by name, as 1-D or 2-D arrays in logical order."""
    shape = llama_init.get_llama_shape(MODEL)
    model = llama_init.build_llama(shape, torch.device("cpu"), torch.float32)
    llama_init.fill_random_llama_weights(model, 7)
    out = {}
    for name, parameter in model.named_parameters():
        view = llama_placements.view_logically(name, parameter, shape, WHOLE)
        flat = llama_placements.flatten_logical_shape(name, tuple(view.shape))
        out[name] = view.reshape(flat if len(flat) > 1 else -1).numpy()
    return out


def test_random_weights_are_those_of_engine_torch() -> None:
    expected, draw_weight = draw_torch_weights(), host_weights.random_parameters(7, MODEL)
    assert {"layers.0.qkv.bias", "layers.0.gate_up.weight", "norm.weight"} <= expected.keys()
    for name, array in expected.items():
        weight = draw_weight(name)
        assert weight.shape == array.shape == host_weights.whole_shape(name, MODEL), name
        np.testing.assert_allclose(weight, array, rtol=0, atol=1e-6, err_msg=name)
    assert not np.allclose(
        host_weights.random_parameters(8, MODEL)("embed.weight"),
        expected["embed.weight"],
        atol=1e-3,
    )


@pytest.mark.parametrize("count", [16, 17, 31, 32, 1000])
def test_numbers_are_drawn_as_torch_draws_them(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = 2**62 + 5
    expected = torch.empty(count).normal_(generator=torch.Generator().manual_seed(seed)).numpy()
    np.testing.assert_allclose(host_weights.draw_normal(seed, count), expected, rtol=0, atol=2e-6)
    monkeypatch.setattr(host_weights, "CHUNK", 48)
    np.testing.assert_allclose(host_weights.draw_normal(seed, count), expected, rtol=0, atol=2e-6)


def test_a_tensor_parallel_rank_has_the_shard_of_engine_torch() -> None:
    shape, draw_weight = llama_init.get_llama_shape(MODEL), host_weights.random_parameters(7, MODEL)
    for index in range(2):
        share = Shard(index, 2)
        model = llama_init.build_llama(shape, torch.device("cpu"), torch.float32, share)
        llama_init.fill_random_llama_weights(model, 7, shape, share)
        for name in (
            "layers.0.qkv.weight",
            "layers.0.out.weight",
            "layers.0.gate_up.weight",
            "layers.0.down.weight",
        ):
            view = llama_placements.view_logically(name, model.get_parameter(name), shape, share)
            expected = view.reshape(
                llama_placements.flatten_logical_shape(name, tuple(view.shape))
            ).numpy()
            np.testing.assert_allclose(
                host_weights.take_part(name, draw_weight(name), index, 2),
                expected,
                rtol=0,
                atol=1e-6,
                err_msg=name,
            )
    table = draw_weight("embed.weight")[:32]
    np.testing.assert_array_equal(
        np.concatenate([host_weights.take_part("embed.weight", table, i, 2) for i in range(2)]),
        table,
    )
    norm = draw_weight("norm.weight")
    assert host_weights.take_part("norm.weight", norm, 1, 2) is norm


def test_linear_weights_are_transposed_for_paddle() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(
        host_weights.orient_for_paddle("layers.0.out.weight", array), array.T
    )
    np.testing.assert_array_equal(host_weights.orient_for_paddle("embed.weight", array), array)


BF16_O2_DTYPES = {
    "parameters": {"bfloat16"},
    "gradients": {"bfloat16"},
    "logits": {"bfloat16"},
    "states": {"float32"},
}


@pytest.mark.parametrize("name", BF16_O2_DTYPES)
def test_dtypes_that_contradict_the_precision_end_a_run(name: str) -> None:
    """Paddle's level O2 on a CPU silently stays in fp32."""
    modes.check_dtypes(TRAINING_PRESETS["bf16-o2"], BF16_O2_DTYPES)
    wrong_dtype = "bfloat16" if name == "states" else "float32"
    expected_dtype = "float32" if name == "states" else "bfloat16"
    with pytest.raises(
        RuntimeError,
        match=(
            f"precision bf16-o2: {name} must be {expected_dtype}, but Paddle made them"
            f" {wrong_dtype}"
        ),
    ):
        modes.check_dtypes(TRAINING_PRESETS["bf16-o2"], BF16_O2_DTYPES | {name: {wrong_dtype}})


def test_amp_level_of_each_precision() -> None:
    levels = {
        name: modes.amp_level(TRAINING_PRESETS[name]) for name in engine_rows.PADDLE.trains_in
    }
    assert levels == {"fp32": None, "tf32": None, "fp16-o2": "O2", "bf16-o2": "O2"}


def make_job(*settings: str, **degrees: int) -> Any:
    """Return the parts of a job that modes are derived from: a case with settings and a plan with
    degrees.
    """
    case = resolve_case(CORPUS, "smoke", settings=list(settings)).case
    return SimpleNamespace(
        case=case, plan=SimpleNamespace(**({"tp": 1, "pp": 1, "dp": 1} | degrees))
    )


@pytest.mark.parametrize(
    ("settings", "degrees", "wanted", "names"),
    [
        ((), {}, PaddleModes(1, 1, 1, 1, 0, False), ["single"]),
        (("tune.recompute=full",), {}, PaddleModes(1, 1, 1, 1, 0, True), ["single", "recompute"]),
        ((), {"dp": 4}, PaddleModes(1, 1, 4, 1, 0, False), ["dp"]),
        (("tune.sharding=1",), {"dp": 4}, PaddleModes(1, 1, 1, 4, 1, False), ["sharding 1"]),
        (
            ("tune.sharding=2", "tune.sharding_degree=2"),
            {"tp": 2, "dp": 4},
            PaddleModes(2, 1, 2, 2, 2, False),
            ["tp", "sharding 2", "dp", "copies of shards"],
        ),
        (
            ("tune.sharding=1",),
            {"pp": 2, "dp": 2},
            PaddleModes(1, 2, 1, 2, 1, False),
            ["pp", "sharding 1"],
        ),
    ],
)
def test_modes_follow_from_tune_and_plan(
    settings: tuple[str, ...], degrees: dict[str, int], wanted: PaddleModes, names: list[str]
) -> None:
    plan_modes = modes.choose_modes(make_job(*settings, **degrees))
    assert (plan_modes, list(plan_modes.names), plan_modes.dp) == (
        wanted,
        names,
        degrees.get("dp", 1),
    )
    assert plan_modes.is_data_parallel is (names == ["dp"])


@pytest.mark.parametrize(
    ("settings", "degrees", "said"),
    [
        (
            ("tune.sharding=3",),
            {"dp": 2},
            "tune.sharding=3: engine paddle divides states and gradients; allowed: 0, 1, 2",
        ),
        (
            ("tune.recompute=selective",),
            {},
            "tune.recompute=selective: engine paddle recomputes whole layers; allowed: none, full",
        ),
        (
            ("tune.sharding=2",),
            {"pp": 2, "dp": 2},
            "tune.sharding=2: not in a pipeline of engine paddle; allowed there: 0, 1",
        ),
        (
            ("question.model.vocab=257",),
            {"tp": 2},
            "TP2 does not divide the 257 tokens of the vocabulary, as engine paddle needs",
        ),
    ],
)
def test_unsupported_modes_are_refused(
    settings: tuple[str, ...], degrees: dict[str, int], said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        modes.choose_modes(make_job(*settings, **degrees))
    assert str(caught.value) == said


def test_a_mode_that_the_device_lacks_is_refused_with_its_reason() -> None:
    alone = PaddleModes(1, 1, 1, 1, 0, False)
    modes.refuse_modes(alone, {"tp": "no"})
    with pytest.raises(
        RequestError,
        match=r"engine paddle has no tp on this device: no kernels; see docs/engines\.md",
    ):
        modes.refuse_modes(replace(alone, tp=2), {"tp": "no kernels"})


def test_untried_modes_are_listed() -> None:
    assert modes.list_untried(PaddleModes(1, 1, 1, 2, 1, True), "cpu", "fp32") == []
    assert modes.list_untried(PaddleModes(2, 1, 1, 2, 2, False), "gpu", "bf16-o2") == [
        "gpu",
        "bf16-o2",
        "tp",
        "sharding 2",
    ]


@pytest.mark.parametrize(("engine", "more"), [("torch", ", fp8, fp8-pure"), ("transformers", "")])
def test_other_engines_do_not_train_in_paddles_precisions(engine: str, more: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_request(
            Request(resolve_case(CORPUS, "smoke", "fp16-o2"), engine=engine, accelerator="cpu")
        )
    assert str(caught.value) == golden("engine-does-not-train-in-fp", engine, more)


@pytest.mark.parametrize(
    ("settings", "resume", "named"),
    [
        (["tune.checkpoint_every=5"], None, "tune.checkpoint_every"),
        ([], Path("records"), "--resume"),
    ],
)
def test_checkpoints_are_refused(
    settings: list[str], resume: Path | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        engine_rows, "find_engine", lambda name: replace(engine_rows.PADDLE, needs=())
    )
    request = Request(
        resolve_case(CORPUS, "smoke", settings=settings),
        engine="paddle",
        accelerator="cpu",
        resume=resume,
    )
    with pytest.raises(RequestError) as caught:
        check_request(request)
    assert str(caught.value) == golden("engine-paddle-has-no-checkpoints-leave", named)


@dataclass(frozen=True)
class FakeRendezvous:
    """The fields of a rendezvous that Paddle's ranks read."""

    file: Path | None = None
    address: str | None = None
    port: int | None = None
    listen_fd: int | None = None


def test_ranks_of_one_host_meet_on_loopback(tmp_path: Path) -> None:
    """Other ranks wait until rank 0 has written its address."""
    meet, addresses = FakeRendezvous(file=tmp_path / "store"), []
    other_rank = threading.Thread(target=lambda: addresses.append(rendezvous.find_master(meet, 1)))
    other_rank.start()
    host, port = rendezvous.find_master(meet, 0)
    other_rank.join(20)
    assert addresses == [(host, port)]
    assert host == "127.0.0.1"
    assert 0 < port < 1 << 16


def test_ranks_of_several_hosts_meet_at_the_address_of_the_run() -> None:
    assert rendezvous.find_master(FakeRendezvous(address="10.0.0.1", port=4711), 3) == (
        "10.0.0.1",
        4711,
    )
    with pytest.raises(ValueError, match="no rendezvous file or address"):
        rendezvous.find_master(FakeRendezvous(), 0)


def test_a_rank_times_out_if_rank_0_publishes_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "TIMEOUT_S", 0.1)
    with pytest.raises(TimeoutError, match="rank 0 did not publish its port within 0 s"):
        rendezvous.find_master(FakeRendezvous(file=tmp_path / "store"), 1)


def test_environment_variables_of_a_paddle_rank() -> None:
    assert rendezvous.launcher_variables("127.0.0.1", 5000, 1, 1, 2, "gloo") == {
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:5001,127.0.0.1:5002",
        "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:5002",
        "PADDLE_MASTER": "127.0.0.1:5000",
        "PADDLE_RANK_IN_NODE": "1",
        "PADDLE_DISTRI_BACKEND": "gloo",
    }
    assert "PADDLE_DISTRI_BACKEND" not in rendezvous.launcher_variables("h", 1, 0, 0, 1, "nccl")
