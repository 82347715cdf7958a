"""Tensor parallelism over real processes: at every degree the answers are those of one process and
of transformers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ranks.plan_tables import VARIANTS, variant_settings
from steelyard.case import resolve
from steelyard.engines.transformers.score import make_transformers_config
from steelyard.models.tensors import DTYPES
from steelyard.tasks.task import Sources
from steelyard.weights import llama_weights

CASES = {
    "aquila2-34b-lambada": ["question.model.vocab=251", "tune.batch_tokens=300"],
    "llama2-7b-mmlu": [
        "question.model.vocab=251",
        "question.model.heads=16",
        "question.model.kv_heads=8",
    ],
}
DEGREES = ("TP1", "TP2", "TP4", "TP8")
VARIANT_RUNS = [f"{name} {p}" for name in VARIANTS for p in ("TP8", "TP2")]


VARIANT_CASE = "aquila2-34b-lambada"  # the case for variants of Llama


def variant_options(variant: str | None) -> list[str]:
    """Return the settings of a variant as KEY=VALUE options; none for None."""
    return (
        []
        if variant is None
        else [f"{key}={value}" for key, value in variant_settings(variant).items()]
    )


def resolve_question(case_name: str, variant: str | None = None):
    """Return a case's question at size smoke, for a plain Llama or a variant of it."""
    return resolve.resolve_case(
        case_name, "smoke", settings=[*CASES[case_name], *variant_options(variant)]
    ).case.question


def prepare_texts(case_name: str):
    """Return the inputs that a case generates."""
    case_question = resolve_question(case_name)
    return case_question.task_row.prepare(
        case_question.describe_for_task(Sources(None, None, None), None, True, {})
    ).inputs


def build_hf_model(folder: Path | None = None, variant: str | None = None):
    """Return transformers' model with the random weights of the case's seed; norms and biases of a
    variant are changed. Save it if a folder is given.
    """
    case_question = resolve_question(VARIANT_CASE, variant)
    shape = llama_weights.get_llama_shape(case_question.model)
    ours = llama_weights.build_llama(shape, torch.device("cpu"), DTYPES["fp32"])
    llama_weights.fill_random_llama_weights(ours, case_question.seed)
    with torch.no_grad():
        for parameter in ours.parameters() if variant else ():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
    theirs = AutoModelForCausalLM.from_config(make_transformers_config(case_question.model)).eval()
    llama_weights.copy_to_hf_model(ours, dict(theirs.named_parameters(remove_duplicate=False)))
    if folder is not None:
        theirs.save_pretrained(folder)
    return theirs


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The results of all runs, one dict per rank, executed once by eight processes."""
    folder = tmp_path_factory.mktemp("ranks")
    build_hf_model(folder / "hf")
    runs = [
        {"name": f"{name} {p}", "case": name, "parallel": p, "weights": None}
        for name in CASES
        for p in DEGREES
    ]
    runs += [
        {**runs[0], "name": f"loaded {p}", "parallel": p, "weights": str(folder / "hf")}
        for p in ("TP8", "TP2")
    ]
    for name in VARIANTS:
        build_hf_model(folder / name, name)
        loaded = {
            "case": VARIANT_CASE,
            "weights": str(folder / name),
            "more": variant_options(name),
        }
        runs += [{**loaded, "name": f"{name} {p}", "parallel": p} for p in ("TP8", "TP2")]
    (folder / "asked.json").write_text(json.dumps({"runs": runs, "settings": CASES}))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=8",
        "--max-restarts=0",
    ]
    command += [
        str(Path(__file__).parent / "score_plans.py"),
        str(folder / "asked.json"),
        str(folder),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600, env=env
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank-{i}.json").read_text()) for i in range(8)]


def answers_by_item(ranks: list[dict], name: str) -> dict[int, tuple]:
    """Return a run's answers by item, from the first rank of each tensor-parallel group."""
    out: dict[int, tuple] = {}
    for rank in ranks:
        result = rank[name]
        if result["place"][0] == 0:
            answers = result["answers"]
            columns = [answers[key] for key in answers if key != "items"]
            for item, *values in zip(answers["items"], *columns, strict=True):
                assert item not in out
                out[item] = tuple(values)
    return out


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [f"aquila2-34b-lambada {p}" for p in DEGREES] + ["loaded TP8", "loaded TP2"] + VARIANT_RUNS,
)
def test_losses_equal_transformers_at_every_degree(ranks, name):
    passages = prepare_texts("aquila2-34b-lambada")
    answers = answers_by_item(ranks, name)
    assert sorted(answers) == list(range(len(passages.rows)))
    variant = name.split()[0]
    model = build_hf_model(variant=variant if variant in VARIANTS else None)
    losses = set()
    for i, row in enumerate(passages.rows):
        ids = torch.tensor([row])
        with torch.no_grad():
            mean = float(model(input_ids=ids, labels=ids).loss)
        nll, last, *_ = answers[i]
        assert nll / (len(row) - 1) == pytest.approx(mean, abs=1e-5), (name, i)
        assert 0 < last < nll
        losses.add(round(mean, 5))
    assert len(losses) == len(passages.rows)  # all rows differ, so a mix-up would show


@pytest.mark.full
@pytest.mark.parametrize("parallel", DEGREES[1:])
def test_ranks_of_a_tensor_parallel_group_give_the_same_answers(ranks, parallel):
    name = f"aquila2-34b-lambada {parallel}"
    groups: dict[int, list[dict]] = {}
    for rank in ranks:
        groups.setdefault(rank[name]["place"][1], []).append(rank[name]["answers"])
    for members in groups.values():
        assert len(members) == int(parallel[2:])
        assert all(answers == members[0] for answers in members)


@pytest.mark.full
@pytest.mark.parametrize("parallel", DEGREES[1:])
def test_choices_are_the_same_at_every_degree(ranks, parallel):
    alone = answers_by_item(ranks, "llama2-7b-mmlu TP1")
    assert answers_by_item(ranks, f"llama2-7b-mmlu {parallel}") == alone
    assert len({best for best, _, _ in alone.values()}) > 2
    assert len({choice for _, choice, _ in alone.values()}) > 1


@pytest.mark.full
def test_a_rank_holds_its_shard_of_the_weights(ranks):
    whole = ranks[0]["aquila2-34b-lambada TP1"]["parameters"]
    shard = ranks[0]["aquila2-34b-lambada TP8"]["parameters"]
    norms = 5 * 64
    padded = 2 * (512 - 251) * 64  # both embedding tables, padded to 8 x 64 rows
    assert shard == (whole - norms + padded) // 8 + norms


@pytest.mark.full
def test_rows_are_divided_among_replicas_not_within_a_tensor_parallel_group(ranks):
    all_rows = list(range(len(prepare_texts("aquila2-34b-lambada").rows)))
    for parallel in DEGREES:
        name = f"aquila2-34b-lambada {parallel}"
        assert (
            sorted(
                row for rank in ranks if rank[name]["place"][0] == 0 for row in rank[name]["rows"]
            )
            == all_rows
        )
