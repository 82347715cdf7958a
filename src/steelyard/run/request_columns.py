"""What the loop of requests knows of each request, and the columns of request samples that follow.

run/requests.py fills the states during a pass and makes the columns behind it, because that takes
time too.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from steelyard.data.prompts import GenerationRequest, PromptRequests
from steelyard.data.request_outcomes import OUTCOMES
from steelyard.engine.generation import RequestEnd
from steelyard.record.request_samples import PER_CHUNK, PER_REQUEST, US

UNENDED = RequestEnd("missing")


@dataclass(slots=True)
class RequestState:
    """What the loop knows of one request; times in seconds since the start of the pass. `times_s`
    and `tokens` have one value for each chunk, `ids` one for each token whose id is known.
    `output_tokens` are those of the chunks so far, `fault` what is wrong with them.
    """

    request: GenerationRequest
    scheduled_s: float
    due_s: float
    sent_s: float
    times_s: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    ids: "array[int]" = field(default_factory=lambda: array("i"))
    output_tokens: int = 0
    fault: RequestEnd | None = None
    end_s: float | None = None
    end: RequestEnd = UNENDED


def settle_tokens(state: RequestState) -> None:
    """Make the tokens of a request's chunks add up to what the server's usage says, in place, if
    they were not counted by ids: spread evenly, the first chunk and the last with at least one, so
    that no time changes. Of more chunks than tokens, some in between are left out. A usage of no
    tokens is not believed: the chunks stay as they were counted.
    """
    total, chunks = state.end.output_tokens, len(state.tokens)
    if not total or state.end.counted_by == "ids" or not chunks or state.output_tokens == total:
        return
    first = total if chunks == 1 else max(1, total // chunks)
    # token counts up to and with each chunk, in even steps from the first chunk's to all
    sums = first + (total - first) * np.arange(chunks) // max(1, chunks - 1)
    tokens = np.diff(sums, prepend=0)
    times_s = np.frombuffer(state.times_s)[tokens > 0]
    state.times_s = array("d", times_s.tobytes())
    state.tokens = array("q", tokens[tokens > 0].astype(np.int64).tobytes())
    state.output_tokens = total


def to_us(time_s: float) -> int:
    """Return seconds as whole microseconds."""
    return round(time_s * US)


def make_columns(
    states: Sequence[RequestState], wall_s: float, requests: PromptRequests
) -> "dict[str, array[int]]":
    """Return the columns of request samples (record/request_samples.py), times as differences in
    microseconds. A request without an end ended with the pass.
    """
    columns = {name: array("q") for name in (*PER_REQUEST, *PER_CHUNK)}
    previous_us = 0
    for state in states:
        scheduled, due, sent = map(to_us, (state.scheduled_s, state.due_s, state.sent_s))
        stamps = np.rint(np.frombuffer(state.times_s) * US).astype(np.int64)
        last = int(stamps[-1]) if len(stamps) else sent
        again = _encode_again(state, requests)
        usage_prompt, usage_output = state.end.prompt_tokens, state.end.output_tokens
        values = {
            "scheduled_us": scheduled - previous_us,
            "due_us": due - scheduled,
            "sent_us": sent - due,
            "chunk_count": len(stamps),
            "end_us": to_us(wall_s if state.end_s is None else state.end_s) - last,
            "prompt_tokens": len(state.request.prompt),
            "asked_tokens": state.request.output_tokens,
            "output_tokens": state.output_tokens,
            "usage_prompt_tokens": -1 if usage_prompt is None else usage_prompt,
            "usage_output_tokens": -1 if usage_output is None else usage_output,
            "retokenized_tokens": -1 if again is None else len(again),
            "outcome": OUTCOMES.index(state.end.outcome),
        }
        for name, value in values.items():
            columns[name].append(value)
        columns["chunk_us"].frombytes(np.diff(stamps, prepend=sent).tobytes())
        columns["chunk_tokens"].extend(state.tokens)
        previous_us = scheduled
    return columns


def append_unsent(
    columns: "dict[str, array[int]]", numbers: range, wall_s: float, requests: PromptRequests
) -> None:
    """Append the requests of these numbers, which were planned and never sent, to the columns: as
    `missing`, scheduled when the pass ended.
    """
    gap_us = to_us(wall_s) - sum(columns["scheduled_us"])
    for number in numbers:
        prompt, output = requests.find_lengths(number)
        values = dict.fromkeys(PER_REQUEST, 0) | {
            "scheduled_us": gap_us,
            "prompt_tokens": prompt,
            "asked_tokens": output,
            "usage_prompt_tokens": -1,
            "usage_output_tokens": -1,
            "retokenized_tokens": -1,
            "outcome": OUTCOMES.index("missing"),
        }
        for name in PER_REQUEST:
            columns[name].append(values[name])
        gap_us = 0


def _encode_again(state: RequestState, requests: PromptRequests) -> list[int] | None:
    """Return the tokens of an answer's text, behind its prompt, or by itself where a token would
    reach across the border; None if the request failed, or has no text.
    """
    text = state.end.text
    if state.end.outcome != "ok" or text is None:
        return None
    ids = requests.encode_output(text, state.request.text)
    return requests.encode_output(text) if ids is None else ids
