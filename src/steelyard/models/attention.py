"""Causal attention over packed rows: tokens of many sequences end to end, without padding between
them.

A kernel is an entry of `ATTENTION_KERNELS`, chosen by `tune.attention`. Every kernel takes q [Tq,
H, D], k and v [Tk, G, D] and a `PackedLayout`, and computes causal attention inside each row,
aligned at the row's end: the last query of a row sees all keys of that row, or with a window the
last `window` of them. Called by the blocks of llama.py, llama_fused.py and llama_fp8.py, and by
other engines' attention.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from steelyard.errors import RequestError
from steelyard.kernels import packed_attention
from steelyard.kernels.packed_attention import VisibleRanges
from steelyard.models.shapes import get_effective_window
from steelyard.models.tensors import DTYPES, make_offsets

ROW_MULTIPLE = 64  # rows of a layout of fixed size


@dataclass(frozen=True)
class PackedLayout:
    """Where the rows of a packed batch begin and end, on the device: cumulative lengths of queries
    (`cu_q`) and of keys (`cu_k`), int32 [rows + 1], with the longest row of each, or an upper bound
    of it (`max_q`, `max_k`).

    Both differ only where rows share a cached prefix: then a row has more keys than queries, and
    `gather`, int64 [Tk], is the index of each key in the cached prefix's keys followed by this
    batch's; None without a prefix. `visible_ranges(queries, window)` returns which keys each query
    sees, and caches that in `ranges_by_window`.
    """

    cu_q: Tensor  # int32 [rows + 1], on the device
    cu_k: Tensor
    max_q: int
    max_k: int
    # int64 [Tk]: index of each key in the cached prefix's keys followed by this batch's
    gather: Tensor | None = None
    ranges_by_window: dict[int | None, VisibleRanges] = field(
        default_factory=dict, repr=False, compare=False
    )

    def visible_ranges(self, queries: int, window: int | None) -> VisibleRanges:
        """Return which keys each query sees under a window (None: no window), for kernel `packed`;
        computed once per window and cached, so that all layers share it.
        """
        if window not in self.ranges_by_window:
            self.ranges_by_window[window] = packed_attention.visible_ranges(
                self.cu_q, self.cu_k, queries, window
            )
        return self.ranges_by_window[window]


PrefixCache = tuple[Tensor, Tensor]  # cached keys and values of one layer: [size, G, D] each


class CachedLayout(Protocol):
    """A layout of a batch whose keys and values lie in a cache, which `attend` reads and writes (a
    protocol); implemented by paged_attention.py's `PagedLayout`.
    """

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kernel: str,
        cache: PrefixCache | None,
        window: int | None,
    ) -> Tensor:
        """Add the new keys and values to a layer's cache, in place, and return the attention of the
        queries to all that they see, [T, H, D].
        """


def make_packed_layout(
    q_lens: list[int], k_lens: list[int] | None, device: torch.device, gather: Tensor | None = None
) -> PackedLayout:
    """Return the layout of rows with these lengths, with its tensors on the device; ValueError
    without rows. `k_lens` is given only where rows see more keys (a shared prefix) than they have
    queries; None: as many keys as queries. `gather` is the index of each key in the cached prefix's
    keys followed by this batch's; None if no prefix is cached.
    """
    keys = q_lens if k_lens is None else k_lens
    cu_q = make_offsets(q_lens, device)
    cu_k = cu_q if k_lens is None else make_offsets(keys, device)
    return PackedLayout(cu_q, cu_k, max(q_lens), max(keys), gather)


def make_fixed_size_layout(lens: list[int], longest: int, device: torch.device) -> PackedLayout:
    """Return the layout of rows of at most `longest` tokens, filled up with empty rows to a
    multiple of `ROW_MULTIPLE` rows and with `longest` as the maximum, so that a compiler sees few
    sizes.
    """
    count = -(-len(lens) // ROW_MULTIPLE) * ROW_MULTIPLE
    cu = make_offsets([*lens, *[0] * (count - len(lens))], device)
    return PackedLayout(cu, cu, longest, longest)


AttentionKernel = Callable[[Tensor, Tensor, Tensor, PackedLayout, int | None], Tensor]


def _attend_by_rows(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, window: int | None = None
) -> Tensor:
    """Compute causal attention [Tq, H, D] row by row through SDPA: for CPUs, and the plain meaning
    of every other kernel. Rows without queries are skipped. Copies the row lengths to the host,
    which waits for the device.
    """
    out = []
    q_ends, k_ends = layout.cu_q.tolist(), layout.cu_k.tolist()
    for i in range(len(q_ends) - 1):
        queries = slice(q_ends[i], q_ends[i + 1])
        keys = slice(k_ends[i], k_ends[i + 1])
        n, m = queries.stop - queries.start, keys.stop - keys.start
        if n == 0:
            continue
        mask = (
            None
            if n == m and get_effective_window(window, m) is None
            else _make_mask(n, m, window, q.device)
        )
        row_out = F.scaled_dot_product_attention(
            q[queries].transpose(0, 1)[None],
            k[keys].transpose(0, 1)[None],
            v[keys].transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        out.append(row_out[0].transpose(0, 1))
    return torch.cat(out)


def _make_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return a boolean mask [queries, keys] that is True where a query sees a key: causal, aligned
    at the end (the last query sees the last key), and limited to the last `window` keys, the
    query's own included, unless that is None.
    """
    diagonal = keys - queries
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal)
    return mask if window is None else mask.triu(diagonal - window + 1)


