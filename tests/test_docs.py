"""Documents that cannot become outdated: what exists is documented, commands in the docs run,
published numbers are in records.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

import docs_tables
from fixtures.engines import make_record_with_tokens
from fixtures.records import RUNS, SPECS
from steelyard import accelerators, report, tasks
from steelyard.case import resolve
from steelyard.cli import check_and_spec as machine_verbs
from steelyard.engine import engine_rows
from steelyard.metrics import (
    ceiling_rates,
    cpu_contention,
    fitness_rules,
    metric_table,
    side_comparison,
    standing,
    stats,
    validity,
)
from steelyard.metrics.verify import verify_record
from steelyard.record import record
from steelyard.record.run_facts import HostState
from steelyard.report import as_csv
from steelyard.report.report_data import Report
from steelyard.run import launch
from steelyard.run.messages import SILENCE_S
from steelyard.run.session import OPEN_S
from steelyard.run.site import HostSettings, Site, SlurmSettings
from steelyard.run.worker_files import RankStatus
from steelyard.sources import catalog as sources
from steelyard.tasks import kind as kinds

ROOT = Path(__file__).parent.parent
DOCS = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")} | {
    "README.md": (ROOT / "README.md").read_text()
}
VERBS = (
    *(
        "list",
        "show",
        "check",
        "run",
        "spec",
        "report",
        "compare",
        "history",
        "reproduce",
        "verify",
        "sign",
        "schema",
        "conform",
    ),
)
GROUPS = ("case", "weights", "data")


def test_every_metric_is_documented():
    names = {
        metric.name
        for task in tasks.load_tasks().values()
        for metric in metric_table.list_task_metrics(task)
    }
    missing = sorted(name for name in names if f"`{name}`" not in DOCS["metrics.md"])
    assert missing == []


RULE_MODULES = (
    *("validity.py", "cpu_contention.py", "clock_checks.py", "plausibility.py"),
    "weights_check.py",
    *("interval_rules.py", "request_rules.py", "answer_rules.py"),
)


def test_every_reason_is_documented():
    checks = "".join((ROOT / "src/steelyard/metrics" / name).read_text() for name in RULE_MODULES)
    codes = (
        "nan",
        "coverage",
        "tokens",
        "unaccounted",
        "interval",
        "slowdown",
        "shared",
        "quality",
    )
    codes += ("requests", "short_output", "token_counts", "warm_cache", "client_bound", "unsteady")
    codes += ("wrong_answers",)
    for code in (*codes, "clock", "reported", "implausible", "hidden", "busy", "weights"):
        assert f'"{code}"' in checks, code
        assert f"`{code}`" in DOCS["metrics.md"], code
    assert f"| `{standing.UNPROVEN_CODE}` |" in DOCS["metrics.md"]
    assert len(validity.RULES) == 17  # a new rule needs a new row in docs/metrics.md
    # a new rule of a kind of work needs one too
    assert len({rule for kind in kinds.load_kinds().values() for rule in kind.rules}) == 16
    run = "".join(path.read_text() for path in (ROOT / "src/steelyard/run").glob("*.py"))
    failed = {*re.findall(r'Failure\(\s*"(\w+)"', run), *get_args(RankStatus), "not_started"}
    assert {"killed", "host_silent", "parent_gone", "disk_full"} <= failed
    for code in failed - {"running", "done", "request", "ended"}:
        assert f"| `{code}` |" in DOCS["metrics.md"], code


@pytest.mark.parametrize("name", resolve.list_shipped_cases())
def test_every_case_is_documented(name):
    assert f"`{name}`" in DOCS["cases.md"]
    assert name in DOCS["README.md"]


def test_every_engine_and_accelerator_is_documented():
    for name in engine_rows.load_engine_rows():
        assert f"`{name}`" in DOCS["engines.md"]
    for name in accelerators.load_accelerators():
        assert f"`{name}`" in DOCS["accelerators.md"]
        assert f"{name}_torch.py" in DOCS["accelerators.md"]


def test_every_source_is_documented():
    for row in (*sources.DATA_SOURCES, *sources.WEIGHT_SOURCES):
        assert f"`{row.name}`" in DOCS["data.md"], row.name


def test_every_status_and_version_of_the_formulas_is_documented():
    for status in get_args(record.Status):
        assert f"`{status}`" in DOCS["records.md"]
        assert f"`{status}`" in DOCS["glossary.md"]
    assert f"the version of the metric formulas, {record.FORMULAS_VERSION}." in DOCS["records.md"]
    assert f"`formulas` {standing.FIRST_VERSION_WITH_UNPROVEN} on" in DOCS["metrics.md"]
    assert f"| scoring | {stats.MIN_STEPS} batches " in DOCS["metrics.md"]
    assert f"| training | {stats.MIN_STEPS_FOR_STEADY_INTERVAL} steps: " in DOCS["metrics.md"]
    assert f"| generation | {stats.MIN_STEPS} turns of the load " in DOCS["metrics.md"]


def test_every_field_of_a_record_is_documented():
    for name, field in record.Record.model_fields.items():
        assert f"`{field.alias or name}`" in DOCS["records.md"], name


def test_every_field_of_a_report_is_documented():
    for name in (
        *as_csv.IDENTITY,
        *(field.alias or name for name, field in Report.model_fields.items()),
    ):
        assert f"`{name}`" in DOCS["report.md"], name


def test_every_key_of_a_case_is_documented():
    for key in resolve.list_settable_keys():
        leaf = key.rpartition(".")[2]
        if not key.startswith(("question.precision", "question.data.made")):
            assert leaf in DOCS["cases.md"], key


def test_every_key_of_a_site_is_documented():
    for prefix, keys in (("", Site), ("host.", HostSettings), ("slurm.", SlurmSettings)):
        for name in keys.model_fields:
            forms = (f"`{name}`", f"`[{name}]`", f"`[{name}.NAME]`")
            assert any(text in DOCS["clusters.md"] for text in forms), f"{prefix}{name}"
    assert f"| {SILENCE_S:g} |" in DOCS["clusters.md"]
    assert f"within {OPEN_S:g} s" in DOCS["clusters.md"]


def test_site_files_in_the_docs_are_valid():
    texts = re.findall(r"^```toml\n(.*?)^```", DOCS["clusters.md"], re.DOTALL | re.MULTILINE)
    sites = [Site.model_validate(tomllib.loads(text)) for text in texts]
    assert [site.launcher for site in sites] == ["ssh", "slurm"]
    assert all(site.launcher in launch.load_launchers() for site in sites)


@pytest.mark.process
@pytest.mark.parametrize("verb", VERBS + GROUPS)
def test_every_verb_is_in_the_readme_and_its_help_has_an_example(verb):
    assert f"steelyard {verb}" in DOCS["README.md"]
    result = subprocess.run(
        [sys.executable, "-m", "steelyard", verb, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"steelyard {verb}" in result.stdout.split("Example")[1]


def test_list_of_verbs_is_complete():
    from steelyard.cli import app

    assert {
        command.name or command.callback.__name__ for command in app.registered_commands
    } == set(VERBS)
    assert {group.name for group in app.registered_groups} == set(GROUPS)


def find_commands(text: str) -> list[str]:
    """Return the command lines that a reader would paste: those in code blocks that begin with
    `steelyard`.
    """
    code_blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in code_blocks if language in ("", "sh", "console")]
    joined_lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    lines = [line.removeprefix("$ ").split("#")[0].strip() for line in joined_lines]
    return [line for line in lines if line.startswith("steelyard ")]


@pytest.mark.full
@pytest.mark.parametrize(
    "line", sorted({line for text in DOCS.values() for line in find_commands(text)})
)
def test_commands_in_the_docs_run_or_lack_only_their_inputs(line, tmp_path):
    """Each command is run if its inputs exist here; the others must be refused only because an
    input is missing.
    """
    for name in ("data.tar", "tokenizer.model"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "Llama-2-7b-hf").mkdir()
    (tmp_path / "ids.txt").write_text("12\n")
    command = [
        sys.executable,
        "-m",
        "steelyard",
        *shlex.split(line.replace("…", "tune.warmup=1"))[1:],
    ]
    tested_elsewhere = (
        "records",
        "RECORD",
        "mine.toml",
        "conform mine",
        "run smoke",
        "--engine all",
        "steelyard check",
    )
    tested_elsewhere += ("conform transformers",)  # run by tests/hard/test_conform.py
    # Run by tests/sources and tests/cli/test_get.py: nothing here goes out to a network.
    tested_elsewhere += ("data get", "weights get")
    # A case that needs no input runs at full size, for hours on a CPU; others run it at smoke.
    is_full_size = "llama3-8b-generate" in line and "--size smoke" not in line
    if is_full_size or any(word in line for word in tested_elsewhere):
        command = [
            *command[:4],
            "--help",
        ]  # other tests run these: on real records, all smoke cases, all engines
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}  # an empty cache of downloads
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300, env=env
    )
    missing_input_errors = (
        "data.tar: ",
        "tokenizer.model: ",
        "site.toml",
        "is not a folder",
        "does not exist",
        "this host only",
        "salloc",
    )
    missing_input_errors += (
        "cannot be started: No such file",
        "has no run.py",
        "is not here yet",
    )
    refused = result.returncode == 2 and any(text in result.stderr for text in missing_input_errors)
    assert result.returncode == 0 or refused, result.stderr


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_published_records_verify(path):
    assert verify_record(path) == []


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.name)
def test_published_ceilings_verify(path):
    assert ceiling_rates.verify_spec_record(path) == []


def test_links_point_to_existing_files():
    for name, text in DOCS.items():
        base = ROOT if name == "README.md" else ROOT / "docs"
        for target in re.findall(r"\]\(([^)#]+)", text):
            assert (base / target).exists(), (name, target)


def make_anchor(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_anchors_point_to_headings():
    heads = {
        name: {make_anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
        for name, text in DOCS.items()
    }
    for name, text in DOCS.items():
        for target, fragment in re.findall(r"\]\(([^)#]*)#([^)]+)\)", text):
            assert fragment in heads[Path(target).name or name], (name, target, fragment)


def find_prose_lines(text: str) -> list[str]:
    """Return the lines outside of code blocks and tables."""
    return [
        line
        for line in re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
        if line.lstrip()[:1] != "|"
    ]


@pytest.mark.parametrize("name", [*sorted(DOCS), "CHANGELOG.md"])
def test_prose_lines_have_at_most_120_columns(name):
    text = DOCS.get(name) or (ROOT / name).read_text()
    assert [line for line in find_prose_lines(text) if len(line) > 120] == []
    assert "the seeds" not in text.lower()


def test_the_glossary_is_linked():
    assert "](docs/glossary.md)" in DOCS["README.md"]
    for name in ("tutorial.md", "metrics.md", "cases.md", "records.md", "engines.md"):
        assert "](glossary.md)" in DOCS[name], name


NUMBER_FORMATS = (
    (r"(?<![\w.])(\d+\.\d) %", lambda value: f"{100 * value:.1f}"),
    (r"(?<![\w.])(\d{2,3},\d{3})(?![\w,])", lambda value: f"{value:,.0f}"),
    (r"(?<![\w.])(0\.[1-9]\d{3})(?!\w)", lambda value: f"{value:.4f}"),  # ratio of two engines
)


def test_numbers_in_the_notebook_are_in_records():
    """Every number that a table of docs/notebook.md attributes to a record is in that record."""
    by_id = {path.stem[-8:]: path for path in RUNS}
    checked = 0
    for line in re.findall(r"^\|.*$", DOCS["notebook.md"], re.MULTILINE):
        record_ids = re.findall(r"`([0-9a-f]{8})`", line)
        metrics = [
            m
            for record_id in record_ids
            for m in record.read_record(by_id[record_id]).metrics.values()
        ]
        values = [m.value for m in metrics if m.value is not None]
        for pattern, format_value in NUMBER_FORMATS if record_ids else ():
            for text in re.findall(pattern, line):
                assert text in {format_value(value) for value in values}, (line, text)
                checked += 1
    assert checked


def test_records_that_the_notebook_names_exist():
    record_ids = set(re.findall(r"`([0-9a-f]{8})`", DOCS["notebook.md"]))
    assert record_ids <= {path.stem[-8:] for path in (*RUNS, *SPECS)}


@pytest.mark.parametrize("path", docs_tables.DOCUMENTS, ids=lambda path: path.name)
def test_tables_equal_those_made_from_records(path):
    """`make docs` writes them."""
    assert docs_tables.regenerate_tables(path.read_text()) == path.read_text()


def test_every_table_stands_in_one_document():
    names = [
        name for text in DOCS.values() for _, name, _ in docs_tables.TABLE_SECTION.findall(text)
    ]
    assert sorted(names) == sorted(docs_tables.TABLES)
    assert sum(text.count("<!-- begin ") for text in DOCS.values()) == len(names)


PACKAGE = ROOT / "src/steelyard"


def list_readme_rooms() -> set[str]:
    """Return the folders of the package that the README's tree lists."""
    tree = DOCS["README.md"].partition("src/steelyard/\n")[2].partition("```")[0]
    return set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))


