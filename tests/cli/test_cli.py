"""The command line as its users meet it: answers on stdout, everything else on stderr, and one line for a mistake."""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fixtures.commands import CASE, SMOKE, Shell, finish
from steelyard import accelerators, cli
from steelyard.accelerators import Accelerator, Found
from steelyard.case import resolve
from steelyard.case.request import Request
from steelyard.cli import app
from steelyard.cli.out import Output
from steelyard.cli.progress import Display, clock, line
from steelyard.errors import RequestError
from steelyard.run.session import PhaseProgress


def test_json_is_all_there_is_on_stdout(shell: Shell, smoke: dict[str, Path]) -> None:
    page = shell.folder / "page.html"
    for verb, keys in {
        ("list",): {"cases", "engines", "accelerators", "launchers"},
        ("show", CASE): {"name", "size", "values", "reference"},
        ("report", smoke["closed"], smoke["open"]): {"schema", "kind", "summary", "cases", "repeats", "engines", "pages"},
        ("report", smoke["closed"], "--format", "html", "--to", page): {"schema", "kind", "summary", "cases", "pages"},
        ("verify", smoke["closed"], smoke["open"]): {"records"},
        ("schema",): {"$schema", "$defs", "title", "type", "properties", "required", "additionalProperties"},
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
    assert sorted(found["records"], key=lambda one: one["id"]) == sorted(shell.records(), key=lambda one: one["id"])
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
        (("run", CASE, "--sise", "smoke"), "No such option --sise; did you mean --size? See steelyard run -h"),
        (("run", CASE, "--xyzzy"), "No such option --xyzzy; see steelyard run -h"),
        (("run", CASE, "--devices"), "Option '--devices' requires an argument"),
        ((*SMOKE, "--engine", "torhc"), "no engine 'torhc'; did you mean 'torch'?"),
        (("show", "smoke", "--size", "full"), "smoke runs every case at size smoke; name a case to use --size full"),
        (("run",), "Missing argument"),
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
        ((*SMOKE, "--precision", "fp8"), "precision 'fp8' is not known; allowed for score: fp32, tf32, fp16, bf16"),
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
        ((*SMOKE, "--sample", "1000"), "--sample 1000: the data has 48 questions; allowed: 1 to 48"),
        ((*SMOKE, "--steps", "0"), "--steps 0: must be at least 1"),
        ((*SMOKE, "--repeat", "0"), "--repeat 0: must be at least 1"),
        ((*SMOKE, "--hang-after", "nan"), "--hang-after nan: must be more than 0"),
        ((*SMOKE, "--time-limit", "-1"), "--time-limit -1"),
        (
            (*SMOKE, "--engine", "tensorflow"),
            "no engine 'tensorflow'; known: flagscale, megatron, paddle, reference, torch, transformers",
        ),
        (("run", CASE, "--accelerator", "abacus", "--size", "smoke"), "accelerator 'abacus' is not known; known: cuda, cpu"),
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
    assert "cannot be written: No such file or directory" in done.err


def test_reader_that_has_gone(shell: Shell) -> None:
    """`steelyard show … | head -1` ends without a traceback."""
    command = [sys.executable, "-m", "steelyard", "show", CASE]
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, env=shell.env(), text=True)
    os.close(write)
    assert process.communicate()[1] == ""
    assert process.returncode == 1


def test_stdout_that_is_full(shell: Shell) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "steelyard", "show", CASE]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=shell.env(), text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: stdout cannot be written: No space left on device\n"


LIST = """
import sys
from steelyard.cli import app
app(["list"], standalone_mode=False)
app(["show", "llama2-7b-mmlu"], standalone_mode=False)
heavy = sorted({"torch", "transformers", "numpy", "tokenizers"} & sys.modules.keys())
sys.stderr.write(" ".join(heavy))
"""


def test_list_and_show_import_nothing_heavy(shell: Shell) -> None:
    done = subprocess.run([sys.executable, "-c", LIST], env=shell.env(), capture_output=True, text=True, check=True)
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


def test_list_is_quick(shell: Shell) -> None:
    """Not a gate, for test machines are busy: the figure is printed, and half a second is what we want."""
    import time

    times = []
    for _ in range(5):
        begin = time.monotonic()
        assert shell("list").code == 0
        times.append(time.monotonic() - begin)
    print(f"steelyard list: best of 5 {min(times):.3f} s")


