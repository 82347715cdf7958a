"""Request samples: when each request of a generation pass was scheduled, sent and answered.

They are stored in columns of packed integers (microseconds, as differences), never as one object a
token: 10,000 requests of 500 tokens take a few megabytes. run/requests.py makes them,
metrics/request_window.py reads them as a `RequestTable` of numpy arrays.
"""

import base64
import binascii
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from steelyard.data.request_outcomes import OUTCOMES, CountedBy, Lengths
from steelyard.schema import GrownModel

# Of all passes of a record together. With two or three bytes a chunk a record stays below the size
# that is read (record/record_file.py).
MAX_REQUESTS = 1_000_000
MAX_CHUNKS = 1 << 24
MAX_PACKED_CHARS = 1 << 28
MAX_US = 10**15  # of any time and any count in a column
MAX_SQUARES = 2**62  # of the lengths of all requests
WORD_BYTES = 8
US = 1_000_000  # microseconds of a second
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
PackedInts = Annotated[str, Field(max_length=MAX_PACKED_CHARS, pattern=r"^[A-Za-z0-9+/]*=*$")]
# What each time of a request is measured from and to, and what each rate counts. An id changes when
# a definition does, and metrics of different ids are never compared.
DEFINITIONS = {
    "ttft": "scheduled-to-first-token/1",
    "ttft_sent": "sent-to-first-token/1",
    "tpot": "first-to-last-token-over-n-minus-1/1",
    "chunk_gap": "between-chunks-with-tokens/1",
    "e2e": "scheduled-to-end/1",
    "queue_delay": "scheduled-to-sent/1",
    "window": "issue-time/1",
    "output_tokens_per_s": "arrived-in-window/1",
    "tokens_per_s": "arrived-in-window-prompt-with-first-token/1",
    "interactivity": "inverse-of-mean-tpot/1",
    "goodput": "issued-in-window-within-limits/1",
    "energy_per_output_token": "window-joules-over-arrived-tokens/1",
    "percentile": "order-statistic/2",
}
# The ids of samples that do not name these definitions, because they are older than the names.
UNNAMED_DEFINITIONS = {
    "output_tokens_per_s": "arrived-in-window/1",
    "tokens_per_s": "arrived-in-window-prompt-with-first-token/1",
    "interactivity": "inverse-of-mean-tpot/1",
    "goodput": "issued-in-window-within-limits/1",
    "energy_per_output_token": "window-joules-over-arrived-tokens/1",
    "percentile": "order-statistic/1",  # offline its waits have an interval too
}
PER_REQUEST = (
    "scheduled_us",  # since the one before; the first since the start of the pass
    "due_us",  # since scheduled: when a slot was free for it
    "sent_us",  # since due
    "chunk_count",
    "end_us",  # since its last chunk, or since sent if it has none
    "prompt_tokens",
    "asked_tokens",
    "output_tokens",
    "usage_prompt_tokens",  # as the server counts them; -1: it does not say
    "usage_output_tokens",  # the same
    "retokenized_tokens",  # tokens of the generated text; -1: not known
    "outcome",  # index into OUTCOMES
)
COUNTED = PER_REQUEST[5:]  # what a table has as it is stored
# Columns that came later, and the number that stands in earlier records for every request.
LATER_COLUMNS = {"usage_output_tokens": -1}
# The least number of a column where it is not 0; a chunk without tokens is none.
LEAST_NUMBERS = {
    "usage_prompt_tokens": -1,
    "usage_output_tokens": -1,
    "retokenized_tokens": -1,
    "chunk_tokens": 1,
}
PER_CHUNK = ("chunk_us", "chunk_tokens")  # since the chunk before, the first since sent; tokens


def pack_ints(values: Ints) -> str:
    """Pack integers into text: their bytes, those of equal rank side by side so that they compress
    well, deflated and in base64.
    """
    planes = np.ascontiguousarray(values, dtype="<i8").view(np.uint8).reshape(-1, WORD_BYTES).T
    return base64.b64encode(zlib.compress(np.ascontiguousarray(planes).tobytes(), 6)).decode()


def unpack_ints(text: str, count: int) -> Ints:
    """Return the `count` integers that `pack_ints` packed. Raise ValueError if the text does not
    hold exactly so many and nothing else; no more than that is ever inflated.
    """
    size = count * WORD_BYTES
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(base64.b64decode(text, validate=True), size + 1)
    except (zlib.error, binascii.Error) as error:
        raise ValueError(f"a column of request samples is damaged: {error}") from error
    if len(raw) != size or not inflate.eof or inflate.unused_data:
        raise ValueError(f"a column of request samples does not hold {count:,} numbers")
    planes = np.frombuffer(raw, np.uint8).reshape(WORD_BYTES, count)
    words = np.ascontiguousarray(planes.T).view("<i8").reshape(-1)
    return words.astype(np.int64, copy=False)


