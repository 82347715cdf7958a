"""Names that mean one thing: a preset's precision, and a shipped case."""

from pathlib import Path

import pytest

from fixtures.cases import OWN, own
from fixtures.records import changed, published
from steelyard.case.precision import PRESETS, name_of
from steelyard.case.resolve import names, resolve
from steelyard.metrics import verify

CASE = "llama2-7b-mmlu"


@pytest.mark.parametrize(
    ("case", "parts", "name"),
    [
        (CASE, '{name="fp32",matmul="fp16",weights="fp32"}', "matmul fp16, weights fp32"),
        (CASE, '{name="fp32",matmul="fp32",weights="fp32",states="bf16"}', "matmul fp32, weights fp32, states bf16"),
        (CASE, '{name="mine",matmul="fp32",weights="fp32"}', "fp32"),
        (CASE, '{matmul="tf32",weights="fp32"}', "tf32"),
        (
            "llama1-7b-openwebtext",
            '{name="bf16",matmul="fp16",weights="fp32",gradients="fp16",states="fp32"}',
            "matmul fp16, weights fp32, gradients fp16, states fp32",
        ),
    ],
)
def test_a_presets_name_is_only_its_own(case: str, parts: str, name: str) -> None:
    found = resolve(case, "smoke", settings=[f"question.precision={parts}"])
    assert found.case.question.precision.name == name
    assert found.origins["question.precision.name"] == "of its parts"


def test_a_table_in_a_case_file_is_named_by_its_parts_too(tmp_path: Path) -> None:
    table = '\n[question.precision]\nname = "bf16"\nmatmul = "tf32"\nweights = "bf16"\n'
    path = own(tmp_path, OWN + table, ('precision = "fp16"\n', ""))
    assert resolve(path).case.question.precision.name == "matmul tf32, weights bf16"


@pytest.mark.parametrize("kind", PRESETS)
def test_every_preset_has_its_own_name(kind: str) -> None:
    assert {name: name_of(kind, row.model_dump()) for name, row in PRESETS[kind].items()} == {n: n for n in PRESETS[kind]}


@pytest.mark.parametrize("name", names())
def test_shipped_cases_keep_their_names(name: str) -> None:
    precision = resolve(name).case.question.precision
    kind = resolve(name).case.question.kind
    assert PRESETS[kind][precision.name] == precision


def test_a_record_that_calls_fp16_fp32_does_not_verify(tmp_path: Path) -> None:
    path = published("mmlu-smoke-closed", tmp_path)
    assert verify.verify(path) == []

    def lie(table: dict) -> None:
        table["case"]["question"]["precision"]["matmul"] = "fp16"
        table["case"]["key"] = verify.key_of(table["case"]["question"], table["data"]["fingerprint"])

    assert "the precision is called fp32, and is matmul fp16, weights fp32" in verify.verify(changed(path, lie))
