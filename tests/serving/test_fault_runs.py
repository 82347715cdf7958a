"""Whole runs against a server that fails in the pass: each leaves one record with the outcome of
every request, ends in time, and leaves no process behind.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fixtures.commands import SRC, CommandResult, Shell
from fixtures.serving import start_mock
from steelyard.data.request_outcomes import OUTCOMES
from steelyard.record.request_samples import RequestSamples

pytestmark = pytest.mark.process
CASE = "llama3-8b-generate"
WARMUPS = 5  # one that finds out how prompts are sent, and one for each of four slots
REQUESTS = 6
VOCAB = ("--vocab", "500")


def run_http(shell: Shell, endpoint: str, *settings: str, **variables: str) -> CommandResult:
    """Run the smoke case against a server, with six requests."""
    options = [part for setting in settings for part in ("--set", setting)]
    return shell(
        *("run", CASE, "--size", "smoke", "--accelerator", "cpu", "--engine", "http"),
        *("--set", f"engine.endpoint={endpoint}", "--sample", REQUESTS, *options),
        *("--out", shell.out),
        **variables,
    )


def read_outcomes(record: dict[str, Any]) -> list[str]:
    """Return the outcome of each request of a record."""
    table = RequestSamples.model_validate(record["requests"][0]).table
    return [OUTCOMES[code] for code in table.outcome]


def test_a_run_against_a_server_is_valid_and_states_what_it_is(shell: Shell) -> None:
    with start_mock(*VOCAB, "--cached", "0") as endpoint:
        done = run_http(shell, endpoint, "engine.device=one chip", "engine.logprobs=true")
    assert done.code == 0, done.err
    [record] = shell.records()
    assert read_outcomes(record) == ["ok"] * REQUESTS
    details = record["engine"]["details"]
    assert details["mock_requests"] == 4
    assert details.pop("mock_error_us")[0] >= 0
    assert details == {
        "endpoint": endpoint,
        "is_external": True,
        "device": "one chip",
        "devices": 1,
        "model": "mock",
        "server": "steelyard",
        "version": "mock-1",
        "api": "completions",
        "prompts": "ids",
        "scheduling": "server",
        "logprobs": True,
        "mock_requests": 4,
        "cached_tokens": 0,
        "queue_peak": 3,
        "preemptions": 0,
        "checked_by": "logprobs",
    }
    assert record["weights"] == {"source": "unknown"}
    assert record["outputs"]["passes"]["check"] == {
        "numbers": [*range(REQUESTS)],
        "compared": [8] * REQUESTS,
        "exact": [8] * REQUESTS,
        "largest": [0.0] * REQUESTS,
    }
    assert shell.wait_until_ended(5.0)


FAULTS = {
    "500": (("--fault", "status"), "refused"),
    "422": (("--fault", "status", "--status", "422"), "refused"),
    "cut": (("--fault", "cut"), "cut"),
    "garbage": (("--fault", "garbage"), "garbage"),
    "empty": (("--fault", "empty"), "empty"),
    "silence": (("--fault", "silence"), "timeout"),
    "hangs": (("--fault", "hang"), "timeout"),
    "floods": (("--fault", "flood"), "flooded"),
    "floods with tokens": (("--fault", "lines"), "flooded"),
}


@pytest.mark.parametrize(
    "name",
    [name if name == "cut" else pytest.param(name, marks=pytest.mark.full) for name in FAULTS],
)
def test_a_server_that_fails_in_the_pass_leaves_a_record_with_the_outcome(
    name: str, shell: Shell
) -> None:
    options, outcome = FAULTS[name]
    with start_mock(*VOCAB, *options, "--fault-after", str(WARMUPS + 2)) as endpoint:
        done = run_http(shell, endpoint, "engine.timeout_s=1")
    [record] = shell.records()
    assert done.code == 1, done.err
    assert sorted(read_outcomes(record)) == sorted(["ok"] * 2 + [outcome] * (REQUESTS - 2))
    assert "requests" in {reason["code"] for reason in record["reasons"]}
    assert record["requests"][0]["errors"]
    assert shell.wait_until_ended(5.0)


@pytest.mark.full
def test_a_run_that_is_ended_in_the_pass_is_marked_declared(shell: Shell) -> None:
    settings = ("engine.device=One", "engine.devices=2", "engine.timeout_s=60")
    options = ("--fault", "hang", "--fault-after", str(WARMUPS))
    with start_mock(*VOCAB, *options) as endpoint:
        done = shell(
            *("run", CASE, "--size", "smoke", "--accelerator", "cpu", "--engine", "http"),
            *("--set", f"engine.endpoint={endpoint}", "--sample", REQUESTS, "--time-limit", "8"),
            *(part for setting in settings for part in ("--set", setting)),
            *("--out", shell.out),
        )
    [record] = shell.records()
    assert (done.code, record["status"]) == (1, "failed"), done.err
    details = record["engine"]["details"]
    assert details == {"is_external": True, "device": "One", "devices": 2}
    assert shell.wait_until_ended(5.0)


@pytest.mark.full
def test_a_server_that_dies_in_the_pass_leaves_a_record(shell: Shell) -> None:
    options = ("--fault", "die", "--fault-after", str(WARMUPS + 2), "--tpot-s", "0.02")
    with start_mock(*VOCAB, *options) as endpoint:
        done = run_http(shell, endpoint)
    assert done.code == 1, done.err
    outcomes = read_outcomes(shell.records()[0])
    assert len(outcomes) == REQUESTS
    assert {"unreachable"} < set(outcomes) <= {"ok", "cut", "unreachable"}
    assert shell.wait_until_ended(5.0)


STAND_IN = """#!{python}
import os, sys
arguments = sys.argv[1:]
if "vllm.entrypoints.openai.api_server" in arguments:
    print("EngineDeadError: no core", file=sys.stderr, flush=True)
    port = arguments[arguments.index("--port") + 1]
    arguments = ["-m", "steelyard.engines.http.mock_server", "--port", port, *{options!r}]
    reader, writer = os.pipe()  # the mock server ends with its input
    os.dup2(reader, 0)
    os.set_inheritable(writer, True)
