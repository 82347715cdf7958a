"""Case files: shipped cases and sizes, files of the user, refusals of unknown keys and wrong
values, and environment variables.
"""

from pathlib import Path

import pytest

from fixtures.cases import NAME, OWN, own, refusal
from fixtures.golden import golden
from steelyard import accelerators
from steelyard.case import resolve
from steelyard.case.precision import load_presets
from steelyard.errors import RequestError
from steelyard.models import families
from steelyard.tasks.questions import GeneratedQuestionsConfig

# Case files: names, sizes, TOML and unknown keys.


def test_the_shipped_case() -> None:
    found = resolve.resolve_case(NAME).case
    assert (found.name, found.size, found.divisions) == (NAME, "full", ["closed", "open"])
    model = found.question.model
    assert (model.layers, model.hidden, model.heads, model.kv_heads, model.ffn, model.vocab, model.positions) == (
        32, 4096, 32, 32, 11008, 32000, 4096,
    )  # fmt: skip
    assert found.question.data.made is None
    assert found.gate is not None
    assert (found.gate.target, found.gate.within, found.gate.agree_within) == (0.458, 0.01, 0.005)
    assert [(row.published_as, row.ran_as) for row in found.reference] == [
        ("fp16", "fp16"),
        ("fp32", "tf32"),
    ]
    assert found.reference[0].values["p_infer_core"] == 10052.2
    assert NAME in resolve.list_shipped_cases()


def test_smoke_changes_what_it_names_and_nothing_else() -> None:
    full, smoke = (resolve.resolve_case(NAME, size).case for size in ("full", "smoke"))
    assert smoke.size == "smoke"
    changed = {
        "precision": smoke.question.precision,
        "model": full.question.model.model_copy(
            update={
                "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 160, "vocab": 512, "positions": 512,
                "nominal_parameters": 1e5,
            }
        ),
        "data": full.question.data.model_copy(
            update={"context": 256, "subjects": 4, "made": GeneratedQuestionsConfig(subjects=4, questions=12)}
        ),
    }  # fmt: skip
    assert smoke.question == full.question.model_copy(update=changed)
    assert smoke.question.precision.name == "fp32"
    assert smoke.tune == full.tune.model_copy(
        update={"batch_tokens": 1024, "compile": False, "warmup": 1, "env": ONE_THREAD}
    )
    assert (smoke.gate, smoke.reference, smoke.title) == (full.gate, full.reference, full.title)


def test_a_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = own(tmp_path)
    found = resolve.resolve_case(path)
    assert found.path == path
    assert found.case.name == "own"
    assert found.case.question.precision == load_presets()["score"]["fp16"]
    assert found.case.question.data.shots == 5
    monkeypatch.chdir(tmp_path)
    assert resolve.resolve_case("own.toml").case == found.case
    # the file has no smoke table, so size smoke changes nothing else
    assert resolve.resolve_case("own.toml", "smoke").case == found.case.model_copy(
        update={"size": "smoke"}
    )


def test_names_that_are_none(tmp_path: Path) -> None:
    assert refusal("llama2-7b-mmul") == (golden("no-case-llama-2-7-mmul"))
    known = ", ".join(resolve.list_shipped_cases())
    assert refusal("zzz") == golden("no-case-zzz-known-cases-smoke", known)
    for path in (str(tmp_path / "absent.toml"), "../../etc/passwd.toml"):
        assert (
            refusal(path)
            == f"case file {path!r} does not exist; give the path of a TOML file or one of: {known}"
        )
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    assert (
        refusal(str(folder))
        == f"case file {str(folder)!r} cannot be read: Is a directory; check its path"
    )
    assert refusal("../cases/llama2-7b-mmlu").startswith("no case '../cases/llama2-7b-mmlu'")


