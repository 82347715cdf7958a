"""How a request for generation can end, and how its tokens are counted: codes of records."""

from typing import Literal, get_args

# docs/generate.md explains each outcome
Outcome = Literal[
    "ok",
    "refused",  # the server answered with an error status, or the engine refused it
    "cut",  # the stream ended before its regular end
    "garbage",  # the stream could not be understood
    "empty",  # a regular end without any token
    "flooded",  # more bytes or tokens than any right answer has
    "timeout",  # no chunk for longer than the limit
    "unreachable",  # no connection
    "failed",  # the engine reported another error
    "missing",  # the run ended before the request did
]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
# By what the tokens of chunks were counted: their ids, the server's `usage`, or neither (one each).
CountedBy = Literal["ids", "usage", "chunks"]
Lengths = Literal["exact", "natural"]  # "natural": an answer may end before the length asked for
