"""The key of a case: every part of the question is in it, and nothing else."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from fixtures.cases import FINGERPRINT, NAME, OWN, leaf, own
from steelyard.case import case
from steelyard.case.case import Case, Question, resolve


def question_leaves(model: type[BaseModel] = Question, prefix: str = "") -> list[str]:
    out = []
    for name, field in model.model_fields.items():
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        inner = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
        out += question_leaves(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return out


OTHER = {
    "kind": "train", "division": "open", "precision.name": "other", "precision.matmul": "fp16",
    "precision.weights": "fp16", "precision.gradients": "bf16", "precision.states": "bf16", "model.kv_heads": 1,
    "model.heads": 2, "model.hidden": 128, "task": "other", "model.family": "other", "data.kind": "other",
}  # fmt: skip


def with_leaf(model: Any, dotted: str, value: object) -> Any:
    head, _, rest = dotted.partition(".")
    return model.model_copy(update={head: with_leaf(getattr(model, head), rest, value) if rest else value})


def other(old: object) -> object:
    if isinstance(old, bool):
        return not old
    return old + 1 if isinstance(old, int | float) else "other"


def test_the_questions_leaves() -> None:
    assert len(question_leaves()) == len(set(question_leaves())) >= 30
    assert {"seed", "data.made.seed", "model.rope_base", "precision.states", "data.fingerprint"} <= set(question_leaves())


@pytest.mark.parametrize("dotted", [one for one in question_leaves() if one != "data.fingerprint"])
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_every_part_of_the_question_is_in_the_key(dotted: str) -> None:
    before = resolve("llama1-7b-openwebtext" if dotted.startswith("train.") else NAME, "smoke").case
    old = leaf(before.question, dotted)
    value = OTHER.get(dotted, other(old))
    assert value != old
    after = with_leaf(before, f"question.{dotted}", value)
    assert after.key(FINGERPRINT) != before.key(FINGERPRINT)


def test_the_data_that_was_read_is_in_the_key() -> None:
    """And not the fingerprint that the case expects: that is a statement about the published set."""
    before = resolve(NAME, "smoke").case
    assert before.key("a") != before.key("b")
    after = with_leaf(before, "question.data.fingerprint", "other")
    assert after.key("a") == before.key("a")


@pytest.mark.parametrize(
    "changes",
    [
        {"tune": case.Tune(batch_tokens=7, compile=False, attention="rows", batching="single", pad_to=3, order=9, warmup=0)},
        {"tune": case.Tune(env={"OMP_NUM_THREADS": "1"})},
        {"size": "full"},
        {"name": "other"},
        {"title": "other", "about": "other"},
        {"engines": ["other"]},
        {"divisions": ["closed"]},
        {"gate": None},
        {"max_interval": 0.5},
        {"reference": []},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_nothing_else_is_in_the_key(changes: dict[str, Any]) -> None:
    before = resolve(NAME, "smoke").case
    after = before.model_copy(update=changes)
    assert after != before
    assert after.key(FINGERPRINT) == before.key(FINGERPRINT)


def test_the_key_is_a_hash_of_values_not_of_spellings(tmp_path: Path) -> None:
    key = resolve(own(tmp_path)).case.key(FINGERPRINT)
    assert re.fullmatch("[0-9a-f]{16}", key)
    spelled = own(tmp_path, OWN, ("layers = 1", "layers = 0x1\nrope_base = 1e4"), ("context = 64", "shots = 5\ncontext = 6_4"))
    assert resolve(spelled).case.key(FINGERPRINT) == key
    assert resolve(own(tmp_path), settings=["question.model.rope_base=10000"]).case.key(FINGERPRINT) == key
    assert resolve(own(tmp_path), precision="fp16", division="closed").case.key(FINGERPRINT) == key


def test_a_case_survives_json() -> None:
    before = resolve(NAME, "smoke").case
    after = Case.model_validate(json.loads(json.dumps(before.model_dump(mode="json"))))
    assert after == before
    assert after.key(FINGERPRINT) == before.key(FINGERPRINT)


def test_canonical_has_one_spelling() -> None:
    assert case.canonical({"b": [1, 1.5, None], "a": "é\n"}) == '{"a":"é\\n","b":[1,1.5,null]}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        case.canonical(float("nan"))


@pytest.mark.parametrize(
    "dotted",
    [
        "name",
        "question.seed",
        "question.model.layers",
        "question.data.shots",
        "question.precision.matmul",
        "tune.warmup",
        "gate.target",
    ],
)
def test_cases_are_frozen(dotted: str) -> None:
    found = resolve(NAME).case
    *parents, name = dotted.split(".")
    owner = leaf(found, ".".join(parents)) if parents else found
    before = getattr(owner, name)
    with pytest.raises(ValidationError, match="Instance is frozen"):
        setattr(owner, name, before)
    with pytest.raises(ValidationError, match="Instance is frozen"):
        delattr(owner, name)
    assert getattr(owner, name) == before
