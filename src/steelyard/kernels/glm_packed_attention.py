"""A GLM's whole attention in Triton, for 16-bit types: context tokens attend to their context, span
tokens to their context and to earlier tokens of their own span.

This is kernel `packed` of models/cloze_attention.py; `attend_cloze` with kernel `padded` is its
plain meaning. Tokens are in the order of `InterleavedLayout`, every context followed by its spans.
For each token `ranges` holds where its row (context with spans) begins, where the context in it
ends, and where its own span begins. A program has up to `TILE` tokens of one row, so it reads only
keys of that row. No two programs add to one number, so results are the same in every run. Gradients
are written into the layout of QKV, which the matmul before reads. Exponents are to base 2.

Dropped probabilities are decided by a hash of seed, head, query and key, computed again in the
backward pass. Called by models/glm_fused.py.
"""

from typing import Any

import torch
from torch import Tensor

from steelyard.errors import RequestError
from steelyard.kernels.glm_norm_gelu import Dropout, reduce_parts
from steelyard.kernels.hash_dropout import (
    hash_keys,
    hash_queries,
    make_dropout_keys,
    make_keep_mask,
)
from steelyard.kernels.jit import constexpr, jit_without_specializing, next_power_of_2, tensor, tl
from steelyard.kernels.tiles import has_descriptors, make_tile_sources, read_tile

LOG2_E = 1.4426950408889634
MAX_ELEMENTS = 2**31 - 1  # of a tensor: offsets are 32-bit
MIN_DIM = 16  # the smallest side of a tile in tl.dot
TILE = 64  # tokens of one program, at most
# Tokens of the other operand that a program loads at a time, warps, pipeline stages.
FORWARD = (32, 4, 3)
BACKWARD_QUERIES = (32, 4, 3)
BACKWARD_KEYS = (32, 4, 2)


