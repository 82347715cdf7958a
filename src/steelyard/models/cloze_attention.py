"""Attention of a cloze: context tokens see all of their context, span tokens see their context and
their own span up to themselves.

Tokens are packed: all contexts end to end, then all spans, those that see one context next to each
other. A kernel is an entry of `CLOZE_KERNELS`: it takes QKV [T, 3, H, D], a `ClozeLayout` and the
dropout probability of attention, and returns [T, H, D]. Called by glm.py and glm_fused.py; layouts
are made by training/glm_trainer.py.

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

from steelyard.kernels import glm_packed_attention
from steelyard.kernels.glm_span_attention import InterleavedLayout, RowOffsets
from steelyard.models.tensors import make_offsets, send_array, send_tensor

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class ClozeCapacity:
    """Sizes of a cloze layout that several micro-batches share, so that one recorded graph (of
    kernel launches) serves all of them: at most `logits` span tokens, exactly `contexts` contexts
    and `spans` spans (empty ones among them). `longest` are the largest lengths of a context, of
    all spans of a context together and of a span, `row` is that of a context with its spans, in
    tokens. Context tokens are not padded by it. Made by training/size_buckets.py.
    """

    logits: int  # span tokens, at most
    contexts: int  # rows; context tokens are not padded
    spans: int
    longest: tuple[int, int, int]  # lengths: a context, all spans of a context, a span
    row: int  # length of the longest context with its spans


@dataclass(frozen=True)
class PaddedLayout:
    """The tokens of a cloze micro-batch as one padded row per context, its spans behind it, for
    kernels without packing. Made by `ClozeLayout.padded`, on the device.

    `width` is the length of a padded row; `gather`, int64 [contexts · width], is the index of the
    token at each padded position (0 for padding), `back`, int64 [T], the padded position of each
    token, `mask`, bool [contexts, 1, width, width], True where a query (third dimension) sees a
    key.
    """

    # int64 [contexts · width]: index of the token at each padded position; 0 for padding
    gather: Tensor
    back: Tensor  # int64 [T]: padded position of each token
    # bool [contexts, 1, width (query), width (key)]: True if the query sees the key
    mask: Tensor
    width: int


@dataclass(frozen=True)
class ClozeLayout:
    """Where contexts and spans of a packed cloze micro-batch begin and end; made by
    `make_cloze_layout`. Tokens are all contexts end to end, then all spans.

    `lengths` has the lengths of contexts, of spans, and the number of spans of each context;
    `contexts`, `groups` (all spans of one context) and `spans` are their `RowOffsets` on `device`,
    `context_tokens` is the number of context tokens. `capacity` is the size it is padded to (None:
    not padded). `padded`, `interleaved` and `span_positions` are derived for the kernels, computed
    on first use and cached; `list_kernel_tensors` lists their tensors.
    """

    # lengths of contexts, lengths of spans, number of spans of each context
    lengths: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    contexts: RowOffsets
    groups: RowOffsets  # a row for all spans of a context, counted from the first span token
    spans: RowOffsets
    context_tokens: int
    device: torch.device
    capacity: ClozeCapacity | None = None

    @cached_property
    def padded(self) -> PaddedLayout:
        """The padded layout of this cloze layout for kernel `padded`, on the device: one row per
        context with its spans behind it, all padded to the longest, and the mask of which query
        sees which key (`PaddedLayout`). A property, cached. With a capacity its rows are at least
        `capacity.row` long.
        """
        gather, back, mask = _make_padded_tensors(
            *self.lengths, self.capacity.row if self.capacity else 0
        )
        width = gather.shape[1]
        return PaddedLayout(
            send_tensor(gather.flatten(), self.device),
            send_tensor(back, self.device),
            send_tensor(mask, self.device)[:, None],
            width,
        )

    @cached_property
    def interleaved(self) -> InterleavedLayout:
        """The layout with every context followed by its spans, for Triton kernels, on the device;
        cached.
        """
        return _make_interleaved_layout(*self.lengths, self.capacity, self.device)

    @cached_property
    def span_positions(self) -> Tensor:
        """The positions of the spans' tokens when all contexts come before all spans: int64 on the
        device, filled up with position 0 to the capacity; cached.
        """
        positions = np.arange(self.context_tokens, self.context_tokens + sum(self.lengths[1]))
        return send_array(
            _pad_array(positions, self.capacity.logits if self.capacity else len(positions), 0),
            self.device,
        )

    def list_kernel_tensors(self, interleaved: bool) -> list[Tensor]:
        """Return all tensors of this cloze layout that kernels read: those of the interleaved order
        if `interleaved`, otherwise those of kernel `padded`, always in the same order. A recorded
        graph overwrites them for the next micro-batch.
        """
        if not interleaved:
            return [self.span_positions, self.padded.gather, self.padded.back, self.padded.mask]
        layout = self.interleaved
        by_rows = [
            self.contexts.cu_lengths,
            layout.order,
            layout.row_offsets.cu_lengths,
            layout.context_positions,
            layout.context_index,
            layout.span_positions,
            layout.span_starts,
            layout.span_lengths,
        ]
        return [*by_rows, layout.token_ranges, layout.programs]


def make_cloze_layout(
    contexts: Sequence[int],
    spans: Sequence[int],
    groups: Sequence[int],
    device: torch.device,
    capacity: ClozeCapacity | None = None,
) -> ClozeLayout:
    """Return the layout of contexts and spans with these lengths; `groups` is the number of spans
    that see each context, in order.

    With a capacity lengths may be 0, and maximum lengths are the capacity's. Raises ValueError if
    contexts and groups differ in number, if groups do not add up to the number of spans, if a
    number is 0 without a capacity (or negative), or if the numbers of contexts and spans are not
    the capacity's.
    """
    minimum = min(*groups, *contexts, *spans)
    if (
        len(groups) != len(contexts)
        or sum(groups) != len(spans)
        or minimum < (1 if capacity is None else 0)
    ):
        raise ValueError("contexts, groups and spans do not match, or a length is 0")
    if capacity is not None and (len(contexts), len(spans)) != (capacity.contexts, capacity.spans):
        raise ValueError(
            f"{len(contexts)} contexts and {len(spans)} spans, but the layout has a capacity of"
            f" {capacity}"
        )
    ends = torch.tensor(groups).cumsum(0).tolist()
    group_lengths = [sum(spans[end - count : end]) for end, count in zip(ends, groups, strict=True)]
    lengths_by_kind = contexts, group_lengths, spans
    longest = capacity.longest if capacity else tuple(map(max, lengths_by_kind))
    outer, middle, inner = (
        RowOffsets(make_offsets(lens, device), max_length)
        for lens, max_length in zip(lengths_by_kind, longest, strict=True)
    )
    lengths = tuple(contexts), tuple(spans), tuple(groups)
    return ClozeLayout(lengths, outer, middle, inner, sum(contexts), device, capacity)


def _pad_array(values: IntArray, size: int, value: int) -> IntArray:
    """Pad an array at its end to `size` elements with `value`."""
    return np.pad(values, (0, size - len(values)), constant_values=value)


def _make_padded_tensors(
    contexts: Sequence[int], spans: Sequence[int], groups: Sequence[int], min_width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gather [contexts, width], back [T] and mask [contexts, width, width] of
    `PaddedLayout`, on the host; the width is that of the longest context with its spans, at least
    `min_width`. Padding sees key 0 only, so that its softmax is no NaN; `groups` is the number of
    spans of each context.
    """
    parts, first, next_token = [], 0, sum(contexts)
    for length, count in zip(contexts, groups, strict=True):
        own_spans = spans[first : first + count]
        parts.append((length, own_spans, next_token))
        first, next_token = first + count, next_token + sum(own_spans)
    width = max(min_width, *(length + sum(own_spans) for length, own_spans, _ in parts))
    gather = torch.zeros(len(contexts), width, dtype=torch.int64)
    back = torch.empty(next_token, dtype=torch.int64)
    mask = torch.zeros(len(contexts), width, width, dtype=torch.bool)
    mask[:, :, 0] = True  # padding sees one key: a softmax over none is NaN
    start = 0
    for i, (length, own_spans, begin) in enumerate(parts):
        size = length + sum(own_spans)
        tokens = torch.cat(
            (torch.arange(start, start + length), torch.arange(begin, begin + sum(own_spans)))
        )
        gather[i, :size] = tokens
        back[tokens] = torch.arange(i * width, i * width + size)
        mask[i, :size, :length] = True
        position = length
        for span in own_spans:
            mask[i, position : position + span, position : position + span] = torch.ones(
                span, span, dtype=torch.bool
            ).tril()
            position += span
        start += length
    return gather, back, mask


