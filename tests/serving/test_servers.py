"""Servers that are started here: their command lines, their counters, the model that is written for
them, and how their process ends.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fixtures.serving import open_client
from steelyard.case.request import EngineSettings
from steelyard.case.resolve import resolve_case
from steelyard.data.prompts import PromptRequests, PromptSource
from steelyard.engine import engine_rows
from steelyard.engine.server_rows import MetricNames, ServerStart
from steelyard.engines.http import server_process
from steelyard.engines.http.client import HttpClient
from steelyard.engines.http.engine import merge_counters
from steelyard.engines.http.framework import HostFramework
from steelyard.engines.http.mock_server import Script
from steelyard.engines.http.ready_server import (
    connect_server,
    count_slots,
    find_concurrency,
    find_longest,
    hide_credentials,
    list_models,
    read_version,
)
from steelyard.engines.http.server_metrics import ServerCounters, parse_counters
from steelyard.engines.http.server_process import ServerError, ServerProcess
from steelyard.engines.http.servers import KNOWN_METRICS, TRANSFORMERS_SERVE, VLLM
from steelyard.engines.http.warm_up import choose_format, send_requests
from steelyard.errors import RequestError
from steelyard.run.worker_files import check_json_value

CASE = "llama3-8b-generate"
# From https://docs.vllm.ai/en/stable/design/metrics/ and /usage/metrics/: vLLM's names, with the
# suffix _total that the Prometheus client adds to counters.
VLLM_METRICS = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="model"} 8.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="model"} 5.0
vllm:num_requests_waiting{engine="1",model_name="model"} 2.0
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="model"} 3.0
# HELP vllm:prefix_cache_hits_total Prefix cache hits, in terms of number of cached tokens.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="model"} 1.024e+03
vllm:prefix_cache_hits_created{engine="0",model_name="model"} 1.7e+09
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="model"} 4.0
"""


def make_start(
    *settings: str, precision: str | None = None, division: str | None = None, **changes
):
    """Return what a server's arguments are made from, for the smoke case."""
    case = resolve_case(CASE, "smoke", precision, division, list(settings)).case
    start = ServerStart(case, Path("/models/tiny"), 1, "cpu", 4321, 120, 4)
    return replace(start, **changes)


def test_the_command_line_of_transformers_serve() -> None:
    assert TRANSFORMERS_SERVE.make_arguments(make_start()) == [
        *("serve", "/models/tiny", "--host", "127.0.0.1", "--port", "4321", "--device", "cpu"),
        *("--dtype", "float32", "--continuous-batching", "--cb-max-batch-tokens", "256"),
        *("--cb-block-size", "32", "--cb-num-blocks", "25"),
    ]
    arguments = TRANSFORMERS_SERVE.make_arguments(make_start(precision="bf16", accelerator="gpu"))
    assert arguments[6:] == [
        *("--device", "gpu", "--dtype", "bfloat16", "--continuous-batching"),
        *("--cb-max-batch-tokens", "256"),
    ]
    assert TRANSFORMERS_SERVE.model_name(Path("/models/tiny")) == "/models/tiny"


def test_the_command_line_of_vllm_is_that_of_its_documentation() -> None:
    """The options are those of https://docs.vllm.ai/en/stable/cli/serve/."""
    common = [
        *("--model", "/models/tiny", "--served-model-name", "model", "--host", "127.0.0.1"),
        *("--port", "4321"),
    ]
    limits = ["--max-model-len", "120", "--max-num-seqs", "4", "--generation-config", "vllm"]
    assert VLLM.make_arguments(make_start(tp=2)) == [
        *(*common, "--dtype", "float32", "--tensor-parallel-size", "2", *limits),
        *("--seed", "0", "--no-enable-prefix-caching"),
    ]
    assert VLLM.make_arguments(make_start(precision="fp8", division="open")) == [
        *(*common, "--dtype", "bfloat16", "--tensor-parallel-size", "1", *limits),
        *("--seed", "0", "--quantization", "fp8", "--enable-prefix-caching"),
    ]
    assert VLLM.model_name(Path("/models/tiny")) == "model"


