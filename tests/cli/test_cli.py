"""Tests of the command line: answers on stdout, everything else on stderr, and one line for a
mistake.
"""

import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from fixtures.commands import CASE, SMOKE, Shell, wait_for_result
from fixtures.golden import golden
from steelyard.case import resolve
from steelyard.engine import engine_rows
from steelyard.engine.default_engine import choose_default_engine
from steelyard.record import record


def test_json_is_the_only_output_on_stdout(shell: Shell, smoke: dict[str, Path]) -> None:
    page = shell.folder / "page.html"
    for verb, keys in {
        ("list",): {"cases", "engines", "accelerators", "launchers"},
        ("show", CASE): {"name", "size", "values", "reference"},
        ("report", smoke["closed"], smoke["open"]): {
            "schema",
            "kind",
            "summary",
            "cases",
            "repeats",
            "engines",
            "pages",
        },
        ("report", smoke["closed"], "--format", "html", "--to", page): {
            "schema",
            "kind",
            "summary",
            "cases",
            "pages",
        },
        ("verify", smoke["closed"], smoke["open"]): {"records"},
        ("schema",): {
            "$schema",
            "$defs",
            "title",
            "type",
            "properties",
            "required",
            "additionalProperties",
        },
    }.items():
        result = shell(*verb, "--json")
        assert (result.code, result.err) == (0, ""), verb
        assert keys <= result.json().keys(), verb
    assert page.read_text().lstrip().startswith("<!")


def test_run_json_holds_records_and_repeats(shell: Shell) -> None:
    result = shell(*SMOKE, "--passes", "val", "--repeat", "2", "--out", shell.out, "--json")
    assert (result.code, result.err) == (0, "")
    answer = result.json()
    assert answer.keys() == {"records", "repeats"}
    stored = [
        record.record_to_english_json(record.read_record(path))
        for path in sorted(shell.out.iterdir())
    ]
    assert sorted(answer["records"], key=lambda entry: entry["id"]) == sorted(
        stored, key=lambda entry: entry["id"]
    )
    assert len({entry["id"] for entry in answer["records"]}) == 2
    [group] = answer["repeats"]
    assert (group["case"], group["config"], group["not_valid"]) == (CASE, "1x1", [])
    assert group["records"] == [entry["id"] for entry in answer["records"]]
    rates = [entry["metrics"]["tokens_per_device_s"]["value"] for entry in answer["records"]]
    rate = group["metrics"]["rate"]
    assert (rate["runs"], rate["lowest"], rate["highest"]) == (2, min(rates), max(rates))
    assert rate["mean"] == pytest.approx(sum(rates) / 2)
    assert rate["interval_from"] == "runs"