def _make_interleaved_layout(
    contexts: Sequence[int],
    spans: Sequence[int],
    groups: Sequence[int],
    capacity: ClozeCapacity | None,
    device: torch.device,
) -> InterleavedLayout:
    """Compute the `InterleavedLayout` of contexts and spans with these lengths and send it to the
    device; `groups` is the number of spans of each context.

    With a capacity, maximum lengths are the capacity's, context positions are padded to the number
    of all tokens, span positions to `capacity.logits`, and programs to the most that can be needed.
    By numpy, because torch's threads would wait for one another over so few numbers.
    """
    context_lengths, span_lengths, count = (
        np.array(lens, dtype=np.int64) for lens in (contexts, spans, groups)
    )
    owner = np.repeat(np.arange(len(context_lengths)), count)
    group_lengths = np.zeros_like(context_lengths)
    np.add.at(group_lengths, owner, span_lengths)
    sizes = context_lengths + group_lengths
    first = sizes.cumsum() - sizes  # position of each row's first token
    # to be added to a span token's number among all span tokens
    behind = first + context_lengths - (group_lengths.cumsum() - group_lengths)
    context_positions = np.arange(context_lengths.sum()) + np.repeat(
        first - (context_lengths.cumsum() - context_lengths), context_lengths
    )
    span_positions = np.arange(span_lengths.sum()) + np.repeat(behind, group_lengths)
    back = np.concatenate((context_positions, span_positions))
    order = np.empty_like(back)
    order[back] = np.arange(len(back))
    context_index = np.full(len(back), -1)
    context_index[context_positions] = np.arange(len(context_positions))
    starts = span_lengths.cumsum() - span_lengths + behind[owner]
    span_start = np.full(len(back), len(back))
    span_start[span_positions] = np.repeat(starts, span_lengths)
    row_ranges = [np.repeat(bound, sizes) for bound in (first, first + context_lengths)]

    def send_int32(values: IntArray) -> Tensor:
        """Send an array to the device as int32."""
        return send_tensor(torch.from_numpy(values.astype(np.int32)), device)

    return InterleavedLayout(
        order=send_array(order, device),
        row_offsets=RowOffsets(
            make_offsets(sizes.tolist(), device), capacity.row if capacity else int(sizes.max())
        ),
        context_positions=send_int32(
            _pad_array(context_positions, len(back) if capacity else len(context_positions), -1)
        ),
        context_index=send_int32(context_index),
        span_positions=send_array(
            _pad_array(span_positions, capacity.logits if capacity else len(span_positions), 0),
            device,
        ),
        span_starts=send_int32(starts),
        span_lengths=send_int32(span_lengths),
        max_span=capacity.longest[2] if capacity else max(spans),
        token_ranges=send_int32(np.stack((*row_ranges, span_start))),
        programs=send_int32(
            _divide_into_programs(first, sizes, glm_packed_attention.TILE, capacity is not None)
        ),
    )


