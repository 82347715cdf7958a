"""Test kinds of work: the shipped ones, and one of a third-party package from its entry point to
its report.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.commands import Shell
from fixtures.golden import golden
from steelyard import plugins, tasks
from steelyard.case.precision import (
    GENERATION_PRESETS,
    SCORING_PRESETS,
    TRAINING_PRESETS,
    load_presets,
)
from steelyard.case.question import Question
from steelyard.errors import RequestError
from steelyard.report.columns import TableLayout
from steelyard.tasks import kind as kinds

PACKAGES = Path(__file__).parents[1] / "fixtures" / "packages"
PACKAGE = PACKAGES / "recite_kind"
CASE = PACKAGE / "counting.toml"
RUN = ("run", CASE, "--size", "smoke", "--accelerator", "cpu", "--engine", "recite")


@pytest.mark.parametrize("kind", kinds.SHIPPED_KINDS, ids=lambda kind: kind.name)
def test_a_kind_refers_to_existing_objects_and_passes(kind: kinds.Kind) -> None:
    """Every reference of a kind can be imported, and every pass it gives a role is one of its
    passes.
    """
    references = [*kind.works.values(), *kind.rules, kind.gate_needs, kind.loop, kind.precisions]
    references += [kind.span] if kind.span else []
    assert all(plugins.load_reference(reference) is not None for reference in references)
    assert isinstance(plugins.load_reference(kind.columns), TableLayout)
    pass_groups = (
        kind.headline,
        kind.judged,
        kind.required,
        kind.stepped,
        kind.initial,
        kind.bare,
        kind.bare.values(),
        kind.request_passes,
        kind.check_passes,
        kind.check_passes.values(),
    )
    assert {name for group in pass_groups for name in group} <= set(kind.passes)


def test_passes_and_forwards_of_shipped_kinds() -> None:
    assert {name: (row.passes, row.headline) for name, row in kinds.load_kinds().items()} == {
        "score": (("val", "infer", "bare"), ("infer", "val")),
        "train": (("before", "train", "after"), ("train",)),
        "generate": (("generate", "check"), ("generate",)),
    }
    assert [row.forwards for row in kinds.SHIPPED_KINDS] == [1, 3, 1]
    assert [kinds.TRAIN.forwards_in_pass(name) for name in kinds.TRAIN.passes] == [1, 3, 1]
    assert load_presets() == {
        "score": SCORING_PRESETS,
        "train": TRAINING_PRESETS,
        "generate": GENERATION_PRESETS,
    }
    assert {task.work for task in tasks.load_tasks().values()} == {
        work for row in kinds.SHIPPED_KINDS for work in row.works
    }


def test_an_unknown_kind_is_named_with_the_known_ones() -> None:
    with pytest.raises(
        RequestError, match=r"^no kind of work 'recite'; known: score, train, generate$"
    ):
        kinds.find_kind("recite")
    with pytest.raises(ValueError, match="no kind of work 'recite'; known: score, train, generate"):
        Question.model_validate({"kind": "recite", "task": "mmlu"})


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Yield a command line with the package recite_kind and its framework installed."""
    command_line = Shell(tmp_path, (PACKAGE, PACKAGES / "fake_framework"))
    yield command_line
    command_line.clean()


def test_a_kind_of_another_package_runs_and_is_reported(shell: Shell, tmp_path: Path) -> None:
    result = shell(*RUN, "--out", shell.out)
    assert result.code == 0, result.err
    (record,) = shell.records()
    assert (record["status"], record["reasons"], record["engine"]["name"]) == (
        "valid",
        [],
        "recite",
    )
    assert (record["case"]["question"]["kind"], record["case"]["question"]["task"]) == (
        "recite",
        "counting",
    )
    assert {sample["pass"] for sample in record["samples"]} == {"recite"}
    checks = {check["name"] for check in record["checks"]}
    assert {
        "recited",
        "covered_recite",
        "finite_recite",
        "drawn_recite",
        "accounted_recite",
    } <= checks
    assert not {"counted_recite", "covered_train"} & checks
    metrics = record["metrics"]
    assert (metrics["counted_on"]["value"], metrics["p_recite"]["unit"]) == (1.0, "tokens/s")
    assert metrics["p_recite"]["value"] == pytest.approx(metrics["tokens_per_device_s"]["value"])
    assert not {
        "p_infer_core",
        "p_val_core",
        "p_core",
        "loss",
        "harness_overhead",
        "mem_predicted",
    } & set(metrics)

    verification = shell("verify", shell.out)
    assert (verification.code, verification.out.split()[0]) == (0, "ok")
    assert "the record lacks" not in verification.out
    for lang, title in (("en", "Reciting rate"), ("zh", "背诵速率")):
        page = shell("report", shell.out, "--format", "html", "--lang", lang)
        assert page.code == 0, page.err
        for text in (title, "Texts to continue", "Reciting tool", "tiny-counting"):
            assert text in page.out, (lang, text)
    (case,) = json.loads(shell("report", shell.out, "--json").out)["cases"]
    assert (case["kind"], case["task"]) == ("recite", "counting")

    result = Shell(tmp_path)("verify", shell.out)  # in an environment without the package
    assert (result.code, len(result.lines)) == (2, 1)
    assert golden("its-question-kind-no-kind-of") in result.err


def test_a_case_of_a_third_party_kind_is_checked(shell: Shell) -> None:
    result = shell(*RUN, "--passes", "infer")
    assert (result.code, result.lines) == (2, [golden("error-passes-no-pass-infer-allowed")])
    result = shell(*RUN, "--devices", "2", "--parallel", "PP2")
    assert result.code == 2
    assert golden("tiny-counting-is-reciting-case-which") in result.err
    unknown_kind = shell.folder / "wrong.toml"
    unknown_kind.write_text(CASE.read_text().replace('kind = "recite"', 'kind = "chant"'))
    result = shell(
        "run", unknown_kind, "--size", "smoke", "--accelerator", "cpu", "--engine", "recite"
    )
    assert result.code == 2
    assert golden("no-kind-of-work-chant-known") in result.err