@pytest.mark.parametrize(
    "arguments,said",
    [
        (
            ("run", CASE, "--sise", "smoke"),
            "No such option --sise; did you mean --size? See steelyard run -h",
        ),
        (("run", CASE, "--xyzzy"), "No such option --xyzzy; see steelyard run -h"),
        (("run", CASE, "--devices"), "Option '--devices' requires an argument"),
        ((*SMOKE, "--engine", "torhc"), "no engine 'torhc'; did you mean 'torch'?"),
        (
            ("show", "smoke", "--size", "full"),
            "smoke runs every case at size smoke; name a case to use --size full",
        ),
        (
            ("run",),
            (
                "name a case, or smoke for every case, tiny; or a model's folder with --model and"
                " --task"
            ),
        ),
        (("run", "lama2-7b-mmlu"), "no case 'lama2-7b-mmlu'; did you mean 'llama2-7b-mmlu'?"),
        (("show", "nothing-like-it"), "no case 'nothing-like-it'; known cases: "),
        (("show", "./none.toml"), "case file './none.toml' does not exist"),
        (("rum", CASE), "No such command 'rum'; did you mean 'run'? See steelyard -h"),
        ((*SMOKE, "--set", "tune.batch_tokens"), "is not of the form key=value"),
        ((*SMOKE, "--set", "tune.batch_token=5"), "did you mean 'tune.batch_tokens'?"),
        ((*SMOKE, "--set", "tune.batch_tokens=many"), "tune.batch_tokens"),
        ((*SMOKE, "--set", "tune.batch_tokens=0"), "tune.batch_tokens"),
        ((*SMOKE, "--set", "tune.env.LD_PRELOAD=x.so"), "LD_PRELOAD is not one a tune may set"),
        ((*SMOKE, "--passes", "train"), "no pass 'train'; allowed: val, infer, bare"),
        ((*SMOKE, "--passes", "val,val"), "name each pass once"),
        ((*SMOKE, "--passes", ","), "name each pass once"),
        (
            (*SMOKE, "--precision", "fp4"),
            "precision 'fp4' is not known; allowed for score: fp32, tf32, fp16, bf16, fp8",
        ),
        (
            (*SMOKE, "--precision", "fp8", "--engine", "transformers"),
            "engine transformers does not compute matmuls in fp8; allowed: ",
        ),
        ((*SMOKE, "--precision", "tf32"), "a CPU has no precision 'tf32'"),
        ((*SMOKE, "--division", "ajar"), "division"),
        ((*SMOKE, "--size", "huge"), "size 'huge' is not known; allowed: smoke, full"),
        ((*SMOKE, "--devices", "0"), "must be at least 1"),
        ((*SMOKE, "--devices", "-1"), "must be at least 1"),
        ((*SMOKE, "--devices", "two"), "--devices"),
        ((*SMOKE, "--parallel", "XP2"), "--parallel 'XP2': not degrees"),
        (("run", "smoke", "--devices", "0"), "must be at least 1"),
        ((*SMOKE, "--nodes", "2"), "--nodes 2: "),
        ((*SMOKE, "--nodes", "0"), "must be at least 1"),
        ((*SMOKE, "--sample", "0"), "--sample 0: must be at least 1"),
        (
            (*SMOKE, "--sample", "1000"),
            "--sample 1000: the data has 48 questions; allowed: 1 to 48",
        ),
        ((*SMOKE, "--steps", "0"), "--steps 0: must be at least 1"),
        ((*SMOKE, "--repeat", "0"), "--repeat 0: must be 1 to 10,000"),
        ((*SMOKE, "--hang-after", "nan"), "--hang-after nan: must be more than 0"),
        ((*SMOKE, "--time-limit", "-1"), "--time-limit -1"),
        (
            (*SMOKE, "--engine", "tensorflow"),
            (
                "no engine 'tensorflow'; known: flagscale, http, megatron, paddle, reference,"
                " torch, transformers, transformers-serve, vllm"
            ),
        ),
        (
            ("run", CASE, "--accelerator", "abacus", "--size", "smoke"),
            "accelerator 'abacus' is not known; allowed: cuda, cpu",
        ),
        ((*SMOKE, "--weights", "no/such"), "--weights 'no/such' does not exist"),
        ((*SMOKE, "--data", "no/such"), "--data 'no/such' does not exist"),
        ((*SMOKE, "--site", "no.toml"), "--site 'no.toml' cannot be read"),
        ((*SMOKE, "--set", "tune.attention=psychic"), "tune.attention='psychic' is not known"),
        (("run", CASE, "--accelerator", "cpu"), "needs its data"),
        (("report", "no.json"), "no.json: cannot be read"),
        (("report", "."), "no records in ."),
        (("verify", "no.json"), "no.json: cannot be read"),
        (("verify", "bad\nname.json"), "cannot be read"),
        (("report", "no.json", "--format", "pdf"), "--format 'pdf': allowed: text, md, html"),
        (("report", "no.json", "--lang", "la"), "--lang 'la': allowed: en, zh"),
    ],
    ids=lambda value: "_".join(map(str, value))[-40:] if isinstance(value, tuple) else "",
)
def test_mistakes_get_one_line(shell: Shell, arguments: tuple[str, ...], said: str) -> None:
    result = shell.run_in_process(*arguments)
    assert (result.code, result.out) == (2, ""), result.err
    assert len(result.lines) == 1, result.err
    assert result.err.startswith("error: ")
    assert said in result.err
    assert list(shell.folder.glob("**/*.json")) == []


def test_page_that_cannot_be_written_is_refused(shell: Shell, smoke: dict[str, Path]) -> None:
    result = shell("report", smoke["closed"], "--to", shell.folder / "no" / "page.html")
    assert (result.code, len(result.lines)) == (2, 1)
    assert golden("cannot-be-written-no-such-file") in result.err


def test_closed_stdout_ends_without_a_traceback(shell: Shell) -> None:
    """`steelyard show … | head -1` ends without a traceback."""
    command = [sys.executable, "-m", "steelyard", "show", CASE]
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen(
        command, stdout=write, stderr=subprocess.PIPE, env=shell.env(), text=True
    )
    os.close(write)
    assert process.communicate()[1] == ""
    assert process.returncode == 1