os.execv("{python}", ["{python}", *arguments])
"""


@pytest.mark.full
def test_a_server_that_was_started_here_and_dies_in_the_pass_leaves_a_record(
    shell: Shell, tmp_path: Path
) -> None:
    """The mock server in place of vLLM, by an interpreter that starts it for vLLM's module."""
    options = [*VOCAB, "--fault", "die", "--fault-after", str(WARMUPS + 2), "--tpot-s", "0.02"]
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, options=options))
    python.chmod(0o755)
    done = shell(
        *("run", CASE, "--size", "smoke", "--accelerator", "cpu", "--engine", "vllm"),
        *("--set", f"engine.python={python}", "--sample", REQUESTS, "--out", shell.out),
    )
    assert done.code == 1, done.err
    [record] = shell.records()
    assert {"unreachable"} < set(read_outcomes(record)) <= {"ok", "cut", "unreachable"}
    assert "requests" in {reason["code"] for reason in record["reasons"]}
    details = record["engine"]["details"]
    assert details["server_exit_code"] == -9
    assert details["server_said"] == "EngineDeadError: no core"
    assert "PORT" in details["arguments"]
    assert shell.wait_until_ended(10.0)


@pytest.mark.parametrize("distance", [2, 2_000_000])
def test_what_an_answer_says_counts_although_its_connection_stays_open(
    distance: int, shell: Shell
) -> None:
    """The stream ends a second after its last event: nobody waits for that."""
    lies = ("--cached", "48", "--distance", str(distance), "--linger-s", "2")
    with start_mock(*VOCAB, *lies) as endpoint:
        done = run_http(shell, endpoint, "engine.logprobs=true")
    assert done.code == 1, done.err
    [record] = shell.records()
    assert {reason["code"] for reason in record["reasons"]} == {"warm_cache", "wrong_answers"}
    assert record["engine"]["details"]["cached_tokens"] == REQUESTS * 48
    largest = record["outputs"]["passes"]["check"]["largest"]
    assert largest == [min(distance, 1e6)] * REQUESTS


@pytest.mark.full
def test_a_server_that_ends_answers_early_leaves_an_invalid_record(shell: Shell) -> None:
    with start_mock(*VOCAB, "--early", "3") as endpoint:
        done = run_http(shell, endpoint)
    assert done.code == 1, done.err
    [record] = shell.records()
    assert "short_output" in {reason["code"] for reason in record["reasons"]}


