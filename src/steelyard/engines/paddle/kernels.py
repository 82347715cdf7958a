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

from steelyard.engines.paddle.batches import MicroBatch
from steelyard.errors import RequestError

Tensor = Any
ATTENTION = ("plain", "flash")
NARROW = ("float16", "bfloat16")  # what flash attention computes in
# how far a kernel may be from its plain meaning
APART = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Kernels:
    """The kernels that a model uses, for matmuls in `dtype` (Paddle's name of it). `names` says for
    the record which were chosen.
    """

    dtype: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, MicroBatch], Tensor]
    names: Mapping[str, str]  # for the record


def choose(asked: str, dtype: str, lacks: Mapping[str, str]) -> Kernels:
    """Choose the kernels for a device and a dtype. RMSNorm is tried on the device to decide.

    `attention` is `tune.attention`: auto, plain or flash; any other value raises RequestError, as
    does flash with a dtype or device that has none. `lacks` maps what the device cannot do to the
    reason.
    """
    if asked not in ("auto", *ATTENTION):
        raise RequestError(
            f"tune.attention={asked!r} is not supported by engine paddle; allowed: auto,"
            f" {', '.join(ATTENTION)}"
        )
    if asked == "flash" and ("flash" in lacks or dtype not in NARROW):
        why = lacks.get(
            "flash", f"flash attention computes in {' and '.join(NARROW)}, not in {dtype}"
        )
        raise RequestError(f"tune.attention=flash: {why}; leave it out")
    norm = "fused" if _agrees(fused_rms_norm, plain_rms_norm, *_norm_numbers(dtype)) else "plain"
    flash = asked == "flash" or (asked == "auto" and dtype in NARROW and "flash" not in lacks)
    return Kernels(
        dtype=dtype,
        rms_norm=fused_rms_norm if norm == "fused" else plain_rms_norm,
        attend=flash_attention if flash else plain_attention,
        names={"rms_norm": norm, "attention": "flash" if flash else "plain"},
    )


def _norm_numbers(dtype: str) -> tuple[Tensor, Tensor, float]:
    """Return the input [4, 8], weight [8] and eps on which RMSNorm kernels are compared."""
    x = (paddle.arange(32, dtype="float32").reshape([4, 8]) - 11.0) / 7.0
    return x.astype(dtype), (paddle.arange(8, dtype="float32") / 5.0).astype(dtype), 1e-5


def _agrees(
    kernel: Callable[..., Tensor],
    meaning: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    eps: float,
) -> bool:
    """Return whether `kernel` exists in this build and its output and gradients equal those of
    `plain` within the dtype's tolerance. False if it raises.
    """
    x.stop_gradient = weight.stop_gradient = False
    found = []
    for one in (kernel, meaning):
        try:
            out = one(x, weight, eps)
            (out.astype("float32").square().sum()).backward()
        except (RuntimeError, NotImplementedError):  # "the kernel is not registered"
            return False
        found.append([out.detach(), x.grad.detach().clone(), weight.grad.detach().clone()])
        x.clear_gradient(False)
        weight.clear_gradient(False)
    pairs = ((a.astype("float32"), b.astype("float32")) for a, b in zip(*found, strict=True))
    return all(
        float((a - b).abs().max() / b.abs().max()) <= APART[x.dtype.name.lower()] for a, b in pairs
    )


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension by Paddle's fused kernel, which raises in
    a build without it.
    """
    out = F.rms_norm(x, [x.shape[-1]], weight, eps)
    return out[0] if isinstance(out, list | tuple) else out


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, normalized in fp32 even under mixed
    precision, in the weight's dtype.
    """
    with paddle.amp.auto_cast(False):
        wide = x.astype("float32")
        normed = wide * paddle.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return normed.astype(weight.dtype) * weight


def flash_attention(q: Tensor, k: Tensor, v: Tensor, micro: MicroBatch) -> Tensor:
    """Return causal attention inside each segment of packed q [tokens, heads, D], k and v [tokens,
    kv heads, D], by Paddle's flash attention. The result has the shape of q.
    """
    k, v = _repeated(q, k, v)
    longest, scale = max(micro.lens), q.shape[-1] ** -0.5
    return flash_attn_unpadded(
        q, k, v, micro.borders, micro.borders, longest, longest, scale, 0.0, True
    )[0]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, micro: MicroBatch) -> Tensor:
    """Compute the same as `flash_attention`, one segment after the other, with all scores of a
    segment in memory and the softmax in fp32.
    """
    k, v = _repeated(q, k, v)
    parts = (
        [one.split(list(micro.lens)) for one in (q, k, v)]
        if len(micro.lens) > 1
        else [[q], [k], [v]]
    )
    return paddle.concat([_segment(*one) for one in zip(*parts, strict=True)])


def _segment(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention of one segment, [length, heads, D] each."""
    length = q.shape[0]
    scores = paddle.matmul(q.transpose([1, 0, 2]), k.transpose([1, 2, 0])) * q.shape[-1] ** -0.5
    hidden = paddle.triu(paddle.full([length, length], float("-inf"), scores.dtype), 1)
    with paddle.amp.auto_cast(False):
        weights = F.softmax((scores + hidden).astype("float32"), axis=-1).astype(v.dtype)
    return paddle.matmul(weights, v.transpose([1, 0, 2])).transpose([1, 0, 2])


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values repeated so that there is one of each for every query head."""
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))