def _divide_into_programs(first: IntArray, sizes: IntArray, tile: int, fill: bool) -> IntArray:
    """Divide rows into parts of at most `tile` tokens, one for each Triton program: int64 [2,
    programs] with the first token of each part and the end of its row. `first` and `sizes` are each
    row's first token and number of tokens.

    With `fill`, empty parts (both numbers the total of tokens) are added up to the most that as
    many rows of as many tokens can need.
    """
    count = -(-sizes // tile)
    # number of each part in its row
    number = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
    programs = np.stack((np.repeat(first, count) + number * tile, np.repeat(first + sizes, count)))
    padding = sizes.sum() // tile + len(sizes) - programs.shape[1] if fill else 0
    return np.pad(programs, ((0, 0), (0, padding)), constant_values=sizes.sum())


def _attend_by_padding(
    qkv: Tensor, layout: ClozeLayout, dropout: float, merge_parts: "MergeFunction"
) -> Tensor:
    """Compute a cloze's attention [T, H, D] of `qkv` [T, 3, H, D] through SDPA: each context with
    its spans is padded to one row, with a mask by which contexts see all of their context, and
    spans their context and their own span up to themselves.

    For CPUs and fp32, and the plain meaning of the other kernels. `dropout` is the probability of
    attention's dropout; `merge_parts` is not used.
    """
    padded = layout.padded
    gathered = qkv.index_select(0, padded.gather).unflatten(0, (-1, padded.width))  # type: ignore[no-untyped-call]
    q, k, v = gathered.permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=padded.mask, dropout_p=dropout)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, padded.back)


