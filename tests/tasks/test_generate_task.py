"""The task of generation: lengths that a question may have, how they are cut, and its answers."""

from typing import Any

import pytest
from pydantic import ValidationError

from steelyard.tasks.generate.answers import GenerateOutputs
from steelyard.tasks.generate.task import TASK, GenerateData, find_longest

FORM = 'must be a number of tokens, two bounds such as [512, 1024], or "data"'


def make_data(**changes: Any) -> GenerateData:
    """Return the data of a question with these fields."""
    fields = {"kind": "generate", "source": "ids", "prompt_tokens": 64, "output_tokens": 16}
    return GenerateData.model_validate(fields | changes)


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({}, 80),
        ({"prompt_tokens": [32, 100]}, 116),
        ({"output_tokens": (1, 1)}, 65),
        ({"source": "texts", "prompt_tokens": "data"}, None),
        ({"source": "sharegpt", "prompt_tokens": "data", "output_tokens": "data"}, None),
    ],
)
def test_the_longest_sequence_is_known_unless_the_data_decide(
    changes: dict[str, Any], longest: int | None
) -> None:
    data = make_data(**changes)
    assert find_longest(data) == TASK.longest(data) == longest
    assert GenerateData.model_validate(data.model_dump(mode="json")) == data


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt_tokens": "many"}, f"{FORM} (it is 'many')"),
        ({"prompt_tokens": [1, 2, 3]}, f"{FORM} (it is [1, 2, 3])"),
        ({"prompt_tokens": 1.5}, f"{FORM} (it is 1.5)"),
        ({"prompt_tokens": True}, f"{FORM} (it is True)"),
        ({"prompt_tokens": [8, 4]}, "prompt_tokens (8, 4): allowed are a number of tokens"),
        ({"output_tokens": 0}, "output_tokens 0: allowed are a number of tokens"),
        ({"prompt_tokens": "data"}, "prompt_tokens 'data': prompts of source 'ids' have none"),
        (
            {"source": "texts", "output_tokens": "data"},
            "output_tokens 'data': prompts of source 'texts' have none",
        ),
    ],
)
def test_lengths_that_are_none_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError) as refused:
        make_data(**changes)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "positions", "shorter"),
    [
        ({}, 80, {}),
        ({}, 79, {"prompt_tokens": 64, "output_tokens": 15}),
        ({}, 40, {"prompt_tokens": 32, "output_tokens": 8}),
        ({"prompt_tokens": [1, 200]}, 40, {}),
        ({"source": "sharegpt", "prompt_tokens": "data"}, 40, {}),
    ],
)
def test_lengths_are_cut_to_the_positions(
    changes: dict[str, Any], positions: int, shorter: dict[str, int]
) -> None:
    assert TASK.shorten(make_data(**changes), positions) == shorter


def test_seeded_ids_need_no_data() -> None:
    assert not TASK.needs_data(make_data())
    assert not TASK.needs_data(make_data(**{"source": "texts"} | TASK.self_made))
    assert TASK.needs_data(make_data(source="texts"))


TOKENS = {"numbers": [0, 3], "tokens": [[1, 2], [3, 4]]}
DISTANCES = {"numbers": [0, 3], "compared": [2, 2], "exact": [2, 1], "largest": [0.0, None]}


def merge(*passes: tuple[str, dict[str, Any]]) -> GenerateOutputs:
    """Return outputs with these answers of passes."""
    outputs = GenerateOutputs()
    for name, answers in passes:
        outputs = TASK.merge(outputs, name, [TASK.check(answers, outputs)])
    return outputs


def test_answers_are_scored_by_their_distances() -> None:
    outputs = merge(("generate", TOKENS), ("check", DISTANCES))
    assert TASK.score(outputs, "check") == {"exact": 0.75, "distance": 1e6, "checked": 2.0}
    assert TASK.score(outputs, "generate") == {}
    assert GenerateOutputs.model_validate(outputs.model_dump(mode="json")) == outputs


@pytest.mark.parametrize(
    "answers",
    [
        TOKENS | {"numbers": [0]},
        DISTANCES | {"exact": [2]},
        {"numbers": [0], "tokens": [[-1]]},
        {"numbers": [0], "compared": [1], "exact": [1], "largest": [-0.5]},
        {"numbers": [0]},
    ],
    ids=["lengths", "distances", "token", "negative", "nothing"],
)
def test_answers_that_do_not_fit_are_refused(answers: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        TASK.check(answers, GenerateOutputs())


def test_two_runs_differ_in_the_requests_whose_tokens_do() -> None:
    ours = merge(("generate", {"numbers": [0, 1, 2], "tokens": [[1], [2], [3]]}))
    theirs = merge(("generate", {"numbers": [1, 2, 5], "tokens": [[2], [4], [1]]}))
    compare = TASK.differences
    assert compare is not None
    differences = compare(ours, theirs, "generate")
    assert differences is not None
    assert (differences.items, differences.other, differences.tokens) == (2, 1, 1)
    assert compare(ours, merge(), "generate") is None