@pytest.mark.parametrize(
    ("row", "added", "option"),
    [
        (VLLM, ["--gpu-memory-utilization", "0.8", "--enforce-eager"], None),
        (TRANSFORMERS_SERVE, ["--attn-implementation=eager"], None),
        (VLLM, ["--enforce-eager", "--enable-prefix-caching"], "--enable-prefix-caching"),
        (VLLM, ["--speculative_config={}"], "--speculative_config={}"),
        (VLLM, ["--quant=fp8"], "--quant=fp8"),
        (VLLM, ["--max-num-seqs", "1"], "--max-num-seqs"),
        (TRANSFORMERS_SERVE, ["--dtype", "float16"], "--dtype"),
        (TRANSFORMERS_SERVE, ["--no-continuous-batching"], "--no-continuous-batching"),
    ],
)
def test_arguments_that_change_what_is_computed_are_found(row, added, option) -> None:
    assert row.find_reserved_option(row.make_arguments(make_start()), added) == option


def test_a_server_is_told_of_all_requests_of_a_load() -> None:
    assert [
        count_slots(resolve_case(CASE, "smoke", None, None, [setting]).case, make_requests(), 256)
        for setting in ("load.concurrency=512", "load.mode=offline")
    ] == [256, 12]
    case = resolve_case(CASE, "smoke", None, None, ["load.concurrency=512"]).case
    assert find_concurrency(case) == 512


@pytest.mark.parametrize(
    ("text", "counters"),
    [
        (VLLM_METRICS, ServerCounters(1024, 7, 3)),
        ("sglang:cached_tokens_total 12\nsglang:num_queue_reqs 1 1700000000\n", (12, 1, None)),
        ("process_cpu_seconds_total 5.0\n", (None, None, None)),
        ("vllm:num_requests_waiting NaN\nvllm:prefix_cache_hits_total -3\n", (None, None, None)),
        ("vllm:prefix_cache_hits_total 1e99\nvllm:num_requests_waiting 1.2.3\n", (None,) * 3),
        ("", (None, None, None)),
    ],
)
def test_counters_of_a_server(text: str, counters: tuple) -> None:
    expected = counters if isinstance(counters, ServerCounters) else ServerCounters(*counters)
    assert parse_counters(text, KNOWN_METRICS) == expected
    assert parse_counters(text, (MetricNames(),)) == ServerCounters()


def test_a_server_that_stops_at_the_end_of_a_text_runs_natural_lengths_alone() -> None:
    exact, natural = (
        resolve_case(CASE, "smoke", None, None, [f"question.data.lengths={lengths}"]).case
        for lengths in ("exact", "natural")
    )
    assert TRANSFORMERS_SERVE.refusal(exact) == (
        "engine transformers-serve cannot ignore the end of a text, so that answers are shorter"
        " than asked; allowed: --set question.data.lengths=natural"
    )
    assert [row.refusal(natural) for row in (TRANSFORMERS_SERVE, VLLM)] == [None, None]
    assert VLLM.refusal(exact) is None


def test_settings_that_an_engine_lacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    case = resolve_case(CASE, "smoke", None, None, ["question.data.lengths=natural"]).case
    monkeypatch.setattr(engine_rows.plugins, "is_installed", lambda module: False)
    settings = EngineSettings()
    explain = {
        row.name: row.explain_missing_setting(case, settings)
        for row in (engine_rows.TORCH, engine_rows.HTTP, engine_rows.VLLM)
    }
    assert explain == {
        "torch": None,
        "http": (
            "engine http sends requests to a server; name it: --set"
            " engine.endpoint=http://127.0.0.1:8000/v1"
        ),
        "vllm": (
            "engine vllm starts a server that needs vllm, which is not installed here; name a"
            " Python that has it: --set engine.python=venv/bin/python"
        ),
    }
    elsewhere = EngineSettings(python="venv/bin/python", endpoint="http://127.0.0.1:1/v1")
    for row in (engine_rows.HTTP, engine_rows.VLLM):
        assert row.explain_missing_setting(case, elsewhere) is None