# output [Tq, H, D], log-sum-exp [H, Tq], and the random state for the backward call
PartialAttention = tuple[Tensor, Tensor, Any]


@dataclass(frozen=True)
class AttentionCalls:
    """The forward and backward call of attention over packed rows: `FLASH` has torch's flash
    attention, tests have plain ones.

    `forward(q, k, v, queries, keys, dropout, causal)`, with `queries` and `keys` as `RowOffsets`,
    returns output [Tq, H, D], log-sum-exp [H, Tq] and random state, and leaves output rows beyond
    the last offset uninitialized; `backward(grad, q, k, v, out, lse, state, queries, keys, dropout,
    causal)` returns the gradients of q, k and v.
    """

    forward: Callable[
        [Tensor, Tensor, Tensor, RowOffsets, RowOffsets, float, bool], PartialAttention
    ]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: RowOffsets,
    keys: RowOffsets,
    dropout: float,
    causal: bool,
) -> PartialAttention:
    """Call torch's flash attention on packed rows; return output [Tq, H, D], natural log-sum-exp
    [H, Tq], and the random state with which the backward call drops the same probabilities.

    `q` is [Tq, H, D], `k` and `v` are [Tk, H, D]; `queries` and `keys` say where the rows of each
    begin.
    """
    offsets = queries.cu_lengths, keys.cu_lengths, queries.max_length, keys.max_length
    out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, *offsets, dropout, causal, False
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
    queries: RowOffsets,
    keys: RowOffsets,
    dropout: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Call the backward of torch's flash attention on packed rows; return the gradients of q, k and
    v. `out`, `lse` and `state` are the output, log-sum-exp and random state of `_flash_forward`, or
    output and log-sum-exp of a softmax of which these keys are a part.
    """
    offsets = queries.cu_lengths, keys.cu_lengths, queries.max_length, keys.max_length
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *offsets, dropout, causal, *state
    )
    return grads


FLASH = AttentionCalls(_flash_forward, _flash_backward)


def merge_softmax_parts(
    first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return output [Tq, H, D], in the type of `first`, and natural log-sum-exp [H, Tq] of a
    softmax over all keys, from outputs and log-sum-exps over two disjoint sets of keys.
    """
    lse = torch.logaddexp(first_lse, second_lse)
    first_share, second_share = (
        (part_lse - lse).exp().t()[:, :, None] for part_lse in (first_lse, second_lse)
    )
    return (first * first_share + second * second_share).to(first.dtype), lse


