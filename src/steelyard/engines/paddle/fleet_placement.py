"""Builds a Llama on Paddle's devices with weights and optimizer: on one device, or as fleet places
it over all ranks. train.py trains what it returns.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.distributed import fleet
from paddle.distributed.fleet import meta_parallel
from paddle.distributed.sharding import group_sharded_parallel

from steelyard.case.question import Train
from steelyard.engine.job import Job
from steelyard.engines.paddle import host_weights, optimizer
from steelyard.engines.paddle.huggingface_folder import HuggingFaceFolder
from steelyard.engines.paddle.layers import PaddleStage
from steelyard.engines.paddle.modes import DTYPES, PaddleModes, amp_level
from steelyard.engines.paddle.paddle_kernels import PaddleKernels

# Tensor-parallel neighbours, then the stages of a pipeline, then replicas: as plan/degrees.py
# counts ranks.
RANK_ORDER = ["dp", "sharding", "pp", "sep", "cp", "mp"]


@dataclass
class LossFactor:
    """A mutable cell: `value`, a number or tensor (at first 1.0), is the factor by which fleet's
    pipeline multiplies each micro-batch's summed loss when it computes it. The trainer sets it
    before each step (replicas x micro-batches / targets) or evaluation (1); without a pipeline it
    is not used.
    """

    value: Any = 1.0


@dataclass
class PlacedModel:
    """This rank's part of a model with its optimizer, wrapped as Paddle trains it; made by
    `place_model`.

    `net` is the wrapped model to call (fleet's pipeline with several stages), `stage` the
    `PaddleStage` inside it, `optimizer` the AdamW, maybe inside fleet's wrappers. `scaler` scales
    fp16 losses, None in other precisions. `parameters` are pairs (this package's name, Paddle
    parameter) of this rank. `weights` is the source of the weights, for the record. `loss_factor`
    multiplies a pipeline's losses.
    """

    net: Any
    stage: PaddleStage
    optimizer: Any
    scaler: Any
    parameters: list[tuple[str, Any]]
    weights: dict[str, Any]
    loss_factor: LossFactor


def place_model(job: Job, modes: PaddleModes, kernels: PaddleKernels, train: Train) -> PlacedModel:
    """Build this rank's part of the model, fill in its weights, and wrap it and its AdamW for mixed
    precision (level O2, with fp32 master weights) and for fleet. Several ranks initialize fleet,
    process-wide, and must call it together. Raises RequestError if the weights do not fit.
    """
    if job.world > 1:
        _init_fleet(modes)
    loss_factor = LossFactor()
    model = _build_model(job, modes, kernels, loss_factor)
    stage = next(layer for layer in [model, *model.sublayers()] if isinstance(layer, PaddleStage))
    parameters = list(stage.named_parameters())
    source = _fill_parameters(job, parameters)
    adam = optimizer.make_adamw(parameters, train)
    precision = job.case.question.precision
    if amp_level(precision) is not None:
        dtype = DTYPES[precision.matmul]
        model, adam = paddle.amp.decorate(
            models=model, optimizers=adam, level="O2", dtype=dtype, master_weight=True
        )
    scaler = _make_scaler() if precision.matmul == "fp16" else None
    net, adam, scaler = _distribute(job, modes, model, adam, scaler)
    return PlacedModel(net, stage, adam, scaler, parameters, source, loss_factor)


def _init_fleet(modes: PaddleModes) -> None:
    """Initialize fleet's process groups for these degrees, process-wide, in the order in which
    plan/degrees.py counts ranks: tensor-parallel ones are neighbours, then stages, then replicas.
    All ranks call it together.
    """
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        "dp_degree": modes.copies,
        "sharding_degree": modes.shards,
        "pp_degree": modes.pp,
        "mp_degree": modes.tp,
        "order": RANK_ORDER,
        "mp_configs": {"need_broadcast_data": False},  # every rank of a group reads the same data
    }
    # each step sets its number of micro-batches
    strategy.pipeline_configs = {"accumulate_steps": 1, "micro_batch_size": 1}
    fleet.init(is_collective=True, strategy=strategy)


def _build_model(
    job: Job, modes: PaddleModes, kernels: PaddleKernels, loss_factor: LossFactor
) -> Any:
    """Return this rank's model, without the case's weights: the `PaddleStage` itself, or with
    several stages fleet's PipelineLayer around this rank's one, whose loss is multiplied by
    `loss_factor.value` at the time it is computed.
    """
    model = job.case.question.model
    arguments: dict[str, Any] = {
        "count": modes.pp,
        "tp": modes.tp,
        "kernels": kernels,
        "recompute": modes.recompute,
    }
    arguments["level"] = amp_level(job.case.question.precision)
    if modes.pp == 1:
        return PaddleStage(model, 0, **arguments)
    stages = [
        meta_parallel.LayerDesc(PaddleStage, model, index, **arguments) for index in range(modes.pp)
    ]
    return meta_parallel.PipelineLayer(
        layers=stages,
        topology=fleet.get_hybrid_communicate_group().topology(),
        loss_fn=lambda nll, label: nll * loss_factor.value,
        seg_method=list(range(modes.pp + 1)),
    )


def _fill_parameters(job: Job, parameters: list[tuple[str, Any]]) -> dict[str, Any]:
    """Set this rank's parameters in place, random from the seed or from a Hugging Face folder, and
    return the source of the weights for the record. Whole parameters are made in as many threads as
    the device has, and cut to this rank's part. Calls `job.report_loading` with numbers of
    parameters (done, all). Raises RequestError if the folder does not fit the model.
    """
    question = job.case.question
    if job.weights is None:
        make_whole = host_weights.random_parameters(question.seed, question.model)
        source: dict[str, Any] = {"source": "random", "seed": question.seed}
    else:
        folder = HuggingFaceFolder(job.weights, question.model)
        make_whole, source = folder.read_parameter, folder.describe_source()
    threads = job.device.threads()
    with ThreadPoolExecutor(threads) as pool:
        for begin in range(0, len(parameters), threads):  # no more at once than are being made
            batch = parameters[begin : begin + threads]
            for (name, parameter), whole in zip(
                batch, pool.map(make_whole, [name for name, _ in batch]), strict=True
            ):
                part = host_weights.take_part(name, whole, job.place.tp, job.plan.tp)
                parameter.set_value(host_weights.orient_for_paddle(name, part))
            if job.report_loading is not None:
                job.report_loading(min(begin + threads, len(parameters)), len(parameters))
    return source


def _make_scaler() -> Any:
    """Return a dynamic loss scaler for fp16: it begins at 65536 and grows after 1000 steps without
    overflow, as in all engines.
    """
    return paddle.amp.GradScaler(
        init_loss_scaling=optimizer.FIRST_SCALE, incr_every_n_steps=optimizer.GROWTH_STEPS
    )


def _distribute(
    job: Job, modes: PaddleModes, model: Any, adam: Any, scaler: Any
) -> tuple[Any, Any, Any]:
    """Wrap model, optimizer and scaler for the ranks of the run and return the three; with one rank
    they are returned unchanged. Sharding 2 among several replicas uses group_sharded_parallel, all
    else fleet's wrappers. A scaler that is None stays None.
    """
    if job.world == 1:
        return model, adam, scaler
    if modes.shards > 1 and modes.sharding == 2:
        groups = fleet.get_hybrid_communicate_group()
        copies = groups.get_data_parallel_group() if modes.copies > 1 else None
        net = fleet.distributed_model(model) if modes.tp > 1 else model
        shards = groups.get_sharding_parallel_group()
        out: tuple[Any, Any, Any] = group_sharded_parallel(
            net, adam, "os_g", scaler=scaler, group=shards, dp_group=copies
        )
        return out
    net, adam = fleet.distributed_model(model), fleet.distributed_optimizer(adam)
    return net, adam, None if scaler is None else fleet.distributed_scaler(scaler)
