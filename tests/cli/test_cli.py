"""Tests of the command line: answers on stdout, everything else on stderr, and one line for a
mistake.
"""

import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from fixtures.commands import CASE, SMOKE, Shell, finish
from fixtures.golden import golden
from steelyard.case import resolve
from steelyard.record import record


def test_json_is_all_there_is_on_stdout(shell: Shell, smoke: dict[str, Path]) -> None:
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
        done = shell(*verb, "--json")
        assert (done.code, done.err) == (0, ""), verb
        assert keys <= done.json().keys(), verb
    assert page.read_text().lstrip().startswith("<!")


def test_run_json(shell: Shell) -> None:
    done = shell(*SMOKE, "--passes", "val", "--repeat", "2", "--out", shell.out, "--json")
    assert (done.code, done.err) == (0, "")
    found = done.json()
    assert found.keys() == {"records", "repeats"}
    stored = [
        record.record_to_english_json(record.read_record(path))
        for path in sorted(shell.out.iterdir())
    ]
    assert sorted(found["records"], key=lambda one: one["id"]) == sorted(
        stored, key=lambda one: one["id"]
    )
    assert len({one["id"] for one in found["records"]}) == 2
    [group] = found["repeats"]
    assert (group["case"], group["config"], group["not_valid"]) == (CASE, "1x1", [])
    assert group["records"] == [one["id"] for one in found["records"]]
    rates = [one["metrics"]["tokens_per_device_s"]["value"] for one in found["records"]]
    told = group["metrics"]["rate"]
    assert (told["runs"], told["lowest"], told["highest"]) == (2, min(rates), max(rates))
    assert told["mean"] == pytest.approx(sum(rates) / 2)
    assert told["interval_from"] == "runs"


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
            "engine transformers has no matmuls in fp8; allowed: ",
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
                "no engine 'tensorflow'; known: flagscale, megatron, paddle, reference, torch,"
                " transformers"
            ),
        ),
        (
            ("run", CASE, "--accelerator", "abacus", "--size", "smoke"),
            "accelerator 'abacus' is not known; known: cuda, cpu",
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
    done = shell.ask(*arguments)
    assert (done.code, done.out) == (2, ""), done.err
    assert len(done.lines) == 1, done.err
    assert done.err.startswith("error: ")
    assert said in done.err
    assert list(shell.folder.glob("**/*.json")) == []


def test_page_that_cannot_be_written(shell: Shell, smoke: dict[str, Path]) -> None:
    done = shell("report", smoke["closed"], "--to", shell.folder / "no" / "page.html")
    assert (done.code, len(done.lines)) == (2, 1)
    assert golden("cannot-be-written-no-such-file") in done.err


def test_reader_that_has_gone(shell: Shell) -> None:
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


def test_stdout_that_is_full(shell: Shell) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "steelyard", "show", CASE]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, env=shell.env(), text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == golden("error-stdout-cannot-be-written-no")


LIST = """
import sys
from steelyard.cli import app
app(["list"], standalone_mode=False)
app(["show", "llama2-7b-mmlu"], standalone_mode=False)
heavy = sorted({"torch", "transformers", "numpy", "tokenizers"} & sys.modules.keys())
sys.stderr.write(" ".join(heavy))
"""


def test_list_and_show_import_nothing_heavy(shell: Shell) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIST], env=shell.env(), capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert CASE in done.stdout


PARENT = """
import sys
from steelyard.cli import app
code = app(sys.argv[1:], standalone_mode=False)
heavy = sorted({"torch", "transformers"} & sys.modules.keys())
sys.stdout.write(f"code {code} {heavy}")
"""


def test_parent_of_a_run_never_imports_torch(shell: Shell) -> None:
    command = [sys.executable, "-c", PARENT, *SMOKE, "--passes", "val", "--out", str(shell.out)]
    done = subprocess.run(command, env=shell.env(), capture_output=True, text=True, check=True)
    assert done.stdout.endswith("code 0 []")


def test_own_case_file(shell: Shell) -> None:
    text = (resources.files("steelyard") / "cases" / f"{CASE}.toml").read_text()
    text = text.replace(f'name = "{CASE}"', 'name = "mine"').replace(
        "questions = 12", "questions = 3"
    )
    (shell.folder / "mine.toml").write_text(text)
    done = shell(
        "run", "./mine.toml", "--size", "smoke", "--accelerator", "cpu", "--out", shell.out
    )
    assert done.code == 0, done.err
    (record,) = shell.records()
    assert (record["case"]["name"], record["data"]["rows"]) == ("mine", 12)
    assert shell("verify", shell.out).code == 0
    assert "mine" in done.out
    (shell.folder / "mine.toml").write_text(text + "\n[extra]\nkey = 1\n")
    wrong = shell("show", "./mine.toml")
    assert (wrong.code, len(wrong.lines)) == (2, 1)
    assert "unknown key 'extra'" in wrong.err


def test_show_says_where_values_come_from(shell: Shell) -> None:
    done = shell(
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
    rows = {row["key"]: (row["value"], row["origin"]) for row in done.json()["values"]}
    assert rows["tune.batch_tokens"] == (99, "command line")
    assert rows["question.model.layers"] == (2, "case, size smoke")
    assert rows["question.data.shots"] == (5, "case")
    assert rows["tune.pad_to"] == (16, "default")
    assert rows["question.precision.matmul"] == ("fp16", "preset fp16 (command line)")


@pytest.mark.full
def test_smoke_runs_every_case_in_every_division(shell: Shell) -> None:
    done = finish(shell.start("run", "smoke", "--accelerator", "cpu", "--out", shell.out), 300)
    records = shell.records()
    wanted = {
        (name, one)
        for name in resolve.list_shipped_cases()
        for one in resolve.resolve_case(name, "smoke").case.divisions
    }
    assert {(one["case"]["name"], one["case"]["division"]) for one in records} == wanted
    assert {one["case"]["size"] for one in records} == {"smoke"}
    # Without a terminal, stderr holds only two lines per record; the table goes to stdout.
    number = len(records)
    begun, ended = done.lines[::2], done.lines[1::2]
    assert [line.split()[0] for line in begun] == [f"[{i}/{number}]" for i in range(1, number + 1)]
    assert sorted(ended) == sorted(f"valid: {path}" for path in shell.out.iterdir())
    assert done.out.count("valid") == number
    assert max(map(len, done.out.splitlines())) <= 80
    assert "\x1b" not in done.out + done.err
