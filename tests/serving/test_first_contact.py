"""What a user reads who points a case at a server for the first time: one line that says what to
change.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fixtures.serving import open_client
from steelyard.case.request import EngineSettings
from steelyard.case.resolve import resolve_case
from steelyard.data.prompts import PromptRequests, PromptSource
from steelyard.engine.server_rows import ASK_NATURAL, SEND_TEXTS
from steelyard.engines.http import ready_server
from steelyard.engines.http.client import HttpClient
from steelyard.engines.http.mock_server import Script
from steelyard.engines.http.ready_server import ReadyServer, connect_server, start_server
from steelyard.engines.http.servers import KNOWN_METRICS, TRANSFORMERS_SERVE
from steelyard.engines.http.warm_up import choose_format
from steelyard.errors import RequestError

ADDRESS = "http://127.0.0.1:9/v1"
NO_END = """status 422: {"detail": "Unexpected fields: ['ignore_eos']"}"""
NO_PROMPT = """status 422: {"detail": "Unexpected fields: ['prompt']"}"""


class Words:
    """A tokenizer of one token for each character."""

    end = -1

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the code points of each text."""
        return [list(map(ord, text)) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """Return the text of code points."""
        return "".join(map(chr, ids))


def make_requests(lengths: str = "exact", has_text: bool = False) -> PromptRequests:
    """Return requests of 32 tokens in and 4 out: seeded ids, or ids with a text."""
    source = PromptSource((), Words() if has_text else None)
    return PromptRequests(source, 12, 32, 4, lengths, 512, 110, seed=1, salt="ab" * 16)


def read_refusal(
    script: Script, requests: PromptRequests, settings: EngineSettings | None = None
) -> str:
    """Return the line that ends a run before its pass with this server."""
    with open_client(script) as client:
        server = ReadyServer(client, "mock", {}, {"source": "unknown"}, KNOWN_METRICS)
        with pytest.raises(RequestError) as caught:
            choose_format(server, settings or EngineSettings(), requests)
    return str(caught.value)


def test_a_server_that_refuses_lengths_and_ids_is_told_of_both_at_once() -> None:
    assert read_refusal(Script(rejects="ids,ignore_eos"), make_requests()) == (
        "the server cannot ignore the end of a text, so that answers are shorter than asked"
        f" ({NO_END}), and takes no token ids, and the prompts of this case have no text"
        f" ({NO_PROMPT}); run with --set question.data.lengths=natural"
        ' --set question.data.source=texts --data FILE.jsonl (lines of {"text": …}; the tokenizer'
        " is the model folder's, or --tokenizer)"
    )


@pytest.mark.parametrize(
    ("rejects", "lengths", "has_text", "line"),
    [
        (
            "ignore_eos",
            "exact",
            False,
            "the server cannot ignore the end of a text, so that answers are shorter than asked"
            f" ({NO_END}); run with {ASK_NATURAL}",
        ),
        (
            "ids,ignore_eos",
            "exact",
            True,
            "the server cannot ignore the end of a text, so that answers are shorter than asked"
            f" ({NO_END}); run with {ASK_NATURAL}",
        ),
        *(
            (
                "ids",
                lengths,
                False,
                "the server takes no token ids, and the prompts of this case have no text"
                f" ({NO_PROMPT}); run with {SEND_TEXTS}",
            )
            for lengths in ("exact", "natural")
        ),
        (
            "temperature",
            "exact",
            False,
            "the server refuses requests of this case: "
            """status 422: {"detail": "Unexpected fields: ['temperature']"}""",
        ),
    ],
)
def test_a_refusal_names_what_the_server_takes(
    rejects: str, lengths: str, has_text: bool, line: str
) -> None:
    assert read_refusal(Script(rejects=rejects), make_requests(lengths, has_text)) == line


def test_prompts_that_must_be_ids_are_not_offered_as_texts() -> None:
    line = read_refusal(Script(rejects="ids"), make_requests(), EngineSettings(prompts="ids"))
    assert line == f"the server refuses requests of this case: {NO_PROMPT}"


@pytest.mark.parametrize(
    ("has_text", "prompts", "remedy"),
    [(False, "auto", SEND_TEXTS), (True, "ids", "--set engine.prompts=auto")],
)
def test_a_chat_takes_texts(has_text: bool, prompts: str, remedy: str) -> None:
    settings = EngineSettings(api="chat", prompts=prompts)
    line = read_refusal(Script(), make_requests("natural", has_text), settings)
    have = "texts" if has_text else "token ids without a text"
    assert line == (
        f"the prompts of this case are {have}, which cannot be sent with engine.prompts={prompts}"
        f" and engine.api=chat to this server; run with {remedy}"
    )


def test_a_wrong_address_or_name_is_named() -> None:
    line = read_refusal(
        Script(fault="status", status=404), make_requests("natural"), EngineSettings()
    )
    assert line.endswith(
        "; engine.endpoint ends in /v1 on most servers, engine.model is the server's name"
    )


@pytest.mark.parametrize("lengths", ["exact", "natural"])
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_server_that_answers_every_form_with_an_error_is_not_measured(
    api: str, lengths: str
) -> None:
    script = Script(fault="status", status=500)
    line = read_refusal(script, make_requests(lengths, has_text=True), EngineSettings(api=api))
    assert line == (
        'the server refuses requests of this case: status 500: {"error": "as the script says"}'
    )


def test_a_fault_without_a_status_is_left_to_the_pass() -> None:
    with open_client(Script(fault="cut")) as client:
        server = ReadyServer(client, "mock", {}, {"source": "unknown"}, KNOWN_METRICS)
        form = choose_format(server, EngineSettings(), make_requests())
    assert (form.sends_ids, form.asks_ids, form.is_exact) == (True, True, True)


@pytest.mark.parametrize(
    ("status", "body", "line"),
    [
        (
            404,
            {},
            f"GET {ADDRESS}/models: status 404; engine.endpoint ends in /v1 on most servers; if"
            " this one has no list, name the model with --set engine.model=NAME",
        ),
        (
            500,
            {},
            f"GET {ADDRESS}/models: status 500; name the model with --set engine.model=NAME",
        ),
        (
            200,
            {"data": []},
            "the server lists no models; name one with --set engine.model=NAME (transformers serve:"
            " the folder's path as you gave it)",
        ),
    ],
)
def test_a_list_of_models_that_is_missing_says_why(
    status: int, body: dict, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(client: HttpClient, url: str) -> tuple[int, bytes]:
        """Return the scripted list."""
        return status, json.dumps(body).encode()

    monkeypatch.setattr(ready_server.HttpClient, "get", answer)
    settings = EngineSettings(endpoint=ADDRESS)
    job = SimpleNamespace(engine="http", settings=settings)
    with pytest.raises(RequestError) as caught:
        connect_server(job)
    assert str(caught.value) == line
    job.settings = settings.model_copy(update={"model": "named"})
    server = connect_server(job)
    server.close()
    assert server.model == "named"


def test_a_case_of_ids_at_size_full_is_told_of_lengths_and_texts_at_once() -> None:
    full, smoke = (resolve_case("llama3-8b-generate", size).case for size in ("full", "smoke"))
    line = (
        "engine transformers-serve cannot ignore the end of a text, so that answers are shorter"
        " than asked; allowed: --set question.data.lengths=natural"
    )
    assert TRANSFORMERS_SERVE.refusal(smoke) == line
    assert TRANSFORMERS_SERVE.refusal(full) == f"{line} {SEND_TEXTS}"
    texts = resolve_case("llama2-7b-generate", "full").case
    assert TRANSFORMERS_SERVE.refusal(texts) == line
    assert replace(TRANSFORMERS_SERVE, takes_ids=True).refusal(full) == line


def test_ids_for_a_folder_whose_server_takes_texts_end_before_it_starts() -> None:
    case = resolve_case(
        "llama3-8b-generate", "full", None, None, ["question.data.lengths=natural"]
    ).case
    job = SimpleNamespace(
        engine="transformers-serve", case=case, weights=Path("m"), inputs=make_requests("natural")
    )
    with pytest.raises(RequestError) as caught:
        start_server(job, TRANSFORMERS_SERVE, None)
    assert str(caught.value) == (
        "engine transformers-serve takes no token ids, and the prompts of this case have no text;"
        f" run with {SEND_TEXTS}"
    )
