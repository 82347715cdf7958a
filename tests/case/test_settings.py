"""Settings of the command line (`--set`): which keys can be set, to what, and what is refused."""

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from fixtures.cases import NAME, OWN_CASE, get_leaf, get_resolve_error, write_own_case
from steelyard import files, tasks
from steelyard.case import problems, resolve

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
UNKNOWN_TASK = (
    "no task 'gsm8k'; known: mmlu, lambada, openwebtext, alpaca, superglue_record, generate"
)
NOT_AN_INTEGER = "must be a whole number"


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("tune.batch_tokens=16384", "tune.batch_tokens", 16384),
        ("tune.batch_tokens=16_384", "tune.batch_tokens", 16384),
        ("tune.compile=false", "tune.compile", False),
        ("tune.compile=true", "tune.compile", True),
        ("tune.attention=rows", "tune.attention", "rows"),
        ('tune.attention="rows"', "tune.attention", "rows"),
        ("tune.batching=single", "tune.batching", "single"),
        ("question.model.rope_base=500000", "question.model.rope_base", 500000.0),
        ("question.model.norm_eps=1e-6", "question.model.norm_eps", 1e-6),
        ("question.model.tied=true", "question.model.tied", True),
        ("question.division=open", "question.division", "open"),
        ("question.seed=-3", "question.seed", -3),
        ("question.data.fingerprint=none", "question.data.fingerprint", "none"),
        ("question.data.made={subjects = 2, questions = 3}", "question.data.made.questions", 3),
        ("question.data.made.seed=9", "question.data.made.seed", 9),
        ("max_interval=0.5", "max_interval", 0.5),
        ("gate.target=0.25", "gate.target", 0.25),
    ],
)
def test_a_setting_changes_its_key_alone(setting: str, key: str, value: object) -> None:
    resolved = resolve.resolve_case(NAME, "smoke", settings=[setting])
    assert get_leaf(resolved.case, key) == value
    assert type(get_leaf(resolved.case, key)) is type(value)
    assert resolved.origins[key] == "command line"
    others = {k: v for k, v in resolved.origins.items() if v == "command line"}
    expected = {"size", key} | ({"question.data.made.subjects"} if "{" in setting else set())
    assert set(others) == expected


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            "tune.batch_token=1",
            "--set: no key 'tune.batch_token'; did you mean 'tune.batch_tokens'?",
        ),
        ("batch_tokens=1", "--set: no key 'batch_tokens'; did you mean 'tune.batch_tokens'?"),
        ("zzzzzz=1", f"--set: no key 'zzzzzz'; allowed: {', '.join(resolve.list_settable_keys())}"),
        (
            "tune.batch_tokens",
            (
                "--set 'tune.batch_tokens' is not of the form key=value, such as"
                " tune.batch_tokens=16384"
            ),
        ),
        ("=3", "--set '=3' is not of the form key=value, such as tune.batch_tokens=16384"),
        ("", "--set '' is not of the form key=value, such as tune.batch_tokens=16384"),
    ],
)
def test_settings_without_a_known_key_are_refused(setting: str, line: str) -> None:
    assert get_resolve_error(NAME, "full", setting) == line


@pytest.mark.parametrize(
    "key",
    [
        "question.kind",
        "question.task",
        "question.model.family",
        "question.data.kind",
        "name",
        "size",
        "tune",
        "question",
    ],
)
def test_keys_that_cannot_be_set_are_refused(key: str) -> None:
    assert get_resolve_error(NAME, "full", f"{key}=train").startswith(f"--set: no key {key!r}; ")


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            "tune.batch_tokens=[1, 2]",
            f"tune.batch_tokens: {NOT_AN_INTEGER}, or auto (it is [1, 2])",
        ),
        ("tune.batch_tokens=0", "tune.batch_tokens: must be at least 1, or auto (it is 0)"),
        ("tune.batch_tokens=many", f"tune.batch_tokens: {NOT_AN_INTEGER}, or auto (it is 'many')"),
        (
            "question.model.norm_eps=nan",
            "question.model.norm_eps: must be a finite number (it is nan)",
        ),
        ("max_interval=inf", "max_interval: must be a finite number (it is inf)"),
        ("question.division=shut", "question.division: allowed: 'closed' or 'open' (it is 'shut')"),
        ("tune.compile=7", "tune.compile: must be true or false (it is 7)"),
        ("tune.attention=7", "tune.attention: must be text in quotes (it is 7)"),
    ],
)
def test_settings_of_the_wrong_type_are_refused(setting: str, line: str) -> None:
    assert (
        get_resolve_error(NAME, "full", setting)
        == f"case '{NAME}', command line: {line}; see docs/cases.md"
    )


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            ("load.max_concurrency=4",),
            "--set load.max_concurrency: question.load: load.max_concurrency is for an open loop;"
            " add load.rate=N, in requests per second",
        ),
        (
            ("load.arrivals=constant",),
            "--set load.arrivals: question.load: load.arrivals is for an open loop; add"
            " load.rate=N, in requests per second",
        ),
        (
            ("load.mode=rate",),
            "--set load.mode: question.load: load.mode 'rate' is for an open loop; add"
            " load.rate=N, in requests per second",
        ),
        (
            ("load.rate=2", "load.arrivals=trace"),
            "--set load.rate, --set load.arrivals: question.load: load.arrivals 'trace' are those"
            " of the data; leave load.rate out, or name other arrivals",
        ),
        (
            ("load.concurrency=4", "load.rate=2"),
            "--set load.concurrency, --set load.rate: question.load: name one of"
            " load.concurrency and load.rate",
        ),
        (
            ("load.mode=offline", "load.concurrency=4"),
            "--set load.mode, --set load.concurrency: question.load: load.concurrency has no"
            " meaning with mode 'offline'; leave it out",
        ),
        (
            ("question.data.prompt_tokens=200000",),
            "--set question.data.prompt_tokens: question: prompt and output have up to 200008"
            " tokens, more than the model's 512 positions",
        ),
        (
            ("question.data.output_tokens=0",),
            "--set question.data.output_tokens: question.data: output_tokens 0: allowed are a"
            " number of tokens, or two bounds [least, most]",
        ),
        (
            ("load.mode=offline", "load.concurrency=4", "load.rate=1", "load.arrivals=constant"),
            "--set load.mode, --set load.concurrency, --set load.rate, 1 more: question.load: name"
            " one of load.concurrency and load.rate",
        ),
    ],
)
def test_what_the_command_line_made_wrong_names_its_settings(
    settings: tuple[str, ...], line: str
) -> None:
    """No line of the shipped file is named: it is right."""
    case = "llama3-8b-generate"
    said = get_resolve_error(case, "smoke", *settings)
    assert said == f"case '{case}', {line}; see docs/cases.md"


