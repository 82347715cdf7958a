"""fp8 from the command line: which requests run, what they learn, and what is refused."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.commands import Shell
from fixtures.glm import TRAINING
from steelyard.accelerators import cuda_torch
from steelyard.case.precision import TRAINING_PRESETS
from steelyard.engines.torch.framework import TorchFramework
from steelyard.errors import RequestError
from steelyard.plan.matmuls import VOCABULARY, Matmul
from steelyard.training.adamw import MixedPrecisionAdamW

LONGER = [
    ("llama1-7b-openwebtext", "fp8-pure"),
    ("llama1-13b-openwebtext", "fp8"),
    ("llama1-13b-openwebtext", "fp8-pure"),
    ("aquila2-7b-alpaca", "fp8"),
]
EMULATED = {"code": "note.emulated", "values": {}}


def run(shell: Shell, case: str, precision: str, *more: str) -> dict[str, Any]:
    """Run a case at size smoke on a CPU and return its record, which must be valid; its file is
    deleted.
    """
    done = shell(
        *(
            "run",
            case,
            "--size",
            "smoke",
            "--accelerator",
            "cpu",
            "--precision",
            precision,
            "--out",
            shell.out,
            *more,
        )
    )
    [path] = shell.out.glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    assert found["status"] == "valid", (found["reasons"], done.err)
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "precision"),
    [
        ("llama1-7b-openwebtext", "fp8"),
        ("aquila2-7b-alpaca", "fp8-pure"),
        *[pytest.param(case, how, marks=pytest.mark.long) for case, how in LONGER],
    ],
)
def test_smoke_training_reaches_its_bound(case: str, precision: str, shell: Shell) -> None:
    """The case's gate is evaluated, and the loss is at most 0.1 nats from that of bf16."""
    found = run(shell, case, precision)
    [gate] = [one for one in found["checks"] if one["name"] == "gate"]
    assert gate["ok"]
    assert found["quality"]["evaluated"]
    assert EMULATED in found["notes"]
    details = found["engine"]["details"]
    assert (details["fp8"], details["weight_gradients"]) == (
        "emulated: numbers of fp8, sums of fp32",
        "fp8",
    )
    kept = "bf16" if precision == "fp8-pure" else "fp32"
    own = {"parameters": "bf16" if precision == "fp8-pure" else "bf16/fp32"}
    assert details["dtypes"] == {"main_parameters": kept, "gradients": kept, "states": kept} | own
    wide = run(shell, case, precision.replace("fp8", "bf16"))
    metric = gate_metric(found)
    assert abs(found["metrics"][metric]["value"] - wide["metrics"][metric]["value"]) <= 0.1


def gate_metric(found: dict[str, Any]) -> str:
    """Return the name of the metric that the gate checked."""
    return str(found["quality"]["metric"])


@pytest.mark.full
def test_scoring_is_near_bf16_in_every_division_and_degree(shell: Shell) -> None:
    """With random weights, losses of passages are near those of bf16; choices need not be."""
    wide = run(shell, "aquila2-34b-lambada", "bf16")["metrics"]["loss"]["value"]
    for more in ((), ("--devices", "2", "--parallel", "TP2")):
        found = run(shell, "aquila2-34b-lambada", "fp8", *more)
        assert found["metrics"]["loss"]["value"] == pytest.approx(wide, abs=0.01)
        assert found["engine"]["details"]["dtypes"] == {"parameters": "bf16/fp8"}
        assert EMULATED in found["notes"]
    choices = [
        run(shell, "llama2-7b-mmlu", "fp8", "--division", one)["outputs"]
        for one in ("closed", "open")
    ]
    assert choices[0]["passes"]["infer"]["choices"] == choices[1]["passes"]["infer"]["choices"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("glm-large-record", "--precision", "fp8"),
            "engine torch trains a GLM without fp8; use --precision bf16",
        ),
        (
            ("llama1-7b-openwebtext", "--precision", "fp8", "--set", "question.model.ffn=168"),
            "fp8 takes sizes that 16 divides, and ffn is 168 on a device",
        ),
        (
            ("llama1-7b-openwebtext", "--precision", "fp8", "--engine", "transformers"),
            "engine transformers has no matmuls in fp8",
        ),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], said: str, shell: Shell) -> None:
    done = shell("run", *arguments, "--size", "smoke", "--accelerator", "cpu", "--out", shell.out)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.strip().splitlines()) == 1, done.err


def test_a_device_without_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    device = cuda_torch.CudaTorchDevice.__new__(cuda_torch.CudaTorchDevice)
    device._index = 0
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    with pytest.raises(
        RequestError, match=r"compute capability 8\.0: fp8 needs 8\.9; use --precision bf16"
    ):
        device.set_precision("fp8")


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_matmuls_are_timed_in_fp8_and_the_vocabulary_in_bf16(
    layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    framework = TorchFramework("steelyard.accelerators.cpu_torch:CpuTorchDevice", 0, lambda: 0.0)
    multiplied = []
    plain = torch.mm
    monkeypatch.setattr(
        torch,
        "mm",
        lambda *given, **named: multiplied.append(given[0].dtype) or plain(*given, **named),
    )
    for name, wide in (("qkv", []), (VOCABULARY, [torch.bfloat16])):
        made = framework.prepare_matmul("fp8", Matmul(name=name, layout=layout, m=48, n=32, k=40))
        assert made is not None
        work, flops = made
        out = work()
        assert (out.shape, out.dtype) == ((48, 32), torch.bfloat16)
        assert flops == 2 * 48 * 32 * 40
        assert multiplied == wide


def test_an_update_raises_versions_and_copies_what_is_apart() -> None:
    """An fp32 parameter is its own master and is updated in place; a bf16 parameter is a copy of
    its master.
    """
    own, apart = (
        nn.Parameter(torch.ones(2, 2)),
        nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)),
    )
    masters = [own.detach(), torch.ones(2, 2)]
    adam = MixedPrecisionAdamW([own, apart], masters, TRAINING, TRAINING_PRESETS["fp8"])
    before = own._version, apart._version
    for one in (own, apart):
        adam.get_gradient(one).fill_(1.0)
    adam.step(0.25)
    assert own._version > before[0]
    assert apart._version > before[1]
    assert torch.equal(own, masters[0])
    assert float(own.detach()[0, 0]) < 1
    assert torch.equal(apart.float(), masters[1].bfloat16().float())
    assert adam.details()["dtypes"]["parameters"] == "bf16/fp32"
