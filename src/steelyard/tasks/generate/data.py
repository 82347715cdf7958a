"""Read the prompts of generation: seeded token ids, texts, ShareGPT's file, or a trace of lengths
and arrivals.
"""

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard import files
from steelyard.data import corpus as corpus_files
from steelyard.data import jsonl
from steelyard.data.prompts import PromptRequests, PromptSource
from steelyard.data.tokenizer import Tokenizer, WordHashTokenizer
from steelyard.errors import RequestError
from steelyard.tasks.generate.answers import GenerateOutputs
from steelyard.tasks.generate.task import GenerateData
from steelyard.tasks.task import (
    DataFacts,
    PreparedData,
    TaskRequest,
    TokenizerFacts,
    is_published,
)

MAX_DOCUMENTS = 1000  # of a file of texts: prompts are runs of the first so many
MAX_LINE_BYTES = 16 << 20
MAX_SHAREGPT_BYTES = 2 << 30
MAX_TRACE_ROWS = 1_000_000
MAX_ARRIVAL = 1e15  # of a trace, in its unit
# The rule of the field for ShareGPT's file: first two turns, and these lengths in tokens.
SHAREGPT_LEAST, SHAREGPT_PROMPT, SHAREGPT_TOTAL = 4, 1024, 2048
SALT_ROOM = 32  # tokens by which a prompt must be longer, as its salt replaces the first ones
TEXT_FORMAT = 'a line is {"text": "…"}'
TRACE_FORMAT = 'a line is {"prompt_tokens": 512, "output_tokens": 128, "arrival_s": 0.25}'
# Names of the three columns in traces that others publish; times in milliseconds where it says so.
TRACE_NAMES = (
    ("prompt_tokens", "output_tokens", "arrival_s", 1.0),
    ("input_length", "output_length", "timestamp", 1e-3),
)
_WORDS = (
    *("the", "river", "mill", "turns", "and", "grain", "runs", "down"),
    *("to", "flour", "before", "noon", "rain", "sun", "barley"),
)


def prepare(request: TaskRequest) -> PreparedData:
    """Read or generate the source of prompts and return `PromptRequests` as inputs, with facts and
    empty outputs. Raises RequestError if data are missing or wrong, a prompt does not fit the
    model's positions or has no room for a salt, or no document is long enough.
    """
    data: GenerateData = request.data
    source, name, fingerprint = _READERS[data.source](request)
    requests = PromptRequests(
        source=source,
        count=request.requests if request.sample is None else request.sample,
        prompt_rule=data.prompt_tokens,
        output_rule=data.output_tokens,
        lengths=data.lengths,
        vocab=request.vocab,
        positions=request.positions,
        seed=request.seed,
        salt=request.salt,
    )
    requests.check()
    tokenizer = source.tokenizer
    facts = DataFacts(
        source=name,
        rows=len(source.documents) or len(source.prompt_lens or ()) or requests.count,
        fingerprint=fingerprint,
        published=is_published(fingerprint, data.fingerprint),
        **({} if tokenizer is None else {"tokenizer": TokenizerFacts.from_tokenizer(tokenizer)}),
    )
    return PreparedData(requests, facts, GenerateOutputs())


def _read_ids(request: TaskRequest) -> tuple[PromptSource, str, str]:
    """Return a source of seeded ids, which needs no data, its name and its fingerprint. Raises
    RequestError if a data path was given all the same.
    """
    if request.sources.data is not None:
        raise RequestError(
            "prompts of this case are seeded token ids; leave --data out, or set"
            " question.data.source=texts"
        )
    digest = hashlib.sha256(f"seeded-ids-1:{request.vocab}:{request.seed}".encode()).hexdigest()
    return PromptSource(), "made", digest


