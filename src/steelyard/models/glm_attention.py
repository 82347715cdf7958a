"""Attention of a cloze: context tokens see all of their context, span tokens their context, their
own past and themselves.

Tokens are packed: all contexts end to end, then all spans, those that see one context beside each
other. A kernel is a row of KERNELS: it takes QKV [T, 3, H, D], a `ClozeLayout` and the share of
attention probabilities to drop; it gives [T, H, D].

A layout may have more room than its tokens need (`Room`): rows of no tokens and places that nothing
reads fill it up, so that micro-batches of one room have tensors of the same sizes.

Kernel "flash" is three calls without a copy between them: contexts on contexts, spans on contexts,
spans on themselves. The latter two are halves of one softmax, so they are merged by their
log-sum-exp. Their backward calls are given the merged output and the merged log-sum-exp, from which
the kernel computes the whole softmax's probabilities and row sums again: the gradients are exact.
Dropped probabilities do not change that: a normaliser does not know of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from steelyard.kernels import glm_attention
from steelyard.kernels.glm_spans import Joint, RowBorders
from steelyard.models.tensors import cumulative, send, send_tensor

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Room:
    """Sizes of a layout that micro-batches of about the same size have in common."""

    logits: int  # tokens of spans, at most
    contexts: int  # rows, at most; tokens of contexts have no room beside those that are there
    spans: int
    longest: tuple[int, int, int]  # a context, all spans of a context, a span
    row: int  # the longest context with its spans


@dataclass(frozen=True)
class Padded:
    """The same tokens as one row a context, its spans behind it: for kernels that know no packing."""

    # int64 [contexts · width]: which token stands there; the first one where none does
    gather: Tensor
    back: Tensor  # int64 [T]: where in these rows each token stands
    # bool [contexts, 1, width, width]: whether a query (of the third dimension) sees a key
    mask: Tensor
    width: int


@dataclass(frozen=True)
class ClozeLayout:
    # of contexts, of spans; spans of each context
    lengths: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    contexts: RowBorders
    groups: RowBorders  # all spans of a context together, counted from the first span token
    spans: RowBorders
    context_tokens: int
    device: torch.device
    room: Room | None = None

    @cached_property
    def padded(self) -> Padded:
        """Made for the kernels that need it, once a micro-batch."""
        gather, back, seen = _padded(*self.lengths, self.room.row if self.room else 0)
        width = gather.shape[1]
        return Padded(
            send_tensor(gather.flatten(), self.device),
            send_tensor(back, self.device),
            send_tensor(seen, self.device)[:, None],
            width,
        )

    @cached_property
    def joint(self) -> Joint:
        """Made for the kernels that need it, once a micro-batch."""
        return _joint(*self.lengths, self.room, self.device)

    @cached_property
    def picked(self) -> Tensor:
        """Where the spans' tokens stand, with the contexts before all spans: int64. The first token
        fills up its room.
        """
        made = np.arange(self.context_tokens, self.context_tokens + sum(self.lengths[1]))
        return send(_filled(made, self.room.logits if self.room else len(made), 0), self.device)

    def tensors(self, joint: bool) -> list[Tensor]:
        """All that kernels read: those of `Joint`, or kernel "padded"."""
        if not joint:
            return [self.picked, self.padded.gather, self.padded.back, self.padded.mask]
        at = self.joint
        by_rows = [
            self.contexts.cu,
            at.order,
            at.rows.cu,
            at.contexts,
            at.place,
            at.spans,
            at.starts,
            at.lengths,
        ]
        return [*by_rows, at.borders, at.programs]


def layout(
    contexts: Sequence[int],
    spans: Sequence[int],
    groups: Sequence[int],
    device: torch.device,
    room: Room | None = None,
) -> ClozeLayout:
    """Of contexts and spans with these lengths; `groups` says how many of the spans see each
    context, one after the other.
    """
    least = min(*groups, *contexts, *spans)
    if (
        len(groups) != len(contexts)
        or sum(groups) != len(spans)
        or least < (1 if room is None else 0)
    ):
        raise ValueError(
            "every context has a length and a number of spans, every span a length, all above 0"
        )
    if room is not None and (len(contexts), len(spans)) != (room.contexts, room.spans):
        raise ValueError(
            f"{len(contexts)} contexts and {len(spans)} spans where there is room for {room}"
        )
    ends = torch.tensor(groups).cumsum(0).tolist()
    together = [sum(spans[end - count : end]) for end, count in zip(ends, groups, strict=True)]
    every = contexts, together, spans
    longest = room.longest if room else tuple(map(max, every))
    outer, middle, inner = (
        RowBorders(cumulative(lens, device), most)
        for lens, most in zip(every, longest, strict=True)
    )
    lengths = tuple(contexts), tuple(spans), tuple(groups)
    return ClozeLayout(lengths, outer, middle, inner, sum(contexts), device, room)


def _filled(values: Numbers, size: int, value: int) -> Numbers:
    return np.pad(values, (0, size - len(values)), constant_values=value)


def _padded(
    contexts: Sequence[int], spans: Sequence[int], groups: Sequence[int], least: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather [contexts, width], back [T] and mask [contexts, width, width], with a width of `least`
    or more.
    """
    parts, first, at = [], 0, sum(contexts)
    for length, count in zip(contexts, groups, strict=True):
        own = spans[first : first + count]
        parts.append((length, own, at))
        first, at = first + count, at + sum(own)
    width = max(least, *(length + sum(own) for length, own, _ in parts))
    gather = torch.zeros(len(contexts), width, dtype=torch.int64)
    back = torch.empty(at, dtype=torch.int64)
    seen = torch.zeros(len(contexts), width, width, dtype=torch.bool)
    seen[:, :, 0] = True  # a softmax over nothing would be NaN where there is no token
    start = 0
    for i, (length, own, begin) in enumerate(parts):
        size = length + sum(own)
        tokens = torch.cat(
            (torch.arange(start, start + length), torch.arange(begin, begin + sum(own)))
        )
        gather[i, :size] = tokens
        back[tokens] = torch.arange(i * width, i * width + size)
        seen[i, :size, :length] = True
        place = length
        for span in own:
            seen[i, place : place + span, place : place + span] = torch.ones(
                span, span, dtype=torch.bool
            ).tril()
            place += span
        start += length
    return gather, back, seen


