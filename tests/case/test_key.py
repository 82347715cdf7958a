"""The key of a case is a hash of all parts of the question and of nothing else."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from fixtures.cases import FINGERPRINT, NAME, OWN_CASE, get_leaf, write_own_case
from fixtures.records import RUNS
from steelyard import schema, tasks
from steelyard.case import case
from steelyard.case.case import Case
from steelyard.case.key import LATER_FIELDS, compute_question_key
from steelyard.case.load import Slo
from steelyard.case.question import Question
from steelyard.case.resolve import list_changed_keys, list_shipped_cases, resolve_case
from steelyard.metrics.shipped_cases import list_later_fields
from steelyard.models import families
from steelyard.models.shapes import LlamaModel
from steelyard.record import record
from steelyard.tasks.mmlu.task import MmluData
from steelyard.tasks.task import Sources

# The types of the tables `question.model` and `question.data` of the case under test.
TABLE_TYPES = {"model": LlamaModel, "data": MmluData}


def list_question_leaves(model: type[BaseModel] = Question, prefix: str = "") -> list[str]:
    """Return the dotted names of all values of a question, through its nested tables."""
    leaves = []
    for name, field in model.model_fields.items():
        annotation = (
            TABLE_TYPES.get(name, field.annotation) if model is Question else field.annotation
        )
        kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
        inner = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
        leaves += list_question_leaves(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return leaves


OTHER_VALUES = {
    "kind": "train",
    "division": "open",
    "precision.name": "other",
    "precision.matmul": "fp16",
    "precision.weights": "fp16",
    "precision.gradients": "bf16",
    "precision.states": "bf16",
    "model.kv_heads": 1,
    "model.heads": 2,
    "model.hidden": 128,
    "task": "other",
    "model.family": "other",
    "data.kind": "other",
}
# Tables that only questions of other kinds have, and a case that has one.
CASES_WITH = {"train": "llama1-7b-openwebtext", "load": "llama3-8b-generate"}


def replace_leaf(model: Any, dotted: str, value: object) -> Any:
    """Return a copy of the model with the value at a dotted name replaced."""
    head, _, remainder = dotted.partition(".")
    return model.model_copy(
        update={head: replace_leaf(getattr(model, head), remainder, value) if remainder else value}
    )


def choose_other_value(old: object) -> object:
    """Return a value that differs from the old one."""
    if isinstance(old, bool):
        return not old
    return old + 1 if isinstance(old, int | float) else "other"


def test_question_leaves_include_nested_tables() -> None:
    assert len(list_question_leaves()) == len(set(list_question_leaves())) >= 30
    assert {
        "seed",
        "data.made.seed",
        "model.rope_base",
        "precision.states",
        "data.fingerprint",
    } <= set(list_question_leaves())


@pytest.mark.parametrize(
    "dotted", [one for one in list_question_leaves() if one != "data.fingerprint"]
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_every_part_of_the_question_is_in_the_key(dotted: str) -> None:
    before = resolve_case(CASES_WITH.get(dotted.partition(".")[0], NAME), "smoke").case
    old = get_leaf(before.question, dotted)
    value = OTHER_VALUES.get(dotted, choose_other_value(old))
    assert value != old
    after = replace_leaf(before, f"question.{dotted}", value)
    assert after.compute_key(FINGERPRINT) != before.compute_key(FINGERPRINT)


def test_the_data_that_was_read_is_in_the_key() -> None:
    """The fingerprint that the case expects is not in the key: it is a statement about the
    published data.
    """
    before = resolve_case(NAME, "smoke").case
    assert before.compute_key("a") != before.compute_key("b")
    after = replace_leaf(before, "question.data.fingerprint", "other")
    assert after.compute_key("a") == before.compute_key("a")


@pytest.mark.parametrize(
    "changes",
    [
        {
            "tune": case.Tune(
                batch_tokens=7,
                compile=False,
                attention="rows",
                batching="single",
                pad_to=3,
                order=9,
                warmup=0,
            )
        },
        {"tune": case.Tune(env={"OMP_NUM_THREADS": "1"})},
        {"size": "full"},
        {"name": "other"},
        {"title": "other", "about": "other"},
        {"published": {"other": 1}},
        {"devices": [1, 2]},
        {"divisions": ["closed"]},
        {"gate": None},
        {"max_interval": 0.5},
        {"reference": []},
        {"requests": 12, "min_time_s": 2.0, "slo": Slo(ttft_s=1.0)},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_nothing_else_is_in_the_key(changes: dict[str, Any]) -> None:
    before = resolve_case(NAME, "smoke").case
    after = before.model_copy(update=changes)
    assert after != before
    assert after.compute_key(FINGERPRINT) == before.compute_key(FINGERPRINT)


def test_the_key_is_a_hash_of_values_not_of_spellings(tmp_path: Path) -> None:
    key = resolve_case(write_own_case(tmp_path)).case.compute_key(FINGERPRINT)
    assert re.fullmatch("[0-9a-f]{16}", key)
    spelled = write_own_case(
        tmp_path,
        OWN_CASE,
        ("layers = 1", "layers = 0x1\nrope_base = 1e4"),
        ("context = 64", "shots = 5\ncontext = 6_4"),
    )
    assert resolve_case(spelled).case.compute_key(FINGERPRINT) == key
    assert (
        resolve_case(
            write_own_case(tmp_path), settings=["question.model.rope_base=10000"]
        ).case.compute_key(FINGERPRINT)
        == key
    )
    assert (
        resolve_case(
            write_own_case(tmp_path), precision="fp16", division="closed"
        ).case.compute_key(FINGERPRINT)
        == key
    )


def test_a_case_survives_json() -> None:
    before = resolve_case(NAME, "smoke").case
    after = Case.model_validate(json.loads(json.dumps(before.model_dump(mode="json"))))
    assert after == before
    assert after.compute_key(FINGERPRINT) == before.compute_key(FINGERPRINT)


def test_canonical_has_one_spelling() -> None:
    assert (
        schema.to_canonical_json({"b": [1, 1.5, None], "a": "é\n"})
        == '{"a":"é\\n","b":[1,1.5,null]}'
    )
    with pytest.raises(ValueError, match="not JSON compliant"):
        schema.to_canonical_json(float("nan"))


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
    frozen_case = resolve_case(NAME).case
    *parents, name = dotted.split(".")
    owner = get_leaf(frozen_case, ".".join(parents)) if parents else frozen_case
    before = getattr(owner, name)
    with pytest.raises(ValidationError, match="Instance is frozen"):
        setattr(owner, name, before)
    with pytest.raises(ValidationError, match="Instance is frozen"):
        delattr(owner, name)
    assert getattr(owner, name) == before


# Published keys never change. They are literals, copied from the committed records, so that a
# change of the code cannot change them too.

SMOKE_KEYS = {
    ("aquila2-34b-lambada", "closed"): "7a9e52e92dd6c079",
    ("aquila2-7b-alpaca", "closed"): "6418ddb65a339b72",
    ("glm-large-record", "closed"): "0f8816dd797c1988",
    ("glm-large-record", "open"): "fd48749f246a103d",
    ("llama1-13b-openwebtext", "closed"): "cdf79641c4d7ea9d",
    ("llama1-7b-openwebtext", "closed"): "df452970aeda7954",
    ("llama2-7b-generate", "closed"): "7e324ef0343661f0",
    ("llama2-7b-generate", "open"): "651f8e4eeb5f53be",
    ("llama2-7b-mmlu", "closed"): "975250027bda5e24",
    ("llama2-7b-mmlu", "open"): "827a5667d6bdce75",
    ("llama3-8b-generate", "closed"): "fb7eeb048787b57f",
    ("llama3-8b-generate", "open"): "d58d168fb62be3f6",
}
MMLU = "90f52819be1bff05e4587a05913ab9d83358d65684ff4760c7fc87f35dc9bc3f"
LAMBADA = "e7363f374fec84ff13be3f278af0eecbd07ec37953e630f08a64e3c1f61accee"
CORPUS = "568c3e691b2f6b14107a014674a667aa953e57bc42c330fc24875b7f316dd612"
ALPACA = (
    # the same file as below, joined with three line feeds
    "7e5bf3047f77954a319420ca99b6d2a3780547a7892629f6c73eb477bb076376"
)
# Seeded ids of a vocabulary of 128,256. No texts of llama2-7b-generate are published, so its keys
# are pinned for the same data.
IDS = "4ab2334057a308a7835656bc7283fd3c71d4b7fb1a5027dd92b867b91e8ca813"
RECORD = "1982248769febc8d45b5df91fdf08e40243d3cbea9b94ed3d0fe61abe18570b6"
FULL_KEYS = {
    ("llama2-7b-mmlu", "closed", "bf16", MMLU): "59e3e6b05d8abc2f",
    ("llama2-7b-mmlu", "closed", "fp16", MMLU): "132ee5803340fe36",
    ("llama2-7b-mmlu", "closed", "fp8", MMLU): "65a52d78bb222a9e",
    ("llama2-7b-mmlu", "open", "fp8", MMLU): "f4cadef6dae6aeba",
    ("aquila2-34b-lambada", "closed", "fp8", LAMBADA): "d5844ddac72bef72",
    ("llama1-7b-openwebtext", "closed", "fp8", CORPUS): "9b827a7169e35290",
    ("llama1-7b-openwebtext", "closed", "fp8-pure", CORPUS): "e64fba3f8c977dfd",
    ("llama1-13b-openwebtext", "closed", "fp8-pure", CORPUS): "145f3d1beec2c50b",
    ("aquila2-7b-alpaca", "closed", "fp8-pure", ALPACA): "526cf6436fbae748",
    ("llama2-7b-mmlu", "open", "bf16", MMLU): "92abf2dd7c31ee62",
    ("aquila2-34b-lambada", "closed", "bf16", LAMBADA): "e93b909ed7ec03c6",
    ("aquila2-34b-lambada", "closed", "fp16", LAMBADA): "6f7aacb95d83465c",
    ("llama1-7b-openwebtext", "closed", "bf16", CORPUS): "d76f3bbad433de49",
    ("llama1-7b-openwebtext", "closed", "bf16-pure", CORPUS): "71de13868a1bb7e8",
    ("llama1-13b-openwebtext", "closed", "bf16-pure", CORPUS): "53b45aa781c01e03",
    ("aquila2-7b-alpaca", "closed", "bf16-pure", ALPACA): "a7994305987d2a4e",
    ("glm-large-record", "closed", "bf16", RECORD): "fdaf2111e738d2af",
    ("glm-large-record", "open", "bf16", RECORD): "00531b394b46f00b",
    ("glm-large-record", "closed", "fp16", RECORD): "59d7c2c96d5fc38b",
    ("llama2-7b-generate", "closed", "bf16", IDS): "aa3125ba18752967",
    ("llama2-7b-generate", "closed", "fp8", IDS): "17dc8f26d139972e",
    ("llama2-7b-generate", "open", "bf16", IDS): "192b14b10404a8d8",
    ("llama3-8b-generate", "closed", "bf16", IDS): "9812482d75210aa8",
    ("llama3-8b-generate", "closed", "fp8", IDS): "05e30b306f7c521b",
    ("llama3-8b-generate", "open", "fp8", IDS): "4705a9833d1f5f56",
}
# A case that got fields later: the settings that give those fields their defaults, and the keys of
# the records from before.
EARLIER_DEFAULTS = ['question.data.joint="\\n"', "question.data.last_target=false"]
EARLIER_KEYS = {
    (
        "smoke",
        "fp32",
        "addd00c60bc7572e83ece5a0d418cdda1f3818d5472159bca72e444aefb574bb",
    ): "ecd3e70bcb8fdf75",
    (
        "full",
        "bf16-pure",
        "2288acadd413c9ade221122180c9844641efb992f66b4acf523a30b012fa6f17",
    ): "4c8d255b4e04c557",
}


def test_every_shipped_case_has_pinned_keys() -> None:
    assert set(SMOKE_KEYS) == {
        (name, division)
        for name in list_shipped_cases()
        for division in resolve_case(name, "smoke").case.divisions
    }
    assert {name for name, *_ in FULL_KEYS} == set(list_shipped_cases())


@pytest.mark.parametrize(("name", "division"), SMOKE_KEYS)
def test_keys_of_smoke_sizes(name: str, division: str) -> None:
    """The keys hold the fingerprint of the made data: if the made data change, the question
    changes.
    """
    resolved_case = resolve_case(name, "smoke", division=division).case
    request = resolved_case.question.describe_for_task(
        Sources(None, None, None), None, resolved_case.tune.pack, resolved_case.published
    )
    prepared = resolved_case.question.task_row.prepare(request)
    assert resolved_case.compute_key(prepared.facts.fingerprint) == SMOKE_KEYS[name, division]


@pytest.mark.parametrize(("name", "division", "precision", "fingerprint"), FULL_KEYS)
def test_keys_of_full_sizes(name: str, division: str, precision: str, fingerprint: str) -> None:
    resolved_case = resolve_case(name, "full", precision, division).case
    assert (
        resolved_case.compute_key(fingerprint) == FULL_KEYS[name, division, precision, fingerprint]
    )


@pytest.mark.parametrize(("size", "precision", "fingerprint"), EARLIER_KEYS)
def test_keys_of_alpaca_before_its_later_fields(
    size: str, precision: str, fingerprint: str
) -> None:
    name, key = "aquila2-7b-alpaca", EARLIER_KEYS[size, precision, fingerprint]
    assert (
        resolve_case(name, size, precision, settings=EARLIER_DEFAULTS).case.compute_key(fingerprint)
        == key
    )
    others = [
        resolve_case(name, size, precision, settings=EARLIER_DEFAULTS[i : i + 1]).case.compute_key(
            fingerprint
        )
        for i in (0, 1)
    ]
    assert (
        len({key, *others, resolve_case(name, size, precision).case.compute_key(fingerprint)}) == 4
    )


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_published_records_have_the_keys_of_their_cases(path: Path) -> None:
    published_record = record.read_record(path)
    stored_case = published_record.case
    assert (
        compute_question_key(stored_case.question, published_record.fingerprint) == stored_case.key
    )
    if stored_case.name not in list_shipped_cases():  # a case of a user's model
        assert stored_case.name.startswith("smollm2-")
        return
    load = published_record.question.load
    facts = {} if load is None else load.model_dump(mode="json", exclude_none=True)
    shipped = resolve_case(
        stored_case.name,
        stored_case.size,
        stored_case.precision,
        stored_case.division,
        [f"load.{name}={value}" for name, value in facts.items()],
    ).case
    unchanged = (
        list_changed_keys(stored_case.origins) == [] and list_later_fields(published_record) == []
    )
    assert (shipped.compute_key(published_record.fingerprint) == stored_case.key) == unchanged


def test_a_later_field_is_in_the_key_only_beside_its_default() -> None:
    """So a field can be added without a change of any published key."""
    question = resolve_case("llama1-7b-openwebtext", "smoke").case.question.model_dump(mode="json")
    key = compute_question_key(question, FINGERPRINT)
    assert LATER_FIELDS[0] == (("train", "evaluate_every"), None)
    assert question["train"]["evaluate_every"] is None
    train = question["train"]
    without = {name: value for name, value in train.items() if name != "evaluate_every"}
    assert compute_question_key(question | {"train": without}, FINGERPRINT) == key
    assert (
        compute_question_key(question | {"train": train | {"evaluate_every": 5}}, FINGERPRINT)
        != key
    )
    # False is not None: only the exact default is left out
    assert (
        compute_question_key(question | {"train": train | {"evaluate_every": False}}, FINGERPRINT)
        != key
    )
    scored = resolve_case(NAME, "smoke").case.question.model_dump(mode="json")
    assert scored["train"] is None
    bare = {name: value for name, value in scored.items() if name != "train"}
    assert compute_question_key(bare, FINGERPRINT) == compute_question_key(scored, FINGERPRINT)
    assert compute_question_key(scored | {"train": without}, FINGERPRINT) != compute_question_key(
        scored, FINGERPRINT
    )


def test_every_later_field_is_a_field_with_that_default() -> None:
    """A field of data is one of a task's, and a field of a model one of a family's."""
    for path, default in LATER_FIELDS:
        models: list[Any] = [Question]
        if path[0] == "data":
            models = [
                task.data
                for task in tasks.load_tasks().values()
                if path[1] in task.data.model_fields
            ]
        elif path[0] == "model":
            models = [
                row.shape
                for row in families.load_families().values()
                if path[1] in row.shape.model_fields
            ]
        elif path[1:]:
            annotation = Question.model_fields[path[0]].annotation
            models = [
                kind
                for kind in (annotation, *get_args(annotation))
                if isinstance(kind, type) and issubclass(kind, BaseModel)
            ]
        assert [model.model_fields[path[-1]].default for model in models] == [default]
        assert type(models[0].model_fields[path[-1]].default) is type(default)


def test_a_later_type_of_the_kv_cache_is_in_the_key_only_if_it_is_another() -> None:
    """None is the type of the activations, and so is a record from before the field."""
    question = resolve_case("llama3-8b-generate", "smoke").case.question.model_dump(mode="json")
    precision = question["precision"]
    assert precision["kv"] is None
    without = {name: value for name, value in precision.items() if name != "kv"}
    key = compute_question_key(question, FINGERPRINT)
    assert compute_question_key(question | {"precision": without}, FINGERPRINT) == key
    fp8 = question | {"precision": precision | {"kv": "fp8"}}
    assert compute_question_key(fp8, FINGERPRINT) != key


def test_scoring_and_training_have_the_keys_of_questions_without_a_load() -> None:
    question = resolve_case(NAME, "smoke").case.question.model_dump(mode="json")
    assert question["load"] is None
    without = {name: value for name, value in question.items() if name != "load"}
    key = compute_question_key(question, FINGERPRINT)
    assert compute_question_key(without, FINGERPRINT) == key


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (["load.concurrency=16"], "C16"),
        (["load.rate=8"], "8 req/s"),
        (["load.rate=8", "load.arrivals=constant"], "8 req/s constant"),
        (["load.rate=8", "load.max_concurrency=4"], "8 req/s, C≤4"),
        (["load.mode=offline"], "offline"),
        (["question.data.prompt_tokens=512"], "C16"),
        (["question.data.output_tokens=[16, 32]"], "C16"),
        (["question.data.lengths=natural"], "C16"),
    ],
)
def test_load_and_lengths_are_in_the_key(settings: list[str], name: str) -> None:
    """One published key differs from all of them, except from its own load said again."""
    shipped = resolve_case("llama3-8b-generate").case
    other = resolve_case("llama3-8b-generate", settings=settings).case
    assert other.question.load is not None
    assert other.question.load.name == name
    is_same = other.question == shipped.question
    assert is_same == (settings == ["load.concurrency=16"])
    assert (other.compute_key(IDS) == shipped.compute_key(IDS)) == is_same


def test_the_default_of_arrivals_has_one_spelling_in_the_key() -> None:
    keys = {
        resolve_case("llama3-8b-generate", settings=["load.rate=8", *more]).case.compute_key(IDS)
        for more in ([], ["load.arrivals=poisson"])
    }
    assert len(keys) == 1