@dataclass(frozen=True, eq=False)
class RequestTable:
    """The request samples of a pass as numpy arrays, one value for each request in the order of the
    schedule; times are seconds since the start of the pass.

    `scheduled_s`, `due_s` (a slot was free), `sent_s`, `end_s`; `first_s` and `last_s`, the arrival
    of the first and last chunk with a token (NaN without one). `prompt_tokens` and `asked_tokens`
    as asked, `output_tokens` as counted, `usage_prompt_tokens`, `usage_output_tokens` and
    `retokenized_tokens` (-1: unknown), `outcome` (index into OUTCOMES). All chunks lie end to end
    in `chunk_s` and `chunk_tokens`; those of request i are from `chunk_starts[i]` to
    `chunk_starts[i + 1]`.
    """

    scheduled_s: Floats
    due_s: Floats
    sent_s: Floats
    first_s: Floats
    last_s: Floats
    end_s: Floats
    prompt_tokens: Ints
    asked_tokens: Ints
    output_tokens: Ints
    usage_prompt_tokens: Ints
    usage_output_tokens: Ints
    retokenized_tokens: Ints
    outcome: Ints
    chunk_starts: Ints
    chunk_s: Floats
    chunk_tokens: Ints

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.scheduled_s)

    @property
    def is_ok(self) -> NDArray[np.bool_]:
        """Whether each request ended regularly with at least one token."""
        is_ok: NDArray[np.bool_] = (self.outcome == 0) & (self.output_tokens > 0)
        return is_ok & np.isfinite(self.first_s)


def check_declared_totals(passes: Any) -> Any:
    """Return the request samples of a record as they were given. Raise ValueError if all together
    state more requests or chunks than a record may have, before any column is decoded: a few
    packed bytes may state very many.
    """
    if isinstance(passes, list):
        for name, most in (("count", MAX_REQUESTS), ("chunks", MAX_CHUNKS)):
            stated = [item.get(name) for item in passes if isinstance(item, dict)]
            # a negative number, which is refused later, must not make room for others
            if sum(max(0, number) for number in stated if isinstance(number, int)) > most:
                raise ValueError(f"request samples state more than {most:,} {name} together")
    return passes


class ClientFacts(GrownModel):
    """How well the loop that sent the requests kept up: `lag_p99_us` and `lag_max_us`, by how much
    later than asked it woke up (microseconds), `cpu_share`, CPU seconds of its process per second
    (None: the engine worked in the same process), and, of a client whose error was measured on the
    mock server before, `mock_requests` and `mock_error_us` (by how much later than it was sent a
    chunk was stamped: median, 99th percentile and largest).
    """

    LATER: ClassVar[tuple[str, ...]] = ("mock_requests", "mock_error_us")

    lag_p99_us: Annotated[int, Field(ge=0, le=10**15)]
    lag_max_us: Annotated[int, Field(ge=0, le=10**15)]
    cpu_share: Annotated[float, Field(ge=0, le=1e6)] | None
    mock_requests: Annotated[int, Field(ge=0, le=10**9)] | None = None
    mock_error_us: tuple[int, int, int] | None = None


