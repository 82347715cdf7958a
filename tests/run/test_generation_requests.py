"""Requests of generation: what is refused before anything starts, each in one line with what to do,
and how much of the question a run sends.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steelyard.case.request import Request, split_engine_settings
from steelyard.case.resolve import resolve_case
from steelyard.engine import engine_rows
from steelyard.errors import EngineError, RequestError
from steelyard.run.checked_request import check_request

CASE = "llama3-8b-generate"
ENDPOINT = "engine.endpoint=http://127.0.0.1:1/v1"


def make_request(*settings: str, engine: str = "transformers", **options: Any) -> Request:
    """Return a request for the case at size smoke with these settings of --set and options."""
    engine_settings, others = split_engine_settings(list(settings))
    resolved = resolve_case(CASE, "smoke", options.pop("precision", None), None, others)
    return Request(
        resolved=resolved,
        engine=engine,
        engine_settings=engine_settings,
        accelerator="cpu",
        **options,
    )


def get_refusal(request: Request) -> str:
    """Return the one line with which a request is refused."""
    with pytest.raises(RequestError) as refused:
        check_request(request)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture(autouse=True)
def _everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all packages seem to be installed: what is not comes first otherwise."""
    monkeypatch.setattr(engine_rows.plugins, "is_installed", lambda module: True)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"steps": 3},
            (
                "--steps 3: generation is limited by requests, not by steps; use --sample N for a"
                " window of N requests"
            ),
        ),
        (
            {"explain": True},
            "--explain: engine transformers has no steps of generation to profile; leave it out",
        ),
        (
            {"explain": True, "trace": True},
            "--trace: engine transformers has no steps of generation to profile; leave it out",
        ),
        (
            {"subjects": ("law",)},
            "--subjects: task generate has no such choice; allowed: --sample N",
        ),
        ({"rows": ("0-3",)}, "--rows: task generate has no such choice; allowed: --sample N"),
        (
            {"resume": Path("records")},
            f"--resume: {CASE} is a generation case, which cannot resume; leave --resume out",
        ),
        ({"sample": 0}, "--sample 0: must be at least 1"),
        (
            {"passes": ("check",)},
            "--passes: generation has generate, check, in this order; generate is required",
        ),
        (
            {"data": Path("texts.jsonl")},
            (
                f"--data: {CASE} makes its data itself; leave it out, or ask for others, as"
                f" steelyard show {CASE} lists below question.data"
            ),
        ),
        (
            {"devices": 2},
            (
                f"DP2: {CASE} is a generation case, in which one model serves all requests;"
                " allowed: --parallel TP"
            ),
        ),
        (
            {"precision": "fp8"},
            ("engine transformers does not compute matmuls in fp8; allowed: fp32, fp16, bf16"),
        ),
        ({"engine": "megatron"}, "engine 'megatron' does not run llama3-8b-generate; allowed: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_options_without_meaning_are_refused(
    options: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "texts.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert get_refusal(make_request(**options)).startswith(line)


@pytest.mark.parametrize(
    ("settings", "engine", "line"),
    [
        (
            ("engine.api=chat",),
            "transformers",
            (
                "engine.api: engine transformers does not read it; leave it out, or use --engine"
                " http or transformers-serve or vllm"
            ),
        ),
        (
            (ENDPOINT,),
            "transformers",
            (
                "engine.endpoint: engine transformers does not read it; leave it out, or use"
                " --engine http"
            ),
        ),
        (
            (ENDPOINT,),
            "vllm",
            "engine.endpoint: engine vllm does not read it; leave it out, or use --engine http",
        ),
        (
            (ENDPOINT, "engine.arguments=--port 1"),
            "http",
            (
                "engine.arguments: engine http does not read it; leave it out, or use --engine"
                " transformers-serve or vllm"
            ),
        ),
        (
            (),
            "http",
            (
                "engine http sends requests to a server; name it: --set"
                " engine.endpoint=http://127.0.0.1:8000/v1"
            ),
        ),
        (
            ("tune.parallel=TP2",),
            "transformers",
            "engine transformers cannot divide a model as TP2PP1DP1; allowed: one device",
        ),
        (
            (ENDPOINT, "tune.parallel=TP2"),
            "http",
            "engine http cannot divide a model as TP2PP1DP1; allowed: one device",
        ),
        (
            ('question.precision={matmul="fp32",weights="fp32",kv="fp8"}',),
            "transformers",
            (
                "question.precision: engine transformers keeps keys and values in the type of the"
                " activations, not in fp8; leave kv out"
            ),
        ),
    ],
)
def test_settings_that_an_engine_does_not_read_are_refused(
    settings: tuple[str, ...], engine: str, line: str
) -> None:
    devices = 2 if "tune.parallel=TP2" in settings else 1
    assert get_refusal(make_request(*settings, engine=engine, devices=devices)) == line


def test_engines_that_lack_something_are_left_out_of_all() -> None:
    """`--engine all` takes an EngineError as a reason to go on without the engine."""
    for engine in ("http", "megatron"):
        with pytest.raises(EngineError):
            check_request(make_request(engine=engine))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            ("load.mode=offline", "min_time_s=3"),
            "min_time_s: mode 'offline' sends all requests at once; set requests instead",
        ),
        (
            ("load.mode=rate", "load.arrivals=trace"),
            "load.arrivals 'trace' needs prompts of a trace: data.source 'trace'",
        ),
        (
            ("question.data.prompt_tokens=505",),
            ("prompt and output have up to 513 tokens, more than the model's 512 positions"),
        ),
        (
            ("question.data.prompt_tokens=many",),
            (
                "question.data.prompt_tokens: must be a number of tokens, two bounds such as [512,"
                " 1024], or \"data\" (it is 'many')"
            ),
        ),
        (
            ("load.rate=8", "load.concurrency=4"),
            "name one of load.concurrency and load.rate",
        ),
    ],
)
def test_questions_that_cannot_be_asked_are_refused(settings: tuple[str, ...], line: str) -> None:
    with pytest.raises(RequestError) as refused:
        make_request(*settings)
    assert line in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "sample", "kind", "requests", "min_time_s"),
    [
        ((), None, "full", 32, None),
        ((), 5, "window", 5, None),
        (("requests=7",), None, "full", 7, None),
        (("requests=7", "min_time_s=2.5"), None, "full", 7, 2.5),
        (("requests=7", "min_time_s=2.5"), 3, "window", 3, None),
    ],
)
def test_requests_and_time_are_scope(
    settings: tuple[str, ...],
    sample: int | None,
    kind: str,
    requests: int,
    min_time_s: float | None,
) -> None:
    request = make_request(*settings, sample=sample)
    checked = check_request(request)
    scope = checked.scope
    assert (scope.kind, scope.requests, scope.min_time_s) == (kind, requests, min_time_s)
    assert checked.passes == ("generate", "check")
    assert checked.case.compute_key("f") == make_request().resolved.case.compute_key("f")


@pytest.mark.parametrize(
    ("load", "min_time_s", "requests"),
    [
        ("load.mode=offline", None, 256),
        ("load.concurrency=1", None, 80),
        ("load.concurrency=16", None, 160),
        ("load.rate=2", None, 80),
        ("load.rate=2", 100.0, 201),
    ],
)
def test_the_load_says_how_many_requests_are_sent(
    load: str, min_time_s: float | None, requests: int
) -> None:
    question_load = resolve_case(CASE, settings=[load]).case.question.load
    assert question_load is not None
    assert question_load.count_default_requests(min_time_s) == requests


def test_passes_may_leave_the_check_out() -> None:
    assert check_request(make_request(passes=("generate",))).passes == ("generate",)


def test_a_server_of_the_users_needs_no_memory_here() -> None:
    """At size full the model has 15 GiB, which a small host lacks."""
    full = resolve_case(CASE, settings=["question.model.layers=3000"])
    request = replace(make_request(ENDPOINT, engine="http"), resolved=full)
    assert check_request(request).engine.name == "http"
    assert "GiB per device" in get_refusal(
        replace(request, engine="transformers", engine_settings=make_request().engine_settings)
    )
