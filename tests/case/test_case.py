"""Case files: shipped cases and sizes, files of the user, refusals of unknown keys and wrong
values, and environment variables.
"""

from pathlib import Path

import pytest

from fixtures.cases import NAME, OWN_CASE, get_resolve_error, write_own_case
from fixtures.golden import golden
from steelyard import accelerators
from steelyard.case import resolve
from steelyard.case.precision import load_presets
from steelyard.errors import RequestError
from steelyard.models import families
from steelyard.tasks.questions import GeneratedQuestionsConfig

# Case files: names, sizes, TOML and unknown keys.


def test_the_shipped_case() -> None:
    case = resolve.resolve_case(NAME).case
    assert (case.name, case.size, case.divisions) == (NAME, "full", ["closed", "open"])
    model = case.question.model
    assert (
        model.layers,
        model.hidden,
        model.heads,
        model.kv_heads,
        model.ffn,
        model.vocab,
        model.positions,
    ) == (
        32,
        4096,
        32,
        32,
        11008,
        32000,
        4096,
    )
    assert case.question.data.made is None
    assert case.gate is not None
    assert (case.gate.target, case.gate.within, case.gate.agree_within) == (0.458, 0.01, 0.005)
    assert [(row.published_as, row.ran_as) for row in case.reference] == [
        ("fp16", "fp16"),
        ("fp32", "tf32"),
    ]
    assert case.reference[0].values["p_infer_core"] == 10052.2
    assert NAME in resolve.list_shipped_cases()


def test_size_smoke_changes_only_the_keys_of_its_table() -> None:
    full, smoke = (resolve.resolve_case(NAME, size).case for size in ("full", "smoke"))
    assert smoke.size == "smoke"
    changed = {
        "precision": smoke.question.precision,
        "model": full.question.model.model_copy(
            update={
                "layers": 2,
                "hidden": 64,
                "heads": 4,
                "kv_heads": 2,
                "ffn": 160,
                "vocab": 512,
                "positions": 512,
                "nominal_parameters": 1e5,
            }
        ),
        "data": full.question.data.model_copy(
            update={
                "context": 256,
                "subjects": 4,
                "made": GeneratedQuestionsConfig(subjects=4, questions=12),
            }
        ),
    }
    assert smoke.question == full.question.model_copy(update=changed)
    assert smoke.question.precision.name == "fp32"
    assert smoke.tune == full.tune.model_copy(
        update={"batch_tokens": 1024, "compile": False, "warmup": 1, "env": ONE_THREAD}
    )
    assert (smoke.gate, smoke.reference, smoke.title) == (full.gate, full.reference, full.title)


def test_a_case_file_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_own_case(tmp_path)
    resolved = resolve.resolve_case(path)
    assert resolved.path == path
    assert resolved.case.name == "own"
    assert resolved.case.question.precision == load_presets()["score"]["fp16"]
    assert resolved.case.question.data.shots == 5
    monkeypatch.chdir(tmp_path)
    assert resolve.resolve_case("own.toml").case == resolved.case
    # the file has no smoke table, so size smoke changes nothing else
    assert resolve.resolve_case("own.toml", "smoke").case == resolved.case.model_copy(
        update={"size": "smoke"}
    )


def test_unknown_case_names_are_refused(tmp_path: Path) -> None:
    assert get_resolve_error("llama2-7b-mmul") == (golden("no-case-llama-2-7-mmul"))
    known_cases = ", ".join(resolve.list_shipped_cases())
    assert get_resolve_error("zzz") == golden("no-case-zzz-known-cases-smoke", known_cases)
    for path in (str(tmp_path / "absent.toml"), "../../etc/passwd.toml"):
        assert (
            get_resolve_error(path)
            == f"case file {path!r} does not exist; give the path of a TOML file or one of:"
            f" {known_cases}"
        )
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    assert (
        get_resolve_error(str(folder))
        == f"case file {str(folder)!r} cannot be read: Is a directory; check its path"
    )
    assert get_resolve_error("../cases/llama2-7b-mmlu").startswith(
        "no case '../cases/llama2-7b-mmlu'"
    )


