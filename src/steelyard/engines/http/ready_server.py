"""Make a server ready: connect to one that the user names, or start one by its row with the case's
model.
"""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from steelyard import plugins
from steelyard.case.case import Case
from steelyard.data.prompts import LengthRule, PromptRequests
from steelyard.engine.job import Job, Part
from steelyard.engine.server_rows import SEND_TEXTS, MetricNames, ServerRow, ServerStart
from steelyard.engines.http import server_process
from steelyard.engines.http.client import HttpClient
from steelyard.engines.http.server_process import ServerProcess
from steelyard.engines.http.servers import KNOWN_METRICS, LOOPBACK
from steelyard.engines.http.word_vocabulary import find_word_width, format_word
from steelyard.errors import RequestError

READY_S = 1800.0  # for a server to load a large model
SPARE_TOKENS = 64  # that a text may have beyond the ids it was made from
MAX_SLOTS = 256  # that a server is told of, where the load has no number
MAX_SHOWN, MAX_NAME_CHARS = 10, 200
NAME_THE_MODEL = "--set engine.model=NAME"
# what to do about a list of models with this status; for any other, the model is to be named
LIST_REMEDIES = {
    404: (
        "engine.endpoint ends in /v1 on most servers; if this one has no list, name the model with"
        f" {NAME_THE_MODEL}"
    )
}
WRITER = "steelyard.weights.random_checkpoint:write_random_checkpoint"
OPENER = "steelyard.weights.llama_weights:open_llama_checkpoint"
DESCRIBER = "steelyard.weights.checkpoint_tensors:describe_source"
LLAMA = "llama"