def make_requests(prompt_rule="data", output_rule=(4, 9), lengths="exact") -> PromptRequests:
    """Return requests whose prompts are 20 and 30 tokens long by the data."""
    source = PromptSource((), None, (20, 30), (5, 6))
    rules = (prompt_rule, output_rule, lengths)
    return PromptRequests(source, 12, *rules, vocab=512, positions=110, seed=1, salt="ab" * 16)


def test_the_longest_row_and_the_slots_of_a_load() -> None:
    assert find_longest(make_requests()) == 30 + 9 + 64
    assert find_longest(make_requests(40, "data")) == 110  # the positions of the model
    case = resolve_case(CASE, "smoke").case
    assert [count_slots(case, make_requests(), limit) for limit in (2, 100)] == [2, 4]
    offline = resolve_case(CASE, "smoke", None, None, ["question.load.mode=offline"]).case
    assert count_slots(offline, make_requests(), 100) == 12


@pytest.mark.parametrize(
    ("rejects", "sends_ids", "asks_ids"),
    [
        ("", True, True),
        ("return_token_ids", True, False),
    ],
)
def test_the_first_way_that_a_server_takes_is_chosen(
    rejects: str, sends_ids: bool, asks_ids: bool
) -> None:
    with open_client(Script(rejects=rejects)) as client:
        server = make_server(client)
        form = choose_format(server, EngineSettings(), make_requests(32, 4))
    assert (form.sends_ids, form.asks_ids, form.is_exact) == (sends_ids, asks_ids, True)


def test_prompts_become_words_where_ids_are_refused() -> None:
    with open_client(Script(rejects="ids,return_token_ids")) as client:
        server = replace(make_server(client), word_width=4)
        form = choose_format(server, EngineSettings(), make_requests(32, 4))
        assert (form.sends_ids, form.asks_ids, form.word_width) == (False, False, 4)
        with pytest.raises(RequestError, match=r"takes no token ids.*source=texts"):
            choose_format(make_server(client), EngineSettings(), make_requests(32, 4))
        with pytest.raises(RequestError, match=r"engine\.prompts=text"):
            choose_format(make_server(client), EngineSettings(prompts="text"), make_requests(32, 4))


def make_server(client):
    """Return a server that was not started here."""
    from steelyard.engines.http.ready_server import ReadyServer

    return ReadyServer(client, "mock", {}, {"source": "unknown"}, KNOWN_METRICS)


def test_a_server_says_what_it_is() -> None:
    with open_client(Script()) as client:
        assert list_models(client) == {"mock": "steelyard"}
        assert read_version(client) == "mock-1"
    with (
        open_client(Script(key="k" * 20)) as client,
        pytest.raises(RequestError, match="refuses the key"),
    ):
        list_models(client)


