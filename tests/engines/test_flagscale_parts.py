"""Parts of engine flagscale that need no program: configuration, data files, and parsing of output
lines and scripts.
"""

import math
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steelyard.case import resolve
from steelyard.data.corpus import Corpus, CorpusRows
from steelyard.engine.job import Job
from steelyard.engines.flagscale import command, config, indexed_dataset, log_lines
from steelyard.engines.flagscale.framework import ProgramFramework
from steelyard.engines.flagscale.log_lines import Iteration, ProgramError
from steelyard.engines.flagscale.train import FlagScaleTrain
from steelyard.errors import RequestError
from steelyard.plan import degrees
from steelyard.tasks.task import Sources
from steelyard.training.training_loop import compute_learning_rate

CASE = "llama1-7b-openwebtext"
LINE = (
    " [2025-11-13 10:00:00] iteration       12/     100 | consumed samples:        24576 | elapsed"
    " time per iteration (ms): 5432.1 | throughput per GPU (TFLOP/s/GPU): 301.2 | learning rate:"
    " 1.800000E-06 | global batch size:  2048 | lm loss: 1.098612E+01 | loss scale: 1.0 | grad"
    " norm: 3.125 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def make_job(
    tmp_path: Path, *settings: str, size: str = "smoke", devices: int = 1, **changes: Any
) -> Job:
    """Return a job of the corpus case; only size smoke has inputs. `changes` replace fields of the
    job.
    """
    case = resolve.resolve_case(CASE, size, settings=list(settings)).case
    plan = degrees.make_plan(case, 1, devices)
    inputs = None
    if size == "smoke":
        inputs = case.question.task_row.prepare(
            case.question.describe_for_task(Sources(None, None, None), None, True, {})
        ).inputs
    framework = ProgramFramework(None, 0, lambda: 0.0)
    fields = {
        "case": case,
        "work": "train_rows",
        "inputs": inputs,
        "weights": None,
        "device": framework.device,
        "rank": 0,
    }
    fields |= {
        "world": 1,
        "plan": plan,
        "place": degrees.find_position(plan, 0),
        "group": None,
        "steps": None,
    }
    return Job(**{**fields, "folder": tmp_path, "checkout": tmp_path, **changes})


def test_an_iteration_line_is_parsed_with_or_without_a_rank_prefix() -> None:
    assert log_lines.parse_iteration(LINE) == Iteration(
        12, 100, 24576, 2048, 5.4321, 10.98612, 3.125, 1.8e-6, 0, 0
    )
    assert log_lines.parse_iteration("[default7]:" + LINE) == log_lines.parse_iteration(LINE)
    assert log_lines.parse_iteration("iteration 3 begins") is None


def test_a_missing_loss_is_none() -> None:
    iteration = log_lines.parse_iteration(
        LINE.replace(" lm loss: 1.098612E+01 |", "").replace("grad norm: 3.125", "grad norm: nan")
    )
    assert iteration is not None
    assert iteration.loss is None
    assert iteration.grad_norm is not None
    assert math.isnan(iteration.grad_norm)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "elapsed time per iteration (ms): 5432.1 |",
            "",
            "lacks 'elapsed time per iteration (ms)'",
        ),
        ("5432.1", "soon", "cannot be read: could not convert string to float: 'soon'"),
        (
            "12/     100",
            "13/     100",
            "the program reported iteration 13 of 100, expected 12 of 100",
        ),
        (
            "12/     100",
            "12/      90",
            "the program reported iteration 12 of 90, expected 12 of 100",
        ),
        (" 2048 |", " 1024 |", "a batch of 1024 rows and 24576 in all; expected: 2048 and 24576"),
        ("24576", "24575", "a batch of 2048 rows and 24575 in all; expected: 2048 and 24576"),
        ("5432.1", "0.0", "iteration 12 has an invalid time: 0.0 s"),
        ("5432.1", "nan", "iteration 12 has an invalid time: nan s"),
    ],
)
def test_lines_that_contradict_the_job_raise(old: str, new: str, said: str) -> None:
    with pytest.raises(ProgramError) as caught:
        iteration = log_lines.parse_iteration(LINE.replace(old, new))
        assert iteration is not None
        log_lines.check_iteration(iteration, 11, 100, 2048)
    assert said in str(caught.value)