def _needs_gradient(q: Tensor) -> bool:
    """Return whether gradients will be computed, so that a kernel must keep its log-sum-exp for the
    backward pass.
    """
    return torch.is_grad_enabled() and q.requires_grad


def _attend_by_flash(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, window: int | None = None
) -> Tensor:
    """Compute causal attention [Tq, H, D] over packed rows by torch's flash attention (16-bit
    types), with a window if given.
    """
    offsets = layout.cu_q, layout.cu_k, layout.max_q, layout.max_k
    window_arguments = (
        {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    )
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, *offsets, 0.0, True, False, **window_arguments
    )[0]
    return out


def _attend_by_efficient(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, window: int | None = None
) -> Tensor:
    """Compute causal attention [Tq, H, D] by torch's memory-efficient kernel, the only fused one
    that takes fp32; keys and values are repeated for each query head, because it has no grouped
    heads. The window is ignored: `_run_kernel` refuses one.
    """
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    causal_from_bottom_right = 2
    offsets = layout.cu_q, layout.cu_k, layout.max_q, layout.max_k
    out: Tensor = torch.ops.aten._efficient_attention_forward(
        q[None], k[None], v[None], None, *offsets, 0.0, causal_from_bottom_right, _needs_gradient(q)
    )[0]
    return out[0]


def _attend_by_cudnn(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, window: int | None = None
) -> Tensor:
    """Compute causal attention [Tq, H, D] by cuDNN, whose causal mask is aligned at the start of a
    row: right only for rows without a shared prefix. The window is ignored: `_run_kernel` refuses
    one.
    """
    offsets = layout.cu_q, layout.cu_k, layout.max_q, layout.max_k
    out: Tensor = torch.ops.aten._cudnn_attention_forward(
        q, k, v, None, *offsets, _needs_gradient(q), 0.0, True, False
    )[0]
    return out


def _attend_by_packed(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, window: int | None = None
) -> Tensor:
    """Compute causal attention [Tq, H, D] over packed rows, with a window if given, by this
    package's Triton kernel; see `triton_attend_packed_rows` for what it refuses. The visible ranges
    are cached in the layout.
    """
    return packed_attention.triton_attend_packed_rows(
        q, k, v, layout.visible_ranges(len(q), window)
    )


ATTENTION_KERNELS: dict[str, AttentionKernel] = {
    "rows": _attend_by_rows,
    "flash": _attend_by_flash,
    "efficient": _attend_by_efficient,
    "cudnn": _attend_by_cudnn,
    "packed": _attend_by_packed,
}
# cuDNN's gradients of rows of several lengths are wrong or NaN (torch 2.11, cuDNN 9, one H200);
# its forward is right.
FORWARD_ONLY_KERNELS = ("cudnn",)
# Torch passes no window to cuDNN, and the gradient of `efficient` ignores it (torch 2.11 to 2.13).
WINDOW_KERNELS = ("flash", "packed", "rows")


def check_attention_kernel(kernel: str, trains: bool, *others: str) -> str:
    """Return `kernel` if it is `auto`, one of `others` (the engine's own kernels) or one of
    `ATTENTION_KERNELS`; raise RequestError otherwise, and with `trains` also for kernels whose
    gradients are wrong (`cudnn`).
    """
    allowed = (
        "auto",
        *others,
        *sorted(
            name for name in ATTENTION_KERNELS if not (trains and name in FORWARD_ONLY_KERNELS)
        ),
    )
    if kernel in allowed:
        return kernel
    why = (
        "has wrong gradients for rows of different lengths"
        if kernel in ATTENTION_KERNELS
        else "is not known"
    )
    raise RequestError(f"tune.attention={kernel!r} {why}; allowed: {', '.join(allowed)}")


def choose_fastest_kernel(device: Any, dtype: str, dim: int, shared: bool = False) -> str:
    """Return the name of the fastest attention kernel on an accelerator's device (with `attention`
    and `torch_device`) for weights of type `dtype` (`bf16`, ...) and heads of `dim` elements; with
    `shared`, of those that support shared prefixes.

    It is the accelerator's own choice, `device.attention(dtype, shared)`, except that `packed`
    replaces `flash` where it runs. Raises KeyError for types other than fp32, fp16 and bf16.
    """
    kernel: str = device.attention(dtype, shared)
    packed_runs = packed_attention.is_supported(device.torch_device, DTYPES[dtype], dim)
    return "packed" if kernel == "flash" and packed_runs else kernel