def _read_texts(request: TaskRequest) -> tuple[PromptSource, str, str]:
    """Return a source of documents: the first 1,000 of a jsonl file, which are tokenized, or of
    token files; generated ones without a path. Documents too short for any prompt are left out.
    """
    data: GenerateData = request.data
    path = request.sources.data
    tokenizer: Tokenizer | None = None
    if path is None:
        tokenizer = WordHashTokenizer(request.vocab)
        least = _find_longest_prompt(data)
        rng = np.random.default_rng([request.seed, 0])
        texts = [" ".join(rng.choice(_WORDS, least + 16)) for _ in range(16)]
        rows, name = [np.array(ids) for ids in tokenizer.encode(texts)], "made"
    elif _is_jsonl(path):
        tokenizer = request.load_tokenizer()
        texts = list(_read_documents(path))
        rows, name = [np.array(ids, np.int64) for ids in tokenizer.encode(texts)], path.name
    else:
        corpus = corpus_files.open_corpus(path)
        starts = np.concatenate((np.zeros(1, np.int64), corpus.ends[:-1]))
        pairs = list(zip(starts, corpus.ends, strict=True))[:MAX_DOCUMENTS]
        rows, name = [np.array(corpus.ids[a:b], np.int64) for a, b in pairs], corpus.name
    _check_ids(rows, request.vocab)
    fingerprint = _fingerprint(tokenizer, rows)
    fitting = _select_documents(rows, data, request.positions)
    lens = tuple(len(row) for row in fitting) if data.prompt_tokens == "data" else None
    return PromptSource(tuple(fitting), tokenizer, prompt_lens=lens), name, fingerprint


def _select_documents(
    rows: list[NDArray[np.int64]], data: GenerateData, positions: int
) -> list[NDArray[np.int64]]:
    """Return the documents that prompts can be cut from: those at least as long as the longest
    prompt or, with the data's own lengths, those that leave room for the output. Raises
    RequestError if there are none.
    """
    if data.prompt_tokens == "data":
        rule = data.output_tokens
        output = rule[1] if isinstance(rule, tuple) else int(rule)
        fitting = [row for row in rows if SALT_ROOM <= len(row) <= positions - output]
        wanted = (
            f"{SALT_ROOM} to {positions - output} tokens, the model's positions less the output"
        )
    else:
        fitting = [row for row in rows if len(row) >= _find_longest_prompt(data)]
        wanted = f"at least {_find_longest_prompt(data)} tokens, the longest prompt"
    if not fitting:
        raise RequestError(
            f"none of the first {len(rows)} documents has {wanted}; set"
            " question.data.prompt_tokens to less"
        )
    return fitting


def _find_longest_prompt(data: GenerateData) -> int:
    """Return the most tokens of a prompt by the case; 64 if the data decide."""
    rule = data.prompt_tokens
    return 64 if rule == "data" else rule[1] if isinstance(rule, tuple) else int(rule)


def _is_jsonl(path: Path) -> bool:
    """Return whether a path is a file of JSON lines, by its name; else it names token files."""
    return path.is_file() and path.name.endswith((".jsonl", ".jsonl.gz", ".json", ".json.gz"))


def _read_documents(path: Path) -> Iterator[str]:
    """Yield the texts of the first 1,000 lines of a jsonl file. Raises RequestError for a line that
    has none.
    """
    for line in islice(jsonl.read_json_lines(path, TEXT_FORMAT, MAX_LINE_BYTES), MAX_DOCUMENTS):
        text = line.value.get("text") if isinstance(line.value, dict) else None
        yield jsonl.require_text(text, f"{line.location}: text is", TEXT_FORMAT)