def test_a_case_made_in_memory_has_no_lines() -> None:
    shipped = resolve.read_case("llama3-8b-generate")
    text = shipped.text.replace("concurrency = ", "concurrency = -")
    table = files.parse_toml(text)
    for origins in ({}, {"question.model.layers": "config.json"}):
        made = resolve.CaseSource("made", text, table, origins)
        with pytest.raises(problems.CaseError) as refused:
            resolve.resolve_case(made, "full", settings=["requests=7"])
        assert ("line " in str(refused.value)) == (not origins)


def test_deep_settings_are_refused() -> None:
    assert "tune.env: must be a table" in get_resolve_error(
        NAME, "full", "tune.env=" + "[" * 100_000
    )


def test_lists_are_not_settable_but_read() -> None:
    """No settable key is a list; one given for a list is read as one and then refused by its
    type.
    """
    assert not [key for key in resolve.list_settable_keys() if key in ("engines", "divisions")]
    assert "(it is ['a', 'b'])" in get_resolve_error(NAME, "full", 'tune.attention=["a", "b"]')


def test_later_settings_win() -> None:
    assert (
        resolve.resolve_case(NAME, settings=["tune.warmup=3", "tune.warmup=5"]).case.tune.warmup
        == 5
    )


def test_a_setting_does_not_stay_for_the_next_case() -> None:
    resolve.resolve_case(
        NAME, "smoke", settings=["tune.env.NCCL_ALGO=Ring", "question.model.layers=7"]
    )
    assert resolve.resolve_case(NAME, "smoke").case.tune.env == ONE_THREAD
    assert resolve.resolve_case(NAME, "smoke").case.question.model.layers == 2


# Settable keys that this case lacks: those of other data, gates and kinds.
KEYS_OF_OTHER_KINDS = {
    f"question.data.{key}"
    for key in (
        "rows",
        "held_out",
        "made.passages",
        "made.documents",
        "made.conversations",
        "wrong",
        "queries",
        "evaluated",
        "joint",
        "last_target",
        "source",
        "prompt_tokens",
        "output_tokens",
        "lengths",
    )
}
KEYS_OF_OTHER_KINDS |= {
    f"published.{name}" for task in tasks.load_tasks().values() for name in task.published_facts
}
KEYS_OF_OTHER_KINDS |= {
    "gate.below",
    "gate.reach",
    "question.model.dropout",
    "question.data.made.held_out",
}
KEYS_OF_OTHER_KINDS |= {
    "question.data.made.queries",
    "question.data.made.entities",
    *(
        key
        for key in resolve.list_settable_keys()
        if key.startswith(("question.train", "question.load", "slo"))
    ),
}


def test_every_settable_key_can_be_set(tmp_path: Path) -> None:
    """Each key that --set lists can be set to the value it has."""
    made_data = "\n[question.data.made]\nsubjects = 2\nquestions = 2\n"
    gate = "\n[gate]\nmetric = 'acc'\ntarget = 0.5\nwithin = 0.1\nagree_within = 0.1\n"
    path = write_own_case(tmp_path, OWN_CASE + made_data + gate)
    before = resolve.resolve_case(path).case
    for key in resolve.list_settable_keys():
        value = get_leaf(before, key) if key not in KEYS_OF_OTHER_KINDS else None
        if value is not None:
            assert (
                resolve.resolve_case(path, settings=[f"{key}={format_toml(value)}"]).case == before
            ), key


def format_toml(value: object) -> str:
    """Return the value as TOML text for `--set`."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {format_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)