def _joint(
    contexts: Sequence[int],
    spans: Sequence[int],
    groups: Sequence[int],
    room: Room | None,
    device: torch.device,
) -> Joint:
    """By numpy: torch's threads would wait for one another over so few numbers."""
    outer, inner, count = (np.array(lens, dtype=np.int64) for lens in (contexts, spans, groups))
    owner = np.repeat(np.arange(len(outer)), count)
    together = np.zeros_like(outer)
    np.add.at(together, owner, inner)
    sizes = outer + together
    first = sizes.cumsum() - sizes  # of each context, and behind it of its spans
    # less how many tokens of other spans are before them
    behind = first + outer - (together.cumsum() - together)
    of_contexts = np.arange(outer.sum()) + np.repeat(first - (outer.cumsum() - outer), outer)
    of_spans = np.arange(inner.sum()) + np.repeat(behind, together)
    back = np.concatenate((of_contexts, of_spans))
    order = np.empty_like(back)
    order[back] = np.arange(len(back))
    place = np.full(len(back), -1)
    place[of_contexts] = np.arange(len(of_contexts))
    starts = inner.cumsum() - inner + behind[owner]
    own = np.full(len(back), len(back))
    own[of_spans] = np.repeat(starts, inner)
    borders = [np.repeat(one, sizes) for one in (first, first + outer)]

    def narrow(values: Numbers) -> Tensor:
        return send_tensor(torch.from_numpy(values.astype(np.int32)), device)

    return Joint(
        order=send(order, device),
        rows=RowBorders(cumulative(sizes.tolist(), device), room.row if room else int(sizes.max())),
        contexts=narrow(_filled(of_contexts, len(back) if room else len(of_contexts), -1)),
        place=narrow(place),
        spans=send(_filled(of_spans, room.logits if room else len(of_spans), 0), device),
        starts=narrow(starts),
        lengths=narrow(inner),
        longest=room.longest[2] if room else max(spans),
        borders=narrow(np.stack((*borders, own))),
        programs=narrow(_programs(first, sizes, glm_attention.TILE, room is not None)),
    )


def _programs(first: Numbers, sizes: Numbers, tile: int, fill: bool) -> Numbers:
    """Rows of these sizes in parts of so many tokens: the first token of each part and the end of
    its row. Parts of no tokens fill it up to as many as so many rows of so many tokens have at
    most."""
    count = -(-sizes // tile)
    # of a part in its row
    number = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
    made = np.stack((np.repeat(first, count) + number * tile, np.repeat(first + sizes, count)))
    more = sizes.sum() // tile + len(sizes) - made.shape[1] if fill else 0
    return np.pad(made, ((0, 0), (0, more)), constant_values=sizes.sum())


def _by_padding(qkv: Tensor, rows: ClozeLayout, dropout: float, merged: "Merge") -> Tensor:
    """Through SDPA with a mask: for a CPU and for fp32, and the plain meaning of every other
    kernel.
    """
    at = rows.padded
    wide = qkv.index_select(0, at.gather).unflatten(0, (-1, at.width))  # type: ignore[no-untyped-call]
    q, k, v = wide.permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=at.mask, dropout_p=dropout)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, at.back)


