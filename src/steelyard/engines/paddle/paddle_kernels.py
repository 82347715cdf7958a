"""RMSNorm and attention for engine `paddle`: Paddle's fused kernels where its build has them and
they compute the right thing, else plain ones.

Whether a build has the RMSNorm kernel is found by running it once on a few numbers and comparing it
with the plain function.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.nn import functional as F
from paddle.nn.functional.flash_attention import flash_attn_unpadded

from steelyard.engines.paddle.paddle_batches import PaddleMicroBatch
from steelyard.errors import RequestError

Tensor = Any
ATTENTION = ("plain", "flash")
FLASH_DTYPES = ("float16", "bfloat16")  # what flash attention computes in
# largest relative error of a fused kernel against the plain function
TOLERANCES = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class PaddleKernels:
    """The kernels that a model of engine `paddle` uses, for matmuls in `dtype` (Paddle's name, such
    as `bfloat16`): `rms_norm(x, weight, eps)`, and `attend(q, k, v, micro)`, causal attention of
    [tokens, heads, D] inside each segment of a micro-batch. `names` says which were chosen:
    `rms_norm` fused or plain, `attention` flash or plain. Made by `choose_paddle_kernels`.
    """

    dtype: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, PaddleMicroBatch], Tensor]
    names: Mapping[str, str]  # for the record


def choose_paddle_kernels(attention: str, dtype: str, lacks: Mapping[str, str]) -> PaddleKernels:
    """Choose the kernels for a device and a dtype (Paddle's name). Fused RMSNorm is used if it runs
    on the device and equals the plain one there.

    `attention` is `tune.attention`: plain, flash, or auto, which is flash for 16-bit dtypes if the
    device has it, else plain. Any other value raises RequestError, as does flash with a dtype or
    device that has none. `lacks` maps what the device cannot do (`flash`) to the reason.
    """
    if attention not in ("auto", *ATTENTION):
        raise RequestError(
            f"tune.attention={attention!r} is not supported by engine paddle; allowed: auto,"
            f" {', '.join(ATTENTION)}"
        )
    if attention == "flash" and ("flash" in lacks or dtype not in FLASH_DTYPES):
        why = lacks.get(
            "flash", f"flash attention computes in {' and '.join(FLASH_DTYPES)}, not in {dtype}"
        )
        raise RequestError(f"tune.attention=flash: {why}; leave it out")
    rms_norm = (
        "fused"
        if _is_equal_to(fused_rms_norm, plain_rms_norm, *_make_norm_inputs(dtype))
        else "plain"
    )
    uses_flash = attention == "flash" or (
        attention == "auto" and dtype in FLASH_DTYPES and "flash" not in lacks
    )
    return PaddleKernels(
        dtype=dtype,
        rms_norm=fused_rms_norm if rms_norm == "fused" else plain_rms_norm,
        attend=flash_attention if uses_flash else plain_attention,
        names={"rms_norm": rms_norm, "attention": "flash" if uses_flash else "plain"},
    )


def _make_norm_inputs(dtype: str) -> tuple[Tensor, Tensor, float]:
    """Return the input [4, 8], weight [8], both of fixed numbers in `dtype`, and eps on which
    RMSNorm kernels are compared.
    """
    x = (paddle.arange(32, dtype="float32").reshape([4, 8]) - 11.0) / 7.0
    return x.astype(dtype), (paddle.arange(8, dtype="float32") / 5.0).astype(dtype), 1e-5


def _is_equal_to(
    kernel: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    eps: float,
) -> bool:
    """Return whether `kernel` exists in this build, and its output and gradients of x and weight
    (from a sum of squares) equal those of `plain` within the dtype's tolerance, relative to the
    largest element. False if one of them raises RuntimeError or NotImplementedError. Turns on
    gradients of `x` and `weight`.
    """
    x.stop_gradient = weight.stop_gradient = False
    results = []
    for function in (kernel, plain):
        try:
            out = function(x, weight, eps)
            (out.astype("float32").square().sum()).backward()
        except (RuntimeError, NotImplementedError):  # "the kernel is not registered"
            return False
        results.append([out.detach(), x.grad.detach().clone(), weight.grad.detach().clone()])
        x.clear_gradient(False)
        weight.clear_gradient(False)
    pairs = ((a.astype("float32"), b.astype("float32")) for a, b in zip(*results, strict=True))
    return all(
        float((a - b).abs().max() / b.abs().max()) <= TOLERANCES[x.dtype.name.lower()]
        for a, b in pairs
    )


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension by Paddle's fused kernel, which raises
    RuntimeError or NotImplementedError in a build without it.
    """
    out = F.rms_norm(x, [x.shape[-1]], weight, eps)
    return out[0] if isinstance(out, list | tuple) else out


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, in the weight's dtype; normalized in
    fp32, also under mixed precision. `eps` is added to the mean square.
    """
    with paddle.amp.auto_cast(False):
        wide = x.astype("float32")
        normed = wide * paddle.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return normed.astype(weight.dtype) * weight


def flash_attention(q: Tensor, k: Tensor, v: Tensor, micro: PaddleMicroBatch) -> Tensor:
    """Return causal attention inside each segment of packed q [tokens, heads, D], k and v [tokens,
    kv heads, D], by Paddle's flash attention without dropout; scores are divided by sqrt(D). The
    result has the shape of q. Segments are those of `micro`.
    """
    k, v = _repeat_kv_heads(q, k, v)
    longest, scale = max(micro.lens), q.shape[-1] ** -0.5
    return flash_attn_unpadded(
        q, k, v, micro.segment_starts, micro.segment_starts, longest, longest, scale, 0.0, True
    )[0]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, micro: PaddleMicroBatch) -> Tensor:
    """Compute the same as `flash_attention`, one segment of `micro` after the other, with all
    scores of a segment in memory and the softmax in fp32.
    """
    k, v = _repeat_kv_heads(q, k, v)
    parts = (
        [tensor.split(list(micro.lens)) for tensor in (q, k, v)]
        if len(micro.lens) > 1
        else [[q], [k], [v]]
    )
    return paddle.concat([_attend_segment(*tensor) for tensor in zip(*parts, strict=True)])


def _attend_segment(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention of one segment, [length, heads, D]; q, k and v have that shape too.
    Scores are divided by sqrt(D), the softmax is in fp32.
    """
    length = q.shape[0]
    scores = paddle.matmul(q.transpose([1, 0, 2]), k.transpose([1, 2, 0])) * q.shape[-1] ** -0.5
    causal_mask = paddle.triu(paddle.full([length, length], float("-inf"), scores.dtype), 1)
    with paddle.amp.auto_cast(False):
        weights = F.softmax((scores + causal_mask).astype("float32"), axis=-1).astype(v.dtype)
    return paddle.matmul(weights, v.transpose([1, 0, 2])).transpose([1, 0, 2])


def _repeat_kv_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v [tokens, kv heads, D] repeated along the heads, so that there is one of each
    for every head of q; unchanged if there are as many.
    """
    repeats = q.shape[1] // k.shape[1]
    return (
        (k, v)
        if repeats == 1
        else (k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1))
    )