REFUSALS = [
    (
        ("--rejects", "ignore_eos"),
        (),
        "the server cannot ignore the end of a text, so that answers are shorter than asked (status"
        ' 422: {"detail": "Unexpected fields: [\'ignore_eos\']"}); run with'
        " --set question.data.lengths=natural",
    ),
    (
        ("--rejects", "temperature"),
        (),
        'the server refuses requests of this case: status 422: {"detail": "Unexpected fields:'
        " ['temperature']\"}",
    ),
    (
        ("--rejects", "ids"),
        ("engine.api=chat",),
        "the prompts of this case are token ids without a text, which cannot be sent with"
        " engine.prompts=auto and engine.api=chat to this server; run with"
        ' --set question.data.source=texts --data FILE.jsonl (lines of {"text": …}; the tokenizer'
        " is the model folder's, or --tokenizer)",
    ),
    ((), ("engine.model=other",), "engine.model: the server has no 'other'; it has: mock"),
    (
        (),
        ("engine.key_variable=NO_SUCH_KEY",),
        "engine.key_variable: the environment variable NO_SUCH_KEY is not set; put the server's key"
        " into it, and run again",
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("options", "settings", "line"), REFUSALS)
def test_what_a_server_refuses_ends_the_run_in_one_line(
    options: tuple[str, ...], settings: tuple[str, ...], line: str, shell: Shell
) -> None:
    with start_mock(*VOCAB, *options) as endpoint:
        done = run_http(shell, endpoint, *settings)
    assert (done.code, shell.records()) == (2, [])
    assert f"error: {line}" in done.lines[-1]
    assert shell.wait_until_ended(5.0)


def test_no_server_at_the_address_ends_the_run_in_one_line(shell: Shell) -> None:
    with socket.socket() as unused:  # held, so that no other process listens there meanwhile
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        done = run_http(shell, endpoint)
    assert (done.code, shell.records()) == (2, [])
    assert done.lines[-1] == (
        f"error: no server answers at {endpoint}; start it, or correct engine.endpoint, which ends"
        " in /v1"
    )


KEY = "sk-Zt4Qx9Lw7Rv2Mn5B"


@pytest.mark.full
def test_a_key_reaches_the_server_and_no_record_error_or_file(shell: Shell) -> None:
    options = ("--key", KEY, *VOCAB, "--fault", "status", "--fault-after", str(WARMUPS))
    with start_mock(*options) as endpoint:
        good = run_http(shell, endpoint, "engine.key_variable=MY_KEY", MY_KEY=KEY)
        bad = run_http(shell, endpoint, "engine.key_variable=MY_KEY", MY_KEY=f"{KEY}-wrong")
    assert (good.code, bad.code) == (1, 2)
    assert read_outcomes(shell.records()[0]) == ["refused"] * REQUESTS
    assert "refuses the key (status 401)" in bad.lines[-1]
    for done in (good, bad):
        assert KEY not in done.out + done.err
    for path in shell.folder.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


MEMORY_PROGRAM = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from fixtures.serving import IDS, make_request, open_client, send
from steelyard.engines.http.mock_server import Script
with open_client(Script(), port=int(sys.argv[1])) as client:
    send(client, [make_request(0)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sink = send(client, [make_request(number) for number in range(1, 9)])
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print({end.outcome for end in sink.ends.values()}, (after - before) // 1024)
"""


@pytest.mark.parametrize("fault", ["flood", "lines"])
def test_a_flood_of_a_gigabyte_for_each_request_takes_little_memory(fault: str) -> None:
    with start_mock("--fault", fault, "--fault-after", "1") as endpoint:
        port = endpoint.removesuffix("/v1").rpartition(":")[2]
        tests = str(Path(__file__).parents[1])
        done = subprocess.run(
            [sys.executable, "-c", MEMORY_PROGRAM, port, tests],
            env={**os.environ, "PYTHONPATH": str(SRC)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    outcomes, _, growth_mib = done.stdout.rpartition(" ")
    assert outcomes == "{'flooded'}"
    assert int(growth_mib) < 64
