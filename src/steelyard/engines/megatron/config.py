"""Megatron's configuration for a case, its process groups, and what engine `megatron` refuses."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from steelyard.engine.job import Job
from steelyard.errors import RequestError
from steelyard.models.attention import check_attention_kernel
from steelyard.models.llama import LlamaShape
from steelyard.models.tensors import COMPUTE_DTYPE_NAMES, DTYPES, get_compute_dtype
from steelyard.plan.degrees import get_shard_degree

# `selective` is Megatron's own: attention alone is computed again.
RECOMPUTE_OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def check_megatron(job: Job) -> None:
    """Raise RequestError for what Megatron cannot do without Transformer Engine, or would do
    differently than asked: pipeline stages of unequal size and, if the case trains, optimizer
    sharding above 1 or among some replicas only (if replicas share at all), and a precision whose
    weights, gradients or states are not fp32.
    """
    tune, precision, model = job.case.tune, job.case.question.precision, job.case.question.model
    if model.layers % job.plan.pp:
        raise RequestError(
            f"engine megatron needs equal pipeline stages; PP{job.plan.pp} does not divide"
            f" {model.layers}; change PP"
        )
    if job.case.question.train is None:
        return
    if is_sharded(job) and (
        tune.sharding > 1 or get_shard_degree(job.case, job.plan.dp) != job.plan.dp
    ):
        raise RequestError(
            "engine megatron's distributed optimizer divides optimizer states among all replicas;"
            " allowed: tune.sharding=0 or 1, without tune.sharding_degree"
        )
    stored_in = (precision.weights, precision.gradients, precision.states)
    if stored_in != ("fp32", "fp32", "fp32"):
        raise RequestError(
            f"engine megatron keeps weights, gradients and states in fp32, and {precision.name}"
            " does not: that takes the optimizer of Transformer Engine; allowed: --precision fp32,"
            " tf32, fp16 or bf16"
        )


def is_sharded(job: Job) -> bool:
    """Return whether replicas divide optimizer states, by Megatron's distributed optimizer:
    `tune.sharding` is set and several replicas share.
    """
    return get_shard_degree(job.case, job.plan.dp) > 1


def choose_megatron_attention(job: Job) -> str:
    """Return the name of the attention kernel (of models/attention.py) that `tune.attention` gives,
    or the device's choice for `auto`. Raises RequestError if it is unknown, or has wrong gradients
    and the case trains.
    """
    precision, kernel = job.case.question.precision, job.case.tune.attention
    if kernel == "auto":
        kernel = job.device.attention(COMPUTE_DTYPE_NAMES[precision.matmul], False)
    return check_attention_kernel(kernel, job.case.question.kind_row.trains)


def make_transformer_config(job: Job, shape: LlamaShape) -> Any:
    """Return Megatron's TransformerConfig for a case: a Llama without dropout, in the dtype of the
    matmuls if it trains, else of the weights; `tune.recompute` and fusions count in training only.
    Megatron divides no loss.

    Weights are filled in later, so initialization leaves them alone; it must run nevertheless, for
    it also marks tensor-parallel parameters, without which gradient norms are wrong.
    """
    question, tune = job.case.question, job.case.tune
    training = question.train is not None
    dtype = (
        get_compute_dtype(question.precision.matmul)
        if training
        else DTYPES[question.precision.weights]
    )
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=training and question.precision.matmul == "bf16",
        fp16=training and question.precision.matmul == "fp16",
        tensor_model_parallel_size=job.plan.tp,
        pipeline_model_parallel_size=job.plan.pp,
        deallocate_pipeline_outputs=job.plan.pp > 1,  # what was sent is no longer needed
        deterministic_mode=tune.deterministic,
        perform_initialization=True,
        init_method=_keep_weight,
        output_layer_init_method=_keep_weight,
        embedding_init_method=_keep_weight,
        # The loss comes divided by the targets of all replicas: nothing else may divide it, and
        # gradients are summed.
        calculate_per_token_loss=True,
        **_fusion_options(tune.compile and training, question.precision.matmul),
        **(RECOMPUTE_OPTIONS[tune.recompute] if training else {}),
    )


def _fusion_options(compiled: bool, matmul: str) -> dict[str, Any]:
    """Return Megatron's fusion options as keywords of TransformerConfig. Those that torch.compile
    makes are on if `compiled`; those that need extensions are off. The fused loss rounds its
    gradient to bf16 whatever the logits are (in fp32 it made gradient norms wrong by 4e-4), so it
    is on only if `matmul`, the precision of the matmuls, is "bf16".
    """
    return {
        "bias_activation_fusion": compiled,
        "bias_dropout_fusion": compiled,
        "cross_entropy_loss_fusion": compiled and matmul == "bf16",
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }


def _keep_weight(weight: Tensor) -> Tensor:
    """Return the weight unchanged (Megatron's init method)."""
    return weight


# as ranks stand in a plan: tensor-parallel ones are neighbours, then stages, then replicas
RANK_ORDER = "tp-cp-ep-pp-dp"
_dist: Any = dist  # its stores are not in its stubs


def initialize_process_groups(job: Job) -> None:
    """Initialize Megatron's process groups for the plan, replacing earlier ones, and seed its
    random state with the question's seed + 1; process-wide. All ranks call it together.

    If torch.distributed is not initialized (a single rank), it is, with one rank, for Megatron
    always needs a group. Raises RequestError if the device is not of the type of CUDA's current
    one, RuntimeError if Megatron's order of ranks differs from the plan's.
    """
    _check_device(job.device.torch_device)
    if not dist.is_initialized():
        dist.init_process_group(job.device.backend, store=_dist.HashStore(), rank=0, world_size=1)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        job.plan.tp, job.plan.pp, order=RANK_ORDER, create_gloo_process_groups=False
    )
    megatron_place = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    if megatron_place != (job.place.tp, job.place.pp, job.place.dp):
        raise RuntimeError(
            f"Megatron puts rank {job.rank} at {megatron_place}, the plan at {job.place}"
        )
    # no random numbers are drawn, but Megatron's layers need the seeded state
    model_parallel_cuda_manual_seed(job.case.question.seed + 1)


def _check_device(device: torch.device) -> None:
    """Raise RequestError if there is no CUDA device, or this rank's device is of another type:
    Megatron allocates on CUDA's current device whatever it is told.
    """
    try:
        current = torch.device(torch.cuda.current_device())
    except (AssertionError, RuntimeError):
        current = None
    if current is None or current.type != device.type:
        raise RequestError(
            f"engine megatron runs on CUDA devices only; this rank has {device.type}; choose"
            " another --accelerator, or --engine torch"
        )