@pytest.mark.parametrize("size", ["tiny", "", "Full"])
def test_unknown_sizes_are_refused(size: str) -> None:
    assert get_resolve_error(NAME, size) == f"size {size!r} is not known; allowed: smoke, full"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"name = ", "Invalid value (at end of document)"),
        (b"{}", "Invalid statement (at line 1, column 1)"),
        (b"a = 1\na = 2\n", "Cannot overwrite a value (at line 2, column 6)"),
        (b"\x00", "Invalid statement (at line 1, column 1)"),
        (b"x = " + b"[" * 10_000, "tables nested more than 16 deep; a case has tables four deep"),
        (b"a." * 32_000 + b"a = 1", "tables nested more than 16 deep; a case has tables four deep"),
        (
            b"[" + b'"a".' * 12_000 + b"a]",
            "tables nested more than 16 deep; a case has tables four deep",
        ),
        (b"x = " + b"1" * 5_000, "a key or a number has more than 255 characters"),
        (b"x = 0x" + b"f" * 5_000, "a key or a number has more than 255 characters"),
    ],
)
def test_files_that_are_not_toml_are_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    line = get_resolve_error(str(path))
    assert line.startswith(
        (f"case file {str(path)!r} is not TOML: {reason}", f"case file {str(path)!r}: {reason}")
    )


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.toml"
    with path.open("wb") as file:
        file.truncate((64 << 10) + 1)
    assert (
        get_resolve_error(str(path))
        == f"case file {str(path)!r} is larger than 65536 bytes; a case file is a few kilobytes"
    )


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        (
            'kind = "score"',
            'kind = "score"\nfast = true',
            "line 7: unknown key 'question.fast'; remove it",
        ),
        (
            "layers = 1",
            "layers = 1\nlayer = 2",
            "line 13: unknown key 'question.model.layer'; did you mean 'layers'?",
        ),
        ("context = 64", "context = 64\n[extra]\nx = 1", "line 23: unknown key 'extra'; remove it"),
        (
            "context = 64",
            "context = 64\n[tune]\nbatch = 1",
            "line 24: unknown key 'tune.batch'; did you mean 'batching'?",
        ),
        (
            "positions = 64",
            "positions = 64\nrope_theta = 1e4",
            "line 19: unknown key 'question.model.rope_theta'; here it is called rope_base",
        ),
        (
            "layers = 1",
            "num_hidden_layers = 1",
            "line 12: unknown key 'question.model.num_hidden_layers'; here it is called layers",
        ),
    ],
)
def test_unknown_keys_are_refused_in_one_line(
    old: str, new: str, place: str, tmp_path: Path
) -> None:
    path = write_own_case(tmp_path, OWN_CASE, (old, new))
    assert get_resolve_error(path) == f"case {path!r}, {place}; see docs/cases.md"


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
UNKNOWN_TASK = (
    "no task 'gsm8k'; known: mmlu, lambada, openwebtext, alpaca, superglue_record, generate"
)
UNKNOWN_FAMILY = f"no family 'bert'; known: {', '.join(families.load_families())}"
NOT_AN_INTEGER = "must be a whole number"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "context = 64",
            "context = 64\n[tune]\nenv = 3",
            "line 24: tune.env: must be a table (it is 3)",
        ),
        (
            "layers = 1",
            'layers = "many"',
            f"line 12: question.model.layers: {NOT_AN_INTEGER} (it is 'many')",
        ),
        (
            "layers = 1",
            "layers = 1.5",
            f"line 12: question.model.layers: {NOT_AN_INTEGER} (it is 1.5)",
        ),
        (
            "layers = 1",
            "layers = 0",
            "line 12: question.model.layers: must be at least 1 (it is 0)",
        ),
        ("layers = 1\n", "", "line 10: question.model.layers is missing"),
        (
            "context = 64",
            "context = [64]",
            f"line 22: question.data.context: {NOT_AN_INTEGER} (it is [64])",
        ),
        ('kind = "mmlu"', 'kind = "gsm8k"', f"line 20: question.data: {UNKNOWN_TASK}"),
        ('family = "llama"', 'family = "bert"', f"line 10: question.model: {UNKNOWN_FAMILY}"),
        (
            "positions = 64",
            "positions = 64\nnorm_eps = nan",
            "line 19: question.model.norm_eps: must be a finite number (it is nan)",
        ),
        (
            "positions = 64",
            "positions = 64\nrope_base = inf",
            "line 19: question.model.rope_base: must be a finite number (it is inf)",
        ),
        (
            'name = "own"',
            'name = "../own"',
            "line 1: name: must have the form ^[a-z0-9][a-z0-9.-]{0,63}$ (it is '../own')",
        ),
        (
            'precision = "fp16"',
            'precision = "fp4"',
            (
                "line 8: precision 'fp4' is not known; allowed for score: fp32, tf32, fp16, bf16,"
                " fp8; train: fp32, tf32, fp16, bf16, bf16-pure, fp8, fp8-pure, fp16-o2, bf16-o2;"
                " generate: fp32, fp16, bf16, fp8"
            ),
        ),
        (
            "context = 64",
            'context = 64\n[gate]\nmetric = "loss"\nbelow = "acc"\nlimit = 3',
            "line 26: unknown key 'gate.limit'; remove it",
        ),
    ],
)
def test_wrong_values_are_refused_in_one_line(
    old: str, new: str, line: str, tmp_path: Path
) -> None:
    path = write_own_case(tmp_path, OWN_CASE, (old, new))
    assert get_resolve_error(path) == f"case {path!r}, {line}; see docs/cases.md"


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    """The problems of both sizes, in the order of the file, one a line."""
    text = OWN_CASE + "\n[smoke.question.model]\nlayers = 0\nlayer = 1\n"
    path = write_own_case(
        tmp_path, text, ("ffn = 12", "intermediate_size = 12"), ("vocab = 32", 'vocab = "32k"')
    )
    with pytest.raises(RequestError) as caught:
        resolve.resolve_case(path)
    assert caught.value.lines == [
        f"case {path!r}: 4 problems; see docs/cases.md",
        golden("line-16-unknown-key-question-model"),
        golden("line-17-question-model-vocab-must"),
        golden("line-25-question-model-layers-must"),
        golden("line-26-unknown-key-question-model"),
    ]
    assert get_resolve_error(path, "smoke") == get_resolve_error(path)