@dataclass(frozen=True)
class ReadyServer:
    """A server that answers: the open `client`, the name of its `model`, what is known of it
    (`details`, for the record), the source of its `weights`, and the `process`, if it was started
    here. `metrics` are the names that its /metrics may have, `takes_ids` whether prompts may be
    token ids. `written_weights` is the folder of random weights that was written for it (None:
    none), `word_width` the width of the words of their tokenizer (0: none).
    """

    client: HttpClient
    model: str
    details: dict[str, Any]
    weights: dict[str, Any]
    metrics: Sequence[MetricNames]
    takes_ids: bool = True
    process: ServerProcess | None = None
    written_weights: Path | None = None
    word_width: int = 0

    @property
    def root(self) -> str:
        """The address of the server without the version of its interface."""
        return self.client.endpoint.removesuffix("/v1")

    def close(self) -> None:
        """Close all connections, and end the server if it was started here."""
        self.client.close()
        if self.process is not None:
            self.process.end()


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a model for a server: its `path`, the source of its `weights` for the record,
    and, if it was written here, the width of its tokenizer's words (`word_width`; 0: it was not).
    """

    path: Path
    weights: dict[str, Any] = field(default_factory=dict)
    word_width: int = 0


def read_key(name: str | None) -> str | None:
    """Return the key of a server from the environment variable of this name; None without a name.
    Raises RequestError if it is not set.
    """
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise RequestError(
            f"engine.key_variable: the environment variable {name} is not set; put the server's"
            " key into it, and run again"
        )
    return key


def connect_server(job: Job) -> ReadyServer:
    """Return the server that the settings name, which was not started here. Raises RequestError if
    no endpoint is named, no server answers there, it does not know the key, or it has not the
    model.
    """
    settings = job.settings
    if settings.endpoint is None:
        raise RequestError(
            f"engine {job.engine} sends requests to a server; name it: --set"
            " engine.endpoint=http://127.0.0.1:8000/v1"
        )
    client = HttpClient(settings.endpoint, read_key(settings.key_variable), settings.timeout_s)
    client.open()
    try:
        models = list_models(client, is_needed=settings.model is None)
        model = _choose_model(client, models, settings.model)
        details = {
            "endpoint": hide_credentials(settings.endpoint),
            "is_external": True,
            "device": settings.device,
            "devices": settings.devices,
            "model": Path(client.hide_key(model)).name,
            "server": models.get(model),
            "version": read_version(client),
        }
    except RequestError:
        client.close()
        raise
    return ReadyServer(client, model, details, {"source": "unknown"}, KNOWN_METRICS)


def start_server(job: Job, row: ServerRow, part: Part) -> ReadyServer:
    """Start the server of a row with the case's model, and return it when it is ready. Raises
    RequestError if the case or its weights are none for it, ServerError or MemoryError if it ends
    before, or is not ready in half an hour.
    """
    refusal = row.refusal(job.case)
    if refusal is not None:
        raise RequestError(refusal)
    # random weights are written with a tokenizer of their own, by which ids become words
    needs_text = job.weights is not None and not row.takes_ids
    if needs_text and job.inputs.make_warmup(0).text is None:
        raise RequestError(
            f"engine {row.name} takes no token ids, and the prompts of this case have no text; run"
            f" with {SEND_TEXTS}"
        )
    with part("weights"):
        folder = find_model_folder(job)
    port = server_process.find_free_port()
    start = ServerStart(
        case=job.case,
        folder=folder.path,
        tp=job.plan.tp,
        accelerator=job.accelerator,
        port=port,
        longest_tokens=find_longest(job.inputs),
        slots=find_concurrency(job.case) or min(MAX_SLOTS, job.inputs.count),
    )
    python = job.settings.python or sys.executable
    arguments = [*row.make_arguments(start), *_read_arguments(job, row, start)]
    with part("server"):
        hidden = () if job.settings.key_variable is None else (job.settings.key_variable,)
        process = ServerProcess(row, python, arguments, hidden)
        client = HttpClient(f"http://{LOOPBACK}:{port}/v1", None, job.settings.timeout_s)
        client.open()
        process.wait_until_ready(client, READY_S)
    details = {
        "is_external": False,
        "model": folder.path.name,
        "server": row.name,
        "version": read_version(client) or server_process.read_package_version(python, row.package),
        "arguments": _show_arguments(arguments, folder.path, port),
    }
    return ReadyServer(
        client,
        row.model_name(folder.path),
        details,
        folder.weights,
        (row.metrics,),
        row.takes_ids,
        process,
        folder.path if folder.word_width else None,
        folder.word_width,
    )


def _show_arguments(arguments: Sequence[str], folder: Path, port: int) -> str:
    """Return the arguments of a server as a record keeps them: with the folder's name alone, and
    without the port, which is another in every run.
    """
    shown = ["PORT" if argument == str(port) else argument for argument in arguments]
    return " ".join(shown).replace(str(folder), folder.name)


def _read_arguments(job: Job, row: ServerRow, start: ServerStart) -> list[str]:
    """Return the arguments that the user adds to the command line of a server. Raises RequestError
    for those that the run sets itself, and that change what is computed.
    """
    added = shlex.split(job.settings.arguments)
    option = row.find_reserved_option(row.make_arguments(start), added)
    if option is not None:
        raise RequestError(
            f"engine.arguments: {option} is set by the run, or changes what is computed; leave it"
            " out, and change the case (--precision, --division, --parallel, --set load.KEY=VALUE)"
        )
    return added


def find_model_folder(job: Job) -> ModelFolder:
    """Return the folder of the model for a server: that of the job, or one with the case's random
    weights, which is written into the run's own folder. Raises RequestError for a folder that is
    not of this model, or for random weights of a family that cannot be written.
    """
    question = job.case.question
    if job.weights is not None:
        question.check_weights(job.weights)
        weights: dict[str, Any] = {"source": "huggingface"}
        if question.model.family == LLAMA:
            opened = plugins.load_reference(OPENER)(job.weights)
            weights = plugins.load_reference(DESCRIBER)(opened.headers, opened.count_parameters())
        return ModelFolder(job.weights.resolve(), weights)
    if question.model.family != LLAMA or job.folder is None:
        raise RequestError(
            f"engine {job.engine} needs a folder with weights of this model; name it with --weights"
        )
    folder = job.folder / "random-weights"
    width = find_word_width(question.model.vocab)
    words = [format_word(token, width) for token in range(question.model.vocab)]
    write = plugins.load_reference(WRITER)
    write(question.model, question.seed, question.precision.weights, folder, words)
    return ModelFolder(folder, {"source": "random", "seed": question.seed}, width)


def find_longest(requests: PromptRequests) -> int:
    """Return the most tokens that a prompt and its output have together, with some to spare, at
    most the model's positions.
    """
    prompts = _find_bound(requests.prompt_rule, requests.source.prompt_lens)
    outputs = _find_bound(requests.output_rule, requests.source.output_lens)
    return min(requests.positions, prompts + outputs + SPARE_TOKENS)


def _find_bound(rule: LengthRule, own: Sequence[int] | None) -> int:
    """Return the most tokens by a rule; `own` are the lengths of the data."""
    if isinstance(rule, int):
        return rule
    return rule[1] if isinstance(rule, tuple) else max(own or (0,))


def find_concurrency(case: Case) -> int | None:
    """Return how many requests a case's load has in flight at most; None if it sets no limit."""
    load = case.question.load
    return None if load is None else load.concurrency or load.max_concurrency