def choose_windowed_kernel(kernel: str, window: int | None, longest: int, requested: str) -> str:
    """Return `kernel`, or `rows` in its place if the user asked for `auto` and the model's window
    is shorter than `longest` tokens and `kernel` has no windows. Raises RequestError if the user
    named such a kernel.
    """
    if get_effective_window(window, longest) is None or kernel in WINDOW_KERNELS:
        return kernel
    if requested == "auto":
        return "rows"
    raise RequestError(
        f"tune.attention={kernel!r} supports no window, and the model's window of {window} tokens"
        f" is shorter than rows of {longest} tokens; allowed: auto, {', '.join(WINDOW_KERNELS)}"
    )


@torch.library.custom_op("steelyard::packed_attention", mutates_args=())
def _packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    gather: Tensor | None,
    prefix_k: Tensor | None,
    prefix_v: Tensor | None,
    kernel: str,
    window: int | None,
) -> Tensor:
    """Compute `_run_kernel` as a custom op, so that torch.compile does not trace into the kernels;
    the result [Tq, H, D] is contiguous. `cu_q` to `gather` are the fields of a `PackedLayout`,
    `prefix_k` and `prefix_v` the cached keys and values (both or none).
    """
    prefix = None if prefix_k is None or prefix_v is None else (prefix_k, prefix_v)
    return _run_kernel(
        q, k, v, PackedLayout(cu_q, cu_k, max_q, max_k, gather), kernel, prefix, window
    ).contiguous()


@_packed_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    gather: Tensor | None,
    prefix_k: Tensor | None,
    prefix_v: Tensor | None,
    kernel: str,
    window: int | None,
) -> Tensor:
    """Return an empty tensor of the shape of q: the custom op's result for tracing."""
    return q.new_empty(q.shape)


def attend_packed_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedLayout | CachedLayout,
    kernel: str,
    prefix: PrefixCache | None = None,
    window: int | None = None,
) -> Tensor:
    """Return attention of packed rows by the named kernel of `ATTENTION_KERNELS`, [Tq, H, D]; q is
    [Tq, H, D] or by key group, [Tq, G, H / G, D], k and v are [Tk, G, D]. A `CachedLayout` computes
    it by itself, with `prefix` as the layer's cache.

    `prefix` holds the cached keys and values of shared prefixes, read only if the layout has
    `gather`; ValueError is raised if it is missing then, if the kernel is unknown, or if it has no
    windows and the window is shorter than the longest row. Prefixes are copied in front of each row
    that sees them, so that sums are in the order of a row computed whole: both divisions get
    bit-identical attention from a kernel that treats rows alike. Inside torch.compile without
    gradients it calls the custom op.
    """
    if not isinstance(layout, PackedLayout):
        return layout.attend(q, k, v, kernel, prefix, window)
    if layout.gather is not None and prefix is None:
        raise ValueError("a layout with shared prefixes needs their cached keys and values")
    used_prefix = prefix if layout.gather is not None else None
    # inside torch.compile, and no gradients
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        offsets = layout.cu_q, layout.cu_k, layout.max_q, layout.max_k
        cached = used_prefix or (None, None)
        out: Tensor = torch.ops.steelyard.packed_attention(
            q, k, v, *offsets, layout.gather, *cached, kernel, window
        )
        return out
    return _run_kernel(q, k, v, layout, kernel, used_prefix, window)


def _run_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedLayout,
    kernel: str,
    prefix: PrefixCache | None,
    window: int | None,
) -> Tensor:
    """Put cached prefixes before the rows' keys and values, as `layout.gather` says, call the
    kernel and return [Tq, H, D]; no custom op, which would hide the operations from a FLOP counter.

    A window that is not shorter than the longest row is not passed on; raises ValueError if the
    kernel is unknown, or if a window is needed and it has none.
    """
    if kernel not in ATTENTION_KERNELS:
        raise ValueError(f"attention kernel {kernel!r}; allowed: {', '.join(ATTENTION_KERNELS)}")
    if layout.gather is not None and prefix is not None:
        k, v = (
            torch.cat((cached, new)).index_select(0, layout.gather)
            for cached, new in zip(prefix, (k, v), strict=True)
        )
    q = q if q.dim() == 3 or kernel == "packed" else q.flatten(1, 2)
    window = get_effective_window(window, layout.max_k)
    if window is not None and kernel not in WINDOW_KERNELS:
        raise ValueError(f"kernel {kernel!r} supports no window")
    return ATTENTION_KERNELS[kernel](q, k, v, layout, window)