# out [Tq, H, D], log-sum-exp [H, Tq], and what the backward call needs to drop the same
Half = tuple[Tensor, Tensor, Any]


@dataclass(frozen=True)
class Blocks:
    """Attention of packed rows, and its backward: flash attention's calls, or what stands in for
    them in tests.

    `forward(q, k, v, queries, keys, dropout, causal)` leaves query rows beyond the last border as
    they are; `backward(grad, q, k, v, out, lse, state, queries, keys, dropout, causal)` gives the
    gradients of q, k and v."""

    forward: Callable[[Tensor, Tensor, Tensor, RowBorders, RowBorders, float, bool], Half]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: RowBorders,
    keys: RowBorders,
    dropout: float,
    causal: bool,
) -> Half:
    borders = queries.cu, keys.cu, queries.longest, keys.longest
    out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, *borders, dropout, causal, False
    )
    return out, lse, (rng, unused)


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    state: Any,
    queries: RowBorders,
    keys: RowBorders,
    dropout: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    borders = queries.cu, keys.cu, queries.longest, keys.longest
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *borders, dropout, causal, *state
    )
    return grads


FLASH = Blocks(_flash_forward, _flash_backward)


def merge(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of two halves of a softmax as that of the whole, and its log-sum-exp."""
    lse = torch.logaddexp(one_lse, other_lse)
    share, rest = ((half - lse).exp().t()[:, :, None] for half in (one_lse, other_lse))
    return (one * share + other * rest).to(one.dtype), lse


Merge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Merged(torch.autograd.Function):
    """Contexts on themselves, spans on contexts and on themselves. The first call is given all
    queries and the borders of the contexts alone: so its output has room for the spans', and
    nothing is copied together."""

    @staticmethod
    def forward(
        context: Any, qkv: Tensor, rows: ClozeLayout, dropout: float, blocks: Blocks, merged: Merge
    ) -> Tensor:
        n = rows.context_tokens
        q, k, v = qkv.unbind(1)
        out, lse, state = blocks.forward(
            q, k[:n], v[:n], rows.contexts, rows.contexts, dropout, False
        )
        far, far_lse, far_state = blocks.forward(
            q[n:], k[:n], v[:n], rows.groups, rows.contexts, dropout, False
        )
        own, own_lse, own_state = blocks.forward(
            q[n:], k[n:], v[n:], rows.spans, rows.spans, dropout, True
        )
        whole, whole_lse = merged(far, far_lse, own, own_lse)
        out[n:] = whole
        context.save_for_backward(qkv, out, lse, whole_lse)
        context.states = state, far_state, own_state
        context.asked = rows, dropout, blocks
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        qkv, out, lse, whole_lse = context.saved_tensors
        rows, dropout, blocks = context.asked
        n = rows.context_tokens
        q, k, v = qkv.unbind(1)
        grad = grads[0].contiguous()
        state, far_state, own_state = context.states
        dq, dk, dv = blocks.backward(
            grad, q, k[:n], v[:n], out, lse, state, rows.contexts, rows.contexts, dropout, False
        )
        spans = grad[n:], q[n:]
        whole = out[n:], whole_lse
        far_q, far_k, far_v = blocks.backward(
            *spans, k[:n], v[:n], *whole, far_state, rows.groups, rows.contexts, dropout, False
        )
        own_q, own_k, own_v = blocks.backward(
            *spans, k[n:], v[n:], *whole, own_state, rows.spans, rows.spans, dropout, True
        )
        total = torch.empty_like(qkv)
        total[:n, 0] = dq[:n]
        torch.add(far_q, own_q, out=total[n:, 0])
        for i, (near, far, own) in enumerate(((dk, far_k, own_k), (dv, far_v, own_v)), start=1):
            torch.add(near, far, out=total[:n, i])
            total[n:, i] = own
        return total, None, None, None, None


def _by_flash(qkv: Tensor, rows: ClozeLayout, dropout: float, merged: Merge) -> Tensor:
    out: Tensor = Merged.apply(qkv, rows, dropout, FLASH, merged)  # type: ignore[no-untyped-call]
    return out


# "packed" is kernels/glm_attention.py, where Triton runs, and here its meaning.
KERNELS: dict[str, Callable[[Tensor, ClozeLayout, float, Merge], Tensor]] = {
    "padded": _by_padding,
    "flash": _by_flash,
    "packed": _by_padding,
}
JOINT = ("flash", "packed")  # have their tokens in the order of `Joint` where Triton runs


def attend(
    qkv: Tensor, rows: ClozeLayout, kernel: str, dropout: float, merged: Merge = merge
) -> Tensor:
    """Attention by the named kernel: [T, H, D]. `merged` may be a compiled `merge`, for the kernel
    that has halves.
    """
    return KERNELS[kernel](qkv, rows, dropout, merged)
