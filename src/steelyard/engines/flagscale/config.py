"""FlagScale's configuration for a case: model, plan, batch, optimizer, data. Only `write_config`
has effects.

Keys are those of FlagScale's examples and of Megatron-LM's arguments, which they become word for
word. Rows hold documents that do not see each other: Megatron does that by a mask over all pairs of
tokens, which only its plain attention reads.
"""

import json
from pathlib import Path
from typing import Any

from steelyard.case.case import Case
from steelyard.case.question import Train
from steelyard.engine.job import Job
from steelyard.errors import RequestError
from steelyard.models.shapes import LlamaModel

ENTRY = "./flagscale/train/train_gpt.py"
LOOPBACK = "127.0.0.1"
CONFIG_NAME = "train"
# With a first scale and a growth as other engines have them.
PRECISION_OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True, "accumulate_allreduce_grads_in_fp32": True},
    "fp16": {
        "fp16": True,
        "accumulate_allreduce_grads_in_fp32": True,
        "initial_loss_scale": 65536,
        "loss_scale_window": 1000,
    },
}
RECOMPUTE_OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def check_flagscale(job: Job, rows: int) -> None:
    """Raise RequestError for what FlagScale cannot do, or would silently do differently than asked:
    given weights, determinism, a named attention kernel, sharding above 1 or among some replicas
    only, PP above 2 or one that does not divide the layers, a model that is no Llama, tied or with
    biases, or micro-batches that do not divide `rows`, the rows of a global batch.
    """
    case, plan, tune = job.case, job.plan, job.case.tune
    model = case.question.model
    refused = {
        "--weights": (
            job.weights is not None,
            "it starts from its own random weights; leave it out",
        ),
        "tune.deterministic": (tune.deterministic, "it has no deterministic mode; leave it out"),
        "tune.attention": (
            tune.attention != "auto",
            "only its plain attention keeps documents apart; leave it out",
        ),
        "tune.sharding": (
            tune.sharding > 1,
            "its distributed optimizer divides optimizer states only; allowed: 0, 1",
        ),
        "tune.sharding_degree": (
            tune.sharding_degree not in (None, plan.dp),
            f"all replicas share the states; allowed: {plan.dp}",
        ),
        "--parallel": (
            plan.pp > 2,
            "inner stages of a pipeline do not get the ends of documents; allowed: PP1, PP2",
        ),
        "question.model": (
            not isinstance(model, LlamaModel) or model.tied or model.qkv_bias,
            "allowed: a Llama without tied embeddings and biases",
        ),
        "tune.micro_batch": (
            rows % (plan.dp * tune.micro_batch) > 0,
            (
                f"{rows} rows do not divide into micro-batches of {tune.micro_batch} on {plan.dp}"
                " replicas; change it"
            ),
        ),
    }
    for name, (wrong, why) in refused.items():
        if wrong:
            raise RequestError(f"{name}: engine flagscale: {why}")
    if isinstance(model, LlamaModel) and model.layers % plan.pp:
        raise RequestError(
            f"--parallel {plan}: {model.layers} layers do not divide by PP{plan.pp}; change it"
        )


def make_config(
    job: Job, rows: int, steps: int, data_prefix: Path, output: Path, port: int
) -> dict[str, Any]:
    """Return FlagScale's whole configuration as a nested dict; nothing is written. `rows` is the
    global batch, `data_prefix` the prefix of the dataset files, `output` the folder it writes to,
    `port` a free loopback port for torchrun, which starts one process per device on this host.
    `tune.env` is added to the environment.
    """
    case, plan = job.case, job.plan
    return {
        "experiment": {
            "exp_name": case.name,
            "exp_dir": str(output),
            "task": {"type": "train", "backend": "megatron", "entrypoint": ENTRY},
            "runner": {
                "backend": "torchrun",
                "nnodes": 1,
                "nproc_per_node": plan.devices,
                "master_addr": LOOPBACK,
                "master_port": port,
                "rdzv_backend": "static",  # the other one unpickles what it is sent
                "rdzv_endpoint": f"{LOOPBACK}:{port}",
                "redirects": "0",  # output comes at once, not by way of log files
                "tee": "0",
            },
            "envs": {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **case.tune.env},
        },
        "action": "dryrun",
        "train": {
            "system": _system_options(job),
            "model": _model_options(case, rows, steps),
            "data": _data_options(case, data_prefix),
        },
        "hydra": {"run": {"dir": str(output / "hydra")}},
    }


