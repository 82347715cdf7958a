"""The `Task` row of generation: what prompts are made of, how long they and their outputs are, and
what a record keeps of the answers.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from steelyard.data.request_outcomes import Lengths
from steelyard.errors import short_repr
from steelyard.schema import FrozenModel
from steelyard.tasks.generate import answers
from steelyard.tasks.task import Score, Task
from steelyard.words import get_meanings

MAX_TOKENS = 1 << 24
Source = Literal["ids", "texts", "sharegpt", "trace"]
LENGTH_FORM = 'a number of tokens, two bounds such as [512, 1024], or "data"'


def _check_length(value: Any) -> Any:
    """Return the value of a length unchanged, a list as a tuple; raise ValueError if it is neither
    a number, two numbers, nor "data".
    """
    numbers = value if isinstance(value, list | tuple) else [value]
    is_number = all(type(number) is int for number in numbers)
    if value != "data" and not (is_number and len(numbers) in ((2,) if numbers is value else (1,))):
        raise ValueError(f"must be {LENGTH_FORM} (it is {short_repr(value)})")
    return tuple(value) if isinstance(value, list) else value


LengthField = Annotated[Literal["data"] | int | tuple[int, int], BeforeValidator(_check_length)]


class GenerateData(FrozenModel):
    """The fields of `question.data` of generation. `source` is what prompts are made of: seeded
    token `ids`, `texts` (a jsonl file or token files), ShareGPT's file, or a `trace` of lengths and
    arrivals. `prompt_tokens` and `output_tokens` are a number, two bounds to draw from uniformly,
    or "data": the data's own. `lengths` is "exact" (the end-of-text token is ignored) or "natural".

    `fingerprint` is that of the published data (other data are not refused). Validation raises
    ValueError for bounds that are none, and for the lengths of data that have none.
    """

    kind: Literal["generate"]
    source: Source = Field(
        description="ids (seeded, no data), texts, sharegpt, or trace (lengths and arrivals)"
    )
    prompt_tokens: LengthField = Field(
        description='a number, two bounds such as [512, 1024], or "data": as long as they are'
    )
    output_tokens: LengthField = Field(
        description='a number, two bounds, or "data" (of sharegpt and trace)'
    )
    lengths: Lengths = Field(
        "exact", description="exact: end-of-text is ignored; natural: an answer may end earlier"
    )
    fingerprint: str | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        """Raise ValueError if a length is out of bounds, bounds are in the wrong order, or the
        data's own are asked for where the source has none.
        """
        for name in ("prompt_tokens", "output_tokens"):
            rule = getattr(self, name)
            if rule == "data":
                if self.source == "ids" or (self.source == "texts" and name == "output_tokens"):
                    raise ValueError(f"{name} 'data': prompts of source {self.source!r} have none")
                continue
            bounds = rule if isinstance(rule, tuple) else (rule, rule)
            if not 1 <= bounds[0] <= bounds[1] <= MAX_TOKENS:
                raise ValueError(
                    f"{name} {rule}: allowed are a number of tokens, or two bounds [least, most]"
                )
        return self


def find_longest(data: GenerateData) -> int | None:
    """Return the most tokens of a prompt and its output together; None if the data decide."""
    bounds = [data.prompt_tokens, data.output_tokens]
    numbers = [rule[1] if isinstance(rule, tuple) else rule for rule in bounds]
    return None if "data" in numbers else sum(int(number) for number in numbers)


def _shorten(data: GenerateData, positions: int) -> dict[str, Any]:
    """Return lengths with which a prompt and its output fit so many positions: an output of at most
    a fifth of them, and the rest for the prompt; nothing if they fit, or are no fixed numbers.
    """
    longest, prompt, output = find_longest(data), data.prompt_tokens, data.output_tokens
    if longest is None or longest <= positions:
        return {}
    if not isinstance(prompt, int) or not isinstance(output, int):
        return {}
    shorter = max(1, min(output, positions // 5))
    return {"prompt_tokens": min(prompt, positions - shorter), "output_tokens": shorter}


def _needs_data(data: Any) -> bool:
    """Return whether size full reads prompts from a file: all sources but seeded ids do."""
    return bool(data.source != "ids")


TASK = Task(
    name="generate",
    kind="generate",
    work="generate",
    noun="request",
    data=GenerateData,
    outputs=answers.GenerateOutputs,
    reader="steelyard.tasks.generate.data:prepare",
    check=answers.check_answers,
    merge=answers.merge_answers,
    score=answers.score_answers,
    tally=lambda outputs, pass_name: None,
    scores=(
        Score(
            "exact_tokens", "exact", *get_meanings("score.exact_tokens"), form="percent", of="check"
        ),
        Score(
            "answer_distance",
            "distance",
            *get_meanings("score.answer_distance"),
            unit="nats",
            better="lower",
            form="number",
            of="check",
        ),
        Score(
            "checked_requests",
            "checked",
            *get_meanings("score.checked_requests"),
            better="",
            form="number",
            of="check",
        ),
    ),
    quality="exact_tokens",
    passes=("generate", "check"),
    differences=answers.find_differences,
    needs_data=_needs_data,
    self_made={"source": "ids"},
    reads_tokens=True,
    shorten=_shorten,
    longest=find_longest,
    data_check="steelyard.tasks.generate.data:check_source",
)