def test_what_a_server_says_of_itself_is_kept_without_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that repeats the header of authorization wherever it names something."""
    key = "sk-Zt4Qx9Lw7Rv2Mn5B"
    said = f"{'.' * 190}Bearer {key}"
    pages = {
        "models": {"data": [{"id": f"m {key}", "owned_by": said}, {"id": key}]},
        "version": {"version": said},
    }

    def get(client: HttpClient, address: str, timeout_s: float = 10.0) -> tuple[int, bytes]:
        return 200, json.dumps(pages[address.rpartition("/")[2]]).encode()

    monkeypatch.setattr(HttpClient, "get", get)
    monkeypatch.setenv("SERVER_KEY", key)
    settings = EngineSettings(endpoint="http://127.0.0.1:1/v1", key_variable="SERVER_KEY")
    server = connect_server(SimpleNamespace(settings=settings, engine="http"))
    server.close()
    assert server.model == f"m {key}"  # by this name it is asked for
    assert server.details == {
        "endpoint": "http://127.0.0.1:1/v1",
        "is_external": True,
        "device": None,
        "devices": 1,
        "model": "m ***",
        "server": f"{'.' * 190}Bearer ***",
        "version": f"{'.' * 190}Bearer ***",
    }
    wanted = settings.model_copy(update={"model": "other"})
    with pytest.raises(RequestError) as caught:
        connect_server(SimpleNamespace(settings=wanted, engine="http"))
    assert str(caught.value) == "engine.model: the server has no 'other'; it has: m ***, ***"


def test_half_a_surrogate_pair_of_a_server_does_not_lose_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A record is UTF-8, which has no place for it; the model is asked for by its own name."""
    lone = "v\\ud800"
    pages = {
        "models": f'{{"data": [{{"id": "{lone}", "owned_by": "{lone}"}}]}}',
        "version": f'{{"version": "{lone}"}}',
    }

    def get(client: HttpClient, address: str, timeout_s: float = 10.0) -> tuple[int, bytes]:
        return 200, pages[address.rpartition("/")[2]].encode()

    monkeypatch.setattr(HttpClient, "get", get)
    settings = EngineSettings(endpoint="http://127.0.0.1:1/v1")
    server = connect_server(SimpleNamespace(settings=settings, engine="http"))
    server.close()
    check_json_value("details", server.details)
    assert [server.details[name] for name in ("model", "server", "version")] == ["v?"] * 3
    assert server.model == "v\ud800"


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("https://me:secret@host/v1?key=secret#x", "https://host/v1"),
        ("http://[::1]:18102/v1", "http://[::1]:18102/v1"),
        ("http://[fe80::2]", "http://[fe80::2]"),
    ],
)
def test_addresses_are_shown_without_credentials(address: str, shown: str) -> None:
    assert hide_credentials(address) == shown


@pytest.mark.parametrize(
    ("said", "counted", "cached"),
    [(None, None, None), (5, None, 5), (None, 3, 3), (5, 0, 5), (5, 7, 7), (0, 0, 0)],
)
def test_the_larger_number_of_cached_tokens_is_kept(
    said: int | None, counted: int | None, cached: int | None
) -> None:
    """A counter of /metrics that stays at 0 does not hide what usage said of the answers."""
    found = {"queue_peak": 2} | ({} if counted is None else {"cached_tokens": counted})
    expected = {"queue_peak": 2} | ({} if cached is None else {"cached_tokens": cached})
    assert merge_counters(said, found) == expected


def test_the_framework_of_a_server_has_the_clock_of_the_host_alone() -> None:
    times = iter([2.0, 5.5])
    framework = HostFramework(None, 0, lambda: next(times))
    first, last = framework.event(), framework.event()
    assert first.elapsed_s(last) == 3.5
    assert framework.device is None
    assert framework.memory() == {"allocated_bytes": None, "reserved_bytes": None}
    assert (framework.identity(), framework.versions()) == ({}, {})