def test_refusals_hold_no_words_of_pydantic() -> None:
    """Each kind of problem that the schema of a case can have is told in a sentence of
    Steelyard's.
    """
    wrong: list[tuple[str, object]] = [
        ("tune.sharding", 7),
        ("tune.compile", "x"),
        ("tune.env", 1),
        ("tune.parallel", 1),
        ("tune.batching", "x"),
        ("max_interval", 0),
        ("max_interval", "x"),
        ("divisions", 1),
        ("question.precision", 1),
        ("gate", 3),
        ("reference", [{"source": 1}]),
        ("devices", "x"),
        ("question.seed", 1e30),
        ("question.data.shots", 9),
    ]
    for key, value in wrong:
        table = resolve.read_case(NAME).table
        *parents, leaf = key.split(".")
        node = table
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
        with pytest.raises(RequestError) as caught:
            resolve.resolve_case(resolve.CaseSource("own.toml", "", table))
        for word in ("Input", "valid", "Field", "error", "belongs", "instance"):
            assert word not in str(caught.value).replace("invalid", ""), (key, str(caught.value))


def test_a_long_value_is_shortened(tmp_path: Path) -> None:
    path = write_own_case(tmp_path, OWN_CASE, ("layers = 1", f'layers = "{"x" * 60_000}"'))
    assert len(get_resolve_error(path)) < 600