@pytest.mark.parametrize("size", ["tiny", "", "Full"])
def test_sizes_that_are_none(size: str) -> None:
    assert refusal(NAME, size) == f"size {size!r} is not known; allowed: smoke, full"


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
def test_files_that_are_not_toml(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    line = refusal(str(path))
    assert line.startswith(
        (f"case file {str(path)!r} is not TOML: {reason}", f"case file {str(path)!r}: {reason}")
    )


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.toml"
    with path.open("wb") as file:
        file.truncate((64 << 10) + 1)
    assert (
        refusal(str(path))
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
    path = own(tmp_path, OWN, (old, new))
    assert refusal(path) == f"case {path!r}, {place}; see docs/cases.md"


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
KIND = "no task 'gsm8k'; known: mmlu, lambada, openwebtext, alpaca, superglue_record"
FAMILY = f"no family 'bert'; known: {', '.join(families.load_families())}"
INTEGER = "must be a whole number"


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
            f"line 12: question.model.layers: {INTEGER} (it is 'many')",
        ),
        ("layers = 1", "layers = 1.5", f"line 12: question.model.layers: {INTEGER} (it is 1.5)"),
        (
            "layers = 1",
            "layers = 0",
            "line 12: question.model.layers: must be at least 1 (it is 0)",
        ),
        ("layers = 1\n", "", "line 10: question.model.layers is missing"),
        (
            "context = 64",
            "context = [64]",
            f"line 22: question.data.context: {INTEGER} (it is [64])",
        ),
        ('kind = "mmlu"', 'kind = "gsm8k"', f"line 20: question.data: {KIND}"),
        ('family = "llama"', 'family = "bert"', f"line 10: question.model: {FAMILY}"),
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
                " fp8; train: fp32, tf32, fp16, bf16, bf16-pure, fp8, fp8-pure, fp16-o2, bf16-o2"
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
    path = own(tmp_path, OWN, (old, new))
    assert refusal(path) == f"case {path!r}, {line}; see docs/cases.md"


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    """The problems of both sizes, in the order of the file, one a line."""
    text = OWN + "\n[smoke.question.model]\nlayers = 0\nlayer = 1\n"
    path = own(
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
    assert refusal(path, "smoke") == refusal(path)


def test_no_words_of_the_library_are_left() -> None:
    """Each kind of problem that the schema of a case can have is told in a sentence of Steelyard's."""
    wrong: list[tuple[str, object]] = [
        ("tune.sharding", 7), ("tune.compile", "x"), ("tune.env", 1), ("tune.parallel", 1), ("tune.batching", "x"),
        ("max_interval", 0), ("max_interval", "x"), ("divisions", 1), ("question.precision", 1), ("gate", 3),
        ("reference", [{"source": 1}]), ("devices", "x"), ("question.seed", 1e30), ("question.data.shots", 9),
    ]  # fmt: skip
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
    path = own(tmp_path, OWN, ("layers = 1", f'layers = "{"x" * 60_000}"'))
    assert len(refusal(path)) < 600


@pytest.mark.parametrize(
    ("heads", "kv_heads", "hidden"),
    [(3, 1, 8), (4, 3, 8), (8, 8, 8), (2, 1, 6)],
    ids=["heads", "groups", "odd", "odd 3"],
)
def test_dimensions_that_do_not_divide(
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
    assert f"question.model: {expected}" in refusal(own(tmp_path, OWN, *changes))


@pytest.mark.parametrize("value", ["3", '"yes"', "[1]", "true"])
def test_smoke_must_be_a_table(value: str, tmp_path: Path) -> None:
    path = own(tmp_path, f"smoke = {value}\n{OWN}")
    for size in ("full", "smoke"):
        assert refusal(path, size).startswith(f"case {path!r}: smoke is ")


@pytest.mark.parametrize("text", ["question = 3", "question = []", "", "[[question]]\nkind = 1"])
def test_files_without_a_question(text: str, tmp_path: Path) -> None:
    path = own(tmp_path, text)
    for options in ({}, {"precision": "bf16", "division": "open"}):
        assert refusal(path, **options).startswith(f"case {path!r}: ")
    assert refusal(path, "full", "question.model.layers=2").startswith(("case ", "--set: "))


def test_unknown_keys_inside_smoke(tmp_path: Path) -> None:
    path = own(tmp_path, OWN + "\n[smoke.question.model]\nlayer = 2\n")
    line = "line 25: unknown key 'question.model.layer'; did you mean 'layers'?"
    assert refusal(path, "smoke") == f"case {path!r}, {line}; see docs/cases.md"


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
def test_environment_that_is_not_allowed(name: str, tmp_path: Path) -> None:
    path = own(tmp_path, OWN + f'\n[tune.env]\n{name} = "x"\n')
    allowed = ", ".join(sorted(accelerators.list_tune_variables()))
    expected = f"environment variable {name} is not one a tune may set; allowed: {allowed}"
    assert f"tune: {expected}" in refusal(path)
    assert expected in refusal(NAME, "full", f"tune.env.{name}=x")
    assert expected in refusal(NAME, "full", f'tune.env={{{name} = "x"}}')


def test_environment_with_a_nul(tmp_path: Path) -> None:
    path = own(tmp_path, OWN + '\n[tune.env]\nNCCL_ALGO = "a\\u0000b"\n')
    assert golden("environment-variable-nccl_algo-holds-nul-character") in refusal(path)


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
def test_environment_is_text(setting: str, value: str) -> None:
    found = resolve.resolve_case(NAME, settings=[setting])
    assert found.case.tune.env == {"OMP_NUM_THREADS": value}
    assert found.origins["tune.env.OMP_NUM_THREADS"] == "command line"
