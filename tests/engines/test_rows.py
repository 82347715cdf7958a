"""Engine rows: what each engine can do is known, refused and listed without importing a
framework.
"""

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fixtures.commands import Shell
from fixtures.golden import golden
from steelyard.case.request import Request
from steelyard.case.resolve import list_shipped_cases, resolve_case
from steelyard.engine import engine_rows
from steelyard.engine.engine_rows import EngineRow
from steelyard.errors import RequestError
from steelyard.run.checked_request import CheckedRequest, check_request

MMLU, LAMBADA, CORPUS, RECORD = (
    "llama2-7b-mmlu",
    "aquila2-34b-lambada",
    "llama1-7b-openwebtext",
    "glm-large-record",
)


def make_request(
    name: str,
    engine: str,
    devices: int = 1,
    precision: str | None = None,
    division: str | None = None,
    parallel="DP",
):
    """Return a request for a case at size smoke on CPUs."""
    resolved = resolve_case(name, "smoke", precision, division, [f"tune.parallel={parallel}"])
    return Request(resolved, engine=engine, accelerator="cpu", devices=devices)


def refusal_message(request: Request) -> str:
    """Return the one line with which a request is refused."""
    with pytest.raises(RequestError) as caught:
        check_request(request)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (
            make_request(RECORD, "transformers"),
            f"engine 'transformers' does not run {RECORD}; allowed: torch, reference",
        ),
        (
            make_request(MMLU, "reference"),
            f"engine 'reference' does not run {MMLU}; allowed: torch, transformers, megatron",
        ),
        (
            make_request(CORPUS, "reference"),
            (
                f"engine 'reference' does not run {CORPUS}; allowed: torch, transformers, megatron,"
                " paddle, flagscale"
            ),
        ),
        (
            make_request(MMLU, "abacus"),
            (
                "no engine 'abacus'; known: flagscale, http, megatron, paddle, reference, torch,"
                " transformers, transformers-serve, vllm"
            ),
        ),
        (
            make_request(MMLU, "transformers", division="open"),
            f"{MMLU} has no division 'open' with engine transformers; allowed: closed",
        ),
        (
            make_request(LAMBADA, "torch", division="open"),
            f"{LAMBADA} has no division 'open' with engine torch; allowed: closed",
        ),
        (
            make_request(RECORD, "reference", division="open"),
            f"{RECORD} has no division 'open' with engine reference; allowed: closed",
        ),
        (
            make_request(MMLU, "transformers", 2, parallel="TP2"),
            ("engine transformers cannot divide a model as TP2PP1DP1; allowed: --parallel DP"),
        ),
        (
            make_request(CORPUS, "transformers", 2, parallel="PP2"),
            ("engine transformers cannot divide a model as TP1PP2DP1; allowed: --parallel DP"),
        ),
    ],
    ids=range(9),
)
def test_requests_outside_an_engine_row_are_refused(request_: Request, said: str) -> None:
    assert refusal_message(request_) == said


@pytest.mark.parametrize("engine", ["megatron", "paddle", "flagscale"])
def test_engines_for_plain_llamas_refuse_variants(engine: str) -> None:
    resolved = resolve_case(
        CORPUS, "smoke", settings=["question.model.window=9", "question.model.qk_norm=true"]
    )
    assert (
        refusal_message(Request(resolved, engine=engine, accelerator="cpu", devices=1))
        == f"engine {engine!r} does not run {CORPUS}: its model has question.model.qk_norm,"
        " question.model.window; allowed: torch, transformers"
    )


def test_a_precision_missing_from_the_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = replace(engine_rows.TORCH, precisions=("fp32", "bf16"))
    monkeypatch.setattr(engine_rows, "TORCH", narrow)
    monkeypatch.setattr(engine_rows, "find_engine", lambda name: narrow)
    assert refusal_message(make_request(MMLU, "torch", precision="fp16")) == golden(
        "engine-torch-has-no-matmuls-in"
    )
    assert check_request(make_request(MMLU, "torch", precision="bf16")).engine is narrow