MergeFunction = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class MergedClozeAttention(torch.autograd.Function):
    """An autograd function: a cloze's attention by three calls (contexts on contexts, spans on
    contexts, spans on themselves) with its own backward pass; kernel `flash`. Tokens are all
    contexts, then all spans; only qkv gets a gradient.
    """

    @staticmethod
    def forward(
        context: Any,
        qkv: Tensor,
        rows: ClozeLayout,
        dropout: float,
        calls: AttentionCalls,
        merge_parts: MergeFunction,
    ) -> Tensor:
        """Return a cloze's attention [T, H, D] of qkv [T, 3, H, D], by three calls of
        `calls.forward`; `merge_parts` joins those of spans on contexts and on themselves.

        The first call gets all queries but only the offsets of contexts, so its output has room for
        the spans' and nothing is concatenated.
        """
        n = rows.context_tokens
        q, k, v = qkv.unbind(1)
        out, lse, state = calls.forward(
            q, k[:n], v[:n], rows.contexts, rows.contexts, dropout, False
        )
        far, far_lse, far_state = calls.forward(
            q[n:], k[:n], v[:n], rows.groups, rows.contexts, dropout, False
        )
        own, own_lse, own_state = calls.forward(
            q[n:], k[n:], v[n:], rows.spans, rows.spans, dropout, True
        )
        whole, whole_lse = merge_parts(far, far_lse, own, own_lse)
        out[n:] = whole
        context.save_for_backward(qkv, out, lse, whole_lse)
        context.states = state, far_state, own_state
        context.arguments = rows, dropout, calls
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient of qkv [T, 3, H, D] of a cloze's attention, by three calls of
        `calls.backward`, and None for the other arguments.
        """
        qkv, out, lse, whole_lse = context.saved_tensors
        rows, dropout, calls = context.arguments
        n = rows.context_tokens
        q, k, v = qkv.unbind(1)
        grad = grads[0].contiguous()
        state, far_state, own_state = context.states
        dq, dk, dv = calls.backward(
            grad, q, k[:n], v[:n], out, lse, state, rows.contexts, rows.contexts, dropout, False
        )
        spans = grad[n:], q[n:]
        whole = out[n:], whole_lse
        far_q, far_k, far_v = calls.backward(
            *spans, k[:n], v[:n], *whole, far_state, rows.groups, rows.contexts, dropout, False
        )
        own_q, own_k, own_v = calls.backward(
            *spans, k[n:], v[n:], *whole, own_state, rows.spans, rows.spans, dropout, True
        )
        total = torch.empty_like(qkv)
        total[:n, 0] = dq[:n]
        torch.add(far_q, own_q, out=total[n:, 0])
        for i, (near, far, own) in enumerate(((dk, far_k, own_k), (dv, far_v, own_v)), start=1):
            torch.add(near, far, out=total[:n, i])
            total[n:, i] = own
        return total, None, None, None, None


def _attend_by_flash(
    qkv: Tensor, layout: ClozeLayout, dropout: float, merge_parts: MergeFunction
) -> Tensor:
    """Compute a cloze's attention [T, H, D] of `qkv` [T, 3, H, D] by three calls of torch's flash
    attention, merging those of spans by `merge_parts`.
    """
    out: Tensor = MergedClozeAttention.apply(qkv, layout, dropout, FLASH, merge_parts)  # type: ignore[no-untyped-call]
    return out


# `packed` is kernels/glm_packed_attention.py where Triton runs; elsewhere it pads.
CLOZE_KERNELS: dict[str, Callable[[Tensor, ClozeLayout, float, MergeFunction], Tensor]] = {
    "padded": _attend_by_padding,
    "flash": _attend_by_flash,
    "packed": _attend_by_padding,
}
INTERLEAVED = ("flash", "packed")  # their tokens are interleaved where Triton runs


def attend_cloze(
    qkv: Tensor,
    layout: ClozeLayout,
    kernel: str,
    dropout: float,
    merge_parts: MergeFunction = merge_softmax_parts,
) -> Tensor:
    """Return a cloze's attention [T, H, D] of `qkv` [T, 3, H, D] by the named kernel of
    `CLOZE_KERNELS` (ValueError if unknown); tokens are in the order of `layout`, not interleaved.

    `packed` computes the same as `padded` here: its Triton kernel is called by glm_fused.py only.
    `dropout` is the probability of attention's dropout. `merge_parts` may be a compiled
    `merge_softmax_parts`; only kernel `flash` uses it.
    """
    if kernel not in CLOZE_KERNELS:
        raise ValueError(f"attention kernel {kernel!r}; allowed: {', '.join(CLOZE_KERNELS)}")
    return CLOZE_KERNELS[kernel](qkv, layout, dropout, merge_parts)
