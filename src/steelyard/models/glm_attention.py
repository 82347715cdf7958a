"""Attention of a cloze: context tokens see all of their context, span tokens see their context and
their own span up to themselves.

Tokens are packed: all contexts end to end, then all spans, those that see one context next to each
other. A kernel is an entry of `CLOZE_KERNELS`: it takes QKV [T, 3, H, D], a `ClozeLayout` and the
dropout probability of attention, and returns [T, H, D]. Called by glm.py and glm_fused.py; layouts
are made by training/glm.py.

A layout may be larger than its tokens need (`ClozeCapacity`): empty rows and unread positions fill
it up, so that micro-batches of one capacity have tensors of the same sizes.

Kernel `flash` is three calls of flash attention without a copy between them: contexts on contexts,
spans on contexts, spans on themselves. The latter two are parts of one softmax and are merged by
their log-sum-exp. Their backward calls are given the merged output and log-sum-exp, from which
flash attention computes the whole softmax's probabilities and row sums again, so gradients are
exact. Dropout does not change that: dropped probabilities stay in the softmax's sum.
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
    """Sizes of a cloze layout that several micro-batches share, so that one recorded graph serves
    all of them.
    """

    logits: int  # span tokens, at most
    contexts: int  # rows; context tokens are not padded
    spans: int
    longest: tuple[int, int, int]  # lengths: a context, all spans of a context, a span
    row: int  # length of the longest context with its spans


@dataclass(frozen=True)
class Padded:
    """The tokens of a cloze micro-batch as one padded row per context, its spans behind it, for
    kernels without packing.
    """

    # int64 [contexts · width]: index of the token at each padded position; 0 for padding
    gather: Tensor
    back: Tensor  # int64 [T]: padded position of each token
    # bool [contexts, 1, width (query), width (key)]: True if the query sees the key
    mask: Tensor
    width: int


@dataclass(frozen=True)
class ClozeLayout:
    """Where contexts and spans of a packed cloze micro-batch begin and end, with derived layouts
    for each kernel, computed on first use and cached.
    """

    # lengths of contexts, lengths of spans, number of spans of each context
    lengths: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    contexts: RowBorders
    groups: RowBorders  # a row for all spans of a context, counted from the first span token
    spans: RowBorders
    context_tokens: int
    device: torch.device
    room: Room | None = None

    @cached_property
    def padded(self) -> Padded:
        """The padded layout for kernel `padded`, on the device; cached."""
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
        """The layout with every context followed by its spans, for Triton kernels, on the device;
        cached.
        """
        return _joint(*self.lengths, self.room, self.device)

    @cached_property
    def picked(self) -> Tensor:
        """The positions of the spans' tokens when all contexts come before all spans: int64 on the
        device, filled up with position 0 to the capacity; cached.
        """
        made = np.arange(self.context_tokens, self.context_tokens + sum(self.lengths[1]))
        return send(_filled(made, self.room.logits if self.room else len(made), 0), self.device)

    def tensors(self, joint: bool) -> list[Tensor]:
        """Return all tensors that kernels read of this layout: those of `InterleavedLayout` if
        `interleaved`, otherwise those of kernel `padded`. A recorded graph overwrites them for the
        next micro-batch.
        """
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
    """Return the layout of contexts and spans with these lengths; `groups` is the number of spans
    that see each context, in order.

    With a capacity lengths may be 0. Raises ValueError if the numbers of contexts, groups and spans
    do not match each other or the capacity, or if a length is 0 without a capacity.
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
    """Pad an array at its end to `size` elements with `value`."""
    return np.pad(values, (0, size - len(values)), constant_values=value)