@pytest.mark.parametrize(
    ("heads", "kv_heads", "hidden"),
    [(3, 1, 8), (4, 3, 8), (8, 8, 8), (2, 1, 6)],
    ids=["heads", "groups", "odd", "odd 3"],
)
def test_dimensions_that_do_not_divide_are_refused(
    heads: int, kv_heads: int, hidden: int, tmp_path: Path
) -> None:
    changes = (
        ("hidden = 8", f"hidden = {hidden}"),
        ("\nheads = 2", f"\nheads = {heads}"),
        ("kv_heads = 1", f"kv_heads = {kv_heads}"),
    )
    expected = (
        f"hidden {hidden} must be an even multiple of heads {heads}, and heads of kv_heads"
        f" {kv_heads}"
    )
    assert f"question.model: {expected}" in get_resolve_error(
        write_own_case(tmp_path, OWN_CASE, *changes)
    )


@pytest.mark.parametrize("value", ["3", '"yes"', "[1]", "true"])
def test_smoke_must_be_a_table(value: str, tmp_path: Path) -> None:
    path = write_own_case(tmp_path, f"smoke = {value}\n{OWN_CASE}")
    for size in ("full", "smoke"):
        assert get_resolve_error(path, size).startswith(f"case {path!r}: smoke is ")


@pytest.mark.parametrize("text", ["question = 3", "question = []", "", "[[question]]\nkind = 1"])
def test_files_without_a_question_are_refused(text: str, tmp_path: Path) -> None:
    path = write_own_case(tmp_path, text)
    for options in ({}, {"precision": "bf16", "division": "open"}):
        assert get_resolve_error(path, **options).startswith(f"case {path!r}: ")
    assert get_resolve_error(path, "full", "question.model.layers=2").startswith(
        ("case ", "--set: ")
    )


def test_unknown_keys_in_the_smoke_table_are_refused(tmp_path: Path) -> None:
    path = write_own_case(tmp_path, OWN_CASE + "\n[smoke.question.model]\nlayer = 2\n")
    line = "line 25: unknown key 'question.model.layer'; did you mean 'layers'?"
    assert get_resolve_error(path, "smoke") == f"case {path!r}, {line}; see docs/cases.md"


# A case can come from a stranger: it must not choose programs or libraries.


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "PATH",
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "PYTHONSTARTUP",
        "TORCHINDUCTOR_CACHE_DIR",
    ],
)
def test_environment_variables_outside_the_list_are_refused(name: str, tmp_path: Path) -> None:
    path = write_own_case(tmp_path, OWN_CASE + f'\n[tune.env]\n{name} = "x"\n')
    allowed = ", ".join(sorted(accelerators.list_tune_variables()))
    expected = f"environment variable {name} is not one a tune may set; allowed: {allowed}"
    assert f"tune: {expected}" in get_resolve_error(path)
    assert expected in get_resolve_error(NAME, "full", f"tune.env.{name}=x")
    assert expected in get_resolve_error(NAME, "full", f'tune.env={{{name} = "x"}}')


def test_a_nul_in_an_environment_variable_is_refused(tmp_path: Path) -> None:
    path = write_own_case(tmp_path, OWN_CASE + '\n[tune.env]\nNCCL_ALGO = "a\\u0000b"\n')
    assert golden("environment-variable-nccl_algo-holds-nul-character") in get_resolve_error(path)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("tune.env.OMP_NUM_THREADS=2", "2"),
        ('tune.env.OMP_NUM_THREADS="2"', "2"),
        ("tune.env.OMP_NUM_THREADS=true", "true"),
        ("tune.env.OMP_NUM_THREADS=a=b", "a=b"),
        ("tune.env.OMP_NUM_THREADS=", ""),
        ('tune.env={OMP_NUM_THREADS = "3"}', "3"),
    ],
)
def test_environment_values_are_text(setting: str, value: str) -> None:
    resolved = resolve.resolve_case(NAME, settings=[setting])
    assert resolved.case.tune.env == {"OMP_NUM_THREADS": value}
    assert resolved.origins["tune.env.OMP_NUM_THREADS"] == "command line"


def test_a_case_has_no_third_size() -> None:
    source = resolve.read_case(NAME)
    with pytest.raises(ValueError, match="size 'tiny' is not known; allowed: smoke, full"):
        source.apply_size("tiny")  # type: ignore[arg-type]
