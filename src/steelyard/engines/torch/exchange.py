"""Collectives between the ranks of a plan: issued together for several tensors, without waiting.

On a device they run on a stream of their own. `wait` makes the stream of the computation wait for
them, not the host; so what is computed between issue and wait overlaps with them.
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
Pairs = Sequence[tuple[Tensor, Tensor]]


class Pending(Protocol):
    def wait(self) -> Any: ...


class Nothing:
    def wait(self) -> None:
        """Nothing is on its way."""


NOTHING = Nothing()


class InTurn:
    """Collectives of a group that must not overlap with one another: the next is issued when the
    last is over.

    gloo corrupts the heap where several all-gathers and an all-reduce of one group are on their way
    (torch 2.13)."""

    def __init__(self) -> None:
        self.last: Pending = NOTHING

    def issued(self, pending: Pending) -> "Pending":
        self.last = Once(pending)
        return self.last


class Once:
    """What is waited for once, whoever asks: waiting again would copy a result again, over what was
    made of it.
    """

    def __init__(self, pending: Pending) -> None:
        self.pending = pending

    def wait(self) -> None:
        pending, self.pending = self.pending, NOTHING
        pending.wait()


@dataclass(frozen=True)
class Group:
    """Ranks along one dimension of a plan, seen from one of them. One alone sends nothing, unless
    it is forced to.
    """

    handle: Any = None
    size: int = 1
    rank: int = 0
    forced: bool = False
    turn: InTurn | None = None

    @property
    def live(self) -> bool:
        return self.size > 1 or self.forced

    def all_reduce(self, tensors: Iterable[Tensor], op: Any = dist.ReduceOp.SUM) -> Pending:
        return self._issue([partial(dist.all_reduce, one, op, self.handle) for one in tensors])

    def reduce_scatter(self, pairs: Pairs) -> Pending:
        """Sum the wholes; each rank gets its part of the sum."""
        return self._issue(
            [partial(_reduce_scatter, part, whole, group=self.handle) for whole, part in pairs]
        )

    def all_gather(self, pairs: Pairs) -> Pending:
        """Fill the wholes with the parts of all ranks."""
        return self._issue(
            [partial(_all_gather, whole, part, group=self.handle) for whole, part in pairs]
        )

    def _issue(self, calls: Sequence[Callable[[], Any]]) -> Pending:
        if not calls:
            return NOTHING
        if self.turn is not None:
            self.turn.last.wait()
        with _coalescing_manager(self.handle, async_ops=True) as pending:
            for call in calls:
                call()
        out: Pending = pending
        return out if self.turn is None else self.turn.issued(out)

    def total(self, value: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """A number, summed over the group in place."""
        if self.live:
            self.all_reduce([value], op).wait()
        return value


ALONE = Group()


@dataclass(frozen=True)
class Groups:
    """Where a rank stands along every dimension of its plan."""

    copies: Group = ALONE
    shards: Group = ALONE
    stages: Group = ALONE
    tensor: Group = ALONE

    @property
    def replicas(self) -> tuple[Group, Group]:
        return self.copies, self.shards


def form(
    device: torch.device, backend: str, plan: Plan, degree: int, sharding: int, forced: bool
) -> Groups:
    """The groups of a plan, `degree` of its replicas dividing among them what they hold. All ranks
    must call it. `forced`: one rank alone sends what several would."""
    if plan.world == 1 and not forced:
        return Groups()
    if not dist.is_initialized():  # one rank alone, whom nobody asked to meet others
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    sizes = (plan.dp // degree, degree, plan.pp, plan.tp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=DIMS)
    used = "shards" if sharding else "copies"  # what replicas meet in
    made = {}
    for name, size in zip(DIMS, sizes, strict=True):
        handle = mesh[name].get_group()
        turn = InTurn() if dist.get_backend(handle) == "gloo" else None
        made[name] = Group(handle, size, mesh[name].get_local_rank(), forced and name == used, turn)
    return Groups(**made)