class RequestSamples(GrownModel):
    """The requests of one pass on one rank, as a record stores them: `count` requests with `chunks`
    chunks in `columns` of packed integers (PER_REQUEST and PER_CHUNK; times in microseconds, as
    differences), decoded by `table`.

    `definitions` has the id of each definition as it was stored (`all_definitions`: of all),
    `counted_by` how tokens were counted, `errors` the texts of some failures, `salt` the hex digits
    that made the prompts of this run unlike all others, `client` how well the sending loop kept up.
    `lengths` is "exact", or "natural" if answers may end early. Validation decodes every column and
    raises ValueError if one is damaged or has another number of values than it states.
    """

    LATER: ClassVar[tuple[str, ...]] = ()

    pass_name: str = Field(alias="pass")
    rank: int = Field(ge=0)
    # strict: `check_declared_totals` adds up what is stated as a number, and nothing else is one
    count: int = Field(ge=0, le=MAX_REQUESTS, strict=True)
    chunks: int = Field(ge=0, le=MAX_CHUNKS, strict=True)
    columns: dict[str, PackedInts]
    definitions: dict[str, str]
    counted_by: CountedBy
    lengths: Lengths
    salt: str = Field(max_length=64, pattern="^[0-9a-f]*$")
    errors: list[Annotated[str, Field(max_length=1000)]] = Field(max_length=20)
    client: ClientFacts | None = None

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        """Raise ValueError if a column is missing, unknown, damaged or of another length, or if its
        numbers contradict each other.
        """
        if {*self.columns, *LATER_COLUMNS} != {*PER_REQUEST, *PER_CHUNK}:
            raise ValueError("request samples have other columns than this version knows")
        numbers = self._decode()
        for name, column in numbers.items():
            least = LEAST_NUMBERS.get(name, 0)
            if len(column) and (column.min() < least or column.max() > MAX_US):
                raise ValueError(f"request samples: {name} holds an impossible number")
        # as floating point, because a sum of integers may overflow unseen
        for name in ("scheduled_us", "chunk_us", "chunk_tokens"):
            if numbers[name].sum(dtype=np.float64) > MAX_US * 1000:
                raise ValueError(f"request samples: {name} adds up to an impossible number")
        # squares of lengths are summed in attention, as integers
        lengths = numbers["prompt_tokens"] + numbers["output_tokens"]
        if (lengths.astype(np.float64) ** 2).sum() > MAX_SQUARES:
            raise ValueError("request samples: the tokens add up to an impossible number")
        if len(column := numbers["outcome"]) and column.max() >= len(OUTCOMES):
            raise ValueError("request samples: outcome holds an unknown code")
        starts = _find_starts(numbers["chunk_count"], self.chunks)
        totals = np.concatenate((np.zeros(1, np.int64), np.cumsum(numbers["chunk_tokens"])))
        if not np.array_equal(np.diff(totals[starts]), numbers["output_tokens"]):
            raise ValueError("request samples: the tokens of the chunks are not the output_tokens")
        return self

    def _decode(self) -> dict[str, Ints]:
        """Return the decoded columns by name; those that the record is too old for hold the number
        of LATER_COLUMNS. Raises ValueError if one is damaged.
        """
        later = {name: np.full(self.count, value) for name, value in LATER_COLUMNS.items()}
        return later | {
            name: unpack_ints(text, self.chunks if name in PER_CHUNK else self.count)
            for name, text in self.columns.items()
        }

    @property
    def all_definitions(self) -> dict[str, str]:
        """The id of every definition, also of those that earlier samples do not name."""
        return UNNAMED_DEFINITIONS | self.definitions

    @cached_property
    def table(self) -> RequestTable:
        """The samples as numpy arrays, decoded once."""
        numbers = self._decode()
        scheduled = np.cumsum(numbers["scheduled_us"])
        due = scheduled + numbers["due_us"]
        sent = due + numbers["sent_us"]
        starts = _find_starts(numbers["chunk_count"], self.chunks)
        chunk_us = _add_up_within(numbers["chunk_us"], starts, sent)
        has_chunk = numbers["chunk_count"] > 0
        first, last = np.full(self.count, np.nan), np.full(self.count, np.nan)
        first[has_chunk] = chunk_us[starts[:-1][has_chunk]] / US
        last_us = sent.copy()
        last_us[has_chunk] = chunk_us[starts[1:][has_chunk] - 1]
        last[has_chunk] = last_us[has_chunk] / US
        return RequestTable(
            scheduled_s=scheduled / US,
            due_s=due / US,
            sent_s=sent / US,
            first_s=first,
            last_s=last,
            end_s=(last_us + numbers["end_us"]) / US,
            chunk_starts=starts,
            chunk_s=chunk_us / US,
            **{name: numbers[name] for name in (*COUNTED, "chunk_tokens")},
        )


def _find_starts(chunk_counts: Ints, chunks: int) -> Ints:
    """Return the index of each request's first chunk, and behind them the number of all. Raises
    ValueError if the counts do not add up to `chunks`; no count may be negative.
    """
    starts = np.concatenate(
        (np.zeros(1, np.int64), np.cumsum(np.minimum(chunk_counts, chunks + 1)))
    )
    if starts[-1] != chunks:
        raise ValueError("the chunks of the requests are not as many as stated")
    return starts


def _add_up_within(deltas: Ints, starts: Ints, offsets: Ints) -> Ints:
    """Return running sums of `deltas` that begin anew, at an offset of `offsets`, at each index of
    `starts` (which ends with the number of deltas).
    """
    total = np.concatenate((np.zeros(1, np.int64), np.cumsum(deltas)))
    lengths = np.diff(starts)
    return total[1:] - np.repeat(total[starts[:-1]], lengths) + np.repeat(offsets, lengths)


def make_request_samples(table: dict[str, Any], **facts: Any) -> RequestSamples:
    """Return the samples of a pass from columns of integers by name (lists or arrays, as
    PER_REQUEST and PER_CHUNK describe them) and the other fields of `RequestSamples`.
    """
    columns = {name: np.asarray(values, np.int64) for name, values in table.items()}
    return RequestSamples(
        count=len(columns["outcome"]),
        chunks=len(columns["chunk_us"]),
        columns={name: pack_ints(values) for name, values in columns.items()},
        definitions=dict(DEFINITIONS),
        **facts,
    )


RequestPasses = Annotated[list[RequestSamples], BeforeValidator(check_declared_totals)]
