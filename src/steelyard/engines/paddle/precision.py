"""Paddle's O2: which type it computes in, and the proof that it really does. Knows Paddle's names for types, and not Paddle.

O2 casts the model's parameters to 16 bit, and with them their gradients; the optimizer keeps fp32 master weights and moments.
Where it cannot (a CPU), it leaves all in fp32 and says nothing: so types are looked at, and never taken for granted.
"""

from collections.abc import Mapping

from steelyard.case.precision import Precision

DTYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # by what matmuls run in
FP32 = "float32"
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def level(precision: Precision) -> str | None:
    """Paddle's level of mixed precision; None: everything in fp32."""
    return None if DTYPES[precision.matmul] == FP32 else "O2"


def short(types: set[str]) -> str:
    """Names of types as records of all engines have them."""
    return "/".join(sorted(SHORT.get(name, name) for name in types))


def check(precision: Precision, found: Mapping[str, set[str]]) -> None:
    """Whether tensors have the types that a precision says. `found` holds those of `parameters`, `gradients`, `logits` and
    `states` (master weights and moments), as Paddle names them; what is not there yet is left out."""
    computed = DTYPES[precision.matmul]
    wanted = {"parameters": computed, "gradients": computed, "logits": computed, "states": FP32}
    for name, types in found.items():
        if types - {wanted[name]}:
            raise RuntimeError(
                f"precision {precision.name}: {name} must be {wanted[name]}, and Paddle made them {', '.join(sorted(types))}"
            )
