"""The real `transformers serve` with a small real model: started here as a child, and as a server
of the user's. It stops at the end of a text, so that lengths are natural.
"""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fixtures.commands import CommandResult, Shell, wait_for
from fixtures.serving import open_client
from steelyard.case.resolve import resolve_case
from steelyard.data.request_outcomes import OUTCOMES
from steelyard.engine.server_rows import ServerStart
from steelyard.engines.http.mock_server import Script
from steelyard.engines.http.server_process import ServerProcess, find_free_port
from steelyard.engines.http.servers import TRANSFORMERS_SERVE
from steelyard.record.request_samples import RequestSamples

pytestmark = [pytest.mark.process, pytest.mark.full]
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 32, 16
WORDS = ("the", "river", "runs", "past", "an", "old", "mill", "over", "a", "stone", "bridge")
SETTINGS = (
    "question.data.lengths=natural",
    f"question.data.prompt_tokens={PROMPT_TOKENS}",
    f"question.data.output_tokens={OUTPUT_TOKENS}",
    "tune.warmup=1",
    "tune.batch_tokens=256",
)
CONCURRENCY = ("question.load.concurrency=4",)
RATE = ("question.load.mode=rate", "question.load.rate=8")


@pytest.fixture(autouse=True, scope="module")
def _can_serve() -> None:
    """Skip where the server's packages are missing."""
    missing = [name for name in ("transformers", *TRANSFORMERS_SERVE.needs) if not find_spec(name)]
    if missing:
        pytest.skip(f"transformers serve needs {', '.join(missing)}")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A jsonl file with texts that are long enough for a prompt."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    generator = np.random.default_rng(0)
    rows = [{"text": " ".join(generator.choice(WORDS, 80))} for _ in range(20)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def endpoint(smollm2: Path) -> Any:
    """The address of a `transformers serve` with SmolLM2 that runs while the module's tests do."""
    case = resolve_case("llama2-7b-generate", "smoke").case
    port = find_free_port()
    start = ServerStart(case, smollm2, 1, "cpu", port, 2 * (PROMPT_TOKENS + OUTPUT_TOKENS), 8)
    # one thread, because tests share the cores
    row = replace(
        TRANSFORMERS_SERVE,
        variables=(*TRANSFORMERS_SERVE.variables, ("OMP_NUM_THREADS", "1")),
    )
    server = ServerProcess(row, sys.executable, row.make_arguments(start))
    with open_client(Script(), port=port) as client:
        server.wait_until_ready(client, 300.0)
    yield f"http://127.0.0.1:{port}/v1"
    server.end()


def run_smollm2(shell: Shell, smollm2: Path, texts: Path, *arguments: str) -> CommandResult:
    """Generate with SmolLM2 from the texts, 32 requests."""
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    return shell(
        *("run", "--model", smollm2, "--task", "generate", "--data", texts, "--precision", "fp32"),
        *("--accelerator", "cpu", "--sample", REQUESTS, *settings, *arguments, "--out", shell.out),
    )


def check_record(shell: Shell, done: CommandResult) -> dict[str, Any]:
    """Return the run's record, after checking that each request was answered and counted."""
    [record] = shell.records()
    samples = RequestSamples.model_validate(record["requests"][0])
    table = samples.table
    assert [OUTCOMES[code] for code in table.outcome] == ["ok"] * REQUESTS, samples.errors
    assert (samples.counted_by, samples.lengths) == ("usage", "natural")
    # this server says how many tokens a prompt has: those that were asked for
    assert set(table.usage_prompt_tokens) == {PROMPT_TOKENS}
    assert (table.output_tokens >= 1).all()
    assert (table.output_tokens <= OUTPUT_TOKENS).all()
    # a few machines' worth of rules judge times; these judge what was counted and answered
    rules = {"requests", "short_output", "token_counts", "warm_cache", "wrong_answers", "weights"}
    assert not rules & {reason["code"] for reason in record["reasons"]}, done.err
    return record


def as_settings(*settings: str) -> list[str]:
    """Return the options that set these keys."""
    return [part for setting in settings for part in ("--set", setting)]


def test_a_server_that_is_started_here_gives_the_answers_of_engine_torch(
    shell: Shell, smollm2: Path, texts: Path
) -> None:
    arguments = ("--engine", "transformers-serve", *as_settings(*CONCURRENCY))
    done = run_smollm2(shell, smollm2, texts, *arguments)
    record = check_record(shell, done)
    details = record["engine"]["details"]
    assert (details["is_external"], details["server"]) == (False, "transformers-serve")
    assert details["prompts"] == "text"
    assert str(smollm2.parent) not in json.dumps(record)
    assert record["weights"]["source"] == "huggingface"
    # a seeded tenth of the requests, scored again by teacher forcing with the same weights
    distances = record["outputs"]["passes"]["check"]
    assert len(distances["numbers"]) == 4
    assert max(distances["largest"]) < 0.05
    assert shell.wait_until_ended(10.0)


@pytest.mark.parametrize(
    "killed",
    ["worker", *(pytest.param(name, marks=pytest.mark.long) for name in ("agent", "parent"))],
)
def test_a_killed_run_leaves_no_server_behind(
    killed: str, shell: Shell, smollm2: Path, texts: Path
) -> None:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    process = shell.start(
        *("run", "--model", smollm2, "--task", "generate", "--data", texts, "--precision", "fp32"),
        *("--engine", "transformers-serve", "--accelerator", "cpu", *settings),
        *("--out", shell.out),
    )
    modules = {"worker": "steelyard.run.worker", "agent": "steelyard.run.node"}

    def find(module: str) -> list[psutil.Process]:
        """Return this test's processes that run a module."""
        return [one for one in shell.processes() if module in one.cmdline()]

    assert wait_for(lambda: find(TRANSFORMERS_SERVE.module), 120.0)
    if killed == "parent":
        process.kill()
    else:
        find(modules[killed])[0].kill()
    process.wait(60)
    assert shell.wait_until_ended(30.0)


@pytest.mark.parametrize(
    ("load", "api"),
    [
        pytest.param(RATE, "completions", id="rate"),
        pytest.param(CONCURRENCY, "chat", id="concurrency", marks=pytest.mark.long),
    ],
)
def test_a_server_of_the_user_answers_every_request(
    shell: Shell, smollm2: Path, texts: Path, endpoint: str, load: tuple[str, ...], api: str
) -> None:
    settings = (
        f"engine.endpoint={endpoint}",
        f"engine.model={smollm2}",
        f"engine.api={api}",
        *load,
    )
    done = run_smollm2(shell, smollm2, texts, "--engine", "http", *as_settings(*settings))
    record = check_record(shell, done)
    assert record["weights"] == {"source": "unknown"}
    details = record["engine"]["details"]
    assert details["is_external"] is True
    # a chat's template adds the same tokens to each prompt
    assert (details.get("template_tokens", 0) > 0) is (api == "chat")
    assert "check" not in record["outputs"]["passes"]