def test_own_case_file(shell: Shell) -> None:
    text = (resources.files("steelyard") / "cases" / f"{CASE}.toml").read_text()
    text = text.replace(f'name = "{CASE}"', 'name = "mine"').replace("questions = 12", "questions = 3")
    (shell.folder / "mine.toml").write_text(text)
    done = shell("run", "./mine.toml", "--size", "smoke", "--accelerator", "cpu", "--out", shell.out)
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
    done = shell("show", CASE, "--size", "smoke", "--set", "tune.batch_tokens=99", "--precision", "fp16", "--json")
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
    wanted = {(name, one) for name in resolve.names() for one in resolve.resolve(name, "smoke").case.divisions}
    assert {(one["case"]["name"], one["case"]["division"]) for one in records} == wanted
    assert {one["case"]["size"] for one in records} == {"smoke"}
    # Without a terminal, stderr holds two lines a record and nothing else; the table is the answer.
    number = len(records)
    begun, ended = done.lines[::2], done.lines[1::2]
    assert [line.split()[0] for line in begun] == [f"[{i}/{number}]" for i in range(1, number + 1)]
    assert sorted(ended) == sorted(f"valid: {path}" for path in shell.out.iterdir())
    assert done.out.count("valid") == number
    assert max(map(len, done.out.splitlines())) <= 80
    assert "\x1b" not in done.out + done.err


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Request]]:
    """What a command line asks to run, with nothing run."""

    def ask(*arguments: str) -> list[Request]:
        made: list[Request] = []

        def keep(requests: list[Request], output: Output) -> int:
            made.extend(requests)
            return 0

        monkeypatch.setattr("steelyard.cli.run._run", keep)
        assert app(["run", *arguments], standalone_mode=False) == 0
        return made

    return ask


def show_on(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Every case as if its file said on how many devices it is shown."""
    real = resolve.resolve

    def shown(*arguments: Any) -> resolve.Resolved:
        found = real(*arguments)
        return replace(found, case=found.case.model_copy(update={"devices": list(numbers)}))

    monkeypatch.setattr(resolve, "resolve", shown)


def machine(monkeypatch: pytest.MonkeyPatch, devices: int, divisible: bool = False) -> None:
    """A machine whose only accelerator has so many devices."""
    found = [Found("Abacus", None, None, i, None) for i in range(devices)]
    row = Accelerator("abacus", lambda: found, accelerators.CPU.sources, {}, divisible)
    monkeypatch.setattr(accelerators, "table", lambda: {row.name: row})


Asked = Callable[..., list[Request]]


def test_parallel_is_a_setting(asked: Asked) -> None:
    (one,) = asked(CASE, "--size", "smoke", "--parallel", "TP2DP4", "--devices", "8", "--set", "tune.batch_tokens=99")
    assert (one.resolved.case.tune.parallel, one.resolved.case.tune.batch_tokens) == ("TP2DP4", 99)
    assert one.resolved.origins["tune.parallel"] == "command line"
    (late,) = asked(CASE, "--set", "tune.parallel=DP", "--parallel", "TP")
    assert late.resolved.case.tune.parallel == "TP"
    (plain,) = asked(CASE)
    assert plain.resolved == resolve.resolve(CASE)
    assert {one.resolved.case.tune.parallel for one in asked("smoke", "--parallel", "TP2", "--devices", "2")} == {"TP2"}


def test_devices_default_to_one(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    show_on(monkeypatch, 1, 2)
    machine(monkeypatch, 8)
    assert [one.devices for one in asked(CASE)] == [1]
    assert [one.devices for one in asked(CASE, "--size", "smoke")] == [1]
    assert [one.devices for one in asked(CASE, "--devices", "4")] == [4]
    assert {one.devices for one in asked("smoke", "--devices", "4")} == {4}


@pytest.mark.parametrize(
    "numbers,here,divisible,run",
    [
        ((1, 2), 2, False, [1, 2]),
        ((1, 2), 1, False, [1]),
        ((1, 2, 4), 3, False, [1, 2]),
        ((2, 4), 2, False, [2]),
        ((2,), 1, False, [1]),
        ((1, 2), 0, False, [1]),  # refused later, with what is missing
        ((1, 2), 1, True, [1, 2]),
        ((1,), 8, False, [1]),
    ],
)
def test_smoke_runs_on_the_devices_that_a_case_names(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...], here: int, divisible: bool, run: list[int]
) -> None:
    show_on(monkeypatch, *numbers)
    machine(monkeypatch, here, divisible)
    wanted = [
        (name, division, number)
        for name in resolve.names()
        for division in resolve.resolve(name, "smoke").case.divisions
        for number in run
    ]
    requests = asked("smoke", "--accelerator", "abacus")
    assert [(one.resolved.case.name, one.resolved.case.question.division, one.devices) for one in requests] == wanted
    twice = asked("smoke", "--accelerator", "abacus", "--division", "closed", "--repeat", "2")
    assert [one.devices for one in twice] == [number for _ in resolve.names() for number in run for _ in range(2)]


def test_smoke_on_an_accelerator_that_is_unknown(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    show_on(monkeypatch, 1, 2)
    with pytest.raises(RequestError, match="accelerator 'slide-rule' is not known"):
        asked("smoke", "--accelerator", "slide-rule")


def test_label_tells_the_devices() -> None:
    one = Request(resolve.resolve(CASE, "smoke"))
    assert cli.run._label(one) == f"{CASE} closed fp32 torch"
    assert cli.run._label(replace(one, devices=2)) == f"{CASE} closed fp32 torch 1x2"


@pytest.mark.parametrize(
    "progress,text",
    [
        (PhaseProgress("data", 0, 0, 3.9), "data  0:03"),
        (PhaseProgress("val", 0, 48, 0.0), f"val  {'╌' * 24}  0/48  0:00"),
        (PhaseProgress("val", 12, 48, 6.0), f"val  {'━' * 6}{'╌' * 18}  12/48  2.00/s  0:06, 0:18 left"),
        (PhaseProgress("infer", 48, 48, 24.0), f"infer  {'━' * 24}  48/48  2.00/s  0:24, 0:00 left"),
        (PhaseProgress("weights", 1, 1000, 10.0), f"weights  {'╌' * 24}  1/1000  0.10/s  0:10, 2:46:30 left"),
        (PhaseProgress("val", 5, 4, 10.0), f"val  {'━' * 24}  5/4  0.50/s  0:10, 0:00 left"),
    ],
)
def test_progress_line(progress: PhaseProgress, text: str) -> None:
    assert line(progress) == text


def test_progress_line_fits_the_terminal() -> None:
    """The bar gives way first; what is left of a line is cut by the terminal's own width."""
    long = PhaseProgress("a phase with a rather long name", 14042, 140420, 3600.0)
    rest = "14042/140420  3.90/s  1:00:00, 9:00:00 left"
    assert line(long) == f"a phase with a rather long name  {rest}"
    assert line(long, 100) == f"a phase with a rather long name  {'━━' + '╌' * 19}  {rest}"
    assert len(line(long, 100)) == 99
    assert line(long, 200, bar=False) == f"a phase with a rather long name  {rest}"


def test_clock() -> None:
    assert [clock(s) for s in (0.0, 59.99, 60.0, 3599.0, 3600.0, 36061.0)] == [
        "0:00",
        "0:59",
        "1:00",
        "59:59",
        "1:00:00",
        "10:01:01",
    ]


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_without_a_terminal_progress_is_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    time = Clock()
    monkeypatch.setattr("steelyard.cli.progress.now", time)
    with Display(Console(file=io.StringIO()), "[1/2] a case", alone=False) as display:
        for minute in range(3):
            for second in (0, 30, 59):
                time.now_s = 60.0 * minute + second
                display.show(PhaseProgress("infer", 10 * minute + 1, 100, time.now_s))
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "[1/2] a case",
        "  infer  11/100  0.18/s  1:00, 8:05 left",
        "  infer  21/100  0.17/s  2:00, 7:31 left",
    ]
    with Display(Console(file=io.StringIO(), quiet=True), "a case") as display:
        time.now_s = 1000.0
        display.show(PhaseProgress("infer", 1, 100, 1.0))
    assert capsys.readouterr().err == ""