def count_slots(case: Case, requests: PromptRequests, limit: int) -> int:
    """Return how many requests the load has in flight at most: its number, or all, but not more
    than `limit`.
    """
    return max(1, min(limit, find_concurrency(case) or requests.count))


def list_models(client: HttpClient, is_needed: bool = False) -> dict[str, str | None]:
    """Return the models that a server lists, each with what it says that owns it; empty if it has
    no list. Raises RequestError if no server answers, or it does not know the key, or, where a list
    `is_needed`, if it answers with another status than 200.
    """
    answer = client.get(f"{client.endpoint}/models")
    address = hide_credentials(client.endpoint)
    if answer is None:
        raise RequestError(
            f"no server answers at {address}; start it, or correct engine.endpoint, which ends in"
            " /v1"
        )
    status, body = answer
    if status in (401, 403):
        raise RequestError(
            f"the server at {address} refuses the key (status {status}); name the variable that"
            " holds it: --set engine.key_variable=NAME"
        )
    if is_needed and status != 200:
        remedy = LIST_REMEDIES.get(status, f"name the model with {NAME_THE_MODEL}")
        raise RequestError(f"GET {address}/models: status {status}; {remedy}")
    rows = _parse_json(body).get("data") if status == 200 else None
    return {
        row["id"]: _as_text(client, row.get("owned_by"))
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict) and isinstance(row.get("id"), str)
    }


def _choose_model(client: HttpClient, models: dict[str, str | None], wanted: str | None) -> str:
    """Return the name of the model to ask for. Raises RequestError if there is none of the wanted
    name, or none is wanted and listed.
    """
    if wanted is not None and (wanted in models or not models):
        return wanted
    shown = ", ".join(map(client.hide_key, [*models][:MAX_SHOWN]))
    if wanted is not None:
        raise RequestError(f"engine.model: the server has no {wanted!r}; it has: {shown}")
    if not models:
        raise RequestError(
            f"the server lists no models; name one with {NAME_THE_MODEL} (transformers serve: the"
            " folder's path as you gave it)"
        )
    return next(iter(models))


def read_version(client: HttpClient) -> str | None:
    """Return the version that a server reports, None if it does not."""
    answer = client.get(f"{client.endpoint.removesuffix('/v1')}/version")
    if answer is None or answer[0] != 200:
        return None
    return _as_text(client, _parse_json(answer[1]).get("version"))


def _parse_json(body: bytes) -> dict[str, Any]:
    """Return a JSON object, empty if the body is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _as_text(client: HttpClient, value: Any) -> str | None:
    """Return a short text of a server for the record, without the key; None for what is no text."""
    return client.hide_key(value)[:MAX_NAME_CHARS] if isinstance(value, str) and value else None


def hide_credentials(address: str) -> str:
    """Return an address without user, password, query and fragment."""
    parts = urlsplit(address)
    port = "" if parts.port is None else f":{parts.port}"
    host = parts.hostname or ""
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}{port}{parts.path}"