def _read_sharegpt(request: TaskRequest) -> tuple[PromptSource, str, str]:
    """Return a source of ShareGPT's conversations: the first turn is the prompt, the tokens of the
    second the length of the output. A prompt has 36 to 1,024 tokens, an output at least 4, both
    together at most 2,048.
    """
    path = _require_path(request, "ShareGPT's JSON file")
    with jsonl.refuse_unreadable(path):
        raw = files.read_file(path, MAX_SHAREGPT_BYTES)
    try:
        rows = files.parse_json(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not JSON: {files.explain_json_error(error)}") from error
    turns = [pair for row in rows if (pair := _first_turns(row))] if isinstance(rows, list) else []
    if not turns:
        raise RequestError(
            f'{path}: no conversations of two turns; a row is {{"conversations": [{{"value": …}}]}}'
        )
    tokenizer = request.load_tokenizer()
    prompts = tokenizer.encode([prompt for prompt, _ in turns[: 16 * MAX_DOCUMENTS]])
    outputs = tokenizer.encode([output for _, output in turns[: 16 * MAX_DOCUMENTS]])
    most = min(SHAREGPT_TOTAL, request.positions)
    kept = [
        (prompt, len(output))
        for prompt, output in zip(prompts, outputs, strict=True)
        if SHAREGPT_LEAST + SALT_ROOM <= len(prompt) <= SHAREGPT_PROMPT
        and len(output) >= SHAREGPT_LEAST
        and len(prompt) + len(output) <= most
    ][:MAX_DOCUMENTS]
    if not kept:
        raise RequestError(
            f"{path}: no conversation fits the model's {request.positions} positions"
        )
    rows = [np.array(prompt, np.int64) for prompt, _ in kept]
    source = PromptSource(
        tuple(rows), tokenizer, tuple(map(len, rows)), tuple(length for _, length in kept)
    )
    return source, path.name, _fingerprint(tokenizer, rows)


def _first_turns(row: Any) -> tuple[str, str] | None:
    """Return the texts of a conversation's first two turns, None if it has no two texts."""
    turns = row.get("conversations") if isinstance(row, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    one, other = (turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2])
    if isinstance(one, str) and isinstance(other, str) and one and other:
        return one, other
    return None


def _read_trace(request: TaskRequest) -> tuple[PromptSource, str, str]:
    """Return the lengths and arrivals of a trace, whose prompts are seeded ids. Raises RequestError
    for a line without them, lengths beyond the model's positions, or arrivals that go backwards.
    """
    path = _require_path(request, "a trace")
    prompts: list[int] = []
    outputs: list[int] = []
    arrivals: list[float] = []
    for line in jsonl.read_json_lines(path, TRACE_FORMAT, MAX_LINE_BYTES):
        if len(prompts) == MAX_TRACE_ROWS:
            raise RequestError(f"{path}: a trace of more than {MAX_TRACE_ROWS:,} lines")
        value: dict[str, Any] = line.value if isinstance(line.value, dict) else {}
        names = next((names for names in TRACE_NAMES if names[0] in value), TRACE_NAMES[0])
        columns: list[Any] = [value.get(name) for name in names[:3]]
        prompt, output, arrival = columns
        if not (type(prompt) is int and type(output) is int and prompt > 0 and output > 0):
            raise RequestError(f"{line.location}: lengths must be whole numbers; {TRACE_FORMAT}")
        if type(arrival) not in (int, float) or not 0 <= arrival <= MAX_ARRIVAL:
            raise RequestError(f"{line.location}: no time of arrival; {TRACE_FORMAT}")
        if prompt + output > request.positions:
            raise RequestError(
                f"{line.location}: {prompt + output} tokens, more than the model's"
                f" {request.positions} positions"
            )
        arrival_s = float(arrival) * names[3]
        if arrivals and arrival_s < arrivals[-1]:
            raise RequestError(f"{line.location}: arrives before the line above; sort the trace")
        prompts.append(prompt)
        outputs.append(output)
        arrivals.append(arrival_s)
    if not prompts:
        raise RequestError(f"{path}: an empty trace; {TRACE_FORMAT}")
    first = arrivals[0]
    times = tuple(arrival - first for arrival in arrivals)
    digest = hashlib.sha256(repr((prompts, outputs, times)).encode()).hexdigest()
    source = PromptSource((), None, tuple(prompts), tuple(outputs), times)
    return source, path.name, digest


def _require_path(request: TaskRequest, what: str) -> Path:
    """Return the data path of the request; raise RequestError, which says what is needed, if none
    was given.
    """
    if request.sources.data is None:
        raise RequestError(f"prompts of this case come from {what}: name it with --data")
    return request.sources.data


def _check_ids(rows: list[NDArray[np.int64]], vocab: int) -> None:
    """Raise RequestError if a token id is not one of the model's vocabulary."""
    highest = max((int(row.max()) for row in rows if len(row)), default=0)
    if highest >= vocab:
        raise RequestError(
            f"the prompts have token {highest}, and the model's vocabulary has {vocab}; name the"
            " model's own tokenizer with --tokenizer"
        )


def _fingerprint(tokenizer: Tokenizer | None, rows: list[NDArray[np.int64]]) -> str:
    """Return the SHA-256 (hex) over the tokenizer's vocabulary and the tokens of all documents."""
    digest = hashlib.sha256(("" if tokenizer is None else tokenizer.sha256).encode())
    for row in rows:
        digest.update(len(row).to_bytes(8, "little"))
        digest.update(row.astype("<i4").tobytes())
    return digest.hexdigest()


def check_source(source: Path) -> None:
    """Raise RequestError if a path is neither a JSON file nor token files."""
    if not source.is_file() or not source.name.endswith(
        (".jsonl", ".jsonl.gz", ".json", ".json.gz")
    ):
        corpus_files.check_token_files(source)


_READERS = {
    "ids": _read_ids,
    "texts": _read_texts,
    "sharegpt": _read_sharegpt,
    "trace": _read_trace,
}