def test_the_configuration_follows_the_case_and_plan(tmp_path: Path) -> None:
    settings = (
        "tune.parallel=TP2PP2DP2",
        "tune.sharding=1",
        "tune.recompute=full",
        "tune.micro_batch=4",
    )
    configuration = config.make_config(
        make_job(tmp_path, *settings, size="full", devices=8),
        2048,
        100,
        tmp_path / "d",
        tmp_path / "o",
        1234,
    )
    runner = configuration["experiment"]["runner"]
    assert (runner["nnodes"], runner["nproc_per_node"], runner["rdzv_endpoint"]) == (
        1,
        8,
        "127.0.0.1:1234",
    )
    assert (
        runner["rdzv_backend"],
        runner["redirects"],
        runner["tee"],
        configuration["action"],
    ) == ("static", "0", "0", "dryrun")
    system, model, data_settings = (
        configuration["train"][name] for name in ("system", "model", "data")
    )
    assert (system["tensor_model_parallel_size"], system["pipeline_model_parallel_size"]) == (2, 2)
    assert system["use_distributed_optimizer"] is True
    # if fusion were on, Megatron would need a kernel of Apex and exit without it
    assert system["no_gradient_accumulation_fusion"] is True
    assert system["precision"] == {"bf16": True, "accumulate_allreduce_grads_in_fp32": True}
    assert system["recompute"]["recompute_granularity"] == "full"
    shape = {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 11008,
        "num_attention_heads": 32,
        "seq_length": 2048,
    }
    assert {name: model[name] for name in shape} == shape
    batch = {
        "train_iters": 100,
        "micro_batch_size": 4,
        "global_batch_size": 2048,
        "eval_iters": 0,
        "seed": 1,
    }
    assert {name: model[name] for name in batch} == batch
    assert (model["transformer_impl"], model["no_masked_softmax_fusion"]) == ("local", True)
    assert (data_settings["reset_attention_mask"], data_settings["eod_mask_loss"]) == (True, True)
    assert data_settings["tokenizer"] == {"tokenizer_type": "NullTokenizer", "vocab_size": 31999}


@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_warm_up_learning_rates_equal_those_of_every_engine(tmp_path: Path, warmup: int) -> None:
    """Megatron's formula rises linearly from `lr_warmup_init` over `lr_warmup_iters` iterations."""
    flagscale_job = make_job(tmp_path, f"question.train.warmup_steps={warmup}")
    train = flagscale_job.case.question.train
    assert train is not None
    scheduler = config.make_config(flagscale_job, 8, 40, tmp_path, tmp_path, 1)["train"]["model"][
        "optimizer"
    ]["lr_scheduler"]
    first, peak, steps = scheduler["lr_warmup_init"], scheduler["lr"], scheduler["lr_warmup_iters"]
    rates = [first + (peak - first) * i / steps if steps else peak for i in range(max(1, warmup))]
    assert rates == pytest.approx(
        [compute_learning_rate(train, i) for i in range(max(1, warmup))], rel=1e-12
    )