def test_random_weights_are_written_with_a_tokenizer_of_their_words(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tokenizers = pytest.importorskip("tokenizers")
    from steelyard.engines.http.word_vocabulary import format_words, parse_words
    from steelyard.models.llama_init import (
        build_llama,
        fill_random_llama_weights,
        get_llama_shape,
    )
    from steelyard.weights import llama_weights
    from steelyard.weights.random_checkpoint import write_random_checkpoint

    model = resolve_case(CASE, "smoke").case.question.model
    words = [f"t{token:03}" for token in range(model.vocab)]
    folder = tmp_path / "model"
    write_random_checkpoint(model, 7, "bf16", folder, words)
    with pytest.raises(FileExistsError):
        write_random_checkpoint(model, 7, "bf16", folder, words)
    shape, device = get_llama_shape(model), torch.device("cpu")
    drawn, read = (build_llama(model, device, torch.bfloat16) for _ in range(2))
    fill_random_llama_weights(drawn, 7)
    llama_weights.load_llama(read, folder, shape)
    for name, parameter in drawn.named_parameters():
        assert torch.equal(parameter, read.get_parameter(name)), name
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = format_words([0, 12, 511], 4)
    assert (text, tokenizer.encode(text).ids) == ("t000 t012 t511", [0, 12, 511])
    assert parse_words("t000t012t511", 4) == [0, 12, 511]
    for bad in ("t0", "x012", "t 12", "t0a2", "t٠١٢"):
        with pytest.raises(ValueError, match="not a word"):
            parse_words(bad, 4)


SERVER = """
import os, subprocess, sys, time
mode = sys.argv[1]
print("a line of its output", flush=True)
if mode == "dies":
    raise SystemExit("ValueError: no such model")
if mode == "memory":
    raise MemoryError("no more")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(child.pid, flush=True)
if mode == "floods":
    for _ in range(200):
        print("x" * (1 << 16))
time.sleep(300)
"""


@pytest.fixture
def own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A row whose server is a module of this test."""
    (tmp_path / "test_own_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return replace(TRANSFORMERS_SERVE, module="test_own_server")


@pytest.mark.process
@pytest.mark.parametrize(
    ("mode", "error", "said"),
    [
        (
            "dies",
            ServerError,
            "ended with exit code 1 before it was ready; it said: ValueError",
        ),
        ("memory", MemoryError, "ended with exit code 1 before it was ready; it said: MemoryError"),
        ("hangs", ServerError, "still runs not ready after 1 s"),
        ("floods", ServerError, "still runs not ready after 1 s"),
    ],
)
def test_a_server_that_does_not_become_ready_is_ended_with_its_children(
    own_server, mode: str, error: type[Exception], said: str
) -> None:
    server = ServerProcess(own_server, sys.executable, [mode])
    with open_client(Script(), port=1) as client, pytest.raises(error, match=said):
        server.wait_until_ready(client, 1.0)
    assert server.exit_code is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(server._process.pid, 0)
    server.end()
    assert sum(map(len, server._tail)) <= 2 * server_process.TAIL_BYTES


@pytest.mark.process
def test_a_python_that_cannot_be_started_is_refused() -> None:
    with pytest.raises(RequestError, match=r"engine\.python '/no/python' cannot be started"):
        ServerProcess(TRANSFORMERS_SERVE, "/no/python", [])
    assert server_process.read_package_version("/no/python", "pip") is None
    assert server_process.read_package_version(sys.executable, "no-such-package") is None
    assert server_process.read_package_version(sys.executable, "pydantic")


def test_rows_name_existing_servers() -> None:
    rows = [row for row in engine_rows.SHIPPED_ENGINES if row.server]
    assert {row.name: engine_rows.plugins.load_reference(row.server).name for row in rows} == {
        "transformers-serve": "transformers-serve",
        "vllm": "vllm",
    }
    assert ["on an accelerator" in row.untried for row in rows] == [True, True]


def test_the_tokens_of_a_chats_template_are_found_and_taken_off() -> None:
    """The mock server counts the words of a prompt: eight of hex digits, 24 others, and two of its
    template.
    """
    with open_client(Script(template_tokens=2)) as client:
        server = replace(make_server(client), word_width=4)
        settings = EngineSettings(api="chat")
        form = choose_format(server, settings, make_requests(32, 4))
        assert form.template_tokens == 2
        plain = choose_format(server, EngineSettings(prompts="text"), make_requests(32, 4))
        assert plain.template_tokens == 0
        [end] = send_requests(client, form, [make_requests(32, 4).make(0)])
    assert end.prompt_tokens == 32
