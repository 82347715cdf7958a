"""Megatron's process groups, over the ranks that the framework has joined."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from steelyard.engine.job import Job
from steelyard.errors import RequestError

ORDER = "tp-cp-ep-pp-dp"  # as ranks stand in a plan: tensor-parallel ones are neighbours, then stages, then replicas
_dist: Any = dist  # its stores are not in its stubs


def join(job: Job) -> None:
    """Megatron's groups for a plan. One rank alone is a group too: Megatron always asks for one."""
    _check_device(job.device.torch_device)
    if not dist.is_initialized():
        dist.init_process_group(job.device.backend, store=_dist.HashStore(), rank=0, world_size=1)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(job.plan.tp, job.plan.pp, order=ORDER, create_gloo_process_groups=False)
    found = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    if found != (job.place.tp, job.place.pp, job.place.dp):
        raise RuntimeError(f"Megatron puts rank {job.rank} at {found}, the plan at {job.place}")
    model_parallel_cuda_manual_seed(job.case.question.seed + 1)  # nothing is drawn; its layers fork the state anyway


def _check_device(device: torch.device) -> None:
    """Megatron allocates on CUDA's current device, whatever it is asked; so that must be this rank's."""
    try:
        current = torch.device(torch.cuda.current_device())
    except (AssertionError, RuntimeError):
        current = None
    if current is None or current.type != device.type:
        raise RequestError(
            f"engine megatron runs on CUDA devices only; this rank has {device.type}; choose another --accelerator, or "
            "--engine torch"
        )