@pytest.mark.parametrize(
    ("settings", "devices", "changes", "said"),
    [
        (
            (),
            1,
            {"weights": Path("w")},
            "--weights: engine flagscale: it starts from its own random weights; leave it out",
        ),
        (
            ("tune.sharding=2",),
            2,
            {},
            "tune.sharding: engine flagscale: its distributed optimizer divides optimizer states"
            " only",
        ),
        (
            ("tune.attention=rows",),
            1,
            {},
            "tune.attention: engine flagscale: only its plain attention keeps documents apart",
        ),
        (
            ("tune.deterministic=true",),
            1,
            {},
            "tune.deterministic: engine flagscale: it has no deterministic mode",
        ),
        (
            ("tune.micro_batch=3",),
            1,
            {},
            "8 rows do not divide into micro-batches of 3 on 1 replicas",
        ),
        (
            ("tune.parallel=PP4", "question.model.layers=4", "tune.micro_batch=1"),
            4,
            {},
            "--parallel: engine flagscale: inner stages of a pipeline do not get the ends of"
            " documents; allowed: PP1, PP2",
        ),
        (("tune.parallel=PP2", "question.model.layers=3"), 2, {}, "3 layers do not divide by PP2"),
        ((), 1, {"inputs": object()}, "engine flagscale trains on documents packed end to end"),
    ],
)
def test_unsupported_jobs_are_refused(
    tmp_path: Path, settings: Any, devices: int, changes: Any, said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        FlagScaleTrain(make_job(tmp_path, *settings, devices=devices, **changes))
    assert said in str(caught.value)


def read_indexed_dataset(prefix: Path) -> list[list[int]]:
    """Return the documents of an indexed dataset as lists of token ids, read as Megatron reads
    them.
    """
    raw = prefix.with_suffix(".idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    version, dtype_code, sequences, boundaries = struct.unpack("<QBQQ", raw[9:34])
    dtype = {4: np.int32, 8: np.uint16}[dtype_code]
    lens = np.frombuffer(raw, np.int32, sequences, 34)
    begins = np.frombuffer(raw, np.int64, sequences, 34 + lens.nbytes)
    ends = np.frombuffer(raw, np.int64, boundaries, 34 + lens.nbytes + begins.nbytes)
    assert (version, len(raw)) == (1, 34 + lens.nbytes + begins.nbytes + ends.nbytes)
    assert list(ends) == list(range(sequences + 1))
    tokens = prefix.with_suffix(".bin").read_bytes()
    return [
        list(map(int, np.frombuffer(tokens, dtype, n, offset)))
        for n, offset in zip(lens, begins, strict=True)
    ]


def make_corpus_rows(*documents: list[int]) -> CorpusRows:
    """Return rows of four tokens over a corpus of these documents."""
    ids = np.array([token for document in documents for token in document], dtype=np.int32)
    return CorpusRows(
        Corpus(ids, np.cumsum([len(document) for document in documents]), "made"), 4, 2, 0, 1
    )


def test_end_tokens_are_renumbered_to_the_last_id_of_the_vocabulary(tmp_path: Path) -> None:
    """Of four documents the first two are written: one is held out and one is for tests. Token 2
    ends each document and is swapped with the last id of the vocabulary: 9, then 99,999.
    """
    rows = make_corpus_rows([5, 9, 2], [7, 2], [1, 2], [1, 2])
    assert indexed_dataset.write_indexed_dataset(rows, 10, tmp_path / "d") == 5
    assert read_indexed_dataset(tmp_path / "d") == [[5, 2, 9], [7, 9]]
    indexed_dataset.write_indexed_dataset(rows, 100_000, tmp_path / "e")
    assert read_indexed_dataset(tmp_path / "e") == [[5, 9, 99_999], [7, 99_999]]


@pytest.mark.parametrize("second", [[7, 3], [2, 7, 2]])
def test_documents_without_exactly_one_end_token_are_refused(
    tmp_path: Path, second: list[int]
) -> None:
    with pytest.raises(RequestError, match="document 1 does not end with its only token 2"):
        indexed_dataset.write_indexed_dataset(
            make_corpus_rows([5, 2], second, [1, 2], [1, 2]), 10, tmp_path / "d"
        )


TORCHRUN = (
    "torchrun --nnodes 1 --nproc_per_node 2 --rdzv_endpoint 127.0.0.1:99 --tee 0 ./train.py --steps"
    " 4 --save x --lr 1"
)


def dry_run_script(
    folder: Path, cmd: str, paths: str = "{0}/third_party:{0}:${{PYTHONPATH}}"
) -> str:
    """Return a shell script as FlagScale's dry run writes it, with this command and PYTHONPATH."""
    return (
        f"#!/bin/bash\ncd {folder}\nexport"
        f' PYTHONPATH={paths.format(folder)}\n\ncmd="{cmd}"\n\nnohup bash -c "$cmd" &\n'
    )


def test_a_script_becomes_a_torchrun_command_and_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setenv("RANK", "0")
    parsed = command.parse_script(
        dry_run_script(tmp_path, f"A=1 B='x y' {TORCHRUN}"), tmp_path, {"--steps": "4"}, 2
    )
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    options = [
        "--nnodes",
        "1",
        "--nproc_per_node",
        "2",
        "--rdzv_endpoint",
        "127.0.0.1:99",
        "--tee",
        "0",
    ]
    assert parsed.arguments == [*launcher, *options, "./train.py", "--steps", "4", "--lr", "1"]
    assert (parsed.environment["A"], parsed.environment["B"], parsed.folder) == (
        "1",
        "x y",
        tmp_path,
    )
    assert parsed.environment["PYTHONPATH"] == f"{tmp_path}/third_party:{tmp_path}:/mine"
    assert not {"PYTHONSAFEPATH", "RANK"} & parsed.environment.keys()
    module = TORCHRUN.replace("torchrun", "python -m torch.distributed.run")
    assert (
        command.parse_script(dry_run_script(tmp_path, module), tmp_path, {}, 2).arguments
        == parsed.arguments
    )


@pytest.mark.parametrize(
    ("cmd", "said"),
    [
        (f"{TORCHRUN}; rm -rf x", "it contains ';'"),
        (f"{TORCHRUN} && true", "it contains '&&'"),
        (f"{TORCHRUN} > out", "it contains '>'"),
        (f"{TORCHRUN} | tee out", "it contains '|'"),
        (f"(cd x) {TORCHRUN}", "it contains '('"),
        (f"{TORCHRUN} $HOME", "it contains characters that a shell would expand"),
        (f"{TORCHRUN} `id`", "it contains characters that a shell would expand"),
        (f"A='1 {TORCHRUN}", "No closing quotation"),
        (f"bash {TORCHRUN}", "it begins with 'bash', and not with torchrun"),
        ("A=1", "it begins with 'nothing', and not with torchrun"),
        (
            TORCHRUN.replace("torchrun", "torchrun --no_python bash"),
            "torchrun's option --no_python is not supported",
        ),
        (TORCHRUN.replace("--nnodes 1", "--nnodes 2"), "--nnodes is '2', expected '1'"),
        (TORCHRUN.replace("node 2", "node 8"), "--nproc_per_node is '8', expected '2'"),
        (
            TORCHRUN.replace("127.0.0.1", "0.0.0.0"),
            "--rdzv_endpoint is '0.0.0.0', expected '127.0.0.1'",
        ),
        (
            TORCHRUN.replace("./train.py", "/usr/bin/other.py"),
            "'/usr/bin/other.py' is not a program of the checkout",
        ),
        (
            TORCHRUN.replace("./train.py", "../train.py"),
            "'../train.py' is not a program of the checkout",
        ),
        (TORCHRUN.replace("--steps 4", "--steps 5"), "--steps is '5', expected '4'"),
        (TORCHRUN.replace("--steps 4", ""), "--steps is None, expected '4'"),
        (f'{TORCHRUN}"\ncmd="true', '2 lines cmd="…"'),
    ],
)
def test_commands_that_are_not_plain_torchrun_are_refused(
    tmp_path: Path, cmd: str, said: str
) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(RequestError) as caught:
        command.parse_script(dry_run_script(tmp_path, cmd), tmp_path, {"--steps": "4"}, 2)
    begin = "engine.checkout: the dry run's script has no plain torchrun command: "
    assert str(caught.value) == f"{begin}{said}; nothing was started"


def test_a_python_path_outside_the_checkout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(
        RequestError, match="its PYTHONPATH leads out of the checkout, to '/elsewhere'"
    ):
        command.parse_script(
            dry_run_script(tmp_path, TORCHRUN, "/elsewhere:$PYTHONPATH"), tmp_path, {}, 2
        )