def triton_attend_cloze(
    qkv: Tensor, ranges: Tensor, programs: Tensor, dropout: Dropout
) -> tuple[Tensor, Tensor]:
    """Return the attention output [T, H, D] and the base-2 logarithm of each softmax's sum, fp32
    [H, T], of contiguous `qkv` [T, 3, H, D] with tokens in the order of `InterleavedLayout`.

    `ranges` (`token_ranges`) is int32 [3, T] and `programs` int32 [2, P] of that layout.
    Probabilities are dropped by a hash of `dropout`'s seed and site. Raises RequestError if `qkv`
    has more than 2^31 - 1 elements, because offsets are 32-bit.
    """
    if qkv.numel() > MAX_ELEMENTS:
        raise RequestError(
            f"tune.attention='packed' addresses at most {MAX_ELEMENTS} elements, and QKV has"
            f" {qkv.numel()}; choose a"
            " smaller tune.micro_batch"
        )
    tokens, _, heads, dim = qkv.shape
    out, lse = qkv.new_empty(tokens, heads, dim), qkv.new_empty(heads, tokens, dtype=torch.float32)
    keys, warps, stages = FORWARD
    (qkv_tiles,), by_descriptor = _make_tile_sources(keys, qkv.flatten(1, 2))
    _attend_forward[(programs.shape[1], heads)](
        qkv, qkv_tiles, out, lse, ranges, programs, *_get_seed_and_site(dropout), tokens,
        dim**-0.5 * LOG2_E, *_get_dropout_scale_and_threshold(dropout), dropout.share > 0, heads,
        dim, max(MIN_DIM, next_power_of_2(dim)), TILE, keys, by_descriptor, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return out, lse


def triton_attend_cloze_backward(
    grad: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    ranges: Tensor,
    programs: Tensor,
    dropout: Dropout,
    accumulator: Tensor,
) -> Tensor:
    """Return the gradient of `qkv` [T, 3, H, D], from `grad`, the contiguous gradient of the output
    [T, H, D], and from the output and lse of `triton_attend_cloze`; `ranges`, `programs` and
    `dropout` are those of the forward call.

    Its sum over tokens, the gradient of QKV's bias [3 · H · D], is added to `accumulator` in place.
    Two kernels are launched, for queries and then for keys and values.
    """
    tokens, _, heads, dim = qkv.shape
    qkv_grad, dot = torch.empty_like(qkv), torch.empty_like(lse)
    grid = programs.shape[1], heads
    parts = qkv.new_empty(grid[0], 3, heads * dim, dtype=torch.float32)
    inputs = (
        out, lse, dot, qkv_grad, parts, ranges, programs, *_get_seed_and_site(dropout), tokens,
        dim**-0.5, *_get_dropout_scale_and_threshold(dropout),
    )  # fmt: skip
    sizes = dropout.share > 0, heads, dim, max(MIN_DIM, next_power_of_2(dim)), TILE
    for kernel, (rows, warps, stages) in (
        (_backward_queries, BACKWARD_QUERIES),
        (_backward_keys, BACKWARD_KEYS),
    ):
        (qkv_tiles, grad_tiles), by_descriptor = _make_tile_sources(rows, qkv.flatten(1, 2), grad)
        kernel[grid](
            grad, grad_tiles, qkv, qkv_tiles, *inputs, *sizes, rows, by_descriptor,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    reduce_parts(parts, list(accumulator.view(3, -1)))
    return qkv_grad


def _make_tile_sources(rows: int, *matrices: Tensor) -> tuple[list[Any], bool]:
    """Return the kernel arguments from which tiles of `rows` tokens of one head are loaded, one for
    each of `matrices` [T, heads, D], and whether these are tensor descriptors.

    They are descriptors only if the device has them and the head dimension needs no padding (a
    power of two, at least `MIN_DIM`); otherwise the matrices themselves.
    """
    dim = matrices[0].shape[-1]
    by_descriptor = has_descriptors(matrices[0].device) and dim == max(
        MIN_DIM, next_power_of_2(dim)
    )
    return (make_tile_sources(rows, *matrices) if by_descriptor else list(matrices)), by_descriptor


def _get_seed_and_site(dropout: Dropout) -> tuple[Tensor, int]:
    """Return the dropout's seed tensor and site number, as the kernels take them."""
    return dropout.seed, dropout.site


def _get_dropout_scale_and_threshold(dropout: Dropout) -> tuple[float, int]:
    """Return the factor 1 / (1 - share) that kept probabilities are multiplied by, and the hash
    below which they are dropped.
    """
    return 1 / (1 - dropout.share), dropout.below


@jit_without_specializing()
def _can_see(i: tensor, start: tensor, end: tensor, span_start: tensor, j: tensor) -> tensor:
    """Return whether query `i` sees key `j`: j is in the context, start <= j < end, or in the
    query's own span and not later, span_start <= j <= i.
    """
    return ((j >= start) & (j < end)) | ((j >= span_start) & (j <= i))


@jit_without_specializing()
def _load_rows(
    base: tensor, i: tensor, mask: tensor, width: constexpr, dim: constexpr, padded: constexpr
) -> tensor:
    """Load rows (tokens) `i` of one head, [len(i), padded], where `base` points to the head's first
    column in a matrix whose rows are `width` elements apart; zeros where `mask` [len(i)] is False
    and from column `dim` on.
    """
    d = tl.arange(0, padded)[None, :]
    pointers = base + i[:, None] * width + d
    if dim == padded:
        return tl.load(pointers, mask[:, None], 0.0)
    return tl.load(pointers, mask[:, None] & (d < dim), 0.0)


@jit_without_specializing()
def _load_tile(
    base: tensor, tiles: tensor, begin: tensor, first_column: tensor, stop: tensor, tokens: tensor,
    stride: constexpr, dim: constexpr, padded: constexpr, rows: constexpr,
    by_descriptor: constexpr,
) -> tensor:  # fmt: skip
    """Load `rows` tokens from token `begin` on, [rows, padded], of the head whose columns begin at
    `first_column`: from descriptor `tiles` if `by_descriptor`, otherwise from pointer `base` to a
    matrix whose rows are `stride` elements apart.

    Tokens from `stop` on are zeros when loaded through pointers; through a descriptor they may hold
    values of the tokens that follow, and callers mask them.
    """
    if by_descriptor:
        return read_tile(tiles, begin, first_column, stride, tokens, dim, rows, True)
    else:
        token = begin + tl.arange(0, rows)
        return _load_rows(base + first_column, token, token < stop, stride, dim, padded)


@jit_without_specializing()
def _attend_key_tile(
    q: tensor, qkv: tensor, qkv_tiles: tensor, head: tensor, tokens: tensor, begin: tensor,
    keys_end: tensor, i: tensor, start: tensor, end: tensor, span_start: tensor,
    query_hash: tensor, high_key: tensor, maximum: tensor, exp_sum: tensor, value_sum: tensor,
    scale: tensor, below: tensor, masked: constexpr, has_dropout: constexpr, width: constexpr,
    dim: constexpr, padded: constexpr, keys: constexpr, by_descriptor: constexpr,
) -> tuple[tensor, tensor, tensor]:  # fmt: skip
    """Continue an online softmax of queries `i` [tile] of one head with the tile of `keys` keys
    from `begin` on; return the new maximum, sum of exponentials (fp32 [tile] both) and weighted sum
    of values (fp32 [tile, padded]).

    Exponentials are of base 2: `scale` is log2(e) / sqrt(dim). If `masked`, query i sees keys start
    to end - 1 (its context) and span_start to i (`_can_see`); otherwise all queries see all keys of
    the tile. Pairs whose hash (of `query_hash` and `high_key`) is less than `below` are dropped:
    they count in the sum of exponentials, not in that of values, and the caller multiplies by 1 /
    (1 - share). Keys and values are read from `qkv` or `qkv_tiles`; `width` is heads · dim.
    """
    j = begin + tl.arange(0, keys)
    k = _load_tile(
        qkv, qkv_tiles, begin, width + head * dim, keys_end, tokens, 3 * width, dim, padded, keys,
        by_descriptor,
    )  # fmt: skip
    v = _load_tile(
        qkv, qkv_tiles, begin, 2 * width + head * dim, keys_end, tokens, 3 * width, dim, padded,
        keys, by_descriptor,
    )  # fmt: skip
    s = tl.dot(q, tl.trans(k)) * scale
    if masked:
        seen = _can_see(i[:, None], start[:, None], end[:, None], span_start[:, None], j[None, :])
        s = tl.where(seen, s, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(s, 1))
    p = tl.exp2(s - new_maximum[:, None])
    rescale = tl.exp2(maximum - new_maximum)
    exp_sum = exp_sum * rescale + tl.sum(p, 1)
    if has_dropout:
        p = tl.where(
            make_keep_mask(query_hash[:, None], hash_keys(j, high_key)[None, :], below), p, 0.0
        )
    return new_maximum, exp_sum, value_sum * rescale[:, None] + tl.dot(p.to(v.dtype), v)


@jit_without_specializing("tokens", "place", "below")
def _attend_forward(
    qkv: tensor, qkv_tiles: tensor, out: tensor, lse: tensor, ranges: tensor, programs: tensor,
    seed: tensor, place: tensor, tokens: tensor, scale: tensor, dropout_scale: tensor,
    below: tensor, has_dropout: constexpr, heads: constexpr, dim: constexpr, padded: constexpr,
    tile: constexpr, keys: constexpr, by_descriptor: constexpr,
) -> None:  # fmt: skip
    """Compute softmax(q kᵀ / sqrt(D), visible keys only) v with dropout for one tile of queries and
    one head; equals kernel `padded` of models/cloze_attention.py, but for which probabilities are
    dropped.

    `qkv` is contiguous [tokens, 3, heads, dim], `qkv_tiles` the same for `_load_tile`; written are
    `out` [tokens, heads, dim] and `lse` fp32 [heads, tokens] (base 2). `ranges` and `programs` are
    those of `InterleavedLayout`. Program (p, h) has the queries of head h from programs[0, p] to
    before programs[1, p], but at most `tile`. `scale` is log2(e) / sqrt(dim), `dropout_scale` 1 /
    (1 - share), `below` the hash under which a probability is dropped, `place` the dropout site;
    `padded` is the power of two that covers `dim`, `keys` how many keys are read at a time.
    """
    head = tl.program_id(1)
    first, stop = _find_program_tokens(programs)
    i = first + tl.arange(0, tile)
    mask = i < stop
    width: constexpr = heads * dim
    q = _load_rows(qkv + head * dim, i, mask, 3 * width, dim, padded)
    start, end = tl.load(ranges + i, mask, 0), tl.load(ranges + tokens + i, mask, 0)
    span_start = tl.load(ranges + 2 * tokens + i, mask, tokens)
    low_key, high_key = make_dropout_keys(seed, place)
    query_hash = hash_queries(i, head, heads, low_key)
    maximum = tl.full([tile], -1e30, tl.float32)  # finite, because -inf minus -inf is NaN
    exp_sum = tl.zeros([tile], tl.float32)
    value_sum = tl.zeros([tile, padded], tl.float32)
    lowest, full_end, keys_end = _find_key_range(ranges, tokens, first, stop, tile, keys)
    for begin in range(lowest, full_end, keys):
        maximum, exp_sum, value_sum = _attend_key_tile(
            q, qkv, qkv_tiles, head, tokens, begin, keys_end, i, start, end, span_start,
            query_hash, high_key, maximum, exp_sum, value_sum, scale, below, False, has_dropout,
            width, dim, padded, keys, by_descriptor,
        )  # fmt: skip
    for begin in range(full_end, keys_end, keys):
        maximum, exp_sum, value_sum = _attend_key_tile(
            q, qkv, qkv_tiles, head, tokens, begin, keys_end, i, start, end, span_start,
            query_hash, high_key, maximum, exp_sum, value_sum, scale, below, True, has_dropout,
            width, dim, padded, keys, by_descriptor,
        )  # fmt: skip
    if has_dropout:
        value_sum = value_sum * dropout_scale
    d = tl.arange(0, padded)[None, :]
    pointers = out + head * dim + i[:, None] * width + d
    tl.store(pointers, value_sum / exp_sum[:, None], mask[:, None] & (d < dim))
    tl.store(lse + head * tokens + i, maximum + tl.log2(exp_sum), mask)


@jit_without_specializing()
def _find_program_tokens(programs: tensor) -> tuple[tensor, tensor]:
    """Return the first token of this program, programs[0, program_id(0)], and where its row ends,
    programs[1, program_id(0)], of `programs`, int32 [2, P]; both are equal if the program has no
    tokens.
    """
    return tl.load(programs + tl.program_id(0)), tl.load(
        programs + tl.num_programs(0) + tl.program_id(0)
    )


@jit_without_specializing()
def _find_key_range(
    ranges: tensor, tokens: tensor, first: tensor, stop: tensor, tile: constexpr, keys: constexpr
) -> tuple[tensor, tensor, tensor]:
    """Return the range of keys that a tile of queries of one row needs: its first key, the key up
    to which all queries see all keys (the context, in whole steps of `keys`), and its end.

    `ranges` is int32 [3, tokens]: begin of a token's row, end of its context, begin of its span.
    The tile begins at token `first` of a row that ends at `stop` and has at most `tile` tokens. The
    end is that of the context or of the tile, whichever is later. All three are zero if `first`
    equals `stop`.
    """
    nonempty = first < stop
    lowest, end = (
        tl.load(ranges + first, nonempty, 0),
        tl.load(ranges + tokens + first, nonempty, 0),
    )
    keys_end = tl.where(nonempty, tl.maximum(end, tl.minimum(first + tile, stop)), 0)
    return lowest, lowest + (end - lowest) // keys * keys, keys_end


@jit_without_specializing()
def _store_gradient(
    parts: tensor, qkv_grad: tensor, value: tensor, part: constexpr, i: tensor, mask: tensor,
    head: tensor, width: constexpr, dim: constexpr, padded: constexpr,
) -> None:  # fmt: skip
    """Write the gradient `value` [tile, padded] of this program's queries (`part` 0), keys (1) or
    values (2), of tokens `i` and one head, into `qkv_grad` [tokens, 3, heads, dim], and its sum
    over these tokens to row program_id(0) of `parts`, fp32 [P, 3, heads · dim].

    Tokens where `mask` is False are neither written nor summed; `width` is heads · dim.
    """
    d = tl.arange(0, padded)
    value = tl.where(mask[:, None], value, 0.0)
    pointers = qkv_grad + i[:, None] * 3 * width + part * width + head * dim + d[None, :]
    tl.store(pointers, value, mask[:, None] & (d < dim)[None, :])
    tl.store(
        parts + (tl.program_id(0) * 3 + part) * width + head * dim + d, tl.sum(value, 0), d < dim
    )


@jit_without_specializing()
def _compute_query_gradient_tile(
    q: tensor, g: tensor, qkv: tensor, qkv_tiles: tensor, head: tensor, tokens: tensor,
    begin: tensor, keys_end: tensor, i: tensor, start: tensor, end: tensor, span_start: tensor,
    query_hash: tensor, high_key: tensor, lse: tensor, dot: tensor, scale: tensor, below: tensor,
    masked: constexpr, has_dropout: constexpr, width: constexpr, dim: constexpr, padded: constexpr,
    keys: constexpr, by_descriptor: constexpr,
) -> tensor:  # fmt: skip
    """Return what the tile of `keys` keys from `begin` on contributes to the gradient of queries
    `i`, fp32 [tile, padded]: Σ p (keep · g vᵀ - dot) k, without the factors 1 / sqrt(D) and 1 / (1
    - share).

    `q` and `g` (gradient of the output) are [tile, padded]; p = exp2(q kᵀ log2(e) scale - lse),
    with `scale` 1 / sqrt(D), base-2 `lse` and `dot` = rowsum(grad · out) (1 - share), [tile] each.
    If `masked`, queries see what `_can_see` says, otherwise all keys of the tile; `keep` is false
    for pairs whose hash is less than `below`.
    """
    j = begin + tl.arange(0, keys)
    k = _load_tile(
        qkv, qkv_tiles, begin, width + head * dim, keys_end, tokens, 3 * width, dim, padded, keys,
        by_descriptor,
    )  # fmt: skip
    v = _load_tile(
        qkv, qkv_tiles, begin, 2 * width + head * dim, keys_end, tokens, 3 * width, dim, padded,
        keys, by_descriptor,
    )  # fmt: skip
    s = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
    if masked:
        seen = _can_see(i[:, None], start[:, None], end[:, None], span_start[:, None], j[None, :])
        s = tl.where(seen, s, float("-inf"))
    p = tl.exp2(s - lse[:, None])
    slope = tl.dot(g, tl.trans(v))
    if has_dropout:
        slope = tl.where(
            make_keep_mask(query_hash[:, None], hash_keys(j, high_key)[None, :], below), slope, 0.0
        )
    return tl.dot((p * (slope - dot[:, None])).to(k.dtype), k)


@jit_without_specializing("tokens", "place", "below")
def _backward_queries(
    grad: tensor, grad_tiles: tensor, qkv: tensor, qkv_tiles: tensor, out: tensor, lse: tensor,
    dot: tensor, qkv_grad: tensor, parts: tensor, ranges: tensor, programs: tensor, seed: tensor,
    place: tensor, tokens: tensor, scale: tensor, dropout_scale: tensor, below: tensor,
    has_dropout: constexpr, heads: constexpr, dim: constexpr, padded: constexpr, tile: constexpr,
    keys: constexpr, by_descriptor: constexpr,
) -> None:  # fmt: skip
    """Compute the gradient of one tile of queries of one head, and write the dot products that
    `_backward_keys` reads; to run first.

        dot = rowsum(grad · out) (1 - share);  p = softmax probabilities from lse
        dq = Σ p (keep · grad vᵀ - dot) k / sqrt(D) / (1 - share)

    `grad` and `out` are [tokens, heads, dim], `dot` fp32 [heads, tokens], `qkv_grad` [tokens, 3,
    heads, dim], of which the queries' part is written, `parts` fp32 [P, 3, heads · dim] with sums
    over each program's tokens; the rest is as in `_attend_forward`, but `scale` is 1 / sqrt(dim).
    Equals autograd's gradient of kernel `padded`.
    """
    head = tl.program_id(1)
    first, stop = _find_program_tokens(programs)
    i = first + tl.arange(0, tile)
    mask = i < stop
    width: constexpr = heads * dim
    q = _load_rows(qkv + head * dim, i, mask, 3 * width, dim, padded)
    g = _load_rows(grad + head * dim, i, mask, width, dim, padded)
    dot_rows = (
        tl.sum(
            g.to(tl.float32)
            * _load_rows(out + head * dim, i, mask, width, dim, padded).to(tl.float32),
            1,
        )
        / dropout_scale
    )
    tl.store(dot + head * tokens + i, dot_rows, mask)
    lse_rows = tl.load(lse + head * tokens + i, mask, 0.0)
    start, end = tl.load(ranges + i, mask, 0), tl.load(ranges + tokens + i, mask, 0)
    span_start = tl.load(ranges + 2 * tokens + i, mask, tokens)
    low_key, high_key = make_dropout_keys(seed, place)
    query_hash = hash_queries(i, head, heads, low_key)
    back = tl.zeros([tile, padded], tl.float32)
    lowest, full_end, keys_end = _find_key_range(ranges, tokens, first, stop, tile, keys)
    for begin in range(lowest, full_end, keys):
        back += _compute_query_gradient_tile(
            q, g, qkv, qkv_tiles, head, tokens, begin, keys_end, i, start, end, span_start,
            query_hash, high_key, lse_rows, dot_rows, scale, below, False, has_dropout, width, dim,
            padded, keys, by_descriptor,
        )  # fmt: skip
    for begin in range(full_end, keys_end, keys):
        back += _compute_query_gradient_tile(
            q, g, qkv, qkv_tiles, head, tokens, begin, keys_end, i, start, end, span_start,
            query_hash, high_key, lse_rows, dot_rows, scale, below, True, has_dropout, width, dim,
            padded, keys, by_descriptor,
        )  # fmt: skip
    _store_gradient(
        parts, qkv_grad, back * (scale * dropout_scale), 0, i, mask, head, width, dim, padded
    )


@jit_without_specializing()
def _add_key_gradients_tile(
    k: tensor, v: tensor, grad: tensor, grad_tiles: tensor, qkv: tensor, qkv_tiles: tensor,
    lse: tensor, dot: tensor, ranges: tensor, begin: tensor, queries_end: tensor, j: tensor,
    key_hash: tensor, low_key: tensor, head: tensor, tokens: tensor, scale: tensor, below: tensor,
    k_sum: tensor, v_sum: tensor, masked: constexpr, has_dropout: constexpr, heads: constexpr,
    dim: constexpr, padded: constexpr, queries: constexpr, by_descriptor: constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Add what the tile of `queries` queries from `begin` on contributes to the gradients of keys
    `j` and their values, and return both sums, `k_sum` and `v_sum`, fp32 [tile, padded] each.

        v_sum += keep · p g;  k_sum += p (keep · g vᵀ - dot) q

    The factors 1 / sqrt(D) (of keys) and 1 / (1 - share) are left to the caller. `k` and `v` are
    [tile, padded]; q, g, lse (base 2) and dot are read from memory up to query `queries_end`. If
    `masked`, a pair counts only if `_can_see` says so, otherwise all do; `keep` is false for pairs
    whose hash is less than `below`.
    """
    i = begin + tl.arange(0, queries)
    query_mask = i < queries_end
    width: constexpr = heads * dim
    q = _load_tile(
        qkv, qkv_tiles, begin, head * dim, queries_end, tokens, 3 * width, dim, padded, queries,
        by_descriptor,
    )  # fmt: skip
    g = _load_tile(
        grad, grad_tiles, begin, head * dim, queries_end, tokens, width, dim, padded, queries,
        by_descriptor,
    )  # fmt: skip
    offsets = head * tokens + i
    lse_rows, dot_rows = (
        tl.load(lse + offsets, query_mask, 0.0),
        tl.load(dot + offsets, query_mask, 0.0),
    )
    s = tl.dot(k, tl.trans(q)) * (scale * 1.4426950408889634)
    if masked:
        start, end = tl.load(ranges + i, query_mask, 0), tl.load(ranges + tokens + i, query_mask, 0)
        span_start = tl.load(ranges + 2 * tokens + i, query_mask, tokens)
        seen = _can_see(i[None, :], start[None, :], end[None, :], span_start[None, :], j[:, None])
        s = tl.where(seen, s, float("-inf"))
    p = tl.exp2(s - lse_rows[None, :])
    slope = tl.dot(v, tl.trans(g))
    kept_p = p
    if has_dropout:
        keep = make_keep_mask(
            hash_queries(i, head, heads, low_key)[None, :], key_hash[:, None], below
        )
        kept_p = tl.where(keep, p, 0.0)
        slope = tl.where(keep, slope, 0.0)
    v_sum += tl.dot(kept_p.to(g.dtype), g)
    k_sum += tl.dot((p * (slope - dot_rows[None, :])).to(q.dtype), q)
    return k_sum, v_sum


@jit_without_specializing("tokens", "place", "below")
def _backward_keys(
    grad: tensor, grad_tiles: tensor, qkv: tensor, qkv_tiles: tensor, out: tensor, lse: tensor,
    dot: tensor, qkv_grad: tensor, parts: tensor, ranges: tensor, programs: tensor, seed: tensor,
    place: tensor, tokens: tensor, scale: tensor, dropout_scale: tensor, below: tensor,
    has_dropout: constexpr, heads: constexpr, dim: constexpr, padded: constexpr, tile: constexpr,
    queries: constexpr, by_descriptor: constexpr,
) -> None:  # fmt: skip
    """Compute the gradients of one tile of keys and values of one head; runs after
    `_backward_queries`, whose `dot` it reads.

        dv = Σ keep · p grad / (1 - share)
        dk = Σ p (keep · grad vᵀ - dot) q / sqrt(D) / (1 - share)

    The sums are over the queries that see a key: of a context's key all tokens of the row, of a
    span's key itself and later tokens of the span. Written are the keys' and values' parts of
    `qkv_grad` and of `parts`. Arguments are as in `_backward_queries`; `queries` queries are read
    at a time.
    """
    head = tl.program_id(1)
    first, stop = _find_program_tokens(programs)
    j = first + tl.arange(0, tile)
    mask = j < stop
    width: constexpr = heads * dim
    head_base = qkv + head * dim
    k = _load_rows(head_base + width, j, mask, 3 * width, dim, padded)
    v = _load_rows(head_base + 2 * width, j, mask, 3 * width, dim, padded)
    low_key, high_key = make_dropout_keys(seed, place)
    key_hash = hash_keys(j, high_key)
    k_sum = tl.zeros([tile, padded], tl.float32)
    v_sum = tl.zeros([tile, padded], tl.float32)
    nonempty = first < stop
    start, end = tl.load(ranges + first, nonempty, 0), tl.load(ranges + tokens + first, nonempty, 0)
    queries_end = tl.where(nonempty, stop, 0)
    lowest = tl.where(first < end, start, first)
    inside = tl.minimum(first + tile, stop) <= end  # all keys are the context's
    full_end = tl.where(
        inside & nonempty, lowest + (queries_end - lowest) // queries * queries, lowest
    )
    for begin in range(lowest, full_end, queries):
        k_sum, v_sum = _add_key_gradients_tile(
            k, v, grad, grad_tiles, qkv, qkv_tiles, lse, dot, ranges, begin, queries_end, j,
            key_hash, low_key, head, tokens, scale, below, k_sum, v_sum, False, has_dropout, heads,
            dim, padded, queries, by_descriptor,
        )  # fmt: skip
    for begin in range(full_end, queries_end, queries):
        k_sum, v_sum = _add_key_gradients_tile(
            k, v, grad, grad_tiles, qkv, qkv_tiles, lse, dot, ranges, begin, queries_end, j,
            key_hash, low_key, head, tokens, scale, below, k_sum, v_sum, True, has_dropout, heads,
            dim, padded, queries, by_descriptor,
        )  # fmt: skip
    _store_gradient(
        parts, qkv_grad, k_sum * (scale * dropout_scale), 1, j, mask, head, width, dim, padded
    )
    _store_gradient(parts, qkv_grad, v_sum * dropout_scale, 2, j, mask, head, width, dim, padded)
