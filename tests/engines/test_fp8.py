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

LONG_CASES = [
    ("llama1-7b-openwebtext", "fp8-pure"),
    ("llama1-13b-openwebtext", "fp8"),
    ("llama1-13b-openwebtext", "fp8-pure"),
    ("aquila2-7b-alpaca", "fp8"),
]
EMULATED = {"code": "note.emulated", "values": {}}


def run_case(shell: Shell, case: str, precision: str, *options: str) -> dict[str, Any]:
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
            *options,
        )
    )
    [path] = shell.out.glob("*.json")
    record: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    assert record["status"] == "valid", (record["reasons"], done.err)
    return record


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "precision"),
    [
        ("llama1-7b-openwebtext", "fp8"),
        pytest.param("aquila2-7b-alpaca", "fp8-pure", marks=pytest.mark.long),
        *[pytest.param(case, how, marks=pytest.mark.long) for case, how in LONG_CASES],
    ],
)
def test_fp8_smoke_training_passes_the_gate_and_stays_near_bf16(
    case: str, precision: str, shell: Shell
) -> None:
    """The case's gate is evaluated, and the loss is at most 0.1 nats from that of bf16."""
    record = run_case(shell, case, precision)
    [gate] = [check for check in record["checks"] if check["name"] == "gate"]
    assert gate["ok"]
    assert record["quality"]["evaluated"]
    assert EMULATED in record["notes"]
    details = record["engine"]["details"]
    assert (details["fp8"], details["weight_gradients"]) == (
        "emulated: numbers of fp8, sums of fp32",
        "fp8",
    )
    master_dtype = "bf16" if precision == "fp8-pure" else "fp32"
    parameter_dtypes = {"parameters": "bf16" if precision == "fp8-pure" else "bf16/fp32"}
    assert (
        details["dtypes"]
        == {
            "main_parameters": master_dtype,
            "gradients": master_dtype,
            "states": master_dtype,
        }
        | parameter_dtypes
    )
    bf16_record = run_case(shell, case, precision.replace("fp8", "bf16"))
    metric = gate_metric(record)
    assert abs(record["metrics"][metric]["value"] - bf16_record["metrics"][metric]["value"]) <= 0.1


def gate_metric(record: dict[str, Any]) -> str:
    """Return the name of the metric that the gate checked."""
    return str(record["quality"]["metric"])


@pytest.mark.full
def test_scoring_is_near_bf16_in_every_division_and_degree(shell: Shell) -> None:
    """With random weights, losses of passages are near those of bf16; choices need not be."""
    bf16_loss = run_case(shell, "aquila2-34b-lambada", "bf16")["metrics"]["loss"]["value"]
    for options in ((), ("--devices", "2", "--parallel", "TP2")):
        record = run_case(shell, "aquila2-34b-lambada", "fp8", *options)
        assert record["metrics"]["loss"]["value"] == pytest.approx(bf16_loss, abs=0.01)
        assert record["engine"]["details"]["dtypes"] == {"parameters": "bf16/fp8"}
        assert EMULATED in record["notes"]
    choices = [
        run_case(shell, "llama2-7b-mmlu", "fp8", "--division", division)["outputs"]
        for division in ("closed", "open")
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
            "fp8 needs sizes that are multiples of 16, and ffn is 168 on each device",
        ),
        (
            ("llama1-7b-openwebtext", "--precision", "fp8", "--engine", "transformers"),
            "engine transformers does not compute matmuls in fp8",
        ),
    ],
)
def test_unsupported_fp8_requests_are_refused(
    arguments: tuple[str, ...], said: str, shell: Shell
) -> None:
    done = shell("run", *arguments, "--size", "smoke", "--accelerator", "cpu", "--out", shell.out)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.strip().splitlines()) == 1, done.err


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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
    operand_dtypes = []
    original_mm = torch.mm
    monkeypatch.setattr(
        torch,
        "mm",
        lambda *args, **kwargs: (
            operand_dtypes.append(args[0].dtype) or original_mm(*args, **kwargs)
        ),
    )
    for name, expected_dtypes in (("qkv", []), (VOCABULARY, [torch.bfloat16])):
        work_and_flops = framework.prepare_matmul(
            "fp8", Matmul(name=name, layout=layout, m=48, n=32, k=40)
        )
        assert work_and_flops is not None
        work, flops = work_and_flops
        out = work()
        assert (out.shape, out.dtype) == ((48, 32), torch.bfloat16)
        assert flops == 2 * 48 * 32 * 40
        assert operand_dtypes == expected_dtypes


def test_an_update_raises_versions_and_copies_masters_into_bf16_parameters() -> None:
    """An fp32 parameter is its own master and is updated in place; a bf16 parameter is a copy of
    its master.
    """
    fp32_parameter, bf16_parameter = (
        nn.Parameter(torch.ones(2, 2)),
        nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)),
    )
    masters = [fp32_parameter.detach(), torch.ones(2, 2)]
    adam = MixedPrecisionAdamW(
        [fp32_parameter, bf16_parameter], masters, TRAINING, TRAINING_PRESETS["fp8"]
    )
    before = fp32_parameter._version, bf16_parameter._version
    for parameter in (fp32_parameter, bf16_parameter):
        adam.get_gradient(parameter).fill_(1.0)
    adam.step(0.25)
    assert fp32_parameter._version > before[0]
    assert bf16_parameter._version > before[1]
    assert torch.equal(fp32_parameter, masters[0])
    assert float(fp32_parameter.detach()[0, 0]) < 1
    assert torch.equal(bf16_parameter.float(), masters[1].bfloat16().float())
    assert adam.details()["dtypes"]["parameters"] == "bf16/fp32"