def test_every_room_is_in_the_readme():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= list_readme_rooms()


def test_files_that_the_design_names_exist():
    """Paths in backquotes in docs/flow.md and docs/design.md are files of the repository or of the
    package; the rooms of the README are folders."""
    paths_by_document = {"README.md": {f"{room}/" for room in list_readme_rooms()}}
    for name in ("flow.md", "design.md"):
        paths_by_document[name] = set(
            re.findall(r"`([\w/.-]+(?:/|\.(?:py|toml|md|json)))`", DOCS[name])
        )
    for name, paths in paths_by_document.items():
        missing = [
            path for path in paths if not (ROOT / path).exists() and not (PACKAGE / path).exists()
        ]
        assert sorted(missing) == [], name


def find_code_block(name: str, begin: str) -> list[str]:
    """Return the lines of the only `text` code block of a document that contains `begin`."""
    (code,) = [
        candidate
        for candidate in re.findall(r"^```text\n(.*?)^```$", DOCS[name], re.DOTALL | re.MULTILINE)
        if begin in candidate
    ]
    return code.splitlines()


def test_tutorial_shows_the_output_of_check(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    machine = fitness_rules.MachineFacts(
        accelerator="cpu",
        devices=("AMD EPYC",),
        driver=None,
        needs_driver=False,
        host=HostState(load_1m=6.64, cores=2, allowed=2),
        others=cpu_contention.ContentionShare(1.0, 1.0),
        contention_limits=cpu_contention.find_contention_limits("cpu"),
        free_bytes={"records": 50 << 30, "temporary": 50 << 30},
        versions={},
        torch_build=None,
        amx=None,
    )
    shown = find_code_block("tutorial.md", "host load")
    assert (
        machine_verbs._format_findings(fitness_rules.judge_machine(machine))[: len(shown)] == shown
    )


def test_docs_show_the_answer_columns_of_a_comparison():
    records = [make_record_with_tokens("torch", "ABCDABCD", []) for _ in range(2)]
    comparison = side_comparison.compare_sides(
        side_comparison.make_side("base", records),
        side_comparison.make_side("new", records),
        ["case"],
        0.01,
    )

    def read_headings(lines):
        return re.split(r"\s{2,}", lines[lines.index("Answers") + 3])

    assert read_headings(find_code_block("comparing.md", "Answers")) == read_headings(
        report.render_text(report.build_comparison_page(comparison)).splitlines()
    )
