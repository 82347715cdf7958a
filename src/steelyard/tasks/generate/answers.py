"""The answers of generation as a record keeps them: token ids of checked requests, and how far each
is from the likeliest tokens.
"""

from collections.abc import Sized
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from steelyard.schema import FrozenModel
from steelyard.tasks.task import Differences, OutputCount

TokenId = Annotated[int, Field(ge=0, le=10**9)]
MAX_NATS = 1e6  # of a distance: larger ones, as between masked logits, are stored as this
Nats = Annotated[float, Field(ge=0, le=MAX_NATS)]
MAX_CHECKED = 1_000_000


class GeneratedTokens(FrozenModel):
    """What a pass generated for the requests that are checked: their `numbers` and the ids of their
    output `tokens`, in the same order.
    """

    numbers: list[OutputCount] = Field(max_length=MAX_CHECKED)
    tokens: list[list[TokenId]] = Field(max_length=MAX_CHECKED)

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        """Raise ValueError if there is not one answer for each request, or a request is named
        twice.
        """
        _check_lengths(self.numbers, self.tokens)
        return self


class TokenDistances(FrozenModel):
    """How the generated tokens compare with those that a reference engine finds likeliest after the
    same tokens, for each checked request by `numbers`: how many were compared (`compared`), how
    many of these are the likeliest (`exact`), and the largest distance of one from the likeliest in
    nats (`largest`; None: not finite).
    """

    numbers: list[OutputCount] = Field(max_length=MAX_CHECKED)
    compared: list[OutputCount] = Field(max_length=MAX_CHECKED)
    exact: list[OutputCount] = Field(max_length=MAX_CHECKED)
    largest: list[Nats | None] = Field(max_length=MAX_CHECKED)

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        """Raise ValueError if the columns differ in length, a request is named twice, or more
        tokens are the likeliest than were compared.
        """
        _check_lengths(self.numbers, self.compared, self.exact, self.largest)
        if any(exact > count for exact, count in zip(self.exact, self.compared, strict=True)):
            raise ValueError("more tokens are the likeliest than were compared")
        return self


def _check_lengths(numbers: list[int], *columns: Sized) -> None:
    """Raise ValueError if a column has not one value for each request, or one is named twice."""
    if {len(column) for column in columns} != {len(numbers)}:
        raise ValueError("the answers do not have one value for each request")
    if len(set(numbers)) != len(numbers):
        raise ValueError("the answers name a request twice")


class GenerateOutputs(FrozenModel):
    """The outputs of a generation run: `passes` with what was generated (`generate`) and how it
    compares (`check`). A pass that did not run is missing.
    """

    passes: dict[str, GeneratedTokens | TokenDistances] = Field(default_factory=dict)


def check_answers(answers: Any, outputs: GenerateOutputs) -> dict[str, Any]:
    """Return the answers of a pass as a dict if they are generated tokens or distances with one
    value for each request. Raise ValueError or pydantic's ValidationError if not. A distance of
    more than `MAX_NATS` becomes that.
    """
    if "compared" not in answers:
        return GeneratedTokens.model_validate(answers).model_dump(mode="json")
    largest = [None if value is None else min(value, MAX_NATS) for value in answers["largest"]]
    return TokenDistances.model_validate({**answers, "largest": largest}).model_dump(mode="json")


def merge_answers(
    outputs: GenerateOutputs, pass_name: str, answers: list[dict[str, Any]]
) -> GenerateOutputs:
    """Return the outputs with the answers of a pass: those of the first rank, which holds all."""
    first = answers[0]
    model = TokenDistances if "compared" in first else GeneratedTokens
    return outputs.model_copy(
        update={"passes": {**outputs.passes, pass_name: model.model_validate(first)}}
    )


def score_answers(outputs: GenerateOutputs, pass_name: str) -> dict[str, float]:
    """Return, of pass `check`, `exact` (share of compared tokens that are the likeliest),
    `distance` (the largest of all, in nats) and `checked` (requests); empty for other passes, or
    if nothing was compared. A distance that is not finite counts as `MAX_NATS`.
    """
    distances = outputs.passes.get(pass_name)
    if not isinstance(distances, TokenDistances) or not sum(distances.compared):
        return {}
    return {
        "exact": sum(distances.exact) / sum(distances.compared),
        "distance": max(MAX_NATS if value is None else value for value in distances.largest),
        "checked": float(len(distances.numbers)),
    }


def find_differences(
    ours: GenerateOutputs, theirs: GenerateOutputs, pass_name: str
) -> Differences | None:
    """Return how two runs' generated tokens differ, over requests that both kept; None if the pass
    generated nothing in one of them. Runs with different salts answer different prompts.
    """
    one, other = ours.passes.get(pass_name), theirs.passes.get(pass_name)
    if not isinstance(one, GeneratedTokens) or not isinstance(other, GeneratedTokens):
        return None
    theirs_by_number = dict(zip(other.numbers, other.tokens, strict=True))
    pairs = [
        (tokens, theirs_by_number[number])
        for number, tokens in zip(one.numbers, one.tokens, strict=True)
        if number in theirs_by_number
    ]
    unequal = sum(mine != their for mine, their in pairs)
    return Differences(len(pairs), unequal, tokens=unequal)