def test_a_module_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(engine_rows.TRANSFORMERS, needs=("torch", "no_such_module_here"))
    monkeypatch.setattr(engine_rows, "find_engine", lambda name: row)
    assert refusal_message(make_request(MMLU, "transformers")) == (
        golden("no_such_module_here-is-not-installed-and-engine")
    )


def test_a_supported_request_becomes_ready() -> None:
    prepared: CheckedRequest = check_request(
        make_request(MMLU, "torch", 2, parallel="TP2", division="open")
    )
    assert (prepared.engine, str(prepared.plan), prepared.passes) == (
        engine_rows.TORCH,
        "TP2PP1DP1",
        ("val", "infer"),
    )
    assert (prepared.scope.kind, prepared.accelerator.name) == ("full", "cpu")


def test_a_module_of_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """For megatron.core the package `megatron` itself may be missing; the message names what to
    install.
    """
    monkeypatch.setitem(sys.modules, "megatron", None)
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    assert engine_rows.MEGATRON.find_missing_module() == "megatron.core"
    assert refusal_message(make_request(MMLU, "megatron")) == (
        golden("megatron-core-is-not-installed-and")
    )
    monkeypatch.delitem(sys.modules, "steelyard.engines.megatron.score", raising=False)
    monkeypatch.delitem(sys.modules, "steelyard.engines.megatron.config", raising=False)
    with pytest.raises(RequestError) as caught:
        engine_rows.load_engine("megatron", "score_texts")
    assert str(caught.value).startswith("engine 'megatron' needs megatron")
    assert str(caught.value).endswith("; pip install 'steelyard[megatron]'")


MAP_ERROR = "libtorch_cpu.so: failed to map segment from shared object"


@pytest.mark.parametrize(
    ("noexec", "kind", "said"),
    [
        (
            False,
            MemoryError,
            (
                f"engine 'torch' cannot be imported for lack of memory ({MAP_ERROR}); free memory,"
                " or raise its limit (ulimit -v)"
            ),
        ),
        (
            True,
            RequestError,
            f"engine 'torch' cannot be imported ({MAP_ERROR}); install what it needs again: ",
        ),
    ],
)
def test_import_errors_of_an_installed_engine_are_explained(
    monkeypatch: pytest.MonkeyPatch, noexec: bool, kind: type[Exception], said: str
) -> None:
    """The dynamic loader has one message for two causes: too little memory, and a file system
    mounted noexec.
    """

    def fail(reference: str) -> None:
        cause = ImportError(MAP_ERROR, name="_C", path="/")
        raise ImportError("a long essay of a package", name="_C") from cause

    monkeypatch.setattr(engine_rows.plugins, "load_reference", fail)
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC if noexec else 0)
    )
    with pytest.raises(kind) as caught:
        engine_rows.load_engine("torch", "score_texts")
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("row", engine_rows.load_engine_rows().values(), ids=lambda row: row.name)
def test_every_row_names_known_works_and_existing_classes(row: EngineRow) -> None:
    assert set(row.works) <= set(engine_rows.WORKS)
    assert row.divisions[0] == "closed"
    for work, reference in row.works.items():
        if row.find_missing_module() is None:
            assert callable(engine_rows.load_engine(row.name, work))
        else:  # not installed here: the source file still defines the class
            module, name = reference.split(":")
            spec = importlib.util.find_spec(module)
            assert spec is not None
            assert f"\nclass {name}" in Path(str(spec.origin)).read_text()
    with pytest.raises(
        RequestError,
        match=f"engine '{row.name}' cannot do juggling; it can do: {', '.join(row.works)}",
    ):
        engine_rows.load_engine(row.name, "juggling")


