"""Tests of the outputs of `report` besides its page: CSV, JSON and pages in FlagPerf's layout, on
stdout and in files.
"""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from fixtures.commands import Shell
from fixtures.records import RESULTS, SPECS, copy_published_record

LAMBADA = "aquila2-34b-lambada-smoke"
ALPACA = "aquila2-7b-alpaca-smoke"


@pytest.fixture
def records(tmp_path: Path) -> list[Path]:
    """Return copies of two published records."""
    return [copy_published_record(name, tmp_path / "records") for name in (LAMBADA, ALPACA)]


def test_csv_has_one_row_per_record(shell: Shell, records: list[Path]) -> None:
    result = shell("report", *records, "--format", "csv")
    assert (result.code, result.err) == (0, "")
    header, *rows = csv.reader(io.StringIO(result.out, newline=""))
    assert [row[header.index("case")] for row in rows] == [
        LAMBADA.removesuffix("-smoke"),
        ALPACA.removesuffix("-smoke"),
    ]
    assert [row[header.index("id")] for row in rows] == [
        json.loads(path.read_bytes())["id"] for path in records
    ]
    file = shell.folder / "runs.csv"
    assert shell("report", *records, "--format", "csv", "--to", file).lines == [f"table: {file}"]
    command = [sys.executable, "-m", "steelyard", "report", *map(str, records), "--format", "csv"]
    raw = subprocess.run(command, capture_output=True, check=True).stdout
    assert raw == file.read_bytes()
    assert (raw.count(b"\r\n"), raw.count(b"\n")) == (3, 3)


def test_json_matches_its_schema(shell: Shell, records: list[Path]) -> None:
    result = shell("report", *records, "--json")
    schema = shell("schema", "report").json()
    jsonschema.Draft202012Validator(schema).validate(result.json())
    assert schema["title"] == "Steelyard report"
    assert [entry["case"] for entry in result.json()["cases"]] == [
        LAMBADA.removesuffix("-smoke"),
        ALPACA.removesuffix("-smoke"),
    ]
    assert result.json()["pages"] == []
    page = shell.folder / "page.md"
    with_page = shell("report", *records, "--json", "--format", "md", "--to", page).json()
    assert with_page["pages"] == [{"format": "md", "lang": "en", "path": str(page)}]
    assert page.read_text().startswith("# ")
    assert with_page | {"pages": []} == result.json()


def test_json_of_spec_records(shell: Shell) -> None:
    answer = shell("report", SPECS[0], "--json").json()
    assert [entry["id"] for entry in answer["specs"]] == [json.loads(SPECS[0].read_bytes())["id"]]


def test_flagperf_pages_are_joined_in_one_file(shell: Shell, records: list[Path]) -> None:
    result = shell("report", *records, "--layout", "flagperf", "--lang", "zh")
    assert (result.code, result.err) == (0, "")
    first, second = result.out.split("\n---\n\n")
    assert first.startswith("### 1. 推理数据集\n> Download website：/\n")
    assert "* 性能指标" in second
    file = shell.folder / "both.md"
    assert shell(
        "report", *records, "--layout", "flagperf", "--lang", "zh", "--to", file
    ).lines == [f"page: {file}"]
    assert file.read_text() == result.out


def test_flagperf_pages_are_written_to_a_folder(shell: Shell, records: list[Path]) -> None:
    folder = shell.folder / "new" / "pages"
    result = shell("report", *records, "--layout", "flagperf", "--to", folder)
    written = sorted(folder.iterdir())
    device = json.loads(records[0].read_bytes())["environment"]["hardware"]["devices"][0][
        "name"
    ].replace(" ", "_")
    assert [path.name for path in written] == [f"{LAMBADA}-{device}.md", f"{ALPACA}-{device}.md"]
    assert sorted(result.lines) == [f"page: {path}" for path in written]
    pages = shell("report", *records, "--layout", "flagperf", "--to", folder, "--json").json()[
        "pages"
    ]
    assert sorted(entry["path"] for entry in pages) == [str(path) for path in written]
    assert written[0].read_text().startswith("### 1. Inference dataset\n")


@pytest.mark.parametrize(
    "arguments,said",
    [
        (("--layout", "other"), "--layout 'other': allowed: flagperf"),
        (("--format", "xls"), "--format 'xls': allowed: text, md, html, csv"),
        (
            ("--layout", "flagperf", "--format", "html"),
            "--layout flagperf is Markdown; leave out --format html",
        ),
        (("--layout", "flagperf", "--lang", "fr"), "--lang 'fr': allowed: en, zh"),
        (
            ("--explain", "--format", "csv"),
            "--explain and --format csv cannot be combined; run the command once with each",
        ),
        (
            ("--json", "--format", "html"),
            (
                "--json prints data, not a page; add --to FILE to write the page too, or leave out"
                " --json"
            ),
        ),
    ],
)
def test_contradictory_options_get_one_line(
    shell: Shell, arguments: tuple[str, ...], said: str
) -> None:
    result = shell("report", RESULTS / "cpu", *arguments)
    assert (result.code, result.out, result.lines) == (2, "", [f"error: {said}"])


def test_spec_records_have_no_csv_or_flagperf_form(shell: Shell) -> None:
    for arguments in (("--format", "csv"), ("--layout", "flagperf")):
        result = shell("report", SPECS[0], *arguments)
        assert (result.code, len(result.lines)) == (2, 1)
        assert "spec records" in result.lines[0]


def test_uncreatable_folder_gets_one_line(shell: Shell, records: list[Path]) -> None:
    result = shell("report", records[0], "--layout", "flagperf", "--to", records[1])
    assert (result.code, len(result.lines)) == (2, 1)
    assert "cannot be created as a folder" in result.lines[0]


def test_help_fits_80_columns(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = shell("report", "--help").out
    assert max(map(len, out.splitlines())) <= 80
    for option in ("--format csv", "--layout flagperf", "--json"):
        assert option in out.split("Examples:")[1].split("Options:")[0]
