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
    """A mutable cell with the factor by which a pipeline's loss is multiplied, set anew for each
    step.
    """

    value: Any = 1.0


@dataclass
class PlacedModel:
    """This rank's part of a model with its optimizer, wrapped as Paddle trains it.

    `net` is the wrapped model to call, `stage` the layers inside it. `scaler` scales fp16 losses,
    None otherwise. `parameters` are (our name, Paddle parameter). `weights` is their source, for
    the record. `loss_factor` multiplies a pipeline's loss.
    """

    net: Any
    stage: PaddleStage
    optimizer: Any
    scaler: Any
    parameters: list[tuple[str, Any]]
    weights: dict[str, Any]
    loss_factor: LossFactor


def place_model(job: Job, modes: PaddleModes, kernels: PaddleKernels, train: Train) -> PlacedModel:
    """Build this rank's part of the model, fill in its weights, and wrap it and its optimizer for
    mixed precision and fleet. Initializes fleet if there are several ranks; all ranks must call it.
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
    """Initialize fleet's process groups, process-wide, in the order in which plan/degrees.py counts
    ranks.
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
    # each step says how many there are
    strategy.pipeline_configs = {"accumulate_steps": 1, "micro_batch_size": 1}
    fleet.init(is_collective=True, strategy=strategy)


def _build_model(
    job: Job, modes: PaddleModes, kernels: PaddleKernels, loss_factor: LossFactor
) -> Any:
    """Return the model without weights: one `PaddleStage`, or fleet's pipeline of them whose loss
    is multiplied by `loss_factor.value`.
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
    """Set this rank's parameters, random from the seed or from a Hugging Face folder, reading in as
    many threads as the device has, and return the source of the weights for the record. Reports
    progress in parameters. Raises RequestError if the folder does not fit.
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
    """Return a loss scaler for fp16 with the first scale and growth of all engines."""
    return paddle.amp.GradScaler(
        init_loss_scaling=optimizer.FIRST_SCALE, incr_every_n_steps=optimizer.GROWTH_STEPS
    )


def _distribute(
    job: Job, modes: PaddleModes, model: Any, adam: Any, scaler: Any
) -> tuple[Any, Any, Any]:
    """Wrap model, optimizer and scaler for the ranks of the run and return them; with one rank they
    are returned unchanged. Sharding 2 uses group_sharded_parallel, all else fleet's wrappers.
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