def test_frameworks_are_loaded_by_name() -> None:
    assert engine_rows.load_framework("torch").__name__ == "TorchFramework"
    with pytest.raises(
        RequestError, match="no framework 'jax'; known: host, paddle, program, torch"
    ):
        engine_rows.load_framework("jax")


@pytest.mark.parametrize(
    ("degrees", "plan", "able"),
    [
        (("dp",), "DP", True),
        (("dp",), "TP2", False),
        (("tp",), "DP", False),
        (("tp",), "TP2", True),
        ((), "DP", False),
    ],
)
def test_a_row_accepts_plans_of_its_degrees_only(
    degrees: tuple[str, ...], plan: str, able: bool
) -> None:
    row = replace(engine_rows.TORCH, degrees=degrees)
    assert row.can_divide(check_request(make_request(MMLU, "torch", 2, parallel=plan)).plan) is able


def test_list_names_what_each_engine_can_run(shell: Shell) -> None:
    done = shell("list", "--json")
    engines = {engine["name"]: engine for engine in done.json()["engines"]}
    generation = ["llama2-7b-generate", "llama3-8b-generate"]
    others = [name for name in list_shipped_cases() if name not in generation]
    llama = [name for name in others if name != RECORD]
    assert {name: engine["cases"] for name, engine in engines.items()} == {
        "flagscale": ["llama1-13b-openwebtext", CORPUS],
        "http": generation,
        "megatron": llama,
        "paddle": ["aquila2-7b-alpaca", "llama1-13b-openwebtext", CORPUS],
        "reference": [RECORD],
        "torch": sorted([*others, *generation]),
        "transformers": sorted([*llama, *generation]),
        "transformers-serve": generation,
        "vllm": generation,
    }
    assert {name: engine["divisions"] for name, engine in engines.items()} == {
        "flagscale": ["closed"],
        "http": ["closed", "open"],
        "megatron": ["closed"],
        "paddle": ["closed"],
        "reference": ["closed"],
        "torch": ["closed", "open"],
        "transformers": ["closed"],
        "transformers-serve": ["closed"],
        "vllm": ["closed", "open"],
    }
    assert {name: engine["degrees"] for name, engine in engines.items()} == {
        "flagscale": ["TP", "PP", "DP"],
        "http": ["DP"],
        "megatron": ["TP", "PP", "DP"],
        "paddle": ["TP", "PP", "DP"],
        "reference": ["DP"],
        "torch": ["TP", "PP", "DP"],
        "transformers": ["DP"],
        "transformers-serve": ["DP"],
        "vllm": ["TP"],
    }
    non_torch_frameworks = {
        name: engine["framework"]
        for name, engine in engines.items()
        if engine["framework"] != "torch"
    }
    assert non_torch_frameworks == {
        "paddle": "paddle",
        "flagscale": "program",
        **dict.fromkeys(("http", "transformers-serve", "vllm"), "host"),
    }
    assert [name for name, engine in engines.items() if engine["endpoint"]] == ["http"]
    assert [name for name, engine in engines.items() if engine["untried"]] == [
        "transformers-serve",
        "vllm",
    ]
    assert engines["torch"]["works"] == [
        "score_choices",
        "score_texts",
        "train_rows",
        "train_cloze",
        "generate",
        "check_answers",
    ]
    assert engines["paddle"]["trains_in"] == ["fp32", "tf32", "fp16-o2", "bf16-o2"]
    listing = " ".join(shell("list").out.split())
    assert "; closed; fp32, tf32, fp16-o2, bf16-o2; TP PP DP" in listing
    named = "fp32, tf32, fp16, bf16, fp8, bf16-pure, fp8-pure"
    assert f" torch all cases; closed, open; {named}; TP PP DP" in listing
    assert f" transformers {', '.join(sorted([*llama, *generation]))}; closed; " in listing
    assert "needs --set engine.endpoint=URL, the address of a server" in listing
    assert f"untried: {engine_rows.VLLM.untried}" in listing