def on_terminal(shell: Shell, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Exit code, stdout, and what the terminal saw."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "steelyard", *arguments]
    env = shell.env(**{"TERM": "xterm-256color", "COLUMNS": "80", **variables})
    process = subprocess.Popen(command, cwd=shell.folder, stdout=subprocess.PIPE, stderr=theirs, env=env, text=True)
    os.close(theirs)
    seen = b""
    while True:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                seen += os.read(ours, 65536)
            except OSError:  # how Linux says that the other side is closed
                break
        elif process.poll() is not None:
            break
    out = process.communicate()[0]
    os.close(ours)
    return process.returncode, out, seen.decode()


def test_progress_on_a_terminal(tmp_path: Path, faulty_package: Path) -> None:
    shell = Shell(tmp_path, (faulty_package,))
    command = (*SMOKE, "--engine", "faulty", "--out", str(shell.out))
    code, out, seen = on_terminal(shell, *command, FAULTY_STEP_S="0.4")
    assert code == 0, seen
    assert seen.startswith("steelyard 0.1.0: preparing …\r\n" + f"{CASE} closed fp32 faulty\r\n")
    assert re.search(r"starting  0:0\d", seen)
    assert re.search(r"(data|prepare val)  0:0\d", seen)
    assert re.search(r"val  ━{6}╌{18}  1/4  \d\.\d\d/s  0:0\d, 0:0\d left", seen)
    assert re.search(r"infer  ━{18}╌{6}  3/4  \d\.\d\d/s  0:0\d, 0:0\d left", seen)
    assert f"\x1b[32mvalid\x1b[0m: {shell.out}" in seen.replace("\r\n", "")
    assert "\x1b" not in out


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"NO_COLOR": "1"}], ids=str)
def test_a_terminal_without_colours(shell: Shell, variables: dict[str, str]) -> None:
    code, _, seen = on_terminal(shell, *SMOKE, "--passes", "val", "--out", str(shell.out), **variables)
    assert code == 0, seen
    assert f"valid: {shell.out}" in seen
    assert not re.search(r"\x1b\[[0-9;]*m", seen)
    assert ("\x1b" in seen) == ("NO_COLOR" in variables)  # a line that changes is no colour


def test_quiet_says_nothing_but_the_result(shell: Shell) -> None:
    code, out, seen = on_terminal(shell, *SMOKE, "--passes", "val", "--out", str(shell.out), "--quiet")
    assert (code, seen) == (0, "")
    assert "valid" in out


def test_json_is_silent_on_a_terminal_too(shell: Shell) -> None:
    code, out, seen = on_terminal(shell, *SMOKE, "--passes", "val", "--out", str(shell.out), "--json")
    assert (code, seen) == (0, "")
    assert json.loads(out)["records"][0]["status"] == "valid"