def _system_options(job: Job) -> dict[str, Any]:
    """Return the `train.system` part: parallelism, distributed optimizer for sharding 1, precision,
    recomputation, a log line for every step, and no checkpoints in practice (an interval of 10^9
    steps). Megatron's checks for NaN and its fused gradient accumulation are off.
    """
    plan, tune = job.plan, job.case.tune
    return {
        "tensor_model_parallel_size": plan.tp,
        "pipeline_model_parallel_size": plan.pp,
        "use_distributed_optimizer": tune.sharding == 1,
        "disable_bias_linear": True,
        # its kernel is Apex's, and Megatron ends where Apex is not installed
        "no_gradient_accumulation_fusion": True,
        # log lines report NaN, and a check would wait for the device in every step
        "no_check_for_nan_in_loss_and_grad": True,
        "precision": PRECISION_OPTIONS[job.case.question.precision.name],
        "recompute": RECOMPUTE_OPTIONS[tune.recompute],
        "logging": {"log_interval": 1},
        "checkpoint": {"save_interval": 10**9, "no_load_optim": True, "no_load_rng": True},
    }


def _model_options(case: Case, rows: int, steps: int) -> dict[str, Any]:
    """Return the `train.model` part: architecture without dropout, batch sizes, steps, loss as the
    mean over all targets of the global batch, no evaluation, the question's seed + 1, and the
    optimizer. Raises ValueError if the case does not train a Llama.
    """
    question = case.question
    model, train = question.model, question.train
    if not isinstance(model, LlamaModel) or train is None:
        raise ValueError("not a training case of a Llama")
    grouped = (
        {"group_query_attention": True, "num_query_groups": model.kv_heads}
        if model.kv_heads != model.heads
        else {}
    )
    return {
        "transformer_impl": "local",
        "no_masked_softmax_fusion": True,  # the fused one takes no mask
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        **grouped,
        "seq_length": train.length,
        "max_position_embeddings": max(model.positions, train.length),
        "norm_epsilon": model.norm_eps,
        "position_embedding_type": "rope",
        "rotary_base": int(model.rope_base),
        "swiglu": True,
        "normalization": "RMSNorm",
        "untie_embeddings_and_output_weights": True,
        "init_method_std": 0.02,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "train_iters": steps,
        "eval_iters": 0,
        "micro_batch_size": case.tune.micro_batch,
        "global_batch_size": rows,
        "calculate_per_token_loss": True,  # the mean over the targets of the global batch
        "seed": question.seed + 1,  # Megatron takes no 0
        "optimizer": _optimizer_options(train),
    }


def _optimizer_options(train: Train) -> dict[str, Any]:
    """Return Adam's options and the learning-rate schedule. Megatron's warm-up begins at
    `lr_warmup_init` and has no step for its end: with one step less, beginning at lr /
    warmup_steps, every step has the rate of this package's engines.
    """
    warmup = max(0, train.warmup_steps - 1)
    return {
        "optimizer": "adam",
        "weight_decay": train.weight_decay,
        "clip_grad": train.clip,
        "adam_beta1": train.beta1,
        "adam_beta2": train.beta2,
        "adam_eps": train.eps,
        "lr_scheduler": {
            "lr": train.lr,
            "min_lr": train.min_lr,
            "lr_warmup_init": train.lr / train.warmup_steps if warmup else 0.0,
            "lr_warmup_iters": warmup,
            "lr_decay_iters": train.decay_steps,
            "lr_decay_style": train.schedule,
        },
    }


def _data_options(case: Case, prefix: Path) -> dict[str, Any]:
    """Return the `train.data` part: the indexed dataset at `prefix`, all of it for training,
    attention reset and loss masked at document ends, and a vocabulary that is not padded. The null
    tokenizer adds the end-of-document token by itself, so it is given vocab - 1.
    """
    vocab = case.question.model.vocab
    return {
        "data_path": str(prefix),
        "split": "100,0,0",
        "reset_attention_mask": True,
        "eod_mask_loss": True,
        "make_vocab_size_divisible_by": 1,
        # it adds the end-of-document token to the vocabulary
        "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": vocab - 1},
    }


def write_config(config: dict[str, Any], folder: Path) -> Path:
    """Write the configuration to `train.yaml` in the folder, as JSON (which YAML includes),
    replacing an existing file, and return its path.
    """
    path = folder / f"{CONFIG_NAME}.yaml"
    path.write_text(json.dumps(config, indent=2) + "\n")
    return path
