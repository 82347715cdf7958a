"""Process groups of a plan for training, and asynchronous collectives in them, issued together for
several tensors.

On a device collectives run on a stream of their own. `wait` makes the compute stream wait for them,
not the host, so what is computed between issue and wait overlaps with them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager

from steelyard.plan.degrees import Plan

# Named reduce_scatter_single and all_gather_single from torch 2.13 on; their older names warn
# there.
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)

# the replicas of a plan: copies of groups that divide among them what they hold
REPLICAS = ("copies", "shards")
DIMS = (*REPLICAS, "stages", "tensor")

# the whole and this rank's part of it, which may be a view of it
WholesAndParts = Sequence[tuple[Tensor, Tensor]]


class PendingCollective(Protocol):
    """The interface of a collective that has been issued and may not be finished: `wait` before its
    tensors are used. On a device that makes the compute stream wait, on a CPU the host.
    """

    def wait(self) -> Any:
        """Make what is computed next wait for the result. On a CPU this blocks the host."""


class FinishedCollective:
    """A `PendingCollective` with nothing to do, finished from the start: `wait` returns at once.
    `FINISHED` is its one instance, for a group that sends nothing.
    """

    def wait(self) -> None:
        """Return at once."""


FINISHED = FinishedCollective()


class SerialQueue:
    """Remembers the last collective of a group (`last`) so that `PlanGroup` issues the next one
    only after it has finished; `append` stores one, and returns it wrapped so that it is waited for
    once.

    Made for gloo alone, which corrupts the heap if several all-gathers and an all-reduce of one
    group are under way (torch 2.13).
    """

    def __init__(self) -> None:
        self.last: PendingCollective = FINISHED

    def append(self, pending: PendingCollective) -> "PendingCollective":
        """Store a collective that was just issued as the group's last one, and return it wrapped
        (`SingleWait`) so that it is waited for once. Waits for nothing itself.
        """
        self.last = SingleWait(pending)
        return self.last


class SingleWait:
    """A collective (a `PendingCollective`) whose inner `wait` is called once, however often this
    one's is: a second wait could copy the result again over what was made of it.
    """

    def __init__(self, pending: PendingCollective) -> None:
        self.pending = pending

    def wait(self) -> None:
        """Wait for the wrapped collective at the first call; later calls return at once."""
        pending, self.pending = self.pending, FINISHED
        pending.wait()


@dataclass(frozen=True)
class PlanGroup:
    """The process group of this rank along one dimension of a plan: torch's `handle`, its `size`,
    and this rank's index in it (`rank`). The default is a group of this rank alone.

    `all_reduce` (in place), `reduce_scatter` and `all_gather` start a collective for several
    tensors and return a `PendingCollective`; `reduce_now` waits. All ranks of the group must call
    them. `is_live` says whether they are needed: a group of one sends nothing, unless `forced`,
    which makes it run the collectives that several ranks would. `queue` (for gloo) keeps
    collectives from overlapping; None lets them overlap.
    """

    handle: Any = None
    size: int = 1
    rank: int = 0
    forced: bool = False
    queue: SerialQueue | None = None

    @property
    def is_live(self) -> bool:
        """Return whether collectives of this group are really run: it has several ranks, or is
        forced.
        """
        return self.size > 1 or self.forced

    def all_reduce(
        self, tensors: Iterable[Tensor], op: Any = dist.ReduceOp.SUM
    ) -> PendingCollective:
        """Start to reduce each tensor over this group in place, by default to its sum; return what
        to wait for, without waiting. All ranks of the group must call it.
        """
        return self._issue(
            [partial(dist.all_reduce, tensor, op, self.handle) for tensor in tensors]
        )

    def reduce_scatter(self, pairs: WholesAndParts) -> PendingCollective:
        """Start to sum each whole tensor over this group and write this rank's part of the sum into
        its part tensor; return what to wait for, without waiting. `pairs` are (whole, part); all
        ranks of the group must call it.
        """
        return self._issue(
            [partial(_reduce_scatter, part, whole, group=self.handle) for whole, part in pairs]
        )

    def all_gather(self, pairs: WholesAndParts) -> PendingCollective:
        """Start to fill each whole tensor with the parts of all ranks of this group, in the order
        of ranks; return what to wait for, without waiting. `pairs` are (whole, part); all ranks of
        the group must call it.
        """
        return self._issue(
            [partial(_all_gather, whole, part, group=self.handle) for whole, part in pairs]
        )

    def _issue(self, calls: Sequence[Callable[[], Any]]) -> PendingCollective:
        """Call all these functions, which each start a collective of this group, as one coalesced
        operation, and return what to wait for. With a queue, waits for the group's last operation
        first. Without calls nothing is sent, and the result is finished.
        """
        if not calls:
            return FINISHED
        if self.queue is not None:
            self.queue.last.wait()
        with _coalescing_manager(self.handle, async_ops=True) as pending:
            for call in calls:
                call()
        out: PendingCollective = pending
        return out if self.queue is None else self.queue.append(out)

    def reduce_now(self, value: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a tensor over this group in place, by default to its sum, wait for it, and return
        it. A group that is not live returns it unchanged; otherwise all ranks must call it.
        """
        if self.is_live:
            self.all_reduce([value], op).wait()
        return value


ALONE = PlanGroup()


@dataclass(frozen=True)
class PlanGroups:
    """The process groups of this rank, a `PlanGroup` for each dimension of its plan, by default
    this rank alone; made by `create_plan_groups`.

    Of the data-parallel replicas, `shards` divide parameters, gradients or states among them, and
    `copies` are the replicas that hold the same shard; `replicas` is (copies, shards), over which a
    sum over all replicas is taken. `stages` is the pipeline, `tensor` the tensor-parallel group.
    """

    copies: PlanGroup = ALONE
    shards: PlanGroup = ALONE
    stages: PlanGroup = ALONE
    tensor: PlanGroup = ALONE

    @property
    def replicas(self) -> tuple[PlanGroup, PlanGroup]:
        """Return the two groups over which a sum over all data-parallel replicas is taken, one
        after the other.
        """
        return self.copies, self.shards


def create_plan_groups(
    device: torch.device, backend: str, plan: Plan, shard_degree: int, sharding: int, forced: bool
) -> PlanGroups:
    """Create the process groups of a plan and return this rank's. All ranks must call it.

    `shard_degree` replicas divide their states; `sharding` is the tune's level (0 to 3). `forced`
    makes a single rank run the collectives of several, in group `shards`, or `copies` if `sharding`
    is 0. A single rank that is not forced gets groups of one without any process group; otherwise
    torch.distributed is initialized, as for one rank, if the framework did not do it. With gloo
    each group gets a `SerialQueue`.
    """
    if plan.world == 1 and not forced:
        return PlanGroups()
    if not dist.is_initialized():  # a single rank: the framework did not join any
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    sizes = (plan.dp // shard_degree, shard_degree, plan.pp, plan.tp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=DIMS)
    exchanging_dim = "shards" if sharding else "copies"  # what replicas meet in
    groups = {}
    for name, size in zip(DIMS, sizes, strict=True):
        handle = mesh[name].get_group()
        queue = SerialQueue() if dist.get_backend(handle) == "gloo" else None
        groups[name] = PlanGroup(
            handle, size, mesh[name].get_local_rank(), forced and name == exchanging_dim, queue
        )
    return PlanGroups(**groups)