def test_full_stdout_ends_with_one_line(shell: Shell) -> None:
    with Path("/dev/full").open("w") as full_device:
        command = [sys.executable, "-m", "steelyard", "show", CASE]
        result = subprocess.run(
            command,
            stdout=full_device,
            stderr=subprocess.PIPE,
            env=shell.env(),
            text=True,
            check=False,
        )
    assert result.returncode == 1
    assert result.stderr == golden("error-stdout-cannot-be-written-no")


LIST_AND_SHOW_PROGRAM = """
import sys
from steelyard.cli import app
app(["list"], standalone_mode=False)
app(["show", "llama2-7b-mmlu"], standalone_mode=False)
heavy = sorted({"torch", "transformers", "numpy", "tokenizers"} & sys.modules.keys())
sys.stderr.write(" ".join(heavy))
"""


def test_list_and_show_import_nothing_heavy(shell: Shell) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LIST_AND_SHOW_PROGRAM],
        env=shell.env(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr == ""
    assert CASE in result.stdout


PARENT_PROGRAM = """
import sys
from steelyard.cli import app
code = app(sys.argv[1:], standalone_mode=False)
heavy = sorted({"torch", "transformers"} & sys.modules.keys())
sys.stdout.write(f"code {code} {heavy}")
"""


def test_parent_of_a_run_never_imports_torch(shell: Shell) -> None:
    command = [
        sys.executable,
        "-c",
        PARENT_PROGRAM,
        *SMOKE,
        "--passes",
        "val",
        "--out",
        str(shell.out),
    ]
    result = subprocess.run(command, env=shell.env(), capture_output=True, text=True, check=True)
    assert result.stdout.endswith("code 0 []")


def test_user_case_file_runs_and_verifies(shell: Shell) -> None:
    text = (resources.files("steelyard") / "cases" / f"{CASE}.toml").read_text()
    text = text.replace(f'name = "{CASE}"', 'name = "mine"').replace(
        "questions = 12", "questions = 3"
    )
    (shell.folder / "mine.toml").write_text(text)
    result = shell(
        "run", "./mine.toml", "--size", "smoke", "--accelerator", "cpu", "--out", shell.out
    )
    assert result.code == 0, result.err
    (record,) = shell.records()
    assert (record["case"]["name"], record["data"]["rows"]) == ("mine", 12)
    assert shell("verify", shell.out).code == 0
    assert "mine" in result.out
    (shell.folder / "mine.toml").write_text(text + "\n[extra]\nkey = 1\n")
    refused = shell("show", "./mine.toml")
    assert (refused.code, len(refused.lines)) == (2, 1)
    assert "unknown key 'extra'" in refused.err


def test_show_says_where_values_come_from(shell: Shell) -> None:
    result = shell(
        "show",
        CASE,
        "--size",
        "smoke",
        "--set",
        "tune.batch_tokens=99",
        "--precision",
        "fp16",
        "--json",
    )
    rows = {row["key"]: (row["value"], row["origin"]) for row in result.json()["values"]}
    assert rows["tune.batch_tokens"] == (99, "command line")
    assert rows["question.model.layers"] == (2, "case, size smoke")
    assert rows["question.data.shots"] == (5, "case")
    assert rows["tune.pad_to"] == (16, "default")
    assert rows["question.precision.matmul"] == ("fp16", "preset fp16 (command line)")


def list_default_divisions(name: str) -> list[str]:
    """Return the divisions of a shipped case that its default engine has."""
    case = resolve.resolve_case(name, "smoke").case
    engine = engine_rows.find_engine(choose_default_engine(case))
    return [division for division in case.divisions if division in engine.divisions]


@pytest.mark.full
def test_smoke_runs_every_case_in_every_division(shell: Shell) -> None:
    result = wait_for_result(
        shell.start("run", "smoke", "--accelerator", "cpu", "--out", shell.out), 300
    )
    records = shell.records()
    expected = {
        (name, entry)
        for name in resolve.list_shipped_cases()
        for entry in list_default_divisions(name)
    }
    assert {(entry["case"]["name"], entry["case"]["division"]) for entry in records} == expected
    assert {entry["case"]["size"] for entry in records} == {"smoke"}
    # Without a terminal, stderr holds only two lines per record; the table goes to stdout.
    number = len(records)
    start_lines, end_lines = result.lines[::2], result.lines[1::2]
    assert [line.split()[0] for line in start_lines] == [
        f"[{i}/{number}]" for i in range(1, number + 1)
    ]
    assert sorted(end_lines) == sorted(f"valid: {path}" for path in shell.out.iterdir())
    assert result.out.count("valid") == number
    assert max(map(len, result.out.splitlines())) <= 80
    assert "\x1b" not in result.out + result.err