def _padded(
    contexts: Sequence[int], spans: Sequence[int], groups: Sequence[int], least: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gather [contexts, width], back [T] and mask [contexts, width, width] of
    `PaddedLayout`; the width is that of the longest context with its spans, at least `min_width`.
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
    seen[:, :, 0] = True  # padding sees one key: a softmax over none is NaN
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
    """Compute the `InterleavedLayout` and send it to the device.

    By numpy, because torch's threads would wait for one another over so few numbers.
    """
    outer, inner, count = (np.array(lens, dtype=np.int64) for lens in (contexts, spans, groups))
    owner = np.repeat(np.arange(len(outer)), count)
    together = np.zeros_like(outer)
    np.add.at(together, owner, inner)
    sizes = outer + together
    first = sizes.cumsum() - sizes  # position of each row's first token
    # to be added to a span token's number among all span tokens
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
        """Send an array to the device as int32."""
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
    """Divide rows into parts of at most `tile` tokens, one for each Triton program: int64 [2,
    programs] with the first token of each part and the end of its row.

    With `fill`, empty parts (both numbers the total of tokens) are added up to the most that as
    many rows of as many tokens can need.
    """
    count = -(-sizes // tile)
    # number of each part in its row
    number = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
    made = np.stack((np.repeat(first, count) + number * tile, np.repeat(first + sizes, count)))
    more = sizes.sum() // tile + len(sizes) - made.shape[1] if fill else 0
    return np.pad(made, ((0, 0), (0, more)), constant_values=sizes.sum())


def _by_padding(qkv: Tensor, rows: ClozeLayout, dropout: float, merged: "Merge") -> Tensor:
    """Compute attention through SDPA with a mask: for CPUs and fp32, and the plain meaning of the
    other kernels. `merge_parts` is not used.
    """
    at = rows.padded
    wide = qkv.index_select(0, at.gather).unflatten(0, (-1, at.width))  # type: ignore[no-untyped-call]
    q, k, v = wide.permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=at.mask, dropout_p=dropout)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, at.back)


# output [Tq, H, D], log-sum-exp [H, Tq], and the random state for the backward call
Half = tuple[Tensor, Tensor, Any]


@dataclass(frozen=True)
class Blocks:
    """The forward and backward call of attention over packed rows: flash attention's, or plain ones
    in tests.

    `forward(q, k, v, queries, keys, dropout, causal)` returns output, log-sum-exp and random state,
    and leaves output rows beyond the last offset uninitialized; `backward(grad, q, k, v, out, lse,
    state, queries, keys, dropout, causal)` returns the gradients of q, k and v.
    """

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
    """Call torch's flash attention on packed rows; return output [Tq, H, D], log-sum-exp [H, Tq],
    and the random state with which the backward call drops the same probabilities.
    """
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
    """Call the backward of torch's flash attention; return the gradients of q, k and v."""
    borders = queries.cu, keys.cu, queries.longest, keys.longest
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *borders, dropout, causal, *state
    )
    return grads


FLASH = Blocks(_flash_forward, _flash_backward)


def merge(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return output [Tq, H, D] and log-sum-exp [H, Tq] of a softmax over all keys, from those over
    two disjoint sets of keys.
    """
    lse = torch.logaddexp(one_lse, other_lse)
    share, rest = ((half - lse).exp().t()[:, :, None] for half in (one_lse, other_lse))
    return (one * share + other * rest).to(one.dtype), lse


Merge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Merged(torch.autograd.Function):
    """A cloze's attention by three calls (contexts on contexts, spans on contexts, spans on
    themselves) with its own backward pass; kernel `flash`.
    """

    @staticmethod
    def forward(
        context: Any, qkv: Tensor, rows: ClozeLayout, dropout: float, blocks: Blocks, merged: Merge
    ) -> Tensor:
        """Return [T, H, D]. The first call gets all queries but only the offsets of contexts, so
        its output has room for the spans' and nothing is concatenated.
        """
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
        """Return the gradient of qkv [T, 3, H, D], and None for the other arguments."""
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
    """Compute attention by three calls of flash attention, merging by `merge_parts`."""
    out: Tensor = Merged.apply(qkv, rows, dropout, FLASH, merged)  # type: ignore[no-untyped-call]
    return out


# `packed` is kernels/glm_packed_attention.py where Triton runs; elsewhere it pads.
KERNELS: dict[str, Callable[[Tensor, ClozeLayout, float, Merge], Tensor]] = {
    "padded": _by_padding,
    "flash": _by_flash,
    "packed": _by_padding,
}
JOINT = ("flash", "packed")  # their tokens are interleaved where Triton runs


def attend(
    qkv: Tensor, rows: ClozeLayout, kernel: str, dropout: float, merged: Merge = merge
) -> Tensor:
    """Return a cloze's attention [T, H, D] by the named kernel (KeyError if unknown). `merge_parts`
    may be a compiled `merge_softmax_parts`; only kernel `flash` uses it.
    """
    return KERNELS[kernel](qkv, rows, dropout, merged)
